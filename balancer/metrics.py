"""Figures of merit of an expert load: each has one definition, here.

First in the flow of the balancer: everything else (monitor, controllers, dashboard, replay) calls these and
defines none of its own. Loads are counts of routed copies (or shares of them); the last axis holds what the
load is spread over (experts E or ranks G), all axes before it are kept as they are. A load of zero has no
balance: its figures are NaN, never "perfect", and averages leave it out.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Above this fair share the noise floor follows its asymptotic law (error below 0.2 %), see violation_floor.
_LARGE_FAIR_SHARE = 1e6


def checked_load(load: ArrayLike, name: str = "load") -> NDArray[np.float64]:
    """Return a load as float64, checked.

    load: [..., E] integer or real, copies or shares. name: what an error calls it. Returns [..., E] float64.
    Raises ValueError for a wrong type, no expert, or a negative or non-finite entry.
    """
    array = np.asarray(load)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has type {array.dtype}; a load is integer counts or real shares")
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {array.shape}; its last axis must hold at least one expert or rank"
        )
    result = array.astype(np.float64)
    bad = ~((result >= 0) & np.isfinite(result))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name}{list(where)}={result[where]} is not a load; every entry must be finite and 0 or more"
        )
    return result


def load_shares(load_XE: ArrayLike, name: str = "load") -> NDArray[np.float64]:
    """Return the shares of a load: every row divided by its sum.

    load_XE: [..., E] copies or shares. Returns [..., E] float64; a row of zero load is NaN.
    Raises ValueError as `checked_load` does.

    >>> load_shares([3, 1])
    array([0.75, 0.25])
    """
    load = checked_load(load_XE, name)
    return _ratio(load, load.sum(axis=-1, keepdims=True))


def balancedness(load_XG: ArrayLike) -> NDArray[np.float64]:
    """Return mean / max of the load over the last axis: the share of the time in which a rank is busy.

    load_XG: [..., G] copies that each rank (or expert) computes. Returns [...] float64 in [1/G, 1]: 1 at
    balance, 1/G when one has everything, NaN for zero load. Raises ValueError for a negative or non-finite
    load.

    >>> balancedness([[4, 4], [6, 2], [0, 0]])
    array([1.        , 0.66666667,        nan])
    """
    load = checked_load(load_XG)
    return _ratio(load.mean(axis=-1), load.max(axis=-1))


def mean_balancedness(load_XLG: ArrayLike) -> NDArray[np.float64]:
    """Return the mean over the layers of each layer's balancedness (mean form, for comparison with others).

    load_XLG: [..., L, G] copies. Returns [...] float64 in [1/G, 1], 1 at balance; layers of zero load are
    left out, NaN when all are. Raises ValueError for a bad load or a missing layer axis.

    >>> float(mean_balancedness([[4, 4], [6, 2], [0, 0]]))
    0.8333333333333333
    """
    per_layer = balancedness(_layered(load_XLG))
    defined = ~np.isnan(per_layer)
    total = np.where(defined, per_layer, 0.0).sum(axis=-1)
    return _ratio(total, defined.sum(axis=-1).astype(np.float64))


def sum_balancedness(load_XLG: ArrayLike) -> NDArray[np.float64]:
    """Return sum_l mean / sum_l max over the layers (sum form: time efficiency, layers run in series).

    load_XLG: [..., L, G] copies. Returns [...] float64 in [1/G, 1], 1 at balance; a layer of zero load takes
    no time and changes nothing, NaN when all are zero. Decisions use this form. Raises ValueError for a bad
    load or a missing layer axis.

    >>> float(sum_balancedness([[4, 4], [6, 2], [0, 0]]))
    0.8
    """
    load = _layered(load_XLG)
    return _ratio(load.mean(axis=-1).sum(axis=-1), load.max(axis=-1).sum(axis=-1))


def max_violation(load_XE: ArrayLike) -> NDArray[np.float64]:
    """Return MaxVio = max / mean - 1 of the load over the experts.

    load_XE: [..., E] copies. Returns [...] float64 in [0, E - 1]: 0 at exact balance, NaN for zero load. A
    balanced router still shows `violation_floor`: report the excess over it. Raises ValueError for a bad
    load.

    >>> max_violation([[4, 4], [6, 2]])
    array([0. , 0.5])
    """
    load = checked_load(load_XE)
    return _ratio(load.max(axis=-1), load.mean(axis=-1)) - 1.0


def violation_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Return the MaxVio that counting noise alone gives: E[max]/mean - 1 of a uniform multinomial.

    num_tokens: T tokens counted (of the whole batch that the counts cover). num_experts: E. top_k: K copies
    of a token. The N = T*K copies fall on E experts independently. Returns a float of 0 or more, 0 for one
    expert.

    E[max] = sum_m (1 - F(m)^E) with F the Poisson distribution of mean N/E: drawing N itself from a Poisson
    makes the experts independent and moves the maximum by (N' - N)/E, which is 0 in the mean. Against
    simulation it is within 2 % from N = 8 on (E 2 to 256), and a third low for a single copy. A token's K
    experts are distinct in truth, which lowers the noise by the factor sqrt((1 - K/E) / (1 - 1/E)): 7 % less
    at E 8, K 2. Counts that are over-dispersed phi times (`estimate_dispersion`) have a floor some sqrt(phi)
    times as high. Raises ValueError for a size below 1 or top_k > num_experts.

    >>> round(violation_floor(512, 8, 2), 2), round(violation_floor(512, 32, 4), 2)
    (0.13, 0.27)
    """
    for name, value in (("num_tokens", num_tokens), ("num_experts", num_experts), ("top_k", top_k)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} is more than num_experts={num_experts}; use at most {num_experts}")
    if num_experts == 1:
        return 0.0
    fair = num_tokens * top_k / num_experts
    counted = min(fair, _LARGE_FAIR_SHARE)
    floor = _expected_poisson_max(counted, num_experts) / counted - 1.0
    return floor * math.sqrt(counted / fair)


def normalized_entropy(load_XE: ArrayLike) -> NDArray[np.float64]:
    """Return h = -sum p ln p / ln E of the load shares p.

    load_XE: [..., E] copies or shares. Returns [...] float64 in [0, 1]: 1 at balance, 0 when one expert has
    everything, ln K / ln E when K experts share it evenly; NaN for zero load and for E = 1. Raises ValueError
    for a bad load.

    >>> normalized_entropy([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    array([1. , 0.5, 0. ])
    """
    entropy = _entropy(load_XE)
    num_experts = np.asarray(load_XE).shape[-1]
    return _ratio(entropy, np.full(entropy.shape, math.log(num_experts)))


def effective_experts(load_XE: ArrayLike) -> NDArray[np.float64]:
    """Return exp(-sum p ln p): how many evenly loaded experts would have the same entropy.

    load_XE: [..., E] copies or shares. Returns [...] float64 in [1, E]: E at balance, NaN for zero load.
    Raises ValueError for a bad load.

    >>> effective_experts([[1, 1, 1, 1], [1, 1, 0, 0]]).round(6)
    array([4., 2.])
    """
    return np.exp(_entropy(load_XE))


def dead_experts(
    window_WLE: ArrayLike, *, dead_frac: float = 0.01, min_fair_share: float = 100.0
) -> NDArray[np.float64]:
    """Return how many experts of each layer are dead: below `dead_frac` of the fair share over the window.

    window_WLE: [W, L, E] copies, summed here over the window, or [L, E] already summed. dead_frac: share of
    the fair share, in (0, 1); 0.01. min_fair_share: copies per expert that the window must hold; 100, so that
    chance alone leaves nobody below 1 %. Returns [L] float64: a whole number in [0, E - 1], 0 at balance; NaN
    for a layer whose fair share is below `min_fair_share`: the window is too short to tell, widen it. Raises
    ValueError for a bad load, another number of axes, or a bound out of range.

    >>> dead_experts([[500, 500, 1, 500], [3, 3, 0, 3]])
    array([ 1., nan])
    """
    if not 0 < dead_frac < 1:
        raise ValueError(f"dead_frac={dead_frac} must lie between 0 and 1; 0.01 is 1 % of the fair share")
    if not min_fair_share > 0:
        raise ValueError(f"min_fair_share={min_fair_share} must be more than 0 copies; 100 is a good value")
    window = checked_load(window_WLE, "window")
    if window.ndim not in (2, 3):
        raise ValueError(f"window has shape {window.shape}; expected [W, L, E], or [L, E] already summed")
    load_LE = window.sum(axis=0) if window.ndim == 3 else window
    fair_L = load_LE.mean(axis=-1)
    dead_L = (load_LE < dead_frac * fair_L[:, None]).sum(axis=-1)
    return np.where(fair_L >= min_fair_share, dead_L, np.nan)


def total_variation(p_XE: ArrayLike, q_XE: ArrayLike) -> NDArray[np.float64]:
    """Return TV(p, q) = 1/2 sum |p - q| of the load shares: the share of the copies that sit elsewhere.

    p_XE, q_XE: [..., E] copies or shares, each row normalised here; leading axes broadcast. Returns [...]
    float64 in [0, 1], 0 for equal shares, NaN where either load is zero. Raises ValueError for a bad load or
    different numbers of experts.

    >>> float(total_variation([1, 1], [30, 10]))
    0.25
    """
    p, q = load_shares(p_XE, "p"), load_shares(q_XE, "q")
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"p has {p.shape[-1]} experts but q has {q.shape[-1]}; both need the same experts")
    return 0.5 * np.abs(p - q).sum(axis=-1)


def moved_slots(before_XS: ArrayLike, after_XS: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Return how many slots of each layer must receive an expert that their rank does not hold now.

    before_XS, after_XS: [..., S] integer, expert in each slot, -1 = empty, slots contiguous by rank; leading
    axes broadcast. num_ranks: P, a divisor of S. Returns [...] int64 in [0, S]: 0 where no rank gets anything
    new (experts that only change slots within their rank, and slots that become empty, move nothing). In
    bytes: times the weights of an expert. Raises ValueError for unlike S, P that does not divide it, or
    entries that are no integers of -1 or more.

    >>> int(moved_slots([0, 1, 2, 3], [1, 0, 2, 0], 2))
    1
    """
    before, after = np.asarray(before_XS), np.asarray(after_XS)
    for name, slots in (("before", before), ("after", after)):
        if slots.dtype.kind not in "iu" or slots.ndim == 0 or (slots < -1).any():
            raise ValueError(f"{name} is {slots.dtype} {slots.shape}; expected experts [..., S], -1 = empty")
    num_slots = after.shape[-1]
    if before.shape[-1] != num_slots or num_ranks < 1 or num_slots % num_ranks:
        raise ValueError(
            f"{before.shape[-1]} slots before, {num_slots} after, num_ranks={num_ranks}: both need the same "
            "slots, as many on every rank"
        )
    held = before.reshape(*before.shape[:-1], num_ranks, 1, -1)
    wanted = after.reshape(*after.shape[:-1], num_ranks, -1)
    new = (wanted >= 0) & ~(wanted[..., None] == held).any(axis=-1)
    return new.sum(axis=(-2, -1), dtype=np.int64)


def rank_load(tokens_per_expert_LE: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Return the rows of each rank when experts sit at home: rank g holds experts g*E/P to (g+1)*E/P - 1.

    tokens_per_expert_LE: [..., E] integer copies. num_ranks: P, a divisor of E. Returns [..., P] int64.
    Raises ValueError for a bad load, counts that are not integers, or P that does not divide E.

    >>> rank_load([[1, 2, 3, 4]], 2)
    array([[3, 7]])
    """
    counts = np.asarray(tokens_per_expert_LE)
    checked_load(counts, "tokens_per_expert")
    if counts.dtype.kind not in "iu":
        raise ValueError(f"tokens_per_expert has type {counts.dtype}; rows of a rank are integer counts")
    num_experts = counts.shape[-1]
    if num_ranks < 1 or num_experts % num_ranks:
        divisors = [p for p in range(1, num_experts + 1) if num_experts % p == 0]
        nearest = sorted(divisors, key=lambda p: abs(p - num_ranks))[:2]
        raise ValueError(
            f"num_ranks={num_ranks} does not divide the {num_experts} experts; use "
            + " or ".join(str(p) for p in sorted(nearest))
        )
    grouped = counts.astype(np.int64).reshape(*counts.shape[:-1], num_ranks, num_experts // num_ranks)
    return grouped.sum(axis=-1, dtype=np.int64)


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return above / below, NaN (and no warning) where below is zero."""
    return above / np.where(below > 0, below, np.nan)


def _layered(load_XLG: ArrayLike) -> NDArray[np.float64]:
    load = checked_load(load_XLG)
    if load.ndim < 2:
        raise ValueError(f"load has shape {load.shape}; expected [..., L, G], one row for each layer")
    return load


def _entropy(load_XE: ArrayLike) -> NDArray[np.float64]:
    """Return -sum p ln p in nats, NaN for zero load; 0 ln 0 = 0."""
    p = load_shares(load_XE)
    # an entropy of zero stays +0.0: -(p ln p) of a single expert would be -0.0
    return 0.0 - (p * np.log(np.where(p == 0, 1.0, p))).sum(axis=-1)


def _expected_poisson_max(mean: float, num: int) -> float:
    """Return E[max] of `num` independent Poisson counts of one mean."""
    # beyond this range a tail weighs less than 1e-12 even over thousands of experts
    half_width = 10.0 * math.sqrt(mean) + 40.0
    low = max(0, math.floor(mean - half_width))
    m = np.arange(low, math.ceil(mean + half_width), dtype=np.float64)
    log_factorial = math.lgamma(low + 1) + np.concatenate([[0.0], np.cumsum(np.log(m[1:]))])
    cdf = np.cumsum(np.exp(m * math.log(mean) - mean - log_factorial))
    # the experts' maximum is above `low` for sure, hence counts for `low` whole units
    return low + float((1.0 - np.minimum(cdf, 1.0) ** num).sum())
