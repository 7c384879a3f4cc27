"""Forecasters that statsmodels fits to every series: comparators, too slow for every step.

Beside `balancer/forecast.py`, whose filters cost microseconds: here each series of square-root shares gets a
model of its own by maximum likelihood, chosen by AICc among a few (`ets`, `arima`, `unobserved`), every so
many samples; `balancer/forecast_stats_fit.py` filters the fits in between, and
`balancer/forecast_identify.py` asks them what a good filter would be.

statsmodels is imported on use (two seconds). Its warnings are counted, not printed.
"""

import functools
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.forecast_record import Forecaster
from balancer.forecast_stats_fit import MIN_SAMPLES, Fit, fitted_forecaster, last_value_fit
from balancer.workers import Progress, check_workers, map_in_processes

# (kind, order): a model that can be fitted to a series
Spec = tuple[str, tuple[Any, ...]]

ETS_SPECS: tuple[Spec, ...] = (("ets", ("none",)), ("ets", ("damped",)))
COMPONENTS = ("level", "damped trend", "ar1")
ARIMA_ORDERS = ((0, 1, 1), (1, 1, 1), (2, 0, 1))
# The likelihood leaves the first two observations out for every state-space model, whether or not it starts
# from a diffuse state: without it the AICc of different orders would be those of different data.
_BURN = 2
_MAX_ITERATIONS = 100
# a damping of 1 is a straight line for ever, which is what makes trends harmful; statsmodels' own ETS bound
_MAX_DAMPING = 0.98
# autocorrelations that the Ljung-Box test looks at, fewer for a short series
_LJUNG_BOX_LAGS = 10


# ---- forecasters --------------------------------------------------------------------------------------


def ets(
    *, window: int = 200, refit_every: int = 50, workers: int = 1, progress: Progress | None = None
) -> Forecaster:
    """Return exponential smoothing (additive error; no trend, or a damped one) of every series.

    window: samples that a fit sees: 200, long enough to tell a gain of .3 from .4. refit_every: samples
    between refits: 50. workers: processes that fit; more than 1 pays when a refit takes over five seconds
    (ten ms a series here), and needs a script's `if __name__ == "__main__":` guard. progress(done, total) is
    called after each series of a refit. Raises ValueError for a bound that is broken.
    """
    return _forecaster(ETS_SPECS, window, refit_every, workers, progress)


def arima(
    *,
    orders: Sequence[tuple[int, int, int]] = ARIMA_ORDERS,
    window: int = 200,
    refit_every: int = 50,
    workers: int = 1,
    progress: Progress | None = None,
) -> Forecaster:
    """Return ARIMA(p, d, q) of every series; about 40 ms a series and refit for the default orders.

    orders: those that compete by AICc; p and q up to 5, d 0 or 1. The others as in `ets`. Raises ValueError
    for a bound that is broken.
    """
    specs: list[Spec] = []
    for order in orders:
        p, d, q = order
        if not (0 <= p <= 5 and 0 <= d <= 1 and 0 <= q <= 5):
            raise ValueError(f"order={order} must be (p, d, q) with p and q in 0..5 and d 0 or 1: (0, 1, 1)")
        specs.append(("arima", (p, d, q)))
    if not specs:
        raise ValueError(f"orders={orders!r} names no order; give one or more: [(0, 1, 1)]")
    return _forecaster(tuple(specs), window, refit_every, workers, progress)


def unobserved(
    *,
    components: Sequence[str] = COMPONENTS,
    window: int = 200,
    refit_every: int = 50,
    workers: int = 1,
    progress: Progress | None = None,
) -> Forecaster:
    """Return unobserved components of every series, with measurement noise; about 50 ms a series and refit.

    components: those that compete by AICc: "level", "damped trend" (a level with one), "ar1" (about the mean
    of the window). The others as in `ets`. Raises ValueError for an unknown component or a broken bound.
    """
    for component in components:
        if component not in COMPONENTS:
            raise ValueError(f"component {component!r} is unknown; use some of {', '.join(COMPONENTS)}")
    if not components:
        raise ValueError(f"components={components!r} names none; use some of {', '.join(COMPONENTS)}")
    specs = tuple(("unobserved", (component,)) for component in components)
    return _forecaster(specs, window, refit_every, workers, progress)


def stats_forecasters(*, workers: int = 1, progress: Progress | None = None) -> dict[str, Forecaster]:
    """Return the three forecasters of this file with their defaults, by name."""
    return {
        "ets": ets(workers=workers, progress=progress),
        "arima": arima(workers=workers, progress=progress),
        "unobserved": unobserved(workers=workers, progress=progress),
    }


def _forecaster(
    specs: tuple[Spec, ...], window: int, refit_every: int, workers: int, progress: Progress | None
) -> Forecaster:
    check_workers(workers)
    fit_one = functools.partial(fit_series, specs=specs)

    def fit_all(series: list[NDArray[np.float64]]) -> list[Fit]:
        return map_in_processes(fit_one, series, workers, progress)

    return fitted_forecaster(fit_all, window=window, refit_every=refit_every)


# ---- fitting one series -------------------------------------------------------------------------------


def fit_series(values_W: NDArray[np.float64], specs: Sequence[Spec]) -> Fit:
    """Return the fit of least AICc; that of a constant or too short series, and of one on which every
    model failed (order "none"), is its last value.

    values_W: [W] finite. specs: the models that compete.
    """
    if len(values_W) < MIN_SAMPLES or np.ptp(values_W) == 0:
        return last_value_fit(float(values_W[-1]) if len(values_W) else 0.0, "constant")
    fits, num_warnings = fit_all_specs(values_W, specs)
    found = [fit for fit, _ in fits if fit is not None]
    if not found:
        step_var = float((np.diff(values_W) ** 2).mean())
        return last_value_fit(float(values_W[-1]), "none", step_var)._replace(warnings=num_warnings)
    return min(found, key=lambda fit: fit.aicc)._replace(warnings=num_warnings)


def fit_all_specs(
    values_W: NDArray[np.float64], specs: Sequence[Spec]
) -> tuple[list[tuple[Fit | None, NDArray[np.float64]]], int]:
    """Return each model's fit (None where it failed) with its one-step errors, and the warnings counted."""
    # optimisers work in absolute numbers: a series of steps of size 1 about 0 is what they are made for
    shift, scale = float(values_W.mean()), float(np.sqrt((np.diff(values_W) ** 2).mean()))
    scaled_W = (values_W - shift) / scale
    fits: list[tuple[Fit | None, NDArray[np.float64]]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for spec in specs:
            try:
                fit, error_W = _fit_spec(scaled_W, spec)
            except (ArithmeticError, ValueError, IndexError):  # numpy's LinAlgError is a ValueError
                fits.append((None, np.zeros(0)))
                continue
            usable = all(np.isfinite(part).all() for part in (fit.aicc, fit.state_M, fit.state_var_MM))
            fits.append((fit._replace(shift=shift, scale=scale) if usable else None, error_W))
    return fits, len(caught)


def _fit_spec(scaled_W: NDArray[np.float64], spec: Spec) -> tuple[Fit, NDArray[np.float64]]:
    kind, order = spec
    if kind == "ets":
        return _fit_ets(scaled_W, damped=order == ("damped",))
    model, num_params = (
        _arima_model(scaled_W, order) if kind == "arima" else _component_model(scaled_W, order[0])
    )
    result = model.fit(disp=0, cov_type="none", maxiter=_MAX_ITERATIONS)
    filtered = result.filter_results
    selection_MR = filtered.selection[..., 0]
    fit = Fit(
        order=spec_name(spec),
        aicc=_aicc(float(result.llf), len(scaled_W) - _BURN, num_params),
        converged=bool(result.mle_retvals["converged"]),
        warnings=0,
        corrected=True,
        shift=0.0,
        scale=1.0,
        transition_MM=np.array(filtered.transition[..., 0]),
        design_M=np.array(filtered.design[0, :, 0]),
        state_cov_MM=selection_MR @ filtered.state_cov[..., 0] @ selection_MR.T,
        cross_cov_M=np.zeros(len(selection_MR)),
        obs_var=float(filtered.obs_cov[0, 0, 0]),
        state_M=np.array(filtered.predicted_state[:, -1]),
        state_var_MM=np.array(filtered.predicted_state_cov[..., -1]),
    )
    return fit, np.array(filtered.standardized_forecasts_error[0, _BURN:])


def _arima_model(scaled_W: NDArray[np.float64], order: tuple[int, int, int]) -> tuple[Any, int]:
    """Return a statsmodels model and how many parameters it has; the mean of a series counts where d = 0."""
    sarimax = import_module("statsmodels.tsa.statespace.sarimax")
    p, d, q = order
    # the variance is solved for instead of searched: half the time
    model = sarimax.SARIMAX(scaled_W, order=order, loglikelihood_burn=_BURN, concentrate_scale=True)
    return model, p + q + 1 + (d == 0)


def _component_model(scaled_W: NDArray[np.float64], component: str) -> tuple[Any, int]:
    components: Any = import_module("statsmodels.tsa.statespace.structural").UnobservedComponents
    if component == "level":
        return components(scaled_W, level="llevel", loglikelihood_burn=_BURN), 2
    if component == "ar1":
        model = components(scaled_W, level="irregular", autoregressive=1, loglikelihood_burn=_BURN)
        return model, 4
    return damped_trend_model(scaled_W), 4


def damped_trend_model(values_W: NDArray[np.float64]) -> Any:
    """Return a statsmodels model of a local level with a damped trend, which its own components lack.

    y = level + noise; level' = level + trend + noise; trend' = damping * trend + noise. Parameters: variance
    of the measurement, the level and the trend; damping, between 0 and 0.98.
    """
    base: Any = import_module("statsmodels.tsa.statespace.mlemodel").MLEModel

    class DampedTrend(base):
        start_params = np.array([0.3, 0.3, 0.1, 0.8])
        param_names = ("var_measurement", "var_level", "var_trend", "damping")  # pyright: ignore[reportUnannotatedClassAttribute]

        def __init__(self, endog: Any) -> None:
            base.__init__(self, endog, k_states=2, k_posdef=2, loglikelihood_burn=_BURN)
            self["design"] = np.array([[1.0, 0.0]])
            self["selection"] = np.eye(2)
            self["transition"] = np.array([[1.0, 1.0], [0.0, 0.0]])
            self.initialize_approximate_diffuse()

        def transform_params(self, unconstrained: Any) -> Any:
            damping = _MAX_DAMPING / (1.0 + np.exp(-unconstrained[3:]))
            return np.concatenate([unconstrained[:3] ** 2, damping])

        def untransform_params(self, constrained: Any) -> Any:
            odds = constrained[3:] / (_MAX_DAMPING - constrained[3:])
            return np.concatenate([np.sqrt(constrained[:3]), np.log(odds)])

        def update(self, params: Any, **options: Any) -> None:
            params = base.update(self, params, **options)
            self["obs_cov", 0, 0] = params[0]
            self["state_cov", 0, 0], self["state_cov", 1, 1] = params[1], params[2]
            self["transition", 1, 1] = params[3]

    return DampedTrend(values_W)


def _fit_ets(scaled_W: NDArray[np.float64], *, damped: bool) -> tuple[Fit, NDArray[np.float64]]:
    """Fit exponential smoothing; one error moves level and trend, and the state after it is known exactly."""
    smoothing = import_module("statsmodels.tsa.exponential_smoothing.ets")
    model = smoothing.ETSModel(scaled_W, error="add", trend="add" if damped else None, damped_trend=damped)
    result = model.fit(disp=0, maxiter=_MAX_ITERATIONS)
    damping = float(result.damping_trend) if damped else 0.0
    gain_M = np.array(
        [result.smoothing_level, result.smoothing_trend] if damped else [result.smoothing_level]
    )
    state_M = np.array([result.level[-1], result.slope[-1]] if damped else [result.level[-1]])
    size, error_var = len(gain_M), float(result.scale)
    transition_MM = np.array([[1.0, damping], [0.0, damping]])[:size, :size]
    fit = Fit(
        order=spec_name(("ets", ("damped" if damped else "none",))),
        aicc=float(result.aicc),
        converged=bool(result.mle_retvals["converged"]),
        warnings=0,
        corrected=True,
        shift=0.0,
        scale=1.0,
        transition_MM=transition_MM,
        design_M=np.array([1.0, damping])[:size],
        state_cov_MM=error_var * np.outer(gain_M, gain_M),
        cross_cov_M=error_var * gain_M,
        obs_var=error_var,
        state_M=state_M,
        state_var_MM=np.zeros((size, size)),
    )
    return fit, np.array(result.resid)


def spec_name(spec: Spec) -> str:
    """Return how a model is called: "arima 0,1,1", "ets damped"."""
    kind, order = spec
    return f"{kind} " + ",".join(str(part) for part in order)


def _aicc(log_likelihood: float, num: int, num_params: int) -> float:
    room = num - num_params - 1
    return -2 * log_likelihood + 2 * num_params * num / room if room > 0 else float("inf")


def ljung_box_p(error_W: NDArray[np.float64]) -> float:
    """Return the p-value of the Ljung-Box test: small where errors [W] are correlated over time."""
    diagnostic = import_module("statsmodels.stats.diagnostic")
    table = diagnostic.acorr_ljungbox(error_W, lags=[max(1, min(_LJUNG_BOX_LAGS, len(error_W) // 5))])
    return float(table["lb_pvalue"].iloc[0])
