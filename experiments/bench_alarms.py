"""Bench alarms: does the collapse monitor warn in time, and of nothing else?

    counterpoise bench alarms --part false|delay|trace|speed --json OUT --plots FOLDER

    false   alarms in 6e6 layer-steps of over-dispersed, autocorrelated load with changes of domain
    delay   lead before a tenth of the experts is dead, in induced collapses of seven causes; delay on ramps;
            thresholds swept for delay against false alarms
    trace   first alarms on a recorded load (needs --trace)
    speed   time of an update

What the loads are and what counts as dead stands in bench_alarms_loads.py and bench_alarms_closed.py; it was
written before the test seeds were looked at. Rows of the file: case, contender, metric, value, and facts.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from balancer.trace import load_trace
from experiments.bench_alarms_parts import (
    Found,
    Options,
    Row,
    delay_part,
    false_part,
    speed_part,
    trace_part,
)
from experiments.bench_alarms_plots import plots_of
from experiments.bench_layer import where

PARTS: Mapping[str, Callable[[Options], Found]] = MappingProxyType(
    {"false": false_part, "delay": delay_part, "trace": trace_part, "speed": speed_part}
)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench alarms`."""
    top = argparse.ArgumentParser(prog="counterpoise bench alarms", allow_abbrev=False)
    top.add_argument("--part", choices=list(PARTS), action="append", help="to run; all by default")
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--plots", metavar="FOLDER", help="folder for the plots (PNG)")
    top.add_argument("--trace", metavar="TRACE", help="recorded load, for the part trace")
    top.add_argument("--top-k", metavar="K", type=int, default=2, help="experts of a token in it; 2")
    top.add_argument("--quick", action="store_true", help="smaller, seconds in all: for a look, not to quote")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the parts, print their figures, write the files."""
    args = parser().parse_args(argv)
    chosen = args.part or list(PARTS)
    if args.part and "trace" in args.part and not args.trace:
        raise ValueError("--part trace needs a recorded load; give --trace FILE")
    if args.json and not Path(args.json).parent.is_dir():
        raise ValueError(f"{args.json}: the folder {Path(args.json).parent} does not exist; make it first")
    trace = load_trace(args.trace) if args.trace else None
    options = Options(quick=args.quick, trace=trace, top_k=args.top_k)
    rows: list[Row] = []
    for name in dict.fromkeys(chosen):
        print(f"\n{name}: {(PARTS[name].__doc__ or '').strip().rstrip('.')}", flush=True)
        begun = time.perf_counter()
        found = PARTS[name](options)
        rows += [{"part": name, **row} for row in found.rows]
        if args.plots:
            Path(args.plots).mkdir(parents=True, exist_ok=True)
            for plot, data in plots_of(name, found).items():
                (Path(args.plots) / f"alarms_{plot}.png").write_bytes(data)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    if args.json:
        facts: dict[str, Any] = {**where(), "parts": chosen, "quick": args.quick, "rows": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0
