"""Bench placement, part `trace`: policies along a recorded load, each plan scored on the sample after it.

8 ranks, homes fixed, 16 and 8 spare slots over all ranks: the controller with the exact split at several
prices of a move and with several seeds of its own draws, beside the policies that others use. Balancedness in
the mean form, over the whole trace, its first 20 scored samples, and those after; moves in all.

With even shares and 16 spare slots: the same for the price of a move, as balancedness against moves.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from balancer.even import even_repair
from balancer.placement import PlacementConfig
from balancer.policies import Setup, policy, start_placement
from balancer.trace import Trace
from experiments.bench_placement_parts import (
    EARLY,
    Floats,
    Found,
    Integers,
    Options,
    Step,
    balance,
    controller_step,
    policy_step,
    priced,
    walk,
)
from experiments.forecast_plots_parts import grid, log_y, look, png

RANKS = 8
# price of a move, in steps of one balanced layer; chosen on this very trace, so its figures are a fit
PRICES = (0.5, 1.05, 2.0)
PRICE = 1.05
# what the controller is given beside: more draws, judged by their mean, are slower and a little better
CONFIG: dict[str, Any] = {
    "num_scenarios": 64,
    "beta": 0.0,
    "tolerance": 0.002,
    "confidence": 0.8,
}
SEEDS = (0, 1, 2)
OTHERS = ("none", "eplb", "eplb-strong", "even")
# frontier of even shares: what a move must gain, as a share of a layer's time
EVEN_PRICES = (0.003, 0.01, 0.02, 0.04)
EVEN_FREE_PRICE = 0.011
_EVEN_SAMPLES = 4
# per cent; what is less idle than that is shown as that
_LEAST_IDLE = 0.01


class Target(NamedTuple):
    """What is aimed at, at one price of a move; None where nothing is."""

    price: float
    whole: float | None = None
    early: float | None = None
    late: float | None = None
    moves: float | None = None

    def at(self, price: float) -> tuple[float | None, ...]:
        """Of each of `Scored.figures`, for a run at this price."""
        return self[1:] if price == self.price else NOTHING


NOTHING = (None,) * 4
TARGETS = {16: Target(PRICE, 0.9955, 0.9, 0.9995, 700), 8: Target(0.5, whole=0.993, moves=1300)}
EVEN_TARGET = Target(EVEN_FREE_PRICE, whole=0.93, moves=5000)
NO_TARGET = Target(-1.0)


class Scored(NamedTuple):
    """balance_W: [W] of each scored sample;  moves: in all;  seconds: of planning, scoring included."""

    balance_W: Floats
    moves: int
    seconds: float

    @property
    def figures(self) -> dict[str, float]:
        """By metric."""
        return {
            "balancedness": float(self.balance_W.mean()),
            "balancedness_first20": float(self.balance_W[:EARLY].mean()),
            "balancedness_after20": float(self.balance_W[EARLY:].mean()),
            "moves": float(self.moves),
        }


def run(options: Options) -> Found:
    """Both numbers of slots, then the frontier of even shares."""
    if options.trace is None:
        raise ValueError("part trace needs a recorded load; give --trace FILE")
    trace = _first(options.trace, 60) if options.quick else options.trace
    found = Found()
    lines: dict[str, Floats] = {}
    for spare in TARGETS:
        target = NO_TARGET if options.quick else TARGETS[spare]
        seeds = SEEDS[:1] if options.quick else SEEDS
        _run_spare(found, trace, spare, target, seeds, lines if spare == 16 else {})
    _run_even(found, trace, NO_TARGET if options.quick else EVEN_TARGET)
    found.plots["trace"] = _plot(found.rows, lines)
    return found


def setup_of(trace: Trace, spare: int, price: float, seed: int = 0) -> Setup:
    """The setup of a trace with so many spare slots; price: of a move, in steps of one balanced layer."""
    counts_WLE = trace.tokens_per_expert_WLE
    copies = int(np.median(counts_WLE.sum(axis=2)))
    return Setup(
        num_layers=counts_WLE.shape[1], num_experts=counts_WLE.shape[2], num_ranks=RANKS,
        num_slots=counts_WLE.shape[2] + spare, cost=priced(price, copies, RANKS), seed=seed,
        sample_steps=int(np.median(np.diff(trace.steps_W))),
    )  # fmt: skip


def config_of(setup: Setup, **more: Any) -> PlacementConfig:
    """The controller's configuration for a setup, as the policy `split` has it."""
    same = ("num_ranks", "num_slots", "num_nodes", "cost", "sample_steps", "fixed_homes", "seed")
    return PlacementConfig(**({name: getattr(setup, name) for name in same} | more))


def scored(trace: Trace, step: Step, setup: Setup, start_LS: Integers, shares: str) -> Scored:
    """Balancedness and moves of one that places along the trace."""
    begun = time.perf_counter()
    found = walk(trace, step, start_LS, RANKS, shares)
    balance_W = balance(trace.tokens_per_expert_WLE[1:], found.peak_WL, RANKS)
    return Scored(balance_W, int(found.moves_WL.sum()), time.perf_counter() - begun)


def _run_spare(
    found: Found, trace: Trace, spare: int, aim: Target, seeds: Sequence[int], lines: dict[str, Floats]
) -> None:
    """The controller at all prices, and the policies of others; lines: gets balancedness over time."""
    case = f"{spare} spare"
    for price in PRICES:
        runs: list[Scored] = []
        for seed in seeds if price == aim.price else seeds[:1]:
            setup = setup_of(trace, spare, price, seed)
            start_LS = start_placement(setup)
            step = controller_step(config_of(setup, **CONFIG), setup.num_experts, start_LS)
            runs.append(scored(trace, step, setup, start_LS, "exact"))
        target = aim.at(price)
        _add(found, case, f"split, price {price:g}", runs, target, "exact")
        lines[f"split, price {price:g}"] = runs[0].balance_W
    setup = setup_of(trace, spare, PRICE)
    start_LS = start_placement(setup)
    step = controller_step(config_of(setup), setup.num_experts, start_LS)
    name = f"split as it comes, price {PRICE:g}"
    _add(found, case, name, [scored(trace, step, setup, start_LS, "exact")], NOTHING, "exact")
    for name in OTHERS:
        one = scored(trace, policy_step(name, setup, start_LS), setup, start_LS, policy(name).shares)
        _add(found, case, name, [one], NOTHING, policy(name).shares)
        lines[name] = one.balance_W


def _add(
    found: Found, case: str, name: str, runs: list[Scored], targets: Sequence[float | None], shares: str
) -> None:
    """The median over the runs of each figure, with its range in the file."""
    for (metric, _), aim in zip(runs[0].figures.items(), targets):
        values = [one.figures[metric] for one in runs]
        found.add(
            case, name, metric, float(np.median(values)), target=aim,
            lowest=min(values), highest=max(values), runs=len(runs), shares=shares,
        )  # fmt: skip
    found.add(case, name, "walk_s", float(np.median([one.seconds for one in runs])))


# ---- even shares -----------------------------------------------------------------------------------------


def _run_even(found: Found, trace: Trace, aim: Target) -> None:
    """Repairs for the last samples together, at several prices of a move."""
    setup = setup_of(trace, 16, PRICE)
    start_LS = start_placement(setup)
    for price in EVEN_PRICES:
        one = scored(trace, _even_step(setup, price), setup, start_LS, "even")
        _add(found, "16 spare, even shares", f"even, price {price:g}", [one], NOTHING, "even")
    one = scored(trace, _even_step(setup, EVEN_FREE_PRICE, free=True), setup, start_LS, "even")
    name = f"even, slots free, price {EVEN_FREE_PRICE:g}"
    _add(found, "16 spare, even shares", name, [one], aim.at(EVEN_FREE_PRICE), "even")


def _even_step(setup: Setup, price: float, free: bool = False) -> Step:
    seen: list[Integers] = []
    repair = partial(even_repair, home_slot_E=None if free else setup.home_slot_E, move_price=price)

    def step(at: int, counts_LE: Integers, slots_LS: Integers) -> Integers:
        seen[:] = [*seen, counts_LE][-_EVEN_SAMPLES:]
        return repair(np.stack(seen), np.full(len(seen), 1 / len(seen)), slots_LS, setup.num_ranks)

    return step


def _first(trace: Trace, samples: int) -> Trace:
    return replace(
        trace, tokens_per_expert_WLE=trace.tokens_per_expert_WLE[:samples], steps_W=trace.steps_W[:samples]
    )


# ---- plot ------------------------------------------------------------------------------------------------


def _plot(rows: list[dict[str, Any]], lines: dict[str, Floats]) -> bytes:
    figure, ((left, right),) = grid(1, 2, (12.5, 4.8))
    shown = [name for name in lines if name != "none"]
    for i, name in enumerate(shown):
        lost_W = np.maximum(100 * (1 - lines[name]), _LEAST_IDLE)
        left.plot(1 + np.arange(len(lost_W)), lost_W, label=name, **look(i))
    left.set_xscale("log")
    left.set_ylim(bottom=_LEAST_IDLE)
    log_y(left)
    left.set_xlabel("scored sample")
    left.set_ylabel("mean rank idle (%), 16 spare slots")
    left.legend(fontsize=8, ncols=2, loc="lower left")
    _frontier(right, rows)
    return png(figure, "A recorded load: how idle ranks are, and how many moves that takes (8 ranks)")


def _frontier(ax: Any, rows: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    value = {(r["case"], r["contender"], r["metric"]): r["value"] for r in rows}
    for i, case in enumerate(cases):
        names = dict.fromkeys(r["contender"] for r in rows if r["case"] == case)
        mine = [name for name in names if name.startswith(("split", "even,"))]
        for group in (mine, [name for name in names if name not in mine and name != "none"]):
            points = [(value[case, n, "moves"], 100 * (1 - value[case, n, "balancedness"])) for n in group]
            if not points:
                continue
            points = sorted(points) if group is mine else points
            style = {**look(i), "marker": "o", "ms": 5} if group is mine else {"color": look(i)["color"]}
            label = f"{case}: ours, by price of a move" if group is mine else f"{case}: policies"
            ax.plot(*zip(*points), **({"ls": "", "marker": "s", "ms": 5} | style), label=label)
            for name, at in zip(group, points):
                if group is not mine:
                    ax.annotate(name, at, fontsize=7, xytext=(4, 3), textcoords="offset points")
    ax.set_xscale("log")
    log_y(ax)
    ax.set_xlabel("moves over the trace")
    ax.set_ylabel("mean rank idle (%), whole trace")
    ax.legend(fontsize=8, loc="center left")
