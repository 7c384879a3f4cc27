"""Bench control: bias laws on the router plant: limits, basins, floors, responses and what they cost.

    counterpoise bench control --part PART --json OUT --plots DIR

Parts:

    gain-delay  steady violation by gain and delay, the limits of theory     bench_control_gain.py
    basin       how often a router collapses, by its reinforcement           bench_control_basin.py
    floor       violation less its floor, by batch size                      bench_control_floor.py
    suite       does one setting hold everywhere                             bench_control_suite.py
    response    after a switch of the data                                   bench_control_response.py
    speed       time of an update                                            bench_control_response.py

Rows of the file: case, contender, metric, value, ratio_to_best_peer (the best rival's), ratio_to_floor,
the bootstrap interval over the runs (lowest, highest), and target and met where something is aimed at. Of all
figures less is better.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments import bench_control_basin as basin
from experiments import bench_control_floor as floor
from experiments import bench_control_gain as gain
from experiments import bench_control_response as response
from experiments import bench_control_suite as suite
from experiments.bench_control_parts import with_peers
from experiments.bench_layer import where
from experiments.bench_placement_parts import Found, Row

PARTS: Mapping[str, Callable[[bool], Found]] = MappingProxyType(
    {
        "gain-delay": gain.run,
        "basin": basin.run,
        "floor": floor.run,
        "suite": suite.run,
        "response": response.run,
        "speed": response.run_speed,
    }
)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench control`."""
    top = argparse.ArgumentParser(prog="counterpoise bench control", allow_abbrev=False)
    top.add_argument("--part", choices=list(PARTS), action="append", help="again for more; all without it")
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--plots", metavar="DIR", help="folder for the plots (PNG)")
    top.add_argument("--quick", action="store_true", help="smaller, seconds a part: for a look, not to quote")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the parts, print their figures and those that miss their target, write the files."""
    args = parser().parse_args(argv)
    if args.json and not Path(args.json).parent.is_dir():
        raise ValueError(f"{args.json}: the folder {Path(args.json).parent} does not exist; make it first")
    chosen = [name for name in PARTS if args.part is None or name in args.part]
    rows: list[Row] = []
    for name in chosen:
        print(f"\n{name}", flush=True)
        begun = time.perf_counter()
        found = PARTS[name](args.quick)
        rows += [{"part": name, **row} for row in with_peers(found.rows)]
        _write_plots(found, args.plots)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    _verdict(rows)
    if args.json:
        facts: dict[str, Any] = {**where(), "parts": chosen, "quick": args.quick, "rows": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _write_plots(found: Found, folder: str | None) -> None:
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for plot, data in found.plots.items():
            (Path(folder) / f"control_{plot}.png").write_bytes(data)


def _verdict(rows: list[Row]) -> None:
    """How many targets are met, and each that is not."""
    aimed = [row for row in rows if "target" in row]
    missed = [row for row in aimed if not row["met"]]
    print(f"\n{len(aimed) - len(missed)} of {len(aimed)} targets are met")
    for row in missed:
        print(
            f"  missed: {row['part']} {row['case']}, {row['contender']}: {row['metric']} "
            f"{row['value']:.5g}, target {row['target']:g}"
        )
