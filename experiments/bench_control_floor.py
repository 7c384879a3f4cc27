"""Bench control, part `floor` (F3): MaxVio above its floor, by batch size.

Two floors: counting alone (phi = 1), and counts as noisy as those of real batches (phi = 2.3), whose floor is
sqrt(phi) times as high. Settings are chosen at 2^14 tokens and phi = 1, on runs of their own, and kept.
"""

from dataclasses import replace

import numpy as np

from balancer.plant import PlantConfig
from experiments import bench_control_parts as parts
from experiments.bench_control_basin import tuned
from experiments.bench_control_parts import TEST_SEED, Floats, close_loop, excess, floor_of
from experiments.bench_placement_parts import Found
from experiments.forecast_plots_parts import grid, look, png

LAWS = (
    "identified", "linear", "sign", "smebu", "quantile-damped", "longcat", "laplacian", "quantile",
    "sign-decay", "bip",
)  # fmt: skip
LOG_TOKENS, PHIS = (12, 13, 14, 15, 16, 17, 18, 19, 20), (1.0, 2.3)
PLANT = PlantConfig(num_layers=4, reinforcement=0.05, drift=0.01, imbalance=0.3, seed=TEST_SEED)
STEPS = 150


def run(quick: bool) -> Found:
    """Violation less its floor by batch size."""
    found, steps = Found(), 60 if quick else STEPS
    sizes, phis, names = ((12, 16), (1.0,), LAWS[:3]) if quick else (LOG_TOKENS, PHIS, LAWS)
    lines: dict[tuple[float, str], Floats] = {}
    for name in names:
        value = tuned(name, PLANT, steps)
        for phi in phis:
            over = []
            for log_tokens in sizes:
                config = replace(PLANT, num_tokens=2**log_tokens, phi=phi)
                over_L = excess(close_loop(config, parts.make(name, value), steps), config)
                parts.add_runs(
                    found, f"2^{log_tokens} phi {phi:g}", name, "excess", over_L, setting=value,
                    floor_itself=floor_of(config),
                )  # fmt: skip
                over.append(over_L.mean())
            lines[phi, name] = np.array(over)
    found.plots["floor"] = _plot(lines, sizes, phis, names)
    return found


def _plot(
    lines: dict[tuple[float, str], Floats],
    sizes: tuple[int, ...],
    phis: tuple[float, ...],
    names: tuple[str, ...],
) -> bytes:
    figure, axes = grid(1, len(phis), (5.6 * len(phis), 4.4))
    tokens = 2.0 ** np.array(sizes)
    for ax, phi in zip(axes[0], phis):
        for i, name in enumerate(names):
            ax.plot(tokens, np.maximum(lines[phi, name], 1e-4), marker=".", label=name, **look(i))
        floor = [floor_of(replace(PLANT, num_tokens=2**size, phi=phi)) for size in sizes]
        ax.plot(tokens, floor, color="black", ls=":", label="the floor itself")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"phi {phi:g}", fontsize=10)
        ax.set_xlabel("tokens of a step")
    axes[0][0].set_ylabel("MaxVio less its floor")
    axes[0][0].legend(fontsize=8)
    return png(figure, "F3: violation above the floor (E 32, k 2, softmax, rho .05)")
