"""Even shares: placements against greedy and exhaustive optima, repairs that pay, odd loads, refusals."""

import doctest
from itertools import product

import numpy as np
import pytest

from balancer import even
from balancer.bound import peak_bound
from balancer.even import EFFORTS, even_placement, even_repair
from balancer.metrics import moved_slots
from balancer.packing import even_share_load, rebalance_experts


def peaks(load_LE, slots_LS, ranks, speed_G=1.0):
    return (even_share_load(load_LE, slots_LS, ranks) / np.asarray(speed_G)).max(axis=1)


def check_placement(slots_LS, experts, ranks):
    """Every expert has a slot; a rank has none twice while another lacks it."""
    for row in slots_LS:
        assert set(row.tolist()) == set(range(experts))
        held = [set(r) for r in row.reshape(ranks, -1).tolist()]
        for rank, slots in enumerate(row.reshape(ranks, -1).tolist()):
            doubled = [e for e in held[rank] if slots.count(e) > 1]
            assert all(e in other for e in doubled for other in held)


def optimum(load_E, slots, ranks, home_S=None, speed_G=1.0):
    """The smallest peak of all full placements with no expert twice on a rank."""
    experts = len(load_E)
    home_S = [-1] * slots if home_S is None else list(home_S)
    best = np.inf
    for slots_S in product(*(range(experts) if home < 0 else [home] for home in home_S)):
        rows = np.array(slots_S).reshape(ranks, -1)
        if len(set(slots_S)) < experts or any(len(set(r)) < len(r) for r in rows.tolist()):
            continue
        share_E = load_E / np.bincount(slots_S, minlength=experts)
        best = min(best, (share_E[rows].sum(axis=1) / np.asarray(speed_G)).max())
    return best


@pytest.mark.parametrize("nodes_groups", [(1, 0), (4, 0), (4, 32), (8, 32)])
@pytest.mark.parametrize("slots_ranks", [(288, 32), (320, 64)])
def test_never_under_greedy_and_near_the_bound_at_the_usual_sizes(slots_ranks, nodes_groups):
    (slots, ranks), (nodes, groups) = slots_ranks, nodes_groups
    load_LE = np.random.default_rng(0).lognormal(0, 1, (20, 256))
    got = even_placement(load_LE, slots, ranks, num_nodes=nodes, num_groups=groups)
    check = got if groups == 0 else got[:0]  # with groups, a rank of another node may lack an expert
    check_placement(check, 256, ranks)
    greedy = rebalance_experts(load_LE, slots, groups, nodes, ranks)[0]
    got_L = peaks(load_LE, got, ranks)
    assert (got_L <= peaks(load_LE, greedy, ranks) * (1 + 1e-12)).all()
    lower_L = peak_bound(load_LE, slots, ranks, shares="even", num_nodes=nodes, num_groups=groups)
    assert (got_L >= lower_L * (1 - 1e-12)).all()
    if groups == 0:
        assert (got_L / lower_L - 1).mean() <= (0.0005 if ranks == 32 else 0.002)


def test_groups_stay_whole_on_a_node():
    load_LE = np.random.default_rng(3).lognormal(0, 1, (5, 32))
    got = even_placement(load_LE, 48, 8, num_nodes=4, num_groups=8)
    for row in got:
        node_of = [set((np.flatnonzero(row == e) // 12).tolist()) for e in range(32)]
        for group in range(8):
            assert len(set.union(*node_of[4 * group : 4 * group + 4])) == 1


def test_never_under_greedy_on_random_layers():
    rng = np.random.default_rng(5)
    for _ in range(40):
        ranks, experts = int(rng.choice([4, 8, 16])), int(rng.choice([32, 48, 64]))
        slots = ranks * (-(-experts // ranks) + int(rng.integers(0, 3)))
        load_LE = rng.lognormal(0, rng.uniform(0.2, 1.2), (5, experts))
        got = even_placement(load_LE, slots, ranks)
        check_placement(got, experts, ranks)
        greedy = rebalance_experts(load_LE, slots, 0, 1, ranks)[0]
        distinct = [all(len(set(r)) == slots // ranks for r in row.reshape(ranks, -1)) for row in greedy]
        # a greedy plan with an expert twice on a rank is not one that we may give
        worse = peaks(load_LE, got, ranks) > peaks(load_LE, greedy, ranks) * (1 + 1e-12)
        assert not (worse & np.array(distinct)).any()


TINY = [(4, 4, 2), (4, 6, 2), (5, 6, 3), (3, 4, 2), (3, 6, 3), (5, 6, 2), (2, 3, 3), (4, 6, 3)]


@pytest.mark.parametrize("fixed", [False, True])
def test_tiny_plans_are_nearly_always_the_best_of_all(fixed):
    ratios = []
    for seed in range(64):
        rng = np.random.default_rng(seed)
        experts, slots, ranks = TINY[seed % 8]
        load_LE = rng.lognormal(3, 1, (1, experts))
        home_S, home_E = np.full(slots, -1), None
        if fixed:
            home_E = rng.permutation(slots)[:experts]
            home_S[home_E] = np.arange(experts)
        got = even_placement(load_LE, slots, ranks, home_slot_E=home_E, effort="thorough")
        if fixed:
            assert (got[0][home_E] == np.arange(experts)).all()
        best = optimum(load_LE[0], slots, ranks, home_S)
        ratios.append(peaks(load_LE, got, ranks)[0] / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.95


def test_speeds_are_respected():
    load_LE = np.random.default_rng(7).lognormal(0, 0.7, (6, 64))
    speed_G = [1.5, 1.0, 1.0, 0.75]
    got = even_placement(load_LE, 96, 4, speed_G=speed_G)
    blind = even_placement(load_LE, 96, 4)
    fair_L = load_LE.sum(axis=1) / 4.25
    assert (peaks(load_LE, got, 4, speed_G) <= 1.01 * fair_L).all()
    assert (peaks(load_LE, blind, 4, speed_G) >= 1.4 * fair_L).all()


def test_more_effort_is_no_worse():
    load_LE = np.random.default_rng(8).lognormal(0, 1, (4, 64))
    peak = {effort: peaks(load_LE, even_placement(load_LE, 80, 16, effort=effort), 16) for effort in EFFORTS}
    assert (peak["fast"] < peak["greedy"]).all()
    assert (peak["thorough"] <= peak["fast"]).all()


def test_layers_are_planned_each_for_itself_and_twice_alike():
    load_LE = np.random.default_rng(9).lognormal(0, 1, (6, 64))
    got = even_placement(load_LE, 80, 8)
    np.testing.assert_array_equal(even_placement(load_LE, 80, 8), got)
    np.testing.assert_array_equal(even_placement(load_LE[::-1], 80, 8), got[::-1])
    np.testing.assert_array_equal(even_placement(load_LE[2:3], 80, 8), got[2:3])


@pytest.mark.parametrize(
    ("load_E", "slots", "ranks", "peak"),
    [
        ([0, 0, 0, 0], 8, 4, 0),
        ([12, 0, 0, 0], 8, 4, 3),  # spread over all ranks
        ([1, 1, 1, 1], 8, 4, 1),
        ([4, 3, 2, 1], 4, 2, 5),  # no spare slot
        ([4, 3, 2, 1], 4, 1, 10),  # one rank
        ([4, 4], 4, 4, 2),  # more ranks than experts
        ([4, 3], 9, 3, 7 / 3),  # more slots on a rank than experts
        ([5], 4, 2, 2.5),
    ],
)
def test_odd_loads_give_the_best_plan(load_E, slots, ranks, peak):
    got = even_placement([load_E], slots, ranks)
    check_placement(got, len(load_E), ranks)
    if sum(load_E):
        assert peaks([load_E], got, ranks)[0] == pytest.approx(peak)


def test_zero_load_spreads_the_spare_slots():
    counts = np.bincount(even_placement([[0] * 8], 12, 4)[0], minlength=8)
    assert counts.tolist() == [2, 2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_twins_are_equal(seed):
    rng = np.random.default_rng(seed)
    load_LE = rng.integers(0, 20, (2, 12)).astype(float) if seed % 2 else rng.lognormal(0, 1, (2, 12))
    rules = [{}, {"home_slot_E": rng.permutation(16)[:12]}, {"num_nodes": 2, "num_groups": 4},
             {"speed_G": [1, 2, 1, 0.5]}][seed]  # fmt: skip
    plans = [even_placement(load_LE, 16, 4, compiled=compiled, **rules) for compiled in (True, False)]
    np.testing.assert_array_equal(*plans)
    rules.pop("num_groups", None)
    counts = np.stack([load_LE, load_LE[:, ::-1]])
    repairs = [
        even_repair(counts, [1, 2], plans[0], 4, move_price=0.01, compiled=compiled, **rules)
        for compiled in (True, False)
    ]
    np.testing.assert_array_equal(*repairs)


def cost(counts_KLE, weight_K, slots_LS, current_LS, ranks, price):
    peak_KL = np.stack([peaks(load, slots_LS, ranks) for load in counts_KLE])
    return weight_K @ (peak_KL * ranks / counts_KLE.sum(axis=2)) + price * moved_slots(
        current_LS, slots_LS, ranks
    )


@pytest.mark.parametrize("price", [0.0, 0.01, 0.1])
def test_a_repair_lowers_its_cost_or_leaves_the_layer(price):
    rng = np.random.default_rng(11)
    before_LE = rng.lognormal(0, 1, (8, 32))
    current = even_placement(before_LE, 48, 8)
    counts = before_LE * rng.lognormal(0, 0.4, (3, 8, 32))
    weight = np.array([0.5, 0.3, 0.2])
    got = even_repair(counts, weight, current, 8, move_price=price)
    check_placement(got, 32, 8)
    old_L, new_L = (cost(counts, weight, s, current, 8, price) for s in (current, got))
    changed = (got != current).any(axis=1)
    assert (new_L[changed] < old_L[changed]).all()
    assert (new_L <= old_L).all()
    assert changed.any()
    some = even_repair(counts, weight, current, 8, move_price=price, max_moves=2)
    assert moved_slots(current, some, 8).max() <= 2


def test_nothing_moves_where_no_change_pays():
    load_LE = np.random.default_rng(12).lognormal(0, 1, (4, 32))
    current = even_placement(load_LE, 48, 8, effort="thorough")
    np.testing.assert_array_equal(even_repair([load_LE], [1], current, 8, move_price=0.01), current)
    np.testing.assert_array_equal(even_repair([load_LE], [1], current, 8, tolerance=0.05), current)
    np.testing.assert_array_equal(even_repair([0 * load_LE], [1], current, 8), current)
    noisy = load_LE * np.random.default_rng(13).lognormal(0, 0.5, load_LE.shape)
    np.testing.assert_array_equal(even_repair([noisy], [1], current, 8, move_price=10), current)
    np.testing.assert_array_equal(even_repair([noisy], [1], current, 8, max_moves=0), current)


@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_what_is_good_enough_does_not_depend_on_the_sum_of_the_weights(scale):
    load_LE = np.random.default_rng(16).lognormal(0, 1, (4, 32))
    current = even_placement(load_LE, 48, 8, effort="thorough")
    near = load_LE * np.random.default_rng(17).lognormal(0, 0.05, load_LE.shape)
    far = load_LE * np.random.default_rng(17).lognormal(0, 0.5, load_LE.shape)
    over_L, far_L = (peaks(load, current, 8) * 8 / load.sum(axis=1) for load in (near, far))
    assert over_L.min() > 1 and over_L.max() < 1.1 and far_L.min() > 1.12
    assert (even_repair([near], [scale], current, 8) != current).any()
    np.testing.assert_array_equal(even_repair([near], [scale], current, 8, tolerance=0.1), current)
    changed = even_repair([far], [scale], current, 8, tolerance=0.1) != current
    assert changed.any(axis=1).all()


def test_a_repair_keeps_homes_and_nodes():
    rng = np.random.default_rng(14)
    home_E = np.arange(16) // 4 * 6 + np.arange(16) % 4
    current = even_placement(rng.lognormal(0, 1, (4, 16)), 24, 4, home_slot_E=home_E)
    load = rng.lognormal(0, 1, (1, 4, 16))
    got = even_repair(load, [1], current, 4, home_slot_E=home_E)
    assert (got[:, home_E] == np.arange(16)).all()
    assert (got != current).any()
    current = even_placement(rng.lognormal(0, 1, (4, 16)), 24, 4, num_nodes=2, num_groups=4)
    got = even_repair(load, [1], current, 4, num_nodes=2)
    assert (got != current).any()
    for old, new in zip(current.reshape(-1, 12), got.reshape(-1, 12)):
        assert set(old.tolist()) == set(new.tolist())


def test_a_repair_renames_with_its_ranks():
    rng = np.random.default_rng(15)
    load = rng.lognormal(0, 1, (1, 5, 16))
    current = even_placement(rng.lognormal(0, 1, (5, 16)), 24, 4)
    renamed = current.reshape(5, 4, 6)[:, [2, 0, 3, 1]].reshape(5, 24)
    got, other = even_repair(load, [1], current, 4), even_repair(load, [1], renamed, 4)
    # of changes that are equally good the first is taken, which other names make another one
    np.testing.assert_allclose(peaks(load[0], got, 4), peaks(load[0], other, 4), rtol=0.01)


def test_an_empty_slot_is_filled_where_it_pays():
    got = even_repair([[8, 1, 1, 2]], [1], [[0, 1, -1, 2, 3, -1]], 2, move_price=0.01)
    assert peaks([[8, 1, 1, 2]], got, 2)[0] < 9
    assert -1 in even_repair([[2, 2]], [1], [[0, -1, 1, -1]], 2, move_price=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_LE": [[1.0, np.nan, 1, 1]]}, "finite"),
        ({"load_LE": [[1, -1, 1, 1]]}, "finite and 0 or more"),
        ({"load_LE": [[1, np.inf, 1, 1]]}, "finite"),
        ({"load_LE": [1, 2, 1, 1]}, "one row for each layer"),
        ({"num_slots": 7}, "use 6 or 8"),
        ({"num_slots": 2}, "use 4"),
        ({"effort": "most"}, "greedy, fast, thorough"),
        ({"home_slot_E": [0, 1, 2, 2]}, "is the home of expert 2 too"),
        ({"speed_G": [1, np.inf]}, "finite and above 0"),
        ({"num_nodes": 2, "num_groups": 3}, "does not divide the 4 experts"),
    ],
)
def test_bad_arguments_of_a_placement_are_refused(change, message):
    arguments = {"load_LE": [[4, 3, 2, 1]], "num_slots": 6, "num_ranks": 2} | change
    with pytest.raises(ValueError, match=message):
        even_placement(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts_KLE": [[[1.0, np.nan, 1, 1]]]}, "finite"),
        ({"counts_KLE": [1, 2, 3]}, "expected"),
        ({"weight_K": [1, 1]}, "give one each"),
        ({"weight_K": [0]}, "not all of them 0"),
        ({"weight_K": [-1]}, "0 or more"),
        ({"current_LS": [[0, 1, 2, 2, 1, 0]]}, "expert 3 of layer 0 has no slot"),
        ({"current_LS": [[0, 1, 2, 3, 4, 0]]}, "slot 4 of layer 0 has expert 4"),
        ({"current_LS": [[0.0] * 6]}, "expected integers"),
        ({"num_ranks": 4}, "use 4 or 8"),
        ({"home_slot_E": [0, 1, 2, 5]}, "is the home of expert 3"),
        ({"move_price": -0.1}, "finite and 0 or more"),
        ({"tolerance": np.nan}, "finite and 0 or more"),
        ({"max_moves": -1}, "finite and 0 or more"),
        ({"num_nodes": 3}, "does not divide"),
    ],
)
def test_bad_arguments_of_a_repair_are_refused(change, message):
    arguments = {"counts_KLE": [[[4, 3, 2, 1]]], "weight_K": [1], "current_LS": [[0, 1, 2, 3, 1, 0]]}
    with pytest.raises(ValueError, match=message):
        even_repair(**({"num_ranks": 2} | arguments | change))


def test_the_docstrings_print_what_they_say():
    assert doctest.testmod(even).failed == 0


@pytest.mark.slow
def test_repairs_along_a_real_trace_balance_it_with_few_moves(traces_dir):
    """Even shares, 8 ranks, 16 spare slots: at least 0.93 with at most 5,000 moves, planned on the past."""
    counts = np.load(traces_dir / "smartmoe.npz")["counts"].astype(np.int64)
    slots = even_placement(counts[0], 48, 8)
    balanced, moves = [], 0
    weight = 0.9 ** np.arange(3)
    for now in range(1, len(counts)):
        past = counts[np.maximum(now - 1 - np.arange(3), 0)]
        after = even_repair(past, weight / weight.sum(), slots, 8, move_price=0.011)
        moves += int(moved_slots(slots, after, 8).sum())
        slots = after
        load_LG = even_share_load(counts[now], slots, 8)
        balanced.append((load_LG.mean(axis=1) / load_LG.max(axis=1)).mean())
    assert np.mean(balanced) >= 0.93
    assert moves <= 5000
