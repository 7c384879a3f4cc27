"""Statistics of the router's scores for the meter: sums, histograms, swap counts. No communication.

    Routing -> add_scores, add_swaps -> rows of the meter's stacked sum

Nothing here waits for a device. The histogram, which reads every score, is one numba pass over [T, E] on CPU
and torch operations elsewhere: twins, and a test holds them equal. All add into float64, exact to 2^53.
"""

from functools import lru_cache

import numpy as np
import torch

from moe.kernels import kernels
from routing import Routing

_STEPS = 8  # bins in an octave: the three upper bits of a float32's mantissa
_LOW_OCTAVES, _HIGH_OCTAVES = 11, 4
NUM_BINS = 1 + _STEPS * (_LOW_OCTAVES + _HIGH_OCTAVES) + 1


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


def add_scores(routing: Routing, sum_E: torch.Tensor, count_EB: torch.Tensor) -> None:
    """Add the scores (without bias) of the batch's valid tokens to their sums and histograms, in place.

    sum_E: [E] float64;  count_EB: [E, NUM_BINS] float64, bins of `score_edges` for scores rounded to float32.
    """
    if sum_E.device.type != "cpu":
        return add_scores_torch(routing, sum_E, count_EB)
    mask_T = routing.token_mask_T
    valid_T = np.empty(0, np.bool_) if mask_T is None else mask_T.contiguous().numpy()
    scores = routing.scores_TE.detach().contiguous().numpy()
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
    if routing.top_k is None:
        raise ValueError("swap counts need K choices of every token (top_k); use LoadMeter(swaps_every=0)")
    scores_TE = routing.scores_TE.detach()
    expert_TK = routing.expert_N.view(routing.num_tokens, routing.top_k)
    bias_E = bias_E.to(scores_TE.dtype)
    if not routing.num_tokens or routing.top_k == scores_TE.shape[1]:
        return
    chosen_TK = expert_TK.clamp(min=0)
    biased_TE = scores_TE + bias_E
    weakest_T1 = chosen_TK[:, -1:]
    best = biased_TE.scatter(1, chosen_TK, -torch.inf).max(dim=1, keepdim=True)
    gap_T1 = biased_TE.gather(1, weakest_T1).double() - best.values.double()
    routed_T1 = expert_TK[:, -1:] >= 0
    # sums of ones are exact in any order here too
    for counts_E, limit in ((near_E, delta), (wide_E, 2 * delta)):
        hit_T1 = (routed_T1 & (gap_T1 < limit)).to(counts_E.dtype)
        counts_E.scatter_add_(0, weakest_T1[:, 0], hit_T1[:, 0])
        counts_E.scatter_add_(0, best.indices[:, 0], hit_T1[:, 0])
