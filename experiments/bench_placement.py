"""Bench placement: how good, how robust, how fast and how quiet placements are, beside others', in one run.

    counterpoise bench placement --json OUT --plots DIR --trace TRACE

Parts, each of contenders on the same inputs, with what is aimed at beside each figure:

    gap      even shares: how far above the bound, random heavy loads       bench_placement_gap.py
    robust   loads that are off from the planned one, exact split           bench_placement_robust.py
    time     of plans, and how it grows                                     bench_placement_time.py
    trace    policies along a recorded load (needs --trace)                 bench_placement_trace.py
    regret   what a forecaster is worth to the planner                      bench_placement_regret.py
    quiet    a load that stays as it is moves nothing                       bench_placement_quiet.py

Rows of the file: case, contender, metric, value, ratio_to_best_peer (another system's best figure),
ratio_to_floor (what nobody does better than), and target and met where something is aimed at. Of
"balancedness" more is better, of all else less.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from balancer.trace import load_trace
from experiments import bench_placement_gap as gap
from experiments import bench_placement_quiet as quiet
from experiments import bench_placement_regret as regret
from experiments import bench_placement_robust as robust
from experiments import bench_placement_time as timing
from experiments import bench_placement_trace as trace
from experiments.bench_layer import where
from experiments.bench_placement_parts import Found, Options, Row, short, with_peers

PARTS: Mapping[str, Callable[[Options], Found]] = MappingProxyType(
    {
        "gap": gap.run,
        "robust": robust.run,
        "time": timing.run,
        "trace": trace.run,
        "regret": regret.run,
        "quiet": quiet.run,
    }
)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench placement`."""
    top = argparse.ArgumentParser(prog="counterpoise bench placement", allow_abbrev=False)
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--plots", metavar="DIR", help="folder for the plots (PNG)")
    top.add_argument("--trace", metavar="TRACE", help="recorded load, for the parts trace and regret")
    top.add_argument(
        "--parts",
        metavar="NAMES",
        help=f"of {', '.join(PARTS)}, with commas; all that can run",
    )
    top.add_argument(
        "--eplb", metavar="FILE", default="", help="eplb.py of the public EPLB, to be timed (needs torch)"
    )
    top.add_argument("--quick", action="store_true", help="smaller, seconds in all: for a look, not to quote")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the parts, print their figures and those that miss their target, write the files."""
    args = parser().parse_args(argv)
    chosen = chosen_parts(args.parts, args.trace)
    for file in (args.json, args.eplb):
        if file and not Path(file).parent.is_dir():
            raise ValueError(f"{file}: the folder {Path(file).parent} does not exist; make it first")
    if args.eplb and not Path(args.eplb).is_file():
        raise ValueError(f"--eplb {args.eplb}: no file there; give the eplb.py of a copy of EPLB")
    options = Options(quick=args.quick, trace=load_trace(args.trace) if args.trace else None, eplb=args.eplb)
    rows: list[Row] = []
    for name in chosen:
        rows += _run_part(name, options, args.plots)
    _verdict(rows)
    if args.json:
        facts: dict[str, Any] = {**where(), "parts": chosen, "quick": args.quick, "rows": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def chosen_parts(names: str | None, trace_file: str | None) -> list[str]:
    """The parts to run, in order; ValueError for one that is unknown or lacks its trace."""
    if names is None:
        if not trace_file:
            print("part trace is left out, and regret has synthetic loads only: no --trace was given")
        return [name for name in PARTS if name != "trace" or trace_file]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in PARTS:
            raise ValueError(f"--parts {name!r} is no part; use some of {', '.join(PARTS)}")
    if not chosen:
        raise ValueError(f"--parts {names!r} names nothing; use some of {', '.join(PARTS)}")
    if "trace" in chosen and not trace_file:
        raise ValueError("--parts trace needs a recorded load; give --trace FILE")
    return [name for name in PARTS if name in chosen]


def _run_part(name: str, options: Options, folder: str | None) -> list[Row]:
    """One part: its rows; its plots are written."""
    print(f"\n{name}: {(PARTS[name].__doc__ or '').strip().rstrip('.')}", flush=True)
    begun = time.perf_counter()
    found = PARTS[name](options)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for plot, data in found.plots.items():
            (Path(folder) / f"placement_{plot}.png").write_bytes(data)
    print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return [{"part": name, **row} for row in with_peers(found.rows)]


def _verdict(rows: list[Row]) -> None:
    """How many targets are met, and each that is not."""
    aimed = [row for row in rows if "target" in row]
    missed = [row for row in aimed if not row["met"]]
    print(f"\n{len(aimed) - len(missed)} of {len(aimed)} targets are met")
    for row in missed:
        print(
            f"  missed: {row['part']} {row['case']}, {row['contender']}: {row['metric']} "
            f"{short(row['value'])}, target {row['target']:g}"
        )
