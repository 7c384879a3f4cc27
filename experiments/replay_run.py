"""Replay: walks a recorded load trace with placement policies and scores what each would have given.

    trace -> for each policy: sample w scored under what was decided on samples 0..w-1 -> Replay -> figures

Behind `counterpoise replay`, in front of its page and plots. All policies start from one placement and are
told one sample at a time; `replay_checks.py` refuses those that cheat, `replay_score.py` has the prices, and
`balancer/offline.py` finds what would have been best in hindsight. A sample stands for the steps since the
one before it. Layers without load have no balance: they are left out of means, and counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import moved_slots
from balancer.offline import distinct_placements, move_costs, offline_optimum
from balancer.placement_checks import check_placement
from balancer.policies import Policy, Setup, start_placement
from balancer.spare import fill_spare_slots
from balancer.trace import Trace
from experiments.replay_checks import Asked, Stepper, asked_samples, check_causality, saved
from experiments.replay_score import (
    layer_times,
    move_seconds,
    peak_bounds,
    rank_loads,
    replica_bytes,
    time_floors,
)

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

OFFLINE = "offline"
# scored samples of the early part: "first20"
EARLY = 20
# placements of a layer that the offline optimum chooses from, besides those made in hindsight
_POOL = 32
# samples for which a placement is made in hindsight, spread evenly over the logarithm of time
_HINDSIGHT = 10


class Change(NamedTuple):
    """A new placement: decided on the sample of `step`, in force from sample w on (an index into the scored
    ones), with so many moves in so many layers; why, in the policy's words."""

    step: int
    w: int
    moves: int
    layers: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyRun:
    """One policy along the trace; W the scored samples.

    name, shares, free_slots: of the policy;  sees_future: the offline optimum only, whose shares are "either"
    where it may split: whichever is faster for a sample;  peak_WL: [W, L] rows of the hottest rank;
    bound_WL: [W, L] rows below which no placement gets it, under the same constraints;
    time_WL: [W, L] seconds of a step;  moves_WL: [W, L] moves just before the sample;  plan_ms: of each
    update that changed something;  changes: by time;  spans: (layer's placements [L, S], first sample, number
    of samples), by time, empty for offline.
    """

    name: str
    shares: str
    free_slots: bool
    sees_future: bool = False
    peak_WL: Floats
    bound_WL: Floats
    time_WL: Floats
    moves_WL: Integers
    plan_ms: tuple[float, ...] = ()
    changes: tuple[Change, ...] = ()
    spans: tuple[tuple[Integers, int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """All policies along a trace. steps_W: [W] steps of the scored samples;  stands_W: [W] training steps
    that each stands for;  load_WL: [W, L] copies;  floor_WL: [W, L] seconds below which nobody gets."""

    setup: Setup
    start_LS: Integers
    steps_W: Integers
    stands_W: Integers
    load_WL: Integers
    floor_WL: Floats
    runs: tuple[PolicyRun, ...]

    @property
    def mean_WL(self) -> Floats:
        """[W, L] rows of a rank in the mean."""
        return self.load_WL / self.setup.num_ranks

    @property
    def idle_layers(self) -> int:
        """How often a layer had no load in a scored sample."""
        return int((self.load_WL == 0).sum())

    def run(self, name: str) -> PolicyRun | None:
        """The run of a policy, None where it did not run."""
        return next((one for one in self.runs if one.name == name), None)


def replay(
    trace: Trace,
    policies: Sequence[Policy],
    setup: Setup,
    start_LS: Integers | None = None,
    *,
    offline: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Replay:
    """Run policies along a trace.

    trace: two samples or more; its array is altered and put back while policies are checked (`check`).
    start_LS: [L, S] int64, where all start; None = `start_placement`. offline: find what would have been best
    in hindsight too. check: ask each policy again with another future. progress: called with a name, the
    samples done and their number. Raises ValueError for a trace that does not fit the setup, two policies of
    one name, and for whatever a policy must not do.
    """
    counts_WLE, steps_W = trace.tokens_per_expert_WLE, trace.steps_W
    _check_arguments(trace, policies, setup)
    start_LS = start_placement(setup) if start_LS is None else start_LS
    check_placement(
        start_LS,
        num_experts=setup.num_experts,
        num_ranks=setup.num_ranks,
        home_slot_LE=setup.home_slot_LE if setup.fixed_homes else None,
        distinct=False,
    )
    scored_WLE = np.ascontiguousarray(counts_WLE[1:])
    runs = [_run_policy(one, trace, scored_WLE, setup, start_LS, check, progress) for one in policies]
    made = Replay(
        setup=setup,
        start_LS=start_LS,
        steps_W=steps_W[1:],
        stands_W=np.diff(steps_W),
        load_WL=scored_WLE.sum(axis=2),
        floor_WL=time_floors(setup, scored_WLE),
        runs=tuple(runs),
    )
    if not offline:
        return made
    best = _offline(made, scored_WLE, progress)
    return replace(made, runs=(*made.runs, best))


# ---- one policy ------------------------------------------------------------------------------------------


def _run_policy(
    policy: Policy,
    trace: Trace,
    scored_WLE: Integers,
    setup: Setup,
    start_LS: Integers,
    check: bool,
    progress: Progress | None,
) -> PolicyRun:
    """Take the policy along the trace, then score what it had in force."""
    stepper = Stepper(policy=policy, trace=trace, setup=setup)
    num_scored = len(scored_WLE)
    wanted = asked_samples(num_scored + 1) if check else frozenset[int]()
    state, slots_LS = stepper.init(start_LS), start_LS
    asked, changes, plan_ms = list[Asked](), list[Change](), list[float]()
    placed = [(start_LS, 0)]
    moves_WL = np.zeros(scored_WLE.shape[:2], np.int64)
    for w in range(num_scored):  # the sample after it is scored
        before = saved(stepper, w, state) if w in wanted else None
        found = stepper.step(w, slots_LS, state)
        if w in wanted:
            asked.append(Asked(w, before, slots_LS, found.slots_LS))
        if not np.array_equal(found.slots_LS, slots_LS):
            moves_WL[w] = moved_slots(slots_LS, found.slots_LS, setup.num_ranks)
            layers = int((found.slots_LS != slots_LS).any(axis=1).sum())
            moves = int(moves_WL[w].sum())
            changes.append(Change(int(trace.steps_W[w]), w, moves, layers, found.reason))
            plan_ms.append(1e3 * found.seconds)
            placed.append((found.slots_LS, w))
        state, slots_LS = found.state, found.slots_LS
        if progress is not None:
            progress(policy.name, w + 1, num_scored)
    if check:
        check_causality(policy, trace, setup, start_LS, asked)
    ends = [first for _, first in placed[1:]] + [num_scored]
    spans = [(slots, first, end - first) for (slots, first), end in zip(placed, ends) if end > first]
    peak_WL, time_WL = _score_spans(scored_WLE, spans, setup, policy.shares, policy.free_slots)
    return PolicyRun(
        name=policy.name,
        shares=policy.shares,
        free_slots=policy.free_slots or not setup.fixed_homes,
        peak_WL=peak_WL,
        bound_WL=peak_bounds(setup, scored_WLE, policy.shares, free_slots=policy.free_slots),
        time_WL=time_WL,
        moves_WL=moves_WL,
        plan_ms=tuple(plan_ms),
        changes=tuple(changes),
        spans=tuple(spans),
    )


def _score_spans(
    scored_WLE: Integers,
    spans: Sequence[tuple[Integers, int, int]],
    setup: Setup,
    shares: str,
    free_slots: bool,
) -> tuple[Floats, Floats]:
    """Peaks in rows and times in seconds, [W, L] each, of placements that were in force one after another."""
    peak_WL, time_WL = np.zeros(scored_WLE.shape[:2]), np.zeros(scored_WLE.shape[:2])
    num_experts = scored_WLE.shape[2]
    for slots_LS, first, number in spans:
        part = slice(first, first + number)
        counts_XE = scored_WLE[part].reshape(-1, num_experts)
        found = rank_loads(counts_XE, np.tile(slots_LS, (number, 1)), shares, setup.num_ranks)
        replica_XG = np.tile(replica_bytes(setup, slots_LS, free_slots=free_slots), (number, 1))
        times_X = layer_times(setup, found.load_LG, found.active_LG, replica_XG, solved=shares == "exact")
        peak_WL[part] = found.load_LG.max(axis=1).reshape(number, -1)
        time_WL[part] = times_X.reshape(number, -1)
    return peak_WL, time_WL


# ---- in hindsight ----------------------------------------------------------------------------------------


def _offline(made: Replay, scored_WLE: Integers, progress: Progress | None) -> PolicyRun:
    """The best sequence of placements, homes kept if fixed; each sample with the faster way of sharing: even
    shares or, where any policy has it, the exact split (which takes time to solve).

    The pool: placements of all policies that respect the homes, and some made for single samples.
    """
    setup, num_layers = made.setup, made.setup.num_layers
    exact = any(run.shares == "exact" for run in made.runs)
    ways = ("even", "exact") if exact else ("even",)
    usable = [run for run in made.runs if _comparable(made, run)]
    peak_WL, time_WL = np.zeros(scored_WLE.shape[:2]), np.zeros(scored_WLE.shape[:2])
    moves_WL = np.zeros(scored_WLE.shape[:2], np.int64)
    for layer in range(num_layers):
        spans = [(slots_LS[layer], first, n) for run in usable for slots_LS, first, n in run.spans]
        pool_XS = distinct_placements(spans, made.start_LS[layer], _POOL)
        hindsight = _hindsight(scored_WLE[:, layer], setup) if exact else []
        pool_XS = np.stack([*pool_XS, *hindsight])
        peak_WX, time_WX = _score_pool(scored_WLE[:, layer], pool_XS, setup, ways)
        move_XX = move_costs(pool_XS, setup.num_ranks, move_seconds(setup.cost, 1))
        path_W, cost = offline_optimum(pool_XS, time_WX * made.stands_W[:, None], move_XX, 0)
        w = np.arange(len(path_W))
        peak_WL[:, layer], time_WL[:, layer] = peak_WX[w, path_W], time_WX[w, path_W]
        slots_WS = pool_XS[np.concatenate([[0], path_W])]
        moves_WL[:, layer] = moved_slots(slots_WS[:-1], slots_WS[1:], setup.num_ranks)
        for run in usable:  # a pool has an end: nobody's own way is left out
            if _layer_cost(made, run, layer) < cost:
                cost = _layer_cost(made, run, layer)
                peak_WL[:, layer], time_WL[:, layer] = run.peak_WL[:, layer], run.time_WL[:, layer]
                moves_WL[:, layer] = run.moves_WL[:, layer]
        if progress is not None:
            progress(OFFLINE, layer + 1, num_layers)
    return PolicyRun(
        name=OFFLINE,
        shares="either" if exact else "even",
        free_slots=not setup.fixed_homes,
        sees_future=True,
        peak_WL=peak_WL,
        # even shares are one of the splits
        bound_WL=peak_bounds(setup, scored_WLE, ways[-1], free_slots=False),
        time_WL=time_WL,
        moves_WL=moves_WL,
    )


def _hindsight(scored_WE: Integers, setup: Setup) -> list[Integers]:
    """Placements made for samples of a layer, with homes and the exact split."""
    num_scored, per_rank = len(scored_WE), setup.num_slots // setup.num_ranks
    spread = np.geomspace(1, num_scored, min(_HINDSIGHT, num_scored)).round().astype(int) - 1
    loads = [scored_WE[w] for w in sorted(set(spread.tolist())) if scored_WE[w].any()]
    return [fill_spare_slots(load_E, setup.home_slot_E, per_rank, setup.num_ranks) for load_E in loads]


def _score_pool(
    scored_WE: Integers, pool_XS: Integers, setup: Setup, ways: Sequence[str]
) -> tuple[Floats, Floats]:
    """Peaks in rows and times in seconds of one layer, [W, X], under each placement of a pool: of the ways of
    sharing the one that takes less time."""
    num_scored = len(scored_WE)
    peak_WX, time_WX = np.zeros((num_scored, len(pool_XS))), np.full((num_scored, len(pool_XS)), np.inf)
    for x, slots_S in enumerate(pool_XS):
        homes = setup.home_slot_E[None] if setup.fixed_homes else None
        replica_G = setup.cost.replica_bytes_LG(slots_S[None], setup.num_ranks, homes)
        replica_WG = np.tile(replica_G, (num_scored, 1))
        for shares in ways:
            found = rank_loads(scored_WE, np.tile(slots_S, (num_scored, 1)), shares, setup.num_ranks)
            solved = shares == "exact"
            time_W = layer_times(setup, found.load_LG, found.active_LG, replica_WG, solved=solved)
            peak_WX[:, x] = np.where(time_W < time_WX[:, x], found.load_LG.max(axis=1), peak_WX[:, x])
            time_WX[:, x] = np.minimum(time_W, time_WX[:, x])
    return peak_WX, time_WX


def _comparable(made: Replay, run: PolicyRun) -> bool:
    """Whether a run keeps the constraints of the offline optimum."""
    return not (made.setup.fixed_homes and run.free_slots)


def _layer_cost(made: Replay, run: PolicyRun, layer: int) -> float:
    """Seconds of a policy in one layer, its moves included."""
    time_s = float((run.time_WL[:, layer] * made.stands_W).sum())
    return time_s + move_seconds(made.setup.cost, run.moves_WL[:, layer])


# ---- figures ---------------------------------------------------------------------------------------------


def balance_over_time(made: Replay, run: PolicyRun) -> tuple[Floats, Floats]:
    """Balancedness of each scored sample in the mean form and in the sum form, [W] each, NaN without load."""
    mean_WL, busy_WL = made.mean_WL, made.load_WL > 0
    layers_W = np.where(busy_WL.any(axis=1), busy_WL.sum(axis=1), np.nan)
    per_layer_WL = np.where(busy_WL, mean_WL / np.where(busy_WL, run.peak_WL, 1.0), 0.0)
    peak_W = run.peak_WL.sum(axis=1)
    return per_layer_WL.sum(axis=1) / layers_W, mean_WL.sum(axis=1) / np.where(peak_W > 0, peak_W, np.nan)


def gap_over_time(made: Replay, run: PolicyRun) -> Floats:
    """Peaks over their bounds, less 1, mean over the layers with load; [W], NaN without any."""
    busy_WL = made.load_WL > 0
    layers_W = np.where(busy_WL.any(axis=1), busy_WL.sum(axis=1), np.nan)
    gap_WL = np.where(busy_WL, run.peak_WL / np.where(busy_WL, run.bound_WL, 1.0) - 1.0, 0.0)
    return gap_WL.sum(axis=1) / layers_W


def figures(made: Replay, run: PolicyRun) -> dict[str, Any]:
    """One row of the table: plain numbers by name, None for what is not defined.

    balancedness_mean, balancedness_sum: mean over the samples of the two forms;  first20, after20: the mean
    form over the first 20 scored samples and those behind;  moves, plans: in all;  plan_ms_median: of
    updates that changed something;  time_s: of all steps, by the cost model;  time_lost_s: over the floor
    that nobody gets below;  moves_s: what the moves are priced at;  regret_s: time and moves over those of
    the offline optimum, 0 or more; not defined for a policy that moves homes which the optimum must keep;
    bytes_moved;  gap_to_bound: mean peak over its bound, less 1.
    """
    mean_W, sum_W = balance_over_time(made, run)
    moves, cost = int(run.moves_WL.sum()), made.setup.cost
    time_s = float((run.time_WL.sum(axis=1) * made.stands_W).sum())
    floor_s = float((made.floor_WL.sum(axis=1) * made.stands_W).sum())
    best = made.run(OFFLINE)
    regret = math.nan
    if best is not None and _comparable(made, run):
        layers = range(made.setup.num_layers)
        regret = sum(_layer_cost(made, run, i) - _layer_cost(made, best, i) for i in layers)
    row = {
        "policy": run.name,
        "shares": run.shares,
        "free_slots": run.free_slots,
        "sees_future": run.sees_future,
        "balancedness_mean": _mean(mean_W),
        "balancedness_sum": _mean(sum_W),
        "balancedness_first20": _mean(mean_W[:EARLY]),
        "balancedness_after20": _mean(mean_W[EARLY:]),
        "moves": moves,
        "plans": len(run.changes) if not run.sees_future else int(run.moves_WL.any(axis=1).sum()),
        "plan_ms_median": float(np.median(run.plan_ms)) if run.plan_ms else math.nan,
        "time_s": time_s,
        "time_lost_s": time_s - floor_s,
        "moves_s": move_seconds(cost, moves),
        "regret_s": regret,
        "bytes_moved": moves * cost.expert_bytes,
        "gap_to_bound": _mean(gap_over_time(made, run)),
    }
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def _mean(value_W: Floats) -> float:
    """The mean of what is defined, NaN where nothing is."""
    known = value_W[~np.isnan(value_W)]
    return float(known.mean()) if len(known) else math.nan


def _check_arguments(trace: Trace, policies: Sequence[Policy], setup: Setup) -> None:
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    if num_samples < 2:
        raise ValueError(
            f"the trace has {num_samples} samples; a plan is made on one and scored on the next: "
            "give 2 or more"
        )
    if (num_layers, num_experts) != (setup.num_layers, setup.num_experts):
        raise ValueError(
            f"the trace has {num_layers} layers of {num_experts} experts and the setup {setup.num_layers} of "
            f"{setup.num_experts}; make the setup from the trace"
        )
    names = [one.name for one in policies]
    if not names or len(set(names)) < len(names) or OFFLINE in names:
        raise ValueError(f"policies {names}: give one or more, each once, none of them called {OFFLINE!r}")
    if not trace.tokens_per_expert_WLE[1:].any():
        raise ValueError("no layer of the trace has load after the first sample: nothing to score")
