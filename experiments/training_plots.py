"""Plots of `counterpoise bench training`: PNG bytes out of the results of its runs."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.forecast_plots_parts import grid, look, png
from experiments.studies import Result, interval


def dead_over_steps(found: Mapping[str, Mapping[str, Sequence[Result]]]) -> bytes:
    """Dead experts and entropy over the steps: a column a cause, a line an arm (the mean over its runs, the
    span between the least and the most shaded), ticks at the first alarms of each run."""
    figure, axes = grid(2, len(found), (4.2 * len(found), 6.0), share_x=True)
    for column, (cause, arms) in enumerate(found.items()):
        for i, (arm, results) in enumerate(arms.items()):
            for ax, name in ((axes[0, column], "dead_W"), (axes[1, column], "entropy_W")):
                values_NW = np.stack([getattr(result, name) for result in results])
                steps_W = results[0].step_W
                ax.plot(steps_W, np.nanmean(values_NW, axis=0), label=arm, **look(i))
                span = np.nanmin(values_NW, axis=0), np.nanmax(values_NW, axis=0)
                ax.fill_between(steps_W, *span, color=look(i)["color"], alpha=0.15, lw=0)
            first = [result.alarms[0][0] for result in results if result.alarms]
            axes[1, column].plot(
                first, np.full(len(first), 0.02 + 0.04 * i), "|", color=look(i)["color"], ms=9
            )
        axes[0, column].set_title(cause)
        axes[1, column].set(xlabel="optimizer step", ylim=(0, 1.02))
    axes[0, 0].set_ylabel("dead experts a layer")
    axes[1, 0].set_ylabel("entropy (1 = even); ticks: first alarms")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return png(figure, "A router that collapses, with and without control")


def bits_by_violation(found: Mapping[str, Sequence[Result]]) -> bytes:
    """Bits per byte against MaxVio over its floor: a point a run, a cross the mean with its 95 % interval."""
    figure, axes = grid(1, 1, (6.4, 4.6))
    ax = axes[0, 0]
    for i, (name, results) in enumerate(found.items()):
        excess_N = np.array([result.excess for result in results])
        bits_N = np.array([result.bits_per_byte for result in results])
        colour = look(i)["color"]
        ax.plot(excess_N, bits_N, "o", ms=4, color=colour, alpha=0.5, label=name)
        (x, x_low, x_high), (y, y_low, y_high) = interval(excess_N), interval(bits_N)
        ax.errorbar(
            x,
            y,
            xerr=[[x - x_low], [x_high - x]],
            yerr=[[y - y_low], [y_high - y]],
            color=colour,
            capsize=3,
            lw=1.5,
        )
    ax.set(xlabel="max violation over its noise floor, last third", ylabel="validation, bits per byte")
    ax.legend(frameon=False, fontsize=8)
    return png(figure, "What balance is worth, on equal tokens")
