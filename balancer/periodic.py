"""Seasonal member: mixes of data that come round, as when domains take turns.

The forecast is the mean of the same phase of earlier periods, leaning on an exponential mean where the period
is weak. The period is given, or found in the shares themselves: their autocorrelation over the samples kept,
all experts of a layer taken together.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.forecast_build import Flags, Floats, Integers, Member, Sample, shares
from balancer.forecast_members import checked_fraction, checked_whole

_LOOK_EVERY = 32  # samples between two searches for the period of a layer
_LEAST_PERIODS = 2.5  # that must fit into what is kept
_LEAST_CORRELATION = 0.3
_NEAR_BEST = 0.85  # of the highest peak: a shorter period as high as this is preferred


class Season(NamedTuple):
    """share_NLE [n, L, E] float32: ring of samples;  number []: samples so far;  level_LE: exponential mean;
    started_L [L];  period_L [L]: in samples, 0 = none;  strength_L [L]: autocorrelation at the
    period."""

    share_NLE: NDArray[np.float32]
    number: Integers
    level_LE: Floats
    started_L: Flags
    period_L: Integers
    strength_L: Floats


def seasonal(period_steps: int | None = None, length: int = 128, gain: float = 0.5) -> Member:
    """Mean of the same phase of earlier periods.

    period_steps: in training steps; None finds it. length: samples kept, 8 or more; 2.5 periods must fit.
    gain: of the exponential mean that is used where no period is known.
    """
    if period_steps is not None:
        checked_whole("period_steps", period_steps, 2, "or None, to find the period")
    checked_whole("length", length, 8, "128 samples are a good start")
    checked_fraction("gain", gain, "0.5 is a good start")

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> Season:
        return Season(
            share_NLE=np.zeros((length, num_layers, num_experts), dtype=np.float32),
            number=np.array(0),
            level_LE=np.full((num_layers, num_experts), 1.0 / num_experts),
            started_L=np.zeros(num_layers, dtype=np.bool_),
            period_L=np.zeros(num_layers, dtype=np.int64),
            strength_L=np.zeros(num_layers),
        )

    def update(sample: Sample, state: Season) -> Season:
        state.share_NLE[int(state.number) % length] = sample.share_LE
        gain_L = np.where(state.started_L, gain, 1.0) * sample.loaded_L
        state = state._replace(
            number=np.asarray(state.number + 1),
            level_LE=state.level_LE + gain_L[:, None] * (sample.share_LE - state.level_LE),
            started_L=state.started_L | sample.loaded_L,
        )
        if period_steps is not None:
            period = max(2, round(period_steps / sample.interval)) if sample.interval > 0 else 0
            if period >= length:
                raise ValueError(
                    f"period_steps={period_steps} are {period} samples, and only length={length} are kept; "
                    f"use length={2 * period} or more"
                )
            known = 0 < period < int(state.number)
            return state._replace(
                period_L=np.full_like(state.period_L, period if known else 0),
                strength_L=np.ones_like(state.strength_L),
            )
        return _look(state)

    return Member(init, update, _mean)


def _mean(lag_H: Integers, state: Season) -> Floats:
    """Per horizon and period, the mean of what stood at the same phase; all layers of one period at once."""
    mean_HLE = np.broadcast_to(state.level_LE, (lag_H.size, *state.level_LE.shape)).copy()
    held = min(int(state.number), state.share_NLE.shape[0])
    for period in np.unique(state.period_L[state.period_L > 0]):
        layers = np.flatnonzero(state.period_L == period)
        for h, lag in enumerate(lag_H):
            back = _range(-int(lag) % int(period), held, int(period))  # samples before the last one
            if back.size:
                ring = (int(state.number) - 1 - back) % state.share_NLE.shape[0]
                phase_LE = state.share_NLE[np.ix_(ring, layers)].mean(axis=0, dtype=np.float64)
                trust_L1 = state.strength_L[layers][:, None]
                mean_HLE[h, layers] = shares(trust_L1 * phase_LE + (1 - trust_L1) * mean_HLE[h, layers])
    return mean_HLE


def _look(state: Season) -> Season:
    """Find the period of some layers in the samples kept: every layer has its turn."""
    length, num_layers, _ = state.share_NLE.shape
    held = min(int(state.number), length)
    longest = int(held / _LEAST_PERIODS)
    layers = _range(int(state.number) % _LOOK_EVERY, num_layers, _LOOK_EVERY)
    if longest < 3 or layers.size == 0:
        return state
    order = (int(state.number) - held + np.arange(held)) % length
    correlation_NL = _autocorrelation(state.share_NLE[np.ix_(order, layers)])[: longest + 2]
    inner_NL = correlation_NL[1:-1]
    peak_NL = (inner_NL > correlation_NL[:-2]) & (inner_NL >= correlation_NL[2:])
    # a slow drift correlates at all short lags: a period shows as a peak after a trough
    trough_NL = np.minimum.accumulate(correlation_NL, axis=0)[1:-1]
    peak_NL &= (inner_NL >= _LEAST_CORRELATION) & (trough_NL < 0.5 * inner_NL)
    height_NL = np.where(peak_NL, inner_NL, 0.0)
    # multiples of a period correlate as well as it does, give or take noise: take the shortest near the best
    first_L = (height_NL >= _NEAR_BEST * height_NL.max(axis=0)).argmax(axis=0)
    strength_L = np.minimum(height_NL[first_L, np.arange(layers.size)], 1.0)
    state.period_L[layers] = np.where(strength_L > 0, first_L + 1, 0)
    state.strength_L[layers] = strength_L
    return state


def _range(start: int, stop: int, step: int) -> Integers:
    return np.array(range(start, stop, step), dtype=np.int64)


def _autocorrelation(series_NLE: NDArray[np.float32]) -> Floats:
    """Autocorrelation [lag, L] of the shares, all experts of a layer together, by the Fourier transform."""
    held = series_NLE.shape[0]
    centred_NLE = series_NLE - series_NLE.mean(axis=0)
    power_FLE = np.abs(np.fft.rfft(centred_NLE, 2 * held, axis=0)) ** 2
    covariance_NL = np.fft.irfft(power_FLE.sum(axis=-1), 2 * held, axis=0)[:held]
    pairs_N1 = held - np.arange(held, dtype=np.float64)[:, None]
    return covariance_NL / np.maximum(covariance_NL[:1], 1e-30) * held / pairs_N1
