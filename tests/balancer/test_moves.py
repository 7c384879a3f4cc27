"""Least-move relabelling: exact against all permutations, and what it may and may not exchange."""

import doctest
import itertools

import numpy as np
import pytest

from balancer import moves
from balancer.metrics import moved_slots
from balancer.moves import relabel
from balancer.packing import rebalance_experts


def random_plans(seed, ranks, layers=3):
    """Two placements [L, S] at random, some slots empty, experts twice on a rank now and then."""
    rng = np.random.default_rng(seed)
    per_rank, experts = int(rng.integers(1, 5)), int(rng.integers(2, 3 * ranks))
    return rng.integers(-1, experts, size=(2, layers, ranks * per_rank))


def all_orders(ranks, nodes, speeds):
    """Every order of the ranks that keeps nodes together and ranks of other speeds apart."""
    per_node = ranks // nodes
    for order in itertools.permutations(range(ranks)):
        whole = all(
            len({rank // per_node for rank in order[n * per_node : (n + 1) * per_node]}) == 1
            for n in range(nodes)
        )
        if whole and all(speeds[rank] == speeds[to] for to, rank in enumerate(order)):
            yield list(order)


def rank_sets(slots_S, ranks):
    """The sorted experts of every rank."""
    return [sorted(rank) for rank in slots_S.reshape(ranks, -1).tolist()]


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(moves)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("ranks", "nodes", "speeds"),
    [
        (1, 1, [1]),
        (4, 1, [1, 1, 1, 1]),
        (5, 1, [1, 1, 1, 1, 1]),
        (5, 1, [1, 2, 1, 2, 2]),
        (6, 2, [1, 1, 1, 1, 1, 1]),
        (6, 3, [1, 1, 1, 1, 1, 1]),
        (6, 6, [1, 1, 1, 1, 1, 1]),
        (6, 3, [1, 2, 2, 1, 2, 2]),  # node 2 may exchange with none
        (6, 2, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_no_allowed_permutation_of_the_ranks_moves_fewer(seed, ranks, nodes, speeds):
    before_LS, after_LS = random_plans(seed, ranks)
    got_LS = relabel(before_LS, after_LS, ranks, nodes, speed_G=speeds)
    orders = list(all_orders(ranks, nodes, speeds))
    for before, after, got in zip(before_LS, after_LS, got_LS):
        ways = after.reshape(ranks, -1)[orders].reshape(len(orders), -1)
        moved = moved_slots(before, ways, ranks)
        assert moved_slots(before, got, ranks) == moved.min()
        # what came out is one of those ways, but for the order of slots on a rank
        same = [order for order, way in zip(orders, ways) if rank_sets(way, ranks) == rank_sets(got, ranks)]
        assert same
        # and of the best ways one that leaves the most ranks as they are in the plan
        kept = [np.count_nonzero(np.array(order) == np.arange(ranks)) for order in orders]
        best = max(k for k, m in zip(kept, moved) if m == moved.min())
        assert max(np.count_nonzero(np.array(order) == np.arange(ranks)) for order in same) == best


@pytest.mark.parametrize("seed", range(20))
def test_experts_that_stay_on_a_rank_keep_their_slot(seed):
    before_LS, after_LS = random_plans(seed, 4)
    got_LS = relabel(before_LS, after_LS, 4)
    for before, got in zip(before_LS.reshape(12, -1), got_LS.reshape(12, -1)):  # rank by rank
        stay = sum(min((before == e).sum(), (got == e).sum()) for e in np.unique(got))
        assert (before == got).sum() == stay


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_placement_stays_as_it_is(seed, nodes):
    before_LS, _ = random_plans(seed, 8)
    np.testing.assert_array_equal(relabel(before_LS, before_LS, 8, nodes), before_LS)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_present_placement_under_other_names_is_no_move_at_all(seed, nodes):
    rng = np.random.default_rng(seed)
    before_LS = np.array([[rng.permutation(12)[:3] for _ in range(8)] for _ in range(3)]).reshape(3, 24)
    by_rank = before_LS.reshape(3, nodes, 8 // nodes, -1)[:, rng.permutation(nodes)]
    by_rank = rng.permuted(by_rank[:, :, rng.permutation(8 // nodes)], axis=3)
    np.testing.assert_array_equal(relabel(before_LS, by_rank.reshape(3, -1), 8, nodes), before_LS)


@pytest.mark.parametrize("seed", range(8))
def test_the_number_of_moves_does_not_depend_on_the_names_of_the_ranks(seed):
    before_LS, after_LS = random_plans(seed, 7)
    renamed_LS = after_LS.reshape(3, 7, -1)[:, np.random.default_rng(seed).permutation(7)].reshape(3, -1)
    first, second = relabel(before_LS, after_LS, 7), relabel(before_LS, renamed_LS, 7)
    np.testing.assert_array_equal(moved_slots(before_LS, first, 7), moved_slots(before_LS, second, 7))
    for one, other in zip(first, second):
        assert sorted(rank_sets(one, 7)) == sorted(rank_sets(other, 7))


def test_ranks_of_other_speeds_do_not_exchange_their_experts():
    before, after = [[0, 1, 2, 3]], [[2, 3, 0, 1]]
    assert relabel(before, after, 2).tolist() == before
    assert relabel(before, after, 2, speed_G=[1.0, 1.0]).tolist() == before
    assert relabel(before, after, 2, speed_G=[1.0, 2.0]).tolist() == after


def test_nodes_of_other_speeds_do_not_exchange_whatever_it_saves():
    before, after = [[0, 1, 2, 3, 4, 5]], [[3, 4, 5, 0, 1, 2]]
    assert relabel(before, after, 6, 2).tolist() == before
    assert relabel(before, after, 6, 2, speed_G=[1, 1, 1, 1, 1, 2]).tolist() == after


def test_ranks_of_other_nodes_do_not_exchange_alone():
    before, after = [[0, 1, 2, 3]], [[2, 1, 0, 3]]  # four ranks of one slot
    assert relabel(before, after, 4).tolist() == before
    assert moved_slots(before, relabel(before, after, 4, 2), 4).tolist() == [2]


def test_a_plan_with_nothing_in_common_stays_as_it_is():
    after = np.arange(12, 24).reshape(1, 12)
    np.testing.assert_array_equal(relabel(np.arange(12).reshape(1, 12), after, 4), after)


def test_layers_are_renamed_each_for_itself():
    before_LS, after_LS = random_plans(3, 6, layers=5)
    alone = [relabel(b[None], a[None], 6, 2)[0] for b, a in zip(before_LS, after_LS)]
    np.testing.assert_array_equal(relabel(before_LS, after_LS, 6, 2), alone)


def test_what_is_given_is_not_changed_and_numbers_of_experts_may_be_large():
    before = np.array([[5, 10**12]], np.int64)
    after = np.array([[10**12, 7]], np.int64)
    assert relabel(before, after, 2).tolist() == [[7, 10**12]]
    assert before.tolist() == [[5, 10**12]] and after.tolist() == [[10**12, 7]]


@pytest.mark.parametrize(("groups", "nodes"), [(0, 1), (8, 4)])
def test_greedy_plans_of_a_drifting_load_need_fewer_moves_and_keep_their_ranks(groups, nodes):
    rng = np.random.default_rng(0)
    load_LE = rng.lognormal(size=(12, 64))
    later_LE = load_LE * rng.lognormal(sigma=0.02, size=load_LE.shape)
    before_LS, after_LS = (rebalance_experts(x, 80, groups, nodes, 16)[0] for x in (load_LE, later_LE))
    got_LS = relabel(before_LS, after_LS, 16, nodes)
    plain, fewer = (moved_slots(before_LS, plan, 16) for plan in (after_LS, got_LS))
    assert (fewer <= plain).all()
    assert fewer.sum() < 0.95 * plain.sum()
    per_node = 80 // nodes
    for got, after in zip(got_LS, after_LS):
        assert sorted(rank_sets(got, 16)) == sorted(rank_sets(after, 16))
        nodes_of = [sorted(map(sorted, plan.reshape(-1, per_node).tolist())) for plan in (got, after)]
        assert nodes_of[0] == nodes_of[1]


@pytest.mark.parametrize(
    ("before", "after", "ranks", "nodes", "speeds", "message"),
    [
        ([[0, 1]], [[0, 1, 2]], 1, 1, None, r"before has shape \(1, 2\) but after \(1, 3\)"),
        ([0, 1], [0, 1], 2, 1, None, r"before is int64 \(2,\); expected integers \[L, S\]"),
        ([[0, 1]], [[0.0, 1.0]], 2, 1, None, "after is float64"),
        (np.zeros((0, 2), int), np.zeros((0, 2), int), 2, 1, None, r"before is int64 \(0, 2\)"),
        ([[0, 1]], [[0, -2]], 2, 1, None, "after has expert -2 in slot 1 of layer 0; an empty slot is -1"),
        ([[0, 1, 2]], [[0, 1, 2]], 2, 1, None, "3 slots are not a multiple of 2 ranks; use 2 or 4"),
        ([[0, 1]], [[0, 1]], 0, 1, None, "num_ranks=0 must be at least 1"),
        ([[0, 1, 2, 3]], [[0, 1, 2, 3]], 4, 3, None, "num_nodes=3 does not divide 4 ranks; use"),
        ([[0, 1]], [[0, 1]], 2, 0, None, "num_nodes=0 does not divide 2 ranks; use 1"),
        ([[0, 1]], [[0, 1]], 2, 1, [1.0], r"speed_G has shape \(1,\) for 2 ranks; give one speed each"),
        ([[0, 1]], [[0, 1]], 2, 1, [1.0, 0.0], r"speed_G\[1\]=0.0 must be finite and above 0"),
        ([[0, 1]], [[0, 1]], 2, 1, [float("nan"), 1.0], r"speed_G\[0\]=nan must be finite"),
    ],
)
def test_what_is_no_pair_of_placements_is_refused(before, after, ranks, nodes, speeds, message):
    with pytest.raises(ValueError, match=message):
        relabel(before, after, ranks, nodes, speed_G=speeds)
