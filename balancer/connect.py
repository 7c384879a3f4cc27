"""Connect: placements whose replicas join all ranks, so that any of them can pass load on.

Before the search, and its start where nothing is placed yet. For systems that split every batch exactly, what
bounds the peak is a set of ranks whose experts live there only. A replica of a hot expert on ranks that are
joined already helps against few such sets; one that joins ranks helps against all of them. So how many slots
an expert gets is EPLB's greedy rule, but where they go follows from what they join. Loads that come out
otherwise than planned then find a way through. The loops are in connect_kernels.py.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bound import Sizes, home_experts, layers, node_of_expert, sizes_of
from balancer.kernels import search_kernels
from balancer.packing import nodes_of_groups, replicate
from balancer.placement_checks import home_slots

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def connected_placement(
    load_LE: ArrayLike,
    num_slots: int,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 0,
    home_slot_E: ArrayLike | None = None,
    speed_G: Sequence[float] | Floats | None = None,
    most_experts_G: ArrayLike | None = None,
    compiled: bool = True,
) -> Integers:
    """Placement made from nothing for the exact split, good for loads near the one given.

    load_LE: [L, E] counts or shares; 0 everywhere in a layer: all experts alike;  num_slots: S over all
    ranks, a multiple of num_ranks, E or more;  num_ranks: P;  num_nodes, num_groups: with groups a multiple
    of nodes, experts stay on the node of their group, as in `rebalance_experts`;  home_slot_E: [E] slots that
    experts keep, None = all are free;  speed_G: [P] relative speeds;  most_experts_G: [P] experts that the
    memory of each rank holds, None = all its slots;  compiled: False runs the twin.

    Returns slots_LS [L, S] int64, slots contiguous by rank, -1 = empty: only where memory or the ranks leave
    no other way. No expert has two slots on a rank. Raises ValueError for a bad load, sizes that do not fit
    with the nearest that do, or homes that are no distinct slots.

    >>> connected_placement([[8, 2, 5, 1]], 6, 2).tolist()
    [[2, 0, 1, 2, 0, 3]]
    """
    load = layers(load_LE, "load")
    sizes = sizes_of(load.shape[1], num_slots, num_ranks, num_nodes, num_groups, speed_G)
    home_S = home_experts(home_slot_E, sizes)
    room_G = checked_room(most_experts_G, home_S, sizes)
    node_LE, node_G = node_limits(load, sizes, home_S)
    counts_LE = _slot_counts(_told_apart(load, home_S, sizes), node_LE, room_G, sizes)
    slots_LS = np.tile(home_S, (len(load), 1))
    connect = search_kernels(compiled).connect_layers
    connect(load, counts_LE, slots_LS, sizes.speed_G, room_G, node_LE, node_G)
    return slots_LS


def default_placement(
    num_layers: int,
    num_experts: int,
    num_slots: int,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 0,
    compiled: bool = True,
) -> Integers:
    """Placement before any load is known: the usual homes, and replicas that join the ranks.

    num_layers, num_experts, num_slots, num_ranks: L, E, S, P;  num_nodes, num_groups: with groups a multiple
    of nodes replicas stay on the node of their home.   Returns [L, S] int64, the same in every layer. Raises
    ValueError as `connected_placement` does.

    >>> default_placement(1, 4, 6, 2).tolist()
    [[0, 1, 2, 2, 3, 0]]
    """
    homes_E = home_slots(num_experts, num_slots, num_ranks)
    slots_1S = connected_placement(
        np.zeros((1, num_experts)), num_slots, num_ranks, num_nodes=num_nodes, num_groups=num_groups,
        home_slot_E=homes_E, compiled=compiled,
    )  # fmt: skip
    return np.repeat(slots_1S, num_layers, axis=0)


def node_limits(load_LE: Floats, sizes: Sizes, home_S: Integers) -> tuple[Integers, Integers]:
    """node_LE [L, E]: the node that an expert must stay on, -1 = any;  node_G [P]: the node of a rank."""
    node_G = np.arange(sizes.ranks) // (sizes.ranks // sizes.nodes)
    if sizes.nodes == 1:
        return np.full(load_LE.shape, -1, np.int64), node_G
    if (home_S >= 0).any():
        return np.tile(node_of_expert(home_S, sizes), (len(load_LE), 1)), node_G
    return nodes_of_groups(load_LE, sizes.groups, sizes.nodes), node_G


def checked_room(most_experts_G: ArrayLike | None, home_S: Integers, sizes: Sizes) -> Integers:
    """[P] int64: how many experts each rank may hold; ValueError where that is too few for all experts."""
    per_rank = sizes.slots // sizes.ranks
    if most_experts_G is None:
        return np.full(sizes.ranks, per_rank, np.int64)
    room = np.asarray(most_experts_G)
    if room.dtype.kind not in "iu" or room.shape != (sizes.ranks,):
        raise ValueError(
            f"most_experts_G is {room.dtype} {room.shape}; expected integers [P] = [{sizes.ranks}]"
        )
    homes_G = (home_S.reshape(sizes.ranks, per_rank) >= 0).sum(axis=1)
    short = room < np.maximum(homes_G, 1)
    if short.any():
        rank = int(short.argmax())
        raise ValueError(
            f"most_experts_G[{rank}]={room[rank]} is less than {max(int(homes_G[rank]), 1)}, the experts "
            "that must be there; give the rank more memory or fewer homes"
        )
    room = np.minimum(room.astype(np.int64), per_rank)
    if room.sum() < sizes.experts:
        raise ValueError(
            f"most_experts_G sums to {room.sum()}, less than the {sizes.experts} experts; use ranks with "
            "more memory, or more ranks"
        )
    return room


# ---- how many slots each expert gets ---------------------------------------------------------------------


def _told_apart(load_LE: Floats, home_S: Integers, sizes: Sizes) -> Floats:
    """The load, with equal loads told apart by so little that it changes nothing else: the first expert of
    every rank, then the second of every rank, so that replicas of equal experts come from all ranks."""
    per_rank = sizes.slots // sizes.ranks
    place_E = np.arange(sizes.experts)
    if (home_S >= 0).any():
        slot_S = np.flatnonzero(home_S >= 0)
        place_E[home_S[slot_S]] = slot_S % per_rank * sizes.ranks + slot_S // per_rank
    level_L1 = np.where(load_LE.any(axis=1), load_LE.max(axis=1), 1.0)[:, None]
    order_E = place_E.argsort().argsort()
    base_LE = np.where(load_LE.any(axis=1, keepdims=True), load_LE, 1.0)
    return base_LE + level_L1 * 1e-9 * (1.0 - order_E / max(sizes.experts, 1))


def _slot_counts(load_LE: Floats, node_LE: Integers, room_G: Integers, sizes: Sizes) -> Integers:
    """[L, E] slots of each expert: no more than there are ranks for it, all room used up."""
    if sizes.nodes == 1:
        return _counts(load_LE, int(room_G.sum()), sizes.ranks)
    room_M = room_G.reshape(sizes.nodes, -1).sum(axis=1)
    counts_LE = np.empty(load_LE.shape, np.int64)
    for node in range(sizes.nodes):
        # as many experts on every node
        inside_LE = node_LE == node
        load_Le = load_LE[inside_LE].reshape(len(load_LE), -1)
        if room_M[node] < load_Le.shape[1]:
            raise ValueError(
                f"node {node} has room for {room_M[node]} experts and must hold {load_Le.shape[1]}; give its "
                "ranks more memory, or no groups"
            )
        counts_LE[inside_LE] = _counts(load_Le, int(room_M[node]), sizes.ranks // sizes.nodes).ravel()
    return counts_LE


def _counts(load_LE: Floats, room: int, num_ranks: int) -> Integers:
    """EPLB's greedy counts, with at most one slot a rank; what that leaves over goes to the next experts."""
    room = min(room, load_LE.shape[1] * num_ranks)
    counts_LE = np.ascontiguousarray(replicate(load_LE, room))
    while (counts_LE > num_ranks).any():
        full_LE = counts_LE >= num_ranks
        for layer in np.flatnonzero((counts_LE > num_ranks).any(axis=1)).tolist():
            free_E = ~full_LE[layer]
            left = room - num_ranks * int(full_LE[layer].sum())
            counts_LE[layer, full_LE[layer]] = num_ranks
            counts_LE[layer, free_E] = replicate(load_LE[layer, free_E][None], left)[0]
    return counts_LE
