"""What every planner keeps to, whatever it plans for: slots, ranks, loads that are none, layers, rest.

The greedy baseline and the policies that call it may put an expert twice on a rank, and know no present.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from balancer.connect import connected_placement, default_placement
from balancer.cost import CostModel
from balancer.even import even_placement, even_repair
from balancer.kernels import pack_kernels, search_kernels
from balancer.metrics import moved_slots
from balancer.packing import even_share_load, rebalance_experts
from balancer.placement import PlacementConfig, placement_controller
from balancer.placement_checks import check_placement, home_slots
from balancer.plan import check_plan
from balancer.planning import plan_placement
from balancer.policies import POLICIES, Setup
from balancer.search import layer_peaks, search_placement

PRICE = 0.002
# row_s such that moves are cheap beside 10^5 copies; no traffic of replicas
COST = replace(CostModel.of_machine("infiniband", 1024, 1024, trained=False, move_price_s=1e-5), row_s=1e-7)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Compile once, so that no test waits for it."""
    search_kernels()
    pack_kernels()


class Planner(NamedTuple):
    """plan(load_LE, current_LS, ranks) -> slots_LS;  shares: "even" or "exact";  present: whether it starts
    from the placement in force;  distinct: never an expert twice on a rank while another has none;  layers:
    plans each layer for itself, to the last bit."""

    plan: Callable
    shares: str
    present: bool
    distinct: bool = True
    layers: bool = True


def _one_call(effort, present):
    def plan(load, current, ranks):
        given = current if present else None
        return plan_placement(
            load, num_ranks=ranks, num_slots=current.shape[1], current_LS=given, effort=effort, spread=0.0,
            move_price=PRICE,
        ).slot_to_expert_LS  # fmt: skip

    return Planner(plan, "even" if effort == "fast" else "exact", present)


def _controlled(load, current, ranks):
    config = PlacementConfig(
        num_ranks=ranks, num_slots=current.shape[1], cost=COST, fixed_homes=False, num_scenarios=0
    )
    init, update = placement_controller(config)
    state, slots = init(*np.shape(load), current), current
    for step in range(3):
        plan, state = update(step, load, slots, state)
        slots = slots if plan is None else plan.slot_to_expert_LS
    return slots


def _policy(name):
    def plan(load, current, ranks):
        layers, slots = np.asarray(current).shape
        setup = Setup(
            num_layers=layers, num_experts=np.shape(load)[1], num_ranks=ranks, num_slots=slots, every_steps=1,
            fixed_homes=False, cost=COST,
        )  # fmt: skip
        state, placed = POLICIES[name].init(setup, current), current
        for step in range(3):
            decision, state = POLICIES[name].update(step, load, placed, state)
            placed = decision.slots_LS
        return placed

    made = POLICIES[name]
    return Planner(plan, made.shares, name in ("even", "split"), made.distinct, name != "split")


PLANNERS = {
    "greedy": Planner(
        lambda load, current, ranks: rebalance_experts(load, current.shape[1], 0, 1, ranks)[0],
        "even", False, distinct=False,
    ),
    "even_placement": Planner(
        lambda load, current, ranks: even_placement(load, current.shape[1], ranks), "even", False
    ),
    "even_repair": Planner(
        lambda load, current, ranks: even_repair(load, [1.0], current, ranks, move_price=PRICE), "even", True
    ),
    "connected_placement": Planner(
        lambda load, current, ranks: connected_placement(load, current.shape[1], ranks), "exact", False
    ),
    "search_placement": Planner(
        lambda load, current, ranks: search_placement(load, current, ranks, price=PRICE).slots_LS,
        "exact", True,
    ),
    "plan_fast": _one_call("fast", False),
    "plan_fast_present": _one_call("fast", True),
    "plan_repair": _one_call("repair", True),
    "plan_robust": _one_call("robust", False),
    "plan_robust_present": _one_call("robust", True),
    "controller": Planner(_controlled, "exact", True),
    **{f"policy_{name}": _policy(name) for name in POLICIES if not name.startswith("lplb")},
}  # fmt: skip
EACH = pytest.mark.parametrize("name", PLANNERS)
PRESENT = pytest.mark.parametrize("name", [name for name, planner in PLANNERS.items() if planner.present])


def case(seed, layers=3):
    """Load, a placement made for another one, ranks."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 7))
    experts = ranks * int(rng.integers(2, 5)) + int(rng.integers(0, 2)) * (seed % 2)
    slots = ranks * (-(-experts // ranks) + int(rng.integers(1, 3)))
    load, other = (rng.lognormal(0, 1, (2, layers, experts)) * 1e4).astype(np.int64) + 1
    return load, connected_placement(other, slots, ranks), ranks


def peak_of(planner, load, slots_LS, ranks):
    """[L] largest rank load over an even one."""
    if planner.shares == "even":
        peak_L = even_share_load(load, slots_LS, ranks).max(axis=1)
    else:
        peak_L = layer_peaks(slots_LS, load, ranks)[0]
    return peak_L / (np.asarray(load).sum(axis=1) / ranks)


# ---- every planner ---------------------------------------------------------------------------------------


@EACH
def test_every_expert_has_a_slot_and_no_rank_holds_one_twice_without_need(name):
    planner = PLANNERS[name]
    for seed in range(8):
        load, current, ranks = case(seed)
        copies = load.copy(), current.copy()
        slots = planner.plan(load, current, ranks)
        assert slots.shape == current.shape and slots.dtype == np.int64
        check_placement(slots, num_experts=load.shape[1], num_ranks=ranks, distinct=planner.distinct)
        assert (load == copies[0]).all() and (current == copies[1]).all()


@EACH
def test_equal_input_gives_equal_output(name):
    for seed in range(3):
        load, current, ranks = case(seed)
        first = PLANNERS[name].plan(load, current, ranks)
        assert (first == PLANNERS[name].plan(load.copy(), current.copy(), ranks)).all()


@EACH
def test_balance_is_each_layers_own(name):
    """A layer planned alone, or among others in another order, is planned the same."""
    load, current, ranks = case(3, layers=4)
    planner = PLANNERS[name]
    whole = planner.plan(load, current, ranks)
    if planner.layers:
        turned = planner.plan(load[::-1].copy(), current[::-1].copy(), ranks)
        assert (turned[::-1] == whole).all()
        assert (planner.plan(load[2:3], current[2:3], ranks) == whole[2:3]).all()
    # no layer pays for another one: one with all its load on one expert leaves the rest as it is
    hot = load.copy()
    hot[0], hot[0, 0] = 0, 10**6
    if planner.layers:
        assert (planner.plan(hot, current, ranks)[1:] == whole[1:]).all()


@EACH
@pytest.mark.parametrize("kind", ["zero", "one layer idle", "one-hot", "one copy", "huge"])
def test_odd_loads_give_a_valid_placement(name, kind):
    planner = PLANNERS[name]
    load, current, ranks = case(4)
    if kind == "zero":
        load[:] = 0
    elif kind == "one layer idle":
        load[1] = 0
    elif kind == "huge":
        load = load * 2**28  # 10^13 copies
    else:
        load[:] = 0
        load[:, 2] = 1 if kind == "one copy" else 10**6
    slots = planner.plan(load, current, ranks)
    check_placement(slots, num_experts=load.shape[1], num_ranks=ranks, distinct=planner.distinct)
    if planner.present:
        idle_L = ~load.any(axis=1)
        assert (slots[idle_L] == current[idle_L]).all()
    if kind == "one-hot" and planner.distinct and not name.startswith("policy_none"):
        held_LG = (slots.reshape(3, ranks, -1) == 2).any(axis=2)
        # planners that change one slot at a time stop where the last rank has no replica to give up
        assert (held_LG.sum(axis=1) >= (ranks - 1 if planner.present else ranks)).all()


@pytest.mark.parametrize("name", [name for name in PLANNERS if "none" not in name])  # these look at nothing
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_entries_that_are_no_load_are_refused(name, value):
    load, current, ranks = case(5)
    load = load.astype(np.float64)
    load[1, 2] = value
    with pytest.raises(ValueError, match=r"(1.*2.*|)(nan|inf|-1)"):
        PLANNERS[name].plan(load, current, ranks)


@EACH
def test_ranks_that_do_not_divide_the_slots_are_refused_with_the_nearest(name):
    load, current, _ = case(6)
    ranks = current.shape[1] - 1
    with pytest.raises(ValueError, match=r"not a multiple of .*; use \d+|must be .* multiple"):
        PLANNERS[name].plan(load, current, ranks)


@EACH
@pytest.mark.parametrize(("experts", "slots", "ranks"), [(2, 12, 3), (1, 6, 3), (3, 6, 1), (3, 8, 8)])
def test_more_slots_than_replicas_that_help(name, experts, slots, ranks):
    """More than one slot of every expert on every rank, one rank alone, fewer experts than ranks."""
    planner, load = PLANNERS[name], np.array([[500, 300, 100][:experts]])
    current = default_placement(1, experts, slots, ranks)
    placed = planner.plan(load, current, ranks)
    check_placement(placed, num_experts=experts, num_ranks=ranks, distinct=planner.distinct)
    if planner.distinct and experts * ranks <= slots:
        assert peak_of(planner, load, placed, ranks) == pytest.approx(1.0, abs=0.01)


# ---- planners that start from what there is --------------------------------------------------------------


@PRESENT
def test_never_worse_than_the_present_placement_by_its_own_cost(name):
    """Peak over an even load, and the price of the moves; the controller's moves cost less than that."""
    planner, moves = PLANNERS[name], 0
    price = 0.0 if name in ("controller", "policy_split", "policy_even") else PRICE
    for seed in range(12):
        load, current, ranks = case(seed)
        slots = planner.plan(load, current, ranks)
        moved_L = moved_slots(current, slots, ranks)
        before_L, after_L = (peak_of(planner, load, placed, ranks) for placed in (current, slots))
        # a share of 2^-32 for each expert is rounding
        assert (after_L + price * moved_L <= before_L + 1e-6).all(), seed
        moves += int(moved_L.sum())
    assert moves > 0


@PRESENT
def test_the_same_load_again_moves_nothing(name):
    planner, again = PLANNERS[name], 0
    for seed in range(8):
        load, current, ranks = case(seed)
        slots = planner.plan(load, current, ranks)
        again += int(moved_slots(slots, planner.plan(load, slots, ranks), ranks).sum())
    assert again == 0


@PRESENT
def test_ranks_in_another_order_change_nothing_that_matters(name):
    """Ranks are tried in order, so a plan may be another one; over many it must not be a worse one."""
    planner, ratio = PLANNERS[name], []
    for seed in range(30):
        load, current, ranks = case(seed, layers=1)
        order = np.random.default_rng(seed).permutation(ranks)
        turned = current.reshape(1, ranks, -1)[:, order].reshape(current.shape)
        one, other = (
            peak_of(planner, load, planner.plan(load, placed, ranks), ranks)[0]
            for placed in (current, turned)
        )
        ratio.append(one / other)
    assert abs(np.log(ratio).mean()) <= 0.01 and np.abs(np.log(ratio)).max() <= 0.2


@EACH
def test_the_order_of_experts_changes_nothing_that_matters(name):
    planner = PLANNERS[name]
    ratio = []
    for seed in range(12):
        load, current, ranks = case(seed, layers=1)
        order = np.random.default_rng(seed).permutation(load.shape[1])
        renamed = np.where(current >= 0, np.argsort(order)[current], -1)
        one = peak_of(planner, load, planner.plan(load, current, ranks), ranks)[0]
        other_load = np.ascontiguousarray(load[:, order])
        other = peak_of(planner, other_load, planner.plan(other_load, renamed, ranks), ranks)[0]
        ratio.append(one / other)
    assert abs(np.log(ratio).mean()) <= 0.01


# ---- plans are refused whole -----------------------------------------------------------------------------


def _plan(current=None):
    load, placed, ranks = case(7)
    given = placed if current is None else current
    return load, given, plan_placement(
        load, num_ranks=ranks, num_slots=placed.shape[1], current_LS=given, spread=0.0, move_price=0.0
    )  # fmt: skip


def test_a_first_plan_knows_no_placement_before_it():
    load, placed, ranks = case(7)
    plan = plan_placement(load, num_ranks=ranks, num_slots=placed.shape[1], current_LS=None)
    assert plan.moves == ()
    check_plan(plan, num_experts=load.shape[1], version=None)


def test_plans_with_dropped_experts_or_over_claimed_replicas_are_refused():
    load, _, plan = _plan()
    slots, experts = plan.slot_to_expert_LS.copy(), load.shape[1]
    dropped = np.where(slots == 0, 1, slots)
    with pytest.raises(ValueError, match="expert 0 has no slot"):
        check_plan(replace(plan, slot_to_expert_LS=dropped, moves=()), num_experts=experts)
    single = int(np.flatnonzero(np.bincount(slots[0], minlength=experts) == 1)[0])
    rank = int(np.flatnonzero(slots[0] == single)[0]) // (slots.shape[1] // plan.num_ranks)
    row = slots[0].reshape(plan.num_ranks, -1)
    counts = np.bincount(slots[0], minlength=experts)
    spare = [k for k, expert in enumerate(row[rank].tolist()) if counts[expert] > 1]
    if not spare:
        pytest.fail("the case has no replica beside a single expert; choose another seed")
    row[rank, spare[0]] = single
    with pytest.raises(ValueError, match="stands there twice"):
        check_plan(replace(plan, slot_to_expert_LS=slots, moves=()), num_experts=experts)


def test_plans_of_another_shape_version_or_time_are_refused():
    load, current, plan = _plan()
    experts = load.shape[1]
    check_plan(plan, num_experts=experts, current_LS=current)
    with pytest.raises(ValueError, match="layers and slots must be the same"):
        check_plan(plan, num_experts=experts, current_LS=current[:2])
    with pytest.raises(ValueError, match="moves"):
        check_plan(plan, num_experts=experts, current_LS=plan.slot_to_expert_LS)
    with pytest.raises(ValueError, match="is not newer than 3"):
        check_plan(plan, num_experts=experts, version=3)
    future = replace(plan, made_at_step=9, applies_at_step=9)
    with pytest.raises(ValueError, match="made at step 9 and it is only step 8; plan on the past"):
        check_plan(future, num_experts=experts, step=8)


def test_homes_are_where_every_planner_that_keeps_them_left_them():
    load, _, ranks = case(8)
    experts, slots = load.shape[1], 4 * ranks + ranks * (-(-load.shape[1] // ranks))
    homes = home_slots(experts, slots, ranks)
    start = default_placement(len(load), experts, slots, ranks)
    placed = [
        even_placement(load, slots, ranks, home_slot_E=homes),
        even_repair(load, [1.0], start, ranks, home_slot_E=homes),
        connected_placement(load, slots, ranks, home_slot_E=homes),
        search_placement(load, start, ranks, home_slot_E=homes).slots_LS,
        *(
            plan_placement(
                load, num_ranks=ranks, num_slots=slots, current_LS=start, fixed_homes=True, effort=effort
            ).slot_to_expert_LS
            for effort in ("fast", "repair", "robust")
        ),
    ]
    for slots_LS in placed:
        assert (slots_LS[:, homes] == np.arange(experts)).all()
