"""Bench split: the time of the exact split of one batch, beside its twin and the linear program.

    counterpoise bench split --json OUT

Loads: lognormal (sigma 1), Zipf, one-hot, uniform with noise. Replicas: as the simple rule places them for
the load of another batch, or at random. Contenders of one case run in turn on the same instances. An
instance's time is the median of its calls; the figures are the median instance, the slowest instance, and the
slowest single call, which has the pauses of the machine in it.

    peak       the compiled kernel of phases 1 to 3 alone: the smallest peak of one load
    solve      all phases with the fewest rows off rank, one rank's rows, as a step calls it (Python included)
    rows       the same with the rows of all ranks
    wrapper    solve less what its two kernels take
    twin       solve in plain Python, small sizes
    lp         scipy's HiGHS on the linear program of the peak alone
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from balancer import split
from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit
from experiments.bench_layer import where

SIZES = [(64, 8, 80), (256, 32, 288), (256, 256, 512), (256, 256, 2304)]
LOADS = ("lognormal", "zipf", "one-hot", "noise")
PLACEMENTS = ("heaviest", "random")
COPIES = 8192  # routed copies of one source rank
TWIN_SLOTS = 300  # the twin and the linear program take seconds beyond
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One batch: counts_PE [P, E] and the placement slot_to_expert_S [S]."""

    counts_PE: Counts
    slot_to_expert_S: Counts


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench split`."""
    top = argparse.ArgumentParser(prog="counterpoise bench split", allow_abbrev=False)
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--instances", metavar="N", type=int, default=10, help="batches of every case; 10")
    top.add_argument("--calls", metavar="N", type=int, default=15, help="calls of every contender; 15")
    top.add_argument("--cases", metavar="TEXT", default="", help='only cases with this text, say "S288 zipf"')
    return top


def main(argv: Sequence[str]) -> int:
    """Time every case, print a table, write the file."""
    args = parser().parse_args(argv)
    if args.instances < 1 or args.calls < 1:
        raise ValueError(f"--instances {args.instances} and --calls {args.calls} must be 1 or more")
    split.warm_split()
    rows: list[dict[str, Any]] = []
    print(f"{'case':<36} {'contender':<10} {'median us':>10} {'slowest':>10} {'one call':>10}")
    for size in SIZES:
        for load in LOADS:
            for placement in PLACEMENTS:
                name = f"E{size[0]} P{size[1]} S{size[2]} {load} {placement}"
                if args.cases in name:
                    rows += run_case(name, size, load, placement, args.instances, args.calls)
    if not rows:
        raise ValueError(f"--cases {args.cases!r} matches no case, such as 'E256 P32 S288 zipf heaviest'")
    if args.json:
        Path(args.json).write_text(json.dumps({**where(), "rows": rows}, indent=1) + "\n")
    return 0


def run_case(
    name: str, size: tuple[int, int, int], load: str, placement: str, instances: int, calls: int
) -> list[dict[str, Any]]:
    """Time one case and print it.   Returns its rows."""
    times: dict[str, list[Any]] = {}
    for seed in range(instances):
        instance = make_instance(size, load, placement, seed)
        contenders = make_contenders(instance)
        for contender, call in contenders.items():
            few = 1 if contender in ("twin", "lp") else calls
            times.setdefault(contender, []).append(_microseconds(call, few))
    kernels = times.pop("kernels")
    times["wrapper"] = [solve - inner for solve, inner in zip(times["solve"], kernels)]
    rows = []
    for contender, found in times.items():
        medians = [float(np.median(calls)) for calls in found]
        figures = {"median_us": float(np.median(medians)), "max_us": max(medians)}
        figures["max_call_us"] = float(max(map(max, found)))
        shown = "".join(f" {value:>10.1f}" for value in figures.values())
        print(f"{name:<36} {contender:<10}{shown}", flush=True)
        head = {"case": name, "contender": contender}
        rows += [{**head, "metric": metric, "value": value} for metric, value in figures.items()]
    return rows


def _microseconds(call: Callable[[], Any], calls: int) -> Counts:
    """Time of each call; the first, which finds cold caches, counts among them."""
    found = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return np.array(found)


# ---- contenders -------------------------------------------------------------------------------------------


def make_contenders(instance: Instance) -> dict[str, Callable[[], Any]]:
    """What is timed on an instance, by name."""
    batch = (instance.counts_PE, instance.slot_to_expert_S)
    found: dict[str, Callable[[], Any]] = {
        "peak": peak_kernel(instance),
        "solve": partial(ExactSplit().solve, *batch, 0),
        "kernels": step_kernels(instance),
        "rows": partial(ExactSplit().solve, *batch),
    }
    if instance.slot_to_expert_S.shape[0] <= TWIN_SLOTS:
        found["twin"] = partial(ExactSplit(compiled=False).solve, *batch, 0)
        found["lp"] = partial(peak_by_linear_program, instance)
    return found


def peak_kernel(instance: Instance) -> Callable[[], Any]:
    """The compiled peak_split with everything given."""
    load_E, num_ranks = instance.counts_PE.sum(axis=0), instance.counts_PE.shape[0]
    rows_S = np.zeros(instance.slot_to_expert_S.shape[0], np.int64)
    no_speed, extra_G, load_G, cut_G = np.empty(0), *np.zeros((3, num_ranks), np.int64)
    run = split._kernels(compiled=True).peak_split  # pyright: ignore[reportPrivateUsage]
    return partial(run, load_E, instance.slot_to_expert_S, no_speed, extra_G, rows_S, load_G, cut_G)


def step_kernels(instance: Instance) -> Callable[[], Any]:
    """The two compiled kernels of `solve` for rank 0, with everything given."""
    counts_PE, slots = instance.counts_PE, instance.slot_to_expert_S
    num_ranks, num_slots = counts_PE.shape[0], slots.shape[0]
    run = split._kernels(compiled=True)  # pyright: ignore[reportPrivateUsage]
    out = split._outputs(num_ranks, num_slots, num_ranks, 0)  # pyright: ignore[reportPrivateUsage]
    no_home, no_speed, off = np.empty(0, np.int64), np.empty(0), np.empty(2, np.int64)
    extra_G, load_G, optimum_G = np.zeros((3, num_ranks), np.int64)

    def call() -> None:
        rows_S = np.zeros(num_slots, np.int64)
        run.slot_split(counts_PE, slots, no_home, no_speed, extra_G, (1, 0, 0), rows_S, load_G, optimum_G)
        run.send_rows(counts_PE, slots, rows_S, num_ranks, 1, 0, out, off)

    return call


def peak_by_linear_program(instance: Instance) -> float:
    """The peak from HiGHS: one variable a site of an expert, one for the peak."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    load_E, num_ranks = instance.counts_PE.sum(axis=0), instance.counts_PE.shape[0]
    (used,) = np.nonzero(instance.slot_to_expert_S >= 0)
    rank_I, sites = used // (instance.slot_to_expert_S.shape[0] // num_ranks), used.size
    ones, index = np.ones(sites), np.arange(sites)
    supply = coo_matrix((ones, (instance.slot_to_expert_S[used], index)), shape=(load_E.shape[0], sites + 1))
    into = coo_matrix(
        (
            np.concatenate([ones, -np.ones(num_ranks)]),
            (
                np.concatenate([rank_I, np.arange(num_ranks)]),
                np.concatenate([index, np.full(num_ranks, sites)]),
            ),
        ),
        shape=(num_ranks, sites + 1),
    )
    cost = np.append(np.zeros(sites), 1.0)
    return linprog(cost, into, np.zeros(num_ranks), supply, load_E, method="highs").fun


# ---- instances --------------------------------------------------------------------------------------------


def make_instance(size: tuple[int, int, int], load: str, placement: str, seed: int) -> Instance:
    """A seeded batch; the rule places for a batch of the same router, not for this one."""
    num_experts, num_ranks, num_slots = size
    rng = np.random.default_rng(seed)
    share_E = _shares(load, num_experts, rng)
    planned_PE, counts_PE = (rng.multinomial(COPIES, share_E, size=num_ranks) for _ in range(2))
    homes, per_rank = num_experts // num_ranks, num_slots // num_ranks
    home_slot_E = np.arange(num_experts) // homes * per_rank + np.arange(num_experts) % homes
    if placement == "heaviest":
        slots = heaviest_replicated(planned_PE.sum(axis=0), home_slot_E, per_rank, num_ranks)
    else:
        slots = rng.integers(0, num_experts, num_slots)
        slots[home_slot_E] = np.arange(num_experts)
    return Instance(counts_PE=counts_PE, slot_to_expert_S=slots)


def heaviest_replicated(load_E: Counts, home_slot_E: Counts, slots_per_rank: int, num_ranks: int) -> Counts:
    """Replicas by the rule for spare slots; where there are many, the rest of each rank's at random."""
    few = int(home_slot_E.shape[0] / num_ranks) + 1
    homes = home_slot_E // slots_per_rank * few + home_slot_E % slots_per_rank
    slot_PS = np.full((num_ranks, slots_per_rank), -1)
    slot_PS[:, :few] = fill_spare_slots(load_E, homes, few, num_ranks).reshape(num_ranks, few)
    share_E = load_E / load_E.sum()
    rng = np.random.default_rng(0)
    for rank in range(num_ranks):
        others = np.setdiff1d(np.nonzero(share_E)[0], slot_PS[rank, :few])
        more = min(slots_per_rank - few, others.size)
        chance = share_E[others] / share_E[others].sum()
        slot_PS[rank, few : few + more] = rng.choice(others, more, replace=False, p=chance)
    return slot_PS.ravel()


def _shares(load: str, num_experts: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    weight_E = {
        "lognormal": rng.lognormal(0.0, 1.0, num_experts),
        "zipf": 1.0 / (1 + rng.permutation(num_experts)),
        "one-hot": np.where(np.arange(num_experts) == rng.integers(num_experts), 1.0, 1e-3 / num_experts),
        "noise": 1.0 + 0.1 * rng.standard_normal(num_experts).clip(-3, 3),
    }[load]
    return weight_E / weight_E.sum()
