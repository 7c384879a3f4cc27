"""The default bias law: measured slopes, the gain in closed loop, ramps, dead experts, bumpless changes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from balancer.bias import init_bias, law, switch_law, update_bias
from balancer.bias_identified import identified_law, stability_limit
from balancer.bias_record import Actuated, Measurement
from balancer.metrics import max_violation, violation_floor
from balancer.plant import PlantConfig, expected_shares, init_plant, plant_scale, step_plant, switch_plant


def run(config: PlantConfig, the_law, steps: int, *, switch_at: int = -1, sd: float = 1.0):
    """Max violations of the counts [steps, L], true mean |y| [steps, L], and both states."""
    plant = init_plant(config)
    bias = init_bias(the_law, config.num_layers, config.num_experts, config.top_k,
                     delay_steps=config.delay_steps)  # fmt: skip
    bias_LE = bias.bias_LE
    seen, true = [], []
    for step in range(steps):
        if step == switch_at:
            plant = switch_plant(plant, sd)
        share_LE = expected_shares(bias_LE, plant)
        measurement, plant = step_plant(bias_LE, plant)
        bias_LE, bias = update_bias(the_law, measurement, bias)
        seen.append(max_violation(measurement.counts_LE))
        true.append(np.abs(share_LE * config.num_experts / config.top_k - 1).mean(axis=1))
    return np.array(seen), np.array(true), bias, plant


def measured(counts_LE, *, top_k=2, step=0, **fields):
    counts_LE = np.asarray(counts_LE, dtype=np.float64)
    tokens = int(counts_LE[0].sum()) // top_k
    return Measurement(step=step, counts_LE=counts_LE, num_tokens=tokens, top_k=top_k, **fields)


def swaps(shape_LE, near=400.0, delta=1e-3):
    return {
        "swaps_LE": np.full(shape_LE, near),
        "wide_swaps_LE": np.full(shape_LE, 2 * near),
        "swap_delta": delta,
    }


def settled(the_law, shape_LE=(1, 8), **extra):
    """A state that knows its slopes, at balance."""
    zeros = np.zeros(shape_LE)
    counts = np.full(shape_LE, 1000.0)
    state = the_law.init(*shape_LE, 2)
    _, state = the_law.update(
        measured(counts, **swaps(shape_LE), **extra), Actuated(zeros, zeros, zeros), state
    )
    return state


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_the_stability_limit_is_where_a_root_leaves_the_unit_circle(delay):
    def radius(gain):
        return np.abs(
            np.roots([1.0, -1.0, *[0.0] * (delay - 1), gain][: delay + 2] if delay else [1, gain - 1])
        ).max()

    assert radius(0.999 * stability_limit(delay)) < 1 < radius(1.001 * stability_limit(delay))


def test_the_slope_is_that_of_the_swap_counts():
    state = settled(identified_law())
    # a = 2 a(delta) - a(2 delta) = 400 / (2 * 4000 * 1e-3) = 50; eigenvalue 50 * 8 / 7; r = 1/4
    np.testing.assert_allclose(state.slopes.tau_LE, 0.25 / (50 * 8 / 7), rtol=1e-12)


def test_the_bias_of_a_finite_gap_is_taken_out():
    the_law, zeros = identified_law(), np.zeros((1, 8))
    curved = swaps((1, 8)) | {"wide_swaps_LE": np.full((1, 8), 600.0)}  # a(delta) 50, a(2 delta) 37.5
    sample = measured(np.full((1, 8), 1000.0), **curved)
    _, state = the_law.update(sample, Actuated(zeros, zeros, zeros), the_law.init(1, 8, 2))
    np.testing.assert_allclose(state.slopes.tau_LE, 0.25 / ((2 * 50 - 37.5) * 8 / 7), rtol=1e-12)


def test_an_expert_far_from_balance_takes_the_slope_of_the_others():
    the_law, zeros = identified_law(), np.zeros((1, 8))
    counts = np.array(
        [[20.0] + [7980 / 7] * 7]
    )  # 2 % of its share, and swaps that would say: four times as steep
    hits = np.array([[4 * 400 / 3] + [400.0] * 7])
    sample = measured(counts, swaps_LE=hits, wide_swaps_LE=2 * hits, swap_delta=1e-3)
    _, state = the_law.update(sample, Actuated(zeros, zeros, zeros), the_law.init(1, 8, 2))
    assert 0.8 < state.slopes.tau_LE[0, 0] / state.slopes.tau_LE[0, 1] < 1.25


def test_a_jump_does_not_start_the_integral():
    the_law, zeros = identified_law(), np.zeros((1, 8))
    state = settled(the_law)
    tilted = 1000.0 + 400.0 * np.where(np.arange(8) % 2, 1.0, -1.0)[None]
    for step in range(1, 40):  # far off for 6 steps, then even
        counts = tilted if step <= 6 else np.full((1, 8), 1000.0)
        _, state = the_law.update(measured(counts, step=step), Actuated(zeros, zeros, zeros), state)
        assert state.ramp_L[0] == 0 and not state.push_LE.any()


def test_the_measured_slope_is_that_of_the_plant():
    config = PlantConfig(num_layers=2, num_experts=32, top_k=2, num_tokens=65536)
    _, _, bias, plant = run(config, identified_law(), 30)
    np.testing.assert_allclose((1 / bias.law.slopes.tau_LE).mean(axis=1), plant_scale(plant), rtol=0.15)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 1, 4096), (32, 4, 65536)])
def test_it_settles_at_the_noise_floor_and_again_after_a_switch(score, experts, top_k, tokens):
    config = PlantConfig(
        num_layers=4, num_experts=experts, top_k=top_k, num_tokens=tokens, score=score, imbalance=1.0, seed=3
    )
    seen, true, _, _ = run(config, identified_law(), 160, switch_at=80)
    floor = violation_floor(tokens, experts, top_k)
    # a gain g adds g / (2 - g) of the noise's variance: up to 1.26 of the floor at the cap
    for part in (slice(50, 80), slice(130, 160)):
        assert seen[part].mean() < 1.35 * floor
    assert true[80].mean() > 10 * true[50:80].mean()
    assert true[86].mean() < 0.25 * true[80].mean()


def test_it_holds_a_router_that_reinforces_its_own_imbalance():
    config = PlantConfig(num_layers=4, num_tokens=16384, reinforcement=0.2, imbalance=0.5, seed=5)
    seen, _, bias, _ = run(config, identified_law(), 200)
    assert seen[150:].mean() < 1.35 * violation_floor(16384, 32, 2)
    report = identified_law().report(bias.law)
    assert (report["gain"] > 0.15).all()


def test_noise_is_not_answered():
    config = PlantConfig(num_layers=4, num_tokens=4096, phi=4.0, seed=6)
    _, _, bias, _ = run(config, identified_law(), 200)
    assert (bias.law.gain_L < 0.3).mean() > 0.5


def test_nothing_is_done_before_the_first_swap_counts():
    the_law, zeros = identified_law(), np.zeros((1, 4))
    change, _ = the_law.update(
        measured([[8, 0, 0, 0]], top_k=1), Actuated(zeros, zeros, zeros), the_law.init(1, 4, 1)
    )
    assert not change.any()


def test_a_steady_drift_switches_the_integral_on_and_its_end_off():
    the_law, zeros = identified_law(), np.zeros((1, 8))
    state = settled(the_law)
    # within the noise of a step, so no surprise
    tilted = 1000.0 + 25.0 * np.where(np.arange(8) % 2, 1.0, -1.0)[None]
    for step in range(1, 60):
        change, state = the_law.update(measured(tilted, step=step), Actuated(zeros, zeros, zeros), state)
    assert state.ramp_L[0] == 1 and state.push_LE[0, 0] > 0 > state.push_LE[0, 1]
    for step in range(60, 260):
        even = measured(np.full((1, 8), 1000.0), step=step)
        change, state = the_law.update(even, Actuated(zeros, zeros, zeros), state)
    assert state.ramp_L[0] == 0
    np.testing.assert_allclose(change, 0.0, atol=1e-7)  # fades by a tenth a step


def test_the_integral_does_not_wind_up_against_a_limit():
    the_law = identified_law(integral_steps=8.0)
    state, zeros = settled(the_law), np.zeros((1, 8))
    tilted = 1000.0 + 200.0 * np.where(np.arange(8) % 2, 1.0, -1.0)[None]
    change = zeros
    for step in range(1, 400):  # the router never moves: everything commanded is lost
        change, state = the_law.update(measured(tilted, step=step), Actuated(zeros, zeros, -change), state)
    bound = np.abs(state.gain_L[:, None] * state.slopes.tau_LE * 0.2)
    assert (np.abs(state.push_LE) <= 2 * bound).all()


@pytest.mark.parametrize("gain", [None, 0.3])
def test_a_change_to_a_finite_integral_goes_on_with_the_same_step(gain):
    shape = (1, 8)
    old = law("linear", gain=1e-3)
    new = law("identified", gain=gain, integral_steps=20.0)
    tilted = 1000.0 + 150.0 * np.where(np.arange(8) % 2, 1.0, -1.0)[None]
    sample = measured(tilted, step=1, **swaps(shape))
    state = init_bias(old, 1, 8, 2)
    bias_before, state = update_bias(old, sample, state)
    change_before = state.change_LE.copy()
    state = switch_law(old, new, sample, state)
    np.testing.assert_array_equal(state.bias_LE, bias_before)
    _, state = update_bias(new, measured(tilted, step=2), state)  # the same load, so the same error
    np.testing.assert_allclose(state.change_LE, change_before, atol=1e-12)


def test_a_raised_gain_goes_on_with_the_same_step_where_there_is_an_integral():
    the_law, zeros = identified_law(gain=0.2, integral_steps=20.0), np.zeros((1, 8))
    state = settled(the_law)
    tilted = 1000.0 + 150.0 * np.where(np.arange(8) % 2, 1.0, -1.0)[None]
    before = zeros
    for step in range(1, 5):
        before, state = the_law.update(measured(tilted, step=step), Actuated(zeros, zeros, zeros), state)
    state = the_law.raise_gain(np.array([0.6]), state)
    after, state = the_law.update(measured(tilted, step=5), Actuated(zeros, zeros, zeros), state)
    assert state.gain_L[0] == 0.6
    np.testing.assert_allclose(after, before, atol=1e-12)
    later, _ = the_law.update(measured(tilted, step=6), Actuated(zeros, zeros, zeros), state)
    assert (np.abs(later) > np.abs(after)).all()  # and from there on the integral runs at the new gain


def test_a_dead_expert_jumps_once_to_a_quarter_of_its_share_and_is_left_alone():
    experts, tokens, top_k = 8, 4000, 2
    edges = np.linspace(0.0, 1.0, 101)
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.2, 0.8, size=(experts, tokens))
    scores[5] -= 0.15  # its best scores are below what gets chosen
    histogram = np.stack([np.histogram(s, edges)[0] for s in scores])[None]
    share = np.full(experts, 2 / 7)
    share[5] = 0.0
    hits = np.full((1, experts), 400.0)
    hits[0, 5] = 0.0
    fields = {"swaps_LE": hits, "wide_swaps_LE": 2 * hits, "swap_delta": 1e-3,
              "score_histogram_LEB": histogram, "score_edges_X": edges}  # fmt: skip
    sample = Measurement(step=0, counts_LE=share[None] * tokens, num_tokens=tokens, top_k=top_k, **fields)
    the_law, zeros = identified_law(), np.zeros((1, experts))
    jump, state = the_law.update(sample, Actuated(zeros, zeros, zeros), the_law.init(1, experts, top_k))
    threshold = np.median([np.quantile(scores[e], 1 - share[e]) for e in range(experts) if e != 5])
    chosen = (scores[5] + jump[0, 5] > threshold).mean()
    assert chosen == pytest.approx(0.25 * top_k / experts, abs=0.01)
    held, state = the_law.update(
        Measurement(step=1, counts_LE=share[None] * tokens, num_tokens=tokens, top_k=top_k),
        Actuated(jump, jump, zeros), state,
    )  # fmt: skip
    assert held[0, 5] == 0.0 and np.abs(held[0, [0, 1, 2]]).min() > 0


def test_a_raised_gain_stays_inside_the_stability_limit():
    for delay in range(4):
        the_law = identified_law(delay_steps=delay)
        state = the_law.raise_gain(np.array([5.0]), settled(the_law))
        zeros = np.zeros((1, 8))
        _, state = the_law.update(
            measured(np.full((1, 8), 1000.0), step=1), Actuated(zeros, zeros, zeros), state
        )
        assert state.gain_L[0] == pytest.approx(0.9 * stability_limit(delay))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gain": 2.5}, "stability limit"),
        ({"gain": math.nan}, "stability limit"),
        ({"delay_steps": -1}, "0 or more"),
        ({"integral_steps": 0.5}, "1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        identified_law(**settings)


# ---- margins ------------------------------------------------------------------------------------------


def follow_margins(config: PlantConfig, steps: int, *, switch: float = 0.0, at: int = 0):
    """MaxVio [W, L] of the law on a plant that gives margins when they are asked for, and how often."""
    the_law = law("identified")
    config = replace(config, statistics=("swaps", "scores", "margins"), margins_every=20)
    plant, asked = init_plant(config), 0
    state = init_bias(the_law, config.num_layers, config.num_experts, config.top_k)
    bias, found = state.bias_LE, []
    for step in range(steps):
        if switch and step == at:
            plant = switch_plant(plant, switch)
        wanted = the_law.asks(state.law)
        asked += bool(wanted)
        measurement, plant = step_plant(bias, plant, wanted)
        assert (measurement.margin_histogram_LEB is not None) == (bool(wanted) or step % 20 == 0)
        found.append(measurement.violation_LE.max(axis=1))
        bias, state = update_bias(the_law, measurement, state)
    return np.array(found), asked, state


@pytest.mark.parametrize("sd", [6.0, 12.0])
def test_a_collapsed_layer_is_levelled_within_twenty_steps_where_there_are_margins(sd):
    config = PlantConfig(
        num_layers=3, num_experts=16, top_k=1, num_tokens=4096, reinforcement=0.02, drift=0.01, seed=5
    )
    found, asked, _ = follow_margins(config, 40, switch=sd)
    assert found[0].max() > 9.0  # most experts are dead
    assert found[20:].max() < 0.45  # the floor is .17
    assert 3 <= asked <= 25


def test_margins_are_not_asked_for_at_rest():
    config = PlantConfig(num_layers=2, num_experts=16, top_k=2, num_tokens=65536, seed=1)
    found, asked, state = follow_margins(config, 40)
    assert found.max() < 0.5 and asked == 0
    assert (state.law.slopes.margin_tau_LE > 0).all()


def test_swaps_counted_in_too_wide_a_gap_give_way_to_the_margins():
    the_law, zeros = identified_law(), np.zeros((1, 8))
    edges = np.concatenate([-(2.0 ** -np.arange(18.0)), [0.0], 2.0 ** -np.arange(17.0, -1.0, -1.0)])
    middle = 18
    margins = np.zeros((1, 8, 36), dtype=np.int64)
    margins[..., middle - 1], margins[..., middle] = 3000, 1000  # all within 2^-17 of the threshold
    counts = np.full((1, 8), 1000.0)
    wide = measured(counts, **swaps((1, 8)), margin_histogram_LEB=margins, margin_edges_X=edges)
    _, state = the_law.update(wide, Actuated(zeros, zeros, zeros), the_law.init(1, 8, 2))
    assert (state.slopes.swap_tau_LE > 100 * state.slopes.margin_tau_LE).all()
    np.testing.assert_array_equal(state.slopes.tau_LE, state.slopes.margin_tau_LE)
    # 1,250 tokens lie above -2^-17 * 250 / 3000, 750 above 2^-17 * 250 / 1000
    np.testing.assert_allclose(state.slopes.tau_LE, 2.0**-17 * (0.25 + 250 / 3000) / 0.5)


def test_margins_say_how_far_an_expert_is_to_go():
    the_law, zeros = identified_law(gain=0.5), np.zeros((1, 8))
    edges = np.linspace(-1.0, 1.0, 21)
    margins = np.zeros((1, 8, 20), dtype=np.int64)
    margins[..., 7], margins[..., 10] = 3000, 1000
    margins[0, 0] = 0
    margins[0, 0, 14], margins[0, 0, 7] = 1100, 2900  # a tenth too many, all more than .4 above
    counts = np.array([[1100.0] + [6900 / 7] * 7])
    sample = measured(counts, **swaps((1, 8)), margin_histogram_LEB=margins, margin_edges_X=edges)
    change, _ = the_law.update(sample, Actuated(zeros, zeros, zeros), the_law.init(1, 8, 2))
    assert change[0, 0] == pytest.approx(-0.5 * (0.5 - 0.1 * 1000 / 1100))
    np.testing.assert_array_equal(change[0, 1:], 0.0)  # theirs are right


def test_most_experts_dead_are_revived_by_their_scores_where_there_are_no_margins():
    the_law, zeros = identified_law(), np.zeros((1, 16))
    counts = np.zeros((1, 16))
    counts[0, :4] = 4000 * 2 / 4
    hits = np.where(counts > 0, 400.0, 0.0)
    scores = np.zeros((1, 16, 10), dtype=np.int64)
    scores[0, :4, 6], scores[0, 4:, 2] = 4000, 4000
    sample = measured(
        counts, swaps_LE=hits, wide_swaps_LE=2 * hits, swap_delta=1e-3,
        score_histogram_LEB=scores, score_edges_X=np.linspace(0.0, 1.0, 11),
    )  # fmt: skip
    change, state = the_law.update(sample, Actuated(zeros, zeros, zeros), the_law.init(1, 16, 2))
    assert (state.hold_LE[0, 4:] > 0).all() and (state.hold_LE[0, :4] == 0).all()
    assert (change[0, 4:] > 0.3).all()


def test_far_too_much_counts_less_than_in_proportion_and_too_little_as_it_is():
    the_law, zeros = identified_law(gain=0.5), np.zeros((1, 8))
    state = settled(the_law)
    counts = np.array([[4000.0, 0.0] + [4000.0 / 6] * 6])  # y = 3, -1 and -1/3
    change, state = the_law.update(measured(counts, step=1), Actuated(zeros, zeros, zeros), state)
    step = -0.5 * state.slopes.tau_LE[0]
    np.testing.assert_allclose(
        change[0, :3] / step[:3], [3.0 / (1.0 + 3.0 / 8.0), -1.0, -1.0 / 3.0], rtol=1e-9
    )
