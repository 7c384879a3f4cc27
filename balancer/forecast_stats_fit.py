"""The forecaster that fits time-series models now and then and filters them in between: no statsmodels here.

Between `balancer/forecast_stats.py`, which fits one model to each series of square-root shares, and
`balancer/forecast_stats_models.py`, which filters and predicts what was fitted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.forecast_record import UNKNOWN, Forecast, Forecaster, checked_horizons, checked_sample
from balancer.forecast_stats_models import (
    TINY_VAR,
    Fit,
    Models,
    filter_models,
    last_value_fit,
    predict_models,
    shares_of_roots,
    stack_fits,
)

# fewer samples than this tell no model from another: the forecast is the last share, with a wide spread
MIN_SAMPLES = 10
# variance of a root share that nothing is known of: the spread is then the widest that a share can have
_UNKNOWN_VAR = 1.0
_Number = TypeVar("_Number", np.float64, np.int64)


class StatsState(NamedTuple):
    """State of a forecaster of fitted models.

    step: of the last sample, -1 for none. seen: samples so far. fitted_at: `seen` at the last refit, 0 for
    none. roots_WLE: the last W square-root shares, sample i in row i % W; NaN for a layer without load.
    steps_W: their steps. share_LE: last shares. copies_L: copies of the last sample with load, 0 for none.
    Of the last refit: not_converged and failed series (no model could be fitted: last share); warnings: all
    that the fits gave so far, counted instead of printed.
    """

    step: NDArray[np.int64]
    horizons_H: NDArray[np.int64]
    seen: NDArray[np.int64]
    fitted_at: NDArray[np.int64]
    roots_WLE: NDArray[np.float64]
    steps_W: NDArray[np.int64]
    share_LE: NDArray[np.float64]
    copies_L: NDArray[np.float64]
    models: Models
    not_converged: NDArray[np.int64]
    failed: NDArray[np.int64]
    warnings: NDArray[np.int64]


def fitted_forecaster(
    fit_all: Callable[[list[NDArray[np.float64]]], list[Fit]], *, window: int = 200, refit_every: int = 50
) -> Forecaster:
    """Return a forecaster that fits a model to every series now and then and filters it in between.

    fit_all: takes the N series of root shares (samples without load left out) and returns their N fits.
    window: samples that a fit sees, MIN_SAMPLES or more. refit_every: samples between refits; earlier ones
    come whenever the history has doubled. Raises ValueError for a bound that is broken.
    """
    if window < MIN_SAMPLES:
        raise ValueError(f"window={window} samples are too few to fit a model; use {MIN_SAMPLES} or more")
    if refit_every < 1:
        raise ValueError(f"refit_every={refit_every} samples must be at least 1; 50 is a good value")

    def init(num_layers: int, num_experts: int, horizons: Sequence[int]) -> StatsState:
        return _first_state(
            num_layers, num_experts, checked_horizons(num_layers, num_experts, horizons), window
        )

    def update(step: int, tokens_per_expert_LE: ArrayLike, state: StatsState) -> StatsState:
        state = _observe(step, tokens_per_expert_LE, state)
        seen, fitted_at = int(state.seen), int(state.fitted_at)
        if seen >= MIN_SAMPLES and (not fitted_at or seen - fitted_at >= min(refit_every, fitted_at)):
            return _refit(state, fit_all)
        return state

    return Forecaster(init, update, _forecast)


def _first_state(num_layers: int, num_experts: int, horizons_H: NDArray[np.int64], window: int) -> StatsState:
    share_LE = np.full((num_layers, num_experts), 1.0 / num_experts)
    zero = np.array(0)
    return StatsState(
        step=np.array(-1),
        horizons_H=horizons_H,
        seen=zero,
        fitted_at=zero,
        roots_WLE=np.full((window, num_layers, num_experts), np.nan),
        steps_W=np.zeros(window, dtype=np.int64),
        share_LE=share_LE,
        copies_L=np.zeros(num_layers),
        models=stack_fits([last_value_fit(root, "none", _UNKNOWN_VAR) for root in np.sqrt(share_LE).ravel()]),
        not_converged=zero,
        failed=zero,
        warnings=zero,
    )


def _observe(step: int, tokens_per_expert_LE: ArrayLike, state: StatsState) -> StatsState:
    """Return the state with one more sample: in the window, and through the filters of the present models."""
    num_layers, num_experts = state.share_LE.shape
    counts_LE = checked_sample(step, tokens_per_expert_LE, int(state.step), (num_layers, num_experts))
    copies_L = counts_LE.sum(axis=-1)
    loaded_L1 = copies_L[:, None] > 0
    share_LE = np.where(loaded_L1, counts_LE / np.where(loaded_L1, copies_L[:, None], 1.0), state.share_LE)
    root_LE = np.where(loaded_L1, np.sqrt(share_LE), np.nan)
    row = int(state.seen) % len(state.steps_W)
    state.roots_WLE[row], state.steps_W[row] = root_LE, step
    state = state._replace(
        step=np.array(step),
        seen=np.array(int(state.seen) + 1),
        share_LE=share_LE,
        copies_L=np.where(copies_L > 0, copies_L, state.copies_L),
    )
    fitted = state.fitted_at > 0
    return state._replace(
        models=filter_models(root_LE.ravel(), state.models) if fitted else _last_values(state)
    )


def _last_values(state: StatsState) -> Models:
    """Return the models of a window too short to fit: the last share, moving as fast as the layer does.

    The variance of a sample's step is the series' own mean square or that of its layer, whichever is larger;
    after a single sample it is unknown, hence the widest.
    """
    roots_WLE = _ordered(state.roots_WLE, int(state.seen))
    num_layers, num_experts = state.share_LE.shape
    var_LE = np.full((num_layers, num_experts), _UNKNOWN_VAR)
    for layer in range(num_layers):
        roots_WE = roots_WLE[~np.isnan(roots_WLE[:, layer, 0]), layer]
        if len(roots_WE) > 1:
            own_E = (np.diff(roots_WE, axis=0) ** 2).mean(axis=0)
            var_LE[layer] = np.maximum(np.maximum(own_E, own_E.mean()), TINY_VAR)
    last_N, var_N = np.sqrt(state.share_LE).ravel(), var_LE.ravel()
    return stack_fits([last_value_fit(last, "none", var) for last, var in zip(last_N, var_N)])


def _refit(state: StatsState, fit_all: Callable[[list[NDArray[np.float64]]], list[Fit]]) -> StatsState:
    roots_WN = _ordered(state.roots_WLE, int(state.seen)).reshape(-1, state.share_LE.size)
    fits = fit_all([series_W[~np.isnan(series_W)] for series_W in roots_WN.T])
    # a layer that never had load is told nothing by a fit: it stays uniform, with the widest spread
    blank_N = np.repeat(state.copies_L == 0, state.share_LE.shape[1])
    roots_N = np.sqrt(state.share_LE).ravel()
    fits = [
        last_value_fit(root, "none", _UNKNOWN_VAR) if blank else fit
        for root, blank, fit in zip(roots_N, blank_N, fits)
    ]
    return state._replace(
        fitted_at=state.seen,
        models=stack_fits(fits),
        not_converged=np.array(sum(not fit.converged for fit in fits)),
        failed=np.array(sum(fit.order == "none" for fit, blank in zip(fits, blank_N) if not blank)),
        warnings=np.array(int(state.warnings) + sum(fit.warnings for fit in fits)),
    )


def _forecast(state: StatsState) -> Forecast:
    num_layers, num_experts = state.share_LE.shape
    mean_HN, var_HN = predict_models(state.models, horizon_samples(state))
    shape_HLE = (len(state.horizons_H), num_layers, num_experts)
    corrected_LE = state.models.corrected_N.reshape(num_layers, num_experts)
    mean_HLE, std_HLE = shares_of_roots(
        mean_HN.reshape(shape_HLE), var_HN.reshape(shape_HLE), corrected_LE, state.share_LE, state.copies_L
    )
    return Forecast(
        step=int(state.step),
        horizons_H=state.horizons_H,
        mean_HLE=mean_HLE,
        std_HLE=std_HLE,
        regime_L=np.full((num_layers,), UNKNOWN, dtype=np.int64),
    )


def horizon_samples(state: StatsState) -> NDArray[np.int64]:
    """Return the horizons in samples, [H] int64: training steps over the median interval, rounded up.

    Before the second sample the interval is unknown and taken as one step.
    """
    steps_W = _ordered(state.steps_W, int(state.seen))
    interval = float(np.median(np.diff(steps_W))) if len(steps_W) > 1 else 1.0
    return np.ceil(state.horizons_H / interval - 1e-9).astype(np.int64)


def _ordered(ring: NDArray[_Number], seen: int) -> NDArray[_Number]:
    """Return the rows of a ring in the order in which they came; all that there are."""
    if seen <= len(ring):
        return ring[:seen]
    return np.roll(ring, -(seen % len(ring)), axis=0)
