"""The plots of `counterpoise forecast`: forecast against real, error by horizon, and both over time.

Behind the backtest, in front of the page; each is returned as PNG bytes. What they share is in
`forecast_plots_parts.py`, those over time in `forecast_plots_time.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from balancer.backtest_table import Score
from balancer.metrics import load_shares
from experiments.forecast_plots_parts import COLOURS, FLOOR, PALE, Study, few, grid, log_y, look, png
from experiments.forecast_plots_time import coverage_over_time, error_over_time

# the ratio to the best single forecaster up to which the close-up shows
_FAR = 1.25


def typical_layer(changes_WL: np.ndarray) -> int:
    """The layer whose mean change from sample to sample is the median one.   changes_WL: [W, L], NaN none."""
    number_L = (~np.isnan(changes_WL)).sum(axis=0)
    mean_L = np.where(number_L > 0, np.nansum(changes_WL, axis=0) / np.maximum(number_L, 1), -1)
    used = np.flatnonzero(number_L)
    order = used[np.argsort(mean_L[used], kind="stable")]
    return int(order[(len(order) - 1) // 2]) if len(order) else 0


def telling_experts(counts_WE: np.ndarray) -> dict[int, str]:
    """Up to three experts of a layer with what they are: the heaviest, the median one, the most changing.

    counts_WE: [W, E] counts. Returns {expert: words}, fewer where they fall together.
    """
    share_WE = load_shares(counts_WE[counts_WE.sum(axis=-1) > 0])
    if not len(share_WE):
        return {0: "no load"}
    by_load = np.argsort(share_WE.mean(axis=0), kind="stable")
    change_E = np.abs(np.diff(share_WE, axis=0)).sum(axis=0)
    wanted = [
        (int(by_load[-1]), "the heaviest"),
        (int(by_load[(len(by_load) - 1) // 2]), "of median load"),
        *[(int(e), "changes most") for e in np.argsort(-change_E, kind="stable")],
    ]
    chosen: dict[int, str] = {}
    for expert, why in wanted:
        if expert not in chosen and len(chosen) < 3 and why not in chosen.values():
            chosen[expert] = why
    return chosen


def forecast_against_real(study: Study) -> bytes:
    """Counted shares of a few experts, and what was forecast for that time the horizon before."""
    kept, found = study.kept, study.found
    counts_WE = np.asarray(study.trace.tokens_per_expert_WLE[:, kept.layer])
    total_W1 = counts_WE.sum(axis=-1, keepdims=True)
    real_WE = 100 * counts_WE / np.where(total_W1 > 0, total_W1, np.nan)
    experts = telling_experts(counts_WE)
    horizons = few(len(found.horizons_H))
    figure, axes = grid(len(experts), len(horizons), (3.6 * len(horizons) + 0.7, 2.3 * len(experts) + 1.2))
    tops = [0.0] * len(experts)
    for column, h in enumerate(horizons):
        (origins,) = np.nonzero(found.target_HW[h] >= 0)
        steps = found.steps_W[found.target_HW[h, origins]]
        for row, (expert, why) in enumerate(experts.items()):
            ax = axes[row][column]
            low, high, mean = (
                100 * part[h, origins, expert] for part in (kept.low_HWE, kept.high_HWE, kept.mean_HWE)
            )
            ax.fill_between(
                steps, low, high, color=COLOURS[5], alpha=0.45, lw=0, label=f"{study.target:.0%} band"
            )
            # the forecast, thin, over the counted share: they often fall together
            ax.plot(found.steps_W, real_WE[:, expert], color=COLOURS[4], lw=2.0, label="counted")
            ax.plot(steps, mean, color=COLOURS[0], lw=1.0, label="forecast")
            tops[row] = max(tops[row], *(np.nanmax(p, initial=0) for p in (mean, real_WE[:, expert])))
            if row == 0:
                ax.set_title(f"forecast {found.horizons_H[h]} steps before", fontsize=11)
            if column == 0:
                ax.set_ylabel(f"expert {expert} ({why})\nshare of the copies (%)", fontsize=9)
            if row == len(experts) - 1:
                ax.set_xlabel("training step")
    for row, top in enumerate(tops):
        for ax in axes[row]:  # one scale a row, that of the shares: after a jump the band may reach 100 %
            ax.set_ylim(0, 1.15 * top or 1)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return png(figure, f"layer {kept.layer}: forecast of {kept.forecaster} against what came")


def error_by_horizon(study: Study) -> bytes:
    """Mean TV against the horizon with the floor of counting noise; beside it, TV over the best single's."""
    figure, (axes,) = grid(1, 2, (11.0, 5.2))
    by_name: dict[str, list[Score]] = {}
    for row in study.rows:
        by_name.setdefault(row.forecaster, []).append(row)
    others = [name for name in by_name if name not in study.shown]
    looks = {name: {"color": PALE, "lw": 0.9, "marker": ".", "ms": 4, "zorder": 1} for name in others}
    looks |= {name: {**look(i), "marker": "o", "ms": 5, "zorder": 3} for i, name in enumerate(study.shown)}
    for name, style in looks.items():
        rows, label = by_name[name], name
        if name in others:
            label = f"{len(others)} others (table)" if name == others[0] else None
        axes[0].plot([r.horizon for r in rows], [r.tv for r in rows], label=label, **style)
        axes[1].plot([r.horizon for r in rows], [r.ratio_to_best_single for r in rows], **style)
    floor = by_name[study.shown[0]]
    axes[0].plot([r.horizon for r in floor], [r.noise_floor for r in floor], **FLOOR)
    if all(row.tv > 0 and row.noise_floor > 0 for row in study.rows):
        log_y(axes[0])
    axes[0].set_ylabel("total variation (share of copies elsewhere)")
    axes[1].set_ylabel("TV / that of the best single forecaster")
    axes[1].axhline(1, color="black", lw=0.8, zorder=2)
    _close_up(axes[1], [row.ratio_to_best_single for row in study.rows])
    for ax in axes:
        _horizon_axis(ax, [row.horizon for row in floor])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return png(figure, "error against horizon, mean over all layers and origins")


def _horizon_axis(ax: Any, horizons: Sequence[int]) -> None:
    """The horizons themselves as ticks, far and near alike."""
    if len(horizons) > 1:
        ax.set_xscale("log")
    ax.set_xticks(horizons, [str(horizon) for horizon in horizons])
    ax.xaxis.set_ticks([], minor=True)
    ax.set_xlabel("horizon (training steps ahead)")


def _close_up(ax: Any, ratios: Sequence[float]) -> None:
    """Leave the far off out of sight: what is asked is who is near the best, or below it."""
    known = [ratio for ratio in ratios if not np.isnan(ratio)]
    if not known:
        return
    low, high = min(known), max(known)
    far = sum(ratio > _FAR for ratio in known)
    ax.set_ylim(low - 0.02, min(high, _FAR) + 0.02)
    if far:
        ax.text(0.99, 0.985, f"{far} points above {_FAR}", transform=ax.transAxes, ha="right", va="top")


# each plot by the name of its file, with the words under it
PLOTS: dict[str, tuple[Callable[[Study], bytes], str]] = {
    "forecast_against_real": (
        forecast_against_real,
        "What was counted, what was forecast for that step the horizon before, and the band that should hold "
        "the counted share.",
    ),
    "error_by_horizon": (
        error_by_horizon,
        "Total variation between forecast and counted shares, mean over all layers and origins.",
    ),
    "error_over_time": (
        error_over_time,
        "The same over time of the origin. Red ticks: a jump in one layer or more (thick: in half of them).",
    ),
    "coverage_over_time": (
        coverage_over_time,
        "Share of the experts whose counted share lies in the band, over time of the origin.",
    ),
}
