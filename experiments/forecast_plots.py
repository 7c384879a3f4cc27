"""The plots of `counterpoise forecast`: forecast against real, error by horizon, and both over time.

Behind the backtest, in front of the page. Each plot is drawn by hand on a canvas of its own (no pyplot: it
would keep every figure and might open a window) and returned as PNG bytes.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from balancer.backtest import Backtest
from balancer.backtest_table import Kept, Score
from balancer.metrics import load_shares
from balancer.trace import Trace

# Okabe and Ito's colours, apart for every common colour blindness; the dashes tell them apart in grey too
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_PALE = "#9a9aa2"
_DPI = 100
# the ratio to the best single forecaster up to which the close-up shows
_FAR = 1.25
# samples of a rolling figure over time: short enough for a collapse, long enough for a line
WINDOW = 21


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """What is drawn and written.

    trace, found: the trace and its backtest, which kept the forecasts to show first. rows: of its table over
    all origins. shown: the few forecasters to stress, the most important first. target: interval
    coverage aimed at.
    """

    trace: Trace
    found: Backtest
    rows: list[Score]
    shown: tuple[str, ...]
    target: float

    @property
    def kept(self) -> Kept:
        """The forecasts that are drawn against the real load."""
        return self.found.kept[0]


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
    horizons = _few(len(found.horizons_H))
    figure, axes = _grid(len(experts), len(horizons), (3.6 * len(horizons) + 0.7, 2.3 * len(experts) + 1.2))
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
                steps, low, high, color=_COLOURS[5], alpha=0.45, lw=0, label=f"{study.target:.0%} band"
            )
            # the forecast, thin, over the counted share: they often fall together
            ax.plot(found.steps_W, real_WE[:, expert], color=_COLOURS[4], lw=2.0, label="counted")
            ax.plot(steps, mean, color=_COLOURS[0], lw=1.0, label="forecast")
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
    return _png(figure, f"layer {kept.layer}: forecast of {kept.forecaster} against what came")


def error_by_horizon(study: Study) -> bytes:
    """Mean TV against the horizon with the floor of counting noise; beside it, TV over the best single's."""
    figure, (axes,) = _grid(1, 2, (11.0, 5.2))
    by_name: dict[str, list[Score]] = {}
    for row in study.rows:
        by_name.setdefault(row.forecaster, []).append(row)
    others = [name for name in by_name if name not in study.shown]
    looks = {name: {"color": _PALE, "lw": 0.9, "marker": ".", "ms": 4, "zorder": 1} for name in others}
    looks |= {name: {**_look(i), "marker": "o", "ms": 5, "zorder": 3} for i, name in enumerate(study.shown)}
    for name, look in looks.items():
        rows, label = by_name[name], name
        if name in others:
            label = f"{len(others)} others (table)" if name == others[0] else None
        axes[0].plot([r.horizon for r in rows], [r.tv for r in rows], label=label, **look)
        axes[1].plot([r.horizon for r in rows], [r.ratio_to_best_single for r in rows], **look)
    floor = by_name[study.shown[0]]
    axes[0].plot([r.horizon for r in floor], [r.noise_floor for r in floor], **_FLOOR)
    if all(row.tv > 0 and row.noise_floor > 0 for row in study.rows):
        _log_y(axes[0])
    axes[0].set_ylabel("total variation (share of copies elsewhere)")
    axes[1].set_ylabel("TV / that of the best single forecaster")
    axes[1].axhline(1, color="black", lw=0.8, zorder=2)
    _close_up(axes[1], [row.ratio_to_best_single for row in study.rows])
    for ax in axes:
        _horizon_axis(ax, [row.horizon for row in floor])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return _png(figure, "error against horizon, mean over all layers and origins")


def error_over_time(study: Study) -> bytes:
    """TV over time, rolling median over origins, of the few forecasters shown; jumps marked below."""

    def of(ax: Any, h: int) -> None:
        for i, name in enumerate(study.shown):
            mean_W = _over_layers(study.found.tv_FHWL[study.found.names.index(name), h])
            ax.plot(study.found.steps_W, _rolling(mean_W, np.nanmedian), **_look(i), label=name)
        floor_W = _over_layers(study.found.noise_floor_HWL[h])
        ax.plot(study.found.steps_W, _rolling(floor_W, np.nanmedian), **_FLOOR)
        if any((line.get_ydata() > 0).any() for line in ax.get_lines()):
            _log_y(ax)
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
            ax.plot(study.found.steps_W, 100 * _rolling(mean_W, np.nanmean), **_look(i), label=name)
        ax.set_ylabel("experts in the band (%)", fontsize=9)
        ax.set_ylim(top=101)
        _mark_jumps(ax, study.found)

    return _over_time(study, of, f"coverage over time of the origin, rolling mean of {WINDOW} samples")


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

_FLOOR: dict[str, Any] = {
    "color": "black",
    "lw": 1.0,
    "ls": (0, (1, 2)),
    "label": "counting noise alone",
    "zorder": 2,
}


def _grid(rows: int, columns: int, inches: tuple[float, float], *, share_x: bool = False) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=inches, dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
    for ax in axes.flat:
        ax.grid(True, color="#e6e6ea", lw=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
    return figure, axes


def _png(figure: Any, title: str) -> bytes:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _over_time(study: Study, draw: Callable[[Any, int], None], title: str) -> bytes:
    horizons = _few(len(study.found.horizons_H))
    figure, axes = _grid(len(horizons), 1, (10.0, 2.5 * len(horizons) + 1.3), share_x=True)
    for row, h in enumerate(horizons):
        draw(axes[row][0], h)
        axes[row][0].set_title(f"{study.found.horizons_H[h]} steps ahead", fontsize=10, loc="left")
    axes[-1][0].set_xlabel("training step of the origin")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return _png(figure, title)


def _mark_jumps(ax: Any, found: Backtest) -> None:
    """Ticks at the lower edge where some layer jumps, thick where half of them do."""
    share_W = found.jump_WL.mean(axis=-1)
    for some, height, width in ((share_W > 0, 0.05, 0.8), (share_W >= 0.5, 0.09, 2.2)):
        ax.vlines(
            found.steps_W[some], 0, height, transform=ax.get_xaxis_transform(), color="#b00020", lw=width
        )


def _few(num: int) -> list[int]:
    """Up to three horizons: the first, the middle and the last."""
    return sorted({0, num // 2, num - 1})


def _look(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % 6], "ls": _DASHES[i % 6], "lw": 2.0 if i == 0 else 1.5}


def _log_y(ax: Any) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_plain)
    ax.yaxis.set_minor_formatter(_plain_few)


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


def _plain(value: float, _: int) -> str:
    return f"{value:.3g}"


def _plain_few(value: float, _: int) -> str:
    """Only 2 and 5 of each decade: more would overlap."""
    return f"{value:.3g}" if f"{value:e}"[0] in "25" else ""
