"""Kernels of even.py: greedy packing and local search, when every slot of an expert gets the same share.

Plain functions over arrays, which kernels.py compiles; as they stand they are its twin. One file, because
numba's cache on disk looks at the age of the entry's own file.

A *row* is one layer, or one node of a layer where groups keep nodes apart: E experts, G ranks of s slots,
S = G * s. The time of a rank is its load over its speed. Greedy first (`pack_row`): slots to the experts with
the largest load for a slot, then heaviest first onto the ranks with the least time, the slots of an expert
on different ranks. Then the rank with the most time is relieved, again and again (`improve`), by the best of

    swap     one of its slots for one of another rank               s steps a rank: sorted slots, two pointers
    pairs    two of its slots for two of another rank               s^3 steps a rank
    give     a slot of expert a to expert b                         the ranks of both

in that order, each only where those before it find nothing. A change counts only where every rank that it
touches ends under the time that the worst one had, so peaks only fall. All work is counted in steps, so
equal input gives equal output whatever the machine's speed.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
from typing import NamedTuple

import numpy as np

ENTRIES = ("pack_rows", "repair_layers")
NONE = -1
# a swap that leaves this part of the excess over the mean, or less, is taken at once
ENOUGH = 0.5
# a row this far over its target gets other starts, where slots of one of these parts of the target are small
# enough, and spare ones go to small experts: large slots keep each other out of ranks
FAR_OFF = 1.005
LEAN = (0.97, 0.85, 0.7, 0.55)
# swaps of a shake
SHAKES = 3
# a change must lower the time by this part of it, so that rounding makes no endless loops
LEAST = 1e-12


class Row(NamedTuple):
    """A placement that changes: expert_S [S] (-1 = empty); fixed_S [S]: 1 where it stays; sorted_S [S]: the
    slots of each rank by falling weight, heavy_S their weights; count_E slots and weight_E load of a slot of
    each expert; load_E; load_G, speed_G; steps_X [1]: steps left."""

    expert_S: np.ndarray
    fixed_S: np.ndarray
    sorted_S: np.ndarray
    heavy_S: np.ndarray
    count_E: np.ndarray
    weight_E: np.ndarray
    load_E: np.ndarray
    load_G: np.ndarray
    speed_G: np.ndarray
    steps_X: np.ndarray


def pack_rows(load_RE, home_RS, speed_RG, target_R, replicas, steps, expert_RS):
    """The placement of each row. load_RE [R, E];  home_RS [R, S]: expert that a slot keeps, -1 = any;
    speed_RG [R, G];  target_R [R]: time at which to stop;  replicas: 0 for just one slot an expert;  steps:
    of the search;  expert_RS: the result."""
    num_rows, num_experts = load_RE.shape
    num_ranks, num_slots = speed_RG.shape[1], home_RS.shape[1]
    for r in range(num_rows):
        row = Row(
            expert_RS[r],
            (home_RS[r] >= 0).astype(np.int64),
            np.arange(num_slots),
            np.zeros(num_slots),
            np.ones(num_experts, np.int64),
            load_RE[r].copy(),
            load_RE[r],
            np.zeros(num_ranks),
            speed_RG[r],
            np.full(1, steps),
        )
        if num_slots // num_ranks > num_experts:
            row.expert_S[:] = home_RS[r]
            fill_row(row)
        else:
            search_row(row, home_RS[r], target_R[r], replicas)


def search_row(row, home_S, target, replicas):
    """Greedy and local search, other starts where that is far off, then shakes while steps are left."""
    steps, seed, start = row.steps_X[0], 1, 0
    best_S, best, speed = home_S.copy(), np.inf, 0.0
    for g in range(row.speed_G.shape[0]):  # not mean(): sums of numpy and numba may differ
        speed += row.speed_G[g] / row.speed_G.shape[0]
    # one place for each call: compiling takes less
    while start == 0 or (best > target * (1.0 + LEAST) and (start <= len(LEAN) or row.steps_X[0] > 0)):
        if start <= len(LEAN):
            pack_row(row, home_S, target * speed * LEAN[start - 1] if start else 0.0)
        else:
            seed = shake(row, seed, replicas)
        improve(row, target, replicas)
        best = keep_better(row, best_S, best)
        if steps <= 0:
            return
        start += 1
        if start <= len(LEAN) and not (replicas and best > target * FAR_OFF):
            start = len(LEAN) + 1
        elif start <= len(LEAN):
            row.steps_X[0] = max(row.steps_X[0], steps // 4)


def keep_better(row, best_S, best):
    """The better of the placement and the best one so far, which both are afterwards; returns its peak."""
    now = peak(row)
    if now < best:
        best_S[:] = row.expert_S
        return now
    row.expert_S[:] = best_S
    settle(row)
    row.steps_X[0] -= row.expert_S.shape[0]
    return best


def shake(row, seed, replicas):
    """Some changes picked blindly: swaps of the worst rank, or now and then a slot given to another expert;
    returns the next seed (a linear congruence, alike everywhere)."""
    num_slots, num_ranks = row.expert_S.shape[0], row.load_G.shape[0]
    per_rank = num_slots // num_ranks
    row.steps_X[0] -= SHAKES * per_rank
    for _ in range(SHAKES):
        g = extremes(row.load_G, row.speed_G)[0]
        seed = (seed * 1103515245 + 12345) % 2147483648
        a = g * per_rank + seed // 65536 % per_rank
        seed = (seed * 1103515245 + 12345) % 2147483648
        b = seed // 65536 % num_slots
        if b // per_rank != g and may_swap(row, g, a, b // per_rank, b):
            exchange(row, a, b)
    if replicas and seed // 4096 % 4 == 0:
        seed = (seed * 1103515245 + 12345) % 2147483648
        slot = seed // 65536 % num_slots
        seed = (seed * 1103515245 + 12345) % 2147483648
        e = seed // 65536 % row.count_E.shape[0]
        old = row.expert_S[slot]
        row.steps_X[0] -= num_slots
        if not row.fixed_S[slot] and row.count_E[old] > 1 and not holds(row, slot // per_rank, e):
            change(row, slot, e)
    return seed


def peak(row):
    most = 0.0
    for g in range(row.load_G.shape[0]):
        most = max(most, row.load_G[g] / row.speed_G[g])
    return most


# ---- greedy ---------------------------------------------------------------------------------------------


def fill_row(row):
    """Every expert on every rank, then over and over in order: more slots on a rank than experts."""
    num_experts, num_ranks = row.count_E.shape[0], row.load_G.shape[0]
    per_rank = row.expert_S.shape[0] // num_ranks
    for g in range(num_ranks):
        expert, extra = 0, 0
        for slot in range(g * per_rank, (g + 1) * per_rank):
            if row.expert_S[slot] != NONE:
                continue
            while expert < num_experts and holds(row, g, expert):
                expert += 1
            if expert < num_experts:
                row.expert_S[slot] = expert
            else:
                row.expert_S[slot] = extra % num_experts
                extra += 1


def pack_row(row, home_S, enough):
    """Greedy: slots to experts, then experts to ranks. enough: load of a slot that need not be lowered; slots
    to spare then go to the smallest experts. 0: EPLB's rule."""
    row.expert_S[:] = home_S
    row.load_G[:] = 0.0
    share_slots(row, enough)
    num_ranks = row.load_G.shape[0]
    per_rank = row.expert_S.shape[0] // num_ranks
    home_E = np.zeros(row.count_E.shape[0], np.int64)
    free_G = np.zeros(num_ranks, np.int64)
    for slot in range(row.expert_S.shape[0]):
        if row.expert_S[slot] == NONE:
            free_G[slot // per_rank] += 1
        else:
            home_E[row.expert_S[slot]] = 1
            row.load_G[slot // per_rank] += row.weight_E[row.expert_S[slot]]
    time_G, rank_X, size = np.empty(num_ranks), np.empty(num_ranks, np.int64), 0
    for g in range(num_ranks):
        time_G[g] = row.load_G[g] / row.speed_G[g]
        if free_G[g]:
            rank_X[size] = g
            size = up(rank_X, time_G, size)
    popped_X = np.empty(num_ranks, np.int64)
    minus_E, expert_X, left = -row.weight_E, np.empty(row.count_E.shape[0], np.int64), 0
    for e in range(row.count_E.shape[0]):
        expert_X[left] = e
        left = up(expert_X, minus_E, left)
    while left:
        e = expert_X[0]
        left = down(expert_X, minus_E, left)
        popped, wanted = 0, row.count_E[e] - home_E[e]
        while wanted and size:
            g = rank_X[0]
            size = down(rank_X, time_G, size)
            popped_X[popped] = g
            popped += 1
            if home_E[e] and holds(row, g, e):
                continue
            put(row, g, e)
            free_G[g] -= 1
            row.load_G[g] += row.weight_E[e]
            time_G[g] = row.load_G[g] / row.speed_G[g]
            wanted -= 1
        row.count_E[e] -= wanted
        for k in range(popped):
            if free_G[popped_X[k]]:
                rank_X[size] = popped_X[k]
                size = up(rank_X, time_G, size)
    for k in range(size):  # ranks that hold all the experts whose slots were left
        while free_G[rank_X[k]]:
            put_missing(row, rank_X[k])
            free_G[rank_X[k]] -= 1
    settle(row)


def share_slots(row, enough):
    """Spare slots one by one to the expert with the largest load for a slot, at most one a rank. enough: see
    `pack_row`."""
    row.count_E[:] = 1
    num_experts, num_ranks = row.count_E.shape[0], row.load_G.shape[0]
    even = row.load_E.max() == 0
    minus_E, expert_X, size = np.empty(num_experts), np.empty(num_experts, np.int64), 0
    for e in range(num_experts):
        minus_E[e] = -1.0 if even else wish(row, e, enough)
        expert_X[size] = e
        size = up(expert_X, minus_E, size)
    for _ in range(row.expert_S.shape[0] - num_experts):
        e = expert_X[0]
        row.count_E[e] += 1
        if row.count_E[e] >= num_ranks:
            size = down(expert_X, minus_E, size)
        else:
            minus_E[e] = -1.0 / row.count_E[e] if even else wish(row, e, enough)
            sink(expert_X, minus_E, size)
    for e in range(num_experts):
        row.weight_E[e] = row.load_E[e] / row.count_E[e]


def wish(row, e, enough):
    """Key of an expert in line for a spare slot: large slots first, then those so small that they fill slots
    at no cost."""
    share = row.load_E[e] / row.count_E[e]
    return -share if share > enough else share


def put(row, g, e):
    """Expert e into the first empty slot of rank g."""
    slot = g * (row.expert_S.shape[0] // row.load_G.shape[0])
    while row.expert_S[slot] != NONE:
        slot += 1
    row.expert_S[slot] = e


def put_missing(row, g):
    """The expert with the largest load for a slot of those that rank g lacks into its first empty slot."""
    best, most = NONE, -1.0
    for e in range(row.count_E.shape[0]):
        if row.load_E[e] / row.count_E[e] > most and not holds(row, g, e):
            best, most = e, row.load_E[e] / row.count_E[e]
    put(row, g, best)
    row.count_E[best] += 1


def holds(row, g, e):
    per_rank = row.expert_S.shape[0] // row.load_G.shape[0]
    found = False
    for slot in range(g * per_rank, (g + 1) * per_rank):
        found |= row.expert_S[slot] == e
    return found


# ---- heaps: the least key first, of equals the lowest index ---------------------------------------------


def before(key_X, a, b):
    return key_X[a] < key_X[b] or (key_X[a] == key_X[b] and a < b)


def up(heap_X, key_X, size):
    """Take in the entry at place `size`; returns the new size."""
    place, entry = size, heap_X[size]
    while place > 0 and before(key_X, entry, heap_X[(place - 1) // 2]):
        heap_X[place] = heap_X[(place - 1) // 2]
        place = (place - 1) // 2
    heap_X[place] = entry
    return size + 1


def down(heap_X, key_X, size):
    """Drop the first entry; returns the new size."""
    heap_X[0] = heap_X[size - 1]
    if size > 1:
        sink(heap_X, key_X, size - 1)
    return size - 1


def sink(heap_X, key_X, size):
    """Put the first entry, whose key has grown, where it belongs."""
    place, entry = 0, heap_X[0]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and before(key_X, heap_X[child + 1], heap_X[child]):
            child += 1
        if not before(key_X, heap_X[child], entry):
            break
        heap_X[place] = heap_X[child]
        place = child
    heap_X[place] = entry


# ---- local search ---------------------------------------------------------------------------------------


def settle(row):
    """Counts, weights, loads and order of all slots from the experts in them."""
    num_ranks = row.load_G.shape[0]
    per_rank = row.expert_S.shape[0] // num_ranks
    row.count_E[:] = 0
    for e in row.expert_S:
        if e != NONE:
            row.count_E[e] += 1
    for e in range(row.count_E.shape[0]):
        row.weight_E[e] = row.load_E[e] / max(row.count_E[e], 1)
    for g in range(num_ranks):
        row.load_G[g] = 0.0
        for slot in range(g * per_rank, (g + 1) * per_rank):
            if row.expert_S[slot] != NONE:
                row.load_G[g] += row.weight_E[row.expert_S[slot]]
        order(row, g)


def order(row, g):
    """The slots of a rank by falling weight (insertion: they are nearly in order)."""
    expert_S, weight_E, sorted_S, heavy_S = row.expert_S, row.weight_E, row.sorted_S, row.heavy_S
    per_rank = expert_S.shape[0] // row.load_G.shape[0]
    first = g * per_rank
    for k in range(first, first + per_rank):
        slot = sorted_S[k]
        weight = weight_E[expert_S[slot]] if expert_S[slot] != NONE else 0.0
        place = k
        while place > first and heavy_S[place - 1] < weight:
            sorted_S[place], heavy_S[place] = sorted_S[place - 1], heavy_S[place - 1]
            place -= 1
        sorted_S[place], heavy_S[place] = slot, weight


def weight_of(row, slot):
    e = row.expert_S[slot]
    return row.weight_E[e] if e != NONE else 0.0


def extremes(load_G, speed_G):
    """The rank with the most time and the one with the least."""
    worst, most, best, least = 0, -1.0, 0, np.inf
    for g in range(load_G.shape[0]):
        time = load_G[g] / speed_G[g]
        if time > most:
            worst, most = g, time
        if time < least:
            best, least = g, time
    return worst, best


def improve(row, target, replicas):
    """Relieve the worst rank until nothing helps, the target is met, or the steps are used up."""
    num_ranks = row.load_G.shape[0]
    if num_ranks == 1:
        return
    while row.steps_X[0] > 0:
        g, start = extremes(row.load_G, row.speed_G)
        row.steps_X[0] -= num_ranks
        if row.load_G[g] / row.speed_G[g] <= target * (1.0 + 1e-12):
            return
        if swap_one(row, g, start, target):
            continue
        if row.steps_X[0] > 0 and swap_pairs(row, g, start, target):
            continue
        if row.steps_X[0] <= 0 or not replicas or not give_slot(row, g):
            return


def swap_one(row, g, start, target):
    """Swap a slot of rank g for one of another rank: the one that lowers the larger time of both most."""
    load_G, speed_G, sorted_S, heavy_S = row.load_G, row.speed_G, row.sorted_S, row.heavy_S
    num_ranks = load_G.shape[0]
    per_rank = sorted_S.shape[0] // num_ranks
    load, speed = load_G[g], speed_G[g]
    best, mine, other = load / speed * (1.0 - LEAST), NONE, NONE
    enough = target + ENOUGH * (load / speed - target)
    for k in range(num_ranks):
        h = (start + k) % num_ranks
        row.steps_X[0] -= 1
        if h == g or load_G[h] / speed_G[h] >= best:
            continue
        row.steps_X[0] -= 2 * per_rank
        want = (load * speed_G[h] - load_G[h] * speed) / (speed + speed_G[h])
        first, last = h * per_rank, (h + 1) * per_rank
        middle = first
        for i in range(g * per_rank, (g + 1) * per_rank):
            while middle < last and heavy_S[middle] > heavy_S[i] - want:
                middle += 1
            for side in range(2):  # outwards from the best: first too small a change, then too large
                j = middle - 1 + side
                while first <= j < last:
                    less = heavy_S[i] - heavy_S[j]
                    value = max((load - less) / speed, (load_G[h] + less) / speed_G[h])
                    if value >= best:
                        break
                    if may_swap(row, g, sorted_S[i], h, sorted_S[j]):
                        best, mine, other = value, sorted_S[i], sorted_S[j]
                        break
                    j += 2 * side - 1
        if best <= enough:
            break
    if mine == NONE:
        return False
    exchange(row, mine, other)
    return True


def may_swap(row, g, a, h, b):
    """Whether slots a (of rank g) and b (of h) may swap: no home, and no expert twice on a rank."""
    x, y = row.expert_S[a], row.expert_S[b]
    if row.fixed_S[a] or row.fixed_S[b] or x == y:
        return False
    if x != NONE and row.count_E[x] > 1 and holds(row, h, x):
        return False
    return not (y != NONE and row.count_E[y] > 1 and holds(row, g, y))


def exchange(row, a, b):
    per_rank = row.expert_S.shape[0] // row.load_G.shape[0]
    g, h = a // per_rank, b // per_rank
    less = weight_of(row, a) - weight_of(row, b)
    row.load_G[g] -= less
    row.load_G[h] += less
    row.expert_S[a], row.expert_S[b] = row.expert_S[b], row.expert_S[a]
    for rank in (g, h):
        order(row, rank)


def swap_pairs(row, g, start, target):
    """Swap two slots of rank g for two of another rank."""
    load_G, speed_G, sorted_S, heavy_S = row.load_G, row.speed_G, row.sorted_S, row.heavy_S
    num_ranks = load_G.shape[0]
    per_rank = sorted_S.shape[0] // num_ranks
    load, speed = load_G[g], speed_G[g]
    best = load / speed * (1.0 - LEAST)
    a1, a2, b1, b2 = NONE, NONE, NONE, NONE
    enough = target + ENOUGH * (load / speed - target)
    for k in range(num_ranks):
        h = (start + k) % num_ranks
        if h == g or load_G[h] / speed_G[h] >= best:
            continue
        if row.steps_X[0] <= 0:
            break
        row.steps_X[0] -= per_rank * per_rank * per_rank // 2
        want = (load * speed_G[h] - load_G[h] * speed) / (speed + speed_G[h])
        for i in range(g * per_rank, (g + 1) * per_rank):
            for i2 in range(i + 1, (g + 1) * per_rank):
                both = heavy_S[i] + heavy_S[i2]
                j, j2 = h * per_rank, (h + 1) * per_rank - 1
                while j < j2:
                    less = both - heavy_S[j] - heavy_S[j2]
                    value = max((load - less) / speed, (load_G[h] + less) / speed_G[h])
                    if value < best and may_swap_pairs(
                        row, g, sorted_S[i], sorted_S[i2], h, sorted_S[j], sorted_S[j2]
                    ):
                        best, a1, a2, b1, b2 = value, sorted_S[i], sorted_S[i2], sorted_S[j], sorted_S[j2]
                    if less < want:
                        j += 1
                    else:
                        j2 -= 1
        if best <= enough:
            break
    if a1 == NONE:
        return False
    for a, b in ((a1, b1), (a2, b2)):
        exchange(row, a, b)
    return True


def may_swap_pairs(row, g, a1, a2, h, b1, b2):
    free = row.expert_S[a1] != row.expert_S[b2] and row.expert_S[a2] != row.expert_S[b1]
    for a, b in ((a1, b1), (a2, b2)):
        free = free and may_swap(row, g, a, h, b)
    return free


def give_slot(row, g):
    """Give a slot of some expert to another one, so that rank g has less and no rank it touches too much."""
    num_slots, num_experts = row.expert_S.shape[0], row.count_E.shape[0]
    num_ranks = row.load_G.shape[0]
    per_rank = num_slots // num_ranks
    best, slot_, expert_ = row.load_G[g] / row.speed_G[g] * (1.0 - LEAST), NONE, NONE
    for slot in range(num_slots):
        a = row.expert_S[slot]
        if row.steps_X[0] <= 0:
            break
        if row.fixed_S[slot] or (a != NONE and row.count_E[a] < 2):
            continue
        h = slot // per_rank
        if h == g:  # to any expert that rank g lacks
            for b in range(num_experts):
                row.steps_X[0] -= per_rank
                if weight_of(row, slot) > row.load_E[b] / (row.count_E[b] + 1) and not holds(row, g, b):
                    value = peak_given(row, slot, b, best)
                    if value < best:
                        best, slot_, expert_ = value, slot, b
        elif not (a != NONE and holds(row, g, a)):  # to an expert of rank g, whose load for a slot falls
            for i in range(g * per_rank, (g + 1) * per_rank):
                b = row.expert_S[i]
                row.steps_X[0] -= per_rank
                if b != NONE and not holds(row, h, b):
                    value = peak_given(row, slot, b, best)
                    if value < best:
                        best, slot_, expert_ = value, slot, b
    if slot_ == NONE:
        return False
    change(row, slot_, expert_)
    return True


def peak_given(row, slot, b, best):
    """The largest time of the ranks that hold expert a, of this slot, or b, once the slot is b's; any value
    of `best` or more where it is that much."""
    per_rank = row.expert_S.shape[0] // row.load_G.shape[0]
    a, g = row.expert_S[slot], slot // per_rank
    fewer = row.load_E[b] / (row.count_E[b] + 1)
    most = (row.load_G[g] - weight_of(row, slot) + fewer) / row.speed_G[g]
    if most >= best:
        return most
    more = row.load_E[a] / (row.count_E[a] - 1) - row.weight_E[a] if a != NONE else 0.0
    less = row.weight_E[b] - fewer
    row.steps_X[0] -= row.expert_S.shape[0]
    for h in range(row.load_G.shape[0]):
        if h == g:
            continue
        extra = 0.0
        for k in range(h * per_rank, (h + 1) * per_rank):
            if row.expert_S[k] == a and a != NONE:
                extra += more
            elif row.expert_S[k] == b:
                extra -= less
        if extra != 0.0:
            most = max(most, (row.load_G[h] + extra) / row.speed_G[h])
            if most >= best:
                return most
    return most


def change(row, slot, b):
    """The slot goes to expert b (-1 = to nobody)."""
    per_rank = row.expert_S.shape[0] // row.load_G.shape[0]
    a = row.expert_S[slot]
    row.expert_S[slot] = b
    for e, more in ((a, -1), (b, 1)):
        if e != NONE:
            row.count_E[e] += more
            row.weight_E[e] = row.load_E[e] / max(row.count_E[e], 1)
    for g in range(row.load_G.shape[0]):
        first = g * per_rank
        if slot // per_rank == g or (a != NONE and holds(row, g, a)) or (b != NONE and holds(row, g, b)):
            row.load_G[g] = 0.0
            for k in range(first, first + per_rank):
                row.load_G[g] += weight_of(row, k)
            order(row, g)


# ---- repair: few changes to a placement that is there ----------------------------------------------------


class Repair(NamedTuple):
    """A layer over K scenarios: expert_S, fixed_S as in `Row`; held_GE [G, E]: 1 where the rank held the
    expert at the start; has_EG [E, G]: slots of an expert on a rank now; count_E; load_KE, loads so scaled
    that the sum over K of the largest time is the cost; load_KG; top_K3 [K, 3]: ranks with the most time;
    speed_G; rank_node_G."""

    expert_S: np.ndarray
    fixed_S: np.ndarray
    held_GE: np.ndarray
    has_EG: np.ndarray
    count_E: np.ndarray
    load_KE: np.ndarray
    load_KG: np.ndarray
    top_K3: np.ndarray
    speed_G: np.ndarray
    node_G: np.ndarray


def repair_layers(load_LKE, fixed_LS, speed_G, node_G, price, stop, depth, moves, expert_LS):
    """Local search for each layer from expert_LS [L, S], changed in place. load_LKE [L, K, E]: scaled loads;
    fixed_LS [L, S] flags; price of a move, in the unit of the cost; stop: a cost that is good enough; depth:
    changes to look ahead; moves: the most of a layer."""
    num_layers, _, num_experts = load_LKE.shape
    num_ranks = speed_G.shape[0]
    for layer in range(num_layers):
        start = Repair(
            expert_LS[layer],
            fixed_LS[layer],
            np.zeros((num_ranks, num_experts), np.int64),
            np.zeros((num_experts, num_ranks), np.int64),
            np.zeros(num_experts, np.int64),
            load_LKE[layer],
            np.zeros((load_LKE.shape[1], num_ranks)),
            np.zeros((load_LKE.shape[1], 3), np.int64),
            speed_G,
            node_G,
        )
        repair_layer(start, price, stop, depth, moves)


def repair_layer(lay, price, stop, depth, most_moves):
    """The best change again and again, even one that does not pay for itself; then back to the best of the
    placements passed, counting its moves."""
    recount(lay)
    per_rank = lay.expert_S.shape[0] // lay.speed_G.shape[0]
    for slot in range(lay.expert_S.shape[0]):
        if lay.expert_S[slot] != NONE:
            lay.held_GE[slot // per_rank, lay.expert_S[slot]] = 1
    cost, moved = cost_now(lay), 0
    best_S, best = lay.expert_S.copy(), cost
    for _ in range(depth):
        if cost <= stop:
            break
        slot, other, expert, more = best_change(lay, cost, price, most_moves - moved)
        if slot == NONE:
            break
        if other != NONE:
            lay.expert_S[slot], lay.expert_S[other] = lay.expert_S[other], lay.expert_S[slot]
        else:
            lay.expert_S[slot] = expert
        recount(lay)
        cost, moved = cost_now(lay), moved + more
        if cost + price * moved < best * (1.0 - LEAST):
            best_S[:], best = lay.expert_S, cost + price * moved
    lay.expert_S[:] = best_S


def recount(lay):
    """has_EG, count_E, load_KG and top_K3 from the experts in the slots."""
    num_ranks = lay.speed_G.shape[0]
    per_rank = lay.expert_S.shape[0] // num_ranks
    lay.has_EG[:] = 0
    lay.count_E[:] = 0
    for slot in range(lay.expert_S.shape[0]):
        if lay.expert_S[slot] != NONE:
            lay.has_EG[lay.expert_S[slot], slot // per_rank] += 1
            lay.count_E[lay.expert_S[slot]] += 1
    lay.load_KG[:] = 0.0
    for k in range(lay.load_KE.shape[0]):
        for slot in range(lay.expert_S.shape[0]):
            e = lay.expert_S[slot]
            if e != NONE:
                lay.load_KG[k, slot // per_rank] += lay.load_KE[k, e] / lay.count_E[e]
        for place in range(3):
            lay.top_K3[k, place] = NONE
            most = -1.0
            for g in range(num_ranks):
                taken = (place > 0 and g == lay.top_K3[k, 0]) or (place > 1 and g == lay.top_K3[k, 1])
                if not taken and lay.load_KG[k, g] / lay.speed_G[g] > most:
                    lay.top_K3[k, place], most = g, lay.load_KG[k, g] / lay.speed_G[g]


def cost_now(lay):
    cost = 0.0
    for k in range(lay.load_KE.shape[0]):
        g = lay.top_K3[k, 0]
        cost += lay.load_KG[k, g] / lay.speed_G[g]
    return cost


def best_change(lay, cost, price, moves_left):
    """(slot, other slot or -1, expert or -1, moves): the swap or the expert put into a slot that lowers cost
    plus moves most; slot -1 where none lowers the cost. Only what touches a rank that is the worst of some
    scenario can."""
    num_slots, num_ranks = lay.expert_S.shape[0], lay.speed_G.shape[0]
    per_rank = num_slots // num_ranks
    result, least = (NONE, NONE, NONE, 0), np.inf
    worst_G = np.zeros(num_ranks, np.int64)
    for k in range(lay.load_KE.shape[0]):
        worst_G[lay.top_K3[k, 0]] = 1
    for slot in range(num_slots):
        g, a = slot // per_rank, lay.expert_S[slot]
        if lay.fixed_S[slot]:
            continue
        back = 1 if a != NONE and not lay.held_GE[g, a] else 0  # a move that would not be made
        if a == NONE or lay.count_E[a] > 1:
            for b in range(lay.count_E.shape[0]):
                more = 1 - lay.held_GE[g, b] - back
                if more > moves_left or not may_hold(lay, g, b):
                    continue
                if not worst_G[g] and not eases(lay, worst_G, b):
                    continue
                value = cost_given(lay, slot, b, min(cost * (1.0 - LEAST), least - price * more))
                if value < cost * (1.0 - LEAST) and value + price * more < least:
                    result, least = (slot, NONE, b, more), value + price * more
        if not worst_G[g]:
            continue
        for other in range(num_slots):
            h, b = other // per_rank, lay.expert_S[other]
            if h == g or (worst_G[h] and h < g) or lay.fixed_S[other] or a == b:
                continue
            if not may_trade(lay, g, a, h, b):
                continue
            more = -back
            if a != NONE:
                more += 1 - lay.held_GE[h, a]
            if b != NONE:
                more += 1 - lay.held_GE[g, b] - (1 - lay.held_GE[h, b])
            if more > moves_left:
                continue
            value = cost_swapped(lay, g, a, h, b)
            if value < cost * (1.0 - LEAST) and value + price * more < least:
                result, least = (slot, other, NONE, more), value + price * more
    return result


def eases(lay, worst_G, b):
    """Whether another slot of expert b takes load from a worst rank."""
    found = False
    for g in range(worst_G.shape[0]):
        found |= worst_G[g] > 0 and lay.has_EG[b, g] > 0
    return found


def may_hold(lay, g, b):
    """Whether rank g lacks expert b and is on a node that has it, where nodes count."""
    if lay.has_EG[b, g]:
        return False
    if lay.node_G[g] == NONE:
        return True
    for h in range(lay.node_G.shape[0]):
        if lay.has_EG[b, h]:
            return lay.node_G[h] == lay.node_G[g]
    return True


def may_trade(lay, g, a, h, b):
    """Whether rank g may give expert a to rank h for b (-1 = nothing)."""
    if lay.node_G[g] != lay.node_G[h]:
        return False
    return (a == NONE or not lay.has_EG[a, h]) and (b == NONE or not lay.has_EG[b, g])


def cost_given(lay, slot, b, enough):
    """The cost once the slot is expert b's; any value of `enough` or more where it is that much."""
    num_ranks = lay.speed_G.shape[0]
    g, a = slot // (lay.expert_S.shape[0] // num_ranks), lay.expert_S[slot]
    cost = 0.0
    for k in range(lay.load_KE.shape[0]):
        fewer = lay.load_KE[k, b] / (lay.count_E[b] + 1)
        less = lay.load_KE[k, b] / lay.count_E[b] - fewer if lay.count_E[b] else 0.0
        most = 0.0
        if a == NONE:
            for h in range(num_ranks):
                load = lay.load_KG[k, h] - lay.has_EG[b, h] * less
                most = max(most, (load + fewer if h == g else load) / lay.speed_G[h])
        else:
            share = lay.load_KE[k, a] / lay.count_E[a]
            extra = lay.load_KE[k, a] / (lay.count_E[a] - 1) - share
            for h in range(num_ranks):
                load = lay.load_KG[k, h] - lay.has_EG[b, h] * less + lay.has_EG[a, h] * extra
                most = max(most, (load + fewer - share - extra if h == g else load) / lay.speed_G[h])
        cost += most
        if cost >= enough:
            return cost
    return cost


def cost_swapped(lay, g, a, h, b):
    """The cost once rank g has given a slot of expert a to rank h for one of b."""
    cost = 0.0
    for k in range(lay.load_KE.shape[0]):
        less = lay.load_KE[k, a] / lay.count_E[a] if a != NONE else 0.0
        if b != NONE:
            less -= lay.load_KE[k, b] / lay.count_E[b]
        most = max((lay.load_KG[k, g] - less) / lay.speed_G[g], (lay.load_KG[k, h] + less) / lay.speed_G[h])
        for place in range(3):
            i = lay.top_K3[k, place]
            if i != NONE and i != g and i != h:
                most = max(most, lay.load_KG[k, i] / lay.speed_G[i])
                break
        cost += most
    return cost
