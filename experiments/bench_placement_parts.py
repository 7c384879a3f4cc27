"""What the parts of `counterpoise bench placement` share: options, rows, and a walk along a trace.

Under `bench_placement.py` and its parts. A walk is told one sample at a time and scores each under what was
decided before it, as a replay does, but all samples of a placement in one call: a dozen walks of a long trace
take seconds. The replay is the one that checks policies; a test holds the two equal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.cost import CostModel
from balancer.metrics import moved_slots
from balancer.packing import even_share_load
from balancer.placement import PlacementConfig, placement_controller
from balancer.policies import Setup, policy
from balancer.search import layer_peaks
from balancer.trace import Trace

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Row = dict[str, Any]
# (training step, counts [L, E], placement in force [L, S]) -> placement from the next sample on
Step = Callable[[int, Integers, Integers], Integers]

# what other systems do, as against what is ours: best peers are found among these
PEERS = ("greedy", "eplb", "eplb-strong", "lplb-ring", "lplb-cube", "public EPLB", "last load alone")
# scored samples of the early part
EARLY = 20
# one row through one expert (s); only its ratio to the price of a move counts here
ROW_S = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command was asked for. quick: smaller, for a look;  trace: a recorded load, None = none;
    eplb: file of the public EPLB, to be timed beside ours, "" = none."""

    quick: bool = False
    trace: Trace | None = None
    eplb: str = ""


@dataclass(kw_only=True, slots=True)
class Found:
    """What a part found, in order: rows for the file, plots by name as PNG bytes."""

    rows: list[Row] = field(default_factory=list)
    plots: dict[str, bytes] = field(default_factory=dict)

    def add(
        self,
        case: str,
        contender: str,
        metric: str,
        value: float,
        *,
        floor: float | None = None,
        target: float | None = None,
        **more: Any,
    ) -> None:
        """Keep a figure and print it beside its target. floor: what nobody can do better than;  more: other
        facts for the file. Of `balancedness` more is better, of all else less."""
        row: Row = {"case": case, "contender": contender, "metric": metric, "value": value, **more}
        row["ratio_to_best_peer"] = None
        row["ratio_to_floor"] = value / floor if floor else None
        words = ""
        if target is not None:
            met = value >= target if more_is_better(metric) else value <= target
            row["target"], row["met"] = target, bool(met)
            sign = ">=" if more_is_better(metric) else "<="
            words = f"  target {sign} {target:g}{'' if row['met'] else '  MISSED'}"
        self.rows.append(row)
        print(f"{case:<32} {contender:<26} {metric:<22} {short(value):>10}{words}", flush=True)


def more_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is the better one."""
    return metric.startswith("balancedness")


def short(value: float) -> str:
    """A figure in ten characters, whole numbers whole."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.5g}"


def with_peers(rows: list[Row]) -> list[Row]:
    """The rows with their ratio to the best figure of another system in the same case, None without one."""
    done: list[Row] = []
    for row in rows:
        alike = [r for r in rows if (r["case"], r["metric"]) == (row["case"], row["metric"])]
        peers = [r["value"] for r in alike if r["contender"] in PEERS]
        best = (max if more_is_better(row["metric"]) else min)(peers, default=None)
        done.append({**row, "ratio_to_best_peer": row["value"] / best if best else None})
    return done


# ---- walks along a trace ---------------------------------------------------------------------------------


class Walk(NamedTuple):
    """peak_WL: [W, L] rows of the fullest rank in each scored sample;  moves_WL: [W, L] moves just before it;
    used: the placements [L, S] in force, by time."""

    peak_WL: Floats
    moves_WL: Integers
    used: list[Integers]


def walk(trace: Trace, step: Step, start_LS: Integers, num_ranks: int, shares: str = "exact") -> Walk:
    """Take one that places along a trace.

    trace: W + 1 samples, the first is seen and not scored;  step: is told each sample once, by itself;
    start_LS: placement in force for the first sample;  shares: "exact" or "even", how it is scored.
    """
    counts_WLE, slots_LS = trace.tokens_per_expert_WLE, start_LS
    scored_WLE = np.ascontiguousarray(counts_WLE[1:])
    moves_WL = np.zeros(scored_WLE.shape[:2], np.int64)
    starts: list[tuple[int, Integers]] = [(0, start_LS)]
    for w in range(len(scored_WLE)):
        placed_LS = step(int(trace.steps_W[w]), counts_WLE[w].copy(), slots_LS)
        if (placed_LS != slots_LS).any():
            moves_WL[w] = moved_slots(slots_LS, placed_LS, num_ranks)
            slots_LS = placed_LS
            starts = [*starts[: -1 if starts[-1][0] == w else None], (w, slots_LS)]
    ends = [first for first, _ in starts[1:]] + [len(scored_WLE)]
    peaks = [peaks_of(scored_WLE[a:b], slots, num_ranks, shares) for (a, slots), b in zip(starts, ends)]
    return Walk(np.concatenate(peaks), moves_WL, [slots for _, slots in starts])


def peaks_of(counts_KLE: NDArray[Any], slots_LS: Integers, num_ranks: int, shares: str = "exact") -> Floats:
    """Load of the fullest rank, [K, L], of loads [K, L, E] under one placement [L, S]."""
    if shares == "exact":
        return layer_peaks(slots_LS, counts_KLE, num_ranks)
    num_loads, num_layers, num_experts = counts_KLE.shape
    slots_XS = np.tile(slots_LS, (num_loads, 1))
    load_XG = even_share_load(counts_KLE.reshape(-1, num_experts), slots_XS, num_ranks)
    return load_XG.max(axis=1).reshape(num_loads, num_layers)


def balance(counts_KLE: NDArray[Any], peak_KL: Floats, num_ranks: int) -> Floats:
    """Balancedness of each load in the mean form, [K]: mean over the layers of mean load / fullest rank."""
    return (counts_KLE.sum(axis=2) / num_ranks / peak_KL).mean(axis=1)


def policy_step(name: str, setup: Setup, start_LS: Integers) -> Step:
    """A policy by its name."""
    one = policy(name)
    state = one.init(setup, start_LS)

    def step(at: int, counts_LE: Integers, slots_LS: Integers) -> Integers:
        nonlocal state
        decision, state = one.update(at, counts_LE, slots_LS, state)
        return decision.slots_LS

    return step


def controller_step(config: PlacementConfig, num_experts: int, start_LS: Integers) -> Step:
    """The controller with a configuration of its own; its plans apply at once."""
    init, update = placement_controller(config)
    state = init(len(start_LS), num_experts, start_LS)

    def step(at: int, counts_LE: Integers, slots_LS: Integers) -> Integers:
        nonlocal state
        plan, state = update(at, counts_LE, slots_LS, state)
        return slots_LS if plan is None else plan.slot_to_expert_LS

    return step


def priced(layer_steps: float, copies: int, num_ranks: int) -> CostModel:
    """Prices by which a move costs so many steps of one balanced layer of `copies` rows, and nothing else but
    the fullest rank counts: weights that travel are free, so that figures are of balance and moves alone."""
    of_machine = CostModel.of_machine("infiniband", 1024, 1024)
    move_s = layer_steps * copies / num_ranks * ROW_S
    return replace(of_machine, row_s=ROW_S, expert_bytes=0.0, grad_bytes=0.0, move_price_s=move_s)
