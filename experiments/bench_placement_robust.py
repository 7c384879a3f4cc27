"""Bench placement, part `robust`: how well a placement serves loads that are off from the planned one.

Planned loads: lognormal of sigma 1, 256 experts, 288 slots on 32 ranks; the loads that come are those times a
lognormal of another sigma, and every contender meets the same. Balancedness in the mean form, with the exact
split and with even shares. Contenders plan on the planned load alone; "robust, spread known" is told how far
off loads will be, "robust" takes its default.
"""

from functools import partial
from typing import Any

import numpy as np

from balancer.bound import peak_bound
from balancer.connect import connected_placement
from balancer.even import even_placement
from balancer.lplb import lplb_placement
from balancer.packing import pack, rebalance_experts
from balancer.planning import plan_placement
from experiments.bench_placement_parts import Floats, Found, Integers, Options, balance, peaks_of
from experiments.forecast_plots_parts import grid, look, png

SLOTS, RANKS, EXPERTS = 288, 32, 256
TARGETS = {0.05: 0.999, 0.1: 0.997, 0.2: 0.975, 0.4: 0.86}
SIGMAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
OURS = ("robust, spread known", "robust")
CONTENDERS = (*OURS, "connected", "even fast", "greedy", "lplb-ring", "lplb-cube")


def run(options: Options) -> Found:
    """All sigmas and contenders."""
    found = Found()
    layers, draws = (4, 10) if options.quick else (16, 30)
    load_LE = np.random.default_rng(5).lognormal(0.0, 1.0, (layers, EXPERTS))
    fixed = fixed_placements(load_LE)
    for at, sigma in enumerate(SIGMAS):
        off_KLE = np.random.default_rng([6, at]).lognormal(0.0, sigma, (draws, layers, EXPERTS))
        known = {OURS[0]: _robust(load_LE, spread=sigma)}
        _score(found, sigma, load_LE * off_KLE, known | fixed)
    found.plots["robust"] = _plot(found.rows)
    return found


def fixed_placements(load_LE: Floats) -> dict[str, Integers]:
    """Placements that do not depend on how far off the load will be, by contender."""
    return {
        "robust": _robust(load_LE),
        "connected": connected_placement(load_LE, SLOTS, RANKS),
        "even fast": even_placement(load_LE, SLOTS, RANKS),
        "greedy": rebalance_experts(load_LE, SLOTS, 0, 1, RANKS)[0],
        "lplb-ring": packed_lplb(load_LE, "ring"),
        "lplb-cube": packed_lplb(load_LE, "cube"),
    }


def packed_lplb(load_LE: Floats, kind: str) -> Integers:
    """The pattern's replicas after the originals were packed by load, as LPLB does it: homes are free for all
    contenders here."""
    rank_LE, place_LE = pack(load_LE, RANKS, EXPERTS // RANKS)
    expert_LE = np.empty_like(rank_LE)  # the expert at each place, rank by rank
    every_LE = np.broadcast_to(np.arange(EXPERTS), rank_LE.shape)
    np.put_along_axis(expert_LE, rank_LE * (EXPERTS // RANKS) + place_LE, every_LE, axis=1)
    slots_LS = lplb_placement(np.take_along_axis(load_LE, expert_LE, axis=1), SLOTS, RANKS, kind=kind)
    return np.where(slots_LS < 0, -1, np.take_along_axis(expert_LE, slots_LS.clip(0), axis=1))


def _robust(load_LE: Floats, spread: float | None = None) -> Integers:
    told: dict[str, Any] = {} if spread is None else {"spread": spread}
    plan = partial(plan_placement, num_ranks=RANKS, num_slots=SLOTS, **told)
    return plan(load_LE).slot_to_expert_LS


def _score(found: Found, sigma: float, load_KLE: Floats, placements: dict[str, Integers]) -> None:
    """Balancedness of all placements on the loads that came, with its standard error over the layers."""
    shape = load_KLE.shape[:2]
    bound_KL = peak_bound(load_KLE.reshape(-1, EXPERTS), SLOTS, RANKS).reshape(shape)
    most = float(balance(load_KLE, bound_KL, RANKS).mean())
    for contender, slots_LS in placements.items():
        peak_KL = peaks_of(load_KLE, slots_LS, RANKS)
        balance_L = (load_KLE.sum(axis=2) / RANKS / peak_KL).mean(axis=0)
        found.add(
            f"sigma {sigma:g}", contender, "balancedness_exact", float(balance_L.mean()), floor=most,
            target=TARGETS.get(sigma) if contender in OURS else None,
            standard_error=float(balance_L.std(ddof=1) / np.sqrt(len(balance_L))), sigma=sigma,
        )  # fmt: skip
        even_K = balance(load_KLE, peaks_of(load_KLE, slots_LS, RANKS, "even"), RANKS)
        found.add(
            f"sigma {sigma:g}", contender, "balancedness_even", float(even_K.mean()), floor=most, sigma=sigma
        )


def _plot(rows: list[dict[str, Any]]) -> bytes:
    figure, ((left, right),) = grid(1, 2, (11.5, 4.8))
    for ax, shares in ((left, "even"), (right, "exact")):
        for i, contender in enumerate(CONTENDERS):
            line = [
                (r["sigma"], r["value"])
                for r in rows
                if r["contender"] == contender and r["metric"] == f"balancedness_{shares}"
            ]
            style = look(i) if i < 6 else {**look(i), "color": "#666600", "ls": (0, (3, 1, 1, 1))}
            ax.plot(*zip(*line), marker="o", ms=3, label=contender, **style)
        ax.set_xlabel("sigma: how far off the load is from the planned one (lognormal)")
        ax.set_ylim(0.55, 1.01)
    right.plot(*zip(*TARGETS.items()), "k_", ms=14, mew=1.5, label="target")
    left.set_ylabel("balancedness (mean load / fullest rank)")
    left.set_title("rows shared evenly among an expert's slots", fontsize=10)
    right.set_title("exact split of every batch", fontsize=10)
    right.legend(fontsize=8, loc="lower left")
    return png(figure, "Robustness: 256 experts, 288 slots, 32 ranks; loads lognormal of sigma 1")
