"""Packing: the greedy baseline that EPLB made common, and the pieces of it that other planners use.

Stands between a load (measured or forecast) and a placement. Two greedy steps: give each spare slot to the
expert with the largest load for each of its slots (`replicate`), then put slots on ranks, heaviest first,
each on the least loaded rank that has room (`pack`). Every slot of an expert is taken to get the same share
of its load, so the result is for systems that cannot split; it looks at one load only, and at no placement
that is there already. `moves.relabel` makes a change to it cheap.

All layers go at once: loops run over slots only. Ties go to the lowest index everywhere (expert, item, pack;
numpy's argmax, argmin and stable argsort), so equal input gives equal output on every machine.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bound import layers

Integers = NDArray[np.int64]
Loads = NDArray[np.float64]


def rebalance_experts(
    weight_LE: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Integers, Integers, Integers]:
    """Placement by EPLB's greedy method, with EPLB's arguments and results.

    weight_LE: [L, E] load of each expert in each layer, counts or shares;  num_replicas: S slots over all
    ranks, a multiple of num_gpus, E or more;  num_groups: groups of experts that a router may be limited to,
    a divisor of E; 0 where it has none;  num_nodes: M, a divisor of num_gpus;  num_gpus: P ranks.

    Where num_groups is a multiple of num_nodes the placement is hierarchical: whole groups go to nodes (as
    many on each), then each node replicates and packs its own experts. Otherwise it is global: nodes and
    groups play no part.

    Returns phy2log_LS [L, S], expert of each slot, slots contiguous by rank;  log2phy_LEX [L, E, X], slots of
    each expert in the order in which it got them, filled up with -1, X the most slots of any expert;
    logcnt_LE [L, E], slots of each expert. All int64.

    Two differences to EPLB: sums are float64 and sorts are stable (there float32 and not, so ties may fall
    otherwise), and where all load of a layer, or of a node's experts, is zero, its experts stand in order,
    over and over, so that spare slots are spread evenly (there expert 0 gets them all). As there, an expert
    may have two slots on one rank even while another rank has room. Raises ValueError for a
    bad load or sizes that do not fit, with the nearest that do.

    >>> phy2log, log2phy, logcnt = rebalance_experts([[8, 2, 5, 1]], 6, 0, 1, 2)
    >>> phy2log.tolist(), log2phy.tolist(), logcnt.tolist()
    ([[0, 2, 1, 0, 2, 3]], [[[0, 3], [2, -1], [1, 4], [5, -1]]], [[2, 1, 2, 1]])
    """
    weight_LE = layers(weight_LE, "weight")
    _check_sizes(weight_LE.shape[1], num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups == 0 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    expert_LE = _grouped_by_node(weight_LE, num_groups, num_nodes)
    slots = _replicated_and_packed(weight_LE, expert_LE, num_replicas, num_nodes, num_gpus)
    counts_LE = _counts(slots.expert_LS, weight_LE.shape[1])
    log2phy_LEX = np.full((*counts_LE.shape, counts_LE.max()), -1, np.int64)
    layer_L1 = np.arange(len(weight_LE))[:, None]
    log2phy_LEX[layer_L1, slots.expert_LS, slots.copy_LS] = np.arange(num_replicas)
    return slots.expert_LS, log2phy_LEX, counts_LE


def replicate(load_LE: ArrayLike, num_slots: int) -> Integers:
    """How many slots each expert gets, so that the largest load for a slot is as small as it can be.

    load_LE: [L, E] counts or shares;  num_slots: S slots to give away, E or more.   Returns counts_LE [L, E]
    int64, 1 or more, S in every row. Spare slots go one by one to the expert with the largest load for each
    slot that it has, of equals to the first. That is optimal: the expert with the largest load for a slot
    must get another one in every placement that is better. A layer of zero load is spread evenly. Raises
    ValueError for a bad load or too few slots.

    >>> replicate([[8, 2, 5, 1], [0, 0, 0, 0]], 6).tolist()
    [[2, 1, 2, 1], [2, 2, 1, 1]]
    """
    load_LE = layers(load_LE, "load")
    num_experts = load_LE.shape[1]
    if num_slots < num_experts:
        raise ValueError(
            f"num_slots={num_slots} is less than the {num_experts} experts; use {num_experts} or more"
        )
    return _counts(_greedy_slots(_even_where_zero(load_LE), num_slots).expert_LS, num_experts)


def pack(weight_LI: ArrayLike, num_packs: int, per_pack: int) -> tuple[Integers, Integers]:
    """Pack of each item, as many items in each: heaviest first, each on the lightest pack that has room.

    weight_LI: [L, I] finite, 0 or more, I = num_packs * per_pack items.   Returns pack_LI [L, I] in
    0..num_packs-1 and rank_in_pack_LI [L, I] in 0..per_pack-1, the order in which the pack got the item, both
    int64. Of equal items and packs the first. With one item a pack there is nothing to choose: item i goes to
    pack i. Raises ValueError for a bad weight, or another number of items.

    >>> pack_LI, rank_in_pack_LI = pack([[3, 1, 2, 6]], 2, 2)
    >>> pack_LI.tolist(), rank_in_pack_LI.tolist()
    ([[1, 0, 1, 0]], [[0, 1, 1, 0]])
    """
    weight_LI = layers(weight_LI, "weight")
    num_layers, num_items = weight_LI.shape
    if num_packs < 1 or per_pack < 1 or num_packs * per_pack != num_items:
        raise ValueError(
            f"{num_items} items do not fill num_packs={num_packs} of per_pack={per_pack}; "
            f"give {max(num_packs, 1) * max(per_pack, 1)} items, some of weight 0 if need be"
        )
    pack_LI, rank_LI = np.zeros((2, num_layers, num_items), np.int64)
    if per_pack == 1:
        pack_LI[:] = np.arange(num_packs)
        return pack_LI, rank_LI
    layer_L = np.arange(len(weight_LI))
    load_LP = np.zeros((num_layers, num_packs))
    filled_LP = np.zeros((num_layers, num_packs), np.int64)
    for item_L in np.argsort(-weight_LI, axis=1, kind="stable").T:
        pack_L = load_LP.argmin(axis=1)
        rank_L = filled_LP[layer_L, pack_L]
        pack_LI[layer_L, item_L], rank_LI[layer_L, item_L] = pack_L, rank_L
        filled_LP[layer_L, pack_L] = rank_L + 1
        # a full pack is never the lightest again
        load_LP[layer_L, pack_L] += np.where(rank_L + 1 == per_pack, np.inf, weight_LI[layer_L, item_L])
    return pack_LI, rank_LI


def nodes_of_groups(load_LE: ArrayLike, num_groups: int, num_nodes: int) -> Integers:
    """The node of each expert where whole groups go to nodes, as many on each: [L, E] int64.

    load_LE: [L, E] counts or shares;  num_groups: a multiple of num_nodes that divides E. Heaviest group
    first, each to the lightest node that has room. Raises ValueError for a bad load, or sizes that do not
    fit.

    >>> nodes_of_groups([[8, 2, 5, 1]], 4, 2).tolist()
    [[0, 1, 1, 0]]
    """
    load_LE = layers(load_LE, "load")
    num_experts = load_LE.shape[1]
    if num_nodes < 1 or num_groups < 1 or num_groups % num_nodes or num_experts % num_groups:
        raise ValueError(
            f"num_groups={num_groups} must be a multiple of num_nodes={num_nodes} and divide the "
            f"{num_experts} experts"
        )
    expert_LE = _grouped_by_node(load_LE, num_groups, num_nodes)
    node_LE = np.empty_like(expert_LE)
    node_E = np.repeat(np.arange(num_nodes), num_experts // num_nodes)
    np.put_along_axis(node_LE, expert_LE, np.broadcast_to(node_E, expert_LE.shape), axis=1)
    return node_LE


def even_share_load(load_LE: ArrayLike, slot_to_expert_LS: ArrayLike, num_ranks: int) -> Loads:
    """Load of each rank when every slot of an expert gets the same share of its load.

    load_LE: [L, E] counts or shares;  slot_to_expert_LS: [L, S] integers, slots contiguous by rank, -1 =
    empty;  num_ranks: P, a divisor of S.   Returns load_LG [L, P] float64 in the unit of the load; a row sums
    to its load. Raises ValueError for a bad load, experts that do not exist, sizes that do not fit, or an
    expert with load and no slot.

    >>> even_share_load([[8, 2, 5, 1]], [[0, 2, 1, 0, 2, 3]], 2)
    array([[8.5, 7.5]])
    """
    load_LE = layers(load_LE, "load")
    slot_LS = np.asarray(slot_to_expert_LS)
    num_layers, num_experts = load_LE.shape
    if slot_LS.dtype.kind not in "iu" or slot_LS.ndim != 2 or len(slot_LS) != num_layers:
        raise ValueError(
            f"slot_to_expert is {slot_LS.dtype} {slot_LS.shape}; expected integers [{num_layers}, S]"
        )
    num_slots = slot_LS.shape[1]
    if num_ranks < 1 or num_slots == 0 or num_slots % num_ranks:
        raise ValueError(
            f"{num_slots} slots are not as many on each of num_ranks={num_ranks}; "
            f"give {_multiples(num_slots, max(num_ranks, 1), 1)} slots"
        )
    if (slot_LS < -1).any() or (slot_LS >= num_experts).any():
        layer, slot = np.argwhere((slot_LS < -1) | (slot_LS >= num_experts))[0].tolist()
        raise ValueError(
            f"slot {slot} of layer {layer} has expert {slot_LS[layer, slot]}, out of "
            f"0..{num_experts - 1} (-1 = empty)"
        )
    counts_LE = _counts(slot_LS.astype(np.int64), num_experts)
    if ((counts_LE == 0) & (load_LE > 0)).any():
        layer, expert = np.argwhere((counts_LE == 0) & (load_LE > 0))[0].tolist()
        raise ValueError(
            f"expert {expert} of layer {layer} has load {load_LE[layer, expert]} and no slot; give it a slot"
        )
    share_LE = np.pad(load_LE / np.maximum(counts_LE, 1), ((0, 0), (0, 1)))  # the last column: empty slots
    share_LS = np.take_along_axis(share_LE, slot_LS.astype(np.int64) % (num_experts + 1), axis=1)
    return share_LS.reshape(num_layers, num_ranks, -1).sum(axis=2)


# ---- the two greedy steps over all layers and nodes ------------------------------------------------------


class _Slots(NamedTuple):
    """Expert of each slot, and which copy of the expert it holds: 0 the first."""

    expert_LS: Integers
    copy_LS: Integers


def _greedy_slots(load_LE: Loads, num_slots: int) -> _Slots:
    """One slot for every expert in order, then the spare ones in the order in which they are given away."""
    num_layers, num_experts = load_LE.shape
    expert_LS, copy_LS = np.zeros((2, num_layers, num_slots), np.int64)
    expert_LS[:, :num_experts] = np.arange(num_experts)
    layer_L = np.arange(len(load_LE))
    counts_LE = np.ones(load_LE.shape, np.int64)
    per_slot_LE = load_LE.copy()
    for slot in range(num_experts, num_slots):
        expert_L = per_slot_LE.argmax(axis=1)
        expert_LS[:, slot], copy_LS[:, slot] = expert_L, counts_LE[layer_L, expert_L]
        counts_LE[layer_L, expert_L] += 1
        per_slot_LE[layer_L, expert_L] = load_LE[layer_L, expert_L] / counts_LE[layer_L, expert_L]
    return _Slots(expert_LS, copy_LS)


def _grouped_by_node(weight_LE: Loads, num_groups: int, num_nodes: int) -> Integers:
    """The experts in order of their node: [L, E], node n has the columns n*E/M to (n+1)*E/M - 1."""
    num_layers, num_experts = weight_LE.shape
    group_size, per_node = int(num_experts // num_groups), num_groups // num_nodes
    weight_LG = weight_LE.reshape(num_layers, num_groups, group_size).sum(axis=2)
    node_LG, rank_LG = pack(weight_LG, num_nodes, per_node)
    group_LG = np.empty_like(node_LG)  # the group at each place
    np.put_along_axis(group_LG, node_LG * per_node + rank_LG, np.arange(num_groups)[None], axis=1)
    expert_LGe = group_LG[:, :, None] * group_size + np.arange(group_size)
    return expert_LGe.reshape(num_layers, num_experts)


def _replicated_and_packed(
    weight_LE: Loads, expert_LE: Integers, num_slots: int, num_nodes: int, num_ranks: int
) -> _Slots:
    """The slots of all ranks; expert_LE: `_grouped_by_node`. A row here (R) is one node of one layer."""
    num_layers, num_experts = weight_LE.shape
    rows, slots_per_rank = num_layers * num_nodes, num_slots // num_ranks
    expert_Re = expert_LE.reshape(rows, num_experts // num_nodes)
    load_Re = np.take_along_axis(weight_LE, expert_LE, axis=1).reshape(expert_Re.shape)
    place_Rs, copy_Rs = _greedy_slots(_even_where_zero(load_Re), num_slots // num_nodes)
    per_slot_Re = load_Re / _counts(place_Rs, expert_Re.shape[1])
    # packing leaves slots without load in order, hence copies of an expert on ranks far apart
    weight_Rs = np.take_along_axis(per_slot_Re, place_Rs, axis=1)
    rank_Rs, rank_in_pack_Rs = pack(weight_Rs, num_ranks // num_nodes, slots_per_rank)
    slot_Rs = rank_Rs * slots_per_rank + rank_in_pack_Rs
    packed = np.empty((2, *slot_Rs.shape), np.int64)
    np.put_along_axis(packed[0], slot_Rs, np.take_along_axis(expert_Re, place_Rs, axis=1), axis=1)
    np.put_along_axis(packed[1], slot_Rs, copy_Rs, axis=1)
    return _Slots(packed[0].reshape(num_layers, num_slots), packed[1].reshape(num_layers, num_slots))


def _even_where_zero(load_LE: Loads) -> Loads:
    """The load, with 1 for every expert of a row that has none: nobody is preferred."""
    return np.where(load_LE.any(axis=1, keepdims=True), load_LE, 1.0)


def _counts(expert_LS: Integers, num_experts: int) -> Integers:
    """Slots of each expert [L, E]; empty slots (-1) count nowhere."""
    num_layers = len(expert_LS)
    # one more column at the front for the empty slots
    column_LS = expert_LS + 1 + np.arange(num_layers)[:, None] * (num_experts + 1)
    counts = np.bincount(column_LS.ravel(), minlength=num_layers * (num_experts + 1))
    return counts.reshape(num_layers, num_experts + 1)[:, 1:]


# ---- checks ---------------------------------------------------------------------------------------------


def _check_sizes(num_experts: int, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> None:
    """Raise ValueError with the nearest valid values unless the sizes of `rebalance_experts` fit."""
    if num_nodes < 1 or num_ranks < 1:
        raise ValueError(f"num_nodes={num_nodes} and num_gpus={num_ranks} must be at least 1")
    if num_ranks % num_nodes:
        raise ValueError(
            f"num_nodes={num_nodes} does not divide num_gpus={num_ranks}; use num_nodes="
            f"{_divisors(num_ranks, num_nodes)}, or num_gpus={_multiples(num_ranks, num_nodes, 1)}"
        )
    nearest = _multiples(num_slots, num_ranks, num_experts)
    if num_slots < num_experts:
        raise ValueError(f"num_replicas={num_slots} is less than the {num_experts} experts; use {nearest}")
    if num_slots % num_ranks:
        raise ValueError(f"num_replicas={num_slots} is not a multiple of num_gpus={num_ranks}; use {nearest}")
    if num_groups < 0 or (num_groups and num_experts % num_groups):
        raise ValueError(
            f"num_groups={num_groups} does not divide the {num_experts} experts; use "
            f"{_divisors(num_experts, num_groups)}, or 0 for no groups"
        )


def _multiples(number: int, unit: int, least: int) -> str:
    """The multiples of a unit next to a number, both at least `least`."""
    low, high = number // unit * unit, -(-max(number, least) // unit) * unit
    return f"{low} or {high}" if least <= low < high else f"{high}"


def _divisors(number: int, wanted: int) -> str:
    """The divisors of a number next to the one wanted, below and above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    low, high = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in low[-1:] + high[:1])
