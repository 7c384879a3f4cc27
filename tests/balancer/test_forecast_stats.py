"""Forecasters that statsmodels fits: equal to statsmodels itself, honest about what could not be fitted."""

import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from balancer.forecast_identify import identify, steady_gain
from balancer.forecast_record import copy_state
from balancer.forecast_stats import (
    ARIMA_ORDERS,
    COMPONENTS,
    arima,
    damped_trend_model,
    ets,
    fit_series,
    stats_forecasters,
    unobserved,
)
from balancer.forecast_stats_fit import horizon_samples
from balancer.forecast_stats_models import (
    filter_models,
    last_value_fit,
    predict_models,
    shares_of_roots,
    stack_fits,
)
from balancer.metrics import load_shares
from balancer.synth import collapse_trace
from balancer.trace import load_trace
from balancer.workers import map_in_processes

HORIZONS = (10, 30, 100)
MAKERS = {"ets": ets, "arima": arima, "unobserved": unobserved}
STATE_SPACE = [*(("arima", order) for order in ARIMA_ORDERS), *(("unobserved", (one,)) for one in COMPONENTS)]


def local_level(num: int, q: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    level = np.cumsum(math.sqrt(q) * rng.standard_normal(num))
    return level + rng.standard_normal(num)


def run(maker, counts_WLE, *, start=None, first_step=1, horizons=HORIZONS, **options):
    """Return (forecaster, state) after all samples, one every 10 steps."""
    runner = maker(**options)
    state = start if start is not None else runner.init(*np.shape(counts_WLE)[1:], horizons)
    for w, counts_LE in enumerate(counts_WLE):
        state = runner.update(first_step + 10 * w, counts_LE, state)
    return runner, state


# ---- equal to statsmodels -----------------------------------------------------------------------------


def scaled(values_W, num_fitted):
    """The series as fits see it: about 0, steps of size 1."""
    fitted = values_W[:num_fitted]
    shift, scale = fitted.mean(), np.sqrt((np.diff(fitted) ** 2).mean())
    return (values_W - shift) / scale, shift, scale


def build(spec, scaled_W):
    """The same model, straight from statsmodels."""
    from statsmodels.tsa.statespace.sarimax import SARIMAX
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    kind, order = spec
    if kind == "arima":
        return SARIMAX(scaled_W, order=order, loglikelihood_burn=2, concentrate_scale=True)
    if order == ("level",):
        return UnobservedComponents(scaled_W, level="llevel", loglikelihood_burn=2)
    if order == ("ar1",):
        return UnobservedComponents(scaled_W, level="irregular", autoregressive=1, loglikelihood_burn=2)
    return damped_trend_model(scaled_W)


def filtered_forward(values_W, num_fitted, spec, samples):
    """Mean and variance from this project: fitted on the first values, filtered over the others."""
    models = stack_fits([fit_series(values_W[:num_fitted], [spec])])
    for value in values_W[num_fitted:]:
        models = filter_models(np.array([value]), models)
    mean, var = predict_models(models, np.array(samples))
    return mean[:, 0], var[:, 0]


@pytest.mark.parametrize("spec", STATE_SPACE, ids=str)
def test_a_state_space_fit_filtered_forward_forecasts_what_statsmodels_does(spec):
    values = 0.3 + 0.01 * local_level(75, 0.3, seed=3)
    mean, var = filtered_forward(values, 60, spec, (1, 3, 12))
    scaled_W, shift, scale = scaled(values, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = build(spec, scaled_W[:60]).fit(disp=0, cov_type="none", maxiter=100)
        ahead = build(spec, scaled_W).filter(result.params, cov_type="none")
        forecast = ahead.get_forecast(12)
    rows = np.array([0, 2, 11])
    # both are sums of the same products in another order
    np.testing.assert_allclose(mean, shift + scale * forecast.predicted_mean[rows], rtol=1e-9)
    # where statsmodels solves for the error variance it takes that of the series at hand, the longer one; the
    # filter that of its fit
    same = result.scale / ahead.scale
    np.testing.assert_allclose(var, scale**2 * same * forecast.var_pred_mean[rows], rtol=1e-6)


def test_a_sample_that_was_not_observed_is_bridged_as_statsmodels_does():
    values, spec = 0.3 + 0.01 * local_level(75, 0.3, seed=3), ("unobserved", ("ar1",))
    values[[61, 70, 74]] = np.nan
    mean, var = filtered_forward(values, 60, spec, (1, 4))
    scaled_W, shift, scale = scaled(values, 60)
    result = build(spec, scaled_W[:60]).fit(disp=0, cov_type="none", maxiter=100)
    forecast = build(spec, scaled_W).filter(result.params, cov_type="none").get_forecast(4)
    np.testing.assert_allclose(mean, shift + scale * forecast.predicted_mean[[0, 3]], rtol=1e-9)
    np.testing.assert_allclose(var, scale**2 * forecast.var_pred_mean[[0, 3]], rtol=1e-6)


def test_far_predictions_are_those_of_one_sample_at_a_time_and_cost_nothing():
    specs = [("unobserved", ("damped trend",)), ("unobserved", ("ar1",)), ("arima", (1, 1, 1))]
    series = 0.3 + 0.01 * local_level(60, 0.3, seed=3)
    models = stack_fits([fit_series(series, [spec]) for spec in specs])
    slow, later = [], models
    for _ in range(300):
        mean, var = predict_models(later, np.array([1]))
        slow.append((mean[0], var[0]))
        later = filter_models(np.full(3, np.nan), later)
    ahead = np.array([1, 2, 2, 7, 64, 300])
    mean, var = predict_models(models, ahead)
    # the same products in another order
    np.testing.assert_allclose(mean, [slow[n - 1][0] for n in ahead], rtol=1e-11)
    np.testing.assert_allclose(var, [slow[n - 1][1] for n in ahead], rtol=1e-9)


def test_a_random_walk_ten_million_samples_ahead_is_predicted_at_once():
    models = stack_fits([last_value_fit(0.5, "none", 1e-6)])
    mean, var = predict_models(models, np.array([1, 10**7, 2**62]))
    assert mean.tolist() == [[0.5]] * 3
    np.testing.assert_allclose(var[:, 0], [1e-6, 10.0, 2.0**62 * 1e-6], rtol=1e-9)
    counts = collapse_trace(num_samples=4, num_layers=1, num_experts=3, copies=900).tokens_per_expert_WLE
    runner, state = run(ets, counts, horizons=(10, 10**8))
    forecast = runner.forecast(state)
    np.testing.assert_allclose(forecast.mean_HLE.sum(axis=-1), 1, rtol=1e-12)
    assert np.isfinite(forecast.std_HLE).all()


@pytest.mark.parametrize(
    ("spec", "num_params"),
    [
        (("unobserved", ("level",)), 2),
        (("unobserved", ("ar1",)), 4),  # two variances, a coefficient, the mean
        (("arima", (1, 1, 1)), 3),
        (("arima", (2, 0, 1)), 5),
    ],
    ids=str,
)
def test_aicc_counts_the_parameters_and_the_observations_of_the_likelihood(spec, num_params):
    values = 0.3 + 0.01 * local_level(40, 0.3, seed=3)
    fit = fit_series(values, [spec])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = build(spec, scaled(values, 40)[0]).fit(disp=0, cov_type="none", maxiter=100)
    penalty = 2 * num_params + 2 * num_params * (num_params + 1) / (38 - num_params - 1)
    assert fit.aicc == pytest.approx(-2 * result.llf + penalty, rel=1e-12)


@pytest.mark.parametrize("order", ["none", "damped"])
def test_exponential_smoothing_filtered_forward_forecasts_what_statsmodels_does(order):
    import pandas as pd
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    values = 0.3 + 0.01 * (local_level(75, 0.3, seed=5) + 0.2 * np.arange(75))
    mean, var = filtered_forward(values, 60, ("ets", (order,)), (1, 3, 12))
    scaled_W, shift, scale = scaled(values, 60)
    damped = order == "damped"

    def model(series):
        return ETSModel(series, error="add", trend="add" if damped else None, damped_trend=damped)

    result = model(scaled_W[:60]).fit(disp=0, maxiter=100)
    rows = np.array([0, 2, 11])
    ahead = model(scaled_W).smooth(result.params)
    np.testing.assert_allclose(mean, shift + scale * ahead.forecast(12)[rows], rtol=1e-9)
    same = result.scale / ahead.scale  # as above
    labelled = model(pd.Series(scaled_W)).smooth(result.params)  # statsmodels' variance wants labels
    forecast = np.asarray(labelled.get_prediction(start=75, end=86).forecast_variance)
    np.testing.assert_allclose(var, scale**2 * same * forecast[rows], rtol=1e-6)


def test_a_forecast_is_statsmodels_own_squared_with_its_counting_noise_and_normalised():
    first_W = np.round(10_000 * (0.3 + 0.01 * local_level(40, 0.5, seed=0)))
    counts_WLE = np.stack([first_W, 10_000 - first_W], axis=-1)[:, None]
    _, state = run(unobserved, counts_WLE.astype(int), components=["level"])  # fitted at 10, 20, 40
    got = unobserved(components=["level"]).forecast(state)
    root, var = [], []
    for expert in range(2):
        scaled_W, shift, scale = scaled(np.sqrt(counts_WLE[:, 0, expert] / 10_000), 40)
        result = build(("unobserved", ("level",)), scaled_W).fit(disp=0, cov_type="none", maxiter=100)
        forecast = result.get_forecast(10)
        root.append((shift + scale * forecast.predicted_mean)[[0, 2, 9]])
        var.append((scale**2 * forecast.var_pred_mean)[[0, 2, 9]])
    raw = np.array(root) ** 2 + (1 - np.array(root) ** 2) / 40_000
    np.testing.assert_allclose(got.mean_HLE[:, 0], (raw / raw.sum(axis=0)).T, rtol=1e-6)
    spread = np.sqrt(4 * np.array(root) ** 2 * np.array(var) + 2 * np.array(var) ** 2) / raw.sum(axis=0)
    np.testing.assert_allclose(got.std_HLE[:, 0], spread.T, rtol=1e-6)


def test_mean_and_spread_of_a_noisy_share_are_those_of_counting():
    rng = np.random.default_rng(1)
    p, copies, draws = np.array([0.6, 0.3, 0.1]), 200, 100_000
    shares = rng.multinomial(copies, p, size=draws) / copies
    roots = np.sqrt(shares)
    mean, std = shares_of_roots(
        roots.mean(axis=0)[None, None],
        roots.var(axis=0)[None, None],
        np.ones((1, 3), dtype=bool),
        p[None],
        np.array([copies]),
    )
    # (1 - p) / 4N is the first term of the variance: the next is smaller by 1 / (N p), 5 % at worst; of the
    # correction of p = .1 by .0011 that is .00006
    np.testing.assert_allclose(mean[0, 0], shares.mean(axis=0), atol=6e-5)
    assert abs((roots.mean(axis=0) ** 2 - p)[2]) > 5e-4  # what no correction would miss
    np.testing.assert_allclose(std[0, 0], shares.std(axis=0), rtol=0.02)


# ---- what every forecaster must keep ------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_forecasts_are_shares_and_a_permutation_of_experts_permutes_them(name):
    counts = collapse_trace(num_samples=24, num_layers=2, num_experts=4, copies=8000).tokens_per_expert_WLE
    order = np.array([2, 0, 3, 1])
    runner, state = run(MAKERS[name], counts)
    _, turned = run(MAKERS[name], counts[:, :, order])
    one, other = runner.forecast(state), runner.forecast(turned)
    assert int(state.fitted_at) == 20 and one.step == 231
    assert one.mean_HLE.shape == (3, 2, 4) and (one.mean_HLE >= 0).all()
    np.testing.assert_allclose(one.mean_HLE.sum(axis=-1), 1, rtol=1e-12)
    assert (one.std_HLE > 0).all() and (np.diff(one.std_HLE.mean(axis=(1, 2))) > 0).all()
    np.testing.assert_allclose(one.mean_HLE[:, :, order], other.mean_HLE, rtol=1e-12)
    np.testing.assert_allclose(one.std_HLE[:, :, order], other.std_HLE, rtol=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_what_comes_later_changes_no_forecast_and_a_copy_of_the_state_goes_its_own_way(name):
    counts = collapse_trace(num_samples=22, num_layers=1, num_experts=3, copies=900).tokens_per_expert_WLE
    runner, state = run(MAKERS[name], counts[:18])
    before, kept = runner.forecast(state), copy_state(state)
    _, spoilt = run(MAKERS[name], counts[18:, :, ::-1], start=state, first_step=181)
    _, honest = run(MAKERS[name], counts[18:], start=copy_state(kept), first_step=181)
    np.testing.assert_array_equal(runner.forecast(kept).mean_HLE, before.mean_HLE)
    np.testing.assert_array_equal(runner.forecast(kept).std_HLE, before.std_HLE)
    _, whole = run(MAKERS[name], counts)
    np.testing.assert_array_equal(runner.forecast(honest).mean_HLE, runner.forecast(whole).mean_HLE)
    assert (runner.forecast(spoilt).mean_HLE != runner.forecast(whole).mean_HLE).any()


@pytest.mark.parametrize("name", MAKERS)
def test_a_constant_load_is_forecast_exactly_without_warning_and_a_change_of_it_is_followed(name):
    counts = np.tile(np.array([[30, 10, 0], [0, 0, 7]]), (25, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner, state = run(MAKERS[name], counts)
        forecast = runner.forecast(state)
    np.testing.assert_allclose(forecast.mean_HLE, np.tile(load_shares(counts[0]), (3, 1, 1)), rtol=1e-14)
    # a share of mean 0 or 1 can have no spread
    assert (forecast.std_HLE[:, 1] == 0).all() and (forecast.std_HLE[:, 0, :2] > 0).all()
    assert int(state.failed) == int(state.not_converged) == 0
    state = runner.update(251, [[10, 10, 20], [0, 0, 7]], state)
    np.testing.assert_allclose(runner.forecast(state).mean_HLE[:, 0], [[0.25, 0.25, 0.5]] * 3, rtol=1e-12)


def test_layers_without_load_stay_uniform_and_gaps_are_bridged_without_a_warning():
    rng = np.random.default_rng(2)
    counts = rng.multinomial(500, [0.5, 0.3, 0.2], size=(30, 3))
    counts[:, 0] = 0  # never loaded
    counts[[4, 13, 29], 1] = 0  # now and then
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner, state = run(ets, counts)
        forecast = runner.forecast(state)
    np.testing.assert_allclose(forecast.mean_HLE[:, 0], 1 / 3, rtol=1e-14)
    np.testing.assert_allclose(forecast.std_HLE[:, 0], math.sqrt(2) / 3, rtol=1e-12)
    # a sampling standard deviation of one sample is .022
    np.testing.assert_allclose(forecast.mean_HLE[:, 1:], np.tile([0.5, 0.3, 0.2], (3, 2, 1)), atol=0.066)


@pytest.mark.parametrize("name", MAKERS)
def test_a_single_expert_has_everything_with_certainty(name):
    runner, state = run(MAKERS[name], np.arange(1, 26)[:, None, None])
    forecast = runner.forecast(state)
    assert (forecast.mean_HLE == 1).all() and (forecast.std_HLE == 0).all()


def test_a_short_window_says_the_last_share_with_a_wide_spread():
    counts = np.array([[[60, 40, 0]], [[50, 25, 25]], [[45, 30, 25]]])
    runner, state = run(ets, counts[:1])
    first = runner.forecast(state)
    np.testing.assert_allclose(first.mean_HLE, [[[0.6, 0.4, 0.0]]] * 3, rtol=1e-14)
    np.testing.assert_allclose(first.std_HLE[0, 0], [math.sqrt(0.24), math.sqrt(0.24), 0])  # the widest
    _, state = run(ets, counts)
    forecast = runner.forecast(state)
    np.testing.assert_allclose(forecast.mean_HLE, [[[0.45, 0.3, 0.25]]] * 3, rtol=1e-14)
    assert int(state.fitted_at) == 0
    # steps of roots: (.068, .036), (.132, .048), (.5, 0); the mean square of the layer is .046, so the first,
    # which moves less, is given a spread of 2 root sqrt(.046) = .29 and more
    np.testing.assert_allclose(forecast.std_HLE[0, 0, 0], 0.29, atol=0.02)
    # ten such steps could lead anywhere
    np.testing.assert_allclose(forecast.std_HLE[2, 0], np.sqrt([0.45 * 0.55, 0.3 * 0.7, 0.25 * 0.75]))


def test_horizons_in_steps_become_samples_rounded_up():
    runner = ets()
    state = runner.init(1, 2, (10, 15, 100))
    assert horizon_samples(state).tolist() == [10, 15, 100]
    for step in (1, 11, 21):
        state = runner.update(step, [[1, 1]], state)
    assert horizon_samples(state).tolist() == [1, 2, 10]


def test_refits_come_early_when_history_doubles_and_then_at_their_interval():
    counts = np.random.default_rng(0).multinomial(100, [0.5, 0.5], size=(70, 1))
    fitted, done = [], []
    runner = ets(window=20, refit_every=25, progress=lambda *numbers: done.append(numbers))
    state = runner.init(1, 2, (10,))
    for w, row in enumerate(counts):
        state = runner.update(w, row, state)
        fitted.append(int(state.fitted_at))
    assert sorted(set(fitted)) == [0, 10, 20, 40, 65]
    assert done == [(1, 2), (2, 2)] * 4


def test_a_window_that_went_round_is_fitted_in_the_order_of_time():
    values = 500 + 10 * np.arange(40)  # only in order is this a line of steps of 10
    counts = np.stack([values, 1000 - values], axis=-1)[:, None]
    _, state = run(arima, counts, orders=[(0, 1, 1)], window=12, refit_every=1)
    fit = fit_series(np.sqrt(counts[-12:, 0, 0] / 1000), [("arima", (0, 1, 1))])
    assert state.models.shift_N[0] == pytest.approx(fit.shift, rel=1e-14)
    assert state.models.scale_N[0] == pytest.approx(fit.scale, rel=1e-12)


def test_warnings_and_failures_of_fits_are_counted_and_not_shown():
    counts = np.stack([np.arange(100, 124) ** 2, np.full(24, 10_000)], axis=-1)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = run(arima, counts)
        assert int(state.warnings) > 0
        # 12 parameters from 8 errors: no AICc
        runner, state = run(arima, counts[:10], orders=[(5, 0, 5)])
    assert int(state.failed) == 2
    np.testing.assert_allclose(runner.forecast(state).mean_HLE[0, 0], load_shares(counts[9])[0], rtol=1e-12)


# ---- identification -----------------------------------------------------------------------------------


def counts_of_roots(roots_LW) -> np.ndarray:
    """[W, L, 2] counts whose first expert has the given root shares."""
    first = np.round(1e9 * np.asarray(roots_LW).T ** 2).astype(np.int64)
    return np.stack([first, 10**9 - first], axis=-1)


def test_identify_recovers_signal_to_noise_gain_and_autocorrelation_of_local_levels():
    q, layers, samples = 0.25, 8, 250
    roots = [0.6 + 0.001 * local_level(samples, q, seed=layer) for layer in range(layers)]
    done = []
    found = identify(
        counts_of_roots(roots),
        10 * np.arange(samples),
        series=[(layer, 0) for layer in range(layers)],
        workers=1,
        progress=lambda *numbers: done.append(numbers),
    )
    assert done == [(i + 1, layers) for i in range(layers)] and found.interval_steps == 10

    def deviation(estimates, truth):
        return abs(np.mean(estimates) - truth) / (np.std(estimates, ddof=1) / math.sqrt(layers))

    # means of eight estimates, within three of their standard errors
    assert deviation(np.log(found.signal_to_noise_N), math.log(q)) < 3
    assert deviation(found.ar1_N, -1 / (2 + q)) < 3
    assert found.quartiles()["gain"][1] == pytest.approx(float(steady_gain(q)), abs=0.08)
    # the same model under two names: a local level is an ARIMA(0,1,1)
    level, ima = (found.aicc_NC[:, found.models.index(one)] for one in ("unobserved level", "arima 0,1,1"))
    np.testing.assert_allclose(level, ima, atol=0.01)
    np.testing.assert_allclose(found.gain_N, steady_gain(found.signal_to_noise_N), rtol=1e-14)
    assert np.isfinite(found.aicc_NC).all() and set(found.order_N) <= set(found.models)
    assert (found.ljung_box_p_N > 0.001).all() and found.not_converged == ()


def test_identify_takes_the_heaviest_of_each_layer_and_counts_series_that_never_vary():
    rng = np.random.default_rng(4)
    counts = np.zeros((40, 2, 4), dtype=np.int64)
    counts[:, 0, [3, 1]] = rng.multinomial(1000, [0.7, 0.3], size=40)
    counts[:, 1, 0] = 1000  # alone: constant
    found = identify(counts, series=2, workers=1)
    assert list(zip(found.layer_N.tolist(), found.expert_N.tolist())) == [(0, 3), (0, 1)]
    assert found.num_constant == 2
    # two experts that share all: root shares on a circle, one filter
    assert found.quartiles(0)["gain"][0] == pytest.approx(found.gain_N.min(), abs=0.3)
    assert np.isnan(found.quartiles(1)["gain"]).all()
    nothing = identify(counts[:, 1:], series=None, workers=2)
    assert nothing.num_constant == 4 and nothing.order_N == () and nothing.aicc_NC.shape == (0, 6)


@pytest.mark.parametrize("q", [0.01, 0.5, 40.0])
def test_the_gain_is_where_the_filter_of_a_local_level_settles(q):
    fit = last_value_fit(0.0, "level", q)._replace(obs_var=1.0)
    models = stack_fits([fit])
    for _ in range(400):
        models = filter_models(np.zeros(1), models)
    predicted = float(models.state_var_NMM[0, 0, 0])
    assert float(steady_gain(q)) == pytest.approx(predicted / (predicted + 1), rel=1e-10)
    assert float(steady_gain(q)) == pytest.approx((-q + math.sqrt(q * q + 4 * q)) / 2, rel=1e-12)


def test_the_gain_of_no_signal_and_of_no_noise():
    assert steady_gain([0.0, math.inf]).tolist() == [0.0, 1.0] and np.isnan(steady_gain(math.nan))


# ---- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ets(window=9), r"window=9 samples are too few to fit a model; use 10 or more"),
        (lambda: ets(refit_every=0), r"refit_every=0 samples must be at least 1"),
        (lambda: arima(workers=0), r"workers=0 processes must be at least 1"),
        (lambda: arima(orders=[(0, 2, 1)]), r"order=\(0, 2, 1\) must be \(p, d, q\)"),
        (lambda: arima(orders=[]), r"orders=\[\] names no order"),
        (lambda: unobserved(components=["trend"]), r"component 'trend' is unknown; use some of level"),
        (lambda: unobserved(components=[]), r"components=\[\] names none"),
        (lambda: ets().init(1, 2, (100, 10)), r"horizons=\(100, 10\) must be 1 .* and increase"),
        (lambda: ets().update(1, [[1]], ets().init(1, 2, (1,))), r"expected counts \[L, E\] = \(1, 2\)"),
        (lambda: identify(np.ones((9, 1, 2), dtype=int)), r"9 samples tell no model from another"),
        (lambda: identify(np.ones((10, 1, 2), dtype=int), series=0), r"series=0 experts of each layer"),
        (lambda: identify(np.ones((10, 1, 2), dtype=int), series=[(1, 0)]), r"\(layer, expert\) = \(1, 0\)"),
        (lambda: identify(np.ones((10, 1, 2))), r"counts are float64 .* must be integers"),
        (lambda: steady_gain(-1), r"signal_to_noise=-1.0 is a ratio of variances"),
    ],
)
def test_errors_name_thing_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_step_that_goes_back_is_refused_and_leaves_the_state_usable():
    runner, state = run(ets, [[[1, 3]], [[2, 2]]])
    before = copy_state(state)
    with pytest.raises(ValueError, match="step=11 must be more than that of the last sample, 11"):
        runner.update(11, [[0, 4]], state)
    np.testing.assert_array_equal(state.roots_WLE, before.roots_WLE)


def test_the_three_are_offered_by_name():
    assert list(stats_forecasters()) == ["ets", "arima", "unobserved"]


# ---- processes and the real trace ---------------------------------------------------------------------


def twice_or_error(number: int) -> int:
    if number < 0:
        raise ValueError(f"number={number}")
    return 2 * number


def test_an_error_of_an_item_is_raised_in_this_process():
    with pytest.raises(ValueError, match="number=-1"):
        map_in_processes(twice_or_error, [1, -1, 2], 1, None)


@pytest.mark.slow
def test_several_processes_find_what_one_does():
    counts = collapse_trace(num_samples=40, num_layers=2, num_experts=4).tokens_per_expert_WLE
    _, one = run(unobserved, counts)
    done = []
    _, two = run(unobserved, counts, workers=2, progress=lambda *numbers: done.append(numbers))
    assert done == [(i + 1, 8) for i in range(8)] * 3
    for name, array in one.models._asdict().items():
        np.testing.assert_array_equal(array, getattr(two.models, name))


INTERRUPTED = """
import numpy as np
from balancer.forecast_identify import identify
from balancer.synth import collapse_trace

if __name__ == "__main__":
    trace = collapse_trace(num_samples=300, num_layers=24, num_experts=32)
    identify(trace, series=None, workers=2, progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(tmp_path):
    import psutil

    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert run.stdout is not None and run.stdout.readline().strip() == b"1"
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = run.communicate(timeout=20)
    assert run.returncode != 0 and errors.count(b"KeyboardInterrupt") == 1
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


@pytest.mark.slow
def test_the_real_trace_wants_a_high_gain_in_the_collapse_and_a_low_one_once_settled(traces_dir):
    trace = load_trace(traces_dir / "smartmoe.npz")
    counts, steps = trace.tokens_per_expert_WLE, trace.steps_W
    series = [(layer, int(counts[:, layer].sum(axis=0).argmax())) for layer in range(0, 24, 3)]
    collapse, middle, late = (
        identify(counts[part], steps[part], series=series, workers=1).quartiles()["gain"][1]
        for part in (slice(0, 41), slice(41, 251), slice(251, 501))
    )
    # measured over the eight heaviest experts of all layers: 1, .35, .11
    assert collapse > 0.7 > 0.6 > middle > 0.2 > late
