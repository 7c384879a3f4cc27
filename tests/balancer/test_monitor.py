"""The collapse monitor: what it says of healthy, uneven, switching and collapsing load."""

import numpy as np
import pytest

from balancer.dispersion import draw_counts
from balancer.metrics import dead_experts, max_violation, normalized_entropy, total_variation, violation_floor
from balancer.monitor import CollapseMonitor, Verdict
from balancer.monitor_config import MonitorConfig
from balancer.monitor_figures import FIGURES
from balancer.synth import collapse_trace
from balancer.trace import load_trace

L, E, K, T = 3, 16, 2, 8192
GRAVE = ("COLLAPSING", "COLLAPSED")


def uniform(layers=L, experts=E, each=1024):
    return np.full((layers, experts), each)


def noisy(rng, shares_LE, phi=8.0):
    return draw_counts(rng, shares_LE, T * K, phi)


def shares(rng, spread=0.3, layers=L, experts=E):
    soft_LE = np.exp(spread * rng.standard_normal((layers, experts)))
    return soft_LE / soft_LE.sum(axis=1, keepdims=True)


def growing(share_LE, t, rate=0.03):
    """Two experts of every layer gain on the others."""
    hot_LE = share_LE * np.exp(rate * t * (np.arange(share_LE.shape[1]) < 2))
    return hot_LE / hot_LE.sum(axis=1, keepdims=True)


def run(monitor, loads, start=0, **given):
    """All verdicts, [steps][layers]."""
    return [monitor.update(start + t, counts_LE, **given) for t, counts_LE in enumerate(loads)]


def collapse_loads(seed=0, quiet=150, steps=200):
    rng = np.random.default_rng(seed)
    share_LE = shares(rng)
    return [noisy(rng, growing(share_LE, max(0, t - quiet))) for t in range(quiet + steps)]


# ---- conformance -----------------------------------------------------------------------------------------


def test_exactly_even_load_is_healthy_and_says_nothing():
    monitor = CollapseMonitor(L, E, K)
    for verdicts in run(monitor, [uniform()] * 300):
        assert [v.state for v in verdicts] == ["HEALTHY"] * L
        assert verdicts[0].reasons == () and monitor.alarms() == []
    figures = verdicts[0].figures
    assert figures["entropy"] == pytest.approx(1.0) and figures["dead_experts"] == 0.0
    assert figures["max_violation"] == 0.0 and figures["change"] == 0.0


def test_permuted_experts_change_nothing_and_permuted_layers_permute():
    loads, rng = collapse_loads(), np.random.default_rng(1)
    order_E, order_L = rng.permutation(E), rng.permutation(L)
    plain, experts, layers = (CollapseMonitor(L, E, K) for _ in range(3))
    for t, counts_LE in enumerate(loads):
        a = plain.update(t, counts_LE)
        b = experts.update(t, counts_LE[:, order_E])
        c = layers.update(t, counts_LE[order_L])
        for layer in range(L):
            assert (a[layer].state, a[layer].since_step) == (b[layer].state, b[layer].since_step)
            twin = c[int(np.flatnonzero(order_L == layer)[0])]
            assert (a[layer].state, a[layer].since_step) == (twin.state, twin.since_step)
    assert a[0].state in GRAVE
    # sums over the experts in another order
    assert list(b[0].figures.values()) == pytest.approx(list(a[0].figures.values()), rel=1e-7, nan_ok=True)


def test_a_resumed_monitor_goes_on_bit_by_bit_from_the_middle_of_an_alarm():
    loads = collapse_loads()
    one = CollapseMonitor(L, E, K)
    t = next(t for t, c in enumerate(loads) if one.update(t, c)[0].state == "COLLAPSING")
    two = CollapseMonitor(L, E, K)
    two.load_state_dict(one.state_dict())
    for later in range(t + 1, t + 60):
        a, b = one.update(later, loads[later]), two.update(later, loads[later])
        assert [v.state for v in a] == [v.state for v in b]
        np.testing.assert_array_equal(
            [list(v.figures.values()) for v in a], [list(v.figures.values()) for v in b]
        )
    for name, array in one.state_dict().items():
        np.testing.assert_array_equal(array, two.state_dict()[name], err_msg=name)


def test_a_saved_state_is_no_view_of_the_monitors():
    one = CollapseMonitor(L, E, K)
    run(one, [uniform()] * 3)
    saved = one.state_dict()
    kept = {name: array.copy() for name, array in saved.items()}
    run(one, collapse_loads()[:50], start=3)
    for name, array in saved.items():
        np.testing.assert_array_equal(array, kept[name], err_msg=name)


def test_a_state_of_other_sizes_or_names_is_refused():
    saved = CollapseMonitor(L, E, K).state_dict()
    with pytest.raises(ValueError, match="other layers or experts"):
        CollapseMonitor(L, E + 1, K).load_state_dict(saved)
    with pytest.raises(ValueError, match="differs in code_L"):
        CollapseMonitor(L, E, K).load_state_dict({k: v for k, v in saved.items() if k != "code_L"})


@pytest.mark.parametrize(
    ("step", "counts", "given", "text"),
    [
        (5, uniform() * -1, {}, "is no count"),
        (5, uniform() * np.nan, {}, "is no count"),
        (5, uniform() * np.inf, {}, "is no count"),
        (5, uniform()[:2], {}, "expected counts"),
        (5, uniform().astype(str), {}, "expected counts"),
        (4, uniform(), {}, "must be more than that of the last sample, 4"),
        (5.5, uniform(), {}, "must be an integer"),
        (5, uniform(), {"num_tokens": 1000}, "14384 too many"),
        (5, uniform(), {"gain_L": np.ones(2)}, "gain_L"),
        (5, uniform(), {"bias_LE": np.full((L, E), np.nan)}, "bias_LE"),
        (5, uniform(), {"swaps_LE": np.ones((L, E))}, "without swap_delta"),
        (5, uniform(), {"rows_to_rank_LP": -np.ones((L, 4))}, "rows_to_rank_LP"),
        (5, uniform(), {"bytes_PP": np.ones((2, 3))}, "bytes_PP"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(step, counts, given, text):
    monitor = CollapseMonitor(L, E, K)
    monitor.update(4, uniform())
    before = monitor.state_dict()
    with pytest.raises(ValueError, match=text):
        monitor.update(step, counts, **given)
    for name, array in monitor.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("sizes", [(0, 8, 2), (1, 1, 1), (1, 8, 8), (1, 8, 0)])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="top_k"):
        CollapseMonitor(*sizes)


@pytest.mark.parametrize("name", ["growth_sds", "memory", "watch_samples", "dead_frac"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=name):
        MonitorConfig(**{name: -1})


def test_an_idle_layer_is_not_perfect_and_moves_no_chart():
    monitor, loads = CollapseMonitor(L, E, K), collapse_loads()
    twin = CollapseMonitor(L, E, K)
    for t, counts_LE in enumerate(loads):
        idle_LE = counts_LE.copy()
        idle_LE[1] = 0
        twin.update(2 * t, counts_LE)
        states = [v.state for v in monitor.update(2 * t, counts_LE)]
        verdicts = monitor.update(2 * t + 1, idle_LE)
        assert verdicts[1].state == states[1] and np.isnan(verdicts[1].figures["entropy"])
        assert verdicts[1].reasons == ()
    one, two = monitor.state_dict(), twin.state_dict()
    for name in ("charts.mean_L", "charts.level_L", "code_L", "since_L", "samples_L"):
        assert one[name][1] == two[name][1], name  # as if the idle passes had not been


def test_no_layer_ever_loaded_is_no_verdict():
    monitor = CollapseMonitor(L, E, K)
    for verdicts in run(monitor, [uniform() * 0] * 5):
        assert [v.state for v in verdicts] == ["HEALTHY"] * L
    assert monitor.update(9, uniform())[0].figures["entropy"] == pytest.approx(1.0)


# ---- figures ---------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_metrics():
    rng, monitor = np.random.default_rng(3), CollapseMonitor(L, E, K)
    first_LE, then_LE = noisy(rng, shares(rng, 1.0)), noisy(rng, shares(rng, 1.0))
    then_LE[:, 0] += then_LE[:, 1]
    then_LE[:, 1] = 0
    monitor.update(0, first_LE)
    figures = [v.figures for v in monitor.update(1, then_LE, num_tokens=T)]
    assert set(figures[0]) == set(FIGURES)
    for name, values in {
        "entropy": normalized_entropy(then_LE),
        "max_violation": max_violation(then_LE),
        "dead_experts": dead_experts(then_LE),
        "change": total_variation(first_LE, then_LE),
        "excess": max_violation(then_LE) - violation_floor(T, E, K),
    }.items():
        assert [f[name] for f in figures] == pytest.approx(values), name


def test_over_dispersion_is_measured_between_samples_and_between_batches():
    rng, monitor = np.random.default_rng(4), CollapseMonitor(L, E, K)
    share_LE = np.broadcast_to(shares(rng), (200, L, E))
    found = []
    for t in range(200):
        parts = draw_counts(rng, share_LE[:16], T * K // 16, 4.0)  # 16 batches of 512 tokens
        verdicts = monitor.update(
            t, parts.sum(axis=0), squares_LE=(parts**2).sum(axis=0), tokens_squared=16.0 * (T // 16) ** 2
        )
        found.append([v.figures["batch_dispersion"] for v in verdicts])
    # 16 batches are 15 * 15 degrees of freedom: 10 % a sample and layer, 600 of them
    assert np.mean(found) == pytest.approx(4.0, rel=0.03)
    # an exponential mean over 20 samples of 15 degrees of freedom: 8 %
    assert verdicts[0].figures["dispersion"] == pytest.approx(4.0, rel=0.35)


# ---- reasons, each alone ---------------------------------------------------------------------------------


SKEWS = {
    "of the reinforcement": {"gain_L": 0.1, "reinforcement_L": 0.2},
    "biases are at their limit": {"bias_LE": np.ones((L, E)), "bias_limit_L": 1.0},
    "fullest rank": {"rows_to_rank_LP": [[3, 1]] * L},
    "bytes are": {"bytes_PP": [[0, 11], [10, 0]], "expected_bytes_PP": [[0, 10], [10, 0]]},
}


@pytest.mark.parametrize("text", list(SKEWS))
def test_what_is_about_to_go_wrong_is_skewed_for_one_reason(text):
    monitor = CollapseMonitor(L, E, K)
    verdict = run(monitor, [uniform()] * 25, **SKEWS[text])[-1][0]
    assert verdict.state == "SKEWED" and len(verdict.reasons) == 1 and text in verdict.reasons[0]
    assert monitor.update(30, uniform())[0].state in ("HEALTHY", "SKEWED")


def test_a_gain_below_the_reinforcement_counts_only_when_it_lasts():
    monitor, weak = CollapseMonitor(L, E, K), {"gain_L": 0.1, "reinforcement_L": 0.2}
    assert run(monitor, [uniform()] * 19, **weak)[-1][0].state == "HEALTHY"
    assert monitor.update(19, uniform(), **weak)[0].state == "SKEWED"
    assert monitor.update(20, uniform(), gain_L=0.3, reinforcement_L=0.2)[0].state == "HEALTHY"


def test_uneven_load_that_does_not_grow_is_skewed():
    rng, monitor = np.random.default_rng(5), CollapseMonitor(L, E, K)
    share_LE = shares(rng, 0.6)
    states = {
        v.state for verdicts in run(monitor, [noisy(rng, share_LE) for _ in range(300)]) for v in verdicts
    }
    assert states == {"SKEWED"} or states == {"HEALTHY", "SKEWED"}
    verdict = monitor.update(300, noisy(rng, share_LE))[0]
    assert len(verdict.reasons) == 1 and "max violation" in verdict.reasons[0]


def test_an_old_balancer_is_stale_with_its_age_and_so_is_a_gap_between_samples():
    monitor = CollapseMonitor(L, E, K)
    assert monitor.update(1000, uniform(), balancer_step=0)[0].state == "HEALTHY"
    verdict = monitor.update(1001, uniform(), balancer_step=0)[0]
    assert verdict.state == "STALE" and "1001 steps ago" in verdict.reasons[0]
    assert [v.layer for v in monitor.alarms()] == list(range(L))
    assert monitor.update(1002, uniform(), balancer_step=1002)[0].state == "HEALTHY"
    assert "no sample for 1500 steps" in monitor.update(2502, uniform())[0].reasons


def test_leading_indicators_are_reported_and_raise_nothing():
    monitor = CollapseMonitor(L, E, K)
    quiet = {"swaps_LE": np.full((L, E), 40), "swap_delta": 0.01, "logit_rms_L": 1.0}
    run(monitor, [uniform()] * 50, **quiet)
    loud = {"swaps_LE": np.full((L, E), 4), "swap_delta": 0.01, "logit_rms_L": 3.0, "confidence_L": 0.9}
    verdict = monitor.update(50, uniform(), aux_loss_L=1.25, **loud)[0]
    assert verdict.state == "HEALTHY" and len(verdict.reasons) == 2
    assert "0.10 of what they were" in verdict.reasons[0] and "3.00 of what they were" in verdict.reasons[1]
    assert verdict.figures["aux_loss_over_balance"] == 0.25 and verdict.figures["confidence"] == 0.9


def test_what_makes_the_state_is_said_first():
    rng, monitor = np.random.default_rng(6), CollapseMonitor(L, E, K)
    share_LE = shares(rng, 0.6)
    run(monitor, [noisy(rng, share_LE) for _ in range(30)], **SKEWS["biases are at their limit"])
    verdict = monitor.update(
        5000, noisy(rng, share_LE), balancer_step=10, bias_LE=np.ones((L, E)), bias_limit_L=1
    )[0]
    assert verdict.state == "STALE" and len(verdict.reasons) == 4
    assert "the balancer last acted 4990 steps ago" in verdict.reasons[0]
    assert "no sample for 4971 steps" in verdict.reasons[1]
    assert "max violation" in verdict.reasons[2]


def test_a_sample_without_swaps_is_no_baseline_for_the_others():
    monitor, each = CollapseMonitor(L, E, K), np.full((L, E), 40)
    found = []
    for t in range(40):
        swaps_LE = each * (t != 20)
        verdict = monitor.update(
            t, uniform(), swaps_LE=swaps_LE, swap_delta=0.01, logit_rms_L=1.0 * (t != 20)
        )[0]
        found.append(verdict.figures["swap_density"])
        assert (verdict.state, len(verdict.reasons)) == ("HEALTHY", int(t == 20))
        assert np.isnan(verdict.figures["logit_rise"]) if t == 20 else verdict.figures["logit_rise"] == 0
    assert found[20] == 0 and found[:20] + found[21:] == pytest.approx([1.0] * 39)


def test_swaps_that_come_late_have_the_first_of_them_for_a_baseline():
    monitor, each = CollapseMonitor(L, E, K), np.full((L, E), 40)
    density = [
        monitor.update(t, uniform(), swaps_LE=each * (t >= 5), swap_delta=0.01)[0].figures["swap_density"]
        for t in range(8)
    ]
    assert np.isnan(density[:5]).all() and density[5:] == pytest.approx([1.0] * 3)


def test_the_baseline_of_swaps_follows_what_changes_slowly():
    monitor, least = CollapseMonitor(L, E, K), 1.0
    for t in range(200):
        swaps_LE = np.full((L, E), round(4000 * 0.99**t))
        verdict = monitor.update(t, uniform(), swaps_LE=swaps_LE, swap_delta=0.01)[0]
        least = min(least, verdict.figures["swap_density"])
    assert least > 0.75  # lags by 1 / 0.05 samples of 1 %; without it 0.13


def test_the_window_for_dead_experts_forgets():
    monitor = CollapseMonitor(1, E, K)
    dead_LE = uniform(1) * (np.arange(E) >= 4)
    for t in range(10):
        verdict = monitor.update(t, dead_LE)[0]
    assert verdict.state == "COLLAPSED" and "4 of 16 experts dead" in verdict.reasons[0]
    states = [monitor.update(10 + t, uniform(1))[0].state for t in range(3)]
    assert states[-1] not in GRAVE


def test_few_tokens_are_summed_until_the_dead_can_be_told():
    monitor, counts_LE = CollapseMonitor(1, E, K), np.full((1, E), 7)
    counts_LE[0, :2] = [0, 14]
    dead = [monitor.update(t, counts_LE)[0].figures["dead_experts"] for t in range(60)]
    assert np.isnan(dead[:14]).all() and dead[14:] == [1.0] * 46  # 15 steps of 7 hold 100 copies


# ---- growth ----------------------------------------------------------------------------------------------


def test_a_collapse_is_called_one_before_experts_die_and_says_why():
    monitor, loads = CollapseMonitor(L, E, K), collapse_loads(steps=280)
    found = run(monitor, loads)
    for layer in range(L):
        states = [verdicts[layer].state for verdicts in found]
        assert not set(states[:150]) & set(GRAVE)
        began, dead = states.index("COLLAPSING"), states.index("COLLAPSED")
        assert 150 < began < dead - 50
        verdict = found[began][layer]
        assert (
            verdict.was not in GRAVE
            and verdict.since_step == began
            and "entropy" in " ".join(verdict.reasons)
        )
        assert found[began + 3][layer].since_step == began
    assert "experts dead over" in found[-1][0].reasons[0]


def test_a_change_of_domain_is_none_and_is_counted():
    rng, monitor = np.random.default_rng(7), CollapseMonitor(L, E, K)
    for block in range(5):
        share_LE = shares(rng)
        for verdicts in run(monitor, [noisy(rng, share_LE) for _ in range(200)], start=200 * block):
            assert not {v.state for v in verdicts} & set(GRAVE)
    assert all(3 <= v.figures["switches"] <= 5 for v in verdicts)


def test_an_even_layer_that_a_change_of_domain_makes_uneven_and_a_bias_levels_is_no_collapse():
    rng, monitor = np.random.default_rng(8), CollapseMonitor(L, E, K)
    profile_LE = np.zeros((L, E))
    for t in range(900):
        if t % 300 == 299:
            profile_LE = 0.5 * rng.standard_normal((L, E))
        soft_LE = np.exp(profile_LE)
        verdicts = monitor.update(t, noisy(rng, soft_LE / soft_LE.sum(axis=1, keepdims=True)))
        assert not {v.state for v in verdicts} & set(GRAVE), t
        profile_LE = 0.93 * profile_LE


def test_growth_that_ends_lets_the_alarm_go():
    rng, monitor = np.random.default_rng(9), CollapseMonitor(L, E, K)
    share_LE = shares(rng)
    loads = [noisy(rng, growing(share_LE, min(80, max(0, t - 150)))) for t in range(600)]
    found = run(monitor, loads)
    states = [verdicts[0].state for verdicts in found]
    assert "COLLAPSING" in states and states[-1] == "SKEWED"


def test_a_sudden_collapse_is_an_alarm_at_once():
    trace = collapse_trace(num_samples=12, num_layers=8)
    monitor = CollapseMonitor(8, 32, 2)
    for w, counts_LE in enumerate(trace.tokens_per_expert_WLE):
        grave = [v.state in GRAVE for v in monitor.update(int(trace.steps_W[w]), counts_LE)]
        assert not any(grave) if w == 0 else (w == 1 or all(grave))
        if w == 1:
            assert sum(grave) >= 6


def test_a_recorded_collapse_is_an_alarm_by_its_second_snapshot(traces_dir):
    trace = load_trace(traces_dir / "smartmoe.npz")
    counts_WLE, monitor = trace.tokens_per_expert_WLE, CollapseMonitor(24, 32, 2)
    assert not {v.state for v in monitor.update(1, counts_WLE[0])} & set(GRAVE)
    verdicts = monitor.update(11, counts_WLE[1])
    collapsed_L = normalized_entropy(counts_WLE[1]) < 0.75
    assert collapsed_L.sum() == 24
    assert all(verdicts[layer].state in GRAVE for layer in np.flatnonzero(collapsed_L))
    assert isinstance(verdicts[0], Verdict) and len(monitor.alarms()) == 24
