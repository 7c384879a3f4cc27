"""Conformal: intervals that cover what they promise, whatever the forecaster, counting how often they miss.

Behind the forecasters: a forecast of root shares f with spread sd (`balancer/spread.py`) gets the interval
f -+ m sd lag^0.35, and the multiplier m of every horizon and layer is learnt from the scores of forecasts
whose time has come:

    score           z = |sqrt s - f| / (sd lag^0.35)        lag = horizon in samples
    scores lately   histogram over z, eight bins an octave, that lives 5 samples at lag 1, longer at long lags
    m               its quantile 1 - alpha
    alpha           alpha + gamma (promised miss rate - miss rate of this sample), more slowly at long lags:
                    adaptive conformal inference (Gibbs and Candes, 2021); on average the promise is kept even
                    if the scores drift

Only *live* experts count, those expected to get a copy or more: the empty ones are covered almost surely,
and would let the interval of the others shrink. lag^0.35 is a start only (a random walk would have 0.5, noise
alone 0): m takes over once scores come in.
"""

from functools import lru_cache
from math import erf, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LIVE_COPIES = 1.0
LAG_POWER = 0.35
# memory of scores in samples, and gain of alpha, at lag 1; and how both slow down with the lag: forecasts a
# horizon ahead overlap for as long as it is, so that many samples of scores are but one piece of news
_MEMORY, _MEMORY_PER_LAG, _ALPHA_GAIN, _ALPHA_PER_LAG = 5.0, 0.2, 0.05, 0.1
# bins of z from 2^-6 to 2^8, eight an octave, as the leading bits of a float32 count them; the first and the
# last catch what is beyond
NUM_BINS, LOW_CODE, CODE_SHIFT = 112, (127 - 6) * 8, 20
LEAST_WIDTH = 1e-12


class Conformal(NamedTuple):
    """score_HLB [H, L, bins + 2]: histogram of scores lately;  fed_HL [H, L]: samples of scores so far;
    alpha_HL [H, L]: miss rate aimed at;  level []: promised coverage."""

    score_HLB: Floats
    fed_HL: NDArray[np.int64]
    alpha_HL: Floats
    level: Floats


def conformal_init(num_horizons: int, num_layers: int, num_experts: int, level: float) -> Conformal:
    """State that has seen no score: as if one sample of normal scores had come in.

    Raises ValueError for a level that is not inside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level={level} must lie between 0 and 1; 0.9 covers nine of ten")
    start_B = _half_normal_bins() * num_experts
    score_HLB = np.broadcast_to(start_B, (num_horizons, num_layers, start_B.size)).copy()
    alpha_HL = np.full((num_horizons, num_layers), 1.0 - level)
    fed_HL = np.zeros((num_horizons, num_layers), dtype=np.int64)
    return Conformal(score_HLB, fed_HL, alpha_HL, np.array(level))


def multiplier(state: Conformal, horizon: int) -> Floats:
    """Multiplier m [L] of a horizon (its index): quantile 1 - alpha of the scores lately."""
    score_LB = state.score_HLB[horizon]
    share_LB = np.cumsum(score_LB, axis=-1) / score_LB.sum(axis=-1, keepdims=True)
    wanted_L1 = 1.0 - state.alpha_HL[horizon][:, None]
    bin_L1 = np.minimum((share_LB < wanted_L1).sum(axis=-1, keepdims=True), NUM_BINS + 1)
    above_L1 = np.take_along_axis(share_LB, bin_L1, axis=-1)
    below_L1 = np.where(bin_L1 > 0, np.take_along_axis(share_LB, np.maximum(bin_L1 - 1, 0), axis=-1), 0.0)
    within_L1 = np.clip((wanted_L1 - below_L1) / np.maximum(above_L1 - below_L1, 1e-12), 0.0, 1.0)
    edge_B = np.concatenate([[_edges()[0] / 2], _edges(), [_edges()[-1]]])
    low_L1, high_L1 = edge_B[bin_L1], edge_B[bin_L1 + 1]
    return (low_L1 + within_L1 * (high_L1 - low_L1))[:, 0]


def multipliers(state: Conformal, lag_H: NDArray[np.int64]) -> Floats:
    """Multipliers [H, L] of all horizons.

    lag_H: horizons in samples. Where no score of a horizon has come in yet, that of the next shorter one
    stands in, grown as it grew from the one before: errors that pile up faster than lag^0.35 (a drift goes as
    the lag) show at short horizons first.
    """
    own_HL = np.stack([multiplier(state, h) for h in range(lag_H.size)])
    log_HL, log_lag_H = np.log(own_HL), np.log(lag_H.astype(np.float64))
    slope_L = np.full(own_HL.shape[1], 0.5 - LAG_POWER)  # of a random walk, as long as nothing is known
    known_L = state.fed_HL[0] > 0
    for h in range(1, lag_H.size):
        apart, fed_L = float(log_lag_H[h] - log_lag_H[h - 1]), state.fed_HL[h] > 0
        log_HL[h] = np.where(known_L & ~fed_L, log_HL[h - 1] + slope_L * apart, log_HL[h])
        if apart > 0:
            grown_L = np.clip((log_HL[h] - log_HL[h - 1]) / apart, -LAG_POWER, 1.0 - LAG_POWER)
            slope_L = np.where(known_L & fed_L, grown_L, slope_L)
        known_L = known_L | fed_L
    return np.exp(log_HL)


def conformal_update(
    state: Conformal, horizon: int, lag: int, count_LB: Floats, number_L: Floats, missed_L: Floats
) -> Conformal:
    """Take the scores of one sample in; changes the arrays of `state`.

    horizon: its index. lag: in samples. count_LB, number_L, missed_L: what `Bands.tally` counted, with the
    multiplier of now; a layer without any is left as it was.
    """
    counts_L = number_L > 0
    error_L = (1.0 - state.level) - missed_L / np.maximum(number_L, 1)
    gain = _ALPHA_GAIN / (1 + _ALPHA_PER_LAG * (lag - 1))
    kept = 1 - 1 / (_MEMORY + _MEMORY_PER_LAG * (lag - 1))
    # alpha may wander, but neither to where no score tells a quantile nor over all of them
    least, most = 0.05 * (1.0 - state.level), 1.0 - 0.5 * state.level
    alpha_L = np.clip(state.alpha_HL[horizon] + gain * error_L, least, most)
    state.alpha_HL[horizon] = np.where(counts_L, alpha_L, state.alpha_HL[horizon])
    old_LB = state.score_HLB[horizon]
    state.score_HLB[horizon] = np.where(counts_L[:, None], kept * old_LB + count_LB, old_LB)
    state.fed_HL[horizon] += counts_L
    return state


class Bands(Protocol):
    """The two passes over all experts: numpy's below, or numba's."""

    def tally(
        self,
        share_LE: Floats,
        root_LE: Any,
        std_LE: Any,
        reach: float,
        total_L: Floats,
        multiplier_L: Floats,
    ) -> tuple[Floats, Floats, Floats]: ...

    def bands(
        self, mean_HLE: Floats, std_LE: Floats, reach_H: Floats, multiplier_HL: Floats, normal: float
    ) -> tuple[Floats, Floats, Floats]: ...


class NumpyBands:
    """The passes as array expressions: what the compiled ones are compared with."""

    def tally(
        self,
        share_LE: Floats,
        root_LE: Any,
        std_LE: Any,
        reach: float,
        total_L: Floats,
        multiplier_L: Floats,
    ) -> tuple[Floats, Floats, Floats]:
        """Scores of one origin, counted.

        share_LE: [L, E] what came;  root_LE, std_LE: [L, E] root of the forecast and its spread then;  reach:
        lag^0.35;  total_L: copies now, 0 for a layer not to be counted;  multiplier_L: m. Returns count_LB
        [L, bins + 2], how many live experts there are, and how many of them the interval missed.
        """
        expected_LE = np.asarray(root_LE, dtype=np.float64)
        width_LE = np.maximum(np.asarray(std_LE, dtype=np.float64) * reach, LEAST_WIDTH)
        score_LE = np.abs(np.sqrt(share_LE) - expected_LE) / width_LE
        live_LE = (expected_LE**2 * total_L[:, None] >= LIVE_COPIES) & (total_L > 0)[:, None]
        missed_L = (live_LE & (score_LE > multiplier_L[:, None])).sum(axis=-1)
        code_LE = score_LE.astype(np.float32).view(np.int32).astype(np.int64) >> CODE_SHIFT
        place_LE = np.clip(code_LE - LOW_CODE + 1, 0, NUM_BINS + 1)
        place_LE += np.arange(len(total_L))[:, None] * (NUM_BINS + 2)
        counts = np.bincount(place_LE[live_LE], minlength=len(total_L) * (NUM_BINS + 2))
        count_LB = counts.reshape(len(total_L), NUM_BINS + 2).astype(np.float64)
        return count_LB, live_LE.sum(axis=-1).astype(np.float64), missed_L.astype(np.float64)

    def bands(
        self, mean_HLE: Floats, std_LE: Floats, reach_H: Floats, multiplier_HL: Floats, normal: float
    ) -> tuple[Floats, Floats, Floats]:
        """Interval and standard deviation of the shares.

        mean_HLE: [H, L, E] shares;  std_LE: spread of root shares;  reach_H: lag^0.35;  multiplier_HL: m;
        normal: m of normal errors. Returns low, high and std [H, L, E]; of the square of a normal variable
        the variance is 4 mean^2 var + 2 var^2.
        """
        root_HLE = np.sqrt(mean_HLE)
        half_HLE = multiplier_HL[:, :, None] * (std_LE * reach_H[:, None, None])
        var_HLE = (half_HLE / normal) ** 2
        low_HLE = np.maximum(root_HLE - half_HLE, 0.0) ** 2
        high_HLE = np.minimum(root_HLE + half_HLE, 1.0) ** 2
        return low_HLE, high_HLE, np.sqrt(4.0 * mean_HLE * var_HLE + 2.0 * var_HLE**2)


@lru_cache(maxsize=1)
def _edges() -> Floats:
    """Borders of the bins, [bins + 1]: where the leading bits of a float32 change."""
    codes = (np.arange(NUM_BINS + 1, dtype=np.int32) + LOW_CODE) << CODE_SHIFT
    return codes.astype(np.int32).view(np.float32).astype(np.float64)


def _half_normal_bins() -> Floats:
    """Probability of each bin for |z| of a standard normal; sums to 1."""
    below = [0.0, *(erf(edge / sqrt(2.0)) for edge in _edges()), 1.0]
    return np.diff(np.array(below))
