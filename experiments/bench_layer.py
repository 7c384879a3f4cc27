"""Bench layer: this layer beside those that people use today, on the same weights, routing and ranks.

    counterpoise bench layer --json OUT

Contenders and floor: bench_contenders.py. Beside the sizes with balanced routing stand some whose routing is
skewed by force, where replicas and the exact split are to take the time of balanced routing, and one that
deduplication is for. All run in one job, in turn, so that a slow moment of the machine hits everybody; a
round's time is that of its slowest rank, the figure is the median over rounds, a ratio the median of the
rounds' ratios. The memory is what a step adds at its peak to what was there before it.
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

from experiments.bench_table import markdown, print_case

DTYPES = ("float32", "bfloat16")
# experts, experts per token, tokens of a rank
SIZES = [(16, 2, 2048), (64, 6, 1024), (64, 2, 4096), (16, 2, 8192), (128, 8, 2048)]
# other people's; those that are ranked; the rest are this layer or the floor with something added
OTHERS = ("ds_native", "ds_autoep", "hf_eager", "hf_grouped")
RANKED = ("counterpoise", *OTHERS)
RECOMPUTED = ("recompute", "recompute_rows", "floor_recompute")
ON_RANKS = ("floor", "counterpoise", "ds_native", "ds_autoep", "observed", *RECOMPUTED)
ON_ONE = ("floor", "counterpoise", "hf_eager", "hf_grouped")
ON_SKEW = ("balanced", "counterpoise", "replicas", "resident", "ds_native", "ds_autoep")
ON_DEDUP = ("counterpoise", "dedup")
SKEWED_SIZES = [(16, 2, 8192), (64, 6, 1024), (128, 8, 2048)]
# over four ranks most of a token's 8 copies share a rank with another
DEDUP_SIZE = (64, 8, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: E experts, K per token, T tokens of a rank, D width, F hidden width of an expert, P ranks.

    skew: how the experts are chosen, as RouterConfig.forced; "" = all alike, in turn;  dedup: the case of
    deduplication, whose experts are chosen by chance
    """

    experts: int
    top_k: int
    tokens: int
    width: int = 256
    hidden: int = 512
    dtype: str = "float32"
    ranks: int = 2
    skew: str = ""
    dedup: bool = False

    @property
    def name(self) -> str:
        size = f"E{self.experts} K{self.top_k} T{self.tokens} D{self.width} F{self.hidden}"
        kind = " dedup" if self.dedup else f" {self.skew}" if self.skew else ""
        return f"{size} {self.dtype} P{self.ranks}{kind}"

    @property
    def contenders(self) -> tuple[str, ...]:
        """Who runs in this case."""
        if self.ranks == 1:
            return ON_ONE
        return ON_DEDUP if self.dedup else ON_SKEW if self.skew else ON_RANKS


def default_cases(ranks: int = 2) -> list[Case]:
    """The sizes of the table, each in float32 and bfloat16, over `ranks` ranks; two of them on one rank,
    three with skewed routing, one for deduplication over twice the ranks."""
    cases = []
    for dtype in DTYPES:
        for e, k, t in SIZES:
            cases.append(Case(experts=e, top_k=k, tokens=t, dtype=dtype, ranks=ranks))
        cases.append(Case(experts=16, top_k=2, tokens=2048, width=1024, dtype=dtype, ranks=ranks))
    if ranks > 1:
        for dtype in DTYPES:
            for e, k, t in SIZES[:2]:
                cases.append(Case(experts=e, top_k=k, tokens=t, dtype=dtype, ranks=1))
            for e, k, t in SKEWED_SIZES:
                for skew in ("zipf:1.0", "always:0", f"only:0-{e // ranks - 1}"):
                    cases.append(Case(experts=e, top_k=k, tokens=t, dtype=dtype, ranks=ranks, skew=skew))
            e, k, t = DEDUP_SIZE
            dedup = Case(
                experts=e, top_k=k, tokens=t, dtype=dtype, ranks=2 * ranks, skew="uniform", dedup=True
            )
            cases.append(dedup)
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
        names = [name for name in case.contenders if not wanted or name in wanted]
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
    known = sorted({*ON_RANKS, *ON_ONE, *ON_SKEW, *ON_DEDUP})
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
    """Rows of one case: step_ms, peak_mib and sent_mib of every contender, or one with `why` it failed.

    peak_mib: of the rank with the most;  sent_mib: of all ranks together.
    """
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
            nothing = dict.fromkeys(("value", "ratio_to_best_peer", "ratio_to_floor", "ratio_to_balanced"))
            rows.append({**head, "metric": "step_ms", **nothing, "why": outcomes[0][name]["why"]})
            continue
        peers = [peer for peer in ran if peer in RANKED and peer != name]
        step = {"metric": "step_ms", "value": statistics.median(times[name]) * 1e3}
        fastest = min(peers, key=lambda peer: float(np.median(times[peer])), default=None)
        step["ratio_to_best_peer"] = None if fastest is None else _ratio(times[name], times[fastest])
        for base in ("floor", "balanced"):
            step[f"ratio_to_{base}"] = _ratio(times[name], times[base]) if base in times else None
        leanest = min((peaks[peer] for peer in peers), default=None)
        peak = {"metric": "peak_mib", "value": peaks[name], "ratio_to_floor": None, "ratio_to_balanced": None}
        peak["ratio_to_best_peer"] = None if not leanest else peaks[name] / leanest
        sent = {**peak, "metric": "sent_mib", "ratio_to_best_peer": None}
        sent["value"] = sum(outcome[name]["sent_mib"] for outcome in outcomes)
        rows += [{**head, **step}, {**head, **peak}, {**head, **sent}]
        if case.dedup:
            rows.append({**head, **sent, "metric": "formula_mib", "value": formula_bytes(case, name) / 2**20})
    return rows


def formula_bytes(case: Case, name: str) -> float:
    """Expected bytes that all ranks send in a step, experts chosen by chance: rows four times, and counts.

    Deduplicated, a token's row goes once to each of its ranks, and 12 bytes with each copy.
    """
    from moe.dedup_rule import expected_pairs

    element = 2 if case.dtype == "bfloat16" else 4
    away = case.tokens * (case.ranks - 1)  # tokens of all ranks, times the share of rows that leave
    rows, extra = float(case.top_k), 0
    if name == "dedup":
        rows, extra = expected_pairs(case.top_k, case.experts, case.ranks), 12 * case.top_k
    counts = 8 * (case.experts + 2) * (case.ranks - 1) * case.ranks
    return away * (4 * rows * case.width * element + extra) + counts


def _ratio(times: np.ndarray, others: np.ndarray) -> float:
    """Median of the ratios of rounds that both have."""
    both = min(len(times), len(others))
    return float(np.median(times[:both] / others[:both]))
