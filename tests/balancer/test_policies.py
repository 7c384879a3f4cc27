"""Policies plan by their clock, keep what they must keep, and LPLB's patterns tie ranks as they say."""

import numpy as np
import pytest

from balancer.cost import CostModel
from balancer.even import even_repair
from balancer.lplb import lplb_placement, partners
from balancer.packing import rebalance_experts
from balancer.plan import check_placement, home_slots
from balancer.policies import POLICIES, Decision, Setup, policy, start_placement

COST = CostModel.of_machine("nvlink", 1024, 512)
# without a planner of their own these need nothing but what stands here
BY_THE_CLOCK = ("eplb", "eplb-strong", "lplb-ring", "lplb-cube")


def setup(**changes):
    sizes = {"num_layers": 2, "num_experts": 8, "num_ranks": 4, "num_slots": 12, "every_steps": 20}
    return Setup(**{"cost": COST, **sizes, **changes})


def loads(seed=0, num_layers=2, num_experts=8):
    return np.random.default_rng(seed).integers(1, 1000, size=(num_layers, num_experts))


# ---- setup and names ---------------------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'eplb-stong' is unknown; did you mean 'eplb-strong'.*lplb-cube"):
        policy("eplb-stong")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"num_slots": 13}, "13 slots are not a multiple of 4 ranks; use 12 or 16"),
        ({"num_slots": 4}, "num_slots=4 is less than num_experts=8; use 8"),
        ({"num_nodes": 3}, "num_nodes=3 does not divide num_ranks=4"),
    ],
)
def test_a_setup_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        setup(**changes)


def test_the_start_holds_homes_and_can_be_run():
    for changes in ({}, {"num_experts": 7}, {"num_slots": 8}):
        made = setup(**changes)
        start_LS = start_placement(made)
        assert start_LS.shape == (2, made.num_slots) and start_LS.dtype == np.int64
        check_placement(start_LS, num_experts=made.num_experts, num_ranks=4, home_slot_LE=made.home_slot_LE)


# ---- by the clock ------------------------------------------------------------------------------------------


def test_none_changes_nothing():
    made = setup()
    start_LS = start_placement(made)
    one = policy("none")
    decided, _ = one.update(1, loads(), start_LS, one.init(made, start_LS))
    assert decided == Decision(start_LS, "") and decided.slots_LS is start_LS


def test_none_with_the_split_changes_nothing_either_and_shares_exactly():
    made, one = setup(), policy("none+split")
    start_LS = start_placement(made)
    decided, _ = one.update(1, loads(), start_LS, one.init(made, start_LS))
    assert decided.slots_LS is start_LS and not decided.reason
    assert (one.shares, policy("none").shares) == ("exact", "even") and not one.free_slots


@pytest.mark.parametrize("name", BY_THE_CLOCK)
def test_a_policy_plans_at_once_and_then_every_so_many_steps(name):
    made, one = setup(), policy(name)
    slots_LS = start_placement(made)
    state, planned = one.init(made, slots_LS), []
    for step in range(1, 72, 10):
        decided, state = one.update(step, loads(step), slots_LS, state)
        if decided.reason:
            planned.append(step)
        else:
            assert decided.slots_LS is slots_LS
        slots_LS = decided.slots_LS
    assert planned == [1, 21, 41, 61]


def test_eplb_is_the_greedy_placement_of_the_last_sample():
    made, one = setup(), policy("eplb")
    start_LS = start_placement(made)
    decided, _ = one.update(1, loads(), start_LS, one.init(made, start_LS))
    assert np.array_equal(decided.slots_LS, rebalance_experts(loads(), 12, 0, 1, 4)[0])
    assert "step 1" in decided.reason and "every 20 steps" in decided.reason


@pytest.mark.parametrize("name", [*BY_THE_CLOCK, "even", "split"])
def test_a_layer_without_load_stays_and_a_sample_without_any_is_no_plan(name):
    made, one = setup(), policy(name)
    start_LS = start_placement(made)
    counts_LE = loads()
    counts_LE[0, 5], counts_LE[1] = 20000, 0
    decided, state = one.update(1, counts_LE, start_LS, one.init(made, start_LS))
    assert np.array_equal(decided.slots_LS[1], start_LS[1])
    assert not np.array_equal(decided.slots_LS[0], start_LS[0]), (
        "the other layer must change, or nothing shows"
    )
    idle, _ = one.update(90, np.zeros_like(counts_LE), decided.slots_LS, state)
    assert idle.slots_LS is decided.slots_LS and not idle.reason


@pytest.mark.parametrize("name", ["lplb-ring", "lplb-cube", "even", "split"])
@pytest.mark.parametrize("num_experts", [8, 7])
def test_policies_with_fixed_homes_keep_them(name, num_experts):
    made, one = setup(num_experts=num_experts), policy(name)
    slots_LS = start_placement(made)
    state = one.init(made, slots_LS)
    for step in (1, 31, 61):
        decided, state = one.update(step, loads(step, num_experts=num_experts), slots_LS, state)
        slots_LS = decided.slots_LS
        check_placement(slots_LS, num_experts=num_experts, num_ranks=4, home_slot_LE=made.home_slot_LE)
    assert not POLICIES[name].free_slots


def test_even_takes_few_samples_and_says_why_it_changes():
    made, one = setup(), policy("even")
    start_LS = start_placement(made)
    state = one.init(made, start_LS)
    for step in range(1, 101, 10):
        decided, state = one.update(step, loads(3), start_LS, state)
    assert len(state.samples) == 4 and "last 4 samples, up to step 91" in decided.reason


def test_even_plans_on_all_of_its_samples_alike():
    made, one = setup(), policy("even")
    start_LS = start_placement(made)
    samples = np.stack([loads(seed) for seed in range(4)])
    state = one.init(made, start_LS)
    for step, counts_LE in enumerate(samples):
        decided, state = one.update(step, counts_LE, start_LS, state)
    homes, ranks = made.home_slot_E, made.num_ranks

    def repaired(weight_K):
        return even_repair(samples, weight_K, start_LS, ranks, home_slot_E=homes, move_price=0.01)

    assert np.array_equal(decided.slots_LS, repaired([1 / 4] * 4))
    for alone in np.eye(4):
        assert not np.array_equal(decided.slots_LS, repaired(alone))


def test_the_controller_of_split_is_told_all_of_the_setup():
    made = setup(num_nodes=2, sample_steps=7, fixed_homes=False, seed=5)
    config = policy("split").init(made, start_placement(made)).config
    for name in ("num_ranks", "num_slots", "num_nodes", "sample_steps", "fixed_homes", "seed", "cost"):
        assert getattr(config, name) == getattr(made, name), name


# ---- the patterns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "degree", "edges"), [(8, 4, (1, 2, 4, 7)), (16, 4, (1, 2, 4, 8))])
def test_two_spare_slots_a_rank_make_every_edge_of_the_cube_once(num_ranks, degree, edges):
    partner_GX = partners("cube", num_ranks, 2)
    found = {frozenset((rank, int(other))) for rank in range(num_ranks) for other in partner_GX[rank]}
    wanted = {frozenset((rank, rank ^ edge)) for rank in range(num_ranks) for edge in edges}
    assert found == wanted and len(found) == num_ranks * degree // 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("kind", ["ring", "cube"])
def test_partners_are_other_ranks_and_spread_evenly(kind, num_ranks):
    partner_GX = partners(kind, num_ranks, 3)
    assert (partner_GX != np.arange(num_ranks)[:, None]).all()
    for partner_G in partner_GX.T:
        assert np.bincount(partner_G, minlength=num_ranks).max() <= 2


def test_the_ring_connects_all_ranks_with_one_spare_slot_each():
    (partner_G,) = partners("ring", 5, 1).T
    assert partner_G.tolist() == [1, 2, 3, 4, 0]


def test_a_cube_needs_a_power_of_two():
    with pytest.raises(ValueError, match="a cube of 6 ranks: use 4 or 8 ranks, or the ring"):
        partners("cube", 6, 1)
    with pytest.raises(ValueError, match="use 2 or 4 ranks"):
        policy("lplb-cube").init(setup(num_ranks=3), np.zeros((2, 12), np.int64))
    with pytest.raises(ValueError, match="kind='torus' is unknown; use one of ring, cube"):
        partners("torus", 4, 1)


def test_the_heaviest_experts_of_the_partner_are_replicated():
    load_LE = np.array([[5, 1, 9, 2, 3, 4, 8, 7]])
    slots_S = lplb_placement(load_LE, 12, 4)[0].reshape(4, 3)
    assert slots_S[:, :2].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert slots_S[:, 2].tolist() == [2, 5, 6, 0]
    # a rank with two slots tied to it gives its heaviest first, then the next
    two = lplb_placement(load_LE, 16, 4)[0].reshape(4, 4)
    assert two[:, 2:].tolist() == [[2, 4], [5, 7], [6, 1], [0, 3]]


def test_what_a_partner_has_no_more_of_stays_empty():
    slots_LS = lplb_placement([[3, 1]], 8, 2)
    assert slots_LS.tolist() == [[0, 1, -1, -1, 1, 0, -1, -1]]
    assert home_slots(2, 8, 2).tolist() == [0, 4]


def test_patterns_refuse_a_bad_load():
    for load in ([[1.0, np.nan]], [[1, -1]], [1, 2]):
        with pytest.raises(ValueError, match="load"):
            lplb_placement(load, 4, 2)
