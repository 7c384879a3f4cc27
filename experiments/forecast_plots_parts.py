"""What the plots of `counterpoise forecast` share: what they draw from, colours, canvas and axes.

Under `forecast_plots.py` and `forecast_plots_time.py`. A plot is drawn by hand on a canvas of its own (no
pyplot: it would keep every figure and might open a window) and becomes PNG bytes.
"""

import io
from dataclasses import dataclass
from typing import Any

from balancer.backtest import Backtest
from balancer.backtest_table import Kept, Score
from balancer.trace import Trace

# Okabe and Ito's colours, apart for every common colour blindness; the dashes tell them apart in grey too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
PALE = "#9a9aa2"
_DPI = 100
FLOOR: dict[str, Any] = {
    "color": "black",
    "lw": 1.0,
    "ls": (0, (1, 2)),
    "label": "counting noise alone",
    "zorder": 2,
}


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


def grid(rows: int, columns: int, inches: tuple[float, float], *, share_x: bool = False) -> tuple[Any, Any]:
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


def png(figure: Any, title: str) -> bytes:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def few(num: int) -> list[int]:
    """Up to three horizons: the first, the middle and the last."""
    return sorted({0, num // 2, num - 1})


def look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % 6], "ls": _DASHES[(i + i // 6) % 6], "lw": 2.0 if i == 0 else 1.5}


def log_y(ax: Any) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_plain)
    ax.yaxis.set_minor_formatter(_plain_few)


def _plain(value: float, _: int) -> str:
    return f"{value:.3g}"


def _plain_few(value: float, _: int) -> str:
    """Only 2 and 5 of each decade: more would overlap."""
    return f"{value:.3g}" if f"{value:e}"[0] in "25" else ""
