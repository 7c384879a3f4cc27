"""The plots of `counterpoise replay`: who kept the ranks busy, when, and at what cost.

Behind `replay_run.py`, in front of the page; each is returned as PNG bytes. Canvas and axes are those of
`forecast_plots_parts.py`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.forecast_plots_parts import COLOURS, PALE, grid, log_y, png
from experiments.replay_run import EARLY, OFFLINE, Replay, balance_over_time, figures, gap_over_time

Floats = NDArray[np.float64]

_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY = COLOURS
_LOOKS: dict[str, dict[str, Any]] = {
    "none": {"color": PALE, "ls": "-"},
    "none+split": {"color": "#5a5a62", "ls": (0, (4, 1.5))},
    "eplb": {"color": _RED, "ls": "--"},
    "eplb-strong": {"color": _ORANGE, "ls": (0, (5, 1))},
    "even": {"color": _GREEN, "ls": "-"},
    "split": {"color": _BLUE, "ls": "-", "lw": 2.2, "zorder": 4},
    "lplb-ring": {"color": _PINK, "ls": "-."},
    "lplb-cube": {"color": _SKY, "ls": (0, (3, 1, 1, 1))},
    OFFLINE: {"color": "black", "ls": (0, (1, 1.5)), "zorder": 5},
}
GIB = 2**30
# a line over many samples is the mean of so many parts of the trace, else it would hide the others
_PARTS = 120
# per cent; below it a gap is rounding
_LEAST_GAP = 0.01


def looks(name: str) -> dict[str, Any]:
    """Colour and dashes of a policy, the same in every plot."""
    return {"lw": 1.5, "zorder": 3} | _LOOKS.get(name, {"color": "#666600", "ls": "-"})


def summary(made: Replay) -> bytes:
    """A bar for each policy: the share of the time in which ranks are busy, and the copies that it took."""
    rows = [figures(made, run) for run in made.runs]
    figure, ((ax,),) = grid(1, 1, (10.5, 1.2 + 0.46 * len(rows)))
    for y, row in enumerate(reversed(rows)):
        busy = 100 * (row["balancedness_sum"] or 0.0)
        look = looks(row["policy"])
        future = row["sees_future"]
        ax.barh(
            y, busy, height=0.62, zorder=2, edgecolor="black" if future else "none",
            color="white" if future else look["color"], hatch="///" if future else None,
        )  # fmt: skip
        words = f"{busy:.1f} %,  {row['moves']:,} experts copied"
        ax.text(busy + 1, y, words, va="center", fontsize=10, zorder=6)
    ax.set_yticks(range(len(rows)), [row["policy"] for row in reversed(rows)], fontsize=11)
    ax.set_xlim(0, 135)
    ax.set_xticks(range(0, 101, 20))
    ax.grid(False, axis="y")
    ax.set_xlabel(
        "time in which the ranks are busy (% of the time of the expert layers), mean over the trace"
    )
    return png(figure, "ranks busy, and what it took (hatched: chosen in hindsight)")


def balance(made: Replay) -> bytes:
    """Both forms of balancedness over time, the first samples by themselves."""
    early = min(EARLY, len(made.steps_W))
    figure, axes = grid(2, 2, (12.0, 7.6))
    for run in made.runs:
        for row, value_W in zip(axes, balance_over_time(made, run)):
            row[0].plot(made.steps_W[:early], 100 * value_W[:early], marker=".", **looks(run.name))
            row[1].plot(*_thinned(made.steps_W, 100 * value_W), label=run.name, **looks(run.name))
    axes[0][0].set_title(f"first {early} samples", fontsize=11)
    axes[0][1].set_title("whole trace", fontsize=11)
    for ax, form in zip(axes[:, 0], ("mean form: mean over the layers", "sum form: layers in series")):
        ax.set_ylabel(f"balancedness (%)\n{form}")
    for ax in axes[1]:
        ax.set_xlabel("training step")
    for ax in axes.flat:
        ax.set_ylim(None, 101)
    return png(_with_legend(figure, axes[0][1]), "balancedness over time, next sample after each plan")


def moves(made: Replay) -> bytes:
    """Experts copied since the start."""
    figure, ((ax,),) = grid(1, 1, (10.5, 4.8))
    most = 1
    for run in made.runs:
        total_W = run.moves_WL.sum(axis=1).cumsum()
        most = max(most, int(total_W[-1]))
        ax.plot(made.steps_W, total_W, label=run.name, drawstyle="steps-post", **looks(run.name))
    ax.set_yscale("symlog", linthresh=10)
    ax.set_ylim(0, 3 * most)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_ylabel("experts copied so far (slots)")
    ax.set_xlabel("training step")
    return png(_with_legend(figure, ax), "cumulative moves")


def gap(made: Replay) -> bytes:
    """How far the hottest rank is above what no placement could get below."""
    figure, ((ax,),) = grid(1, 1, (10.5, 4.8))
    for run in made.runs:
        steps, value = _thinned(made.steps_W, 100 * gap_over_time(made, run))
        ax.plot(steps, np.maximum(value, _LEAST_GAP), label=run.name, **looks(run.name))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("hottest rank over its bound (%)")
    ax.set_xlabel("training step")
    return png(_with_legend(figure, ax), "gap to the bound, mean over the layers (log scale)")


def step_time(made: Replay) -> bytes:
    """Time of all expert layers in a step, by the cost model."""
    figure, ((ax,),) = grid(1, 1, (10.5, 4.8))
    for run in made.runs:
        ax.plot(*_thinned(made.steps_W, 1e3 * run.time_WL.sum(axis=1)), label=run.name, **looks(run.name))
    floor = {"color": "black", "lw": 1.0, "ls": "-", "label": "floor: even load, no replicas to fetch"}
    ax.plot(*_thinned(made.steps_W, 1e3 * made.floor_WL.sum(axis=1)), **floor)
    ax.set_ylim(0, None)
    ax.set_ylabel("time of the expert layers in a step (ms)")
    ax.set_xlabel("training step")
    return png(_with_legend(figure, ax), "step time by the cost model")


def frontier(made: Replay) -> bytes:
    """Each policy as a point: bytes moved against time lost."""
    figure, ((ax,),) = grid(1, 1, (10.5, 5.4))
    rows = [figures(made, run) for run in made.runs]
    floor_s = rows[0]["time_s"] - rows[0]["time_lost_s"]
    lost = [100 * row["time_lost_s"] / floor_s for row in rows]
    points = [(row["bytes_moved"] / GIB, max(y, _LEAST_GAP)) for row, y in zip(rows, lost)]
    for row, (x, y) in zip(rows, points):
        style = {"marker": "*" if row["sees_future"] else "o", "s": 150 if row["sees_future"] else 70}
        ax.scatter([x], [y], color=looks(row["policy"])["color"], zorder=4, **style)
    least = min((x for x, _ in points if x > 0), default=1.0)
    ax.set_xscale("symlog", linthresh=least)
    ax.set_xlim(-least / 4, 4 * max(least, *(x for x, _ in points)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylim(min(y for _, y in points) / 1.6, 1.6 * max(y for _, y in points))
    log_y(ax)
    ax.set_xlabel("weights of moved experts, whole trace (GiB)")
    ax.set_ylabel("time lost over the floor (%, log scale)")
    _labels(figure, ax, points, [row["policy"] for row in rows])
    return png(figure, "what was lost against what was moved (down and to the left is better)")


def _labels(figure: Any, ax: Any, points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """A name beside each point: to the right, above, below or to the left, where it covers nothing."""
    figure.canvas.draw()  # only then is it known where a point is
    at = ax.transData.transform(points)
    taken = [(x - 8.0, y - 8.0, x + 8.0, y + 8.0) for x, y in at]
    for (x, y), name in zip(at, names):
        wide = 4.5 * len(name)  # half the width of a name, in pixels
        ways = [(12 + wide, 0.0), (0.0, 17.0), (0.0, -17.0), (-12 - wide, 0.0), (12 + wide, 17.0)]
        boxes = [(x + a - wide, y + b - 8, x + a + wide, y + b + 8) for a, b in ways]
        free = [way for way, box in zip(ways, boxes) if not any(_overlap(box, other) for other in taken)]
        a, b = free[0] if free else ways[0]
        taken.append((x + a - wide, y + b - 8, x + a + wide, y + b + 8))
        middle = ax.transData.inverted().transform((x + a, y + b))
        ax.text(*middle, name, ha="center", va="center", fontsize=10, zorder=6)


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two boxes (left, low, right, high) have a part in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _thinned(steps_W: NDArray[np.int64], value_W: Floats) -> tuple[Floats, Floats]:
    """Means over parts of the trace, fine ones first: after the early part nothing is so fast."""
    if len(steps_W) <= _PARTS:
        return steps_W.astype(np.float64), value_W
    edges = np.unique(np.linspace(EARLY, len(steps_W), _PARTS - EARLY + 1).round().astype(int))
    parts = [slice(w, w + 1) for w in range(EARLY)] + [slice(*edge) for edge in pairwise(edges)]
    means = [_known_mean(value_W[part]) for part in parts]
    return np.array([steps_W[part].mean() for part in parts]), np.array(means)


def _known_mean(value: Floats) -> float:
    known = value[~np.isnan(value)]
    return float(known.mean()) if len(known) else float("nan")


def _with_legend(figure: Any, ax: Any) -> Any:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=5 if len(labels) > 6 else 6,
        frameon=False,
        fontsize=10,
    )
    return figure


# each plot by the name of its file, with the words under it; the first stands above the table
PLOTS: dict[str, tuple[Callable[[Replay], bytes], str]] = {
    "summary": (
        summary,
        "Ranks wait for the one with the most rows. 100 %: none ever waits. An expert copied is a slot that "
        "had to receive weights which its rank did not hold.",
    ),
    "balance_over_time": (
        balance,
        "Mean load of a rank over that of the hottest one, on the sample after each plan. Left: the first "
        "samples, where loads change fastest. Right: all, means over short parts.",
    ),
    "moves_over_time": (
        moves,
        "Copies since the start. Policies that plan by the clock climb for ever; one that changes only what "
        "pays stops when the load settles.",
    ),
    "gap_over_time": (
        gap,
        "How much more the hottest rank has than a limit below which no placement under the same constraints "
        "can bring it; 0.01 stands for less too. What is left is what a better planner could gain. Offline "
        "weighs time and moves, not this gap.",
    ),
    "step_time": (
        step_time,
        "Time of all expert layers in one training step: rows, weights read, exchange, replicas fetched. The "
        "floor is that of an even load without replicas; nobody can be below it.",
    ),
    "frontier": (
        frontier,
        "What each policy lost in time (beyond the floor) against the weights that it moved for it. The star "
        "was chosen in hindsight; whoever is near it has little left to gain.",
    ),
}
