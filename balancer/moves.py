"""Moves: a plan's ranks and slots renamed, so that as few slots as possible must receive an expert.

Stands after a planner that has no memory (`packing.rebalance_experts`) and before the plan is applied. Ranks
of one speed are interchangeable to the balance, so which of them gets which set of experts is free: an
assignment problem (nodes, and ranks within a node; Kuhn 1955) for each layer, solved exactly. Slots of a
rank are interchangeable too: an expert that stays keeps its slot. Not for plans with fixed homes, which name
ranks.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.split_checks import check_slots, nearest_divisor

Integers = NDArray[np.int64]


def relabel(
    before_LS: ArrayLike,
    after_LS: ArrayLike,
    num_ranks: int,
    num_nodes: int = 1,
    *,
    speed_G: Sequence[float] | NDArray[np.float64] | None = None,
) -> Integers:
    """The plan `after` with its nodes, ranks and slots permuted so that the fewest slots receive an expert.

    before_LS, after_LS: [L, S] integers, expert in each slot now and in the plan, slots contiguous by rank,
    -1 = empty;  num_ranks: P, a divisor of S;  num_nodes: M, a divisor of P; ranks of one node of the plan
    stay on one node;  speed_G: [P] speeds; only ranks of equal speed exchange their experts, None = all
    alike.

    Returns [L, S] int64, each layer for itself: `metrics.moved_slots` from `before` to it is the least that
    any such permutation allows; of plans with equally few moves one that leaves the most ranks as the plan
    names them. An expert that its rank keeps also keeps its slot, of two copies on one rank one does.
    Time grows with L * P^3 at worst. Raises ValueError for arrays that are no placements, sizes that do not
    fit, or speeds that are not finite and above 0.

    >>> relabel([[0, 1, 2, 3]], [[4, 2, 1, 0]], 2).tolist()
    [[0, 1, 2, 4]]
    """
    before, after = _placement("before", before_LS), _placement("after", after_LS)
    if before.shape != after.shape:
        raise ValueError(
            f"before has shape {before.shape} but after {after.shape}; give the same layers and slots"
        )
    check_slots(before.shape[1], num_ranks)
    if num_nodes < 1 or num_ranks % num_nodes:
        nearest = nearest_divisor(num_ranks, num_nodes)
        raise ValueError(f"num_nodes={num_nodes} does not divide {num_ranks} ranks; use {nearest}")
    alike_GG = _alike(speed_G, num_ranks)
    before_LGs = before.reshape(len(before), num_ranks, -1)
    after_LGs = after.reshape(before_LGs.shape)
    moved = np.stack(
        [
            wanted_Gs[_assignment(_costs(held_Gs, wanted_Gs, alike_GG), num_nodes)]
            for held_Gs, wanted_Gs in zip(before_LGs, after_LGs)
        ]
    )
    return _slots_kept(before_LGs, moved).reshape(before.shape)


def keep_slots(before_LS: ArrayLike, after_LS: ArrayLike, num_ranks: int) -> Integers:
    """The plan `after` with the slots of each rank in an order in which as many as possible stay as before.

    before_LS, after_LS: [L, S] integers, slots contiguous by rank, -1 = empty;  num_ranks: P. Returns [L, S]
    int64: every rank has the experts that the plan gives it. Raises ValueError as `relabel` does.

    >>> keep_slots([[0, 1, 2, 3]], [[1, 4, 3, 2]], 2).tolist()
    [[4, 1, 2, 3]]
    """
    before, after = _placement("before", before_LS), _placement("after", after_LS)
    if before.shape != after.shape:
        raise ValueError(f"before has shape {before.shape} but after {after.shape}; give the same slots")
    check_slots(before.shape[1], num_ranks)
    before_LGs = before.reshape(len(before), num_ranks, -1)
    return _slots_kept(before_LGs, after.reshape(before_LGs.shape)).reshape(before.shape)


def _costs(held_Gs: Integers, wanted_Gs: Integers, alike_GG: NDArray[np.bool_]) -> Integers:
    """What it costs to give a rank the experts that the plan has on another: [rank, rank of the plan].

    In the first place the slots that must receive an expert, in the second whether the rank is another one.
    """
    num_ranks, per_rank = held_Gs.shape
    experts, index = np.unique(np.stack([held_Gs, wanted_Gs]), return_inverse=True)
    held_index, wanted_index = index.reshape(2, num_ranks, per_rank)
    held_GE = np.zeros((num_ranks, experts.size), np.bool_)
    held_GE[np.arange(num_ranks)[:, None], held_index] = True
    held_GE[:, experts < 0] = True  # an empty slot receives nothing
    kept_GG = held_GE[:, wanted_index].sum(axis=2, dtype=np.int64)
    other_GG = ~np.eye(num_ranks, dtype=np.bool_)
    cost_GG: Integers = (per_rank - kept_GG) * (num_ranks + 1) + other_GG
    # dearer than all ranks of a plan together, and the plan as it stands is always allowed
    cost_GG[~alike_GG] = num_ranks * (per_rank + 1) * (num_ranks + 1)
    return cost_GG


def _assignment(cost_GG: Integers, num_nodes: int) -> Integers:
    """Rank of the plan that each rank takes, at the least sum of costs; whole nodes go to nodes."""
    if num_nodes == 1:
        return _cheapest(cost_GG)
    per_node = len(cost_GG) // num_nodes
    cost_NNgg = cost_GG.reshape(num_nodes, per_node, num_nodes, per_node).swapaxes(1, 2)
    within = [[_cheapest(cost_gg) for cost_gg in row] for row in cost_NNgg]
    take_NNg = np.array(within)
    cost_NN = np.take_along_axis(cost_NNgg, take_NNg[..., None], axis=3).sum(axis=(2, 3))
    node_N = _cheapest(cost_NN)
    rank_Ng = node_N[:, None] * per_node + take_NNg[np.arange(num_nodes), node_N]
    return rank_Ng.reshape(-1)


def _cheapest(cost_XX: Integers) -> Integers:
    """Column for each row, all different, at the least sum of costs."""
    solve: Any = import_module("scipy.optimize").linear_sum_assignment
    return np.asarray(solve(cost_XX)[1], np.int64)  # the rows come in order


def _slots_kept(before_LGs: Integers, after_LGs: Integers) -> Integers:
    """The experts of every rank in an order in which as many as possible are in their slot of before."""
    result = np.empty_like(after_LGs)
    open_LGs = np.ones(after_LGs.shape, np.bool_)  # slots without an expert yet
    left_LGs = np.ones(after_LGs.shape, np.bool_)  # experts without a slot yet
    for slot in range(after_LGs.shape[2]):
        same_LGs = left_LGs & (after_LGs == before_LGs[:, :, slot, None])
        layer, rank = np.nonzero(same_LGs.any(axis=2))
        left_LGs[layer, rank, same_LGs[layer, rank].argmax(axis=1)] = False
        open_LGs[layer, rank, slot] = False
        result[layer, rank, slot] = before_LGs[layer, rank, slot]
    # as many are open as are left on every rank, and both masks read them in the order of the ranks
    result[open_LGs] = after_LGs[left_LGs]
    return result


def _placement(name: str, slots: ArrayLike) -> Integers:
    """The slots as [L, S] int64, checked."""
    array = np.asarray(slots)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} is {array.dtype} {array.shape}; expected integers [L, S], -1 = empty")
    if (array < -1).any():
        layer, slot = np.argwhere(array < -1)[0].tolist()
        raise ValueError(
            f"{name} has expert {array[layer, slot]} in slot {slot} of layer {layer}; an empty slot is -1"
        )
    return array.astype(np.int64)


def _alike(speed_G: Sequence[float] | NDArray[np.float64] | None, num_ranks: int) -> NDArray[np.bool_]:
    """Whether two ranks may exchange their experts: [P, P]."""
    if speed_G is None:
        return np.ones((num_ranks, num_ranks), np.bool_)
    speed = np.asarray(speed_G, np.float64)
    if speed.shape != (num_ranks,):
        raise ValueError(f"speed_G has shape {speed.shape} for {num_ranks} ranks; give one speed each")
    bad = ~((speed > 0) & np.isfinite(speed))
    if bad.any():
        rank = int(bad.argmax())
        raise ValueError(f"speed_G[{rank}]={speed[rank]} must be finite and above 0; 1.0 is a good unit")
    return speed[:, None] == speed
