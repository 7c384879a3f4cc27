"""Bound: how low the largest rank load can be at best, under any placement that the same rules allow.

Beside the planners: every plan comes with its gap to this. Each bound holds for one reason, said in the
docstring of its function, and the largest of them counts. All of them hold for the exact split, hence for
even shares too, whose rows are one of the splits; `_homes_even` is for even shares alone. Layers go at once.

What it takes to be a placement, and checks for the planners too: `sizes_of`, `home_experts`.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.metrics import checked_load
from balancer.split_checks import check_ranks, check_slots, nearest_divisor, speeds

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SHARES = ("exact", "even")
# all ways of putting so many groups on nodes are tried: at most C(10, 5) sets for each of 2^10
_MOST_GROUPS = 10
# halvings of an interval: below the rounding of float64
_HALVINGS = 60
# what is kept off a bound that rounding may have made too large
_ROUNDING = 1e-12


class Sizes(NamedTuple):
    """Sizes that fit each other. nodes: 1 where groups do not keep nodes apart, and groups 1 then."""

    experts: int
    slots: int
    ranks: int
    nodes: int
    groups: int
    speed_G: Floats


def peak_bound(
    load_LE: ArrayLike,
    num_slots: int,
    num_ranks: int,
    *,
    shares: str = "exact",
    num_nodes: int = 1,
    num_groups: int = 0,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
) -> Floats:
    """Lower bound of the largest rank load, with every placement.

    load_LE: [L, E] counts or shares;  num_slots: S over all ranks, a multiple of num_ranks, E or more;
    num_ranks: P;  shares: "exact", any split of an expert's load among its slots; "even", the same share for
    each;  num_nodes: M, a divisor of P;  num_groups: groups of experts that stay together on a node, as many
    on each, a multiple of M that divides E; with another number, 0 too, nodes play no part;  home_slot_E: [E]
    slot that each expert keeps;  speed_G: [P] relative speeds.

    Returns bound_L [L] float64 in the unit of the load, over speed where speeds are given; 0 for zero load.
    Not rounded up, as loads may be shares: whole copies cannot be below its ceiling at equal speeds of 1.
    Slots may stay empty and an expert may have two on a rank: it holds for those placements too. Raises
    ValueError for a bad load, sizes that do not fit, homes that are no distinct slots, or unknown shares.

    >>> peak_bound([[8, 2, 5, 1]], 6, 2), peak_bound([[8, 2, 5, 1]], 4, 2)
    (array([8.]), array([8.]))
    >>> peak_bound([[8, 2, 5, 1]], 4, 2, home_slot_E=[0, 2, 1, 3])
    array([13.])
    """
    load = layers(load_LE, "load")
    if shares not in SHARES:
        raise ValueError(f"shares={shares!r} is unknown; use one of {', '.join(SHARES)}")
    sizes = sizes_of(load.shape[1], num_slots, num_ranks, num_nodes, num_groups, speed_G)
    home_S = home_experts(home_slot_E, sizes)
    fixed = bool((home_S >= 0).any())
    if fixed and sizes.nodes > 1:
        return _nodes_with_homes(load, sizes, home_S, shares)
    bounds = [_total(load, sizes), _slots(load, sizes), _crowding(load, sizes)]
    if sizes.nodes > 1:
        bounds.append(_grouping(load, sizes))
    if fixed:
        bounds.append((_homes_exact if shares == "exact" else _homes_even)(load, sizes, home_S))
    return np.max(bounds, axis=0)


def scenario_bound(
    counts_KLE: ArrayLike,
    weight_K: ArrayLike,
    num_slots: int,
    num_ranks: int,
    *,
    shares: str = "exact",
    num_nodes: int = 1,
    num_groups: int = 0,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
) -> Floats:
    """Lower bound of the mean largest rank load over several loads that one placement must serve.

    counts_KLE: [K, L, E] loads;  weight_K: [K] 0 or more, not all 0, in proportion to how likely each is; the
    rest, and what it raises, as `peak_bound`.   Returns bound_L [L] float64, the weighted mean of each load's
    own bound: one placement is for no load better than the best for that load alone.

    >>> scenario_bound([[[8, 0]], [[0, 8]]], [1, 1], 2, 2)
    array([8.])
    """
    counts = checked_load(counts_KLE, "counts")
    weight = checked_load(weight_K, "weight")
    if counts.ndim != 3 or 0 in counts.shape:
        raise ValueError(f"counts has shape {counts.shape}; expected [K, L, E]")
    if weight.shape != counts.shape[:1] or not weight.any():
        raise ValueError(
            f"weight has shape {weight.shape} and sum {weight.sum()} for {len(counts)} loads; give one each, "
            "not all of them 0"
        )
    bound_KL = peak_bound(
        counts.reshape(-1, counts.shape[2]),
        num_slots,
        num_ranks,
        shares=shares,
        num_nodes=num_nodes,
        num_groups=num_groups,
        home_slot_E=home_slot_E,
        speed_G=speed_G,
    ).reshape(counts.shape[:2])
    return (weight / weight.sum()) @ bound_KL


# ---- bounds ---------------------------------------------------------------------------------------------


def _total(load_LE: Floats, sizes: Sizes) -> Floats:
    """All load over all speed. The largest of some quotients is at least their sums' quotient."""
    return load_LE.sum(axis=1) / sizes.speed_G.sum()


def _slots(load_LE: Floats, sizes: Sizes) -> Floats:
    """Slots against large experts. k slots of an expert lie on k ranks at most, so its load over the speed of
    the k fastest (of one node, with groups) is a bound; a larger k for the expert where that is largest is
    the only remedy, so giving it a slot while there are spare ones makes the largest as small as it can be.
    """
    node_Mg = -np.sort(-sizes.speed_G.reshape(sizes.nodes, -1), axis=1)
    most_K = np.cumsum(node_Mg, axis=1).max(axis=0)  # of k + 1 slots
    count_LE = np.zeros(load_LE.shape, np.int64)
    bound_LE = load_LE / most_K[0]
    layer_L = np.arange(len(load_LE))
    for _ in range(sizes.slots - sizes.experts):
        expert_L = bound_LE.argmax(axis=1)
        # an expert on all ranks already ends it: nothing lowers its bound
        count_L = np.minimum(count_LE[layer_L, expert_L] + 1, len(most_K) - 1)
        count_LE[layer_L, expert_L] = count_L
        bound_LE[layer_L, expert_L] = load_LE[layer_L, expert_L] / most_K[count_L]
    return bound_LE.max(axis=1)


def _crowding(load_LE: Floats, sizes: Sizes) -> Floats:
    """Whole experts that must share a rank. Of the q P + R + 1 largest experts, R = S - E, at least q P + 1
    have one slot only, so q + 1 of them are on one rank, which has the q + 1 smallest of these at least.
    """
    falling_LE = -np.sort(-load_LE, axis=1)
    until_LE = np.cumsum(falling_LE, axis=1)
    bound_L = np.zeros(len(load_LE))
    first = sizes.slots - sizes.experts  # of those that may be the only slot of their expert
    for q in range(1, sizes.slots // sizes.ranks):
        last = q * sizes.ranks + first
        if last >= sizes.experts:
            break
        # at the fastest rank, if need be
        sum_L = until_LE[:, last] - (until_LE[:, last - q - 1] if last > q else 0.0)
        np.maximum(bound_L, sum_L / sizes.speed_G.max() * (1 - _ROUNDING), out=bound_L)
    return bound_L


def _grouping(load_LE: Floats, sizes: Sizes) -> Floats:
    """Groups on nodes, as many on each. The ranks of a node share the load of its groups and no other, so the
    largest load of a node over its speed is a bound. Of few groups all ways of putting them on nodes are
    tried; of many the largest groups say something.
    """
    load_LX = load_LE.reshape(len(load_LE), sizes.groups, -1).sum(axis=2)  # X: groups
    speed_M = sizes.speed_G.reshape(sizes.nodes, -1).sum(axis=1)
    if sizes.groups <= _MOST_GROUPS:
        return _best_grouping(load_LX, speed_M) * (1 - _ROUNDING)
    return _large_groups(load_LX, sizes.nodes) / speed_M.max() * (1 - _ROUNDING)


def _large_groups(load_LX: Floats, num_nodes: int) -> Floats:
    """The n largest groups are on n nodes or fewer; n nodes with all of them among theirs hold the smallest
    others beside them at least, and the fullest has no less than their mean."""
    rising_LX = np.sort(load_LX, axis=1)
    until_LX = np.pad(np.cumsum(rising_LX, axis=1), ((0, 0), (1, 0)))
    num_groups, others = load_LX.shape[1], load_LX.shape[1] // num_nodes - 1
    bound_L = np.zeros(len(load_LX))
    for n in range(1, num_nodes + 1):
        largest_L = until_LX[:, -1] - until_LX[:, num_groups - n]
        bound_L = np.maximum(bound_L, (largest_L + until_LX[:, n * others]) / n)
    return bound_L


def _best_grouping(load_LX: Floats, speed_M: Floats) -> Floats:
    """The smallest largest time of a node, by going through the nodes with all sets of groups left."""
    num_groups = int(load_LX.shape[1])
    # groups left -> time of the nodes so far
    best: dict[frozenset[int], Floats] = {frozenset(range(num_groups)): np.zeros(len(load_LX))}
    for speed in speed_M:
        after: dict[frozenset[int], Floats] = {}
        for left, bound_L in best.items():
            for chosen in combinations(sorted(left), num_groups // int(speed_M.size)):
                rest = left.difference(chosen)
                time_L = np.maximum(bound_L, load_LX[:, list(chosen)].sum(axis=1) / speed)
                after[rest] = np.minimum(after[rest], time_L) if rest in after else time_L
        best = after
    return best[frozenset()]


def _homes_even(load_LE: Floats, sizes: Sizes, home_S: Integers) -> Floats:
    """Homes with even shares. A rank keeps 1 / c of each home expert with c slots, so the replica that takes
    most from it is the best it can get, the next takes no more (1 / c is convex), and a replica for an expert
    of the worst rank is the only remedy: giving it one while there are spare slots is optimal. More slots
    than ranks help as well: of those that share a rank none needs to be on the home's.
    """
    rank_E = _home_rank(home_S, sizes)
    count_LE = np.ones(load_LE.shape, np.int64)
    home_EG = (rank_E[:, None] == np.arange(sizes.ranks)) / sizes.speed_G
    layer_L = np.arange(len(load_LE))
    for _ in range(sizes.slots - sizes.experts):
        rank_L = ((load_LE / count_LE) @ home_EG).argmax(axis=1)
        takes_LE = load_LE / count_LE - load_LE / (count_LE + 1)
        expert_L = np.where(rank_E == rank_L[:, None], takes_LE, -1.0).argmax(axis=1)
        count_LE[layer_L, expert_L] += 1
    return ((load_LE / count_LE) @ home_EG).max(axis=1) * (1 - _ROUNDING)


def _homes_exact(load_LE: Floats, sizes: Sizes, home_S: Integers) -> Floats:
    """Homes with the exact split. For a peak M a rank must hand on what its home experts have above M, and a
    replica takes no more than its expert's load, nor than M times the fastest speed: the largest such pieces
    say how many replicas each rank needs, and where they need more than the S - E that there are, M is too
    small. That need falls with M, so halving an interval finds the M from which on it is met.
    """
    rank_E, fastest = _home_rank(home_S, sizes), float(sizes.speed_G.max())
    most = int(np.bincount(rank_E, minlength=sizes.ranks).max())
    load_LGe = np.zeros((len(load_LE), sizes.ranks, most))
    for g in range(sizes.ranks):
        homes = load_LE[:, rank_E == g]
        load_LGe[:, g, : homes.shape[1]] = homes
    low_L = _total(load_LE, sizes)  # of which we know that no peak is below
    high_L: Floats = (load_LGe.sum(axis=2) / sizes.speed_G).max(axis=1)  # no replica is needed
    spare = sizes.slots - sizes.experts
    for _ in range(_HALVINGS):
        peak_L: Floats = (low_L + high_L) / 2
        short_L = _replicas_needed(load_LGe, peak_L, sizes.speed_G, fastest) > spare
        low_L, high_L = np.where(short_L, peak_L, low_L), np.where(short_L, high_L, peak_L)
    return low_L * (1 - _ROUNDING)


def _replicas_needed(load_LGe: Floats, peak_L: Floats, speed_G: Floats, fastest: float) -> Integers:
    """The fewest replicas that take from every rank what its homes have above the peak: [L]."""
    piece_L1 = np.maximum(peak_L[:, None] * fastest, np.finfo(np.float64).tiny)
    above_LG = load_LGe.sum(axis=2) - peak_L[:, None] * speed_G
    above_LG = np.where(above_LG > load_LGe.sum(axis=2) * _ROUNDING, above_LG, 0.0)
    whole_LGe = np.floor(load_LGe / piece_L1[..., None])
    whole_LG = whole_LGe.sum(axis=2)
    rest_LGe = -np.sort(-(load_LGe - whole_LGe * piece_L1[..., None]), axis=2)
    left_LG = above_LG - whole_LG * piece_L1
    # the rests that leave something above the peak, and the one more that does not
    short_LG = (np.cumsum(rest_LGe, axis=2) < left_LG[..., None] * (1 - _ROUNDING)).sum(axis=2) + 1
    needed_LG = np.where(left_LG > 0, whole_LG + short_LG, np.ceil(above_LG / piece_L1 * (1 - _ROUNDING)))
    return needed_LG.sum(axis=1).astype(np.int64)


def _nodes_with_homes(load_LE: Floats, sizes: Sizes, home_S: Integers, shares: str) -> Floats:
    """The worst node, each with its own experts, ranks and slots: replicas do not leave it."""
    node_E, per_node = node_of_expert(home_S, sizes), sizes.slots // sizes.nodes
    bounds: list[Floats] = []
    for node in range(sizes.nodes):
        mine_E = node_E == node
        slot_E = np.flatnonzero(home_S >= 0)[np.argsort(home_S[home_S >= 0])]
        bounds.append(
            peak_bound(
                load_LE[:, mine_E],
                per_node,
                sizes.ranks // sizes.nodes,
                shares=shares,
                home_slot_E=slot_E[mine_E] - node * per_node,
                speed_G=sizes.speed_G.reshape(sizes.nodes, -1)[node],
            )
        )
    return np.max(bounds, axis=0)


# ---- checks that planners share --------------------------------------------------------------------------


def layers(load: ArrayLike, name: str) -> Floats:
    """The load as contiguous [L, E] float64, checked."""
    load_LE = checked_load(load, name)
    if load_LE.ndim != 2 or len(load_LE) == 0:
        raise ValueError(f"{name} has shape {load_LE.shape}; expected [L, E], one row for each layer")
    with np.errstate(over="ignore"):
        total_L = load_LE.sum(axis=1)
    if not np.isfinite(total_L).all():
        layer = int((~np.isfinite(total_L)).argmax())
        raise ValueError(f"{name} of layer {layer} sums to more than float64 holds; give counts or shares")
    return np.ascontiguousarray(load_LE)


def sizes_of(
    num_experts: int,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 0,
    speed_G: Sequence[float] | Floats | None = None,
) -> Sizes:
    """The sizes of a placement, checked; ValueError with the nearest that fit."""
    check_slots(num_slots, num_ranks)
    if num_slots < num_experts:
        nearest = -(-num_experts // num_ranks) * num_ranks
        raise ValueError(f"num_slots={num_slots} is less than the {num_experts} experts; use {nearest}")
    if num_nodes < 1 or num_ranks % num_nodes:
        nearest = nearest_divisor(num_ranks, num_nodes)
        raise ValueError(f"num_nodes={num_nodes} does not divide {num_ranks} ranks; use {nearest}")
    if num_groups < 0 or (num_groups and num_experts % num_groups):
        nearest = nearest_divisor(num_experts, num_groups)
        raise ValueError(
            f"num_groups={num_groups} does not divide the {num_experts} experts; use {nearest}, or 0 for none"
        )
    speed = speeds(speed_G)
    check_ranks(speed, np.empty(0, np.int64), num_ranks)
    speed = speed if speed.size else np.ones(num_ranks)
    apart = num_nodes > 1 and num_groups > 0 and num_groups % num_nodes == 0
    nodes, groups = (num_nodes, num_groups) if apart else (1, 1)
    return Sizes(num_experts, num_slots, num_ranks, nodes, groups, speed)


def home_experts(home_slot_E: ArrayLike | None, sizes: Sizes) -> Integers:
    """[S] expert whose home a slot is, -1 where it is free; checked, with whole groups on nodes."""
    home_S = np.full(sizes.slots, -1, np.int64)
    if home_slot_E is None:
        return home_S
    home_E = np.asarray(home_slot_E)
    if home_E.dtype.kind not in "iu" or home_E.shape != (sizes.experts,):
        raise ValueError(
            f"home_slot_E is {home_E.dtype} {home_E.shape}; expected integers [E] = [{sizes.experts}]"
        )
    for expert, slot in enumerate(home_E.tolist()):
        if not 0 <= slot < sizes.slots:
            raise ValueError(f"home_slot_E[{expert}]={slot} is out of 0..{sizes.slots - 1}")
        if home_S[slot] >= 0:
            raise ValueError(
                f"home_slot_E[{expert}]={slot} is the home of expert {home_S[slot]} too; give each its own"
            )
        home_S[slot] = expert
    if sizes.nodes > 1:
        _check_groups(node_of_expert(home_S, sizes), sizes)
    return home_S


def node_of_expert(home_S: Integers, sizes: Sizes) -> Integers:
    """[E] node of each expert's home."""
    return _home_rank(home_S, sizes) // (sizes.ranks // sizes.nodes)


def _check_groups(node_E: Integers, sizes: Sizes) -> None:
    """Raise ValueError unless every group is on one node, and as many on each."""
    node_Xe = node_E.reshape(sizes.groups, -1)
    split = (node_Xe != node_Xe[:, :1]).any(axis=1)
    if split.any():
        group = int(split.argmax())
        raise ValueError(
            f"the homes of group {group} are on nodes {np.unique(node_Xe[group]).tolist()}; put them on one, "
            "or give num_groups=0"
        )
    count_M = np.bincount(node_Xe[:, 0], minlength=sizes.nodes)
    if (count_M != sizes.groups // sizes.nodes).any():
        raise ValueError(
            f"nodes have the homes of {count_M.tolist()} groups; give {sizes.groups // sizes.nodes} to each, "
            "or num_groups=0"
        )


def _home_rank(home_S: Integers, sizes: Sizes) -> Integers:
    """[E] rank of each expert's home."""
    slot_S = np.flatnonzero(home_S >= 0)
    rank_E = np.empty(sizes.experts, np.int64)
    rank_E[home_S[slot_S]] = slot_S // (sizes.slots // sizes.ranks)
    return rank_E
