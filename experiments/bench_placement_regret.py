"""Bench placement, part `regret`: what a forecaster is worth, counted in the planner's own currency.

The controller plans at most every 100 training steps and holds; 8 ranks, homes fixed, 16 spare slots, exact
split. Time lost of a run, in seconds by the prices of `bench_placement_parts.priced`:

    sum over samples, layers of  (fullest rank - mean rank) * row_s * steps of the sample + moves * move_s

Regret is that less the time lost of the offline optimum, the best sequence of all placements that any
contender had in force, found for each layer by itself. Loads: the recorded one if there is any, and three
kinds of synthetic drift, uneven enough that spare slots are not plenty. The peer to beat plans on the last
load alone. Figures of the whole trace, and of what is behind its first 20 scored samples: before the second
plan nobody has a past to foresee from, and a collapse that comes then costs all the same.
"""

from typing import Any

import numpy as np

from balancer.metrics import moved_slots
from balancer.offline import move_costs, offline_optimum
from balancer.policies import start_placement
from balancer.synth_kinds import synth_trace
from balancer.trace import Trace
from experiments.bench_placement_parts import (
    EARLY,
    ROW_S,
    Floats,
    Found,
    Integers,
    Options,
    Walk,
    controller_step,
    peaks_of,
    walk,
)
from experiments.bench_placement_trace import RANKS, config_of, setup_of
from experiments.forecast_plots_parts import grid, look, png

LAST = "last load alone"
CONTENDERS: dict[str, dict[str, Any]] = {
    "regime": {"forecaster": "regime"},
    LAST: {"forecaster": "persistence", "num_scenarios": 0},
    "persistence, scenarios": {"forecaster": "persistence"},
    "ema, scenarios": {"forecaster": "ema"},
}
KINDS: dict[str, dict[str, Any]] = {
    "drift": {"sd": 0.1, "spread": 1.5},
    "collapse-slow": {},
    "rotation": {"spread": 1.5},
}
# of the regret of planning on the last load alone
TARGET = 0.25
# price of a move, in steps of one balanced layer: some fetches of an expert, as training has it
PRICE = 0.05
EVERY_STEPS = 100


def run(options: Options) -> Found:
    """All loads and contenders."""
    found = Found()
    for case, trace in traces(options).items():
        _run_case(found, case, trace, [0] if options.quick else [0, 1, 2])
    found.plots["regret"] = _plot(found.rows)
    return found


def traces(options: Options) -> dict[str, Trace]:
    """The loads, by name; synthetic ones with counts as noisy as those of real batches (phi 20)."""
    samples, layers = (40, 2) if options.quick else (300, 4)
    made = {
        kind: synth_trace(
            kind, seed=11, num_samples=samples, num_layers=layers, num_experts=32, copies=262144,
            dispersion=20.0, **more,
        )
        for kind, more in KINDS.items()
    }  # fmt: skip
    return made if options.trace is None else {"recorded": options.trace, **made}


def time_lost(trace: Trace, peak_WL: Floats, moves_WL: Integers, move_s: float) -> Floats:
    """Seconds lost before the next scored sample, [W], over all layers, moves included."""
    counts_WLE = trace.tokens_per_expert_WLE[1:]
    # splits are fractional: what rounding takes below an even load is no gain
    over_WL = np.maximum(peak_WL - counts_WLE.sum(axis=2) / RANKS, 0.0)
    return (over_WL * ROW_S * np.diff(trace.steps_W)[:, None] + moves_WL * move_s).sum(axis=1)


def offline_lost(trace: Trace, walks: list[Walk], start_LS: Integers, move_s: float) -> Floats:
    """Seconds lost with the best sequence of the placements that the walks used, [W]."""
    scored_WLE = np.ascontiguousarray(trace.tokens_per_expert_WLE[1:])
    peak_WL, moves_WL = np.zeros(scored_WLE.shape[:2]), np.zeros(scored_WLE.shape[:2], np.int64)
    stands_W1 = np.diff(trace.steps_W)[:, None]
    for layer, start_S in enumerate(start_LS):
        used = [start_S, *(slots_LS[layer] for one in walks for slots_LS in one.used)]
        pool_XS = np.array(list(dict.fromkeys(tuple(slots_S.tolist()) for slots_S in used)))
        counts_W1E = np.ascontiguousarray(scored_WLE[:, layer : layer + 1])
        peak_WX = np.concatenate([peaks_of(counts_W1E, slots_S[None], RANKS) for slots_S in pool_XS], axis=1)
        over_WX = np.maximum(peak_WX - counts_W1E.sum(axis=2) / RANKS, 0.0)
        move_XX = move_costs(pool_XS, RANKS, move_s)
        path_W, _ = offline_optimum(pool_XS, over_WX * ROW_S * stands_W1, move_XX, 0)
        peak_WL[:, layer] = peak_WX[np.arange(len(path_W)), path_W]
        slots_WS = pool_XS[np.concatenate([[0], path_W])]
        moves_WL[:, layer] = moved_slots(slots_WS[:-1], slots_WS[1:], RANKS)
    return time_lost(trace, peak_WL, moves_WL, move_s)


def _run_case(found: Found, case: str, trace: Trace, seeds: list[int]) -> None:
    setup = setup_of(trace, 16, PRICE)
    start_LS, move_s = start_placement(setup), setup.cost.move_s(1)
    walks: dict[str, list[Walk]] = {}
    for name, options in CONTENDERS.items():
        for seed in seeds[:1] if name == LAST else seeds:  # without scenarios nothing is drawn
            config = config_of(setup, every_steps=EVERY_STEPS, **(options | {"seed": seed}))
            step = controller_step(config, setup.num_experts, start_LS)
            walks.setdefault(name, []).append(walk(trace, step, start_LS, RANKS))
    everyone = [one for runs in walks.values() for one in runs]
    best_W = offline_lost(trace, everyone, start_LS, move_s)
    lost = {
        name: [time_lost(trace, one.peak_WL, one.moves_WL, move_s) for one in runs]
        for name, runs in walks.items()
    }
    found.add(case, "offline", "time_lost_s", float(best_W.sum()))
    for name, runs in walks.items():
        found.add(
            case, name, "time_lost_s", float(np.median([lost_W.sum() for lost_W in lost[name]])),
            floor=float(best_W.sum()),
        )  # fmt: skip
        found.add(case, name, "moves", float(np.median([one.moves_WL.sum() for one in runs])))
        _add_regret(found, case, name, "regret_of_last_load", lost, best_W)
        late = {other: [lost_W[EARLY:] for lost_W in lost_NW] for other, lost_NW in lost.items()}
        _add_regret(found, case, name, "late_regret_of_last_load", late, best_W[EARLY:])


def _add_regret(
    found: Found, case: str, name: str, metric: str, lost: dict[str, list[Floats]], best_W: Floats
) -> None:
    """A contender's regret over that of the last load alone: the median over its runs, and their range."""
    last_s = lost[LAST][0].sum() - best_W.sum()
    share_N = [float((lost_W.sum() - best_W.sum()) / max(last_s, 1e-12)) for lost_W in lost[name]]
    found.add(
        case, name, metric, float(np.median(share_N)), target=TARGET if name == "regime" else None,
        lowest=min(share_N), highest=max(share_N),
    )  # fmt: skip


def _plot(rows: list[dict[str, Any]]) -> bytes:
    figure, (axes,) = grid(1, 2, (11.5, 4.6))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    words = ("whole trace", f"behind the first {EARLY} samples")
    for ax, metric, title in zip(axes, ("regret_of_last_load", "late_regret_of_last_load"), words):
        share = {(r["case"], r["contender"]): r for r in rows if r["metric"] == metric}
        for i, name in enumerate(CONTENDERS):
            middle, low, high = (
                np.array([share[case, name][key] for case in cases]) for key in ("value", "lowest", "highest")
            )
            x = np.arange(len(cases)) + 0.2 * (i - 1.5)
            error = np.stack([middle - low, high - middle])
            ax.bar(x, middle, 0.19, yerr=error, capsize=3, color=look(i)["color"], label=name)
        ax.axhline(TARGET, color="black", ls=":", label="target for regime")
        ax.set_xticks(np.arange(len(cases)), cases)
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("regret over that of the last load alone")
    axes[1].legend(fontsize=8)
    return png(figure, "Decision regret: time lost against the offline optimum, plans every 100 steps")
