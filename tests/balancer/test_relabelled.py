"""The strong baseline: greedy, relabelled, and only where it improves enough; on a real trace too."""

import doctest

import numpy as np
import pytest

from balancer import relabelled
from balancer.metrics import balancedness, moved_slots
from balancer.packing import even_share_load, rebalance_experts
from balancer.relabelled import strong_baseline
from balancer.trace import load_trace

RANKS, SLOTS, EXPERTS = 4, 24, 16


def loads(seed, layers=6):
    return np.random.default_rng(seed).lognormal(size=(layers, EXPERTS))


def even_balance(load, slots, ranks=RANKS):
    return balancedness(even_share_load(load, slots, ranks))


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(relabelled)
    assert result.attempted > 0
    assert result.failed == 0


def test_without_a_placement_it_is_the_greedy_plan():
    expected = rebalance_experts(loads(0), SLOTS, 4, 2, RANKS)[0]
    first = strong_baseline(loads(0), None, RANKS, num_slots=SLOTS, num_nodes=2, num_groups=4)
    np.testing.assert_array_equal(first, expected)


@pytest.mark.parametrize(("nodes", "groups"), [(1, 0), (2, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_a_layer_is_as_balanced_as_greedy_or_stays_and_stays_only_within_the_hysteresis(seed, nodes, groups):
    before = strong_baseline(loads(seed), None, RANKS, num_slots=SLOTS, num_nodes=nodes, num_groups=groups)
    load = loads(seed) * np.exp(0.15 * np.random.default_rng(seed + 50).normal(size=(6, EXPERTS)))
    after = strong_baseline(load, before, RANKS, num_nodes=nodes, num_groups=groups)
    greedy = rebalance_experts(load, SLOTS, groups, nodes, RANKS)[0]
    stayed = (after == before).all(axis=1)
    now, best = even_balance(load, before), even_balance(load, greedy)
    np.testing.assert_array_equal(stayed, ~(best > now * 1.05))
    np.testing.assert_allclose(even_balance(load, after)[~stayed], best[~stayed], rtol=1e-12)
    moves, greedy_moves = moved_slots(before, after, RANKS), moved_slots(before, greedy, RANKS)
    assert (moves <= greedy_moves).all()
    assert moves.sum() < greedy_moves.sum()


def test_a_group_of_experts_stays_on_one_node_whatever_the_ranks_are_called():
    sizes = {"num_nodes": 2, "num_groups": 4}
    before = strong_baseline(loads(0, 20), None, RANKS, num_slots=SLOTS, **sizes)
    after = strong_baseline(loads(1, 20), before, RANKS, hysteresis=0, **sizes)
    assert (after != before).any(axis=1).all()
    node_S = np.arange(SLOTS) // (SLOTS // 2)
    for slots_S in after:
        assert all(len(set(node_S[slots_S // 4 == group])) == 1 for group in range(4))


def test_the_hysteresis_decides_when_a_layer_changes():
    before = rebalance_experts(loads(0), SLOTS, 0, 1, RANKS)[0]
    load = loads(1)
    greedy = rebalance_experts(load, SLOTS, 0, 1, RANKS)[0]
    gain = even_balance(load, greedy) / even_balance(load, before) - 1
    for hysteresis in (0.0, float(np.median(gain)), float(gain.max()) + 0.01):
        changed = (strong_baseline(load, before, RANKS, hysteresis=hysteresis) != before).any(axis=1)
        np.testing.assert_array_equal(changed, gain > hysteresis)
    with pytest.raises(ValueError, match=r"hysteresis=-0.1 must be 0 or more; 0.05 asks for 5 %"):
        strong_baseline(load, before, RANKS, hysteresis=-0.1)


def test_the_same_load_and_no_load_move_nothing():
    load = loads(3)
    before = strong_baseline(load, None, RANKS, num_slots=SLOTS)
    np.testing.assert_array_equal(strong_baseline(load, before, RANKS), before)
    np.testing.assert_array_equal(strong_baseline(load * 0, before, RANKS), before)
    np.testing.assert_array_equal(strong_baseline(load * 0, before, RANKS, hysteresis=0), before)


def test_an_equally_good_placement_is_no_reason_to_move():
    before = np.array([[0, 1, 2, 3], [3, 0, 2, 1]])
    np.testing.assert_array_equal(strong_baseline(np.ones((2, 4)), before, 2, hysteresis=0), before)


def test_sizes_that_do_not_fit_are_refused():
    before = strong_baseline(loads(0), None, RANKS, num_slots=SLOTS)
    with pytest.raises(ValueError, match="num_slots and current_LS are both None"):
        strong_baseline(loads(0), None, RANKS)
    with pytest.raises(ValueError, match="num_slots=28 but current_LS has 24 slots; drop num_slots"):
        strong_baseline(loads(0), before, RANKS, num_slots=28)
    with pytest.raises(ValueError, match="24 slots are not as many on each of num_ranks=5"):
        strong_baseline(loads(0), before, 5)
    with pytest.raises(ValueError, match="nan"):
        strong_baseline(loads(0) * np.nan, before, RANKS)


def replay(counts_WLE, policy, every=10):
    """Policies at every 10th snapshot, scored on all later ones: mean-form balancedness, moves."""
    slots, moves, scores = policy(counts_WLE[0], None), 0, []
    for w in range(1, len(counts_WLE)):
        scores.append(float(even_balance(counts_WLE[w], slots, 8).mean()))
        if w % every == 0:
            new = policy(counts_WLE[w], slots)
            moves, slots = moves + int(moved_slots(slots, new, 8).sum()), new
    return float(np.mean(scores)), moves


def test_on_the_real_trace_it_moves_a_quarter_as_much_as_greedy_for_the_same_balance(traces_dir):
    counts = load_trace(traces_dir / "smartmoe.npz").tokens_per_expert_WLE
    greedy, greedy_moves = replay(counts, lambda load, _: rebalance_experts(load, 48, 0, 1, 8)[0])
    strong, strong_moves = replay(counts, lambda load, now: strong_baseline(load, now, 8, num_slots=48))
    # measured: .9036 with 35,901 moves, .9072 with 7,715; another order of ties moves the last digits
    assert greedy == pytest.approx(0.9036, abs=0.002)
    assert greedy_moves == pytest.approx(35_901, rel=0.02)
    assert strong == pytest.approx(0.9072, abs=0.002)
    assert strong_moves == pytest.approx(7_715, rel=0.02)
