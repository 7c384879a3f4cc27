"""Fitted time-series models as arrays, and the forecaster that filters them: no statsmodels here.

Below `balancer/forecast_stats.py`, which fits one model to each series of square-root shares. Whatever was
fitted is written in one form, so that all series of all layers are filtered at once between refits:

    x' = transition x + w       var w = state_cov      the state, one sample later
    y  = design . x + v         var v = obs_var        standardised root share, (root - shift) / scale
    cov(w, v) = cross_cov       0 but for exponential smoothing, where one error drives both

Square roots of shares have nearly the same counting noise, (1 - p) / 4N, whatever the share. Axis N runs over
the L * E series, layer by layer; M is the largest state of any of them, smaller ones are padded with zeros.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.forecast_record import UNKNOWN, Forecast, Forecaster, checked_horizons, checked_sample

# fewer samples than this tell no model from another: the forecast is the last share, with a wide spread
MIN_SAMPLES = 10
# variance of a constant series: any positive number makes the filter follow it (gain 1) should it wake up
_TINY = 1e-12
# variance of a root share that nothing is known of: the spread is then the widest that a share can have
_UNKNOWN_VAR = 1.0
_Number = TypeVar("_Number", np.float64, np.int64)


class Fit(NamedTuple):
    """One fitted series. order: which model, "none" where none could be fitted. aicc: NaN for "none".
    converged: whether the optimiser said so. warnings: how many the fit gave. The others as above; state_M,
    state_var_MM: expected state of the sample after the last, and its variance. corrected: whether state and
    design tell the mean of a noisy root (its square is below the mean share) or the last root itself."""

    order: str
    aicc: float
    converged: bool
    warnings: int
    corrected: bool
    shift: float
    scale: float
    transition_MM: NDArray[np.float64]
    design_M: NDArray[np.float64]
    state_cov_MM: NDArray[np.float64]
    cross_cov_M: NDArray[np.float64]
    obs_var: float
    state_M: NDArray[np.float64]
    state_var_MM: NDArray[np.float64]


class Models(NamedTuple):
    """The fits of all series, stacked: what changes from sample to sample is state_NM and state_var_NMM."""

    corrected_N: NDArray[np.bool_]
    shift_N: NDArray[np.float64]
    scale_N: NDArray[np.float64]
    transition_NMM: NDArray[np.float64]
    design_NM: NDArray[np.float64]
    state_cov_NMM: NDArray[np.float64]
    cross_cov_NM: NDArray[np.float64]
    obs_var_N: NDArray[np.float64]
    state_NM: NDArray[np.float64]
    state_var_NMM: NDArray[np.float64]


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


def last_value_fit(last: float, order: str, var: float = _TINY) -> Fit:
    """Return the model "as it was last", a random walk of the given variance a sample."""
    one = np.ones((1, 1))
    return Fit(
        order=order,
        aicc=float("nan"),
        converged=True,
        warnings=0,
        corrected=False,
        shift=0.0,
        scale=1.0,
        transition_MM=one,
        design_M=one[0],
        state_cov_MM=var * one,
        cross_cov_M=0 * one[0],
        obs_var=0.0,
        state_M=last * one[0],
        state_var_MM=var * one,
    )


def stack_fits(fits: Sequence[Fit]) -> Models:
    """Return the fits of N series as arrays, states padded with zeros to the largest."""
    size = max(len(fit.state_M) for fit in fits)

    def padded(arrays: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.stack([np.pad(array, (0, size - len(array))) for array in arrays])  # on every axis

    return Models(
        corrected_N=np.array([fit.corrected for fit in fits]),
        shift_N=np.array([fit.shift for fit in fits]),
        scale_N=np.array([fit.scale for fit in fits]),
        transition_NMM=padded([fit.transition_MM for fit in fits]),
        design_NM=padded([fit.design_M for fit in fits]),
        state_cov_NMM=padded([fit.state_cov_MM for fit in fits]),
        cross_cov_NM=padded([fit.cross_cov_M for fit in fits]),
        obs_var_N=np.array([fit.obs_var for fit in fits]),
        state_NM=padded([fit.state_M for fit in fits]),
        state_var_NMM=padded([fit.state_var_MM for fit in fits]),
    )


def filter_models(value_N: NDArray[np.float64], models: Models) -> Models:
    """Return the models one sample later: a Kalman filter's step, all series at once.

    value_N: [N] observed root shares; NaN for a series that was not observed, which is only predicted.
    """
    m = models
    gone_N = np.isnan(value_N)
    error_N = np.where(gone_N, 0.0, (value_N - m.shift_N) / m.scale_N - _dot(m.design_NM, m.state_NM))
    loading_NM = _times(m.state_var_NMM, m.design_NM)
    error_var_N = _dot(m.design_NM, loading_NM) + m.obs_var_N
    cross_NM = _times(m.transition_NMM, loading_NM) + m.cross_cov_NM
    gain_NM = np.where(gone_N[:, None], 0.0, cross_NM / np.maximum(error_var_N, 1e-300)[:, None])
    spread_NMM = m.transition_NMM @ m.state_var_NMM @ m.transition_NMM.transpose(0, 2, 1)
    learnt_NMM = gain_NM[:, :, None] * gain_NM[:, None, :] * error_var_N[:, None, None]
    return m._replace(
        state_NM=_times(m.transition_NMM, m.state_NM) + gain_NM * error_N[:, None],
        state_var_NMM=spread_NMM + m.state_cov_NMM - learnt_NMM,
    )


def predict_models(
    models: Models, samples_H: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the expected root shares and the variances of what will be counted, each [H, N].

    samples_H: [H] how many samples ahead, 1 or more, increasing or equal.
    """
    m = models
    state_NM, var_NMM = m.state_NM, m.state_var_NMM
    turned_NMM = m.transition_NMM.transpose(0, 2, 1)
    means: list[NDArray[np.float64]] = []
    variances: list[NDArray[np.float64]] = []
    for ahead in range(1, int(samples_H[-1]) + 1):
        if ahead > 1:
            state_NM = _times(m.transition_NMM, state_NM)
            var_NMM = m.transition_NMM @ var_NMM @ turned_NMM + m.state_cov_NMM
        for _ in range(int((samples_H == ahead).sum())):
            means.append(m.shift_N + m.scale_N * _dot(m.design_NM, state_NM))
            var_N = _dot(m.design_NM, _times(var_NMM, m.design_NM)) + m.obs_var_N
            variances.append(m.scale_N**2 * var_N)
    return np.stack(means), np.stack(variances)


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
            var_LE[layer] = np.maximum(np.maximum(own_E, own_E.mean()), _TINY)
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


def shares_of_roots(
    root_HLE: NDArray[np.float64],
    var_HLE: NDArray[np.float64],
    corrected_LE: NDArray[np.bool_],
    last_LE: NDArray[np.float64],
    copies_L: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation of shares whose square roots are normal, each [H, L, E].

    root_HLE, var_HLE: mean and variance of the roots that will be counted. corrected_LE: where the counting
    noise, at most (1 - p) / 4N, is added to root^2. last_LE: shares for a layer whose roots are all 0 or
    less. copies_L: N copies a sample, 0 where unknown.

    The mean of a squared normal is root^2 + var. Only the counting part of var is added: the rest is what the
    shares themselves may move, they sum to 1 and cannot all grow, and adding it drew every forecast towards
    uniform (measured: three times the error at 50 samples ahead). Means are scaled to sum 1. The spread is
    that of a squared normal, sqrt(4 root^2 var + 2 var^2), with var at least the counting noise, and at most
    sqrt(p (1 - p)), the widest that a share of mean p can have.
    """
    root_HLE = np.maximum(root_HLE, 0.0)
    noise_L1 = (1.0 / np.where(copies_L > 0, 4.0 * copies_L, 4.0))[:, None]
    noise_HLE = np.maximum(1.0 - root_HLE**2, 0.0) * noise_L1
    raw_HLE = root_HLE**2 + np.where(corrected_LE, np.minimum(var_HLE, noise_HLE), 0.0)
    total_HL1 = raw_HLE.sum(axis=-1, keepdims=True)
    safe_HL1 = np.where(total_HL1 > 0, total_HL1, 1.0)
    mean_HLE = np.where(total_HL1 > 0, raw_HLE / safe_HL1, last_LE)
    var_HLE = np.maximum(var_HLE, noise_HLE)
    std_HLE = np.sqrt(4.0 * root_HLE**2 * var_HLE + 2.0 * var_HLE**2) / safe_HL1
    # a mean may pass 1 by rounding
    return mean_HLE, np.minimum(std_HLE, np.sqrt(np.maximum(mean_HLE * (1.0 - mean_HLE), 0.0)))


def _ordered(ring: NDArray[_Number], seen: int) -> NDArray[_Number]:
    """Return the rows of a ring in the order in which they came; all that there are."""
    if seen <= len(ring):
        return ring[:seen]
    return np.roll(ring, -(seen % len(ring)), axis=0)


def _dot(a_NM: NDArray[np.float64], b_NM: NDArray[np.float64]) -> NDArray[np.float64]:
    return (a_NM * b_NM).sum(axis=-1)


def _times(matrix_NMM: NDArray[np.float64], vector_NM: NDArray[np.float64]) -> NDArray[np.float64]:
    return (matrix_NMM @ vector_NM[:, :, None])[:, :, 0]
