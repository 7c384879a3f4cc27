"""Bench placement, part `time`: how long plans take, on one core, after compilation; and how that grows.

58 layers of 256 experts on 288 slots and 32 ranks, loads lognormal of sigma 1: medians of several calls in
turn, on the same loads. The public EPLB is timed beside ours where its file is given. Growth: the same
planners up to 64 layers, 1,024 experts and 2,048 ranks; where all layers would take too long, some of them
are timed and the time is scaled up, layers being planned one by one ("layers timed" in the file).
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from balancer.connect import connected_placement
from balancer.even import even_placement
from balancer.packing import rebalance_experts
from balancer.planning import plan_placement
from experiments.bench_placement_parts import Floats, Found, Options
from experiments.forecast_plots_parts import grid, look, png

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32
TARGETS_MS = {
    "even fast": 10.0,
    "plan, fast": 10.0,
    "plan, robust": 1000.0,
    "repair, load off by 0.05": 100.0,
    "repair, load off by 0.1": 100.0,
}
# seconds that one point of the growth may take for each contender
_BUDGET_S = 4.0
Call = Callable[[], Any]


class Size(NamedTuple):
    """A point of the growth."""

    layers: int
    experts: int
    slots: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.experts} {self.slots}/{self.ranks}"


SIZES = (
    Size(4, 64, 80, 8),
    Size(16, 128, 160, 16),
    Size(58, 256, 288, 32),
    Size(58, 256, 320, 64),
    Size(58, 256, 2304, 256),
    Size(64, 512, 1024, 128),
    Size(64, 1024, 1280, 256),
    Size(64, 1024, 2048, 2048),
)


def run(options: Options) -> Found:
    """The times, then the growth; on one core."""
    found = Found()
    with one_core():
        _times(found, options)
        sizes = SIZES[:3] if options.quick else SIZES
        for size in sizes:
            _grow(found, size)
    _fit(found)
    found.plots["growth"] = _plot(found.rows)
    return found


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core where the system can, and put it back."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- one size, all contenders ----------------------------------------------------------------------------


def _times(found: Found, options: Options) -> None:
    calls = contenders(options, LAYERS, EXPERTS, SLOTS, RANKS)
    repeats = 2 if options.quick else 7
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        for _ in range(1 if name == "public EPLB" and options.quick else repeats):
            times[name].append(_seconds(call))
    for name, seconds in times.items():
        found.add(
            f"{LAYERS}x{EXPERTS} {SLOTS}/{RANKS}", name, "time_ms", 1e3 * float(np.median(seconds)),
            target=TARGETS_MS.get(name), slowest_ms=1e3 * max(seconds), calls=len(seconds),
        )  # fmt: skip


def contenders(options: Options, layers: int, experts: int, slots: int, ranks: int) -> dict[str, Call]:
    """What is timed, by name."""
    rng = np.random.default_rng(7)
    load_LE = rng.lognormal(0.0, 1.0, (layers, experts))
    plan = partial(plan_placement, num_ranks=ranks, num_slots=slots)
    placed_LS = plan(load_LE).slot_to_expert_LS
    found: dict[str, Call] = {
        "even fast": partial(even_placement, load_LE, slots, ranks),
        "plan, fast": partial(plan, load_LE, effort="fast"),
        "connected": partial(connected_placement, load_LE, slots, ranks),
        "plan, robust": partial(plan, load_LE),
        "greedy": partial(rebalance_experts, load_LE, slots, 0, 1, ranks),
    }
    for sigma in (0.05, 0.1):
        off_LE = load_LE * rng.lognormal(0.0, sigma, load_LE.shape)
        repair = partial(plan, off_LE, effort="repair", current_LS=placed_LS)
        found[f"repair, load off by {sigma:g}"] = repair
    if options.eplb:
        found["public EPLB"] = public_eplb(options.eplb, load_LE, slots, ranks)
    return found


def public_eplb(file: str, load_LE: Floats, slots: int, ranks: int) -> Call:
    """A call of `rebalance_experts` of a file with EPLB's interface, on torch tensors, one thread."""
    spec = importlib.util.spec_from_file_location("public_eplb", file)
    if spec is None or spec.loader is None or not os.path.isfile(file):
        raise ValueError(f"--eplb {file}: no Python file there; give the eplb.py of a copy of EPLB")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch

    torch.set_num_threads(1)
    return partial(module.rebalance_experts, torch.from_numpy(load_LE), slots, 1, 1, ranks)


def _seconds(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


# ---- growth ----------------------------------------------------------------------------------------------


def planners(size: Size, layers: int) -> dict[str, Call]:
    """The planners at a size, on the first layers of its load."""
    load_LE = np.random.default_rng([8, size.experts]).lognormal(0.0, 1.0, (size.layers, size.experts))
    load_LE = load_LE[:layers]
    return {
        "even fast": partial(even_placement, load_LE, size.slots, size.ranks),
        "connected": partial(connected_placement, load_LE, size.slots, size.ranks),
        "plan, robust, 4 scenarios": partial(
            plan_placement, load_LE, num_ranks=size.ranks, num_slots=size.slots, num_scenarios=4
        ),
    }


def _grow(found: Found, size: Size) -> None:
    for name, first in planners(size, 1).items():
        one_s = _seconds(first)
        layers = int(np.clip(_BUDGET_S / max(one_s, 1e-9), 1, size.layers))
        seconds = one_s if layers == 1 else _seconds(planners(size, layers)[name])
        found.add(
            size.name, name, "growth_ms", 1e3 * seconds * size.layers / layers,
            layers_timed=layers, layers_slots=size.layers * size.slots,
        )  # fmt: skip


def _fit(found: Found) -> None:
    """The exponent of time over layers * slots on log axes, by least squares over all sizes."""
    names = dict.fromkeys(r["contender"] for r in found.rows if r["metric"] == "growth_ms")
    for name in names:
        size_N, ms_N = _line(found.rows, name)
        slope = float(np.polyfit(np.log(size_N), np.log(ms_N), 1)[0])
        found.add("growth", name, "exponent_of_layers_slots", slope)


def _line(rows: list[dict[str, Any]], name: str) -> tuple[Floats, Floats]:
    mine = [r for r in rows if r["metric"] == "growth_ms" and r["contender"] == name]
    mine.sort(key=lambda row: row["layers_slots"])
    return np.array([float(r["layers_slots"]) for r in mine]), np.array([r["value"] for r in mine])


def _plot(rows: list[dict[str, Any]]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (8.5, 5.2))
    exponents = {r["contender"]: r["value"] for r in rows if r["metric"] == "exponent_of_layers_slots"}
    for i, (name, exponent) in enumerate(exponents.items()):
        size_N, ms_N = _line(rows, name)
        ax.plot(size_N, ms_N, ls="", marker="o^s"[i % 3], ms=6, color=look(i)["color"])
        fitted_N = np.exp(np.log(ms_N).mean() + exponent * (np.log(size_N) - np.log(size_N).mean()))
        ax.plot(size_N, fitted_N, label=f"{name}: exponent {exponent:.2f}", **look(i))
    sizes = sorted({(r["layers_slots"], r["case"]) for r in rows if r["metric"] == "growth_ms"})
    for i, (at, name) in enumerate(sizes):
        place = {"xy": (at, 0.02 + 0.22 * (i % 2)), "xycoords": ("data", "axes fraction")}
        ax.annotate(name, rotation=90, fontsize=7, ha="center", color="#555555", **place)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(bottom=min(r["value"] for r in rows if r["metric"] == "growth_ms") / 50)
    ax.set_xlabel("layers x slots")
    ax.set_ylabel("time of a plan of all layers (ms), one core")
    ax.legend(fontsize=9, loc="upper left")
    return png(figure, "How the time of a plan grows (layers x experts, slots/ranks)")
