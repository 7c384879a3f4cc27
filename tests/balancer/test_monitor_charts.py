"""The charts' limits give the run length that is asked for, and what the charts take for growth."""

import numpy as np
import pytest

from balancer.monitor_charts import (
    SLACKS,
    chart_limit,
    chart_limits,
    init_charts,
    run_length,
    start_charts,
    update_charts,
)
from balancer.monitor_config import MonitorConfig


@pytest.mark.parametrize(("slack", "limit"), [(0.5, 18.35), (1.0, 9.29), (2.0, 4.41)])
def test_the_limits_of_the_design_give_six_hundred_million_samples(slack, limit):
    assert run_length(slack, limit) == pytest.approx(6e8, rel=0.05)  # limits are given to 2 places
    assert chart_limit(slack, 6e8) == pytest.approx(limit, abs=0.006)


@pytest.mark.parametrize("slack", SLACKS)
def test_limit_and_run_length_are_inverse(slack):
    for samples in (100.0, 1e4, 1e9):
        assert run_length(slack, chart_limit(slack, samples)) == pytest.approx(samples, rel=1e-9)


@pytest.mark.parametrize(("slack", "limit"), [(0.5, 4.0), (1.0, 2.0)])
def test_the_run_length_is_that_of_a_simulated_chart(slack, limit):
    chains, steps = 4000, 4000
    rng, chart_N, alive_N = np.random.default_rng(0), np.zeros(chains), np.ones(chains, dtype=bool)
    length_N = np.full(chains, steps)
    for t in range(steps):
        chart_N = np.maximum(0.0, chart_N + rng.standard_normal(chains) - slack)
        crossed_N = alive_N & (chart_N >= limit)
        length_N[crossed_N], alive_N = t + 1, alive_N & ~crossed_N
    assert alive_N.mean() < 1e-3  # all but cut off
    # the formula is good to 7 %; 4,000 chains to 1.6 %
    assert length_N.mean() == pytest.approx(run_length(slack, limit), rel=0.1)


def test_charts_in_parallel_have_the_same_run_length_in_all():
    alone, three = chart_limit(0.5, 1e6), chart_limit(0.5, 1e6, 3)
    assert three - alone == pytest.approx(np.log(3.0))
    limits = chart_limits(MonitorConfig(false_alarm_samples=1e6))
    assert limits.limit_C1[0, 0] == pytest.approx(three)


@pytest.mark.parametrize(("slack", "samples"), [(0.0, 1e6), (0.5, 1.0), (0.5, float("inf"))])
def test_a_limit_that_cannot_be_is_refused(slack, samples):
    with pytest.raises(ValueError, match="samples"):
        chart_limit(slack, samples)
    with pytest.raises(ValueError, match="must be above 0"):
        run_length(-1.0, 4.0)


def autocorrelated(layers: int, steps: int, seed: int) -> np.ndarray:
    """y [steps, layers]: AR(.9) around -1 with innovations of .1."""
    rng = np.random.default_rng(seed)
    dev_TL = np.zeros((steps, layers))
    dev_TL[0] = 0.1 / np.sqrt(1 - 0.9**2) * rng.standard_normal(layers)
    for t in range(1, steps):
        dev_TL[t] = 0.9 * dev_TL[t - 1] + 0.1 * rng.standard_normal(layers)
    return dev_TL - 1.0


def test_what_is_only_autocorrelated_is_whitened_before_it_is_charted():
    y_TL, layers = autocorrelated(100, 2000, 3), 100
    config, never = MonitorConfig(), np.zeros(100, dtype=bool)
    limits, state = chart_limits(config), init_charts(layers)
    start_charts(y_TL[0], np.full(layers, -9.0), np.full(layers, 0.1), never, state)
    for t, y_L in enumerate(y_TL):
        state = update_charts(
            t, y_L, np.full(layers, 0.1), np.full(layers, 0.1), 0.1, never, never, limits, config, state
        )
    assert state.rises_L.sum() <= 2  # 200,000 samples at one false sign in 6e8 and what learning adds
    np.testing.assert_allclose(state.noise_L.mean(), 0.01, rtol=0.15)


class Charts:
    """Charts of some layers in their samples, with white noise of sd .1 around -1 behind them."""

    def __init__(self, layers=1, quiet=300):
        self.config, self.never = MonitorConfig(), np.zeros(layers, dtype=bool)
        self.limits, self.state = chart_limits(self.config), init_charts(layers)
        noise_TL = 0.1 * np.random.default_rng(4).standard_normal((quiet, layers))
        start_charts(
            np.full(layers, -1.0), np.full(layers, -9.0), np.full(layers, 0.1), self.never, self.state
        )
        for y_L in noise_TL - 1.0:
            self.see(y_L)
        assert self.state.rises_L.sum() == 0

    def see(self, y_L, change=0.1):
        layers = len(self.never)
        self.state = update_charts(
            int(self.state.seen_L[0]), np.asarray(y_L, dtype=float), np.full(layers, change),
            np.full(layers, 0.1), 0.1, self.never, self.never, self.limits, self.config, self.state,
        )  # fmt: skip


def test_the_fast_chart_alone_takes_a_wild_sample_for_what_it_is():
    charts = Charts()
    charts.see([-0.7])  # 3 sd
    assert charts.state.rises_L[0] == 0 and charts.state.charts_CL[2, 0] < 2.0
    charts.see([0.0])  # 10 sd: more than its limit at once, and clipped to 4 no chart would cross
    assert charts.state.rises_L[0] == 1 and charts.state.watch_L[0] == charts.config.watch_samples


def test_the_other_charts_clip_a_wild_sample():
    charts = Charts()
    charts.limits = charts.limits._replace(limit_C1=np.array([[18.0], [9.0], [1e9]]))
    before_C = charts.state.charts_CL[:, 0]
    charts.see([2.0])  # 30 sd
    rise_C = charts.state.charts_CL[:, 0] - before_C
    assert charts.state.rises_L[0] == 0 and (rise_C[:2] < 4.0).all() and rise_C[2] > 20.0


@pytest.mark.parametrize("part", [0.0, 0.45, 0.6, 0.9])
def test_the_baseline_is_frozen_while_a_chart_is_half_full(part):
    charts = Charts()
    state = charts.state
    charts.state = state._replace(charts_CL=part * charts.limits.limit_C1)
    # what makes up for the slack, so that the charts stay where they are
    charts.see(state.mean_L + 0.1 * (0.5 + 1.5 / np.sqrt(state.age_L)))
    after, frozen = charts.state, part > 0.5
    assert (after.mean_L[0] == state.mean_L[0]) == frozen
    assert (after.var_L[0] == state.var_L[0]) == frozen
    assert after.age_L[0] - state.age_L[0] == (not frozen)


def test_the_baseline_is_frozen_while_an_alarm_is_on_and_in_a_jump():
    charts = Charts()
    before = charts.state
    charts.state = before._replace(
        growing_L=np.ones(1), peak_L=before.level_L + 9.0, from_L=before.level_L - 9.0
    )
    charts.see(before.mean_L + 0.05)
    assert charts.state.growing_L[0] == 1 and charts.state.mean_L[0] == before.mean_L[0]
    charts.state = before._replace(quiet_L=np.zeros(1))  # the second leap of a jump
    charts.see(before.mean_L + 0.05, change=0.9)
    assert charts.state.switches_L[0] == 0 and charts.state.mean_L[0] == before.mean_L[0]


def test_growth_that_the_baseline_follows_is_an_alarm_by_its_blocks_alone():
    charts, began = Charts(quiet=0), -1
    for t in range(1200):  # .21 in a watch of 150 samples, which asks for .25
        charts.see([-1.0 + 0.0014 * t])
        if charts.state.growing_L[0] and began < 0:
            began = t
    assert began == 499  # five blocks
