"""Simple members: one idea each of what the load will be, as classical forecasting has them.

Made into forecasters by `balancer/forecast_build.py`; beside the bank, which mixes and beats them, they are
what a result has to be compared with. All work on shares [L, E]; gains and damping are per sample; a layer
without load in a sample is left as it was.

    persistence  the last sample                          window    mean of the last n samples
    ema          exponential mean                         holt      exponential mean with a damped trend
    decay        exponential mean, fading to uniform      seasonal  the same phase of earlier periods
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.forecast_build import Flags, Floats, Integers, Member, Sample, shares


class Level(NamedTuple):
    """level_LE [L, E];  started_L [L]: layers that had load."""

    level_LE: Floats
    started_L: Flags


def checked_fraction(name: str, value: float, hint: str, *, least: float = 0.0, zero: bool = False) -> float:
    """Return a gain or rate in (least, 1], or [least, 1] with zero. Raises ValueError with the hint."""
    if not (least < value <= 1.0 or (zero and value == least)):
        raise ValueError(f"{name}={value} must lie between {least} and 1; {hint}")
    return value


def checked_whole(name: str, value: object, least: int, hint: str) -> int:
    """Return a number of samples or directions, `least` or more. Raises ValueError with the hint."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}; {hint}")
    return value


def reach(damping: float, lag_H: Integers) -> Floats:
    """Samples [H] over which a slope counts: damping + damping^2 + ... + damping^lag."""
    if damping == 1.0:
        return lag_H.astype(np.float64)
    return damping * (1.0 - damping ** lag_H.astype(np.float64)) / (1.0 - damping)


def ema(gain: float = 0.5) -> Member:
    """Exponential mean: x <- x + gain (share - x).

    gain: per sample, in (0, 1]; 1 is persistence; noise over drift decides, 0.2 (noise) to 0.7 (drift).
    """
    checked_fraction("gain", gain, "0.5 is a good start")

    def update(sample: Sample, state: Level) -> Level:
        return _follow(sample, state, gain)

    return Member(_level_init, update, _flat)


def decay(gain: float = 0.6, rate: float = 0.05) -> Member:
    """Exponential mean that fades to uniform: (1 - q) x + q / E with q = 1 - (1 - rate)^lag.

    gain: of the mean. rate: what the bias loop takes off the imbalance per sample (its gain g), in [0, 1].
    """
    checked_fraction("gain", gain, "0.6 is a good start")
    checked_fraction("rate", rate, "the gain of the bias loop per sample", zero=True)

    def update(sample: Sample, state: Level) -> Level:
        return _follow(sample, state, gain)

    def mean(lag_H: Integers, state: Level) -> Floats:
        fade_H = (1.0 - (1.0 - rate) ** lag_H)[:, None, None]
        return (1.0 - fade_H) * state.level_LE + fade_H / state.level_LE.shape[-1]

    return Member(_level_init, update, mean)


class Window(NamedTuple):
    """share_NLE [n, L, E]: the last samples, a ring;  number_L [L]: samples that a layer has had."""

    share_NLE: Floats
    number_L: Integers


def window(length: int = 10) -> Member:
    """Mean of the last `length` samples with load of each layer."""
    checked_whole("length", length, 1, "10 samples are a good start")

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> Window:
        return Window(np.zeros((length, num_layers, num_experts)), np.zeros(num_layers, dtype=np.int64))

    def update(sample: Sample, state: Window) -> Window:
        layers = np.flatnonzero(sample.loaded_L)
        state.share_NLE[state.number_L[layers] % length, layers] = sample.share_LE[layers]
        return state._replace(number_L=state.number_L + sample.loaded_L)

    def mean(lag_H: Integers, state: Window) -> Floats:
        held_L1 = np.clip(state.number_L, 1, length)[:, None]
        mean_LE: Floats = state.share_NLE.sum(axis=0) / held_L1
        return _repeated(np.where((state.number_L > 0)[:, None], mean_LE, 1.0 / mean_LE.shape[-1]), lag_H)

    return Member(init, update, mean)


class Trend(NamedTuple):
    """level_LE, slope_LE [L, E]: slope per sample;  started_L [L]."""

    level_LE: Floats
    slope_LE: Floats
    started_L: Flags


def holt(gain: float = 0.7, trend_gain: float = 0.1, damping: float = 0.8) -> Member:
    """Exponential mean with a damped trend (Holt; Gardner and McKenzie, 1985).

    gain: of the level, in (0, 1]. trend_gain: of the slope, a share of gain, in [0, 1]. damping: of the slope
    per sample, in [0, 1]: shares that move in a straight line soon leave [0, 1], 0.8 lives 5 samples.
    """
    checked_fraction("gain", gain, "0.7 is a good start")
    checked_fraction("trend_gain", trend_gain, "0.1 is a good start", zero=True)
    checked_fraction("damping", damping, "0.8 is a good start", zero=True)

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> Trend:
        start = _level_init(num_layers, num_experts, horizons_H)
        return Trend(start.level_LE, np.zeros_like(start.level_LE), start.started_L)

    def update(sample: Sample, state: Trend) -> Trend:
        expected_LE = np.where(
            state.started_L[:, None], state.level_LE + damping * state.slope_LE, sample.share_LE
        )
        error_LE = np.where(sample.loaded_L[:, None], sample.share_LE - expected_LE, 0.0)
        kept_LE = np.where(sample.loaded_L[:, None], expected_LE, state.level_LE)
        slope_LE = np.where(sample.loaded_L[:, None], damping * state.slope_LE, state.slope_LE)
        return Trend(
            kept_LE + gain * error_LE,
            slope_LE + gain * trend_gain * error_LE,
            state.started_L | sample.loaded_L,
        )

    def mean(lag_H: Integers, state: Trend) -> Floats:
        return shares(state.level_LE + reach(damping, lag_H)[:, None, None] * state.slope_LE)

    return Member(init, update, mean)


# ---- shared ---------------------------------------------------------------------------------------------


def _level_init(num_layers: int, num_experts: int, horizons_H: Integers) -> Level:
    return Level(np.full((num_layers, num_experts), 1.0 / num_experts), np.zeros(num_layers, dtype=np.bool_))


def _follow(sample: Sample, state: Level, gain: float) -> Level:
    gain_L = np.where(state.started_L, gain, 1.0) * sample.loaded_L
    level_LE = state.level_LE + gain_L[:, None] * (sample.share_LE - state.level_LE)
    return Level(level_LE, state.started_L | sample.loaded_L)


def _flat(lag_H: Integers, state: Level) -> Floats:
    return _repeated(state.level_LE, lag_H)


def _repeated(mean_LE: NDArray[np.float64], lag_H: Integers) -> Floats:
    return np.broadcast_to(mean_LE, (lag_H.size, *mean_LE.shape)).copy()
