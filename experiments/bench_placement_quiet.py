"""Bench placement, part `quiet`: a load that stays as it is must not move anything.

Two sizes; a load lognormal of sigma 1, first the same counts over and over, then counts of 32,768 copies
drawn anew around the same shares, over-dispersed as real ones are (phi 2.3). Counted are the moves of the
first plan, those of the next nine samples, and those of the 50 samples after that, which are to be none. On
one sample nobody knows how long a gain will last, so the first plan is a cautious one; and a large layer
takes several plans, since the search of each is bounded. EPLB every 100 steps beside it.
"""

from typing import Any, NamedTuple

import numpy as np

from balancer.dispersion import draw_counts
from balancer.policies import Setup, start_placement
from balancer.trace import Trace
from experiments.bench_placement_parts import (
    Floats,
    Found,
    Integers,
    Options,
    controller_step,
    policy_step,
    priced,
    walk,
)
from experiments.bench_placement_trace import PRICE, config_of
from experiments.forecast_plots_parts import grid, look, png

COPIES, PHI, SAMPLES, INTERVAL = 32768, 2.3, 50, 10
# samples on which plans may still be made for a load that is new
SETTLING = 10


class Size(NamedTuple):
    """Sizes of a case."""

    layers: int
    ranks: int
    experts: int
    slots: int


SIZES = (Size(8, 8, 32, 48), Size(1, 32, 256, 288))
EPLB = "eplb"


def run(options: Options) -> Found:
    """Both sizes, still and drawn anew."""
    found = Found()
    lines: dict[str, Integers] = {}
    for size in SIZES:
        shares_LE = np.random.default_rng([9, size.experts]).lognormal(0.0, 1.0, (size.layers, size.experts))
        shares_LE /= shares_LE.sum(axis=1, keepdims=True)
        for drawn in (False, True):
            case = f"{size.experts} on {size.ranks} {'drawn anew' if drawn else 'unchanged'}"
            trace = still_trace(shares_LE, 12 if options.quick else SAMPLES, drawn=drawn)
            _run_case(found, case, trace, size, [0] if options.quick else [0, 1], lines)
    found.plots["quiet"] = _plot(lines)
    return found


def still_trace(shares_LE: Floats, samples: int, *, drawn: bool) -> Trace:
    """So many samples behind those of settling, of counts around constant shares."""
    rng = np.random.default_rng(10)
    first_LE = draw_counts(rng, shares_LE, COPIES, PHI)
    counts = [
        draw_counts(rng, shares_LE, COPIES, PHI) if drawn else first_LE for _ in range(samples + SETTLING)
    ]
    steps_W = 1 + INTERVAL * np.arange(samples + SETTLING + 1, dtype=np.int64)
    return Trace(tokens_per_expert_WLE=np.stack([first_LE, *counts]), steps_W=steps_W)


def _run_case(
    found: Found, case: str, trace: Trace, size: Size, seeds: list[int], lines: dict[str, Integers]
) -> None:
    runs: dict[str, list[Integers]] = {"controller": [], EPLB: []}
    for seed in seeds:
        setup = Setup(
            num_layers=size.layers, num_experts=size.experts, num_ranks=size.ranks, num_slots=size.slots,
            cost=priced(PRICE, COPIES, size.ranks), sample_steps=INTERVAL, seed=seed,
        )  # fmt: skip
        start_LS = start_placement(setup)
        ours = controller_step(config_of(setup), size.experts, start_LS)
        runs["controller"].append(walk(trace, ours, start_LS, size.ranks).moves_WL.sum(axis=1))
        if not runs[EPLB]:
            theirs = policy_step(EPLB, setup, start_LS)
            runs[EPLB].append(walk(trace, theirs, start_LS, size.ranks, "even").moves_WL.sum(axis=1))
    for name, moves_NW in runs.items():
        # what sample w decides comes just before scored sample w
        first = [float(moves_W[0]) for moves_W in moves_NW]
        settling = [float(moves_W[1:SETTLING].sum()) for moves_W in moves_NW]
        later = [float(moves_W[SETTLING:].sum()) for moves_W in moves_NW]
        found.add(case, name, "first_moves", float(np.median(first)))
        found.add(case, name, "settling_moves", float(np.median(settling)))
        last = max(int(np.flatnonzero(moves_W).max(initial=-1)) for moves_W in moves_NW)
        target = 0.0 if name == "controller" else None
        found.add(
            case, name, "moves", max(later), target=target, runs=len(later), least=min(later),
            last_at_sample=last,
        )  # fmt: skip
        lines[f"{case}: {name}"] = np.cumsum(moves_NW[int(np.argmax(later))])


def _plot(lines: dict[str, Any]) -> bytes:
    figure, ((left, right),) = grid(1, 2, (11.5, 4.2))
    for ax, drawn in ((left, "unchanged"), (right, "drawn anew")):
        shown = [name for name in lines if drawn in name]
        for i, name in enumerate(shown):
            ax.plot(lines[name], label=name.replace(f" {drawn}", ""), **look(i))
        ax.set_title(f"counts {drawn}", fontsize=10)
        ax.set_xlabel("sample")
        ax.set_yscale("symlog", linthresh=1)
        ax.legend(fontsize=8)
    left.set_ylabel("moves so far")
    return png(figure, f"A load that stays: {COPIES:,} copies, phi {PHI} where drawn anew")
