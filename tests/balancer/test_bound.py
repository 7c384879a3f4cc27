"""Bounds: below the exhaustive optimum of every tiny case, equal to it on named ones; what is refused."""

import doctest
from itertools import product

import numpy as np
import pytest

from balancer import bound
from balancer.bound import peak_bound, scenario_bound
from balancer.split import balanced_peak


def placements(experts, slots, home_S=None, node_of_expert=None, slots_per_node=None):
    """All placements with a slot for every expert, empty slots too."""
    home_S = [-1] * slots if home_S is None else home_S
    choices = []
    for slot, home in enumerate(home_S):
        allowed = [-1, *range(experts)] if home < 0 else [home]
        if node_of_expert is not None:
            allowed = [e for e in allowed if e < 0 or node_of_expert[e] == slot // slots_per_node]
        choices.append(allowed)
    for slots_S in product(*choices):
        if len(set(slots_S) - {-1}) == experts:
            yield np.array(slots_S)


def even_peak(load_E, slots_S, ranks, speed_G):
    count_E = np.bincount(slots_S[slots_S >= 0], minlength=len(load_E))
    share_E = load_E / count_E
    share_S = np.where(slots_S >= 0, share_E[slots_S], 0.0)
    return (share_S.reshape(ranks, -1).sum(axis=1) / speed_G).max()


def optimum(load_E, slots, ranks, shares, speed_G=None, **rules):
    """The smallest peak of all placements; the exact split in units of a 1000th copy."""
    speed = np.ones(ranks) if speed_G is None else np.array(speed_G)
    best, seen = np.inf, set()
    for slots_S in placements(len(load_E), slots, **rules):
        key = tuple(sorted(tuple(sorted(r)) for r in slots_S.reshape(ranks, -1).tolist()))
        if speed_G is None and key in seen:
            continue  # equal ranks renamed
        seen.add(key)
        if shares == "even":
            best = min(best, even_peak(load_E, slots_S, ranks, speed))
        else:
            given = None if speed_G is None else speed
            best = min(best, balanced_peak(load_E * 1000, slots_S, ranks, speed_P=given).peak / 1000)
    return best


SIZES = [(3, 4, 2), (4, 4, 2), (3, 6, 3), (2, 4, 2), (4, 6, 3), (3, 3, 3), (5, 6, 2), (1, 3, 3)]


@pytest.mark.parametrize("shares", ["exact", "even"])
@pytest.mark.parametrize("seed", range(8))
def test_bound_is_below_the_exhaustive_optimum(shares, seed):
    rng = np.random.default_rng(seed)
    experts, slots, ranks = SIZES[seed]
    load_E = rng.lognormal(4, 1.5, experts).astype(np.int64)
    for speed_G in (None, tuple(rng.uniform(0.5, 2, ranks))):
        if speed_G is not None and experts > 3:
            continue
        best = optimum(load_E, slots, ranks, shares, speed_G)
        lower = peak_bound(load_E[None], slots, ranks, shares=shares, speed_G=speed_G)[0]
        # the exact optimum is rounded up to a 1000th copy
        assert lower <= best * (1 + 1e-9)
        assert lower >= 0.5 * best


@pytest.mark.parametrize("shares", ["exact", "even"])
@pytest.mark.parametrize("seed", range(12))
def test_bound_with_homes_is_below_the_exhaustive_optimum(shares, seed):
    rng = np.random.default_rng(100 + seed)
    experts, slots, ranks = [(4, 6, 2), (3, 6, 3), (4, 6, 3), (5, 6, 3), (4, 8, 2), (3, 4, 2)][seed % 6]
    home_E = rng.permutation(slots)[:experts]
    home_S = np.full(slots, -1)
    home_S[home_E] = np.arange(experts)
    load_E = rng.lognormal(4, 1.5, experts).astype(np.int64)
    speed_G = tuple(rng.uniform(0.5, 2, ranks)) if seed % 2 else None
    best = optimum(load_E, slots, ranks, shares, speed_G, home_S=home_S.tolist())
    lower = peak_bound(load_E[None], slots, ranks, shares=shares, home_slot_E=home_E, speed_G=speed_G)[0]
    assert lower <= best * (1 + 1e-9)
    free = peak_bound(load_E[None], slots, ranks, shares=shares, speed_G=speed_G)[0]
    assert lower >= free * (1 - 1e-9)


@pytest.mark.parametrize("shares", ["exact", "even"])
@pytest.mark.parametrize("groups", [2, 4])
def test_bound_with_nodes_is_below_the_exhaustive_optimum(shares, groups):
    for seed in range(4):
        load_E = np.random.default_rng(seed).lognormal(4, 1.5, 4).astype(np.int64)
        size = 4 // groups
        ways = [w for w in product(range(2), repeat=groups) if sum(w) == groups // 2]
        best = min(
            optimum(load_E, 8, 4, shares, node_of_expert=np.repeat(way, size), slots_per_node=4)
            for way in ways
            if way[0] == 0  # the nodes are alike
        )
        lower = peak_bound(load_E[None], 8, 4, shares=shares, num_nodes=2, num_groups=groups)[0]
        assert lower <= best * (1 + 1e-9)
        assert lower >= peak_bound(load_E[None], 8, 4, shares=shares)[0]


@pytest.mark.parametrize("per_node", [2, 3])
def test_bound_of_many_groups_is_below_the_best_way_of_grouping(per_node):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        load_LX = rng.lognormal(0, 1.5, (3, 3 * per_node))
        best_L = bound._best_grouping(load_LX, np.ones(3))
        assert (bound._large_groups(load_LX, 3) <= best_L * (1 + 1e-12)).all()


def test_large_groups_are_bounded_by_the_mean_of_their_nodes_also_where_two_of_them_share_one():
    load_LX = np.random.default_rng(0).integers(0, 9, (200, 9)).astype(float)
    rising_LX = np.sort(load_LX, axis=1)
    # three nodes of three groups: the n largest, and 2 n others beside them
    mean_nL = [(rising_LX[:, 9 - n :].sum(axis=1) + rising_LX[:, : 2 * n].sum(axis=1)) / n for n in (1, 2, 3)]
    np.testing.assert_allclose(bound._large_groups(load_LX, 3), np.max(mean_nL, axis=0), rtol=1e-12)
    assert (np.max(mean_nL, axis=0) <= bound._best_grouping(load_LX, np.ones(3)) * (1 + 1e-12)).all()


def test_even_shares_with_homes_may_have_an_expert_twice_on_a_rank():
    # 3 of 9 each: the home at half speed takes 6, two slots at full speed 6 together
    arguments = {"shares": "even", "home_slot_E": [1], "speed_G": [0.5, 1.0]}
    assert peak_bound([[9.0]], 4, 2, **arguments)[0] == pytest.approx(6)
    assert optimum(np.array([9.0]), 4, 2, "even", (0.5, 1.0), home_S=[-1, 0, -1, -1]) == pytest.approx(6)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        load_E, speed_G = rng.lognormal(0, 1, 2), tuple(rng.uniform(0.2, 2, 2))
        best = optimum(load_E, 6, 2, "even", speed_G, home_S=[0, -1, -1, 1, -1, -1])
        lower = peak_bound(load_E[None], 6, 2, shares="even", home_slot_E=[0, 3], speed_G=speed_G)[0]
        assert lower <= best * (1 + 1e-9)


def test_experts_that_must_share_a_rank_do_so_on_the_fastest():
    # 3 + 3 on the rank of speed 1.5, 3 on the other
    assert peak_bound([[3, 3, 3, 0]], 4, 2, speed_G=[1, 1.5])[0] == pytest.approx(4)


def test_a_replica_goes_to_the_home_expert_of_which_it_takes_most():
    # half of 8 and half of 3 stay; a third of 8 and all of 3 would be more
    home_E = [0, 1, 2, 4]
    lower = peak_bound([[8, 3, 0, 0]], 6, 3, shares="even", home_slot_E=home_E)[0]
    assert lower == pytest.approx(5.5)
    assert optimum(np.array([8.0, 3, 0, 0]), 6, 3, "even", home_S=[0, 1, 2, -1, 3, -1]) == pytest.approx(5.5)


def test_bound_is_tight_where_the_optimum_is_known():
    assert peak_bound([[6, 6, 6, 6]], 4, 4)[0] == 6
    assert peak_bound([[12, 0, 0, 0]], 8, 4)[0] == pytest.approx(3)  # spread over all ranks
    assert peak_bound([[12, 0, 0, 0]], 4, 2)[0] == 12  # no spare slot
    assert peak_bound([[12, 0]], 3, 3)[0] == 6  # one spare slot
    # three experts on two ranks of two slots: two of the three share one
    assert peak_bound([[5, 4, 4, 0]], 4, 2)[0] == pytest.approx(8)
    # with two spare slots none needs to: half of 13 each
    assert peak_bound([[5, 4, 4, 0]], 6, 2)[0] == pytest.approx(6.5)
    # one replica takes 6 of the 8 on rank 0 at most, so that 5 are the best
    assert peak_bound([[6, 2, 1, 1]], 6, 2, home_slot_E=[0, 1, 3, 4])[0] == pytest.approx(5)
    assert peak_bound([[6, 2, 1, 1]], 6, 2, shares="even", home_slot_E=[0, 1, 3, 4])[0] == pytest.approx(5)
    # homes without a spare slot stay as they are
    assert peak_bound([[6, 2, 1, 1]], 4, 2, home_slot_E=[0, 1, 2, 3])[0] == pytest.approx(8)
    # groups of 9 + 1 and 1 + 1 on a node each
    assert peak_bound([[9, 1, 1, 1]], 8, 4, num_nodes=2, num_groups=2)[0] == pytest.approx(5)
    # a rank of speed 3 and one of 1
    assert peak_bound([[6, 2]], 2, 2, speed_G=[3, 1])[0] == pytest.approx(2)


def test_nodes_with_homes_are_bounded_each_for_itself():
    load_LE = np.array([[8.0, 4, 1, 1]])
    home_E = [0, 2, 4, 6]
    whole = peak_bound(load_LE, 8, 4, num_nodes=2, num_groups=2, home_slot_E=home_E)
    alone = peak_bound(load_LE[:, :2], 4, 2, home_slot_E=[0, 2])
    assert whole == alone == pytest.approx(6)


def test_layers_and_equal_ranks_do_not_matter_and_zero_load_is_zero():
    load_LE = np.random.default_rng(1).lognormal(0, 1, (3, 8))
    load_LE[2] = 0
    got = peak_bound(load_LE, 12, 4)
    assert got[2] == 0
    np.testing.assert_array_equal(peak_bound(load_LE[::-1], 12, 4), got[::-1])
    np.testing.assert_allclose(peak_bound(load_LE[:, ::-1], 12, 4), got, rtol=1e-12)
    home_E, moved_E = np.array([0, 1, 3, 4, 6, 7, 9, 10]), np.array([9, 10, 6, 7, 3, 4, 0, 1])
    np.testing.assert_allclose(
        peak_bound(load_LE, 12, 4, home_slot_E=home_E),
        peak_bound(load_LE, 12, 4, home_slot_E=moved_E),
        rtol=1e-12,
    )


def test_scenario_bound_is_the_weighted_mean_of_each_ones_own():
    counts = np.random.default_rng(2).integers(0, 100, (3, 2, 6))
    own_KL = np.stack([peak_bound(c, 8, 4, shares="even") for c in counts])
    got_L = scenario_bound(counts, [1, 0, 3], 8, 4, shares="even")
    np.testing.assert_allclose(got_L, (own_KL[0] + 3 * own_KL[2]) / 4, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_LE": [[1.0, np.nan, 1, 1]]}, "finite"),
        ({"load_LE": [[1, -1, 1, 1]]}, "finite and 0 or more"),
        ({"load_LE": [[1, np.inf, 1, 1]]}, "finite"),
        ({"num_slots": 7}, "use 6 or 8"),
        ({"num_slots": 2}, "use 4"),
        ({"num_ranks": 0}, "at least 1"),
        ({"shares": "equal"}, "exact, even"),
        ({"num_nodes": 3}, "use 2"),
        ({"num_nodes": 2, "num_groups": 3}, "does not divide the 4 experts"),
        ({"home_slot_E": [0, 1, 2]}, "expected integers"),
        ({"home_slot_E": [0, 1, 2, 2]}, "is the home of expert 2 too"),
        ({"home_slot_E": [0, 1, 2, 8]}, r"out of 0\.\.5"),
        ({"home_slot_E": [0, 3, 1, 4], "num_nodes": 2, "num_groups": 2}, "put them on one"),
        ({"speed_G": [1, 0]}, "above 0"),
        ({"speed_G": [1, 1, 1]}, "give one each"),
    ],
)
def test_bad_arguments_are_refused_with_what_would_do(change, message):
    arguments = {"load_LE": [[4, 3, 2, 1]], "num_slots": 6, "num_ranks": 2} | change
    with pytest.raises(ValueError, match=message):
        peak_bound(**arguments)
    with pytest.raises(ValueError, match="not all of them 0"):
        scenario_bound([[[1, 2]]], [0], 2, 2)


def test_the_docstrings_print_what_they_say():
    assert doctest.testmod(bound).failed == 0
