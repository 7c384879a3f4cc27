"""Spread: how much the shares of a layer change from sample to sample, expert by expert, and when they jump.

Under every forecaster of the balancer. It works on square roots of shares, where counting noise has one size
for all experts: the count n of an expert with share p of N copies has variance phi N p (1 - p), so that
sqrt(n / N) has variance phi (1 - p) / (4 N) by the delta method, whatever p is (but for (1 - p)).

    deviation of expert e   m_e <- m_e + a (|sqrt s_e(t) - sqrt s_e(t-1)| - m_e)
    spread                  sd_e^2 = (1 - c) (1.2533 m_e)^2 + c mean_e (...) + (1 - p_e) / (4 N)

(1.2533 = sqrt(pi / 2) turns a mean absolute deviation into a standard deviation for normal errors; squares
would remember a jump for longer.) A layer
jumps when its total variation from one sample to the next is `JUMP_RATIO` times what it was lately and at
least `JUMP_LEAST`; then the deviations start anew from the jump itself, pooled over the layer.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# a jump: total variation between two samples over its own running mean, and at least this much
JUMP_RATIO, JUMP_LEAST = 4.0, 0.05
# memory of deviations and changes (1 - share kept a sample), and how far an expert leans on its layer
_DEVIATION_GAIN, _CHANGE_GAIN, _JUMP_GAIN, _SHRINK = 0.2, 0.1, 0.3, 0.2
_ABS_TO_STD = 1.2533


class Spread(NamedTuple):
    """last_LE [L, E]: shares of the last sample with load, uniform before;  deviation_LE [L, E]: mean
    absolute change of their roots;  change_L, slow_change_L [L]: running total variation from sample to
    sample; copies_L [L]: copies a sample;  age_L [L]: samples since the last jump;  seen_L [L]: samples with
    load."""

    last_LE: Floats
    deviation_LE: Floats
    change_L: Floats
    slow_change_L: Floats
    copies_L: Floats
    age_L: Integers
    seen_L: Integers


def spread_init(num_layers: int, num_experts: int) -> Spread:
    """Spread of layers that were never seen."""
    zeros_L = np.zeros(num_layers)
    return Spread(
        last_LE=np.full((num_layers, num_experts), 1.0 / num_experts),
        deviation_LE=np.zeros((num_layers, num_experts)),
        change_L=zeros_L,
        slow_change_L=zeros_L.copy(),
        copies_L=zeros_L.copy(),
        age_L=np.zeros(num_layers, dtype=np.int64),
        seen_L=np.zeros(num_layers, dtype=np.int64),
    )


def shares_of(counts_LE: Floats, spread: Spread) -> tuple[Floats, NDArray[np.bool_]]:
    """Shares [L, E] of a sample, and which layers had load [L]; a layer without keeps its last shares."""
    total_L = counts_LE.sum(axis=-1)
    loaded_L = total_L > 0
    share_LE = counts_LE / np.where(loaded_L, total_L, 1.0)[:, None]
    return np.where(loaded_L[:, None], share_LE, spread.last_LE), loaded_L


def spread_update(
    share_LE: Floats, total_L: Floats, loaded_L: NDArray[np.bool_], spread: Spread
) -> tuple[NDArray[np.bool_], Spread]:
    """Take a sample in.

    share_LE: [L, E] shares, of a layer without load the last ones; total_L: [L] copies; loaded_L: [L].
    Returns the layers that jumped [L], and the new spread.
    """
    known_L = loaded_L & (spread.seen_L > 0)
    change_L = 0.5 * np.abs(share_LE - spread.last_LE).sum(axis=-1)
    first_L = known_L & (spread.seen_L == 1)
    # the first change has nothing to be compared with: a large one is a jump
    usual_L = np.where(first_L, 0.5 * JUMP_LEAST, spread.change_L)
    jumped_L = known_L & (change_L > JUMP_RATIO * usual_L) & (change_L > JUMP_LEAST)
    age_L = np.where(jumped_L, 0, spread.age_L + known_L)
    new = Spread(
        last_LE=share_LE,
        deviation_LE=_deviation(share_LE, spread, known_L, first_L | jumped_L, age_L),
        change_L=_running(
            spread.change_L, change_L, known_L, first_L, np.where(jumped_L, _JUMP_GAIN, _CHANGE_GAIN)
        ),
        slow_change_L=_running(spread.slow_change_L, change_L, known_L & ~jumped_L, first_L, 0.02),
        copies_L=_running(spread.copies_L, total_L, loaded_L, spread.seen_L == 0, _CHANGE_GAIN),
        age_L=age_L,
        seen_L=spread.seen_L + loaded_L,
    )
    return jumped_L, new


def spread_std(spread: Spread) -> Floats:
    """Spread [L, E] of root shares: of their change from sample to sample, and once more the counting noise.

    The noise alone keeps it above 0 where nothing has changed yet; intervals are calibrated on top of it.
    """
    variance_LE = (_ABS_TO_STD * spread.deviation_LE) ** 2
    pooled_L1 = variance_LE.mean(axis=-1, keepdims=True)
    noise_LE = (1.0 - spread.last_LE) / (4.0 * np.maximum(spread.copies_L, 1.0))[:, None]
    return np.sqrt((1.0 - _SHRINK) * variance_LE + _SHRINK * pooled_L1 + noise_LE)


def _deviation(
    share_LE: Floats,
    spread: Spread,
    known_L: NDArray[np.bool_],
    restart_L: NDArray[np.bool_],
    age_L: Integers,
) -> Floats:
    """Running mean of |change of the root|; where it starts anew, half the expert's own, half the layer's."""
    now_LE = np.abs(np.sqrt(share_LE) - np.sqrt(spread.last_LE))
    start_LE = 0.5 * (now_LE + now_LE.mean(axis=-1, keepdims=True))
    gain_L1 = np.maximum(_DEVIATION_GAIN, 1.0 / (age_L + 1.0))[:, None]
    moved_LE = spread.deviation_LE + gain_L1 * (now_LE - spread.deviation_LE)
    new_LE = np.where(restart_L[:, None], start_LE, moved_LE)
    return np.where(known_L[:, None], new_LE, spread.deviation_LE)


def _running(
    old_L: Floats, new_L: Floats, taken_L: NDArray[np.bool_], first_L: NDArray[np.bool_], gain: Floats | float
) -> Floats:
    """Exponential mean that starts at its first value."""
    moved_L = np.where(first_L, new_L, old_L + gain * (new_L - old_L))
    return np.where(taken_L, moved_L, old_L)
