"""Even: placements for systems that cannot split: every slot of an expert gets the same share of its load.

Stands between a load (measured or forecast) and a placement, where `packing.rebalance_experts` stands too:
`even_placement` starts with the same two greedy steps and goes on with a local search, `even_repair` changes
a placement that is there in few moves, for several loads at once. The loops are in pack_kernels.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bound import Sizes, home_experts, layers, node_of_expert, sizes_of
from balancer.kernels import pack_kernels
from balancer.metrics import checked_load
from balancer.packing import even_share_load

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# steps of the search for each slot; a step is some 5 ns compiled
EFFORTS = {"greedy": 0, "fast": 56, "thorough": 3000}
# changes that a repair looks ahead, and goes back on where they do not pay together
_DEPTH = 16
_MOST_MOVES = 2**40


def even_placement(
    load_LE: ArrayLike,
    num_slots: int,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 0,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
    effort: str = "fast",
    compiled: bool = True,
) -> Integers:
    """Placement with a small largest rank load, every slot of an expert taken to get the same share.

    load_LE: [L, E] counts or shares;  num_slots: S over all ranks, a multiple of num_ranks, E or more;
    num_ranks: P;  num_nodes: M, a divisor of P;  num_groups: groups of experts that stay together on a node,
    a multiple of M that divides E, as `rebalance_experts` has it; with another number, 0 too, nodes play no
    part;  home_slot_E: [E] slot that each expert keeps in every layer, None = all are free;  speed_G: [P]
    relative speeds, the largest load over speed counts then;  effort: "fast" (milliseconds), "thorough"
    (tens of them), "greedy" (no search);  compiled: False runs the twin.

    Returns slots_LS [L, S] int64, expert of each slot, slots contiguous by rank, none empty. No rank has two
    slots of an expert, unless it has more slots than there are experts (of its node, with groups): then it
    has all of them. The same method as EPLB's greedy where that keeps to this rule too, and then the
    search lowers it; equal input gives equal output. Raises ValueError for a bad load, sizes that do not fit
    with the nearest that do, homes that are no distinct slots, or an unknown effort.

    >>> even_placement([[8, 2, 5, 1]], 6, 2).tolist()
    [[0, 2, 1, 0, 2, 3]]
    """
    load = layers(load_LE, "load")
    sizes = sizes_of(load.shape[1], num_slots, num_ranks, num_nodes, num_groups, speed_G)
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r} is unknown; use one of {', '.join(EFFORTS)}")
    home_S = home_experts(home_slot_E, sizes)
    steps = EFFORTS[effort]
    slots_LS = _packed(load, _by_node(load, sizes, home_S, steps, compiled), sizes, home_S, steps, compiled)
    if sizes.nodes == 1 or steps == 0:
        return slots_LS
    # groups that suit the nodes may suit their ranks less: the greedy ones stay where they do better
    greedy_LE = _by_node(load, sizes, home_S, 0, compiled)
    greedy_LS = _packed(load, greedy_LE, sizes, home_S, 0, compiled)
    worse_L = _peak(load, greedy_LS, sizes) < _peak(load, slots_LS, sizes)
    if worse_L.any():
        slots_LS[worse_L] = _packed(load[worse_L], greedy_LE[worse_L], sizes, home_S, steps, compiled)
    return slots_LS


def even_repair(
    counts_KLE: ArrayLike,
    weight_K: ArrayLike,
    current_LS: ArrayLike,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
    move_price: float = 0.0,
    tolerance: float = 0.0,
    max_moves: int | None = None,
    compiled: bool = True,
) -> Integers:
    """The present placement after the few changes that pay, for several loads at once.

    Each layer for itself lowers its cost, sum_k weight_k * peak_k / mean_k + move_price * moves, where peak_k
    is the largest rank load (over speed) under load k with even shares, mean_k the load at perfect balance.
    A change puts another expert into a slot, or swaps two slots of different ranks. The best change is taken
    again and again, some that do not pay alone too, and the best placement passed is the result.

    counts_KLE: [K, L, E] loads, or [L, E];  weight_K: [K] 0 or more, not all 0;  current_LS: [L, S] integers,
    slots contiguous by rank, -1 = empty, a slot for every expert;  num_ranks: P;  num_nodes: M, a divisor of
    P; above 1 every expert stays on its node (1: anywhere);  home_slot_E: [E] slots that keep their
    expert;  speed_G: [P];  move_price: what a slot that receives an expert costs, in the unit of peak /
    mean: 0.01 is a percent of the layer's time, a good value for plans on the last 3 or 4 samples;
    tolerance: a layer whose weighted peak / mean is at most 1 + tolerance is good enough;
    max_moves: the most of a layer, None = any;  compiled: False runs the twin.

    Returns slots_LS [L, S] int64, equal to current_LS where no change pays. Raises ValueError for bad loads,
    weights, prices or placements, and sizes that do not fit.

    >>> even_repair([[8, 2, 5, 1]], [1], [[0, 2, 1, 3, 2, 1]], 2).tolist()
    [[0, 2, 1, 3, 2, 0]]
    """
    counts_KLE = checked_load(counts_KLE, "counts")
    counts_KLE = counts_KLE[None] if counts_KLE.ndim == 2 else counts_KLE
    if counts_KLE.ndim != 3 or 0 in counts_KLE.shape:
        raise ValueError(f"counts has shape {counts_KLE.shape}; expected [K, L, E], or [L, E] for one load")
    weight = _weights(weight_K, len(counts_KLE))
    slots = _current(current_LS, *counts_KLE.shape[1:])
    sizes = sizes_of(counts_KLE.shape[2], slots.shape[1], num_ranks, num_nodes, 0, speed_G)
    home_S = home_experts(home_slot_E, sizes)
    _check_homes(slots, home_S)
    for name, value in (("move_price", move_price), ("tolerance", tolerance), ("max_moves", max_moves or 0)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name}={value} must be finite and 0 or more")
    node_G = np.arange(num_ranks) // (num_ranks // num_nodes) if num_nodes > 1 else np.full(num_ranks, -1)
    pack_kernels(compiled).repair_layers(
        _scaled(counts_KLE, weight, sizes.speed_G),
        np.repeat((home_S >= 0).astype(np.int64)[None], len(slots), axis=0),
        sizes.speed_G,
        node_G,
        float(move_price),
        float((1.0 + tolerance) * weight.sum()),
        _DEPTH,
        _MOST_MOVES if max_moves is None else int(max_moves),
        slots,
    )
    return slots


# ---- rows of a placement: layers, or the nodes of each layer ---------------------------------------------


class _Rows(NamedTuple):
    """Problems of their own: load, expert that a slot keeps, speeds, and the time at which to stop."""

    load_Re: Floats
    home_Rs: Integers
    speed_Rg: Floats
    target_R: Floats


def _packed(
    load_LE: Floats, expert_LE: Integers, sizes: Sizes, home_S: Integers, effort: int, compiled: bool
) -> Integers:
    """slots_LS with the experts on these nodes; effort: steps for each slot."""
    rows = _rows(load_LE, expert_LE, home_S, sizes)
    slots_Rs = np.empty_like(rows.home_Rs)
    pack_kernels(compiled).pack_rows(
        rows.load_Re, rows.home_Rs, rows.speed_Rg, rows.target_R, 1, effort * slots_Rs.shape[1], slots_Rs
    )
    slots_Rs = np.take_along_axis(expert_LE.reshape(len(slots_Rs), -1), slots_Rs, axis=1)
    return slots_Rs.reshape(len(load_LE), sizes.slots)


def _peak(load_LE: Floats, slots_LS: Integers, sizes: Sizes) -> Floats:
    return (even_share_load(load_LE, slots_LS, sizes.ranks) / sizes.speed_G).max(axis=1)


def _by_node(load_LE: Floats, sizes: Sizes, home_S: Integers, effort: int, compiled: bool) -> Integers:
    """The experts of each layer in order of their node: [L, E], as many for each."""
    num_layers, num_experts = len(load_LE), sizes.experts
    if sizes.nodes == 1:
        return np.repeat(np.arange(num_experts)[None], num_layers, axis=0)
    if (home_S >= 0).any():
        order_E = np.argsort(node_of_expert(home_S, sizes), kind="stable")
        return np.repeat(order_E[None], num_layers, axis=0)
    load_LX = load_LE.reshape(num_layers, sizes.groups, -1).sum(axis=2)  # X: groups
    speed_M: Floats = sizes.speed_G.reshape(sizes.nodes, -1).sum(axis=1)
    speed_LM = np.repeat(speed_M[None], num_layers, axis=0)
    group_LX = np.empty((num_layers, sizes.groups), np.int64)
    target_L = load_LE.sum(axis=1) / sizes.speed_G.sum()
    steps = effort * sizes.slots // 2
    any_LX = np.full_like(group_LX, -1)
    pack_kernels(compiled).pack_rows(load_LX, any_LX, speed_LM, target_L, 0, steps, group_LX)
    size = num_experts // sizes.groups
    return (group_LX[:, :, None] * size + np.arange(size)).reshape(num_layers, num_experts)


def _rows(load_LE: Floats, expert_LE: Integers, home_S: Integers, sizes: Sizes) -> _Rows:
    num_layers, num_experts = load_LE.shape
    rows = num_layers * sizes.nodes
    load_Re = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(rows, num_experts // sizes.nodes)
    place_E = np.argsort(expert_LE[0]) % load_Re.shape[1]  # where homes count, all layers are alike
    local_S = np.where(home_S >= 0, place_E[home_S], -1)
    home_Rs = np.repeat(local_S[None], num_layers, axis=0).reshape(rows, -1)
    speed_Rg = np.repeat(sizes.speed_G[None], num_layers, axis=0).reshape(rows, -1)
    node_LM = (load_Re.sum(axis=1) / speed_Rg.sum(axis=1)).reshape(num_layers, -1)
    target_R = np.repeat(node_LM.max(axis=1), sizes.nodes)  # a node need not be better than the worst one
    return _Rows(load_Re, home_Rs, speed_Rg, target_R)


# ---- arguments of a repair ------------------------------------------------------------------------------


def _scaled(counts_KLE: Floats, weight_K: Floats, speed_G: Floats) -> Floats:
    """[L, K, E]: weight / time at perfect balance; 0 where there is no load."""
    mean_KL1 = counts_KLE.sum(axis=2, keepdims=True) / speed_G.sum()
    scaled_KLE = weight_K[:, None, None] * counts_KLE / np.where(mean_KL1 > 0, mean_KL1, 1.0)
    return np.ascontiguousarray(scaled_KLE.swapaxes(0, 1))


def _weights(weight_K: ArrayLike, num_loads: int) -> Floats:
    weight = checked_load(weight_K, "weight")
    if weight.shape != (num_loads,) or not weight.any():
        raise ValueError(
            f"weight has shape {weight.shape} and sum {weight.sum()} for {num_loads} loads; give one each, "
            "not all of them 0"
        )
    return weight


def _current(current_LS: ArrayLike, num_layers: int, num_experts: int) -> Integers:
    """The placement as a new int64 array, checked."""
    array = np.asarray(current_LS)
    if array.dtype.kind not in "iu" or array.ndim != 2 or len(array) != num_layers or array.size == 0:
        raise ValueError(
            f"current is {array.dtype} {array.shape}; expected integers [{num_layers}, S], -1 = empty"
        )
    slots = np.array(array, np.int64, order="C")
    bad = (slots < -1) | (slots >= num_experts)
    if bad.any():
        layer, slot = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"slot {slot} of layer {layer} has expert {slots[layer, slot]}, out of 0..{num_experts - 1} "
            "(-1 = empty)"
        )
    for layer, row in enumerate(slots):
        missing = np.setdiff1d(np.arange(num_experts), row)
        if missing.size:
            raise ValueError(f"expert {missing[0]} of layer {layer} has no slot; give it a slot")
    return slots


def _check_homes(slots_LS: Integers, home_S: Integers) -> None:
    moved = (home_S >= 0) & (slots_LS != home_S)
    if moved.any():
        layer, slot = np.argwhere(moved)[0].tolist()
        raise ValueError(
            f"slot {slot} of layer {layer} has expert {slots_LS[layer, slot]}, but is the home of expert "
            f"{home_S[slot]}; put it there first"
        )
