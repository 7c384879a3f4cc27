"""Kernels of split.py, phases 1 to 4: counts and placement -> rows of every slot, by flows.

Plain functions over arrays, which split.py compiles; as they stand they are its twin. One file, because
numba's cache on disk looks at the age of the entry's own file. Phase 5 is split_send.py.

A *site* is a distinct pair (expert, rank) that has a slot, sites by expert, then rank. Rows flow down arcs:
from the hub of an expert (through the hub of a node, where nodes count) to the ranks of its sites.
Experts with a single site are fixed load and have no arc.

    group_slots -> build_network -> balance: phases 1-3, the smallest capacities that hold all rows
                                 -> localise: phase 4, the cheapest flow within these capacities
                                 -> repair: no replica below min_rows

An arc carries `flow` rows, of which `kept` are free (rows that are already where the arc leads) and each one
more costs `weight`: convex, so shortest augmenting paths give the exact minimum. `route` is Dinic's blocking
flow over the arcs of reduced cost 0, from the ranks above their capacity to those with room.

I sites, G ranks that hold experts, A arcs, V vertices: ranks, then hubs. All arrays are int64, flags too.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
from typing import NamedTuple

import numpy as np

ENTRIES = ("peak_split", "slot_split")
OK, NEGATIVE, TOO_MANY, NO_SLOT, UNKNOWN_EXPERT, WRONG_HOME = range(6)
BLOCKED = -1  # no row can take this step
CLOSED = -1  # `kept` of an arc that takes no rows any more
FAR = 1 << 60
MOST_ROWS = 1 << 62
MOST_WEIGHTED_ROWS = 1 << 53  # as far as float64 counts one by one


class Sites(NamedTuple):
    """first_E [E + 1]: sites of expert e are first_E[e] to first_E[e + 1];  rank_I, slot_I [I]: rank of a
    site and the slot that takes its rows (of several on one rank the home, else the first);  home_E [E]: site
    of the home, -1 = no slot."""

    first_E: np.ndarray
    rank_I: np.ndarray
    slot_I: np.ndarray
    home_E: np.ndarray


class Network(NamedTuple):
    """Arcs [A] with their ends, site (-1: leads to a hub), expert, and cost;  arcs at each vertex v:
    arc_X[first_V[v] : first_V[v + 1]];  potential_V: dual prices;  level_V, queue_V, next_V, path_V: working
    space."""

    parent_A: np.ndarray
    child_A: np.ndarray
    site_A: np.ndarray
    expert_A: np.ndarray
    flow_A: np.ndarray
    kept_A: np.ndarray
    weight_A: np.ndarray
    first_V: np.ndarray
    arc_X: np.ndarray
    potential_V: np.ndarray
    level_V: np.ndarray
    queue_V: np.ndarray
    next_V: np.ndarray
    path_V: np.ndarray


# ---- tables ---------------------------------------------------------------------------------------------


def group_slots(slot_to_expert_S, load_E, num_ranks, home_slot_E):
    """Status and Sites of a placement; home_slot_E [E], or [0]: the first slot of each expert."""
    num_experts, per_rank = load_E.shape[0], slot_to_expert_S.shape[0] // num_ranks
    first_E = np.zeros(num_experts + 1, np.int64)
    seen_E = np.full(num_experts, -1, np.int64)  # last rank on which the expert was met
    for rank in range(num_ranks):
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = slot_to_expert_S[slot]
            if expert < -1 or expert >= num_experts:
                return UNKNOWN_EXPERT, Sites(first_E, first_E, first_E, seen_E)
            if expert >= 0 and seen_E[expert] != rank:
                seen_E[expert] = rank
                first_E[expert + 1] += 1
    for expert in range(num_experts):
        first_E[expert + 1] += first_E[expert]
    rank_I = np.empty(first_E[-1], np.int64)
    slot_I = np.empty(first_E[-1], np.int64)
    next_E = first_E[:-1].copy()
    home_E = first_E[:-1].copy()
    for expert in range(num_experts):
        if first_E[expert] == first_E[expert + 1]:
            home_E[expert] = -1
            if load_E[expert]:
                return NO_SLOT, Sites(first_E, rank_I, slot_I, home_E)
    sites = Sites(first_E, rank_I, slot_I, home_E)
    given = home_slot_E.shape[0] > 0
    for rank in range(num_ranks):
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = slot_to_expert_S[slot]
            if expert < 0:
                continue
            site = next_E[expert]
            if site == first_E[expert] or rank_I[site - 1] != rank:
                rank_I[site] = rank
                slot_I[site] = slot
                next_E[expert] = site + 1
            if given and home_slot_E[expert] == slot:
                slot_I[next_E[expert] - 1] = slot
                home_E[expert] = next_E[expert] - 1
    if given:
        for expert in range(num_experts):
            home = home_E[expert]
            if home >= 0 and slot_I[home] != home_slot_E[expert]:
                return WRONG_HOME, sites
    return OK, sites


def build_network(sites, load_E, num_ranks, ranks_per_node):
    """The forest of all experts that have rows and several sites, without flow, cost and potential.

    ranks_per_node: 0 = hubs of experts only. An expert's arcs are contiguous, and so are a node's, after the
    arc to its hub.
    """
    size = sites.rank_I.shape[0] * (2 if ranks_per_node else 1)
    parent_A, child_A = np.empty(size, np.int64), np.empty(size, np.int64)
    site_A, expert_A = np.empty(size, np.int64), np.empty(size, np.int64)
    arcs, vertices = 0, num_ranks
    for expert in range(load_E.shape[0]):
        first, end = sites.first_E[expert], sites.first_E[expert + 1]
        if end - first < 2 or load_E[expert] == 0:
            continue
        hub = vertices
        parent = hub
        vertices += 1
        node = -1
        for site in range(first, end):
            if ranks_per_node and sites.rank_I[site] // ranks_per_node != node:
                node = sites.rank_I[site] // ranks_per_node
                parent = vertices
                vertices += 1
                parent_A[arcs], child_A[arcs], site_A[arcs], expert_A[arcs] = hub, parent, -1, expert
                arcs += 1
            parent_A[arcs], child_A[arcs], site_A[arcs], expert_A[arcs] = (
                parent,
                sites.rank_I[site],
                site,
                expert,
            )
            arcs += 1
    first_V, arc_X = arcs_of_vertices(parent_A[:arcs], child_A[:arcs], vertices)
    return Network(
        parent_A[:arcs],
        child_A[:arcs],
        site_A[:arcs],
        expert_A[:arcs],
        np.zeros(arcs, np.int64),
        np.zeros(arcs, np.int64),
        np.zeros(arcs, np.int64),
        first_V,
        arc_X,
        np.zeros(vertices, np.int64),
        np.empty(vertices, np.int64),
        np.empty(vertices, np.int64),
        np.empty(vertices, np.int64),
        np.empty(vertices, np.int64),
    )


def arcs_of_vertices(parent_A, child_A, vertices):
    """first_V [V + 1] and arc_X [2 A]: the arcs at each vertex, ascending."""
    first_V = np.zeros(vertices + 1, np.int64)
    for arc in range(parent_A.shape[0]):
        first_V[parent_A[arc] + 1] += 1
        first_V[child_A[arc] + 1] += 1
    for vertex in range(vertices):
        first_V[vertex + 1] += first_V[vertex]
    next_V = first_V[:-1].copy()
    arc_X = np.empty(2 * parent_A.shape[0], np.int64)
    for arc in range(parent_A.shape[0]):
        for vertex in (parent_A[arc], child_A[arc]):
            arc_X[next_V[vertex]] = arc
            next_V[vertex] += 1
    return first_V, arc_X


# ---- flow -----------------------------------------------------------------------------------------------


def slack(net, arc, vertex):
    """Reduced cost, 0 or more, of moving a row over an arc away from `vertex`; BLOCKED where none can."""
    flow, kept = net.flow_A[arc], net.kept_A[arc]
    parent, child = net.parent_A[arc], net.child_A[arc]
    down = net.potential_V[parent] - net.potential_V[child]
    if vertex == parent:  # one row more on the arc
        if kept == CLOSED:
            return BLOCKED
        return down + net.weight_A[arc] if flow >= kept else down
    if flow == 0:
        return BLOCKED
    return -down - net.weight_A[arc] if flow > kept else -down


def mark_levels(net, load_G, cap_G):
    """Breadth first from the ranks above capacity over arcs of slack 0, up to the first with room.

    Fills level_V (-1 = not reached) and queue_V.   Returns the number of vertices reached, and whether one is
    a rank with room.
    """
    net.level_V[:] = -1
    num_ranks, reached = load_G.shape[0], 0
    for rank in range(num_ranks):
        if load_G[rank] > cap_G[rank]:
            net.level_V[rank] = 0
            net.queue_V[reached] = rank
            reached += 1
    head, last = 0, FAR
    while head < reached:
        vertex = net.queue_V[head]
        head += 1
        if net.level_V[vertex] >= last:
            break
        for k in range(net.first_V[vertex], net.first_V[vertex + 1]):
            arc = net.arc_X[k]
            other = net.parent_A[arc] + net.child_A[arc] - vertex
            if net.level_V[other] < 0 and slack(net, arc, vertex) == 0:
                net.level_V[other] = net.level_V[vertex] + 1
                net.queue_V[reached] = other
                reached += 1
                if other < num_ranks and load_G[other] < cap_G[other]:
                    last = net.level_V[other]
    return reached, last < FAR


def find_path(net, source, load_G, cap_G):
    """Depth first along the levels to a rank with room; arcs into path_V.   Returns that rank and the length,
    -1 and 0 where there is none. next_V says where each vertex goes on looking."""
    num_ranks = load_G.shape[0]
    vertex, length = source, 0
    while True:
        if vertex < num_ranks and load_G[vertex] < cap_G[vertex]:
            return vertex, length
        advanced = False
        while net.next_V[vertex] < net.first_V[vertex + 1]:
            arc = net.arc_X[net.next_V[vertex]]
            other = net.parent_A[arc] + net.child_A[arc] - vertex
            if net.level_V[other] == net.level_V[vertex] + 1 and slack(net, arc, vertex) == 0:
                net.path_V[length] = arc
                length += 1
                vertex = other
                advanced = True
                break
            net.next_V[vertex] += 1
        if advanced:
            continue
        if length == 0:
            return -1, 0
        length -= 1
        arc = net.path_V[length]
        vertex = net.parent_A[arc] + net.child_A[arc] - vertex
        net.next_V[vertex] += 1


def push_path(net, source, length, rows):
    """Move up to `rows` along path_V, as many as keep every arc at its present cost.   Returns how many."""
    vertex = source
    for k in range(length):
        arc = net.path_V[k]
        flow, kept = net.flow_A[arc], net.kept_A[arc]
        if vertex != net.parent_A[arc]:
            rows = min(rows, flow - kept if flow > kept else flow)
        elif flow < kept:
            rows = min(rows, kept - flow)
        vertex = net.parent_A[arc] + net.child_A[arc] - vertex
    vertex = source
    for k in range(length):
        arc = net.path_V[k]
        net.flow_A[arc] += rows if vertex == net.parent_A[arc] else -rows
        vertex = net.parent_A[arc] + net.child_A[arc] - vertex
    return rows


def route(net, load_G, cap_G):
    """Move rows from ranks above capacity to ranks with room, over arcs of slack 0, until no more can.

    Returns 0 where no rank is above its capacity, else how many vertices, queue_V's first, its rows reach.
    """
    while True:
        reached, found = mark_levels(net, load_G, cap_G)
        if not found:
            return reached
        net.next_V[:] = net.first_V[:-1]
        for source in range(load_G.shape[0]):
            while load_G[source] > cap_G[source]:
                rank, length = find_path(net, source, load_G, cap_G)
                if rank < 0:
                    break
                most = min(load_G[source] - cap_G[source], cap_G[rank] - load_G[rank])
                rows = push_path(net, source, length, most)
                load_G[source] -= rows
                load_G[rank] += rows


# ---- phases 1 to 3: the peak ----------------------------------------------------------------------------


def raise_capacity(cap_G, in_cut_G, load, speed_G):
    """The smallest capacities of one peak, none below the present one, that hold `load` within the cut.

    The peak is a number of rows, the capacity of every rank; with speeds it is a time, as numpy divides:
    a rank's capacity is the largest number of rows with rows / speed <= peak.
    """
    if speed_G.shape[0] == 0:
        cap_G[:] = max(cap_G[0], -(-load // in_cut_G.sum()))
        return
    speed, size = 0.0, 0
    for rank in range(cap_G.shape[0]):
        if in_cut_G[rank]:
            speed += speed_G[rank]
            size += 1
    # below the answer by more than the sums can be wrong; from there on from one rank's next row to the next
    peak = (load / speed) * (1.0 - 4.0e-16 * (size + 4))
    while True:
        held, step = 0, np.inf
        for rank in range(cap_G.shape[0]):
            cap_G[rank] = max(cap_G[rank], rows_within(peak, speed_G[rank]))
            if in_cut_G[rank]:
                held = min(held + cap_G[rank], load)
                step = min(step, (cap_G[rank] + 1) / speed_G[rank])
        if held >= load:
            return
        peak = step


def rows_within(peak, speed):
    """The largest number of rows with rows / speed <= peak, at most MOST_WEIGHTED_ROWS."""
    if peak * speed >= MOST_WEIGHTED_ROWS:
        return MOST_WEIGHTED_ROWS
    rows = int(peak * speed)
    while rows > 0 and rows / speed > peak:
        rows -= 1
    while (rows + 1) / speed <= peak:
        rows += 1
    return rows


def route_raising(net, load_G, cap_G, cut_G, speed_G):
    """Route, raising the capacities as little as they must: Newton's method on minimum cuts.

    Rows that are left over reach a set X of ranks and no room; all rows of X stay in X, so the peak is at
    least load(X) over X. cut_G flags the last such X.
    """
    num_ranks = load_G.shape[0]
    while True:
        reached = route(net, load_G, cap_G)
        if reached == 0:
            return
        cut_G[:] = 0
        load = 0
        for k in range(reached):
            rank = net.queue_V[k]
            if rank < num_ranks:
                cut_G[rank] = 1
                load += load_G[rank]
        raise_capacity(cap_G, cut_G, load, speed_G)


def start_capacity(total, load_G, cut_G, speed_G):
    """Capacities of the larger of two bounds: an even load, and the fullest rank. cut_G flags all ranks, or
    that one."""
    cap_G = np.zeros(load_G.shape[0], np.int64)
    cut_G[:] = 1
    raise_capacity(cap_G, cut_G, total, speed_G)
    for rank in range(load_G.shape[0]):
        if load_G[rank] > cap_G[rank]:
            cut_G[:] = 0
            cut_G[rank] = 1
            raise_capacity(cap_G, cut_G, load_G[rank], speed_G)
    return cap_G


def pour(net, arc, end, rows, load_G, cap_G):
    """Add rows to the arcs arc..end that lead to ranks, in order, as there is room; the first takes the
    rest."""
    rest_arc = -1
    for a in range(arc, end):
        if net.site_A[a] < 0:
            continue
        if rest_arc < 0:
            rest_arc = a
        rank = net.child_A[a]
        part = min(rows, max(cap_G[rank] - load_G[rank], 0))
        net.flow_A[a] += part
        load_G[rank] += part
        rows -= part
    net.flow_A[rest_arc] += rows
    load_G[net.child_A[rest_arc]] += rows


def end_of_run(owner_A, arc):
    """The end of the run of equal entries that starts at `arc`."""
    end = arc
    while end < owner_A.shape[0] and owner_A[end] == owner_A[arc]:
        end += 1
    return end


def balance(load_E, sites, speed_G, extra_G):
    """Phases 1 to 3.   Returns rows_I, load_G, cap_G, cut_G: rows of every site, load and capacity of every
    rank at the smallest peak, and the cut that proves it."""
    load_G, rows_I = extra_G.copy(), np.zeros(sites.rank_I.shape[0], np.int64)
    total = extra_G.sum()
    for expert in range(load_E.shape[0]):
        site = sites.first_E[expert]
        total += load_E[expert]
        if sites.first_E[expert + 1] - site == 1:
            rows_I[site] = load_E[expert]
            load_G[sites.rank_I[site]] += load_E[expert]
    cut_G = np.empty(load_G.shape[0], np.int64)
    cap_G = start_capacity(total, load_G, cut_G, speed_G)
    net = build_network(sites, load_E, load_G.shape[0], 0)
    arc = 0
    while arc < net.flow_A.shape[0]:
        end = end_of_run(net.expert_A, arc)
        pour(net, arc, end, load_E[net.expert_A[arc]], load_G, cap_G)
        arc = end
    route_raising(net, load_G, cap_G, cut_G, speed_G)
    for arc in range(net.flow_A.shape[0]):
        rows_I[net.site_A[arc]] = net.flow_A[arc]
    return rows_I, load_G, cap_G, cut_G


# ---- phase 4: the fewest rows off their rank, then off their node ---------------------------------------


def localise(counts_PE, load_E, sites, ranks_per_node, cap_G, rows_I, load_G):
    """Phase 4: rewrite rows_I and load_G to the cheapest flow within the capacities.

    It starts from all rows where they are, capacities aside, which costs least of all, and moves the rows
    above capacity over shortest paths: successive shortest paths, all of one length at a time.
    """
    net = build_network(sites, load_E, load_G.shape[0], ranks_per_node)
    price_local_rows(net, counts_PE, ranks_per_node)
    start_local(net, load_E, rows_I, load_G, cap_G)
    while True:
        reached = route(net, load_G, cap_G)
        if reached == 0:
            break
        raise_potentials(net, load_G, cap_G, reached)
    for arc in range(net.flow_A.shape[0]):
        if net.site_A[arc] >= 0:
            rows_I[net.site_A[arc]] = net.flow_A[arc]


def price_local_rows(net, counts_PE, ranks_per_node):
    """Set what each arc keeps free, its weight, and the potentials to start from.

    A row off its rank weighs more than any path of rows off their nodes: lexicographic.
    """
    num_ranks, num_vertices = counts_PE.shape[0], net.potential_V.shape[0]
    off_node = 1 if ranks_per_node else 0
    off_rank = 2 * num_vertices + 2 if ranks_per_node else 1
    net.potential_V[:num_ranks] = off_rank + off_node
    node_arc = 0
    for arc in range(net.flow_A.shape[0]):
        expert = net.expert_A[arc]
        if net.site_A[arc] < 0:
            node_arc = arc
            net.weight_A[arc] = off_node
            net.potential_V[net.child_A[arc]] = off_node
            continue
        rank = net.child_A[arc]
        net.weight_A[arc] = off_rank
        net.kept_A[arc] = counts_PE[rank, expert]
        if ranks_per_node and node_arc == arc - 1:
            start = rank - rank % ranks_per_node
            net.kept_A[node_arc] = counts_PE[start : start + ranks_per_node, expert].sum()


def start_local(net, load_E, rows_I, load_G, cap_G):
    """Local rows stay on their rank, other rows of a node with a site in it, the rest goes anywhere."""
    for arc in range(net.flow_A.shape[0]):
        if net.site_A[arc] >= 0:
            rank = net.child_A[arc]
            load_G[rank] += net.kept_A[arc] - rows_I[net.site_A[arc]]
            net.flow_A[arc] = net.kept_A[arc]
    arc = 0
    while arc < net.flow_A.shape[0]:
        end = end_of_run(net.expert_A, arc)
        rest = load_E[net.expert_A[arc]]
        if net.site_A[arc] >= 0:
            pour(net, arc, end, rest - net.kept_A[arc:end].sum(), load_G, cap_G)
        else:
            start_local_nodes(net, arc, end, rest, load_G, cap_G)
        arc = end


def start_local_nodes(net, first, end, rest, load_G, cap_G):
    """The same for the arcs of one expert with hubs of nodes."""
    arc = first
    while arc < end:
        node_end = arc + 1 + end_of_run(net.parent_A[arc + 1 : end], 0)
        inside = net.kept_A[arc]
        pour(net, arc + 1, node_end, inside - net.kept_A[arc + 1 : node_end].sum(), load_G, cap_G)
        rest -= inside
        arc = node_end
    pour(net, first, end, rest, load_G, cap_G)
    node_arc = first
    for arc in range(first, end):
        if net.site_A[arc] < 0:
            node_arc = arc
        else:
            net.flow_A[node_arc] += net.flow_A[arc]


def raise_potentials(net, load_G, cap_G, reached):
    """Raise the potentials by the distance, in slack, from queue_V's first `reached`, at most by that of the
    nearest rank with room.

    So ranks with room have the highest potential of all ranks, each the same, and the nearest in slack is
    the cheapest to reach. Distances by correcting labels in a ring.
    """
    num_ranks, size = load_G.shape[0], net.potential_V.shape[0]
    distance_V = np.full(size, FAR, np.int64)
    waiting_V = np.zeros(size, np.int64)
    for k in range(reached):
        distance_V[net.queue_V[k]] = 0
        waiting_V[net.queue_V[k]] = 1
    nearest, head, waiting = FAR, 0, reached
    while waiting:
        vertex = net.queue_V[head]
        head = head + 1 if head + 1 < size else 0
        waiting -= 1
        waiting_V[vertex] = 0
        for k in range(net.first_V[vertex], net.first_V[vertex + 1]):
            arc = net.arc_X[k]
            step = slack(net, arc, vertex)
            if step == BLOCKED:
                continue
            other = net.parent_A[arc] + net.child_A[arc] - vertex
            distance = distance_V[vertex] + step
            if distance >= min(distance_V[other], nearest):
                continue
            distance_V[other] = distance
            if other < num_ranks and load_G[other] < cap_G[other]:
                nearest = distance
            if not waiting_V[other]:
                waiting_V[other] = 1
                place = head + waiting
                net.queue_V[place if place < size else place - size] = other
                waiting += 1
    for vertex in range(size):
        net.potential_V[vertex] += min(distance_V[vertex], nearest)


# ---- min_rows -------------------------------------------------------------------------------------------


def repair(load_E, sites, min_rows, speed_G, cap_G, rows_I, load_G):
    """Rewrite rows_I and load_G so that every site but an expert's home has no rows or at least min_rows.

    Greedy: the site with the fewest rows is closed where the capacities allow it, else filled up from others
    of its expert, else closed with higher capacities. Ends, as every closing is for good.
    """
    net = build_network(sites, load_E, load_G.shape[0], 0)
    for arc in range(net.flow_A.shape[0]):
        net.flow_A[arc] = rows_I[net.site_A[arc]]
    cut_G = np.empty(load_G.shape[0], np.int64)
    while True:
        arc = smallest_offender(net, sites, min_rows)
        if arc < 0:
            break
        flow_A, loads_G = net.flow_A.copy(), load_G.copy()
        close_arc(net, arc, sites, load_G)
        if route(net, load_G, cap_G) == 0:
            continue
        closed_A, closed_G = net.flow_A.copy(), load_G.copy()
        net.flow_A[:], load_G[:] = flow_A, loads_G
        net.kept_A[arc] = 0
        if not fill_up(net, arc, sites, min_rows, load_G, cap_G):
            net.flow_A[:], load_G[:] = closed_A, closed_G
            net.kept_A[arc] = CLOSED
            route_raising(net, load_G, cap_G, cut_G, speed_G)
    for arc in range(net.flow_A.shape[0]):
        rows_I[net.site_A[arc]] = net.flow_A[arc]


def smallest_offender(net, sites, min_rows):
    """The arc with the fewest rows of those with more than none and less than min_rows; -1 = none."""
    found, fewest = -1, min_rows
    for arc in range(net.flow_A.shape[0]):
        if 0 < net.flow_A[arc] < fewest and net.site_A[arc] != sites.home_E[net.expert_A[arc]]:
            found, fewest = arc, net.flow_A[arc]
    return found


def close_arc(net, arc, sites, load_G):
    """No rows over this arc any more: what it has goes to the expert's home."""
    home = arc + sites.home_E[net.expert_A[arc]] - net.site_A[arc]
    rows = net.flow_A[arc]
    net.flow_A[arc], net.kept_A[arc] = 0, CLOSED
    net.flow_A[home] += rows
    load_G[net.child_A[arc]] -= rows
    load_G[net.child_A[home]] += rows


def fill_up(net, arc, sites, min_rows, load_G, cap_G):
    """Bring an arc to min_rows with rows that other sites of its expert can spare; False where that fails."""
    rank, need = net.child_A[arc], min_rows - net.flow_A[arc]
    if load_G[rank] + need > cap_G[rank]:
        return False
    expert = net.expert_A[arc]
    first = arc - (net.site_A[arc] - sites.first_E[expert])
    end = end_of_run(net.expert_A, first)
    spare_A = np.zeros(end - first, np.int64)
    for other in range(first, end):
        floor = 0 if net.site_A[other] == sites.home_E[expert] else min_rows
        if other != arc:
            spare_A[other - first] = max(net.flow_A[other] - floor, 0)
    if spare_A.sum() < need:
        return False
    for other in range(first, end):
        rows = min(need, spare_A[other - first])
        need -= rows
        net.flow_A[other] -= rows
        net.flow_A[arc] += rows
        load_G[net.child_A[other]] -= rows
        load_G[rank] += rows
    return True


# ---- entries --------------------------------------------------------------------------------------------


def sum_counts(counts_PE, extra_G, load_E, weighted):
    """Add the counts of every source to load_E.   Returns a status: none negative, not too many."""
    most = MOST_WEIGHTED_ROWS if weighted else MOST_ROWS
    seen = np.int64(0)
    for source in range(counts_PE.shape[0]):
        for expert in range(counts_PE.shape[1]):
            seen |= counts_PE[source, expert]
        load_E += counts_PE[source]
    if seen < 0:
        return NEGATIVE
    total = 0.0
    for rank in range(extra_G.shape[0]):
        total += extra_G[rank]
    if total + np.float64(seen) * counts_PE.size < most:
        return OK
    for source in range(counts_PE.shape[0]):
        for expert in range(counts_PE.shape[1]):
            total += np.float64(counts_PE[source, expert])
    return OK if total < most else TOO_MANY


def peak_split(load_E, slot_to_expert_S, speed_G, extra_G, rows_S, load_G, cut_G):
    """Phases 1 to 3 of one load [E].   Writes rows_S, load_G, cut_G; returns a status."""
    checked_E, no_home = np.zeros(load_E.shape[0], np.int64), np.empty(0, np.int64)
    status = sum_counts(load_E.reshape(1, -1), extra_G, checked_E, speed_G.shape[0] > 0)
    if status != OK:
        return status
    status, sites = group_slots(slot_to_expert_S, checked_E, load_G.shape[0], no_home)
    if status != OK:
        return status
    rows_I, load_G[:], _, cut_G[:] = balance(checked_E, sites, speed_G, extra_G)
    for site in range(rows_I.shape[0]):
        rows_S[sites.slot_I[site]] = rows_I[site]
    return OK


def slot_split(
    counts_PE, slot_to_expert_S, home_slot_E, speed_G, extra_G, options, rows_S, load_G, optimum_G
):
    """Phases 1 to 4, then the repair.   Writes rows_S, load_G, and optimum_G, the loads before the repair;
    returns a status.

    options: local (source p is rank p, and rows off it count), ranks_per_node (0 = nodes count nothing),
    min_rows.
    """
    local, ranks_per_node, min_rows = options
    load_E = np.zeros(counts_PE.shape[1], np.int64)
    status = sum_counts(counts_PE, extra_G, load_E, speed_G.shape[0] > 0)
    if status != OK:
        return status
    status, sites = group_slots(slot_to_expert_S, load_E, load_G.shape[0], home_slot_E)
    if status != OK:
        return status
    rows_I, load_G[:], cap_G, _ = balance(load_E, sites, speed_G, extra_G)
    if local:
        nodes = ranks_per_node if 1 < ranks_per_node < load_G.shape[0] else 0
        localise(counts_PE, load_E, sites, nodes, cap_G, rows_I, load_G)
    optimum_G[:] = load_G
    if min_rows > 1:
        repair(load_E, sites, min_rows, speed_G, cap_G, rows_I, load_G)
    for site in range(rows_I.shape[0]):
        rows_S[sites.slot_I[site]] = rows_I[site]
    return OK
