"""`counterpoise trace`: look at a load trace, turn it into another form, or make a synthetic one.

counterpoise trace info runs/tiny-1                     what it is, how even, what changed and when
counterpoise trace info dump.pt --plot load.png         recorded by another tool (formats: see --help)
counterpoise trace convert log.txt loads/ --format exp-counts
counterpoise trace synth ...                            see counterpoise trace synth --help
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from balancer.trace import Trace, TraceWriter, load_trace, save_npz
from balancer.trace_formats import FORMATS, find_format
from experiments.trace_info import Curves, Info, analyse, largest_ranks
from experiments.trace_words import text

TARGETS = ("folder", "npz", "csv", "json")
# samples from which the work is long enough for a bar
_BAR_VALUES = 2**23


def main(argv: Sequence[str]) -> int:
    """`counterpoise trace info | convert | synth`."""
    if list(argv[:1]) == ["synth"]:
        from experiments.trace_synth import main as synth

        return synth(argv[1:]) or 0
    args = parser().parse_args(argv)
    return {"info": _info, "convert": _convert}[args.action](args)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise trace`."""
    top = argparse.ArgumentParser(
        prog="counterpoise trace",
        description="Load traces: how many copies each expert of each layer got, over training steps. "
        "Nothing of a file is executed.",
        allow_abbrev=False,
    )
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    info = actions.add_parser("info", help="what a trace holds, how even the load is, what changed when")
    convert = actions.add_parser("convert", help="write a trace in another form: folder, npz, csv, json")
    actions.add_parser("synth", help="make a synthetic trace", add_help=False)
    for made in (info, convert):
        made.add_argument("path", metavar="IN", help="a run, a trace folder, or a file of one of the formats")
        made.add_argument(
            "--format",
            metavar="F",
            choices=FORMATS,
            help=f"its format, told by itself where it can: {', '.join(FORMATS)}",
        )
        made.add_argument(
            "--num-experts", metavar="E", type=int, help="experts of a layer, for router traces"
        )
        made.add_argument(
            "--assume-map-constant",
            action="store_true",
            help="SGLang's physical counts: no rebalance happened, so the last map holds for all",
        )
    info.add_argument(
        "--ranks", metavar="P", type=int, help="ranks to spread the experts over (default: at most 8)"
    )
    info.add_argument("--json", metavar="FILE", help="write the figures there too")
    info.add_argument("--plot", metavar="FILE.png", help="draw the load over time there")
    convert.add_argument("out", metavar="OUT", help="new file or folder")
    convert.add_argument(
        "--to", choices=TARGETS, help="form to write (default: by the ending of OUT; a folder without)"
    )
    return top


def _info(args: argparse.Namespace) -> int:
    for name in ("json", "plot"):
        if getattr(args, name) is not None and Path(getattr(args, name)).exists():
            raise ValueError(f"--{name} {getattr(args, name)}: there already; name another file")
    if args.plot is not None and Path(args.plot).suffix.lower() != ".png":
        raise ValueError(f"--plot {args.plot}: the name of a picture must end in .png")
    trace, form = _load(args)
    if args.plot is not None and not trace.steps_W.size:
        raise ValueError(f"--plot {args.plot}: the trace holds no sample to draw yet; leave --plot out")
    ranks = _ranks(args.ranks, trace.tokens_per_expert_WLE.shape[2])
    with _bar(trace, "figures") as bar:
        curves = Curves(trace, ranks, bar)
    info = analyse(trace, ranks, curves)
    print("\n".join(text(info, args.path, form)))
    _write_figures(args, trace, curves, info)
    return 0


def _write_figures(args: argparse.Namespace, trace: Trace, curves: Curves, info: Info) -> None:
    if args.json is not None:
        record = json.dumps(info.record(), indent=1, allow_nan=False)
        Path(args.json).write_text(record + "\n", encoding="ascii")
        print(f"wrote {args.json}")
    if args.plot is not None:
        from experiments.trace_plot import plot

        plot(Path(args.plot), trace, curves, info.ranks, f"load trace {args.path}")
        print(f"wrote {args.plot}")


def _ranks(given: int | None, num_experts: int) -> int:
    if given is None:
        return largest_ranks(num_experts)
    if given < 1 or num_experts % given:
        fits = [str(p) for p in range(1, num_experts + 1) if num_experts % p == 0]
        raise ValueError(
            f"--ranks {given} does not divide the {num_experts} experts; use {', '.join(fits[:12])}"
        )
    return given


def _load(args: argparse.Namespace) -> tuple[Trace, str]:
    """Load a trace and say its form; warnings become notes on stderr."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trace = load_trace(
            args.path,
            format=args.format,
            num_experts=args.num_experts,
            assume_map_constant=args.assume_map_constant,
        )
        form = find_format(Path(args.path), args.format)[1]
    for warning in told:
        print(f"note: {warning.message}", file=sys.stderr)
    return trace, form


# ---- convert --------------------------------------------------------------------------------------------


def _convert(args: argparse.Namespace) -> int:
    out = Path(args.out)
    target = args.to or {".npz": "npz", ".csv": "csv", ".json": "json", "": "folder"}.get(out.suffix.lower())
    if target is None:
        raise ValueError(
            f"{out}: the ending {out.suffix} names no form; say it with --to {' | '.join(TARGETS)}"
        )
    if target == "npz" and out.suffix != ".npz":
        raise ValueError(f"{out}: the name of an npz trace must end in .npz")
    if out.exists():
        raise ValueError(f"{out}: something is there already; choose another name")
    trace, form = _load(args)
    if not trace.steps_W.size and target in ("csv", "json"):
        raise ValueError(f"{args.path}: no sample to write as {target}")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(out.name + ".partial" + (".npz" if target == "npz" else ""))
    if aside.exists():
        raise ValueError(f"{aside}: left over from a conversion that was stopped; remove it first")
    try:
        _write(aside, target, trace)
        _compare(aside, target, trace)
        aside.rename(out)
    finally:
        _remove(aside)
    lost = (
        "" if target != "csv" or not trace.meta else f"; CSV holds no meta: left out {', '.join(trace.meta)}"
    )
    shape = " x ".join(map(str, trace.tokens_per_expert_WLE.shape))
    print(f"wrote {out} ({target}, from {form}): {shape} counts, read again and the same{lost}")
    return 0


def _write(path: Path, target: str, trace: Trace) -> None:
    if target == "npz":
        save_npz(path, trace)
        return
    counts_WLE, steps_W = trace.tokens_per_expert_WLE, trace.steps_W
    with _bar(trace, target) as bar:
        if target == "folder":
            with TraceWriter(path, counts_WLE.shape[1], counts_WLE.shape[2], trace.meta) as writer:
                for step, counts_LE in zip(steps_W, counts_WLE):
                    writer.append(step, counts_LE)
                    bar(1)
            return
        with open(path, "w", encoding="ascii", newline="\n") as file:
            for line in _csv_lines(trace) if target == "csv" else _json_lines(trace):
                file.write(line)
                bar(1)


def _csv_lines(trace: Trace) -> Iterator[str]:
    """The header with the first sample, then one text a sample."""
    num_experts = trace.tokens_per_expert_WLE.shape[2]
    head = ",".join(["step", "layer", *(f"expert_{e}" for e in range(num_experts))]) + "\n"
    for step, counts_LE in zip(trace.steps_W, trace.tokens_per_expert_WLE):
        yield head + "".join(
            f"{step},{layer},{','.join(map(str, row))}\n" for layer, row in enumerate(counts_LE.tolist())
        )
        head = ""


def _json_lines(trace: Trace) -> Iterator[str]:
    """One JSON object, a line for each sample."""
    steps = json.dumps(trace.steps_W.tolist())
    head = (
        f'{{"meta": {json.dumps(trace.meta, allow_nan=False)},\n"steps": {steps},\n"tokens_per_expert": [\n'
    )
    last = trace.steps_W.shape[0] - 1
    for w, counts_LE in enumerate(trace.tokens_per_expert_WLE):
        yield head + json.dumps(counts_LE.tolist()) + (",\n" if w < last else "\n]}\n")
        head = ""


def _compare(path: Path, target: str, trace: Trace) -> None:
    """Raise ValueError unless what was written reads back the same."""
    again = load_trace(path, format=target)
    same = np.array_equal(again.steps_W, trace.steps_W) and np.array_equal(
        again.tokens_per_expert_WLE, trace.tokens_per_expert_WLE
    )
    kept = target == "csv" or all(again.meta.get(key) == value for key, value in _plain(trace.meta).items())
    if not same or not kept:
        raise ValueError(f"{path}: reads back as another trace; nothing was kept (is the disk failing?)")


def _plain(meta: dict) -> dict:
    """The meta as JSON gives it back: tuples as lists, keys as text."""
    return json.loads(json.dumps(meta))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _bar(trace: Trace, what: str, file: IO[str] | None = None) -> Iterator:
    """Yields what to call with the samples that are done; it shows where the work is long, on a terminal."""
    stream = file or sys.stderr
    if trace.tokens_per_expert_WLE.size < _BAR_VALUES or not stream.isatty():
        yield lambda number: None
        return
    from tqdm import tqdm

    with tqdm(
        total=trace.steps_W.shape[0], desc=what, unit="sample", file=stream, dynamic_ncols=True
    ) as shown:
        yield shown.update


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
