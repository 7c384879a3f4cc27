"""Bench control, part `gain-delay` (F1): how much gain each law bears at each delay, and what it leaves.

All laws on one axis: the small-signal gain g, the share of a small error that one step takes away, which the
setting of a law is made from with lam, the plant's mean slope. The sign law has none: its g is the step in
units of y. Theory: an integral loop of delay d swings from g = 2 sin(pi / (2 (2d + 1))) on; experts of other
slope come there earlier by largest over mean slope, SMEBU's momentum moves it. A run counts as unstable where
its mean |y| is above three times that of counting noise.
"""

import math
from dataclasses import replace

import numpy as np

from balancer.bias import law
from balancer.bias_record import Law
from balancer.plant import PlantConfig, init_plant, plant_scale
from experiments import bench_control_parts as parts
from experiments.bench_control_parts import TEST_SEED, excess, floor_of
from experiments.bench_placement_parts import Found
from experiments.forecast_plots_parts import grid, look, png

GAINS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95, 1.2, 1.6, 2.4)
# quantile and bip have no gain to set
LAWS = (
    "identified", "linear", "longcat", "smebu", "quantile-damped", "sign", "laplacian", "sign-decay"
)  # fmt: skip
DELAYS = (0, 1, 2, 3)
STEPS, RUNS, UNSTABLE = 160, 4, 3.0


def law_of(name: str, gain: float, delay: int, scale: float, experts: int) -> Law | None:
    """A law of small-signal gain g on a plant of mean slope lam; None where it takes no such setting."""
    if name in ("identified", "laplacian"):
        limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        return law(name, delay_steps=delay, gain=gain) if gain < limit else None
    if name == "quantile-damped":
        return law(name, delay_steps=delay, step=gain) if gain <= 1 else None
    # smebu's clamp has the slope kappa = 2
    setting = {"linear": gain / scale, "longcat": gain * experts / scale, "smebu": gain / (2 * scale)}
    return parts.make(name, setting.get(name, gain / scale), delay)


def run(quick: bool) -> Found:
    """Steady violation by gain and delay."""
    found = Found()
    gains, delays = ((0.3, 1.6), (0, 2)) if quick else (GAINS, DELAYS)
    runs, steps = (2, 60) if quick else (RUNS, STEPS)
    lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
    still = PlantConfig(num_layers=runs, reinforcement=0.02, drift=0.01, imbalance=0.2, seed=TEST_SEED)
    for delay in delays:
        config = replace(still, delay_steps=delay)
        scale = float(plant_scale(init_plant(config)).mean())
        for name in LAWS:
            lines[delay, name] = _sweep(found, config, name, gains, scale, steps)
    found.plots["gain_delay"] = _plot(lines, delays, floor_of(still))
    return found


def _sweep(
    found: Found, config: PlantConfig, name: str, gains: tuple[float, ...], scale: float, steps: int
) -> list[tuple[float, float]]:
    delay, line, stable = config.delay_steps, [], []
    r = config.top_k / config.num_experts
    noise = math.sqrt(2 / math.pi * (1 - r) / (r * config.num_tokens))
    for gain in gains:
        law_ = law_of(name, gain, delay, scale, config.num_experts)
        if law_ is None:
            continue
        track = parts.close_loop(config, law_, steps)
        over_L = excess(track, config)
        steady = track.error_WL[-steps // 3 :].mean() < UNSTABLE * noise
        parts.add_runs(found, f"d={delay} g={gain:g}", name, "excess", over_L, stable=bool(steady))
        line.append((gain, float(over_L.mean())))
        stable += [gain] if steady else []
    found.add(f"d={delay}", name, "largest stable gain tried", max(stable, default=0.0))
    return line


def _plot(
    lines: dict[tuple[int, str], list[tuple[float, float]]], delays: tuple[int, ...], floor: float
) -> bytes:
    figure, axes = grid(1, len(delays), (4.0 * len(delays), 4.4))
    for ax, delay in zip(axes[0], delays):
        for i, name in enumerate(LAWS):
            line = np.array(lines[delay, name])
            ax.plot(line[:, 0], line[:, 1] + floor, marker=".", label=name, **look(i))
        limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        ax.axvline(limit, color="black", ls=":", label="limit of theory")
        ax.axhline(floor, color="black", lw=0.8, label="counting noise")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_title(f"delay {delay}", fontsize=10)
        ax.set_xlabel("small-signal gain g (share of an error a step)")
    axes[0][0].set_ylabel("MaxVio in the last third")
    axes[0][0].legend(fontsize=7)
    return png(figure, "F1: gain and delay (E 32, k 2, 2^14 tokens, softmax, rho .02)")
