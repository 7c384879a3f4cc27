"""The scores of a backtest, averaged into the rows of a table.

Behind `balancer/backtest.py`, which fills the record; in front of the printed table, the plots and the page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.backtest_regimes import SCORED_REGIMES

# the block bootstrap: draws, and the fewest blocks whose spread says something
_DRAWS, _LEAST_BLOCKS = 400, 3

Float = NDArray[np.float64]
Int = NDArray[np.int64]


class Kept(NamedTuple):
    """The forecasts of one layer. mean_HWE, low_HWE, high_HWE: [H, W, E], by origin, NaN where not scored."""

    forecaster: str
    layer: int
    mean_HWE: Float
    low_HWE: Float
    high_HWE: Float


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One row of a table: the scores of a forecaster at a horizon, mean over origins and layers.

    horizon: training steps. num_scores: origins x layers behind it, 0 leaves every figure NaN. tv: total
    variation. noise_floor: the TV that counting noise alone gives. best_single: the forecaster of least tv
    among those that combine no others, at this horizon and in this slice, in hindsight. ratio_to_best_single:
    tv over its. best_overall, ratio_to_best_overall: the same for the one that is best over the whole trace.
    difference, difference_se: tv less its, and the standard error of that (NaN where the slice
    is too short to tell). skill: 1 - tv / that of "persistence", NaN without one. coverage: share of the
    experts inside their interval; live_coverage: of those that should get more than 5 copies. width: of the
    interval, in shares. interval_score: Winkler's, width + what lies outside / (half of 1 - level); smaller
    is better. rank_tv: TV of the ranks' loads with experts at home, NaN without num_ranks.
    """

    forecaster: str
    horizon: int
    regime: str
    num_scores: int
    tv: float
    noise_floor: float
    best_single: str
    ratio_to_best_single: float
    best_overall: str
    ratio_to_best_overall: float
    difference: float
    difference_se: float
    skill: float
    coverage: float
    live_coverage: float
    width: float
    interval_score: float
    rank_tv: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backtest:
    """All scores of a backtest, by forecaster F, horizon H, origin W (index of the sample) and layer L.

    names: of the forecasters. horizons_H: training steps. steps_W: of the samples. target_HW: [H, W] int64,
    sample that an origin is scored on, -1 for none. tv_FHWL, coverage_FHWL, live_coverage_FHWL, width_FHWL,
    interval_score_FHWL, rank_tv_FHWL: [F, H, W, L] float64, NaN where not scored; see `Score`.
    noise_floor_HWL: [H, W, L] float64. regime_HWL: [H, W, L] int8, index into SCORED_REGIMES, -1 where not
    scored. jump_WL: [W, L] bool, a jump came with this sample. intervals: for each forecaster "own", or
    "normal" where it gives none and mean +- z std, clipped to [0, 1], stands in. levels: of the intervals.
    kept: forecasts of one layer, on demand.
    """

    names: tuple[str, ...]
    horizons_H: Int
    steps_W: Int
    target_HW: Int
    tv_FHWL: Float
    coverage_FHWL: Float
    live_coverage_FHWL: Float
    width_FHWL: Float
    interval_score_FHWL: Float
    rank_tv_FHWL: Float
    noise_floor_HWL: Float
    regime_HWL: NDArray[np.int8]
    jump_WL: NDArray[np.bool_]
    intervals: tuple[str, ...]
    levels: tuple[float, ...]
    kept: tuple[Kept, ...] = field(default=())

    def table(
        self,
        *,
        first: int | None = None,
        last: int | None = None,
        regime: str | None = None,
        by: str = "origin",
        combinations: Sequence[str] = ("regime",),
    ) -> list[Score]:
        """Average the scores over origins and layers.

        first, last: only the origins among the first or the last so many samples of the trace; with by
        "target", the scores whose target is among them. regime: only scores of this one of SCORED_REGIMES.
        combinations: forecasters that combine others, never the best single. Returns a row for every
        forecaster and horizon. Raises ValueError for a slice below 1 or beyond the trace, both slices at
        once, or an unknown regime or `by`.
        """
        used_HWL, all_HWL = self._used(first, last, regime, by), self._used(None, None, None, by)
        rows: list[Score] = []
        for h in range(len(self.horizons_H)):
            best = self._best(h, used_HWL[h], combinations)
            overall = self._best(h, all_HWL[h], combinations)
            for f in range(len(self.names)):
                rows.append(self._row(f, h, used_HWL[h], regime or "all", (best, overall)))
        return rows

    def difference(
        self,
        name: str,
        other: str,
        horizon: int,
        *,
        first: int | None = None,
        last: int | None = None,
        regime: str | None = None,
        by: str = "origin",
    ) -> tuple[float, float]:
        """Return the mean TV of one forecaster less that of another, and the standard error of that.

        The error is that of a bootstrap over blocks of origins, each at least as long as the horizon: errors
        of neighbouring origins share targets, and a plain standard error would be far too small. NaN for
        fewer than 3 blocks. A difference of less than two standard errors may be luck. Raises ValueError
        as `table` does, and for a forecaster or a horizon that is not in the backtest.
        """
        for kind, value, known in (
            ("forecaster", name, self.names),
            ("forecaster", other, self.names),
            ("horizon", horizon, tuple(int(h) for h in self.horizons_H)),
        ):
            if value not in known:
                raise ValueError(f"{kind} {value!r} is not in the backtest; it has {known}")
        h = int(np.flatnonzero(self.horizons_H == horizon)[0])
        return self._difference(name, other, h, self._used(first, last, regime, by)[h])

    def _used(self, first: int | None, last: int | None, regime: str | None, by: str) -> NDArray[np.bool_]:
        """Return which scores a slice holds, [H, W, L]."""
        num_samples = self.steps_W.shape[0]
        if first is not None and last is not None:
            raise ValueError(f"first={first} and last={last} exclude each other; give one")
        for name, value in (("first", first), ("last", last)):
            if value is not None and not 1 <= value <= num_samples:
                raise ValueError(f"{name}={value} samples must be 1 to {num_samples}, what the trace has")
        if by not in ("origin", "target"):
            raise ValueError(f"by={by!r} must be 'origin' or 'target', what first and last count")
        used_HWL: NDArray[np.bool_] = ~np.isnan(self.tv_FHWL[0])
        place_HW = self.target_HW if by == "target" else np.arange(num_samples, dtype=np.int64)[None]
        least = 0 if last is None else num_samples - last
        below = num_samples if first is None else first
        used_HWL &= ((place_HW >= least) & (place_HW < below))[:, :, None]
        if regime is not None:
            if regime not in SCORED_REGIMES:
                raise ValueError(f"regime={regime!r} is unknown; use one of {', '.join(SCORED_REGIMES)}")
            used_HWL &= self.regime_HWL == SCORED_REGIMES.index(regime)
        return used_HWL

    def _best(self, h: int, used_WL: NDArray[np.bool_], combinations: Sequence[str]) -> str:
        """Return the single forecaster of least mean TV, "" where there is none or nothing is scored."""
        tv = {
            name: _mean(self.tv_FHWL[f, h], used_WL)
            for f, name in enumerate(self.names)
            if name not in combinations
        }
        return min(tv, key=lambda name: tv[name]) if tv and used_WL.any() else ""

    def _row(self, f: int, h: int, used_WL: NDArray[np.bool_], regime: str, best: tuple[str, str]) -> Score:
        def mean_of(name: str) -> float:
            known = name in self.names
            return _mean(self.tv_FHWL[self.names.index(name), h], used_WL) if known else math.nan

        def over(name: str) -> float:
            below = mean_of(name)
            return tv / below if below > 0 else math.nan

        tv = mean_of(self.names[f])
        difference, error = self._difference(self.names[f], best[0], h, used_WL)
        return Score(
            forecaster=self.names[f],
            horizon=int(self.horizons_H[h]),
            regime=regime,
            num_scores=int(used_WL.sum()),
            tv=tv,
            noise_floor=_mean(self.noise_floor_HWL[h], used_WL),
            best_single=best[0],
            ratio_to_best_single=over(best[0]),
            best_overall=best[1],
            ratio_to_best_overall=over(best[1]),
            difference=difference,
            difference_se=error,
            skill=1 - over("persistence"),
            coverage=_mean(self.coverage_FHWL[f, h], used_WL),
            live_coverage=_mean(self.live_coverage_FHWL[f, h], used_WL),
            width=_mean(self.width_FHWL[f, h], used_WL),
            interval_score=_mean(self.interval_score_FHWL[f, h], used_WL),
            rank_tv=_mean(self.rank_tv_FHWL[f, h], used_WL),
        )

    def _difference(self, name: str, other: str, h: int, used_WL: NDArray[np.bool_]) -> tuple[float, float]:
        if not other or not used_WL.any():
            return math.nan, math.nan
        if name == other:
            return 0.0, 0.0
        f, g = self.names.index(name), self.names.index(other)
        gap_WL = np.where(used_WL, self.tv_FHWL[f, h] - self.tv_FHWL[g, h], 0.0)
        number_W = used_WL.sum(axis=-1)
        (origins,) = np.nonzero(number_W)
        ahead_W = self.target_HW[h, origins] - origins
        gap_O, number_O = gap_WL.sum(axis=-1)[origins], number_W[origins].astype(np.float64)
        return float(gap_O.sum() / number_O.sum()), _block_error(gap_O, number_O, int(ahead_W.max()))


def _mean(score_WL: Float, used_WL: NDArray[np.bool_]) -> float:
    """Return the mean of what is used and not NaN, NaN for nothing."""
    values = score_WL[used_WL]
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def _block_error(gap_O: Float, number_O: Float, ahead: int) -> float:
    """Return the standard error of sum(gap) / sum(number) over origins, by a circular block bootstrap."""
    num_origins = gap_O.shape[0]
    length = max(ahead, math.ceil(num_origins ** (1 / 3)))
    num_blocks = round(num_origins / length)
    if num_blocks < _LEAST_BLOCKS:
        return math.nan
    # sums of every block by running sums; wrapped around, so that each origin is in as many blocks
    gap, number = (
        np.concatenate([[0.0], np.cumsum(np.concatenate([part_O, part_O[: length - 1]]))])
        for part_O in (gap_O, number_O)
    )
    starts = np.random.default_rng(0).integers(0, num_origins, size=(_DRAWS, num_blocks))
    total, count = ((part[starts + length] - part[starts]).sum(axis=-1) for part in (gap, number))
    return float((total / count).std(ddof=1))
