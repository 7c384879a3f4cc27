"""Fitted time-series models as arrays: stacked, filtered and predicted, all series at once.

Below `balancer/forecast_stats_fit.py`, the forecaster that keeps them. Whatever was fitted is written in one
form, so that all series of all layers are filtered at once between refits:

    x' = transition x + w       var w = state_cov      the state, one sample later
    y  = design . x + v         var v = obs_var        standardised root share, (root - shift) / scale
    cov(w, v) = cross_cov       0 but for exponential smoothing, where one error drives both

Square roots of shares have nearly the same counting noise, (1 - p) / 4N, whatever the share. Axis N runs over
the L * E series, layer by layer; M is the largest state of any of them, smaller ones are padded with zeros.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# variance of a constant series: any positive number makes the filter follow it (gain 1) should it wake up
TINY_VAR = 1e-12


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


def last_value_fit(last: float, order: str, var: float = TINY_VAR) -> Fit:
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

    samples_H: [H] how many samples ahead, 1 or more, increasing or equal; what it costs grows with their
    logarithms.
    """
    m, reached = models, 1  # the state is that of the sample after the last
    means: list[NDArray[np.float64]] = []
    variances: list[NDArray[np.float64]] = []
    for ahead in samples_H.tolist():
        m, reached = _skip_samples(m, ahead - reached), ahead
        means.append(m.shift_N + m.scale_N * _dot(m.design_NM, m.state_NM))
        var_N = _dot(m.design_NM, _times(m.state_var_NMM, m.design_NM)) + m.obs_var_N
        variances.append(m.scale_N**2 * var_N)
    return np.stack(means), np.stack(variances)


def _skip_samples(models: Models, num_samples: int) -> Models:
    """Return the models so many samples later, none of them observed: transitions by repeated squaring."""
    state_NM, var_NMM = models.state_NM, models.state_var_NMM
    # n samples: x' = step x + noise, with n = 1, 2, 4, ...
    step_NMM, noise_NMM = models.transition_NMM, models.state_cov_NMM
    left = num_samples
    while left:
        turned_NMM = step_NMM.transpose(0, 2, 1)
        if left & 1:
            state_NM = _times(step_NMM, state_NM)
            var_NMM = step_NMM @ var_NMM @ turned_NMM + noise_NMM
        left >>= 1
        if left:
            noise_NMM = step_NMM @ noise_NMM @ turned_NMM + noise_NMM
            step_NMM = step_NMM @ step_NMM
    return models._replace(state_NM=state_NM, state_var_NMM=var_NMM)


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


def _dot(a_NM: NDArray[np.float64], b_NM: NDArray[np.float64]) -> NDArray[np.float64]:
    return (a_NM * b_NM).sum(axis=-1)


def _times(matrix_NMM: NDArray[np.float64], vector_NM: NDArray[np.float64]) -> NDArray[np.float64]:
    return (matrix_NMM @ vector_NM[:, :, None])[:, :, 0]
