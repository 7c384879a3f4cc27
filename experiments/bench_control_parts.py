"""What the parts of `counterpoise bench control` share: the closed loop, figures of a run, contenders, plots.

Under `bench_control.py` and its parts. A run is a law of `balancer/bias.py` on the plant of
`balancer/plant.py`; the layers of a plant are its seeds: each is one run, and all laws meet the same ones.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bias import init_bias, law, update_bias
from balancer.bias_record import Law
from balancer.metrics import max_violation, violation_floor
from balancer.plant import PlantConfig, PlantState, init_plant, step_plant
from experiments.bench_placement_parts import Found, Row

Floats = NDArray[np.float64]

DEFAULT = "identified"
# seeds of plants: those that settings are chosen on, and those that figures come from
TUNING_SEED, TEST_SEED = 1000, 2000
# settings tried of every law that has one: as many for each; the published one is among them, or next to one
GRIDS: Mapping[str, tuple[str, tuple[float, ...]]] = MappingProxyType(
    {
        "sign": ("step", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        "sign-decay": ("step", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        "smebu": ("step", (1e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2)),
        "linear": ("gain", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
        "longcat": ("step", (0.03, 0.1, 0.3, 0.6, 1.0, 3.0)),
        "quantile-damped": ("step", (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)),
    }
)
# nothing to tune
FIXED = (DEFAULT, "laplacian", "quantile", "bip")
# our own: the others are peers
OURS = (DEFAULT, "laplacian")


class Track(NamedTuple):
    """A run of W steps and L layers: violation_WL = MaxVio, error_WL = mean |y|, dead_L = share of the
    experts below 1 % of the fair share over the last steps, update_s = median time of an update, final = y of
    the last step [L, E]."""

    violation_WL: Floats
    error_WL: Floats
    dead_L: Floats
    update_s: float
    final_LE: Floats


def close_loop(
    config: PlantConfig,
    law_: Law,
    steps: int,
    *,
    last: int = 50,
    change: Callable[[int, PlantState], PlantState] | None = None,
) -> Track:
    """Run a law on a plant.

    steps: W. last: steps over which experts count as dead. change: what becomes of the plant before a step, a
    switch of the data say.
    """
    config = replace(config, statistics=tuple({*law_.needs, *law_.uses, "scores"}))
    if "margins" in law_.uses:
        config = replace(config, margins_every=config.swaps_every)
    plant = init_plant(config)
    size = (config.num_layers, config.num_experts, config.top_k)
    state = init_bias(law_, *size, delay_steps=config.delay_steps)
    bias_LE = np.zeros(size[:2])
    counts_LE, tracks, errors, times = np.zeros(size[:2]), [], [], []
    violation_LE = counts_LE
    for step in range(steps):
        if change is not None:
            plant = change(step, plant)
        asked = () if law_.asks is None else law_.asks(state.law)
        measurement, plant = step_plant(bias_LE, plant, asked)
        begun = time.perf_counter()
        bias_LE, state = update_bias(law_, measurement, state)
        times.append(time.perf_counter() - begun)
        violation_LE = measurement.violation_LE
        tracks.append(max_violation(measurement.counts_LE))
        errors.append(np.abs(violation_LE).mean(axis=1))
        if step >= steps - last:
            counts_LE = counts_LE + measurement.counts_LE
    dead_L = (counts_LE < 0.01 * counts_LE.mean(axis=1, keepdims=True)).mean(axis=1)
    return Track(np.array(tracks), np.array(errors), dead_L, float(np.median(times)), violation_LE)


def floor_of(config: PlantConfig) -> float:
    """MaxVio of counting noise alone, over-dispersion included."""
    floor = violation_floor(config.num_tokens, config.num_experts, config.top_k)
    return floor * max(config.phi, 1.0) ** 0.5


def excess(track: Track, config: PlantConfig) -> Floats:
    """MaxVio less its floor, mean over the last third of the steps, [L]."""
    return track.violation_WL[-(len(track.violation_WL) // 3) :].mean(axis=0) - floor_of(config)


def make(name: str, value: float | None = None, delay_steps: int = 0) -> Law:
    """A law of the benchmark with its one setting, None where it has none."""
    settings = {} if value is None else {GRIDS[name][0]: value}
    return law(name, delay_steps=delay_steps, **settings)


def values_of(name: str) -> tuple[float | None, ...]:
    """The settings of a law that are tried; (None,) where it has none."""
    return GRIDS[name][1] if name in GRIDS else (None,)


def interval(value_N: Floats, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; every entry is the figure of one run."""
    if len(value_N) < 2:
        return float(value_N[0]), float(value_N[0])
    rng = np.random.default_rng(seed)
    means = value_N[rng.integers(0, len(value_N), (2000, len(value_N)))].mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def add_runs(found: Found, case: str, name: str, metric: str, value_N: Floats, **more: Any) -> None:
    """Keep the mean over the runs, with its interval."""
    low, high = interval(value_N)
    found.add(case, name, metric, float(value_N.mean()), lowest=low, highest=high, runs=len(value_N), **more)


def with_peers(rows: list[Row]) -> list[Row]:
    """The rows with their ratio to the best figure of a rival in the same case, None without one above 0."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["contender"] not in OURS and row["value"] > 0:
            key = (row["case"], row["metric"])
            best[key] = min(row["value"], best.get(key, np.inf))
    return [{**row, "ratio_to_best_peer": _ratio(row, best)} for row in rows]


def _ratio(row: Row, best: dict[tuple[str, str], float]) -> float | None:
    peer = best.get((row["case"], row["metric"]))
    return row["value"] / peer if peer else None
