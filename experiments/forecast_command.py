"""Forecast: `counterpoise forecast TRACE`, how well the load could have been foreseen along a trace.

    counterpoise forecast TRACE --html report.html

Loads a trace, lets every forecaster run along it without look-ahead (`balancer/backtest.py`), prints tables
and a verdict, and writes plots, JSON and one page. Horizons are training steps, errors are total variation.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from balancer.backtest import Backtest, backtest
from balancer.backtest_regimes import SCORED_REGIMES
from balancer.files import replace_whole
from balancer.forecast import FORECASTERS
from balancer.trace import Trace, load_trace
from experiments import forecast_page as report
from experiments.forecast_choices import (
    FIRST,
    GRID,
    LAST,
    chosen_forecasters,
    chosen_horizons,
    chosen_layer,
    chosen_outputs,
    chosen_slices,
    make_forecaster,
)
from experiments.forecast_page import Table
from experiments.forecast_plots import PLOTS, Study

# what is asked for is part of this command, wherever it stands
__all__ = ["GRID", "chosen_forecasters", "chosen_horizons", "main", "make_forecaster", "parser"]
__all__ += ["make_tables", "trace_facts", "verdicts"]
# forecasters that weigh others: never "the best single one"
COMBINATIONS = ("regime",)
# forecasters whose constants never change: the best of them in hindsight is what tuning by hand would reach
FIXED = ("persistence", "window", "ema", "holt", "decay")
# the fewest seconds between two lines of progress, where there is no terminal for a bar
_LINE_S = 10.0


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise forecast`."""
    top = argparse.ArgumentParser(
        prog="counterpoise forecast",
        description="Run forecasters along a recorded load trace without look-ahead and score them.",
        allow_abbrev=False,
    )
    add = top.add_argument
    add("trace", metavar="TRACE", help="load trace: folder, run directory or file")
    add("--format", metavar="F", help="format of the trace, where its name does not tell")
    add(
        "--horizons",
        metavar="STEPS",
        help="training steps ahead, say 10,100,500 (default: 1, 10, 50 samples)",
    )
    add(
        "--forecasters",
        metavar="NAMES",
        help=f"some of {', '.join(sorted(FORECASTERS))}, also with constants: ema:gain=0.3,regime "
        "(default: all, and more gains)",
    )
    add("--stats", action="store_true", help="the statistical comparators too: they take minutes")
    add("--ranks", metavar="P", type=int, help="score the loads of P ranks with experts at home too")
    add("--layer", metavar="L", type=int, help="layer to draw (default: one of median change)")
    add("--first", metavar="N", type=int, help=f"samples of the early part; {FIRST}")
    add("--last", metavar="N", type=int, help=f"samples of the late part; {LAST}")
    add(
        "--by",
        choices=("origin", "target"),
        default="origin",
        help="whether the parts count the samples forecast from or those forecast; origin",
    )
    add("--json", metavar="OUT", help="file for the rows")
    add("--html", metavar="OUT", help="file for one self-contained page")
    add("--plots", metavar="DIR", help="folder for the plots, as PNG")
    add("--force", action="store_true", help="overwrite files that are there")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the backtest, print its tables, write what was asked for."""
    args = parser().parse_args(argv)
    outputs = chosen_outputs(args)
    trace = load_trace(args.trace, **({"format": args.format} if args.format else {}))
    horizons = chosen_horizons(args.horizons, trace)
    forecasters = chosen_forecasters(args.forecasters, args.stats)
    slices = chosen_slices(args, trace)
    layer = chosen_layer(args.layer, trace)
    kept = next((name for name in COMBINATIONS if name in forecasters), next(iter(forecasters)))
    with _Bar(len(trace.steps_W), len(forecasters)) as bar:
        found = backtest(
            trace, forecasters, horizons, num_ranks=args.ranks, keep=[(kept, layer)], progress=bar.show
        )
    tables = make_tables(found, slices, args.by)
    facts = trace_facts(trace, args.trace)
    shown = _shown(tables[0])
    said = verdicts(found, tables[0])
    _print(facts, tables, shown, said, found, args.ranks is not None)
    for path, data in _contents(args, trace, found, tables, facts, shown, said, outputs):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, [data])
        print(f"wrote {path} ({len(data) / 2**10:.0f} KiB)")
    return 0


# ---- what is found -----------------------------------------------------------------------------------------


def make_tables(found: Backtest, slices: Sequence[Mapping[str, int]], by: str) -> list[Table]:
    """The tables: over all, then of each regime, then of each slice."""
    tables = [Table(slice="all", regime="all", rows=found.table(combinations=COMBINATIONS))]
    for regime in SCORED_REGIMES:
        rows = found.table(regime=regime, combinations=COMBINATIONS)
        tables.append(Table(slice="all", regime=regime, rows=rows))
    for part in slices:
        ((kind, number),) = part.items()
        label = f"{kind} {number}" + (" targets" if by == "target" else "")
        rows = found.table(first=part.get("first"), last=part.get("last"), by=by, combinations=COMBINATIONS)
        tables.append(Table(slice=label, regime="all", rows=rows))
    return tables


def verdicts(found: Backtest, whole: Table) -> list[str]:
    """Against the best single forecaster, and against the best of those whose constants never change."""
    said = report.verdicts(whole.rows, COMBINATIONS)
    fixed = [name for name in found.names if name.split(":")[0] in FIXED]
    if any(name in found.names for name in COMBINATIONS) and fixed:
        others = tuple(name for name in found.names if name not in fixed)
        said += report.verdicts(found.table(combinations=others), COMBINATIONS, "of constant gain")
    return list(dict.fromkeys(said))


def trace_facts(trace: Trace, path: str) -> dict[str, Any]:
    """What the trace is, for the report's head and its JSON."""
    counts, steps = trace.tokens_per_expert_WLE, trace.steps_W
    gaps = np.diff(steps)
    copies_WL = counts.sum(axis=-1)
    return {
        "path": path,
        "num_samples": counts.shape[0],
        "num_layers": counts.shape[1],
        "num_experts": counts.shape[2],
        "first_step": int(steps[0]),
        "last_step": int(steps[-1]),
        "interval_steps": int(np.median(gaps)),
        "regular": bool((gaps == gaps[0]).all()),
        "copies_least": int(copies_WL.min()),
        "copies_most": int(copies_WL.max()),
        "source": str(trace.meta.get("source", "")),
    }


def _in_words(facts: Mapping[str, Any]) -> dict[str, str]:
    least, most = facts["copies_least"], facts["copies_most"]
    every = f"every {facts['interval_steps']}" + ("" if facts["regular"] else " in the median, with gaps")
    words = {
        "trace": facts["path"],
        "size": f"{facts['num_samples']} samples of {facts['num_layers']} layers x "
        f"{facts['num_experts']} experts",
        "steps": f"{facts['first_step']} to {facts['last_step']}, {every}",
        "copies of a layer": f"{most:,}" if least == most else f"{least:,} to {most:,}",
    }
    return words | ({"source": facts["source"]} if facts["source"] else {})


def _shown(table: Table) -> tuple[str, ...]:
    """The few forecasters worth a line: combinations, the best single of each horizon, persistence."""
    names = {row.forecaster for row in table.rows}
    best = [row.best_single for row in table.rows if row.best_single]
    return tuple(n for n in dict.fromkeys([*COMBINATIONS, *best, "persistence"]) if n in names)


def _print(
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    shown: Sequence[str],
    said: Sequence[str],
    found: Backtest,
    ranks: bool,
) -> None:
    print("\n".join(f"{name + ':':<19}{value}" for name, value in _in_words(facts).items()))
    print("\n" + textwrap.fill(report.NOTES, 108) + "\n")
    print(report.text_table(tables[0], report.ordered(tables[0].rows), ranks=ranks))
    normal = [name for name, kind in zip(found.names, found.intervals) if kind == "normal"]
    if normal:
        whose = "all" if len(normal) == len(found.names) else ", ".join(normal)
        print(textwrap.fill(f"no band of their own, mean +- z std of the normal law stands in: {whose}", 108))
    for table in tables[1:]:
        if any(row.num_scores for row in table.rows):
            print("\n" + report.text_table(table, shown, ranks=ranks))
        else:
            print(f"\n{table.title.split(':')[0]}: none")
    print("\n" + "\n".join(said))


def _contents(
    args: argparse.Namespace,
    trace: Trace,
    found: Backtest,
    tables: list[Table],
    facts: Mapping[str, Any],
    shown: tuple[str, ...],
    said: Sequence[str],
    outputs: Mapping[str, Path],
) -> list[tuple[Path, bytes]]:
    """The files with their contents, all made before the first is written."""
    level = found.levels[found.names.index(found.kept[0].forecaster)]
    study = Study(trace=trace, found=found, rows=tables[0].rows, shown=shown, target=level)
    wanted = [name for name in PLOTS if name in outputs or "html" in outputs]
    pictures = {name: PLOTS[name][0](study) for name in wanted}
    contents = dict(pictures)
    if "json" in outputs:
        kinds = dict(zip(found.names, found.intervals))
        whole = {"trace": facts, "horizons": found.horizons_H.tolist(), "combinations": COMBINATIONS}
        whole["rows"] = report.json_rows(tables, kinds)
        contents["json"] = (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()
    if "html" in outputs:
        named = _in_words(facts) | {
            "horizons": f"{', '.join(map(str, found.horizons_H))} training steps",
            "drawn": f"layer {study.kept.layer}, forecaster {study.kept.forecaster}",
        }
        title = f"Forecasts of expert load: {Path(args.trace).name}"
        text = report.html_page(
            title, said, named, tables, pictures, COMBINATIONS, ranks=args.ranks is not None
        )
        contents["html"] = text.encode()
    return [(path, contents[kind]) for kind, path in outputs.items()]


class _Bar:
    """Progress on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, forecasters: int) -> None:
        self._bar: Any = None
        self._next = time.monotonic() + _LINE_S
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total, unit="sample", desc=f"{forecasters} forecasters", dynamic_ncols=True
            )

    def show(self, done: int, total: int) -> None:
        """So many samples are done."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_S
            print(f"forecast: {done} of {total} samples", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
