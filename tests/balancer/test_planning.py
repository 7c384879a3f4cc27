"""Planning: every effort gives a plan that passes the checks, never worse than what there is, at rest when
nothing changes; odd loads, speeds, memory, homes; refusals."""

import doctest

import numpy as np
import pytest

from balancer import planning
from balancer.connect import connected_placement, default_placement
from balancer.kernels import pack_kernels, search_kernels
from balancer.metrics import moved_slots
from balancer.packing import even_share_load
from balancer.placement_checks import home_slots
from balancer.plan import check_plan, plan_from_dict, plan_to_dict
from balancer.planning import EFFORTS, plan_placement
from balancer.search import layer_peaks

RANKS, SLOTS, EXPERTS, LAYERS = 4, 20, 14, 3


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Compile once, so that no test waits for it."""
    search_kernels()
    pack_kernels()


def loads(seed, layers=LAYERS, experts=EXPERTS):
    return (np.random.default_rng(seed).lognormal(0, 1, (layers, experts)) * 1e4).astype(np.int64)


def other_placement(seed=99, homes=False):
    """A placement in force that was made for another load."""
    home_slot_E = home_slots(EXPERTS, SLOTS, RANKS) if homes else None
    return connected_placement(loads(seed), SLOTS, RANKS, home_slot_E=home_slot_E)


def plan_checked(load, **given):
    """A plan that passes all checks, with the gap and the moves that its placement has."""
    options = {"num_ranks": RANKS, "num_slots": SLOTS} | given
    plan = plan_placement(load, **options)
    current = options.get("current_LS")
    check_plan(plan, num_experts=np.shape(load)[-1], current_LS=current)
    assert (plan.gap_L >= 0).all() and plan.reason
    if current is None:
        assert plan.moves == ()
    else:
        assert len(plan.moves) == moved_slots(current, plan.slot_to_expert_LS, options["num_ranks"]).sum()
    assert plan_to_dict(plan_from_dict(plan_to_dict(plan))) == plan_to_dict(plan)
    return plan


def peak_of(plan, load, effort):
    """[L] largest rank load of a plan on a load, shared as the effort's systems share it."""
    if effort == "fast":
        return even_share_load(load, plan.slot_to_expert_LS, plan.num_ranks).max(axis=1)
    return layer_peaks(plan.slot_to_expert_LS, load, plan.num_ranks)[0]


# ---- every effort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("homes", [False, True])
@pytest.mark.parametrize(
    ("effort", "present"),
    [("fast", False), ("fast", True), ("repair", True), ("robust", False), ("robust", True)],
)
def test_every_effort_gives_a_plan_that_passes_the_checks(effort, present, homes):
    current = other_placement(homes=homes) if present else None
    load = loads(0)
    plan = plan_checked(load, effort=effort, current_LS=current, fixed_homes=homes)
    # figures are those of the load given: the plan's own peak, to 2^-32 of a layer
    assert plan.peak_L == pytest.approx(peak_of(plan, load, effort), rel=1e-7)
    assert (plan.bound_L >= load.sum(axis=1) / RANKS * (1 - 1e-9)).all()
    if homes:
        assert (plan.home_slot_LE == home_slots(EXPERTS, SLOTS, RANKS)).all()
        assert (plan.slot_to_expert_LS[:, plan.home_slot_LE[0]] == np.arange(EXPERTS)).all()
    else:
        assert plan.home_slot_LE is None


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_plan_is_near_its_bound_and_the_same_load_moves_nothing(effort):
    load = loads(1)
    first = plan_checked(load, effort="fast" if effort == "fast" else "robust")
    if effort != "fast":
        assert first.gap_L.max() <= 0.001  # 6 spare slots join 4 ranks
    again = plan_checked(load, effort=effort, current_LS=first.slot_to_expert_LS)
    assert again.moves == () and (again.slot_to_expert_LS == first.slot_to_expert_LS).all()
    history = np.stack([load] * 8)
    rest = plan_checked(history, effort=effort, current_LS=first.slot_to_expert_LS)
    assert rest.moves == ()


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("price", [0.0, 0.002, 0.05])
def test_no_plan_is_worse_than_the_present_placement_by_its_own_cost(effort, price):
    """With spread 0 the cost is known: peak / even load of the load given, and the price of the moves."""
    moves = 0
    for seed in range(12):
        load, current = loads(seed), other_placement(seed + 50)
        plan = plan_checked(load, effort=effort, current_LS=current, spread=0.0, move_price=price)
        before = plan_checked(load, effort=effort, current_LS=current, spread=0.0, move_price=1e6)
        assert before.moves == ()
        even_L = load.sum(axis=1) / RANKS
        moved_L = moved_slots(current, plan.slot_to_expert_LS, RANKS)
        cost_L = peak_of(plan, load, effort) / even_L + price * moved_L
        assert (cost_L <= peak_of(before, load, effort) / even_L + 1e-7).all()
        # a layer without a move is as it was, to the slot
        assert (plan.slot_to_expert_LS[moved_L == 0] == current[moved_L == 0]).all()
        moves += int(moved_L.sum())
    assert moves > 0


def test_dearer_moves_are_fewer_and_prices_are_each_layers_own():
    load, current = loads(2), other_placement()
    counts = [
        len(plan_checked(load, current_LS=current, move_price=price).moves) for price in (0.0, 0.02, 0.5, 1e6)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0
    plan = plan_checked(load, current_LS=current, move_price=[1e6, 0.0, 1e6])
    assert {move.layer for move in plan.moves} == {1}


@pytest.mark.parametrize("effort", EFFORTS)
def test_equal_input_gives_equal_plans_and_inputs_stay_as_they_were(effort):
    load, current = loads(3), other_placement()
    copies = load.copy(), current.copy()
    first = plan_checked(load, effort=effort, current_LS=current)
    assert (load == copies[0]).all() and (current == copies[1]).all()
    again = plan_checked(load.copy(), effort=effort, current_LS=current.copy())
    assert plan_to_dict(first) == plan_to_dict(again)


def test_the_seed_draws_the_scenarios():
    load, current = loads(4), other_placement()
    plans = [plan_checked(load, current_LS=current, seed=seed, spread=0.5) for seed in range(6)]
    assert len({plan.reason for plan in plans}) > 1  # other scenarios, other figures


@pytest.mark.parametrize("effort", ["repair", "robust"])
def test_ranks_in_another_order_give_the_same_peak(effort):
    for seed in range(8):
        load, current = loads(seed), other_placement(seed + 20)
        order = np.random.default_rng(seed).permutation(RANKS)
        turned = current.reshape(LAYERS, RANKS, -1)[:, order].reshape(current.shape)
        one, other = (plan_checked(load, effort=effort, current_LS=placed) for placed in (current, turned))
        # both are within the search's tolerance of even
        assert one.peak_L == pytest.approx(other.peak_L, rel=1e-3)


def test_plans_are_made_on_the_trend_of_a_history():
    """Expert 0 grows; the plan is for what comes, not for the mean of the past."""
    grow = np.array([[[100 + 150 * w, 1000, 1000, 1000]] for w in range(12)])
    plan = plan_checked(grow, num_ranks=2, num_slots=6)
    mean = plan_checked(grow.mean(axis=0), num_ranks=2, num_slots=6)
    assert plan.bound_L[0] > mean.bound_L[0]
    last = plan_checked(grow[-1], num_ranks=2, num_slots=6)
    assert plan.bound_L[0] == pytest.approx(last.bound_L[0], rel=0.1)


def test_a_history_in_shares_says_what_its_counts_say():
    rng, load = np.random.default_rng(0), loads(15)
    counts = np.stack([rng.poisson(load) for _ in range(10)]).astype(np.float64)
    share = counts / counts.sum(axis=2, keepdims=True)
    ours, theirs = (plan_checked(history) for history in (counts, share))
    assert ours.gap_L.max() < 0.01 and theirs.gap_L.max() < 0.01
    even_L = counts[-1].sum(axis=1)
    assert theirs.bound_L * even_L / 2**20 == pytest.approx(ours.bound_L, rel=0.02)
    off = np.exp(0.1 * rng.standard_normal((20, *load.shape)))
    peaks = [layer_peaks(plan.slot_to_expert_LS, load * off, RANKS).mean() for plan in (ours, theirs)]
    assert peaks[1] <= peaks[0] * 1.02
    assert "% above" in theirs.reason and float(theirs.reason.split(" is ")[1].split()[0]) < 5


@pytest.mark.parametrize("effort", EFFORTS)
def test_layers_without_load_in_a_whole_history_keep_what_they_have(effort):
    history, current = np.stack([loads(16)] * 8), other_placement()
    history[:, 1] = 0
    plan = plan_checked(history, current_LS=current, effort=effort, move_price=0.0)
    assert (plan.slot_to_expert_LS[1] == current[1]).all() and plan.bound_L[1] == plan.peak_L[1] == 0


def test_fast_plans_share_rows_evenly_and_robust_ones_exactly():
    # two slots of expert 0 halve it at best with even shares; an exact split evens out all
    load = np.array([[60, 20, 10, 10]])
    fast, robust = (plan_checked(load, num_ranks=2, num_slots=6, effort=e) for e in ("fast", "robust"))
    for plan, effort in ((fast, "fast"), (robust, "robust")):
        assert plan.peak_L == pytest.approx(peak_of(plan, load, effort), rel=1e-7)
    assert robust.peak_L[0] == 50.0


def test_a_robust_plan_stands_loads_that_are_off_better_than_one_for_the_load_alone():
    rng = np.random.default_rng(0)
    load = (rng.lognormal(0, 1, (6, 48)) * 1e5).astype(np.int64)
    off = (load * np.exp(0.2 * rng.standard_normal((20, 6, 48)))).astype(np.int64)
    sure, robust = (plan_checked(load, num_ranks=8, num_slots=56, spread=s) for s in (0.0, 0.2))
    peak_sure, peak_robust = (layer_peaks(p.slot_to_expert_LS, off, 8).mean() for p in (sure, robust))
    assert peak_robust < peak_sure


def test_a_node_keeps_its_groups():
    load = loads(5, experts=16)
    for effort in ("fast", "robust"):
        plan = plan_checked(load, num_nodes=2, num_groups=4, effort=effort)
        for row in plan.slot_to_expert_LS.reshape(LAYERS, 2, -1):
            held = [set(node.tolist()) - {-1} for node in row]
            assert not held[0] & held[1]
            assert all(any(set(range(g, g + 4)) <= node for node in held) for g in range(0, 16, 4))
        after = plan_checked(
            loads(6, experts=16), num_nodes=2, num_groups=4, effort=effort, move_price=0.0,
            current_LS=plan.slot_to_expert_LS,
        )  # fmt: skip
        for row in after.slot_to_expert_LS.reshape(LAYERS, 2, -1):
            held = [set(node.tolist()) - {-1} for node in row]
            assert not held[0] & held[1]


# ---- ranks that differ -----------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["fast", "robust"])
def test_a_rank_of_half_the_speed_gets_about_half_the_load(effort):
    load, speed = loads(7, experts=48), np.array([1.0, 1.0, 1.0, 0.5])
    plan = plan_checked(load, num_slots=64, speed_G=speed, effort=effort, spread=0.0)
    assert plan.gap_L.max() <= (0.02 if effort == "fast" else 1e-3)
    assert plan.bound_L == pytest.approx(load.sum(axis=1) / 3.5, rel=0.01)
    if effort == "fast":
        load_LG = even_share_load(load, plan.slot_to_expert_LS, RANKS)
        # even shares are coarse: the slow rank may carry less, never more
        assert (load_LG[:, 3] / load_LG[:, :3].mean(axis=1) <= 0.53).all()


def test_memory_limits_hold_for_new_plans():
    room = np.array([5, 5, 3, 2])
    plan = plan_checked(loads(8), most_experts_G=room)
    filled = (plan.slot_to_expert_LS.reshape(LAYERS, RANKS, -1) >= 0).sum(axis=2)
    assert (filled <= room).all()


@pytest.mark.parametrize("effort", ["repair", "robust"])
def test_a_placement_in_force_that_memory_does_not_hold_is_refused(effort):
    with pytest.raises(
        ValueError, match=r"layer 0, rank 2: current_LS has 5 experts .*most_experts_G\[2\]=3"
    ):
        plan_placement(
            loads(9), num_ranks=RANKS, num_slots=SLOTS, current_LS=other_placement(),
            most_experts_G=[5, 5, 3, 2], effort=effort,
        )  # fmt: skip


def test_memory_limits_hold_for_repairs():
    first = plan_checked(loads(8), most_experts_G=[5, 5, 3, 2]).slot_to_expert_LS
    for effort in ("repair", "robust"):
        plan = plan_checked(loads(9), most_experts_G=[5, 5, 3, 2], current_LS=first, effort=effort)
        assert ((plan.slot_to_expert_LS.reshape(LAYERS, RANKS, -1) >= 0).sum(axis=2) <= [5, 5, 3, 2]).all()


# ---- odd loads and sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", EFFORTS)
def test_layers_without_load_keep_what_they_have(effort):
    current, load = other_placement(), loads(10)
    load[1] = 0
    plan = plan_checked(load, effort=effort, current_LS=current, move_price=0.0)
    assert (plan.slot_to_expert_LS[1] == current[1]).all() and plan.peak_L[1] == plan.gap_L[1] == 0
    assert {move.layer for move in plan.moves} == {0, 2}
    nothing = plan_checked(np.zeros((LAYERS, EXPERTS)), effort=effort, current_LS=current)
    assert nothing.moves == ()


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("reason_to_stay", ["no load", "price"])
def test_over_claimed_replicas_are_given_up_even_where_nothing_else_changes(effort, reason_to_stay):
    """Greedy placements have them, and `check_plan` refuses a plan that keeps them."""
    current = np.array([[0, 0, 1, 2, 2, 3], [0, 1, 2, 2, 3, 0]])
    load, price = (np.zeros((2, 4)), 0.0) if reason_to_stay == "no load" else (np.ones((2, 4)), 1e6)
    plan = plan_checked(load, num_ranks=2, num_slots=6, current_LS=current, effort=effort, move_price=price)
    assert plan.moves == ()
    assert plan.slot_to_expert_LS.tolist() == [[0, -1, 1, 2, -1, 3], [0, 1, 2, 2, 3, 0]]


@pytest.mark.parametrize("effort", ["fast", "robust"])
def test_no_load_at_all_and_no_placement_yet_gives_a_placement(effort):
    plan = plan_checked(np.zeros((2, EXPERTS)), effort=effort)
    assert not plan.bound_L.any() and not plan.peak_L.any() and not plan.gap_L.any()


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("unit", [1, 1e-290, 1e300, 2**58])
def test_one_hot_loads_of_any_unit(effort, unit):
    load = np.zeros((1, EXPERTS))
    load[0, 3] = unit
    current = default_placement(1, EXPERTS, SLOTS, RANKS)
    plan = plan_checked(load, effort=effort, current_LS=None if effort != "repair" else current)
    held = (plan.slot_to_expert_LS.reshape(RANKS, -1) == 3).any(axis=1).sum()
    # a repair changes one slot at a time, and a rank without any replica of others has none to give
    assert held == RANKS or (effort == "repair" and held >= RANKS - 1)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize(
    ("value", "text"),
    [(np.nan, "=nan is not a load"), (np.inf, "=inf is not a load"), (-1.0, "=-1.0 is not")],
)
def test_entries_that_are_no_load_are_refused(effort, value, text):
    load = loads(11).astype(np.float64)
    load[1, 2] = value
    with pytest.raises(ValueError, match=r"load\[1, 2\]" + text):
        plan_placement(load, num_ranks=RANKS, num_slots=SLOTS, effort=effort, current_LS=other_placement())


@pytest.mark.parametrize("effort", ["fast", "robust"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_slots": 18}, "18 slots are not a multiple of 4 ranks; use 16 or 20"),
        ({"num_slots": 12}, "num_slots=12 is less than the 14 experts; use 16"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
        ({"num_nodes": 3}, "num_nodes=3 does not divide 4 ranks; use 2"),
        ({"num_nodes": 0}, "num_nodes=0 does not divide 4 ranks; use 1"),
        ({"num_groups": 4}, "num_groups=4 does not divide the 14 experts; use 2, or 0"),
        ({"speed_G": [1, 1, 1, 0]}, "must be finite and above 0"),
        ({"speed_G": [1, 1]}, "has 2 entries for 4 ranks"),
        ({"current_LS": np.zeros((LAYERS, SLOTS), np.int64)}, "expert 1 has no slot on any rank"),
        ({"current_LS": np.zeros((2, SLOTS), np.int64)}, r"current_LS has shape \(2, 20\)"),
        ({"current_LS": np.zeros((LAYERS, SLOTS))}, "expected integers"),
        ({"current_LS": np.full((LAYERS, SLOTS), 14)}, r"has expert 14, out of 0..13"),
        ({"effort": "strong"}, "effort='strong' is unknown; use one of fast, repair, robust"),
        ({"effort": "repair"}, "needs current_LS"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(effort, change, text):
    given = {"num_ranks": RANKS, "num_slots": SLOTS, "effort": effort}
    with pytest.raises(ValueError, match=text):
        plan_placement(loads(12), **(given | change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spread": -0.1}, "spread=-0.1 must lie between 0"),
        ({"spread": np.nan}, "spread=nan"),
        ({"num_scenarios": 0}, "num_scenarios=0 must be at least 1"),
        ({"beta": 2.0}, "beta=2.0"),
        ({"tail": 0.0}, "tail=0.0"),
        ({"most_scores": -1}, "most_scores=-1"),
        ({"move_price": -1.0, "current_LS": other_placement}, "must be 0 or more"),
        ({"move_price": [0.1], "current_LS": other_placement}, r"a number or \[L\] = \[3\]"),
        ({"most_experts_G": [4, 4, 4, 1]}, "sums to 13, less than the 14 experts"),
        ({"effort": "fast", "most_experts_G": [5, 5, 5, 5]}, "is for effort='robust'"),
        ({"fixed_homes": True, "current_LS": other_placement}, "the home of expert"),
    ],
)
def test_options_out_of_range_are_refused(change, text):
    given = {key: value() if callable(value) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=text):
        plan_placement(loads(13), num_ranks=RANKS, num_slots=SLOTS, **given)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (1, 0), (0, 1, 4), (1, 1, 1, 4)])
def test_loads_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="load has shape"):
        plan_placement(np.ones(shape), num_ranks=2, num_slots=6)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks"),
    [(1, 4, 4), (1, 8, 4), (1, 1, 1), (2, 12, 4), (5, 6, 1), (9, 12, 4), (3, 8, 8)],
)
@pytest.mark.parametrize("homes", [False, True])
@pytest.mark.parametrize("effort", ["fast", "robust"])
def test_sizes_at_the_edge(effort, homes, experts, slots, ranks):
    load = np.arange(1, experts + 1)[None] * 100
    plan = plan_checked(load, num_ranks=ranks, num_slots=slots, effort=effort, fixed_homes=homes)
    again = plan_checked(
        load, num_ranks=ranks, num_slots=slots, effort=effort, fixed_homes=homes,
        current_LS=plan.slot_to_expert_LS,
    )  # fmt: skip
    assert again.moves == ()


def test_the_twins_plan_the_same():
    load = loads(14, layers=1, experts=6)
    for effort in ("robust", "fast"):
        sizes = {"num_ranks": 3, "num_slots": 9, "num_scenarios": 3, "effort": effort}
        one, twin = (plan_checked(load, compiled=compiled, **sizes) for compiled in (True, False))
        assert plan_to_dict(one) == plan_to_dict(twin)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(planning).failed == 0


# ---- what a caller may do ---------------------------------------------------------------------------------


def test_loads_in_any_memory_order_give_the_same_plan():
    load = np.random.default_rng(5).lognormal(0, 1, (3, 8))
    plain = plan_placement(load, num_ranks=4, num_slots=12)
    for other in (np.asfortranarray(load), load.T.copy().T, load[:, np.arange(8)]):
        again = plan_placement(other, num_ranks=4, num_slots=12, current_LS=np.asfortranarray(
            plain.slot_to_expert_LS))  # fmt: skip
        assert again.moves == ()
        assert (
            plan_placement(other, num_ranks=4, num_slots=12).slot_to_expert_LS == plain.slot_to_expert_LS
        ).all()


def test_a_present_placement_that_breaks_the_groups_is_refused_with_the_way_out():
    load = [[9, 9, 9, 1, 1, 1, 1, 1]]
    sizes = {"num_ranks": 4, "num_slots": 12, "num_nodes": 2, "num_groups": 2}
    with pytest.raises(
        ValueError, match=r"layer 0 has expert \d on nodes .* default_placement with num_nodes"
    ):
        plan_placement(load, **sizes, current_LS=default_placement(1, 8, 12, 4))
    start = default_placement(1, 8, 12, 4, num_nodes=2, num_groups=2)
    plan = plan_placement(load, **sizes, current_LS=start, fixed_homes=True)
    node_S = np.arange(12) // 6
    assert all(len(set(node_S[plan.slot_to_expert_LS[0] == e])) == 1 for e in range(8))
    swapped = start.copy()
    swapped[0, [0, 6]] = swapped[0, [6, 0]]  # expert 0 is alone on the other node, its group is not
    if (start[0] == start[0, 0]).sum() == 1 and (start[0] == start[0, 6]).sum() == 1:
        with pytest.raises(ValueError, match="on several nodes"):
            plan_placement(load, **sizes, current_LS=swapped)


@pytest.mark.parametrize("effort", ["fast", "robust"])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"spread": -5}, "spread=-5"),
        ({"beta": 7}, "beta=7"),
        ({"num_scenarios": -3}, "num_scenarios=-3"),
        ({"most_scores": -1}, "most_scores=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"num_ranks": 2.0}, "num_ranks=2.0 must be an integer"),
        ({"move_price": [0.1, 0.1]}, "price"),
    ],
)
def test_every_option_is_checked_whatever_the_effort(effort, option, words):
    with pytest.raises(ValueError, match=words):
        plan_placement([[3, 1, 2, 1]], **({"num_ranks": 2, "num_slots": 6, "effort": effort} | option))


def test_fast_prices_moves_layer_by_layer():
    load = [[9, 1, 1, 1], [9, 1, 1, 1]]
    start = [[0, 1, 2, 2, 3, 1]] * 2
    plan = plan_placement(
        load, num_ranks=2, num_slots=6, effort="fast", current_LS=start, move_price=[0.0, 1e9]
    )
    assert {move.layer for move in plan.moves} == {0}


def test_a_history_in_percent_is_a_history_of_shares():
    share = np.random.default_rng(0).dirichlet(np.ones(8), 1)[0]
    history = np.tile(share, (12, 1, 1))
    plans = [plan_placement(history * scale, num_ranks=4, num_slots=12) for scale in (1.0, 100.0, 8.0)]
    reasons = {plan.reason for plan in plans}
    assert len(reasons) == 1 and "is 0.0" in reasons.pop()


def test_slots_that_serve_nothing_are_named():
    plan = plan_placement([[3, 1]], num_ranks=2, num_slots=6)  # two experts on two ranks fill four slots
    assert "2 slots serve nothing" in plan.reason
    fast = plan_placement([[3, 1]], num_ranks=2, num_slots=6, effort="fast")
    assert "2 slots serve nothing" in fast.reason


def test_layers_without_load_count_in_no_figure():
    alone = plan_placement([[9, 1, 1, 1]], num_ranks=2, num_slots=6)
    beside = plan_placement([[9, 1, 1, 1], [0, 0, 0, 0]], num_ranks=2, num_slots=6)
    assert "first placement: the fullest rank is" in alone.reason and "0.00 %" in beside.reason
    assert "no layer has any load" in plan_placement([[0, 0, 0, 0]], num_ranks=2, num_slots=6).reason


def test_speeds_that_differ_beyond_reason_end_all_the_same():
    peak = layer_peaks([[0, 1, 2, 2, 3, 0]], [[5, 1, 2, 2]], 2, [1e-9, 1e9])
    assert np.isfinite(peak).all()
