"""Kalman members: local level and damped local linear trend on root shares, with their noises learnt online.

Root shares have counting noise of one known size, (1 - p) / (4 N) (`balancer/spread.py`), but what a single
batch holds scatters more than that (over-dispersion, jitter). Both variances are read from the series itself,
expert by expert leaning on the layer, by the moments of the changes d_t = y_t - y_{t-1} of a local level:

    E[d_t d_{t-1}] = -R    (noise, at least the counting noise)        E[d_t^2] = Q + 2 R    (drift Q)

Then the filter is the textbook one (Harvey, 1989): gain = P / (P + R). A layer that jumps forgets its level.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from balancer.forecast_build import Flags, Floats, Integers, Member, Sample, shares
from balancer.forecast_members import checked_fraction, reach

_MEMORY = 0.03  # gain of the moments: some 30 samples
_SHRINK = 0.5  # of an expert's moments to those of its layer
_LEAST_VARIANCE = 1e-14
_LEAST_DRIFT_FRAC = 1e-4  # of the noise: gain of 1 %, so that the filter never stops


class Noise(NamedTuple):
    """last_LE: root shares of the last sample;  change_LE: their last change;  square_LE, product_LE: running
    moments of the changes;  number_L [L]: changes seen since the start or the last jump."""

    last_LE: Floats
    change_LE: Floats
    square_LE: Floats
    product_LE: Floats
    number_L: Integers


class LevelFilter(NamedTuple):
    """level_LE, variance_LE: of the root share;  noise: its moments;  started_L [L];  copies_L
    [L]: copies of the last sample."""

    level_LE: Floats
    variance_LE: Floats
    noise: Noise
    started_L: Flags
    copies_L: Floats


class TrendFilter(NamedTuple):
    """level_LE, slope_LE (per sample), variance_3LE: of level, both, slope;  noise;  started_L;
    copies_L."""

    level_LE: Floats
    slope_LE: Floats
    variance_3LE: Floats
    noise: Noise
    started_L: Flags
    copies_L: Floats


class Filters(Protocol):
    """One step of each filter, in place: numpy's below, or numba's."""

    def level_filter(
        self,
        root_LE: Floats,
        level_LE: Floats,
        variance_LE: Floats,
        drift_LE: Floats,
        noise_LE: Floats,
        loaded_L: Flags,
    ) -> None: ...

    def trend_filter(
        self,
        root_LE: Floats,
        level_LE: Floats,
        slope_LE: Floats,
        variance_3LE: Floats,
        drift_LE: Floats,
        slope_drift_LE: Floats,
        noise_LE: Floats,
        loaded_L: Flags,
        damping: float,
    ) -> None: ...


def local_level(filters: Filters) -> Member:
    """Local level: y = x + noise, x a random walk; the forecast is the level."""

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> LevelFilter:
        start_LE = np.full((num_layers, num_experts), num_experts**-0.5)
        return LevelFilter(
            start_LE,
            np.zeros_like(start_LE),
            _noise_init(start_LE),
            np.zeros(num_layers, dtype=np.bool_),
            np.ones(num_layers),
        )

    def update(sample: Sample, state: LevelFilter) -> LevelFilter:
        root_LE = np.sqrt(sample.share_LE)
        noise = _noise_update(sample, root_LE, state.noise, state.started_L)
        drift_LE, noise_LE = _variances(sample, noise)
        _restart(sample, root_LE, state.started_L, state.level_LE, state.variance_LE, noise_LE)
        filters.level_filter(root_LE, state.level_LE, state.variance_LE, drift_LE, noise_LE, sample.loaded_L)
        return state._replace(
            noise=noise, started_L=state.started_L | sample.loaded_L, copies_L=_copies(sample, state.copies_L)
        )

    def mean(lag_H: Integers, state: LevelFilter) -> Floats:
        mean_LE = shares_of_roots(state.level_LE, state.noise, state.copies_L)
        return np.broadcast_to(mean_LE, (lag_H.size, *mean_LE.shape)).copy()

    return Member(init, update, mean)


def local_trend(filters: Filters, damping: float = 0.8, slope_ratio: float = 0.05) -> Member:
    """Damped local linear trend: level and slope, the slope a damped walk.

    damping: of the slope per sample, in [0, 1]; 0.8 lives 5 samples. slope_ratio: drift of the slope over
    that of the level, 0 to 1; 0.05.
    """
    checked_fraction("damping", damping, "0.8 is a good start", zero=True)
    checked_fraction("slope_ratio", slope_ratio, "0.05 is a good start", zero=True)

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> TrendFilter:
        start_LE = np.full((num_layers, num_experts), num_experts**-0.5)
        variance_3LE = np.zeros((3, num_layers, num_experts))
        started_L = np.zeros(num_layers, dtype=np.bool_)
        return TrendFilter(
            start_LE,
            np.zeros_like(start_LE),
            variance_3LE,
            _noise_init(start_LE),
            started_L,
            np.ones(num_layers),
        )

    def update(sample: Sample, state: TrendFilter) -> TrendFilter:
        root_LE = np.sqrt(sample.share_LE)
        noise = _noise_update(sample, root_LE, state.noise, state.started_L)
        drift_LE, noise_LE = _variances(sample, noise)
        fresh_L = _restart(sample, root_LE, state.started_L, state.level_LE, state.variance_3LE[0], noise_LE)
        state.slope_LE[fresh_L] = 0.0
        state.variance_3LE[1:, fresh_L] = 0.0
        filters.trend_filter(
            root_LE,
            state.level_LE,
            state.slope_LE,
            state.variance_3LE,
            drift_LE,
            slope_ratio * drift_LE,
            noise_LE,
            sample.loaded_L,
            damping,
        )
        return state._replace(
            noise=noise, started_L=state.started_L | sample.loaded_L, copies_L=_copies(sample, state.copies_L)
        )

    def mean(lag_H: Integers, state: TrendFilter) -> Floats:
        root_HLE = state.level_LE + reach(damping, lag_H)[:, None, None] * state.slope_LE
        return shares_of_roots(root_HLE, state.noise, state.copies_L)

    return Member(init, update, mean)


def shares_of_roots(root_XLE: Floats, noise: Noise, copies_L: Floats) -> Floats:
    """Shares of which these are the mean roots: the square, and what counting takes off the mean of a root.

    That is the variance of the root: its scatter as learnt, of which counting explains (1 - p) / (4 N) at
    most. For an expert of a few copies it is much of its share. Other scatter is left out: it would draw a
    forecast of drifting shares to uniform.
    """
    square_XLE = np.maximum(root_XLE, 0.0) ** 2
    scatter_LE = np.clip(-_leaned(noise.product_LE), 0.0, 0.5 * _leaned(noise.square_LE))
    counting_XLE = (1.0 - np.minimum(square_XLE, 1.0)) / (4.0 * np.maximum(copies_L, 1.0))[:, None]
    return shares(square_XLE + np.minimum(scatter_LE, counting_XLE))


def _copies(sample: Sample, copies_L: Floats) -> Floats:
    return np.where(sample.loaded_L, sample.total_L, copies_L)


# ---- noises -----------------------------------------------------------------------------------------------


def _noise_init(start_LE: Floats) -> Noise:
    zeros_LE = np.zeros_like(start_LE)
    number_L = np.zeros(start_LE.shape[0], dtype=np.int64)
    return Noise(start_LE.copy(), zeros_LE, zeros_LE.copy(), zeros_LE.copy(), number_L)


def _noise_update(sample: Sample, root_LE: Floats, noise: Noise, started_L: Flags) -> Noise:
    """Take the change of this sample in; a layer that jumps starts its moments anew, without the jump."""
    taken_L = sample.loaded_L & started_L & ~sample.jumped_L
    number_L = np.where(sample.jumped_L, 0, noise.number_L + taken_L)
    change_LE = root_LE - noise.last_LE
    gain_L1 = (np.maximum(_MEMORY, 1.0 / np.maximum(number_L, 1)) * taken_L)[:, None]
    product_LE = np.where((noise.number_L > 0)[:, None], change_LE * noise.change_LE, 0.0)
    kept_L1 = sample.loaded_L[:, None]
    return Noise(
        last_LE=np.where(kept_L1, root_LE, noise.last_LE),
        change_LE=np.where(
            taken_L[:, None], change_LE, np.where(sample.jumped_L[:, None], 0.0, noise.change_LE)
        ),
        square_LE=noise.square_LE + gain_L1 * (change_LE**2 - noise.square_LE),
        product_LE=noise.product_LE + gain_L1 * (product_LE - noise.product_LE),
        number_L=number_L,
    )


def _variances(sample: Sample, noise: Noise) -> tuple[Floats, Floats]:
    """Drift Q and noise R [L, E] of the root shares."""
    square_LE = _leaned(noise.square_LE)
    product_LE = _leaned(noise.product_LE)
    counting_LE = (1.0 - sample.share_LE) / (4.0 * np.maximum(sample.total_L, 1.0))[:, None] + _LEAST_VARIANCE
    noise_LE = np.maximum(np.minimum(-product_LE, 0.5 * square_LE), counting_LE)
    drift_LE = np.maximum(square_LE - 2.0 * noise_LE, _LEAST_DRIFT_FRAC * noise_LE)
    return drift_LE, noise_LE


def _leaned(moment_LE: Floats) -> Floats:
    return (1.0 - _SHRINK) * moment_LE + _SHRINK * moment_LE.mean(axis=-1, keepdims=True)


def _restart(
    sample: Sample, root_LE: Floats, started_L: Flags, level_LE: Floats, variance_LE: Floats, noise_LE: Floats
) -> Flags:
    """Set the level of layers that begin or jump to what they are now; return them."""
    fresh_L = sample.loaded_L & (~started_L | sample.jumped_L)
    level_LE[fresh_L] = root_LE[fresh_L]
    variance_LE[fresh_L] = noise_LE[fresh_L]
    return fresh_L


class NumpyFilters:
    """The filters as array expressions: what the compiled ones are compared with."""

    def level_filter(
        self,
        root_LE: NDArray[np.float64],
        level_LE: Floats,
        variance_LE: Floats,
        drift_LE: Floats,
        noise_LE: Floats,
        loaded_L: Flags,
    ) -> None:
        """See `forecast_kernels.level_filter`."""
        before_LE = variance_LE + drift_LE
        gain_LE = before_LE / (before_LE + noise_LE) * loaded_L[:, None]
        level_LE += gain_LE * (root_LE - level_LE)
        variance_LE[loaded_L] = ((1.0 - gain_LE) * before_LE)[loaded_L]

    def trend_filter(
        self,
        root_LE: Floats,
        level_LE: Floats,
        slope_LE: Floats,
        variance_3LE: Floats,
        drift_LE: Floats,
        slope_drift_LE: Floats,
        noise_LE: Floats,
        loaded_L: Flags,
        damping: float,
    ) -> None:
        """See `forecast_kernels.trend_filter`."""
        of_level, of_both, of_slope = variance_3LE
        expected_LE = level_LE + damping * slope_LE
        level_var = of_level + 2 * damping * of_both + damping**2 * of_slope + drift_LE
        both_var = damping * of_both + damping**2 * of_slope
        slope_var = damping**2 * of_slope + slope_drift_LE
        gain_LE, slope_gain_LE = level_var / (level_var + noise_LE), both_var / (level_var + noise_LE)
        error_LE = root_LE - expected_LE
        new_3LE = np.stack(
            [(1 - gain_LE) * level_var, (1 - gain_LE) * both_var, slope_var - slope_gain_LE * both_var]
        )
        level_LE[loaded_L] = (expected_LE + gain_LE * error_LE)[loaded_L]
        slope_LE[loaded_L] = (damping * slope_LE + slope_gain_LE * error_LE)[loaded_L]
        variance_3LE[:, loaded_L] = new_3LE[:, loaded_L]
