"""Backtest: what forecasters would have said along a recorded trace, and how far off they were.

Behind the forecasters (`balancer/forecast.py`), in front of tables, plots and pages. One pass with a rolling
origin and without look-ahead:

    for every sample w:   hand a copy of its row to every forecaster (update), ask each for its forecast,
                          score the forecast at once against the sample that lies the horizon ahead

Only this file looks ahead: a forecaster gets arrays of its own, which refer to nothing else, and its forecast
is scored before it sees another row, so it can take nothing back. Nothing is kept but scores, so that the
memory is that of the scores. `Backtest.table` averages them over slices of origins and over regimes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from balancer.backtest_regimes import find_jumps, find_regimes, sample_changes
from balancer.backtest_table import Backtest, Kept
from balancer.forecast_record import Forecast, Forecaster, checked_horizons
from balancer.metrics import load_shares, total_variation
from balancer.trace import Trace
from balancer.trace_folder import STEP_LIMIT

_SCORE_NAMES = ("tv", "coverage", "live_coverage", "width", "interval_score", "rank_tv")
# experts that should get fewer copies than this are left out of the coverage of live experts
_LIVE_COPIES = 5.0
# a counted share that equals a bound up to rounding lies in the interval
_ROUNDING = 1e-12

Float = NDArray[np.float64]
Int = NDArray[np.int64]


def backtest(
    trace: Trace,
    forecasters: Mapping[str, Forecaster],
    horizons: Sequence[int] = (10, 100, 500),
    *,
    start: int = 0,
    num_ranks: int | None = None,
    keep: Sequence[tuple[str, int]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Backtest:
    """Score forecasters along a trace.

    trace: what happened. forecasters: by the name to show. horizons: H training steps ahead, increasing; an
    origin at step s is scored on the first sample at step s + h or later, and not at all where the trace ends
    before. start: index of the first sample that is an origin; those before are seen, not scored. num_ranks:
    P, a divisor of E, to score the loads of ranks with experts at home too. keep: (forecaster, layer) whose
    forecasts are wanted themselves. progress: called with (samples done, samples in all). Returns the
    Backtest; a layer without load at the target, or without any before, has NaN.

    Memory: 48 bytes a score (0.1 GiB for 20 forecasters, 3 horizons, 501 samples, 58 layers). Raises
    ValueError for bad arguments, for a trace in which nothing can be scored, and for a forecast that is none,
    naming forecaster and step.
    """
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    horizons_H = checked_horizons(num_layers, num_experts, horizons)
    target_HW = _targets(trace.steps_W, horizons_H, start)
    _check_arguments(trace, forecasters, target_HW, start, num_ranks, keep)
    scores = _Scores(tuple(forecasters), (len(horizons_H), num_samples, num_layers, num_experts), keep)
    states = {
        name: one.init(num_layers, num_experts, tuple(horizons_H.tolist()))
        for name, one in forecasters.items()
    }
    known_L = np.zeros(num_layers, dtype=np.bool_)
    for w in range(num_samples):
        step, row_LE = int(trace.steps_W[w]), np.asarray(trace.tokens_per_expert_WLE[w])
        known_L |= row_LE.sum(axis=-1) > 0
        for name, one in forecasters.items():
            states[name] = one.update(step, _own_copy(row_LE), states[name])
        if (target_HW[:, w] >= 0).any():
            for f, (name, one) in enumerate(forecasters.items()):
                scores.take(f, one.forecast(states[name]), step, horizons_H)
            for h in np.flatnonzero(target_HW[:, w] >= 0):
                scores.score(int(h), w, trace.tokens_per_expert_WLE[target_HW[h, w]], known_L, num_ranks)
        if progress is not None:
            progress(w + 1, num_samples)
    return scores.finish(trace, horizons_H, target_HW)


def noise_floor(tokens_per_expert_LE: NDArray[np.int64]) -> Float:
    """Return the TV that counting noise alone gives around the true shares: of a multinomial, [L].

    tokens_per_expert_LE: [L, E] counts, whose shares p stand for the true ones. 1/2 sum_e E|count/N - p| with
    the normal law's E|x| = sqrt(2 var / pi) and var = p (1 - p) / N; NaN for zero load.
    """
    p_LE = load_shares(tokens_per_expert_LE)
    copies_L = tokens_per_expert_LE.sum(axis=-1, keepdims=True)
    var_LE = p_LE * (1 - p_LE) / np.where(copies_L > 0, copies_L, 1)
    return 0.5 * np.sqrt(2 * var_LE / math.pi).sum(axis=-1)


class _Scores:
    """The scores as they grow, and the forecasts of the origin at hand: mean, low, high [F, H, L, E]."""

    def __init__(
        self, names: tuple[str, ...], sizes_HWLE: tuple[int, int, int, int], keep: Sequence[tuple[str, int]]
    ) -> None:
        H, W, L, E = sizes_HWLE
        F = len(names)
        self._names = names
        self._mean, self._low, self._high = (np.zeros((F, H, L, E)) for _ in range(3))
        self._by_name = {name: np.full((F, H, W, L), np.nan) for name in _SCORE_NAMES}
        self._floor_HWL = np.full((H, W, L), np.nan)
        self._intervals, self._levels = [""] * F, [0.9] * F
        self._kept = [
            Kept(name, layer, *(np.full((H, W, E), np.nan) for _ in range(3))) for name, layer in keep
        ]

    def take(self, f: int, forecast: Forecast, step: int, horizons_H: Int) -> None:
        """Check and store what forecaster f says."""
        shape = self._mean.shape[1:]
        own = forecast.low_HLE is not None and forecast.high_HLE is not None
        if forecast.low_HLE is not None and forecast.high_HLE is not None:
            low, high = forecast.low_HLE, forecast.high_HLE
        else:
            reach = NormalDist().inv_cdf((1 + forecast.level) / 2) * forecast.std_HLE
            low, high = (np.clip(forecast.mean_HLE + side * reach, 0, 1) for side in (-1, 1))
        where = f"forecaster {self._names[f]!r}, step {step}: "
        if forecast.step != step or not np.array_equal(forecast.horizons_H, horizons_H):
            raise ValueError(
                f"{where}the forecast is of step {forecast.step} for {forecast.horizons_H}, "
                f"expected {step} for {horizons_H}"
            )
        if not forecast.mean_HLE.shape == low.shape == high.shape == shape:
            raise ValueError(f"{where}the forecast has shape {forecast.mean_HLE.shape}, expected {shape}")
        off = np.abs(forecast.mean_HLE.sum(axis=-1) - 1).max()
        # 'not <=' refuses NaN too
        if not off <= 1e-6 or not (forecast.mean_HLE >= 0).all() or not (low <= high).all():
            raise ValueError(
                f"{where}the forecast is not shares (0 or more, sum 1; off by {off:.3g}) with an interval"
            )
        self._mean[f], self._low[f], self._high[f] = forecast.mean_HLE, low, high
        self._intervals[f], self._levels[f] = "own" if own else "normal", forecast.level

    def score(
        self, h: int, w: int, target_LE: NDArray[np.int64], known_L: NDArray[np.bool_], ranks: int | None
    ) -> None:
        """Score what was taken at horizon h against the target."""
        mean, low, high = self._mean[:, h], self._low[:, h], self._high[:, h]
        share_LE = load_shares(target_LE)
        scored_L = known_L & (target_LE.sum(axis=-1) > 0)
        under, over = low - share_LE, share_LE - high
        inside = (under <= _ROUNDING) & (over <= _ROUNDING)
        live = mean * target_LE.sum(axis=-1, keepdims=True) > _LIVE_COPIES
        width = (high - low).mean(axis=-1)
        outside = (np.maximum(under, 0) + np.maximum(over, 0)).mean(axis=-1)
        alpha_F1 = 1 - np.array(self._levels)[:, None]
        found = {
            "tv": total_variation(mean, target_LE),
            "coverage": inside.mean(axis=-1),
            "live_coverage": (inside & live).sum(axis=-1) / np.where(live.any(-1), live.sum(-1), np.nan),
            "width": width,
            "interval_score": width + 2 / alpha_F1 * outside,
        }
        if ranks is not None:
            found["rank_tv"] = total_variation(_at_home(mean, ranks), _at_home(target_LE, ranks))
        for name, score_FL in found.items():
            self._by_name[name][:, h, w] = np.where(scored_L, score_FL, np.nan)
        self._floor_HWL[h, w] = np.where(scored_L, noise_floor(target_LE), np.nan)
        for kept in self._kept:
            f = self._names.index(kept.forecaster)
            parts = ((kept.mean_HWE, mean), (kept.low_HWE, low), (kept.high_HWE, high))
            for to_HWE, from_FLE in parts:
                to_HWE[h, w] = from_FLE[f, kept.layer]

    def finish(self, trace: Trace, horizons_H: Int, target_HW: Int) -> Backtest:
        """Add what the trace says in hindsight."""
        if np.isnan(self._by_name["tv"]).all():
            raise ValueError(
                "no layer of the trace has load both at an origin and at its target: nothing to score"
            )
        change_WL = sample_changes(trace)
        jump_WL = find_jumps(change_WL)
        regime_HWL = find_regimes(change_WL, jump_WL, target_HW)
        regime_HWL[np.isnan(self._by_name["tv"][0])] = -1
        return Backtest(
            names=self._names,
            horizons_H=horizons_H,
            steps_W=np.asarray(trace.steps_W),
            target_HW=target_HW,
            **{f"{name}_FHWL": score_FHWL for name, score_FHWL in self._by_name.items()},
            noise_floor_HWL=self._floor_HWL,
            regime_HWL=regime_HWL,
            jump_WL=jump_WL,
            intervals=tuple(self._intervals),
            levels=tuple(self._levels),
            kept=tuple(self._kept),
        )


def _own_copy(row_LE: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a read-only copy that owns its values: no base leads back to the trace."""
    copy_LE = np.array(row_LE, dtype=np.int64, copy=True, order="C", subok=False)
    copy_LE.setflags(write=False)
    return copy_LE


def _at_home(load_XE: NDArray[np.float64] | NDArray[np.int64], ranks: int) -> Float:
    """Return the loads of the ranks, contiguous homes, [..., P]."""
    return load_XE.reshape(*load_XE.shape[:-1], ranks, -1).sum(axis=-1).astype(np.float64)


def _targets(steps_W: Int, horizons_H: Int, start: int) -> Int:
    """Return the sample that each origin is scored on at each horizon, [H, W]; -1 for none."""
    # steps lie below the limit: a horizon of as much is beyond every trace, and the sum fits in int64
    ahead_H1 = np.minimum(horizons_H, STEP_LIMIT)[:, None]
    target_HW = np.searchsorted(steps_W, steps_W[None, :] + ahead_H1, side="left")
    target_HW[target_HW == steps_W.shape[0]] = -1
    target_HW[:, : max(0, start)] = -1
    return target_HW.astype(np.int64)


def _check_arguments(
    trace: Trace,
    forecasters: Mapping[str, Forecaster],
    target_HW: Int,
    start: int,
    num_ranks: int | None,
    keep: Sequence[tuple[str, int]],
) -> None:
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    if not forecasters:
        raise ValueError("forecasters is empty; give one or more, say {'ema': forecaster('ema')}")
    if num_samples < 2:
        raise ValueError(f"the trace has {num_samples} sample; a forecast is scored from 2 samples on")
    if not 0 <= start < num_samples:
        raise ValueError(f"start={start} must be 0 to {num_samples - 1}, the index of a sample")
    if (target_HW < 0).all():
        spanned = int(trace.steps_W[-1] - trace.steps_W[start])
        raise ValueError(
            f"no origin has a target: from sample {start} on the trace spans {spanned} steps, less than "
            f"every horizon; use a horizon of {spanned} or less"
        )
    if num_ranks is not None and (num_ranks < 1 or num_experts % num_ranks):
        raise ValueError(f"num_ranks={num_ranks} does not divide the {num_experts} experts; use a divisor")
    for name, layer in keep:
        if name not in forecasters or not 0 <= layer < num_layers:
            raise ValueError(
                f"keep: {(name, layer)!r} must be one of the forecasters and a layer 0 to {num_layers - 1}"
            )
