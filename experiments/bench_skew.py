"""Bench skew: what skewed routing costs, and from how many rows on a replica is worth its traffic.

    counterpoise bench skew --json OUT --plot OUT.png

A sweep of Zipf exponents: this layer without a remedy and with replicas and the exact split, and other
people's layers, each over this layer's own time with balanced routing. Then one replica that takes more and
more rows off the hotter rank: from how many on it saves more than it costs, beside the formula.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench_layer import ON_SKEW, Case, run_case, where

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
SWEEP = Case(experts=64, top_k=6, tokens=1024)
REPLICA = Case(experts=16, top_k=2, tokens=2048)
# rows that the replica takes, of 4096 of its expert; at 1920 the ranks are even
ROWS = (64, 128, 256, 512, 1024, 1536)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench skew`."""
    top = argparse.ArgumentParser(prog="counterpoise bench skew", allow_abbrev=False)
    add = top.add_argument
    add("--json", metavar="OUT", help="file for the figures")
    add("--plot", metavar="OUT", help="file for the plot of time against skew (png, svg, pdf)")
    add("--rounds", metavar="N", type=int, default=9, help="rounds of every contender; 9")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of rows and weights; float32",
    )
    return top


def main(argv: Sequence[str]) -> int:
    """Measure, print as it goes, write the files."""
    args = parser().parse_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds} must be 1 or more")
    points = []
    for exponent in EXPONENTS:
        case = replace(SWEEP, dtype=args.dtype, skew=f"zipf:{exponent}")
        points.append(
            {
                "exponent": exponent,
                "skew": rank_skew(case),
                "rows": run_case(case, list(ON_SKEW), args.rounds),
            }
        )
        print(describe(points[-1]), flush=True)
    worth = break_even(replace(REPLICA, dtype=args.dtype), ROWS, 2 * args.rounds)
    print(describe_worth(worth))
    if args.json:
        figures = {**where(), "sweep": points, "replica": worth}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot:
        plot(
            points, f"E{SWEEP.experts} K{SWEEP.top_k} T{SWEEP.tokens} {args.dtype}, 2 ranks", Path(args.plot)
        )
    return 0


# ---- time against skew ----------------------------------------------------------------------------------


def rank_skew(case: Case) -> float:
    """Copies of the fullest rank over the mean, every expert at home."""
    import torch

    from experiments.bench_inputs import chosen_experts

    counts_E = np.zeros(case.experts)
    for rank in range(case.ranks):
        chosen_TK = chosen_experts(case, rank, torch.Generator().manual_seed(rank))
        counts_E += np.bincount(chosen_TK.reshape(-1).numpy(), minlength=case.experts)
    load_P = counts_E.reshape(case.ranks, -1).sum(axis=1)
    return float(load_P.max() / load_P.mean())


def ratios(point: dict[str, Any]) -> dict[str, float | None]:
    """Contender -> its time over that of balanced routing, in order of ON_SKEW; None = it did not run."""
    return {row["contender"]: row["ratio_to_balanced"] for row in point["rows"] if row["metric"] == "step_ms"}


def describe(point: dict[str, Any]) -> str:
    """One line a point."""
    found = (f"{name} {ratio:.2f}" for name, ratio in ratios(point).items() if ratio and name != "balanced")
    return f"zipf {point['exponent']:.2f}, fullest rank {point['skew']:.2f} of the mean: " + ", ".join(found)


def plot(points: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time over balanced time against the load of the fullest rank over the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#CC79A7")  # told apart by the colour-blind
    words = {"counterpoise": "without a remedy", "replicas": "replicas and exact split"}
    words |= {"resident": "the same, traffic taken out"}
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    skew = [point["skew"] for point in points]
    for name, colour in zip(ON_SKEW[1:], colours):
        times = [ratios(point).get(name) for point in points]
        if any(times):
            axes.plot(
                skew,
                [np.nan if t is None else t for t in times],
                "o-",
                color=colour,
                label=words.get(name, name),
            )
    axes.axhline(1.15, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("1.15", (min(skew), 1.15), fontsize=8, color="grey", va="bottom")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("load of the fullest rank over the mean, experts at home")
    axes.set_ylabel("time of a step over that of balanced routing")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- what a replica is worth ----------------------------------------------------------------------------


def break_even(case: Case, rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """Rows from which on a replica saves time: what it costs to have over what a row saves.

    Cost: with fetch and gradient less without, the same rows taken, median over rounds and rows. Saving: the
    slope of the times without traffic over the rows taken, 0 included. The formula, (b + b_grad) / 6 * FLOPS
    / bandwidth, gets the rate of the experts' products and the bandwidth of an all-to-all-v of one expert's
    weights, both measured in the same job.
    """
    from moe.testing import run_ranks

    outcomes = run_ranks(replica_rank, case.ranks, case, tuple(rows), rounds, timeout_s=1800.0)
    # [with or without traffic, rows, rounds], of the slowest rank
    times_s = np.max([outcome["times_s"] for outcome in outcomes], axis=0)
    cost_s = float(np.median(times_s[0, 1:] - times_s[1, 1:]))
    without_s = np.median(times_s[1], axis=1)
    saved_s = -float(np.polyfit((0, *rows), without_s, 1)[0])
    element = 2 if case.dtype == "bfloat16" else 4
    flops = min(outcome["flops"] for outcome in outcomes)
    bandwidth = min(outcome["bytes_per_s"] for outcome in outcomes)
    return {
        "case": case.name,
        "rows": [0, *rows],
        "with_ms": (np.median(times_s[0], axis=1) * 1e3).tolist(),
        "without_ms": (without_s * 1e3).tolist(),
        "fetch_ms": cost_s * 1e3,
        "us_a_row": saved_s * 1e6,
        "measured_rows": cost_s / saved_s if min(cost_s, saved_s) > 0 else None,
        "formula_rows": 2 * element / 6 * flops / bandwidth,
        "gflops": flops / 1e9,
        "gbytes_per_s": bandwidth / 1e9,
    }


def describe_worth(worth: dict[str, Any]) -> str:
    """The figures in words."""
    measured = worth["measured_rows"]
    from_rows = "lost in the noise" if measured is None else f"{measured:.0f} rows"
    return (
        f"replica of {worth['case']}: fetch and gradient {worth['fetch_ms']:.1f} ms, {worth['us_a_row']:.1f} "
        f"us saved a row: break-even {from_rows}; formula {worth['formula_rows']:.0f} "
        f"({worth['gflops']:.0f} GFLOP/s, {worth['gbytes_per_s']:.2f} GB/s)"
    )


def replica_rank(rank: int, world: int, case: Case, rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """Times [2, 1 + len(rows), rounds] of a replica that takes 0 and each number of rows: with its traffic,
    and without."""
    from experiments.allocator import keep_memory
    from experiments.bench_contenders import our_layer, timed, without_traffic
    from experiments.bench_inputs import layer_run, make_inputs
    from moe import Topology

    keep_memory()
    inputs = make_inputs(replace(case, skew="always:0"), rank)
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    runs = []
    for traffic in (True, False):
        for taken in (0, *rows):
            layer = our_layer(case, inputs, topology)
            home = np.arange(case.experts).reshape(world, -1)
            spare = np.array([[-1], *[[0]] * (world - 1)])
            layer.place(np.concatenate([home, spare], axis=1).reshape(-1))
            layer.split = _Take(taken, home.shape[1])
            if not traffic:
                without_traffic(layer)
            runs.append(layer_run(layer, inputs, layer.parameters()))
    for run in runs:
        timed(run)
    times_s = np.array([[timed(run) for run in runs] for _ in range(rounds)])
    flops, bytes_per_s = rates(case, inputs)
    shaped = times_s.T.reshape(2, 1 + len(rows), rounds)
    return {"times_s": shaped.tolist(), "flops": flops, "bytes_per_s": bytes_per_s}


class _Take:
    """A split that leaves every row at home but some of expert 0's, which go to its replica on rank 1."""

    def __init__(self, rows: int, local: int) -> None:
        self.rows, self.local = rows, local

    def __call__(self, counts_PE: np.ndarray, slot_to_expert_S: np.ndarray) -> np.ndarray:
        slots = self.local + 1
        rows_PS = np.zeros((counts_PE.shape[0], slot_to_expert_S.shape[0]), dtype=np.int64)
        rows_PS.reshape(counts_PE.shape[0], -1, slots)[:, :, : self.local] = counts_PE.reshape(
            counts_PE.shape[0], -1, self.local
        )
        left = self.rows
        for source in (1, 0):  # own rows first
            taken = min(left, int(rows_PS[source, 0]))
            rows_PS[source, 0] -= taken
            rows_PS[source, slots + self.local] += taken
            left -= taken
        return rows_PS


def rates(case: Case, inputs: Any) -> tuple[float, float]:
    """FLOP/s of an expert's forward and backward, 18 D F a row, and bytes/s of an exchange of its weights."""
    import torch
    import torch.distributed as dist

    from moe.exchange import DistExchange
    from moe.feed_forward import feed_forward

    w1, w2, w3 = (w[:1].clone().requires_grad_() for w in (inputs.w1, inputs.w2, inputs.w3))
    rows_RD, rows_s = inputs.x_TD.clone().requires_grad_(), torch.tensor([case.tokens])
    packed = torch.cat([w.detach().reshape(1, -1) for w in (w1, w2, w3)], dim=1)
    exchange = DistExchange(None)
    there, back = ([0, 1], [0, 0]) if exchange.rank == 0 else ([0, 0], [1, 0])
    compute_s, travel_s = [], []
    for _ in range(9):
        begun = time.perf_counter()
        feed_forward(rows_RD, w1, w2, w3, rows_s).backward(inputs.grad_TD)
        compute_s.append(time.perf_counter() - begun)
        dist.barrier()
        begun = time.perf_counter()
        exchange.send_rows(packed if exchange.rank == 0 else packed[:0], there, back)
        travel_s.append(time.perf_counter() - begun)
    work = 18 * case.width * case.hidden * case.tokens
    return work / float(np.median(compute_s)), packed.nbytes / float(np.median(travel_s))
