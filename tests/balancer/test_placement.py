"""The placement controller: at rest when nothing changes, acts for a clear gain or one missed too long, tells
why, and can be saved and taken up again."""

import doctest
import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from balancer import placement
from balancer.connect import default_placement
from balancer.cost import CostModel
from balancer.dispersion import draw_counts
from balancer.forecast_record import copy_state
from balancer.kernels import search_kernels
from balancer.metrics import moved_slots
from balancer.placement import PlacementConfig, placement_controller
from balancer.placement_checks import home_slots
from balancer.plan import check_plan, plan_to_dict
from balancer.planning import plan_placement
from balancer.search import layer_peaks

LAYERS, EXPERTS, RANKS, SLOTS = 3, 16, 4, 20
# one move pays, of expert 1 to rank 1
SMALL = np.array([[0, 1, 2, 2, 3, 0]])
HOT = np.array([[100, 41000, 100, 100]])


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Compile once, so that no test waits for it."""
    search_kernels()


def cost_of(move_s=None, trained=False):
    """Prices of a machine; serving has no traffic of replicas, which would be one more figure in the sums."""
    cost = CostModel.of_machine("infiniband", 1024, 1024, move_price_s=move_s, trained=trained)
    return replace(cost, row_s=5e-8)


def config_of(num_ranks=RANKS, num_slots=SLOTS, **given):
    return PlacementConfig(**({"num_ranks": num_ranks, "num_slots": num_slots, "cost": cost_of()} | given))


def run(config, samples, slots, state=None, first=0):
    """Feed samples, put plans in force at once.   Returns plans with their sample, placement and state."""
    init, update = placement_controller(config)
    state = init(*samples[0].shape, slots) if state is None else state
    plans = []
    for w, counts in enumerate(samples, first):
        plan, state = update(w * config.sample_steps, counts, slots, state)
        if plan is not None:
            check_plan(plan, num_experts=counts.shape[1], current_LS=slots, step=w * config.sample_steps)
            assert 0 < len(plan.moves) == moved_slots(slots, plan.slot_to_expert_LS, plan.num_ranks).sum()
            plans.append((w, plan))
            slots = plan.slot_to_expert_LS
    return plans, slots, state


def start_slots():
    """Homes, and replicas chosen before any load is known."""
    return default_placement(LAYERS, EXPERTS, SLOTS, RANKS)


def shares(seed, layers=LAYERS, experts=EXPERTS):
    drawn = np.random.default_rng(seed).lognormal(0, 1, (layers, experts))
    return drawn / drawn.sum(axis=1, keepdims=True)


def drifting(seed, samples, layers=LAYERS, experts=EXPERTS, copies=32768):
    """Counts of a load that changes slowly, drawn anew each time."""
    rng = np.random.default_rng(seed)
    level = np.log(shares(seed, layers, experts))
    counts = []
    for _ in range(samples):
        level = level + 0.15 * rng.standard_normal(level.shape)
        counts.append(draw_counts(rng, np.exp(level) / np.exp(level).sum(axis=1, keepdims=True), copies, 2.0))
    return counts


# ---- at rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"num_scenarios": 0}, {"sample_steps": 10}, {"cost": cost_of(1e-6)}])
def test_an_unchanged_load_moves_nothing_after_the_first_plan(given):
    counts = (shares(1) * 32768).astype(np.int64)
    plans, slots, state = run(config_of(**given), [counts] * 40, start_slots())
    assert [w for w, _ in plans] == [0]
    assert layer_peaks(slots, counts, RANKS)[0] / counts.sum(axis=1) * RANKS == pytest.approx(1, abs=0.05)
    assert not state.account_L.any()


@pytest.mark.parametrize("seed", range(4))
def test_the_same_load_drawn_again_with_noise_moves_nothing(seed):
    load, rng = shares(seed), np.random.default_rng(seed)
    start = plan_placement(load, num_ranks=RANKS, num_slots=SLOTS, fixed_homes=True).slot_to_expert_LS
    samples = [draw_counts(rng, load, 32768, 2.3) for _ in range(60)]
    plans, _, _ = run(config_of(), samples, start)
    assert plans == []


def test_noise_moves_nothing_in_training_either_once_the_placement_suits_the_load():
    """There the traffic of replicas counts too, so that the first plans take some away."""
    load, rng = shares(11), np.random.default_rng(11)
    samples = [draw_counts(rng, load, 32768, 2.3) for _ in range(60)]
    plans, _, _ = run(config_of(cost=cost_of(trained=True)), samples, start_slots())
    assert plans and plans[-1][0] <= 3  # of 60


def test_replicas_that_cost_more_than_they_save_are_not_fetched():
    """In training every replica travels in every step: with weights that are dear there are none to add."""
    even_s = HOT.sum() / 2 * cost_of().row_s
    kept = np.array([[0, 1, -1, 2, 3, -1]])
    for bytes_per_s, moves in ((1e15, 1), (1e6, 0)):
        cost = CostModel.of_machine(
            "infiniband", 1024, 1024, move_price_s=even_s / 100, bandwidth_bytes_per_s=bytes_per_s
        )
        plans, _, _ = run(config_of(2, 6, cost=cost, horizon_steps=1), [HOT] * 4, kept)
        assert len(plans) >= moves if moves else plans == []


def test_gain_below_cost_is_no_plan():
    even_s = HOT.sum() / 2 * cost_of().row_s
    gain_s = (HOT[0, 1] + 100) / (HOT.sum() / 2) * even_s - even_s  # of one sample
    for horizon in (1, 10):
        dear, cheap, nearly = (
            run(config_of(2, 6, cost=cost_of(gain_s * horizon * x), horizon_steps=horizon), [HOT] * 20, SMALL)
            for x in (1.05, 0.75, 0.85)
        )
        assert dear[0] == [] and len(cheap[0]) == 1 and cheap[0][0][1].moves[0].expert == 1
        assert cheap[0][0][0] == 0  # a first sample says nothing of change: the plan is taken to last
        assert nearly[0] == []  # more than its cost, by less than the margin


def test_a_load_that_changes_is_planned_for_no_longer_than_it_lasts():
    """The same gain, once from a load that stays and once from one that jumps about."""
    stay = [HOT] * 30
    jump = [HOT if w % 2 else HOT[:, [1, 0, 2, 3]] for w in range(30)]
    even_s = HOT.sum() / 2 * cost_of().row_s
    config = config_of(2, 6, cost=cost_of(6 * even_s), num_scenarios=0)
    assert len(run(config, stay, SMALL)[0]) == 1
    assert run(config, jump, SMALL)[0] == []


def test_a_bias_loop_shortens_the_horizon():
    config = {"num_ranks": 2, "num_slots": 6, "cost": cost_of(1e-2)}  # ten samples' gain
    assert len(run(config_of(**config), [HOT] * 8, SMALL)[0]) == 1
    assert len(run(config_of(**config, decay=0.05), [HOT] * 8, SMALL)[0]) == 1
    assert run(config_of(**config, decay=0.3), [HOT] * 8, SMALL)[0] == []


# ---- a gain missed too long ------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1.0, 2.0])
def test_a_gain_that_is_never_clear_is_taken_once_what_it_would_have_saved_pays_for_it(theta):
    rng, price_s = np.random.default_rng(0), 2e-4
    config = config_of(
        2, 6, cost=cost_of(price_s), horizon_steps=40, confidence=1 - 1e-15, tolerance=0.0, theta=theta
    )
    init, update = placement_controller(config)
    # the load has changed a lot so far: at first no gain lasts
    state, account, taken = init(1, 4, SMALL)._replace(change_L=np.full(1, 0.3)), 0.0, None
    squares = counted = sure = 0.0
    for w in range(300):
        counts = draw_counts(rng, np.array([[0.2, 0.6, 0.1, 0.1]]), 3000, 100.0)
        shadow = state.shadow_LS.copy()
        plan, state = update(w, counts, SMALL, state)
        missed = layer_peaks(SMALL, counts, 2)[0, 0] - layer_peaks(shadow, counts, 2)[0, 0]
        account = max(account + missed * config.cost.row_s, 0.0)
        squares, counted = squares + (missed * config.cost.row_s) ** 2, counted + 1
        sure = (
            account
            - NormalDist().inv_cdf(config.confidence) * max(squares - account**2 / counted, 0.0) ** 0.5
        )
        if plan is not None:
            taken = w
            break
        assert sure < theta * price_s  # not before
        if state.account_L[0] == 0.0:  # there is another shadow
            account = squares = counted = 0.0
        assert state.account_L[0] == pytest.approx(account, abs=1e-12)
    assert taken is not None and sure >= theta * price_s  # and not after
    assert (plan.slot_to_expert_LS == shadow).all() and "missed too long" in plan.reason
    # a sample saves about a tenth of the price
    assert taken >= 5 * theta


# ---- plans -----------------------------------------------------------------------------------------------


def test_versions_rise_by_one_and_steps_are_those_of_the_samples():
    config = config_of(sample_steps=5, delay_steps=7, cost=cost_of(1e-5))
    plans, _, state = run(config, drifting(3, 25), start_slots())
    assert len(plans) > 3
    assert (
        [plan.version for _, plan in plans]
        == list(range(1, len(plans) + 1))
        == [*range(1, state.version + 1)]
    )
    for w, plan in plans:
        assert plan.made_at_step == 5 * w and plan.applies_at_step == 5 * w + 7


@pytest.mark.parametrize(("every", "sample"), [(1, 1), (4, 1), (10, 3)])
def test_plans_keep_their_distance(every, sample):
    config = config_of(every_steps=every, sample_steps=sample, cost=cost_of(1e-6))
    plans, _, _ = run(config, drifting(4, 24), start_slots())
    at = [plan.made_at_step for _, plan in plans]
    assert len(at) > 1 and min(np.diff(at)) >= every
    assert config.plan_steps >= every and config.plan_steps % sample == 0


def test_a_plan_says_why_with_its_figures():
    plans, _, _ = run(config_of(2, 6, cost=cost_of(1e-4), horizon_steps=1), [HOT] * 2, SMALL)
    plan = plans[0][1]
    assert plan.reason.startswith("1 layers change (1 for a clear gain)")
    before, after = map(float, re.search(r"layer 0 ([\d.]+) -> ([\d.]+) %", plan.reason).groups())
    # rank 0 has all but 200 of 41,300, and half of them after the move
    assert before == pytest.approx(98.5, abs=1) and after == pytest.approx(0, abs=1)
    assert f"gain {plan.expected_gain_s:.3g} s" in plan.reason
    assert f"moves {plan.move_cost_s:.3g} s" in plan.reason
    assert plan.move_cost_s == pytest.approx(1e-4) and plan.expected_gain_s > plan.move_cost_s
    even_s = HOT.sum() / 2 * cost_of().row_s
    assert plan.expected_gain_s == pytest.approx(0.985 * even_s, rel=0.01)


def test_a_plan_that_is_not_put_in_force_is_made_again():
    init, update = placement_controller(config_of(2, 6))
    state, versions = init(1, 4, SMALL), []
    for step in range(3):
        plan, state = update(step, HOT, SMALL, state)
        versions.append(plan.version)
        assert plan.moves[0].expert == 1
    assert versions == [1, 2, 3]


def test_a_layer_that_never_had_load_and_an_idle_pass_change_nothing():
    slots, half = np.tile(SMALL, (2, 1)), np.concatenate([HOT, 0 * HOT])
    plans, after, state = run(config_of(2, 6), [half] * 10, slots)
    assert (
        len(plans) == 1 and (after[1] == slots[1]).all() and {move.layer for move in plans[0][1].moves} == {0}
    )
    idle, _, later = run(config_of(2, 6), [0 * half] * 3, after, state=state, first=10)
    assert idle == [] and later.step == 12
    assert (later.last_LE == half).all() and (later.account_L == state.account_L).all()


def test_a_plan_gives_up_what_stands_twice_on_a_rank_in_layers_that_stay_too():
    """Or it would be refused as a whole."""
    slots = np.array([[0, 1, 2, 2, 3, 0], [0, 1, 1, 2, 3, 3]])
    plans, after, _ = run(config_of(2, 6), [np.concatenate([HOT, 0 * HOT])] * 2, slots)
    assert len(plans) == 1 and after[1].tolist() == [0, 1, -1, 2, 3, -1]


def test_layers_do_not_see_one_another():
    samples = drifting(5, 12, layers=2)
    start = default_placement(2, EXPERTS, SLOTS, RANKS)
    _, both, _ = run(config_of(num_scenarios=0), samples, start)
    _, alone, _ = run(config_of(num_scenarios=0), [counts[:1] for counts in samples], start[:1])
    assert (both[:1] == alone).all()


def test_a_layer_saves_nothing_in_samples_without_load_and_stays():
    """Its last load is remembered, but neither came again nor has to be served."""
    init, update = placement_controller(config_of(2, 6, cost=cost_of(1e-2), horizon_steps=1))
    slots, both = np.tile(SMALL, (2, 1)), np.concatenate([HOT, HOT])
    _, state = update(0, both, slots, init(2, 4, slots))
    better = slots.copy()
    better[:, 5] = 1
    state = state._replace(shadow_LS=better, account_L=np.array([0.0, 9e-3]))
    for step in range(1, 6):
        plan, state = update(step, np.concatenate([HOT, 0 * HOT]), slots, state)
        assert plan is None and state.account_L[1] == 9e-3
    assert state.account_L[0] > 4e-3


def test_homes_memory_and_speeds_are_kept_to():
    start = start_slots()
    start[:, 4] = -1  # rank 0 has no room for a fifth expert
    config = config_of(most_experts_P=(4, 5, 5, 5), speed_P=(1.0, 1.0, 1.0, 0.5), cost=cost_of(1e-6))
    plans, after, _ = run(config, drifting(6, 10), start)
    assert plans and (after[:, 4] == -1).all()
    homes_E = home_slots(EXPERTS, SLOTS, RANKS)
    assert all((plan.home_slot_LE == homes_E).all() for _, plan in plans)
    free, _, _ = run(config_of(fixed_homes=False, cost=cost_of(1e-6)), drifting(6, 10), start)
    assert free and free[0][1].home_slot_LE is None


def test_fast_ranks_gain_fewer_seconds():
    gains = [
        run(config_of(2, 6, speed_P=speed, cost=cost_of(1e-6)), [HOT], SMALL)[0][0][1].expected_gain_s
        for speed in (None, (10.0, 10.0))
    ]
    assert gains[1] == pytest.approx(gains[0] / 10, rel=1e-6)


# ---- states ----------------------------------------------------------------------------------------------


def leaves(state):
    """Arrays and numbers of nested tuples, in order."""
    if not isinstance(state, tuple):
        return [state]
    return [leaf for part in state for leaf in leaves(part)]


def filled(state, values):
    """The same tuples with other arrays and numbers, taken from an iterator."""
    if not isinstance(state, tuple):
        value = next(values)
        return value if isinstance(state, np.ndarray) else type(state)(value)
    parts = [filled(part, values) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def test_a_state_that_was_saved_and_read_again_goes_on_with_equal_plans(tmp_path):
    config, samples = config_of(cost=cost_of(1e-5)), drifting(7, 24)
    start = start_slots()
    whole, _, _ = run(config, samples, start)
    first, slots, state = run(config, samples[:12], start)
    kept = leaves(state)
    assert all(isinstance(leaf, np.ndarray | int | float | np.generic) for leaf in kept)
    np.savez(tmp_path / "state.npz", *kept)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as saved:
        values = iter([saved[name] for name in saved.files])
        # the tuples come from a controller that has seen nothing
        fresh = placement_controller(config).init(LAYERS, EXPERTS, start)
        restored = filled(fresh, values)
    second, _, _ = run(config, samples[12:], slots, state=restored, first=12)
    assert len(first) > 1 and len(second) > 1
    assert [plan_to_dict(plan) for _, plan in first + second] == [plan_to_dict(plan) for _, plan in whole]


def test_a_copied_state_is_not_touched_by_what_goes_on():
    config, samples, start = config_of(cost=cost_of(1e-5)), drifting(7, 24), start_slots()
    _, slots, state = run(config, samples[:12], start)
    kept = copy_state(state)
    ahead = run(config, samples[12:], slots, state=state, first=12)[0]
    again = run(config, samples[12:], slots, state=kept, first=12)[0]
    assert ahead and [plan_to_dict(p) for _, p in ahead] == [plan_to_dict(p) for _, p in again]


def test_equal_seeds_give_equal_plans_and_others_other_figures():
    samples, start = drifting(8, 10), start_slots()
    runs = [run(config_of(seed=seed, cost=cost_of(1e-5)), samples, start)[0] for seed in (0, 0, 1)]
    told = [[plan_to_dict(plan) for _, plan in plans] for plans in runs]
    assert told[0] == told[1] != told[2]


def test_update_leaves_its_inputs_as_they_were():
    init, update = placement_controller(config_of(cost=cost_of(1e-6)))
    start = start_slots()
    slots, state = start.copy(), init(LAYERS, EXPERTS, start)
    for step, counts in enumerate(drifting(9, 4)):
        given = counts.copy()
        plan, state = update(step, counts, slots, state)
        assert (counts == given).all() and (slots == start).all()
        if plan is not None:
            plan.slot_to_expert_LS[:] = -5  # what the caller does with its plan is its own affair
    assert plan is not None and (state.shadow_LS != -5).all()


def test_the_twins_decide_the_same():
    samples = [HOT, HOT[:, [1, 0, 2, 3]], HOT]
    told = []
    for compiled in (True, False):
        plans, _, _ = run(config_of(2, 6, num_scenarios=3, compiled=compiled), samples, SMALL)
        told.append([plan_to_dict(plan) for _, plan in plans])
    assert told[0] == told[1] != []


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "counts", "slots", "text"),
    [
        (4, HOT, SMALL, "step=4 must be more than that of the last sample, 4"),
        (3, HOT, SMALL, "step=3 must be more than that of the last sample"),
        (5.0, HOT, SMALL, "step=5.0 must be an integer"),
        (5, HOT[:, :3], SMALL, r"expected counts \[L, E\] = \(1, 4\)"),
        (5, np.tile(HOT, (2, 1)), SMALL, r"expected counts \[L, E\] = \(1, 4\)"),
        (5, HOT * np.nan, SMALL, "nan is no count"),
        (5, -HOT, SMALL, "-100.0 is no count"),
        (5, HOT * np.inf, SMALL, "inf is no count"),
        (5, HOT / HOT.sum(), SMALL, "is no whole number; give counts of copies, not shares"),
        (5, HOT * 2.0**47, SMALL, "more than 2\\^53"),
        (5, HOT, SMALL[:, :4], r"current_LS has shape \(1, 4\)"),
        (5, HOT, SMALL[:, ::-1], "fixed_homes"),
        (5, HOT, SMALL.astype(float), "expected integers"),
        (5, HOT, SMALL + 1, "has expert 4, out of 0..3"),
        (5, HOT, SMALL * 0, "expert 1 has no slot"),
    ],
)
def test_samples_and_placements_that_do_not_fit_are_refused(step, counts, slots, text):
    init, update = placement_controller(config_of(2, 6))
    _, state = update(4, HOT, SMALL, init(1, 4, SMALL))
    with pytest.raises(ValueError, match=text):
        update(step, counts, slots, state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_ranks": 0}, "num_ranks=0 must be 1 or more"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"sample_steps": 0}, "sample_steps=0"),
        ({"horizon_steps": 0}, "horizon_steps=0"),
        ({"delay_steps": -1}, "delay_steps=-1"),
        ({"num_scenarios": -1}, "num_scenarios=-1"),
        ({"most_scores": -1}, "most_scores=-1"),
        ({"confidence": 0.5}, "confidence=0.5 must lie between 0.5 and 1"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"theta": 0.0}, "theta=0.0 must be above 0"),
        ({"theta": np.inf}, "theta=inf"),
        ({"decay": 1.0}, "decay=1.0 must be 0"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
        ({"tolerance": np.nan}, "tolerance=nan"),
    ],
)
def test_bad_configurations_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        config_of(**change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_slots": 7}, "7 slots are not a multiple of 2 ranks; use 6 or 8"),
        ({"num_slots": 8}, r"current_LS has shape \(1, 6\); expected \[L, S\] = \[1, 8\]"),
        ({"num_nodes": 3}, "num_nodes=3 does not divide 2 ranks"),
        ({"speed_P": (1.0,)}, "has 1 entries for 2 ranks"),
        ({"forecaster": "oracle"}, "oracle"),
    ],
)
def test_sizes_are_checked_before_the_first_sample(change, text):
    with pytest.raises(ValueError, match=text):
        placement_controller(config_of(**({"num_ranks": 2, "num_slots": 6} | change))).init(1, 4, SMALL)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(placement).failed == 0


# ---- what a host may do -----------------------------------------------------------------------------------


def test_a_gain_that_no_change_lets_last_is_taken_once_it_was_missed_for_its_price():
    """The load jumps every sample, but expert 1 is hot in all: a gain believed for three, true for good."""
    loads = [np.array([[100, 8000, 100, 4000]]), np.array([[4000, 8000, 100, 100]])]
    missed_s = (8000 - 6100) * cost_of().row_s  # of one sample: expert 1 is on rank 0 only
    state = placement_controller(config_of(2, 6)).init(1, 4, SMALL)._replace(change_L=np.full(1, 0.3))
    config = config_of(2, 6, cost=cost_of(20 * missed_s), horizon_steps=500, tolerance=0.0)
    plans, _, _ = run(config, [loads[w % 2] for w in range(100)], SMALL, state)
    assert [move.expert for move in plans[0][1].moves] == [1] and "missed too long" in plans[0][1].reason
    assert 18 <= plans[0][0] <= 26


def test_a_shadow_that_saves_nothing_makes_room_for_another():
    first, second = np.array([[100, 5000, 100, 4000]]), np.array([[5000, 100, 100, 4000]])
    config = config_of(2, 6, cost=cost_of(3e-4), horizon_steps=60, tolerance=0.0, confidence=1 - 1e-15)
    _, slots, state = run(config, [first] * 3, SMALL)
    shadows = set()
    init, update = placement_controller(config)
    for w in range(3, 120):
        plan, state = update(w, second, slots, state)
        shadows.add(state.shadow_LS.tobytes())
        if plan is not None:
            slots = plan.slot_to_expert_LS
    fresh = init(1, 4, slots)
    for w in range(120):
        plan, fresh = update(w, second, slots, fresh)
        assert plan is None, "a controller without a past would still change the placement"


def test_no_plan_is_made_while_one_waits_for_its_step():
    config = config_of(2, 6, delay_steps=4, cost=cost_of(1e-6))
    init, update = placement_controller(config)
    slots, state, waiting = SMALL, init(1, 4, SMALL), None
    made = []
    for w, counts in enumerate([HOT] * 3 + [np.array([[41000, 100, 100, 100]])] * 9):
        if waiting is not None and waiting.applies_at_step <= w:
            check_plan(waiting, num_experts=4, current_LS=slots, step=w)
            slots, waiting = waiting.slot_to_expert_LS, None
        plan, state = update(w, counts, slots, state)
        if plan is not None:
            assert waiting is None
            waiting = plan
            made.append(w)
    assert made and (len(made) == 1 or min(np.diff(made)) >= 4)


def test_what_is_missed_counts_for_the_steps_between_samples_and_while_a_plan_is_new():
    config = config_of(2, 6, cost=cost_of(1.0), horizon_steps=10**6, every_steps=1000, tolerance=0.0)
    init, update = placement_controller(config)
    state = init(1, 4, SMALL)._replace(
        shadow_LS=np.array([[0, 1, 2, 2, 3, 1]]), planned_at=0, step=0, last_LE=HOT
    )
    missed = layer_peaks(SMALL, HOT, 2)[0, 0] - layer_peaks([[0, 1, 2, 2, 3, 1]], HOT, 2)[0, 0]
    plan, state = update(7, HOT, SMALL, state)  # within every_steps, seven steps after the last sample
    assert plan is None
    assert state.account_L[0] == pytest.approx(7 * missed * config.cost.row_s)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"num_scenarios": 1}, "num_scenarios=1"), ({"every_steps": 900}, "horizon_steps=500")],
)
def test_settings_that_contradict_each_other_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        config_of(**given)
