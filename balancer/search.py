"""Search: a placement changed in a few slots, until the exact split of every scenario is near an even load.

Between scenarios (`balancer/scenarios.py`) and a plan. The objective of a layer is

    (1 - beta) mean + beta CVaR      of peak / even load over the scenarios, peak: that of the best split
    + price * slots that end with another expert  + fetch price * replicas through the busiest port

(mean and CVaR: Rockafellar and Uryasev 2000; of changes that are as good, the one that takes a slot from the
lightest expert). A change is looked for where the minimum cut of the worst scenario says: a set of ranks that
holds more than it can pass on gets a replica outside for an expert that lives inside only, or, where slots
are free, such an expert is exchanged for a lighter one. The best change that pays is taken, until none pays.
The loops are in search_kernels.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bound import home_experts, sizes_of
from balancer.connect import checked_room, node_limits
from balancer.kernels import search_kernels
from balancer.moves import keep_slots
from balancer.placement_checks import check_placement, slot_table
from balancer.search_kernels import Options

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# scenarios are added up in float64, which counts one by one up to here
_MOST_COPIES = 2**50
# copies of a scenario that was given in shares or in very large counts
_SCALE = 2**32


class Searched(NamedTuple):
    """slots_LS [L, S] int64;  before_L, after_L [L] float64: objective without the price, 1 = every scenario
    is even;  scores_L [L] int64: changes that were scored."""

    slots_LS: Integers
    before_L: Floats
    after_L: Floats
    scores_L: Integers


def search_placement(
    counts_KLE: ArrayLike,
    current_LS: ArrayLike,
    num_ranks: int,
    *,
    weight_K: ArrayLike | None = None,
    num_nodes: int = 1,
    num_groups: int = 0,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
    most_experts_G: ArrayLike | None = None,
    price: ArrayLike = 0.0,
    fetch_price: ArrayLike = 0.0,
    beta: float = 0.1,
    tail: float = 0.1,
    tolerance: float = 1e-3,
    most_scores: int = 150,
    width: int = 8,
    steepest: bool = False,
    depth: int = 0,
    compiled: bool = True,
) -> Searched:
    """The present placement, changed where that pays over the scenarios.

    counts_KLE: [K, L, E] loads, whole copies or shares, or [L, E] for one;  current_LS: [L, S] integers,
    slots contiguous by rank, -1 = empty, every expert somewhere;  num_ranks: P;  weight_K: [K] how likely
    each is, None = all alike;  num_nodes, num_groups: with groups a multiple of nodes every expert stays on
    the node where it is now;  home_slot_E: [E] slots that keep their expert, None = all are free;  speed_G:
    [P];  most_experts_G: [P], as `connected_placement`;  price: what a slot that gets another expert costs,
    in the unit of the objective (0.01: one per cent of the layer's time), a number or [L];  fetch_price: what
    one more replica costs that the busiest rank sends or receives in a step, in the same unit, with
    home_slot_E;  beta: weight of the tail, 0 = mean alone;  tail: share of the scenarios that CVaR is the
    mean of;  tolerance: a layer within 1 + tolerance is left alone;  most_scores: changes scored in a layer,
    which bounds the time;  width: experts tried for a cut, heaviest first, on twice as many ranks, the least
    loaded ones;  steepest: take the best change of a cut, fewer moves, instead of the first that pays,
    faster;  depth: changes that are made though none of them pays alone, and kept where they pay together;
    compiled: False runs the twin, equal to the last bit.

    Returns `Searched`. A layer that has no change that pays comes back as it is. Raises ValueError for loads,
    placements, prices and options out of range, and sizes that do not fit.

    >>> found = search_placement([[8, 2, 5, 1]], [[0, 3, 3, 1, 2, 1]], 2)
    >>> found.slots_LS.tolist(), found.before_L.tolist(), found.after_L.tolist()
    ([[0, 3, 3, 1, 2, 0]], [1.125], [1.0])
    """
    slots = slot_table("current_LS", current_LS)
    counts = scenario_counts(counts_KLE)
    if counts.shape[1] != len(slots):
        raise ValueError(f"counts have {counts.shape[1]} layers and current_LS {len(slots)}; give the same")
    sizes = sizes_of(counts.shape[2], slots.shape[1], num_ranks, num_nodes, num_groups, speed_G)
    home_S = home_experts(home_slot_E, sizes)
    home_LE = None if home_slot_E is None else np.tile(np.asarray(home_slot_E, np.int64), (len(slots), 1))
    check_placement(
        slots, num_experts=sizes.experts, num_ranks=num_ranks, home_slot_LE=home_LE, distinct=False
    )
    room_G = checked_room(most_experts_G, home_S, sizes)
    node_LE, node_G = node_limits(counts.mean(axis=0), sizes, home_S)
    if sizes.nodes > 1 and home_slot_E is None:
        node_LE = _present_nodes(slots, sizes.experts, node_G)
    weight = _weights(weight_K, len(counts))
    price_L = checked_prices(price, len(slots))
    fetch_L = checked_prices(fetch_price, len(slots))
    options = _options(beta, tail, tolerance, most_scores, width, steepest, home_slot_E is None, depth)
    found, out_LX = slots.copy(), np.zeros((len(slots), 3))
    fixed_LS = np.tile((home_S >= 0).astype(np.int64), (len(slots), 1))
    search_kernels(compiled).search_layers(
        found,
        fixed_LS,
        counts,
        weight,
        sizes.speed_G,
        room_G,
        node_LE,
        node_G,
        price_L,
        fetch_L,
        options,
        out_LX,
    )
    before_L, after_L, scores_L = out_LX.T
    return Searched(keep_slots(slots, found, num_ranks), before_L, after_L, scores_L.astype(np.int64))


def layer_peaks(
    slots_LS: ArrayLike,
    counts_KLE: ArrayLike,
    num_ranks: int,
    speed_G: Sequence[float] | Floats | None = None,
    *,
    compiled: bool = True,
) -> Floats:
    """Smallest largest rank load of every load and layer with the exact split: [K, L] float64.

    slots_LS: [L, S];  counts_KLE: [K, L, E] or [L, E] loads, each in copies, or shares;  speed_G: [P], peaks
    are over speed then. Fractional: below `split.balanced_peak` by less than one copy, when given copies; 0
    where there is no load. Raises ValueError as `search_placement` does.

    >>> layer_peaks([[0, 2, 1, 3, 2, 0]], [[8, 2, 5, 1]], 2).tolist()
    [[8.0]]
    """
    slots = slot_table("slots_LS", slots_LS)
    given = np.asarray(counts_KLE)
    counts = scenario_counts(given)
    given = given[None] if given.ndim == 2 else given
    sizes = sizes_of(counts.shape[2], slots.shape[1], num_ranks, 1, 0, speed_G)
    if counts.shape[1] != len(slots):
        raise ValueError(f"counts have {counts.shape[1]} layers and slots_LS {len(slots)}; give the same")
    check_placement(slots, num_experts=sizes.experts, num_ranks=num_ranks, distinct=False)
    peak_KL = np.zeros(counts.shape[:2])
    search_kernels(compiled).peak_layers(slots, counts, sizes.speed_G, peak_KL)
    total_KL, counted_KL = given.sum(axis=2, dtype=np.float64), counts.sum(axis=2)
    return peak_KL * (total_KL / np.maximum(counted_KL, 1))


def scenario_counts(counts_KLE: ArrayLike) -> Integers:
    """Loads as [K, L, E] int64; shares and counts too large to add up exactly are scaled to 2^32 a layer."""
    given = np.asarray(counts_KLE)
    given = given[None] if given.ndim == 2 else given
    if given.dtype.kind not in "iuf" or given.ndim != 3 or 0 in given.shape:
        raise ValueError(f"counts are {given.dtype} {given.shape}; expected loads [K, L, E], or [L, E]")
    values = given.astype(np.float64)
    wrong = ~((values >= 0) & np.isfinite(values))
    if wrong.any():
        k, layer, expert = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"counts[{k}, {layer}, {expert}]={values[k, layer, expert]} is no load; must be finite, 0 or more"
        )
    with np.errstate(over="ignore"):
        total_KL1 = values.sum(axis=2, keepdims=True)
    if not np.isfinite(total_KL1).all():
        raise ValueError("counts of a layer sum to more than float64 holds; give counts or shares")
    if given.dtype.kind in "iu" and total_KL1.max() <= _MOST_COPIES:
        return np.ascontiguousarray(given, np.int64)
    # first the share: one over a tiny total is more than float64 holds
    share_KLE = values / np.where(total_KL1 > 0, total_KL1, 1.0)
    return np.ascontiguousarray(np.rint(share_KLE * _SCALE), np.int64)


def risk_of(ratio_KL: Floats, weight_K: Floats, beta: float, tail: float) -> Floats:
    """(1 - beta) mean + beta CVaR of every layer's peak / even load over the scenarios: [L]."""
    mean_L = weight_K @ ratio_KL
    order_KL = np.argsort(-ratio_KL, axis=0, kind="stable")
    until_KL = np.cumsum(weight_K[order_KL], axis=0)
    part_KL = np.clip(tail - (until_KL - weight_K[order_KL]), 0.0, weight_K[order_KL])
    worst_L = (part_KL * np.take_along_axis(ratio_KL, order_KL, axis=0)).sum(axis=0) / part_KL.sum(axis=0)
    return (1.0 - beta) * mean_L + beta * worst_L


# ---- checks ---------------------------------------------------------------------------------------------


def _present_nodes(slots_LS: Integers, num_experts: int, node_G: Integers) -> Integers:
    """The node that each expert is on now [L, E], that of its first slot."""
    node_S = np.repeat(node_G, slots_LS.shape[1] // len(node_G))
    node_LE = np.empty((len(slots_LS), num_experts), np.int64)
    for layer, slots_S in enumerate(slots_LS):
        for slot in range(slots_LS.shape[1] - 1, -1, -1):
            if slots_S[slot] >= 0:
                node_LE[layer, slots_S[slot]] = node_S[slot]
    return node_LE


def _weights(weight_K: ArrayLike | None, num_scenarios: int) -> Floats:
    """[K] float64 that sum to 1."""
    if weight_K is None:
        return np.full(num_scenarios, 1.0 / num_scenarios)
    weight = np.asarray(weight_K, np.float64)
    good = weight.shape == (num_scenarios,) and bool((weight >= 0).all() and np.isfinite(weight).all())
    if not good or not weight.any():
        raise ValueError(
            f"weight_K={weight} for {num_scenarios} scenarios; give each a number of 0 or more, not all 0"
        )
    return weight / weight.sum()


def checked_prices(price: ArrayLike, num_layers: int) -> Floats:
    """[L] float64."""
    prices = np.asarray(price, np.float64)
    if prices.shape not in ((), (num_layers,)) or not (prices >= 0).all():
        raise ValueError(f"price={price!r} must be 0 or more, a number or [L] = [{num_layers}]")
    # a price without bound is one that nothing pays
    return np.minimum(prices, 1e9) * np.ones(num_layers)


def _options(
    beta: float,
    tail: float,
    tolerance: float,
    most_scores: int,
    width: int,
    steepest: bool,
    swaps: bool,
    depth: int,
) -> Options:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} must lie between 0 (mean alone) and 1 (tail alone)")
    if not 0 < tail <= 1:
        raise ValueError(f"tail={tail} must be above 0 and at most 1; 0.1 is the worst tenth")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be 0 or more; 0.001 is a good value")
    if most_scores < 0 or width < 1 or depth < 0:
        raise ValueError(
            f"most_scores={most_scores} and depth={depth} must be 0 or more and width={width} 1 or more"
        )
    return Options(
        float(tail),
        float(beta),
        float(tolerance),
        int(most_scores),
        int(width),
        int(steepest),
        int(swaps),
        depth,
    )
