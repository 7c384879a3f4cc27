"""Kernels of search.py: local search over placements, scored by the exact split of every scenario.

Plain functions over arrays, which kernels.py compiles; as they stand they are its twin. One file, because
numba's cache on disk looks at the age of the entry's own file.

    Place, Flow  ->  settle        the smallest peak of one load on a placement, from any rows to start with
    Scene        ->  score_change  mean and tail of the peaks of all scenarios after one or two slots change
    Task         ->  search_layer  changes, the best or the first that pays, until none pays

Rows of an expert may move from one of its slots to another, so load moves from rank to rank along replicated
experts. `settle` is Newton's method on minimum cuts, as in split_kernels.py, but on a placement that changes
under it: rows and cut of every scenario are kept, and a change is scored from there. The last cut of a
scenario bounds its new peak from below at once, which rejects most changes.

G ranks, s slots on each, S = G * s, E experts, K scenarios. Integers are int64, flags too; peaks float64.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
from typing import NamedTuple

import numpy as np

ENTRIES = ("search_layers", "peak_layers")
NONE = -1
MOST_ROWS = 4.0e18  # as far as int64 goes, nearly; where speeds differ that much
LEAST_GAIN = 1e-9  # of the objective: less is rounding
SPARED = 0.03  # what taking away a slot of an expert with all the load would count, in units of the objective


class Place(NamedTuple):
    """A placement that changes: expert_S [S] (-1 = empty), the slots of an expert as a ring: first_E [E],
    next_S [S] (-1 = the last);  count_E [E]: its slots;  fixed_S [S]: 1 where the slot is a home."""

    expert_S: np.ndarray
    next_S: np.ndarray
    first_E: np.ndarray
    count_E: np.ndarray
    fixed_S: np.ndarray


class Flow(NamedTuple):
    """Rows of one scenario: rows_S [S], load_G [G], cap_G [G], cut_G [G] flags of the last cut; and working
    space: level_G, queue_G, slot_G and other_G (where each rank goes on looking), path_G."""

    rows_S: np.ndarray
    load_G: np.ndarray
    cap_G: np.ndarray
    cut_G: np.ndarray
    level_G: np.ndarray
    queue_G: np.ndarray
    slot_G: np.ndarray
    other_G: np.ndarray
    path_G: np.ndarray


def new_flow(num_slots, num_ranks):
    return Flow(
        np.zeros(num_slots, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
    )


def in_order(values):
    """The sum from first to last: numpy adds eight and more up in another order than the compiled code."""
    total = 0.0
    for value in values:
        total += value
    return total


# ---- the placement ---------------------------------------------------------------------------------------


def new_place(slots_S, fixed_S, num_experts):
    place = Place(
        np.full(slots_S.shape[0], NONE, np.int64),
        np.full(slots_S.shape[0], NONE, np.int64),
        np.full(num_experts, NONE, np.int64),
        np.zeros(num_experts, np.int64),
        fixed_S,
    )
    for slot in range(slots_S.shape[0]):
        put(place, slot, slots_S[slot])
    return place


def put(place, slot, expert):
    """Let an expert (-1 = nobody) have a slot, in ascending order of its slots."""
    old = place.expert_S[slot]
    if old >= 0:
        place.count_E[old] -= 1
        if place.first_E[old] == slot:
            place.first_E[old] = place.next_S[slot]
        else:
            before = place.first_E[old]
            while place.next_S[before] != slot:
                before = place.next_S[before]
            place.next_S[before] = place.next_S[slot]
    place.expert_S[slot] = expert
    place.next_S[slot] = NONE
    if expert >= 0:
        place.count_E[expert] += 1
        first = place.first_E[expert]
        if first < 0 or first > slot:
            place.next_S[slot] = first
            place.first_E[expert] = slot
        else:
            before = first
            while place.next_S[before] >= 0 and place.next_S[before] < slot:
                before = place.next_S[before]
            place.next_S[slot] = place.next_S[before]
            place.next_S[before] = slot


def on_rank(place, expert, rank, per_rank):
    """Whether an expert has a slot on a rank."""
    slot = place.first_E[expert]
    while slot >= 0:
        if slot // per_rank == rank:
            return True
        slot = place.next_S[slot]
    return False


# ---- the smallest peak of one scenario -------------------------------------------------------------------


def pour(place, flow, expert, rows, per_rank):
    """Add rows of an expert to its slots in order as there is room; the first takes the rest."""
    slot = place.first_E[expert]
    while slot >= 0 and rows > 0:
        rank = slot // per_rank
        part = min(rows, max(flow.cap_G[rank] - flow.load_G[rank], 0))
        flow.rows_S[slot] += part
        flow.load_G[rank] += part
        rows -= part
        slot = place.next_S[slot]
    if rows > 0:
        slot = place.first_E[expert]
        flow.rows_S[slot] += rows
        flow.load_G[slot // per_rank] += rows


def set_caps(flow, peak, speed_G):
    """A capacity is the least whole number of rows that holds the peak."""
    for rank in range(speed_G.shape[0]):
        flow.cap_G[rank] = int(min(np.ceil(peak * speed_G[rank] - 1e-9), MOST_ROWS))


def start_rows(place, flow, load_E, floor, speed_G, per_rank):
    """All rows where they must be, and those of replicated experts where there is room at the floor."""
    flow.rows_S[:] = 0
    flow.load_G[:] = 0
    set_caps(flow, floor, speed_G)
    for expert in range(load_E.shape[0]):
        if place.count_E[expert] == 1:
            slot = place.first_E[expert]
            flow.rows_S[slot] = load_E[expert]
            flow.load_G[slot // per_rank] += load_E[expert]
    for expert in range(load_E.shape[0]):
        if place.count_E[expert] > 1 and load_E[expert] > 0:
            pour(place, flow, expert, load_E[expert], per_rank)


def mark_levels(place, flow, per_rank):
    """Breadth first from the ranks above capacity.   Returns how many were reached, and whether one has
    room."""
    num_ranks = flow.load_G.shape[0]
    reached = 0
    for rank in range(num_ranks):
        flow.level_G[rank] = NONE
        if flow.load_G[rank] > flow.cap_G[rank]:
            flow.level_G[rank] = 0
            flow.queue_G[reached] = rank
            reached += 1
    head, last = 0, num_ranks + 1
    while head < reached:
        rank = flow.queue_G[head]
        head += 1
        if flow.level_G[rank] >= last:
            break
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = place.expert_S[slot]
            if expert < 0 or place.count_E[expert] < 2 or flow.rows_S[slot] == 0:
                continue
            other = place.first_E[expert]
            while other >= 0:
                to = other // per_rank
                if flow.level_G[to] < 0:
                    flow.level_G[to] = flow.level_G[rank] + 1
                    flow.queue_G[reached] = to
                    reached += 1
                    if flow.load_G[to] < flow.cap_G[to]:
                        last = flow.level_G[to]
                other = place.next_S[other]
    return reached, last <= num_ranks


def push_from(place, flow, source, per_rank):
    """Move rows from a rank above capacity along the levels to ranks with room, as long as there is a way.

    path_G holds the ranks of the path, slot_G[rank] the slot that it leaves by, other_G[rank] the slot that
    it arrives at.
    """
    depth, rank = 0, source
    flow.path_G[0] = source
    while flow.load_G[source] > flow.cap_G[source]:
        if flow.load_G[rank] < flow.cap_G[rank]:
            rows = min(flow.load_G[source] - flow.cap_G[source], flow.cap_G[rank] - flow.load_G[rank])
            for k in range(depth):
                rows = min(rows, flow.rows_S[flow.slot_G[flow.path_G[k]]])
            flow.load_G[source] -= rows
            flow.load_G[rank] += rows
            back = depth
            for k in range(depth - 1, -1, -1):
                at = flow.path_G[k]
                flow.rows_S[flow.slot_G[at]] -= rows
                flow.rows_S[flow.other_G[at]] += rows
                if flow.rows_S[flow.slot_G[at]] == 0:
                    back = k
            depth = back if back < depth else depth - 1
            rank = flow.path_G[depth]
            continue
        found = False
        end = (rank + 1) * per_rank
        while flow.slot_G[rank] < end:
            slot = flow.slot_G[rank]
            expert = place.expert_S[slot]
            if expert >= 0 and place.count_E[expert] > 1 and flow.rows_S[slot] > 0:
                other = flow.other_G[rank]
                if other == NONE:
                    other = place.first_E[expert]
                while other >= 0:
                    to = other // per_rank
                    if flow.level_G[to] == flow.level_G[rank] + 1:
                        found = True
                        break
                    other = place.next_S[other]
                if found:
                    flow.other_G[rank] = other
                    break
            flow.slot_G[rank] += 1
            flow.other_G[rank] = NONE
        if found:
            depth += 1
            rank = flow.other_G[rank] // per_rank
            flow.path_G[depth] = rank
            continue
        if depth == 0:
            return
        flow.level_G[rank] = NONE  # a dead end
        depth -= 1
        rank = flow.path_G[depth]


def settle(place, flow, floor, speed_G, per_rank):
    """The smallest peak that the rows can be moved to; cut_G flags the ranks that prove it, and stays as it
    was where that is the floor.

    floor: a peak that no flow is below. A capacity is a whole number of rows, the least that holds the
    peak, so the peak is the smallest over fractional rows, to one row over the ranks of a cut.
    """
    num_ranks = speed_G.shape[0]
    peak = floor
    set_caps(flow, peak, speed_G)
    while True:
        reached, room = mark_levels(place, flow, per_rank)
        if reached == 0:
            return peak
        if room:
            for rank in range(num_ranks):
                flow.slot_G[rank] = rank * per_rank
                flow.other_G[rank] = NONE
            for rank in range(num_ranks):
                if flow.load_G[rank] > flow.cap_G[rank]:
                    push_from(place, flow, rank, per_rank)
            continue
        load, speed = 0, 0.0
        flow.cut_G[:] = 0
        for k in range(reached):
            rank = flow.queue_G[k]
            flow.cut_G[rank] = 1
            load += flow.load_G[rank]
            speed += speed_G[rank]
        # a rounding error must not hold the same capacities for ever
        peak = load / speed if load / speed > peak else peak * (1.0 + 1e-12) + 1e-9
        set_caps(flow, peak, speed_G)


# ---- the objective over scenarios ------------------------------------------------------------------------


class Scene(NamedTuple):
    """The loads of one layer and what a placement makes of them.

    load_KE; weight_K, sums to 1; floor_K: load over the sum of the speeds; speed_G.   At present: rows_KS,
    load_KG, ratio_K (peak over floor, 1 where there is no load), order_K (worst first), cut_KG (flags of the
    ranks that prove the peak), cut_load_K and cut_speed_K (rows that cannot leave these ranks, their speed).
    After the change tried last: new_rows_KS, new_load_KG, new_ratio_K, new_order_K, new_cut_KG.
    """

    load_KE: np.ndarray
    weight_K: np.ndarray
    floor_K: np.ndarray
    speed_G: np.ndarray
    rows_KS: np.ndarray
    load_KG: np.ndarray
    ratio_K: np.ndarray
    order_K: np.ndarray
    cut_KG: np.ndarray
    cut_load_K: np.ndarray
    cut_speed_K: np.ndarray
    new_rows_KS: np.ndarray
    new_load_KG: np.ndarray
    new_ratio_K: np.ndarray
    new_order_K: np.ndarray
    new_cut_KG: np.ndarray


def new_scene(load_KE, weight_K, speed_G, num_slots):
    num_scenarios, num_ranks = load_KE.shape[0], speed_G.shape[0]
    floor_K = np.zeros(num_scenarios)
    for k in range(num_scenarios):
        floor_K[k] = load_KE[k].sum() / in_order(speed_G)
    return Scene(
        load_KE,
        weight_K,
        floor_K,
        speed_G,
        np.zeros((num_scenarios, num_slots), np.int64),
        np.zeros((num_scenarios, num_ranks), np.int64),
        np.ones(num_scenarios),
        np.arange(num_scenarios),
        np.ones((num_scenarios, num_ranks), np.int64),
        np.zeros(num_scenarios, np.int64),
        np.ones(num_scenarios),
        np.zeros((num_scenarios, num_slots), np.int64),
        np.zeros((num_scenarios, num_ranks), np.int64),
        np.ones(num_scenarios),
        np.arange(num_scenarios),
        np.ones((num_scenarios, num_ranks), np.int64),
    )


def risk(ratio_K, weight_K, order_K, tail, beta):
    """(1 - beta) mean + beta CVaR, mean over the worst `tail` of the weight. Sorts order_K, worst first."""
    for i in range(1, order_K.shape[0]):
        one = order_K[i]
        j = i - 1
        while j >= 0 and ratio_K[order_K[j]] < ratio_K[one]:
            order_K[j + 1] = order_K[j]
            j -= 1
        order_K[j + 1] = one
    mean, worst, left = 0.0, 0.0, tail
    for k in order_K:
        mean += weight_K[k] * ratio_K[k]
        part = min(weight_K[k], left)
        worst += part * ratio_K[k]
        left -= part
    return (1.0 - beta) * mean + beta * worst / (tail - left)


def score_present(place, flow, scene, tail, beta, per_rank):
    """Settle every scenario from nothing.   Returns the objective."""
    for k in range(scene.floor_K.shape[0]):
        if scene.floor_K[k] <= 0.0:
            continue
        start_rows(place, flow, scene.load_KE[k], scene.floor_K[k], scene.speed_G, per_rank)
        flow.cut_G[:] = 1
        peak = settle(place, flow, scene.floor_K[k], scene.speed_G, per_rank)
        scene.ratio_K[k] = peak / scene.floor_K[k]
        scene.rows_KS[k] = flow.rows_S
        scene.load_KG[k] = flow.load_G
        scene.cut_KG[k] = flow.cut_G
    weigh_cuts(place, scene, per_rank)
    return risk(scene.ratio_K, scene.weight_K, scene.order_K, tail, beta)


def weigh_cuts(place, scene, per_rank):
    """Set cut_load_K and cut_speed_K of the present cuts."""
    for k in range(scene.floor_K.shape[0]):
        load, speed = 0, 0.0
        for expert in range(scene.load_KE.shape[1]):
            if all_inside(place, expert, scene.cut_KG[k], per_rank):
                load += scene.load_KE[k, expert]
        for rank in range(scene.speed_G.shape[0]):
            if scene.cut_KG[k, rank]:
                speed += scene.speed_G[rank]
        scene.cut_load_K[k], scene.cut_speed_K[k] = load, speed


def all_inside(place, expert, cut_G, per_rank):
    """Whether all slots of an expert lie on the ranks of a cut."""
    slot = place.first_E[expert]
    while slot >= 0:
        if cut_G[slot // per_rank] == 0:
            return False
        slot = place.next_S[slot]
    return True


def count_inside(place, scene, expert, sign, load_K, per_rank):
    """Add (sign 1) or subtract an expert's rows where all its slots lie in the scenario's cut."""
    for k in range(load_K.shape[0]):
        if all_inside(place, expert, scene.cut_KG[k], per_rank):
            load_K[k] += sign * scene.load_KE[k, expert]


def score_change(place, flow, scene, slot, expert, other, tail, beta, limit, per_rank):
    """The objective once `slot` has `expert`, and slot `other`, where it is 0 or more, what `slot` had; or
    `limit` as soon as it cannot be lower. The placement is left changed."""
    old = place.expert_S[slot]
    load_K = scene.cut_load_K.copy()
    count_inside(place, scene, expert, -1, load_K, per_rank)
    if old >= 0:
        count_inside(place, scene, old, -1, load_K, per_rank)
    if other >= 0:
        put(place, other, NONE)
    put(place, slot, expert)
    if other >= 0:
        put(place, other, old)
    count_inside(place, scene, expert, 1, load_K, per_rank)
    if old >= 0:
        count_inside(place, scene, old, 1, load_K, per_rank)
    scene.new_ratio_K[:] = 1.0
    for k in range(load_K.shape[0]):
        if scene.floor_K[k] > 0.0:
            scene.new_ratio_K[k] = max(1.0, load_K[k] / (scene.cut_speed_K[k] * scene.floor_K[k]))
    scene.new_order_K[:] = scene.order_K
    value = risk(scene.new_ratio_K, scene.weight_K, scene.new_order_K, tail, beta)
    for k in scene.order_K:
        if value >= limit:
            return limit
        if scene.floor_K[k] <= 0.0:
            continue
        peak = settle_change(place, flow, scene, k, slot, old, other, expert, per_rank)
        if peak > scene.new_ratio_K[k] * scene.floor_K[k]:
            scene.new_ratio_K[k] = peak / scene.floor_K[k]
            value = risk(scene.new_ratio_K, scene.weight_K, scene.new_order_K, tail, beta)
    return min(value, limit)


def settle_change(place, flow, scene, k, slot, old, other, expert, per_rank):
    """Settle one scenario after a change, from its rows before: those of the slots that changed move to the
    other slots of their experts.   Returns the peak, at least what the last cut says."""
    flow.rows_S[:] = scene.rows_KS[k]
    flow.load_G[:] = scene.load_KG[k]
    flow.cut_G[:] = scene.cut_KG[k]
    bound = scene.new_ratio_K[k] * scene.floor_K[k]
    set_caps(flow, bound, scene.speed_G)
    rows = flow.rows_S[slot]
    flow.rows_S[slot] = 0
    flow.load_G[slot // per_rank] -= rows
    rows_other = 0
    if other >= 0:
        rows_other = flow.rows_S[other]
        flow.rows_S[other] = 0
        flow.load_G[other // per_rank] -= rows_other
    if rows > 0:
        pour(place, flow, old, rows, per_rank)
    if rows_other > 0:
        pour(place, flow, expert, rows_other, per_rank)
    peak = settle(place, flow, bound, scene.speed_G, per_rank)
    scene.new_rows_KS[k] = flow.rows_S
    scene.new_load_KG[k] = flow.load_G
    scene.new_cut_KG[k] = flow.cut_G
    return peak


def accept(place, scene, per_rank):
    """Make the change tried last the present."""
    scene.rows_KS[:] = scene.new_rows_KS
    scene.load_KG[:] = scene.new_load_KG
    scene.cut_KG[:] = scene.new_cut_KG
    scene.ratio_K[:] = scene.new_ratio_K
    scene.order_K[:] = scene.new_order_K
    weigh_cuts(place, scene, per_rank)


# ---- the search ------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """tail, beta: of `risk`;  tolerance: how far above 1 the objective and a peak may stay;  most_scores:
    changes that are scored in a layer;  width: experts tried for a cut;  steepest: 1 = the best change of a
    cut, 0 = the first that pays;  swaps: 1 = two slots may exchange their experts;  depth: changes that may
    be made though none pays alone."""

    tail: float
    beta: float
    tolerance: float
    most_scores: int
    width: int
    steepest: int
    swaps: int
    depth: int


class Task(NamedTuple):
    """One layer: where it may change. start_S: the placement before;  price: of a slot that ends with another
    expert, in units of the objective;  room_G: most experts of a rank;  filled_G: experts on it;  node_E: the
    node that an expert must stay on, -1 = any;  node_G: node of a rank;  share_E: mean share of an expert;
    fetch: price of one more replica that the busiest port carries;  home_E: rank of the home, -1 = none;
    sent_G, received_G: replicas whose weights leave a rank's homes, and that it receives."""

    start_S: np.ndarray
    price: float
    room_G: np.ndarray
    filled_G: np.ndarray
    node_E: np.ndarray
    node_G: np.ndarray
    share_E: np.ndarray
    fetch: float
    home_E: np.ndarray
    sent_G: np.ndarray
    received_G: np.ndarray


def new_task(place, scene, price, fetch, room_G, node_E, node_G, per_rank):
    filled_G = np.zeros(room_G.shape[0], np.int64)
    count_filled(place, filled_G, per_rank)
    share_E = np.zeros(node_E.shape[0])
    for k in range(scene.floor_K.shape[0]):
        if scene.floor_K[k] > 0.0:
            share_E += scene.weight_K[k] * scene.load_KE[k] / (scene.floor_K[k] * in_order(scene.speed_G))
    home_E = np.full(node_E.shape[0], NONE, np.int64)
    for slot in range(place.expert_S.shape[0]):
        if place.fixed_S[slot] and place.expert_S[slot] >= 0:
            home_E[place.expert_S[slot]] = slot // per_rank
    sent_G, received_G = np.zeros(room_G.shape[0], np.int64), np.zeros(room_G.shape[0], np.int64)
    start_S = place.expert_S.copy()
    task = Task(start_S, price, room_G, filled_G, node_E, node_G, share_E, fetch, home_E, sent_G, received_G)
    count_ports(place, task, per_rank)
    return task


def count_ports(place, task, per_rank):
    """Set how many replicas each rank's port sends and receives."""
    task.sent_G[:] = 0
    task.received_G[:] = 0
    for slot in range(place.expert_S.shape[0]):
        if place.expert_S[slot] >= 0:
            carry(task, place.expert_S[slot], slot // per_rank, 1)


def carry(task, expert, rank, count):
    """Add replicas of an expert on a rank to the ports of both ends; none at home."""
    home = task.home_E[expert]
    if home >= 0 and home != rank:
        task.sent_G[home] += count
        task.received_G[rank] += count


def price_of_traffic(task, rank, old, new):
    """What it costs that a slot of a rank fetches `new` for `old`: the change of the busiest port."""
    if task.fetch == 0.0:
        return 0.0
    before = max(task.sent_G.max(), task.received_G.max())
    carry(task, new, rank, 1)
    if old >= 0:
        carry(task, old, rank, -1)
    after = max(task.sent_G.max(), task.received_G.max())
    carry(task, new, rank, -1)
    if old >= 0:
        carry(task, old, rank, 1)
    return task.fetch * (after - before)


def count_filled(place, filled_G, per_rank):
    """Set how many experts each rank holds."""
    filled_G[:] = 0
    for slot in range(place.expert_S.shape[0]):
        if place.expert_S[slot] >= 0:
            filled_G[slot // per_rank] += 1


def heaviest_inside(place, load_E, cut_G, per_rank, found):
    """Experts with load whose slots all lie in the cut, heaviest first, into `found`.   Returns how many."""
    size = 0
    for expert in range(load_E.shape[0]):
        if load_E[expert] == 0 or not all_inside(place, expert, cut_G, per_rank):
            continue
        if size < found.shape[0]:
            size += 1
        elif load_E[found[size - 1]] >= load_E[expert]:
            continue
        j = size - 1
        while j > 0 and load_E[found[j - 1]] < load_E[expert]:
            found[j] = found[j - 1]
            j -= 1
        found[j] = expert
    return size


def ranks_outside(scene, k, ranks):
    """Ranks outside the cut, the least loaded for their speed first, into `ranks`.   Returns how many."""
    size = 0
    for rank in range(ranks.shape[0]):
        if scene.cut_KG[k, rank]:
            continue
        load = scene.load_KG[k, rank] / scene.speed_G[rank]
        j = size
        while j > 0 and scene.load_KG[k, ranks[j - 1]] / scene.speed_G[ranks[j - 1]] > load:
            ranks[j] = ranks[j - 1]
            j -= 1
        ranks[j] = rank
        size += 1
    return size


def price_of(task, slot, old, new):
    """What it costs that a slot gets `new` for `old`: nothing where it had another expert at the start
    anyway."""
    slots = 0.0
    if new != task.start_S[slot]:
        slots += 1.0
    if old != task.start_S[slot]:
        slots -= 1.0
    return task.price * slots


def slot_to_swap(place, scene, task, k, expert, rank, here, kept_S, per_rank):
    """The slot of a rank whose expert, taken for `expert`, brings the load of the cut nearest to an even one;
    -1 = none."""
    excess = scene.cut_load_K[k] - scene.floor_K[k] * scene.cut_speed_K[k]
    match, least = NONE, 0.0
    for slot in range(rank * per_rank, (rank + 1) * per_rank):
        old = place.expert_S[slot]
        if kept_S[slot] or old < 0 or place.count_E[old] > 1:
            continue
        if task.node_E[old] >= 0 and task.node_E[old] != task.node_G[here]:
            continue
        gain = scene.load_KE[k, expert] - scene.load_KE[k, old]
        if gain > 0 and (match < 0 or abs(gain - excess) < least):
            match, least = slot, abs(gain - excess)
    return match


def best_change(place, flow, scene, task, options, k, best, most, kept_S, per_rank):
    """The change with the lowest objective and price, below `best`, of those that take load out of the cut of
    scenario k.

    A replica outside for an expert inside, or such an expert against a lighter one outside; slots of kept_S
    stay, and after `most` that were scored it stops.   Returns slot (-1 = none), expert, the other slot (-1 =
    one slot changes), how many were scored, and objective and price. Where the first one that pays is wanted,
    the placement is left with it.
    """
    found, ranks = np.empty(options.width, np.int64), np.empty(task.room_G.shape[0], np.int64)
    size = heaviest_inside(place, scene.load_KE[k], scene.cut_KG[k], per_rank, found)
    outside = ranks_outside(scene, k, ranks)
    best_slot, best_expert, best_other = NONE, NONE, NONE
    scores = 0
    for expert in found[:size]:
        first = place.first_E[expert]
        here = first // per_rank
        for rank in ranks[: min(outside, 2 * options.width)]:
            if scores >= most:
                return best_slot, best_expert, best_other, scores, best
            if task.node_E[expert] >= 0 and task.node_E[expert] != task.node_G[rank]:
                continue
            for slot in range(rank * per_rank, (rank + 1) * per_rank):
                old = place.expert_S[slot]
                if kept_S[slot] or (old >= 0 and place.count_E[old] < 2):
                    continue
                if old < 0 and task.filled_G[rank] >= task.room_G[rank]:
                    continue
                # of changes that are as good, the one that takes the lightest expert away
                extra = price_of(task, slot, old, expert) + (SPARED * task.share_E[old] if old >= 0 else 0.0)
                extra += price_of_traffic(task, rank, old, expert)
                scores += 1
                limit = best - extra
                new = score_change(
                    place, flow, scene, slot, expert, NONE, options.tail, options.beta, limit, per_rank
                )
                if new < limit:
                    best, best_slot, best_expert, best_other = new + extra, slot, expert, NONE
                    if not options.steepest:
                        return best_slot, best_expert, best_other, scores, best
                put(place, slot, old)
            if not options.swaps or kept_S[first]:
                continue
            slot = slot_to_swap(place, scene, task, k, expert, rank, here, kept_S, per_rank)
            if slot < 0:
                continue
            old = place.expert_S[slot]
            extra = price_of(task, slot, old, expert) + price_of(task, first, expert, old)
            scores += 1
            limit = best - extra
            new = score_change(
                place, flow, scene, slot, expert, first, options.tail, options.beta, limit, per_rank
            )
            if new < limit:
                best, best_slot, best_expert, best_other = new + extra, slot, expert, first
                if not options.steepest:
                    return best_slot, best_expert, best_other, scores, best
            put(place, slot, NONE)
            put(place, first, expert)
            put(place, slot, old)
    return best_slot, best_expert, best_other, scores, best


def cut_seen(scene, turn):
    """Whether a worse scenario has the same cut as the one at this turn."""
    cut_G = scene.cut_KG[scene.order_K[turn]]
    seen = False
    for i in range(turn):
        seen = seen or (scene.cut_KG[scene.order_K[i]] == cut_G).all()
    return seen


def search_layer(place, flow, scene, task, options, per_rank):
    """Improve one layer until no change pays, nor `depth` of them together.   Returns the objective before
    and after, and how many changes were scored.

    Where none pays alone, the one that costs least is made, its slot is left as it is from then on, and the
    search goes on; the best placement passed is the result.
    """
    value = before = score_present(place, flow, scene, options.tail, options.beta, per_rank)
    cost = best_cost = value
    best_S = place.expert_S.copy()
    kept_S = place.fixed_S.copy()
    scores, turn, uphill = 0, 0, 0  # turn: which scenario's cut is tried, the worst one's first
    while value > 1.0 + options.tolerance and scores < options.most_scores:
        # a cut that a worse scenario has too was tried with that one
        while turn < scene.order_K.shape[0] and cut_seen(scene, turn):
            turn += 1
        stuck = (
            turn >= scene.order_K.shape[0] or scene.ratio_K[scene.order_K[turn]] <= 1.0 + options.tolerance
        )
        if stuck and uphill >= options.depth:
            break
        turn = 0 if stuck else turn
        limit = np.inf if stuck else value - LEAST_GAIN
        k = scene.order_K[turn]
        slot, expert, other, scored, new = best_change(
            place, flow, scene, task, options, k, limit, options.most_scores - scores, kept_S, per_rank
        )
        scores += scored
        turn += 1
        if slot < 0 and stuck:
            break
        if slot < 0:
            continue
        if place.expert_S[slot] != expert:
            score_change(
                place, flow, scene, slot, expert, other, options.tail, options.beta, np.inf, per_rank
            )
        accept(place, scene, per_rank)
        count_filled(place, task.filled_G, per_rank)
        count_ports(place, task, per_rank)
        cost += new - value
        value = risk(scene.ratio_K, scene.weight_K, scene.order_K, options.tail, options.beta)
        turn = 0
        if cost < best_cost:
            best_cost, uphill = cost, 0
            best_S[:] = place.expert_S
            kept_S[:] = place.fixed_S
        elif stuck:
            uphill += 1
            kept_S[slot] = 1
            if other >= 0:
                kept_S[other] = 1
    if cost > best_cost:
        for slot in range(best_S.shape[0]):
            if place.expert_S[slot] != best_S[slot]:
                put(place, slot, best_S[slot])
        count_ports(place, task, per_rank)
        value = score_present(place, flow, scene, options.tail, options.beta, per_rank)
    return before, take_back(place, flow, scene, task, options, value, per_rank), scores


def take_back(place, flow, scene, task, options, value, per_rank):
    """Give slots back what they had at the start, where later changes made theirs worth less than its price.

    Returns the objective.
    """
    again = task.price > 0.0
    while again:
        again = False
        for slot in range(place.expert_S.shape[0]):
            old, had = place.expert_S[slot], task.start_S[slot]
            if old == had or had < 0 or old < 0 or place.count_E[old] < 2:
                continue
            if on_rank(place, had, slot // per_rank, per_rank):
                continue
            limit = value + task.price - price_of_traffic(task, slot // per_rank, old, had)
            new = score_change(
                place, flow, scene, slot, had, NONE, options.tail, options.beta, limit, per_rank
            )
            if new < limit:
                accept(place, scene, per_rank)
                count_ports(place, task, per_rank)
                value = risk(scene.ratio_K, scene.weight_K, scene.order_K, options.tail, options.beta)
                again = True
            else:
                put(place, slot, old)
    return value


def search_layers(
    slots_LS,
    fixed_LS,
    load_KLE,
    weight_K,
    speed_G,
    room_G,
    node_LE,
    node_G,
    price_L,
    fetch_L,
    options,
    out_LX,
):
    """Search every layer; slots_LS is changed in place. out_LX [L, 3]: objective before and after, changes
    scored."""
    num_layers, num_slots = slots_LS.shape
    per_rank = num_slots // speed_G.shape[0]
    flow = new_flow(num_slots, speed_G.shape[0])
    for layer in range(num_layers):
        place = new_place(slots_LS[layer], fixed_LS[layer], load_KLE.shape[2])
        scene = new_scene(np.ascontiguousarray(load_KLE[:, layer]), weight_K, speed_G, num_slots)
        task = new_task(
            place, scene, price_L[layer], fetch_L[layer], room_G, node_LE[layer], node_G, per_rank
        )
        before, after, scores = search_layer(place, flow, scene, task, options, per_rank)
        slots_LS[layer] = place.expert_S
        out_LX[layer, 0], out_LX[layer, 1], out_LX[layer, 2] = before, after, scores


def peak_layers(slots_LS, load_KLE, speed_G, peak_KL):
    """The smallest peak of every load and layer, in rows over speed, into peak_KL; 0 without load."""
    num_layers, num_slots = slots_LS.shape
    per_rank = num_slots // speed_G.shape[0]
    flow = new_flow(num_slots, speed_G.shape[0])
    for layer in range(num_layers):
        place = new_place(slots_LS[layer], slots_LS[layer], load_KLE.shape[2])
        for k in range(load_KLE.shape[0]):
            floor = load_KLE[k, layer].sum() / in_order(speed_G)
            peak_KL[k, layer] = 0.0
            if floor > 0.0:
                start_rows(place, flow, load_KLE[k, layer], floor, speed_G, per_rank)
                peak_KL[k, layer] = settle(place, flow, floor, speed_G, per_rank)
