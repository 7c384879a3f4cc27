"""Statistics of the router's scores for the meter: sums, histograms, swaps, samples. No communication.

    Routing -> add_spread, add_scores, add_swaps, ... -> rows of the meter's stacked sum

Nothing here waits for a device. What is taken in every step is one numba pass over [T, E] on CPU and torch
operations elsewhere: twins, and a test holds them equal. The rare ones are torch operations everywhere. All
add into float64, exact to 2^53.
"""

from functools import lru_cache

import numpy as np
import torch

from moe.kernels import kernels
from routing import Routing

_STEPS = 8  # bins in an octave: the three upper bits of a float32's mantissa
_LOW_OCTAVES, _HIGH_OCTAVES = 11, 4
NUM_BINS = 1 + _STEPS * (_LOW_OCTAVES + _HIGH_OCTAVES) + 1
_MARGIN_OCTAVES = 14
_MARGIN_SIDE = 1 + _STEPS * _MARGIN_OCTAVES  # bins of one sign
NUM_MARGIN_BINS = 2 * _MARGIN_SIDE
# upper bits of 2^-14 as a float64 has them, less one: sizes below it are in bin 0
_LOWEST_MARGIN = (int(np.float64(0.5**_MARGIN_OCTAVES).view(np.int64)) >> 49) - 1


def score_edges() -> np.ndarray:
    """Edges of the score histogram's bins, [NUM_BINS + 1] float64 from 0 to 1; a bin holds its lower edge.

    Fixed, and all float32 numbers: 8 equal bins in every octave of s up to 1/2 and of 1 - s beyond it, so a
    bin is at most 1/8 as wide as min(s, 1 - s); the first is [0, 2^-12), the last [1 - 2^-5, 1]. A softmax
    over E <= 256 experts has its K/E-quantile at 1/E >= 2^-8 or above, 2^-12 is far below a bias that could
    matter there, and sigmoid scores use both ends.
    """
    low = _octaves(_LOW_OCTAVES)
    high = 1.0 - _octaves(_HIGH_OCTAVES)[::-1]
    return np.concatenate([[0.0], low, [0.5], high, [1.0]])


def _octaves(number: int) -> np.ndarray:
    """Lower edges of the bins in the octaves just below 1/2, ascending."""
    starts = 0.5 ** np.arange(number + 1, 1, -1)
    return (starts[:, None] * (1 + np.arange(_STEPS) / _STEPS)).reshape(-1)


def margin_edges() -> np.ndarray:
    """Edges of the margin histogram's bins, [NUM_MARGIN_BINS + 1] float64 from -1 to 1, with one at 0.

    8 equal bins in every octave of |m| from 2^-14 to 1, and [0, 2^-14) beside 0 on both sides. A bin holds
    the edge that is nearer to 0; the outermost two hold also what lies beyond them, which takes a bias that
    differs between experts by more than the scores do.
    """
    side = np.concatenate([2 * _octaves(_MARGIN_OCTAVES), [1.0]])
    return np.concatenate([-side[::-1], [0.0], side])


def score_quantile(count_B: np.ndarray, share: float) -> np.ndarray:
    """The score below which a share of the tokens lies, spread evenly within a bin.

    count_B: [..., NUM_BINS] histogram;  share: 0 to 1, say 1 - K/E.   Returns [...] float64, off by less than
    the width of the bin; NaN where nothing was counted.   Raises ValueError for another share.

    >>> count_B = np.zeros(NUM_BINS); count_B[1] = 4  # [2^-12, 2^-12 * 9/8)
    >>> float(score_quantile(count_B, 0.5) * 2**12)
    1.0625
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} is out of 0..1; 0.5 is the median")
    edges = score_edges()
    upto = np.cumsum(count_B, axis=-1, dtype=np.float64)
    wanted = share * upto[..., -1:]
    index = np.minimum((upto < wanted).sum(axis=-1, keepdims=True), NUM_BINS - 1)
    inside = np.take_along_axis(np.asarray(count_B, np.float64), index, axis=-1)
    before = np.take_along_axis(upto, index, axis=-1) - inside
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(inside > 0, (wanted - before) / inside, 0.0)
    value = edges[index] + part * (edges[index + 1] - edges[index])
    return np.where(upto[..., -1:] > 0, value, np.nan)[..., 0]


def add_spread(routing: Routing, sums_2: torch.Tensor) -> None:
    """Add what says how far the batch's valid tokens tell the experts apart, in place.

    sums_2: [2] float64: the squares of the logits, less their mean over the experts of the token (a part
    common to all means nothing to a softmax); the largest score over the sum of the scores, which for a
    softmax is its probability (0 for a token whose scores have all underflowed).
    """
    if sums_2.device.type != "cpu":
        return add_spread_torch(routing, sums_2)
    scores_TE, logits_TE = routing.scores_TE.detach().contiguous(), routing.logits_TE.detach().contiguous()
    if scores_TE.shape[0]:
        best_T = scores_TE.amax(dim=1).numpy()  # a maximum does not become vector code there
        kernels().add_spread(scores_TE.numpy(), logits_TE.numpy(), best_T, _valid(routing), sums_2.numpy())
    return None


def add_spread_torch(routing: Routing, sums_2: torch.Tensor) -> None:
    """Twin of `add_spread`."""
    scores_TE, logits_TE = routing.scores_TE.detach(), routing.logits_TE.detach()
    squares_T = (logits_TE - logits_TE.mean(dim=1, keepdim=True)).square().sum(dim=1)
    tiny = torch.finfo(scores_TE.dtype).tiny
    share_T = scores_TE.amax(dim=1) / scores_TE.sum(dim=1).clamp(min=tiny)
    both_2T = torch.stack([squares_T, share_T])
    if routing.token_mask_T is not None:
        both_2T = torch.where(routing.token_mask_T, both_2T, 0.0)
    sums_2 += both_2T.sum(dim=1, dtype=sums_2.dtype)


def _valid(routing: Routing) -> np.ndarray:
    """The mask of the tokens as a kernel takes it: of length 0 where all are valid."""
    mask_T = routing.token_mask_T
    return np.empty(0, np.bool_) if mask_T is None else mask_T.contiguous().numpy()


def add_scores(routing: Routing, sum_E: torch.Tensor, count_EB: torch.Tensor) -> None:
    """Add the scores (without bias) of the batch's valid tokens to their sums and histograms, in place.

    sum_E: [E] float64;  count_EB: [E, NUM_BINS] float64, bins of `score_edges` for scores rounded to float32.
    """
    if sum_E.device.type != "cpu":
        return add_scores_torch(routing, sum_E, count_EB)
    scores, valid_T = routing.scores_TE.detach().contiguous().numpy(), _valid(routing)
    if scores.shape[0] == 0:
        return None
    low_base, high_base = (_first_bits(n) - 1 for n in (_LOW_OCTAVES, _HIGH_OCTAVES))
    kernels().add_scores(
        scores, valid_T, np.int32(low_base), np.int32(high_base), sum_E.numpy(), count_EB.numpy()
    )
    return None


def _first_bits(octaves: int) -> int:
    """Sign, exponent and three upper bits of the mantissa of the lowest edge, as a float32 has them."""
    return int(np.float32(0.5 ** (octaves + 1)).view(np.int32) >> 20)


def add_scores_torch(routing: Routing, sum_E: torch.Tensor, count_EB: torch.Tensor) -> None:
    """Twin of `add_scores`."""
    scores_TE, mask_T = routing.scores_TE.detach(), routing.token_mask_T
    num_experts, num_bins = count_EB.shape
    valid_TE = torch.ones_like(scores_TE, dtype=sum_E.dtype)
    if mask_T is not None:
        valid_TE = mask_T[:, None].expand_as(scores_TE).to(sum_E.dtype)
        scores_TE = torch.where(mask_T[:, None], scores_TE, 0.0)
    sum_E += scores_TE.sum(dim=0, dtype=sum_E.dtype)
    bin_TE = torch.bucketize(scores_TE.float(), _inner_edges(scores_TE.device), right=True)
    cell_TE = bin_TE + num_bins * torch.arange(num_experts, device=scores_TE.device)
    # sums of ones are exact in any order, so the atomics of a scatter do not show
    count_EB.view(-1).scatter_add_(0, cell_TE.reshape(-1), valid_TE.reshape(-1))


@lru_cache(maxsize=8)
def _inner_edges(device: torch.device) -> torch.Tensor:
    """The edges between bins on a device, kept there: a copy from the host would wait for it each time."""
    return torch.tensor(score_edges()[1:-1].tolist(), device=device)


def add_swaps(
    routing: Routing, bias_E: torch.Tensor, delta: float, near_E: torch.Tensor, wide_E: torch.Tensor
) -> None:
    """Count the tokens whose selection a bias change of delta, or 2 delta, could change, in place.

    A token whose K-th expert is i and whose (K+1)-th is j, by score + bias, with a gap < delta counts once at
    i and once at j: near_E[i] = sum_j C_ij + C_ji, so that near_E / (2 T delta) is the diagonal of dn/db, the
    change of the experts' shares with the bias. Tokens that select every expert have no (K+1)-th.

    bias_E: [E] as the selection had it;  near_E, wide_E: [E] float64.   Raises ValueError where the number of
    choices varies: the gap is that of a plain top-k.
    """
    if routing.top_k == routing.num_experts:
        return
    weakest_T, best_T, gap_T = _swap_gaps(routing, bias_E, "swaps_every")
    # sums of ones are exact in any order here too
    for counts_E, limit in ((near_E, delta), (wide_E, 2 * delta)):
        hit_T = (gap_T < limit).to(counts_E.dtype)
        counts_E.scatter_add_(0, weakest_T, hit_T)
        counts_E.scatter_add_(0, best_T, hit_T)


def add_pairs(
    routing: Routing, bias_E: torch.Tensor, delta: float, near_EE: torch.Tensor, wide_EE: torch.Tensor
) -> None:
    """Count the same tokens by their pair in place: near_EE[i, j] = C_ij, K-th expert i and (K+1)-th j.

    near_EE, wide_EE: [E, E] float64; row sums + column sums are what `add_swaps` counts, and (C + C^T) / (2 T
    delta) is minus the Jacobian dn/db off its diagonal.   Raises ValueError as `add_swaps`.
    """
    if routing.top_k == routing.num_experts:
        return
    weakest_T, best_T, gap_T = _swap_gaps(routing, bias_E, "pairs_every")
    cell_T = weakest_T * routing.num_experts + best_T
    for counts_EE, limit in ((near_EE, delta), (wide_EE, 2 * delta)):
        counts_EE.view(-1).scatter_add_(0, cell_T, (gap_T < limit).to(counts_EE.dtype))


def _swap_gaps(
    routing: Routing, bias_E: torch.Tensor, setting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K-th and the (K+1)-th expert of each token by score + bias, and their gap, [T] each; the gap of
    padding is infinite."""
    chosen_TK, biased_TE = _chosen(routing, setting), _biased(routing, bias_E)
    weakest_T1 = chosen_TK[:, -1:]
    best = biased_TE.scatter(1, chosen_TK, -torch.inf).max(dim=1, keepdim=True)
    gap_T1 = biased_TE.gather(1, weakest_T1).double() - best.values.double()
    if routing.token_mask_T is not None:
        gap_T1 = torch.where(routing.token_mask_T[:, None], gap_T1, torch.inf)
    return weakest_T1[:, 0], best.indices[:, 0], gap_T1[:, 0]


def _chosen(routing: Routing, setting: str) -> torch.Tensor:
    """[T, K] experts of the tokens, best first; padding has 0.   Raises ValueError without such a K."""
    if routing.top_k is None:
        raise ValueError(
            f"swap counts and margins need K choices of every token (top_k); use LoadMeter({setting}=0)"
        )
    return routing.expert_N.view(routing.num_tokens, routing.top_k).clamp(min=0)


def _biased(routing: Routing, bias_E: torch.Tensor) -> torch.Tensor:
    """Score + bias [T, E] as the selection had it."""
    scores_TE = routing.scores_TE.detach()
    return scores_TE + bias_E.to(scores_TE.dtype)


def add_margins(routing: Routing, bias_E: torch.Tensor, count_EB: torch.Tensor) -> None:
    """Count the batch's valid tokens by their margin for every expert, in place.

    Margin: score + bias of the expert, less the K-th largest score + bias among the *other* experts: the
    (K+1)-th of all where the token selects it, the K-th where it does not. So it selects an expert whose
    margin is above 0, and of equals (margin 0) those of lower id: the side of a token is that of its
    selection, and the bins above 0 hold exactly the counts, those below all other tokens. A token that
    selects every expert is in the outermost bin.

    bias_E: [E] as the selection had it;  count_EB: [E, NUM_MARGIN_BINS] float64, bins of `margin_edges`.
    Raises ValueError where the number of choices varies.
    """
    if count_EB.device.type != "cpu":
        return add_margins_torch(routing, bias_E, count_EB)
    chosen_TK, biased_TE = _chosen(routing, "margins_every"), _biased(routing, bias_E)
    if routing.num_tokens:
        kernels().add_margins(
            biased_TE.contiguous().numpy(), chosen_TK.contiguous().numpy(), _valid(routing), _LOWEST_MARGIN,
            count_EB.numpy(),
        )  # fmt: skip
    return None


def add_margins_torch(routing: Routing, bias_E: torch.Tensor, count_EB: torch.Tensor) -> None:
    """Twin of `add_margins`."""
    chosen_TK, biased_TE = _chosen(routing, "margins_every"), _biased(routing, bias_E)
    if not routing.num_tokens:
        return
    chosen_TE = torch.zeros_like(biased_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)
    weakest_T1 = biased_TE.gather(1, chosen_TK).amin(dim=1, keepdim=True)
    best_T1 = biased_TE.masked_fill(chosen_TE, -torch.inf).amax(dim=1, keepdim=True)
    margin_TE = biased_TE.double() - torch.where(chosen_TE, best_T1, weakest_T1).double()
    size_TE = torch.where(chosen_TE, margin_TE, -margin_TE).clamp(min=0)
    bin_TE = torch.bucketize(size_TE, _margin_sizes(size_TE.device), right=True)
    bin_TE = torch.where(chosen_TE, _MARGIN_SIDE + bin_TE, _MARGIN_SIDE - 1 - bin_TE)
    cell_TE = bin_TE + NUM_MARGIN_BINS * torch.arange(routing.num_experts, device=size_TE.device)
    valid_TE = torch.ones_like(size_TE)
    if routing.token_mask_T is not None:  # whatever padding holds, it lies in some bin
        valid_TE = routing.token_mask_T[:, None].expand_as(size_TE).to(count_EB.dtype)
    count_EB.view(-1).scatter_add_(0, cell_TE.reshape(-1), valid_TE.reshape(-1))


@lru_cache(maxsize=8)
def _margin_sizes(device: torch.device) -> torch.Tensor:
    """The edges between the bins of one sign, by size, on a device."""
    return torch.tensor((2 * _octaves(_MARGIN_OCTAVES)).tolist(), dtype=torch.float64, device=device)


def add_sample(routing: Routing, rows_SE: torch.Tensor, taken_1: torch.Tensor) -> None:
    """Keep the scores (without bias) of the first S valid tokens of this batch, unless a batch before gave
    them.

    A batch of fewer valid tokens repeats them in turn; one that has none gives nothing.

    rows_SE: [S, E] float64 and taken_1: [1] float64, both 0 at the start of the step; taken_1 becomes 1 where
    the rows are there.
    """
    scores_TE, mask_T = routing.scores_TE.detach(), routing.token_mask_T
    num_tokens, device = scores_TE.shape[0], scores_TE.device
    if not num_tokens:
        return
    place_S = torch.arange(rows_SE.shape[0], device=device)
    if mask_T is None:
        index_S, there_1 = place_S % num_tokens, torch.ones(1, dtype=torch.bool, device=device)
    else:
        valid_1 = mask_T.sum(dim=0, keepdim=True)
        first_T = torch.argsort(~mask_T, stable=True)  # the valid ones, in their order
        index_S, there_1 = first_T[place_S % valid_1.clamp(min=1)], valid_1 > 0
    new_1 = there_1 & (taken_1 == 0)
    rows_SE.copy_(torch.where(new_1[:, None], scores_TE[index_S].to(rows_SE.dtype), rows_SE))
    taken_1.copy_(torch.maximum(taken_1, there_1.to(taken_1.dtype)))
