"""Bench layer: this layer beside those that people use today, on the same weights, routing and ranks.

    counterpoise bench layer --json OUT

Contenders and floor: bench_contenders.py. All run in one job, in turn, so that a slow moment of the machine
hits everybody; a round's time is that of its slowest rank, the figure is the median over rounds, a ratio the
median of the rounds' ratios. The memory is what a step adds at its peak to what was there before it.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16")
# experts, experts per token, tokens of a rank
SIZES = [(16, 2, 2048), (64, 6, 1024), (64, 2, 4096), (16, 2, 8192), (128, 8, 2048)]
# other people's; those that are ranked; the rest are this layer or the floor with something added
OTHERS = ("ds_native", "ds_autoep", "hf_eager", "hf_grouped")
RANKED = ("counterpoise", *OTHERS)
RECOMPUTED = ("recompute", "recompute_rows", "floor_recompute")
ON_RANKS = ("floor", "counterpoise", "ds_native", "ds_autoep", "observed", *RECOMPUTED)
ON_ONE = ("floor", "counterpoise", "hf_eager", "hf_grouped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: E experts, K per token, T tokens of a rank, D width, F hidden width of an expert, P ranks."""

    experts: int
    top_k: int
    tokens: int
    width: int = 256
    hidden: int = 512
    dtype: str = "float32"
    ranks: int = 2

    @property
    def name(self) -> str:
        size = f"E{self.experts} K{self.top_k} T{self.tokens} D{self.width} F{self.hidden}"
        return f"{size} {self.dtype} P{self.ranks}"


def default_cases(ranks: int = 2) -> list[Case]:
    """The sizes of the table, each in float32 and bfloat16, over `ranks` ranks; two of them on one rank."""
    cases = []
    for dtype in DTYPES:
        for e, k, t in SIZES:
            cases.append(Case(experts=e, top_k=k, tokens=t, dtype=dtype, ranks=ranks))
        cases.append(Case(experts=16, top_k=2, tokens=2048, width=1024, dtype=dtype, ranks=ranks))
    if ranks > 1:
        for dtype in DTYPES:
            for e, k, t in SIZES[:2]:
                cases.append(Case(experts=e, top_k=k, tokens=t, dtype=dtype, ranks=1))
    return cases


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench layer`."""
    top = argparse.ArgumentParser(prog="counterpoise bench layer", allow_abbrev=False)
    add = top.add_argument
    add("--json", metavar="OUT", help="file for the rows")
    add("--markdown", metavar="OUT", help="file for the table, in Markdown")
    add("--ranks", metavar="P", type=int, default=2, help="ranks; 2")
    add("--rounds", metavar="N", type=int, default=9, help="rounds of every contender; 9")
    add("--cases", metavar="TEXT", default="", help='only cases whose name has this text, say "E16 K2 T2048"')
    add("--contenders", metavar="NAMES", default="", help="comma-separated; default all that the case has")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the cases one after the other, print a block of figures for each, write the files."""
    args = parser().parse_args(argv)
    if args.ranks < 1 or args.rounds < 1:
        raise ValueError(f"--ranks {args.ranks} and --rounds {args.rounds} must be 1 or more")
    cases = default_cases(args.ranks)
    chosen = [case for case in cases if args.cases in case.name]
    if not chosen:
        raise ValueError(f"--cases {args.cases!r} matches none of: {'; '.join(case.name for case in cases)}")
    wanted = _names(args.contenders)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(chosen, 1):
        names = [name for name in (ON_ONE if case.ranks == 1 else ON_RANKS) if not wanted or name in wanted]
        if not names:
            continue
        print(f"[{number}/{len(chosen)}] {case.name}", flush=True)
        found = run_case(case, names, args.rounds)
        print_case(found)
        rows += found
        if args.json:  # after every case: a run that is cut short leaves what it has
            Path(args.json).write_text(json.dumps({**where(), "rows": rows}, indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text(markdown(rows))
    return 0


def _names(text: str) -> list[str]:
    known = sorted({*ON_RANKS, *ON_ONE})
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(f"--contenders {name!r} is unknown; use some of {', '.join(known)}")
    return names


def where() -> dict[str, str]:
    """Machine and commit that the figures belong to."""
    from experiments.rundir import versions

    found = versions()
    machine = f"{found['platform']}, {_cpu()}"
    return {
        "machine": machine,
        "commit": _commit() or found.get("counterpoise") or "",
        "torch": found["torch"],
    }


def _commit() -> str:
    """The commit of the working tree, with "+" where files of it have changed; "" outside of one."""
    described = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(
            described, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu() -> str:
    """Name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def run_case(case: Case, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Rows of one case: step_ms and peak_mib of every contender, or one with `why` it failed."""
    from experiments.bench_contenders import measure
    from moe.testing import run_ranks

    settings = [(name, case) for name in names]
    quiet = {"DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "99"}  # the profiler would tell of every start
    outcomes = run_ranks(measure, case.ranks, settings, rounds, timeout_s=1800.0, env=quiet)
    ran = [name for name in names if "times_s" in outcomes[0][name]]
    times = {name: np.max([outcome[name]["times_s"] for outcome in outcomes], axis=0) for name in ran}
    peaks = {name: max(outcome[name]["peak_mib"] for outcome in outcomes) for name in ran}
    rows: list[dict[str, Any]] = []
    for name in names:
        head = {"case": case.name, "contender": name}
        if name not in ran:
            nothing = {"value": None, "ratio_to_best_peer": None, "ratio_to_floor": None}
            rows.append({**head, "metric": "step_ms", **nothing, "why": outcomes[0][name]["why"]})
            continue
        peers = [peer for peer in ran if peer in RANKED and peer != name]
        step = {"metric": "step_ms", "value": statistics.median(times[name]) * 1e3}
        fastest = min(peers, key=lambda peer: float(np.median(times[peer])), default=None)
        step["ratio_to_best_peer"] = None if fastest is None else _ratio(times[name], times[fastest])
        step["ratio_to_floor"] = _ratio(times[name], times["floor"]) if "floor" in times else None
        leanest = min((peaks[peer] for peer in peers), default=None)
        peak = {"metric": "peak_mib", "value": peaks[name], "ratio_to_floor": None}
        peak["ratio_to_best_peer"] = None if not leanest else peaks[name] / leanest
        rows += [{**head, **step}, {**head, **peak}]
    return rows


def _ratio(times: np.ndarray, others: np.ndarray) -> float:
    """Median of the ratios of rounds that both have."""
    both = min(len(times), len(others))
    return float(np.median(times[:both] / others[:both]))


def print_case(rows: list[dict[str, Any]]) -> None:
    """One block of figures."""
    peaks = {row["contender"]: row for row in rows if row["metric"] == "peak_mib"}
    for row in (r for r in rows if r["metric"] == "step_ms"):
        name = row["contender"]
        if row["value"] is None:
            print(f"  {name:<16} {row['why']}")
            continue
        floor = f"{row['ratio_to_floor']:5.2f} of floor" if row["ratio_to_floor"] else ""
        peer = f"{row['ratio_to_best_peer']:5.2f} of the best other" if row["ratio_to_best_peer"] else ""
        print(f"  {name:<16} {row['value']:8.1f} ms {floor:>14} {peer:>23}  {peaks[name]['value']:7.1f} MiB")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table: a line for every case, times over the floor's, peak memory in MiB."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = [name for name in (*RANKED, "observed") if any(row["contender"] == name for row in rows)]
    found = {(row["case"], row["contender"], row["metric"]): row for row in rows}
    lines = ["| case | floor ms | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for case in cases:
        floor = found.get((case, "floor", "step_ms"))
        cells = [case, f"{floor['value']:.0f}" if floor else ""]
        for name in names:
            step, peak = found.get((case, name, "step_ms")), found.get((case, name, "peak_mib"))
            if step is None:
                cells.append("")
            elif peak is None:
                cells.append(step["why"].split(":")[0])
            else:
                cells.append(f"{step['ratio_to_floor'] or 0:.2f} ({peak['value']:.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
