"""Kernels of connect.py: replicas that join ranks, then the other experts around them.

Plain functions over arrays, which kernels.py compiles; as they stand they are its twin. Ranks that share an
expert can pass load to each other; ranks that are joined, over others or not, are one *component*. A slot of
an expert goes to a component that it is not in yet, as long as there is one: then every set of ranks has an
expert through which it can pass load on.

G ranks, S slots, E experts; integers are int64.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

ENTRIES = ("connect_layers",)


def lightest_rank(load_G, speed_G, filled_G, most_G, taken_G, component_G, joined_G, node_G, node):
    """The least loaded rank for its speed with room, not taken, in a component that is not joined; -1 = none.

    node: that it must be in, -1 = any. Of equal ranks the one with the fewest experts, then the first.
    """
    best = -1
    for rank in range(load_G.shape[0]):
        if filled_G[rank] >= most_G[rank] or taken_G[rank] or joined_G[component_G[rank]]:
            continue
        if node >= 0 and node_G[rank] != node:
            continue
        if best >= 0:
            mine, least = load_G[rank] / speed_G[rank], load_G[best] / speed_G[best]
            if mine > least or (mine == least and filled_G[rank] >= filled_G[best]):
                continue
        best = rank
    return best


def place_expert(
    expert,
    count,
    share,
    slots_S,
    load_G,
    speed_G,
    filled_G,
    room_G,
    node_G,
    node,
    component_G,
    taken_G,
    joined_G,
):
    """Give an expert `count` slots on different ranks (its slots that are there count), fewer where no rank
    has room."""
    num_ranks = load_G.shape[0]
    per_rank = slots_S.shape[0] // num_ranks
    taken_G[:] = 0
    joined_G[:] = 0
    have = 0
    first = -1
    for slot in range(slots_S.shape[0]):
        if slots_S[slot] == expert:
            rank = slot // per_rank
            taken_G[rank] = 1
            joined_G[component_G[rank]] = 1
            first = component_G[rank]
            load_G[rank] += share
            have += 1
    while have < count:
        # a rank keeps a slot for an expert of its own, as long as others have more
        rank = lightest_rank(
            load_G, speed_G, filled_G, room_G - 1, taken_G, component_G, joined_G, node_G, node
        )
        if rank < 0:
            rank = lightest_rank(
                load_G, speed_G, filled_G, room_G, taken_G, component_G, joined_G, node_G, node
            )
        if rank < 0:
            rank = lightest_rank(
                load_G, speed_G, filled_G, room_G, taken_G, component_G, np.zeros_like(joined_G), node_G, node
            )
        if rank < 0:
            return
        slot = rank * per_rank
        while slots_S[slot] >= 0:
            slot += 1
        slots_S[slot] = expert
        taken_G[rank] = 1
        filled_G[rank] += 1
        load_G[rank] += share
        have += 1
        joined = component_G[rank]
        if first < 0:
            first = joined
        for other in range(num_ranks):
            if component_G[other] == joined:
                component_G[other] = first
        joined_G[first] = 1


def connect_layers(load_LE, counts_LE, slots_LS, speed_G, room_G, node_LE, node_G):
    """Fill slots_LS, which holds the homes or nothing (-1): experts with several slots, the lightest first,
    then those with one, the heaviest first."""
    num_layers, num_experts = load_LE.shape
    num_ranks = speed_G.shape[0]
    per_rank = slots_LS.shape[1] // num_ranks
    taken_G, joined_G = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for layer in range(num_layers):
        slots_S = slots_LS[layer]
        load_G, filled_G = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
        component_G = np.arange(num_ranks)
        for slot in range(slots_S.shape[0]):
            if slots_S[slot] >= 0:
                filled_G[slot // per_rank] += 1
                if counts_LE[layer, slots_S[slot]] == 1:
                    load_G[slot // per_rank] += load_LE[layer, slots_S[slot]]
        share_E = load_LE[layer] / counts_LE[layer]
        order_E = np.argsort(load_LE[layer], kind="mergesort")
        for expert in order_E:
            count = counts_LE[layer, expert]
            if count > 1:
                place_expert(
                    expert, count, share_E[expert], slots_S, load_G, speed_G, filled_G, room_G, node_G,
                    node_LE[layer, expert], component_G, taken_G, joined_G,
                )  # fmt: skip
        for i in range(num_experts - 1, -1, -1):
            expert = order_E[i]
            if counts_LE[layer, expert] != 1:
                continue
            if (slots_S == expert).any():
                continue
            taken_G[:] = 0
            joined_G[:] = 0
            rank = lightest_rank(
                load_G,
                speed_G,
                filled_G,
                room_G,
                taken_G,
                component_G,
                joined_G,
                node_G,
                node_LE[layer, expert],
            )
            slot = rank * per_rank
            while slots_S[slot] >= 0:
                slot += 1
            slots_S[slot] = expert
            filled_G[rank] += 1
            load_G[rank] += load_LE[layer, expert]
        fill_rest(share_E, slots_S, filled_G, room_G, node_G, node_LE[layer], counts_LE[layer])


def fill_rest(share_E, slots_S, filled_G, room_G, node_G, node_E, counts_E):
    """Slots that no expert could take in its turn: the one with the most load for each slot of those that the
    rank does not hold."""
    num_ranks = filled_G.shape[0]
    per_rank = slots_S.shape[0] // num_ranks
    for rank in range(num_ranks):
        start, end = rank * per_rank, (rank + 1) * per_rank
        while filled_G[rank] < room_G[rank]:
            best = -1
            for expert in range(share_E.shape[0]):
                if node_E[expert] >= 0 and node_E[expert] != node_G[rank]:
                    continue
                if (slots_S[start:end] == expert).any():
                    continue
                if best < 0 or share_E[expert] > share_E[best]:
                    best = expert
            if best < 0:
                break
            slot = start
            while slots_S[slot] >= 0:
                slot += 1
            slots_S[slot] = best
            filled_G[rank] += 1
            share_E[best] *= counts_E[best] / (counts_E[best] + 1.0)
            counts_E[best] += 1
