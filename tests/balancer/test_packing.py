"""The greedy baseline: EPLB's golden values, a slow twin, what every plan keeps, odd loads and sizes."""

import doctest
import itertools
import time

import numpy as np
import pytest

from balancer import packing
from balancer.packing import even_share_load, pack, rebalance_experts, replicate

GOLDEN_WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
GOLDEN_PLAN = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def random_case(seed):
    """Load [L, E] and sizes (slots, groups, nodes, ranks); every other seed full of ties and zeros."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([1, 2, 4, 6, 8]))
    nodes = int(rng.choice([m for m in (1, 2, 3, 4) if ranks % m == 0]))
    groups = int(rng.choice([0, 1, 2, 3, 4, 6]))
    experts = max(groups, 1) * int(rng.integers(1, 7))
    slots = ranks * (-(-experts // ranks) + int(rng.integers(0, 4)))
    load_LE = rng.integers(0, 4 if seed % 2 else 10**6, size=(3, experts))
    return load_LE, (slots, groups, nodes, ranks)


def slow_pack(weights, packs, per_pack):
    """(pack, place in it) of each item, one after the other."""
    if per_pack == 1:
        return [(item, 0) for item in range(packs)]
    held, load, result = [0] * packs, [0.0] * packs, [None] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        chosen = min((p for p in range(packs) if held[p] < per_pack), key=lambda p: (load[p], p))
        result[item] = (chosen, held[chosen])
        held[chosen] += 1
        load[chosen] += weights[item]
    return result


def slow_layer(load_E, slots, groups, nodes, ranks):
    """Expert of each slot of one layer, and the slots of each expert in the order in which it got them."""
    load = [float(x) for x in load_E]
    if groups == 0 or groups % nodes:
        groups = nodes = 1
    size, plan, slots_of = len(load) // groups, [None] * slots, {}
    sums = [sum(load[g * size : g * size + size]) for g in range(groups)]
    placed = slow_pack(sums, nodes, groups // nodes)
    for node in range(nodes):
        of_node = sorted((g for g in range(groups) if placed[g][0] == node), key=lambda g: placed[g][1])
        experts = [e for g in of_node for e in range(g * size, g * size + size)]
        order, per_rank = list(experts), slots // ranks
        while len(order) < slots // nodes:
            order.append(max(experts, key=lambda e: (load[e] / order.count(e), -experts.index(e))))
        places = slow_pack([load[e] / order.count(e) for e in order], ranks // nodes, per_rank)
        if not any(load[e] for e in experts):
            order = [experts[slot % len(experts)] for slot in range(slots // nodes)]
            places = [divmod(slot, per_rank) for slot in range(slots // nodes)]
        for expert, (rank, place) in zip(order, places):
            slot = node * slots // nodes + rank * per_rank + place
            plan[slot] = expert
            slots_of.setdefault(expert, []).append(slot)
    return plan, slots_of


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(packing)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("as_given", [list, np.float32, np.int64, np.float64])
def test_the_golden_values_of_eplb(as_given):
    weight = GOLDEN_WEIGHT if as_given is list else np.array(GOLDEN_WEIGHT, as_given)
    phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8)
    assert phy2log.tolist() == GOLDEN_PLAN
    assert log2phy.shape == (2, 12, 2)
    assert logcnt.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert {table.dtype for table in (phy2log, log2phy, logcnt)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("seed", range(60))
def test_all_layers_at_once_give_what_slow_loops_give_for_one_ties_included(seed):
    load_LE, sizes = random_case(seed)
    phy2log, log2phy, _ = rebalance_experts(load_LE, *sizes)
    for layer, load_E in enumerate(load_LE.tolist()):
        plan, slots_of = slow_layer(load_E, *sizes)
        assert phy2log[layer].tolist() == plan
        for expert, slots in slots_of.items():
            assert log2phy[layer, expert, : len(slots)].tolist() == slots


@pytest.mark.parametrize("seed", range(40))
def test_every_expert_has_a_slot_and_the_three_tables_agree(seed):
    load_LE, sizes = random_case(seed)
    given = load_LE.copy()
    phy2log, log2phy, logcnt = rebalance_experts(load_LE, *sizes)
    np.testing.assert_array_equal(load_LE, given)
    assert phy2log.shape == (3, sizes[0])
    assert (logcnt >= 1).all()
    assert log2phy.shape == (*load_LE.shape, logcnt.max())
    for layer, expert in np.ndindex(load_LE.shape):
        count = logcnt[layer, expert]
        slots = log2phy[layer, expert]
        assert sorted(slots[:count]) == np.flatnonzero(phy2log[layer] == expert).tolist()
        assert (slots[count:] == -1).all()
    for again, first in zip(rebalance_experts(load_LE, *sizes), (phy2log, log2phy, logcnt)):
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("seed", range(10))
def test_groups_stay_whole_on_a_node_and_every_node_has_as_many(seed):
    load_LE = np.random.default_rng(seed).lognormal(size=(4, 24))
    phy2log, _, _ = rebalance_experts(load_LE, 40, 6, 2, 4)
    for node_slots in phy2log.reshape(4, 2, 20).reshape(8, 20):
        groups = set((node_slots // 4).tolist())
        assert len(groups) == 3
        assert set(node_slots.tolist()) == {e for g in groups for e in range(4 * g, 4 * g + 4)}


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_groups_that_nodes_cannot_share_out_make_the_plan_global(groups):
    load_LE = np.random.default_rng(0).lognormal(size=(3, 12))
    plan, _, _ = rebalance_experts(load_LE, 16, groups, 2, 4)
    np.testing.assert_array_equal(plan, rebalance_experts(load_LE, 16, 1, 1, 4)[0])


@pytest.mark.parametrize("seed", range(10))
def test_experts_by_other_numbers_give_the_same_plan_by_those_numbers(seed):
    rng = np.random.default_rng(seed)
    load_LE, new_E = rng.lognormal(size=(3, 20)), rng.permutation(20)
    renamed_LE = np.empty_like(load_LE)
    renamed_LE[:, new_E] = load_LE
    plan, renamed = (rebalance_experts(load, 24, 0, 1, 6)[0] for load in (load_LE, renamed_LE))

    def ranks(slots_LS):
        return [sorted(map(sorted, layer.reshape(6, 4).tolist())) for layer in slots_LS]

    assert ranks(new_E[plan]) == ranks(renamed)


# ---- odd loads ------------------------------------------------------------------------------------------


def test_zero_load_spreads_the_spare_slots_evenly_and_touches_no_other_layer():
    load_LE = np.array([[0] * 8, [9, 1, 1, 1, 1, 1, 1, 1]])
    plan, _, counts = rebalance_experts(load_LE, 12, 0, 1, 4)
    assert counts[0].tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert plan[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]  # no expert twice on a rank
    np.testing.assert_array_equal(plan[1:], rebalance_experts(load_LE[1:], 12, 0, 1, 4)[0])


def test_a_node_whose_experts_have_no_load_spreads_its_spare_slots_evenly():
    plan, _, counts = rebalance_experts([[5, 4, 3, 2, 0, 0, 0, 0]], 16, 2, 2, 4)
    assert counts[0, 4:].tolist() == [2, 2, 2, 2]
    assert plan[0, 8:].tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


def test_zero_load_over_nodes_keeps_whole_groups_in_order():
    plan, _, _ = rebalance_experts(np.zeros((1, 8)), 12, 4, 2, 4)
    assert plan.tolist() == [[0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 4, 5]]


def test_one_hot_load_gives_all_spare_slots_to_the_hot_expert():
    load_LE = np.eye(6)[[4]] * 30
    plan, log2phy, counts = rebalance_experts(load_LE, 12, 0, 1, 4)
    assert counts.tolist() == [[1, 1, 1, 1, 7, 1]]
    assert log2phy.shape == (1, 6, 7)
    # the first four copies go to four ranks, then no rank is lighter than another but by a copy
    assert np.ptp(even_share_load(load_LE, plan, 4)) == pytest.approx(30 / 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_what_is_no_load_is_refused_with_its_place(bad):
    load_LE = np.ones((2, 4))
    load_LE[1, 2] = bad
    for call in (
        lambda: rebalance_experts(load_LE, 4, 0, 1, 2),
        lambda: replicate(load_LE, 4),
        lambda: pack(load_LE, 2, 2),
        lambda: even_share_load(load_LE, np.tile(np.arange(4), (2, 1)), 2),
    ):
        with pytest.raises(ValueError, match=rf"\[1, 2\]={bad} is not a load"):
            call()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ([1, 2, 3, 4], r"shape \(4,\); expected \[L, E\]"),
        (np.zeros((0, 4)), r"shape \(0, 4\); expected \[L, E\]"),
        (np.zeros((2, 0)), "at least one expert"),
        ([["a", "b"]], "has type <U1"),
        ([[1e308, 1e308]], "layer 0 sums to more than float64 holds"),
    ],
)
def test_other_shapes_and_types_are_refused(load, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(load, 4, 0, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((11, 0, 1, 4), "num_replicas=11 is less than the 12 experts; use 12$"),
        ((10, 0, 1, 8), "num_replicas=10 is less than the 12 experts; use 16$"),
        ((14, 0, 1, 4), "num_replicas=14 is not a multiple of num_gpus=4; use 12 or 16"),
        ((13, 0, 1, 8), "num_replicas=13 is not a multiple of num_gpus=8; use 16$"),
        ((16, 5, 1, 4), "num_groups=5 does not divide the 12 experts; use 4 or 6, or 0"),
        ((16, 24, 1, 4), "num_groups=24 does not divide the 12 experts; use 12, or 0"),
        ((16, -1, 1, 4), "num_groups=-1 does not divide the 12 experts; use 1, or 0"),
        ((16, 0, 3, 4), "num_nodes=3 does not divide num_gpus=4; use num_nodes=2 or 4, or num_gpus=3 or 6"),
        ((16, 0, 8, 4), "num_nodes=8 does not divide num_gpus=4; use num_nodes=4, or num_gpus=8$"),
        ((16, 0, 0, 4), "num_nodes=0 and num_gpus=4 must be at least 1"),
        ((16, 0, 1, 0), "num_gpus=0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(sizes, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(np.ones((2, 12)), *sizes)


def test_groups_of_experts_that_do_not_fill_the_ranks_are_no_error():
    plan, _, counts = rebalance_experts(np.ones((1, 7)), 8, 0, 1, 4)
    assert counts.sum() == plan.size == 8


# ---- replicate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_replicate_is_the_optimum_over_all_numbers_of_slots(seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, 5))
    slots = experts + int(rng.integers(0, 6))
    load_LE = rng.integers(0, 9, size=(4, experts)) * rng.choice([1, 37], size=(4, experts))
    spare = range(slots - experts + 1)
    ways = np.array([w for w in itertools.product(spare, repeat=experts) if sum(w) == slots - experts]) + 1
    counts_LE = replicate(load_LE, slots)
    assert (counts_LE.sum(axis=1) == slots).all() and (counts_LE >= 1).all()
    best_L = (load_LE[:, None] / ways).max(axis=2).min(axis=1)
    np.testing.assert_array_equal((load_LE / counts_LE).max(axis=1), best_L)  # the same quotients: equal


def test_replicate_gives_ties_to_the_first_expert_and_zero_load_evenly():
    assert replicate([[4, 4, 4], [2, 8, 8], [0, 0, 0]], 5).tolist() == [[2, 2, 1], [1, 2, 2], [2, 2, 1]]


def test_replicate_refuses_fewer_slots_than_experts():
    with pytest.raises(ValueError, match="num_slots=2 is less than the 3 experts; use 3 or more"):
        replicate([[1, 2, 3]], 2)


# ---- pack -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_packs_are_full_and_differ_by_one_item_at_most_where_room_never_ran_out(seed):
    rng = np.random.default_rng(seed)
    packs, per_pack = int(rng.integers(1, 7)), int(rng.integers(2, 6))
    weight_LI = rng.uniform(1, 2, size=(5, packs * per_pack))
    pack_LI, rank_LI = pack(weight_LI, packs, per_pack)
    for layer in range(5):
        places = pack_LI[layer] * per_pack + rank_LI[layer]
        assert sorted(places) == list(range(packs * per_pack))
        load = np.bincount(pack_LI[layer], weights=weight_LI[layer])
        # weights within a factor of 2: the last item of a pack is no heavier than the heaviest of all
        assert np.ptp(load) <= weight_LI[layer].max()


def test_one_item_a_pack_stays_where_it_is():
    pack_LI, rank_LI = pack([[1, 3, 2]], 3, 1)
    assert pack_LI.tolist() == [[0, 1, 2]] and rank_LI.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("sizes", [(2, 2), (0, 5), (5, 0), (-1, -5)])
def test_items_that_do_not_fill_the_packs_are_refused(sizes):
    with pytest.raises(ValueError, match=f"5 items do not fill num_packs={sizes[0]} of per_pack={sizes[1]}"):
        pack(np.ones((1, 5)), *sizes)


# ---- even shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_even_share_load_is_what_slots_add_up_to_one_by_one(seed):
    rng = np.random.default_rng(seed)
    load_LE = rng.integers(0, 50, size=(3, 5))
    slots_LS = np.stack([rng.permutation([0, 1, 2, 3, 4, 4, -1, -1, 2, 2, 0, 3]) for _ in range(3)])
    expected = np.zeros((3, 4))
    for layer, slot in np.ndindex(3, 12):
        expert = slots_LS[layer, slot]
        if expert >= 0:
            expected[layer, slot // 3] += load_LE[layer, expert] / (slots_LS[layer] == expert).sum()
    got = even_share_load(load_LE, slots_LS, 4)
    np.testing.assert_allclose(got, expected, rtol=1e-12)  # sums in another order
    np.testing.assert_allclose(got.sum(axis=1), load_LE.sum(axis=1), rtol=1e-12)


def test_an_expert_without_load_needs_no_slot():
    assert even_share_load([[3, 0]], [[0, -1, 0, 0]], 2).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("slots", "ranks", "message"),
    [
        ([[0, 1, 1]], 2, "3 slots are not as many on each of num_ranks=2; give 2 or 4 slots"),
        ([[0, 1]], 0, "num_ranks=0"),
        ([[0, 2]], 2, r"slot 1 of layer 0 has expert 2, out of 0\.\.1"),
        ([[0, -2]], 2, "slot 1 of layer 0 has expert -2"),
        ([[0, 0]], 2, "expert 1 of layer 0 has load 4.0 and no slot; give it a slot"),
        ([[0.0, 1.0]], 2, "float64"),
        ([0, 1], 2, r"expected integers \[1, S\]"),
        ([[0, 1], [0, 1]], 2, r"\(2, 2\); expected integers \[1, S\]"),
        (np.zeros((1, 0), int), 2, "0 slots"),
    ],
)
def test_even_share_load_refuses_what_is_no_placement_of_the_load(slots, ranks, message):
    with pytest.raises(ValueError, match=message):
        even_share_load([[3, 4]], slots, ranks)


# ---- size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "ranks"), [(288, 32), (320, 64)])
def test_a_large_model_is_planned_in_well_under_a_tenth_of_a_second(slots, ranks):
    load_LE = np.random.default_rng(0).lognormal(size=(58, 256))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        plan, _, _ = rebalance_experts(load_LE, slots, 0, 1, ranks)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # some 8 ms on one slow core
    load_LG = even_share_load(load_LE, plan, ranks)
    assert (load_LG.mean(axis=1) / load_LG.max(axis=1)).mean() > 0.98
