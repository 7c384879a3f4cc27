"""The plots of `counterpoise forecast` over time: error and coverage, with the jumps of the load.

Beside `forecast_plots.py`, which lists them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from balancer.backtest import Backtest
from experiments.forecast_plots_parts import FLOOR, Study, few, grid, log_y, look, png

# samples of a rolling figure over time: short enough for a collapse, long enough for a line
WINDOW = 21


def error_over_time(study: Study) -> bytes:
    """TV over time, rolling median over origins, of the few forecasters shown; jumps marked below."""

    def of(ax: Any, h: int) -> None:
        for i, name in enumerate(study.shown):
            mean_W = _over_layers(study.found.tv_FHWL[study.found.names.index(name), h])
            ax.plot(study.found.steps_W, _rolling(mean_W, np.nanmedian), **look(i), label=name)
        floor_W = _over_layers(study.found.noise_floor_HWL[h])
        ax.plot(study.found.steps_W, _rolling(floor_W, np.nanmedian), **FLOOR)
        if any((line.get_ydata() > 0).any() for line in ax.get_lines()):
            log_y(ax)
        ax.set_ylabel("total variation")
        _mark_jumps(ax, study.found)

    return _over_time(study, of, f"error over time of the origin, rolling median of {WINDOW} samples")


def coverage_over_time(study: Study) -> bytes:
    """Coverage of the intervals over time, rolling mean over origins, against the level aimed at."""

    def of(ax: Any, h: int) -> None:
        low, high = study.target - 0.02, study.target + 0.02
        ax.axhspan(100 * low, 100 * high, color="#dfeee6", zorder=0, label=f"{low:.0%} to {high:.0%}")
        ax.axhline(100 * study.target, color="black", lw=0.8)
        for i, name in enumerate(study.shown):
            mean_W = _over_layers(study.found.coverage_FHWL[study.found.names.index(name), h])
            ax.plot(study.found.steps_W, 100 * _rolling(mean_W, np.nanmean), **look(i), label=name)
        ax.set_ylabel("experts in the band (%)", fontsize=9)
        ax.set_ylim(top=101)
        _mark_jumps(ax, study.found)

    return _over_time(study, of, f"coverage over time of the origin, rolling mean of {WINDOW} samples")


def _over_time(study: Study, draw: Callable[[Any, int], None], title: str) -> bytes:
    horizons = few(len(study.found.horizons_H))
    figure, axes = grid(len(horizons), 1, (10.0, 2.5 * len(horizons) + 1.3), share_x=True)
    for row, h in enumerate(horizons):
        draw(axes[row][0], h)
        axes[row][0].set_title(f"{study.found.horizons_H[h]} steps ahead", fontsize=10, loc="left")
    axes[-1][0].set_xlabel("training step of the origin")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return png(figure, title)


def _mark_jumps(ax: Any, found: Backtest) -> None:
    """Ticks at the lower edge where some layer jumps, thick where half of them do."""
    share_W = found.jump_WL.mean(axis=-1)
    for some, height, width in ((share_W > 0, 0.05, 0.8), (share_W >= 0.5, 0.09, 2.2)):
        ax.vlines(
            found.steps_W[some], 0, height, transform=ax.get_xaxis_transform(), color="#b00020", lw=width
        )


def _over_layers(score_WL: np.ndarray) -> np.ndarray:
    number_W = (~np.isnan(score_WL)).sum(axis=-1)
    return np.nansum(score_WL, axis=-1) / np.where(number_W > 0, number_W, np.nan)


def _rolling(value_W: np.ndarray, middle: Callable[..., Any]) -> np.ndarray:
    """Figure over the WINDOW samples around each; NaN where the sample itself has none."""
    half = WINDOW // 2
    padded = np.concatenate([np.full(half, np.nan), value_W, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    here = ~np.isnan(value_W)
    result = np.full(value_W.shape, np.nan)
    if here.any():
        result[here] = middle(windows[here], axis=-1)
    return result
