"""Bench control, parts `response` (F5) and `speed`: after a switch of the data, and what a step costs.

The integrated error is the sum over the 100 steps after a switch of the mean |y| over the experts, less that
of counting noise alone; a law that does not settle pays for it. Paired, for every law meets the same plants,
switches and noise. Settings are chosen by that figure on runs of their own, six each; damped quantile stands
there at its usual 0.3 too. Cost: the median time of `update_bias`, without what the router pays for
histograms and samples.
"""

import math
import time
from dataclasses import replace

import numpy as np

from balancer.bias import init_bias, update_bias
from balancer.plant import PlantConfig, PlantState, init_plant, step_plant, switch_plant
from experiments import bench_control_parts as parts
from experiments.bench_control_parts import (
    DEFAULT,
    TEST_SEED,
    TUNING_SEED,
    Floats,
    Track,
    close_loop,
    values_of,
)
from experiments.bench_placement_parts import Found
from experiments.forecast_plots_parts import grid, look, png

LAWS = (
    "identified", "linear", "smebu", "sign", "quantile-damped", "quantile", "longcat", "laplacian",
    "sign-decay", "bip",
)  # fmt: skip
RIVAL = "quantile-damped"
USUAL = (f"{RIVAL} 0.3", 0.3)
SHOWN = ("identified", "linear", "smebu", "sign", "quantile-damped", "quantile")
PLANTS = {
    "softmax": PlantConfig(num_experts=32, top_k=2, reinforcement=0.03, drift=0.01, num_layers=8),
    "sigmoid": PlantConfig(
        num_experts=64, top_k=4, score="sigmoid", reinforcement=0.03, drift=0.01, num_layers=8
    ),
    "softmax, delay 1": PlantConfig(reinforcement=0.03, drift=0.01, num_layers=8, delay_steps=1),
}  # fmt: skip
JUMP, SWITCH, AFTER = 1.0, 80, 100
# a third of the rival's cost is what is promised
MOST_COST = 1 / 3


def run(quick: bool) -> Found:
    """Integrated error after a switch, and cost."""
    found, names = Found(), ("identified", "linear", "quantile-damped") if quick else LAWS
    shown: dict[str, dict[str, Floats]] = {}
    for case, plant in PLANTS.items() if not quick else list(PLANTS.items())[:1]:
        tracks: dict[str, Track] = {}
        test = replace(plant, seed=TEST_SEED, num_layers=2 if quick else 8)
        for name in names:
            value = _tuned(name, plant, quick)
            tracks[name] = _switched(test, name, value)
            parts.add_runs(
                found, case, name, "integrated error", integrated(tracks[name], test), setting=value
            )
            found.add(case, name, "update_us", 1e6 * tracks[name].update_s)
        tracks[USUAL[0]] = _switched(test, RIVAL, USUAL[1])
        parts.add_runs(found, case, USUAL[0], "integrated error", integrated(tracks[USUAL[0]], test))
        for rival in (RIVAL, USUAL[0]):
            _compare(found, case, rival, tracks, test)
        shown[case] = {name: track.error_WL.mean(axis=1) for name, track in tracks.items()}
    found.plots["response"] = _plot(shown)
    return found


def integrated(track: Track, config: PlantConfig) -> Floats:
    """The integrated error of each run, [L]."""
    variance = max(config.phi, 1.0) * (config.num_experts - 1) / (config.num_tokens * config.top_k)
    noise = math.sqrt(2.0 / math.pi * variance)  # mean |y| of a normal y
    return (track.error_WL[SWITCH : SWITCH + AFTER] - noise).sum(axis=0)


def _tuned(name: str, plant: PlantConfig, quick: bool) -> float | None:
    plant = replace(plant, seed=TUNING_SEED, num_layers=1 if quick else 3)
    values = values_of(name)
    if len(values) == 1:
        return values[0]
    return min(values, key=lambda value: float(integrated(_switched(plant, name, value), plant).mean()))


def _switched(config: PlantConfig, name: str, value: float | None) -> Track:
    def change(step: int, plant: PlantState) -> PlantState:
        return switch_plant(plant, JUMP) if step == SWITCH else plant

    law_ = parts.make(name, value, config.delay_steps)
    return close_loop(config, law_, SWITCH + AFTER, change=change)


def _compare(found: Found, case: str, rival: str, tracks: dict[str, Track], config: PlantConfig) -> None:
    """The default against a rival: difference of the errors by pairs, and the ratio of the costs."""
    ours, theirs = tracks[DEFAULT], tracks[rival]
    less_L = integrated(ours, config) - integrated(theirs, config)
    parts.add_runs(found, case, f"{DEFAULT} less {rival}", "integrated error", less_L, target=0.0)
    found.add(case, f"{DEFAULT} over {rival}", "cost", ours.update_s / theirs.update_s, target=MOST_COST)


def _plot(shown: dict[str, dict[str, Floats]]) -> bytes:
    figure, axes = grid(1, len(shown), (5.2 * len(shown), 4.4))
    for ax, (case, lines) in zip(axes[0], shown.items()):
        for i, name in enumerate(name for name in SHOWN if name in lines):
            ax.plot(np.arange(len(lines[name])) - SWITCH, lines[name], label=name, **look(i))
        ax.set_xlim(-10, 60)
        ax.set_yscale("log")
        ax.set_title(case, fontsize=10)
        ax.set_xlabel("steps since the switch")
    axes[0][0].set_ylabel("mean |y| over the experts")
    axes[0][0].legend(fontsize=8)
    return png(figure, "F5: response to a switch of the data (each law at its best setting here)")


def run_speed(quick: bool) -> Found:
    """Median time of an update at 60 layers of 256 experts."""
    found, layers, experts = Found(), 6 if quick else 60, 32 if quick else 256
    for name in LAWS[:3] if quick else LAWS:
        law_ = parts.make(name)
        layers_here = 4 if name in ("laplacian", "bip") else layers  # they take seconds at 60
        config = PlantConfig(
            num_layers=1, num_experts=experts, top_k=8, population=2048,
            statistics=tuple({*law_.needs, "scores"}), imbalance=0.3,
        )  # fmt: skip
        first, _ = step_plant(np.zeros((1, experts)), init_plant(config))
        fields = {f: getattr(first, f) for f in first.__slots__}
        wide = replace(first, **{
            f: np.repeat(v, layers_here, axis=0) for f, v in fields.items() if np.ndim(v) >= 2
        })  # fmt: skip
        plain = replace(
            wide, swaps_LE=None, wide_swaps_LE=None, score_histogram_LEB=None, swap_pairs_LEE=None
        )
        state, times, rng = init_bias(law_, layers_here, experts, 8), [], np.random.default_rng(TEST_SEED)
        for step in range(30):
            # noise around balance: a load that never answers drives every bias into its limit
            counts_LE = rng.multinomial(8 * wide.num_tokens, np.full(experts, 1 / experts), size=layers_here)
            measurement = replace(wide if step % 20 == 0 else plain, step=step, counts_LE=1.0 * counts_LE)
            begun = time.perf_counter()
            _, state = update_bias(law_, measurement, state)
            times.append(time.perf_counter() - begun)
        per_layer = 1e3 * float(np.median(times)) * layers / layers_here
        found.add(
            f"{layers} x {experts}", name, "update_ms", per_layer, measured_layers=layers_here,
            slowest_ms=1e3 * max(times[1:]), target=0.2 if name == DEFAULT and not quick else None,
        )  # fmt: skip
    return found
