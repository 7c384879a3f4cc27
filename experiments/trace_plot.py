"""The picture of a load trace: how even the load of every layer is over time, and its curves.

Under `experiments/trace_command.py`. Colours are cividis and three that colour-blind people
tell apart.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import load_shares
from balancer.trace import Trace
from experiments.trace_info import Curves

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"
# up to here every step is a float64, and has an axis of its own
_EXACT_STEP = 2**53
# columns of a heat map: more than this the picture cannot show
_MAX_COLUMNS = 800


def plot(path: Path, trace: Trace, curves: Curves, ranks: int, title: str) -> None:
    """Write a PNG: entropy (layers x time), load of the layer that changes most (experts x time), curves.

    Raises ValueError for a trace without samples.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not trace.steps_W.size:
        raise ValueError(f"{title}: no sample to plot")
    figure: Any = Figure(figsize=(11, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=False, height_ratios=(1.1, 1.1, 1))
    figure.suptitle(title, fontsize=11)
    _entropy_map(figure, axes[0], trace, curves)
    _load_map(figure, axes[1], trace, curves)
    _curves(axes[2], trace, curves, ranks)
    figure.savefig(path, format="png")


def shown_steps(steps_W: NDArray[np.int64]) -> tuple[NDArray[np.float64], int]:
    """Where samples stand on the axis of time, and the step that it counts from: 0, or the first where a step
    is beyond what float64 tells apart.   steps_W: [W], one or more, increasing."""
    first = 0 if steps_W[-1] <= _EXACT_STEP else int(steps_W[0])
    return (steps_W - first).astype(np.float64), first


def _entropy_map(figure: Any, ax: Any, trace: Trace, curves: Curves) -> None:
    image = _time_map(ax, curves.entropy_WL, trace.steps_W, 0.0, 1.0)
    ax.set(title="normalised entropy of the load: 1 even, 0 all on one expert", ylabel="layer")
    figure.colorbar(image, ax=ax, pad=0.01)


def _load_map(figure: Any, ax: Any, trace: Trace, curves: Curves) -> None:
    change_L = np.nan_to_num(curves.change_WL).sum(axis=0)
    layer = int(np.argmax(change_L))
    keep = _columns(trace.steps_W.shape[0])
    shares_WE = load_shares(trace.tokens_per_expert_WLE[keep, layer])
    doublings_WE = np.log2(np.maximum(shares_WE * shares_WE.shape[1], 2.0**-4))
    image = _time_map(ax, doublings_WE, trace.steps_W[keep], -3.0, 3.0)
    ax.set(title=f"load of layer {layer}, which changes most: load / fair share", ylabel="expert")
    bar = figure.colorbar(image, ax=ax, pad=0.01, ticks=[-3, -2, -1, 0, 1, 2, 3])
    bar.ax.set_yticklabels(["<= 1/8", "1/4", "1/2", "1", "2", "4", ">= 8"])


def _time_map(
    ax: Any, values_WY: NDArray[np.float64], steps_W: NDArray[np.int64], low: float, high: float
) -> Any:
    """Draw [W, Y] with time to the right, each sample as wide as the steps up to the next; NaN is white."""
    keep = _columns(steps_W.shape[0])
    shown_WY, starts = values_WY[keep], shown_steps(steps_W[keep])[0]
    width = np.median(np.diff(starts)) if starts.size > 1 else 1.0
    edges = np.append(starts, starts[-1] + width)
    rows = np.arange(shown_WY.shape[1] + 1) - 0.5
    image = ax.pcolormesh(edges, rows, shown_WY.T, cmap="cividis", vmin=low, vmax=high, rasterized=True)
    ax.invert_yaxis()
    ax.set_xlim(edges[0], edges[-1])
    ax.yaxis.get_major_locator().set_params(integer=True)
    return image


def _curves(ax: Any, trace: Trace, curves: Curves, ranks: int) -> None:
    keep = _columns(trace.steps_W.shape[0])
    steps, first = shown_steps(trace.steps_W[keep])
    marker = "o" if steps.size == 1 else None
    entropy_W = _row_mean(curves.entropy_WL)[keep]
    ax.plot(steps, entropy_W, color=_BLUE, marker=marker, label="normalised entropy, mean over layers")
    ax.plot(
        steps, curves.sum_balance_W[keep], color=_ORANGE, ls="--", marker=marker,
        label=f"balancedness of {ranks} ranks (sum form)",
    )  # fmt: skip
    ax.plot(
        steps, _row_mean(curves.change_WL)[keep], color=_GREY, ls=":", marker=marker,
        label="total variation to the sample before",
    )  # fmt: skip
    ax.set(ylim=(0, 1.02), xlabel=f"training step - {first}" if first else "training step")
    if steps.size > 1:
        ax.set_xlim(steps[0], steps[-1])
    ax.grid(alpha=0.3)
    ax.legend(loc="best", fontsize=9)


def _row_mean(values_WL: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the layers, NaN (and no warning) where none is known."""
    known = np.isfinite(values_WL)
    return np.where(known, values_WL, 0.0).sum(axis=1) / np.where(
        known.any(axis=1), known.sum(axis=1), np.nan
    )


def _columns(num: int) -> NDArray[np.int64]:
    """Which samples are drawn: all, or as many as fit, evenly."""
    return np.unique(np.linspace(0, num - 1, min(num, _MAX_COLUMNS)).round().astype(np.int64))
