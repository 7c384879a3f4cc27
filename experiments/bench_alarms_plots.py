"""Plots of `counterpoise bench alarms`, as PNG bytes."""

from typing import Any

import numpy as np

from experiments.bench_alarms_parts import RAMPS, Found
from experiments.forecast_plots_parts import grid, look, png


def plots_of(part: str, found: Found) -> dict[str, bytes]:
    """The plots of a part by name; none where it has nothing to draw."""
    drawn = found.drawn
    if part == "delay":
        plots = {"leads": _leads(drawn["leads"]), "ramps": _ramps(drawn["ramps"])}
        return {**plots, "curve": _curve(drawn["curve"])} if drawn["curve"] else plots
    return {"trace": _trace(drawn)} if part == "trace" and drawn else {}


def _leads(leads: dict[str, list[float]]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (8.0, 4.4))
    for i, (cause, lead) in enumerate((c, v) for c, v in leads.items() if v):
        sorted_N = np.sort(np.maximum(lead, -100.0))
        share_N = 1.0 - np.arange(len(sorted_N)) / len(sorted_N)
        ax.step(sorted_N, share_N, where="pre", label=f"{cause} ({len(lead)})", **look(i))
    ax.axvline(50.0, color="black", lw=1.0, ls=(0, (1, 2)), label="50 steps")
    ax.set_xlabel("lead: steps from the alarm to a tenth of the experts dead (-100: no alarm)")
    ax.set_ylabel("share of the collapses with this lead or more")
    ax.set_xscale("symlog", linthresh=50)
    ax.legend(fontsize=8)
    return png(figure, "Induced collapses, by cause")


def _ramps(ramps: dict[tuple[str, int], tuple[float, float]]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (8.0, 4.4))
    for i, name in enumerate(dict.fromkeys(case for case, _ in ramps)):
        lengths = [length for length in RAMPS if (name, length) in ramps]
        ax.plot(lengths, [ramps[name, n][0] for n in lengths], marker="o", label=name, **look(i))
    for size in ("E8", "E32", "E256"):
        dead = {
            n: [v[1] for (c, m), v in ramps.items() if m == n and c.startswith(f"{size} ")] for n in RAMPS
        }
        found = {n: float(np.median(v)) for n, v in dead.items() if v}
        ax.plot(list(found), list(found.values()), color="black", lw=0.8, ls=":", label=f"dead, {size}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("steps in which the entropy falls from .98 to .05")
    ax.set_ylabel("steps from the onset to the alarm (median)")
    ax.legend(fontsize=7, ncol=2)
    return png(figure, "Ramps: delay, and when a tenth is dead")


def _curve(curve: list[tuple[float, float, float]]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (7.0, 4.4))
    delay, rate = [c[2] for c in curve], [max(c[0], 0.3) for c in curve]
    ax.plot(delay, rate, marker="o", label="seen (none: drawn at .3)", **look(0))
    ax.plot(delay, [c[1] for c in curve], marker="v", label="upper 95 % bound", **look(1))
    ax.set_yscale("log")
    ax.set_xlabel("median delay, collapses by feedback (steps)")
    ax.set_ylabel("false alarms a million layer-steps")
    ax.legend(fontsize=8)
    return png(figure, "Thresholds swept; the fourth point from the left is the default")


def _trace(drawn: dict[str, Any]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (8.0, 4.4))
    entropy_WL, first_L, steps_W = drawn["entropy_WL"], drawn["first_L"], drawn["steps_W"]
    shown = min(30, len(steps_W))
    ax.plot(steps_W[:shown], entropy_WL[:shown], color="#9a9aa2", lw=0.7)
    alarmed = [layer for layer, w in enumerate(first_L) if 0 <= w < shown]
    at = [(steps_W[first_L[layer]], entropy_WL[first_L[layer], layer]) for layer in alarmed]
    ax.plot([a for a, _ in at], [b for _, b in at], "v", color="#D55E00", label="first alarm of a layer")
    ax.set_xlabel("training step")
    ax.set_ylabel("normalised entropy of a layer's load")
    ax.legend(fontsize=8)
    return png(figure, f"Recorded load, {entropy_WL.shape[1]} layers")
