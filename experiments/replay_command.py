"""Replay: `counterpoise replay TRACE`, what placement policies would have made of a recorded load.

    counterpoise replay TRACE --ranks 8 --html report.html
    counterpoise demo                                          a synthetic trace, all policies, a page

Loads a trace, lets every policy run along it without look-ahead (`replay_run.py`), prints a verdict and a
table, and writes JSON, plots and one page. All that is asked for is checked before any work is done.
"""

import argparse
import difflib
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from balancer.cost import CostModel
from balancer.files import replace_whole
from balancer.machines import MACHINES
from balancer.policies import POLICIES, Policy, Setup, policy
from balancer.synth_kinds import KINDS
from balancer.trace import Trace, load_trace, save_npz
from experiments import replay_page as report
from experiments.replay_plots import PLOTS
from experiments.replay_run import OFFLINE, Replay, figures, replay
from experiments.sizes_arguments import add_sizes, chosen_slots
from experiments.trace_synth import COLLAPSE, make_trace

# the fewest seconds between two lines of progress, where there is no terminal for a bar
_LINE_S = 10.0
# --quick: so many samples from the first on, and so many over the rest
_QUICK_FIRST, _QUICK_REST = 25, 55
# the trace of the demo, and the ranks that it is placed on: seconds on a laptop
_DEMO_SIZES = {"num_samples": 120, "num_layers": 6, "num_experts": 32, "copies": 262144}
_DEMO_ARGUMENTS = ("--ranks", "8", "--spare", "16")


# ---- the two commands --------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Replay a trace, print what was found, write what was asked for."""
    args = parser().parse_args(argv)
    outputs = chosen_outputs(args)
    policies, offline = chosen_policies(args.policy)
    trace = load_trace(args.trace, **({"format": args.format} if args.format else {}))
    trace = quick(trace) if args.quick else trace
    setup = chosen_setup(args, trace)
    _run(args, trace, policies, setup, outputs, offline)
    return 0


def demo_main(argv: Sequence[str]) -> int:
    """Make a synthetic trace, replay it with all policies, write the page."""
    args = demo_parser().parse_args(argv)
    kinds = (*KINDS, COLLAPSE)
    if args.name not in kinds:
        near = difflib.get_close_matches(args.name, kinds, n=1, cutoff=0.3)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"demo {args.name!r} is unknown; {meant}known are {', '.join(kinds)}")
    folder = Path(args.out)
    loads = folder / "loads.npz"
    more = ["--html", str(folder / "replay.html"), *(["--force"] if args.force else [])]
    asked = parser().parse_args([str(loads), *_DEMO_ARGUMENTS, *more])
    outputs = chosen_outputs(asked)
    _check_free(loads, args.force)
    trace = make_trace(args.name, dict(_DEMO_SIZES), [])
    folder.mkdir(parents=True, exist_ok=True)
    loads.unlink(missing_ok=True)  # it is there only where --force was given
    save_npz(loads, trace)
    print(f"wrote {loads}: a synthetic trace of the kind {args.name!r}\n")
    policies, offline = chosen_policies(None)
    _run(asked, trace, policies, chosen_setup(asked, trace), outputs, offline)
    print(
        f"\nthe same again, or with other ranks: counterpoise replay {loads} --ranks 8 --spare 8 --html OUT"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise replay`."""
    top = argparse.ArgumentParser(
        prog="counterpoise replay",
        description="Run placement policies along a recorded load trace without look-ahead and score them.",
        allow_abbrev=False,
    )
    add_sizes(top)
    add = top.add_argument
    add(
        "--nodes",
        metavar="M",
        type=int,
        default=1,
        help="nodes that the ranks are on, for the prices alone; 1",
    )
    names = ", ".join([*POLICIES, OFFLINE])
    add(
        "--policy",
        metavar="NAME",
        nargs="+",
        action="extend",
        help=f"some of {names} (default: all)",
    )
    add(
        "--every",
        metavar="STEPS",
        type=int,
        default=100,
        help="training steps between plans of the policies that plan by the clock; 100",
    )
    add(
        "--homes",
        choices=("fixed", "free"),
        default="fixed",
        help="whether every expert keeps its home, as training needs it; fixed",
    )
    machines = ", ".join(MACHINES)
    add("--cost", metavar="PRESET", default="nvlink", help=f"prices of {machines}; nvlink")
    add("--hidden", metavar="D", type=int, default=2048, help="width of the model, for the prices; 2048")
    add("--ffn", metavar="F", type=int, default=1408, help="hidden width of an expert, for the prices; 1408")
    add("--serving", action="store_true", help="prices of serving: no backward, replicas are not fetched")
    add("--json", metavar="OUT", help="file for the rows")
    add("--html", metavar="OUT", help="file for one self-contained page")
    add("--plots", metavar="DIR", help="folder for the plots, as PNG")
    add("--force", action="store_true", help="overwrite files that are there")
    add("--quick", action="store_true", help=f"at most {_QUICK_FIRST + _QUICK_REST} of the samples")
    return top


def demo_parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise demo`."""
    top = argparse.ArgumentParser(
        prog="counterpoise demo",
        description="Make a synthetic load trace, run all placement policies along it, write a page.",
        allow_abbrev=False,
    )
    kinds = ", ".join([*KINDS, COLLAPSE])
    top.add_argument("name", metavar="NAME", nargs="?", default=COLLAPSE, help=f"one of {kinds}; {COLLAPSE}")
    top.add_argument("--out", metavar="DIR", default="runs/demo", help="folder to write into; runs/demo")
    top.add_argument("--force", action="store_true", help="overwrite what is there")
    return top


# ---- what is asked for -------------------------------------------------------------------------------------


def chosen_policies(names: Sequence[str] | None) -> tuple[list[Policy], bool]:
    """The policies of the names, and whether the offline optimum is wanted; None = all.

    Raises ValueError for an unknown name, with the nearest one, a repeated one, or offline alone.
    """
    if names is None:
        return list(POLICIES.values()), True
    if len(set(names)) < len(names):
        raise ValueError(f"--policy {' '.join(names)}: each name once")
    wanted = [name for name in names if name != OFFLINE]
    for name in wanted:
        if name not in POLICIES and difflib.get_close_matches(name, [*POLICIES, OFFLINE], 1) == [OFFLINE]:
            raise ValueError(f"policy {name!r} is unknown; did you mean {OFFLINE!r}?")
    if not wanted:
        raise ValueError(
            f"--policy {OFFLINE}: it chooses from what other policies placed; name one beside it, say split"
        )
    return [policy(name) for name in wanted], OFFLINE in names


def chosen_setup(args: argparse.Namespace, trace: Trace) -> Setup:
    """Sizes and prices. Raises ValueError for those that do not fit, with the nearest that do."""
    _, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    num_slots = chosen_slots(num_experts, args.ranks, args.spare)
    if args.every < 1:
        raise ValueError(f"--every {args.every} must be 1 step or more")
    return Setup(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=args.ranks,
        num_slots=num_slots,
        num_nodes=args.nodes,
        fixed_homes=args.homes == "fixed",
        every_steps=args.every,
        sample_steps=int(np.median(np.diff(trace.steps_W))) if len(trace.steps_W) > 1 else 1,
        cost=CostModel.of_machine(args.cost, args.hidden, args.ffn, trained=not args.serving),
    )


def chosen_outputs(args: argparse.Namespace) -> dict[str, Path]:
    """The files to write, by what they hold; ValueError for one in the way, before any work is done."""
    outputs = {kind: Path(getattr(args, kind)) for kind in ("json", "html") if getattr(args, kind)}
    if args.plots:
        outputs |= {name: Path(args.plots) / f"{name}.png" for name in PLOTS}
    for path in outputs.values():
        _check_free(path, args.force)
    if len(set(outputs.values())) < len(outputs):
        raise ValueError("--json and --html name the same file; give two names")
    return outputs


def quick(trace: Trace) -> Trace:
    """Fewer samples: the first ones, where loads change fastest, and some spread over the rest."""
    number = len(trace.steps_W)
    if number <= _QUICK_FIRST + _QUICK_REST:
        return trace
    rest = np.linspace(_QUICK_FIRST, number - 1, _QUICK_REST).round().astype(int)
    kept = np.concatenate([np.arange(_QUICK_FIRST), rest])
    counts_WLE = np.ascontiguousarray(trace.tokens_per_expert_WLE[kept])
    return Trace(tokens_per_expert_WLE=counts_WLE, steps_W=trace.steps_W[kept], meta=trace.meta)


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; choose another name, or --force to overwrite it")


# ---- what is found -----------------------------------------------------------------------------------------


def _run(
    args: argparse.Namespace,
    trace: Trace,
    policies: Sequence[Policy],
    setup: Setup,
    outputs: Mapping[str, Path],
    offline: bool,
) -> None:
    """Replay, print, write."""
    named = _in_words(args, trace, setup)
    with _Bar() as bar:
        made = replay(trace, policies, setup, offline=offline, progress=bar.show)
    rows = [figures(made, run) for run in made.runs]
    said = report.verdicts(made, rows)
    print("\n".join(f"{name + ':':<11}{value}" for name, value in named.items()))
    print("\n" + "\n".join(textwrap.fill(line, 108, subsequent_indent="  ") for line in said))
    print("\n" + report.text_table(rows))
    for path, data in _contents(args, made, rows, said, named, outputs):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, [data])
        print(f"wrote {path} ({len(data) / 2**10:.0f} KiB)")


def _in_words(args: argparse.Namespace, trace: Trace, setup: Setup) -> dict[str, str]:
    steps_W, spare = trace.steps_W, setup.num_slots - setup.num_experts
    # without groups that a router is limited to, nothing ties an expert to a node
    nodes = f" on {setup.num_nodes} nodes (which change prices only)" if setup.num_nodes > 1 else ""
    kept = " (--quick: a part of them)" if args.quick else ""
    return {
        "trace": str(args.trace),
        "samples": f"{len(steps_W)} from step {steps_W[0]} to {steps_W[-1]}{kept}; the first is only seen",
        "experts": f"{setup.num_experts} in each of {setup.num_layers} layers, homes {args.homes}",
        "placed on": f"{setup.num_ranks} ranks{nodes}, {setup.num_slots} slots a layer, {spare} spare",
        "prices": f"{args.cost}, {'serving' if args.serving else 'training'}, experts of "
        f"{args.hidden} x {args.ffn}; a sample stands for the steps since the one before it",
    }


def _contents(
    args: argparse.Namespace,
    made: Replay,
    rows: Sequence[Mapping[str, Any]],
    said: Sequence[str],
    named: Mapping[str, str],
    outputs: Mapping[str, Path],
) -> list[tuple[Path, bytes]]:
    """The files with their contents, all made before the first is written."""
    wanted = [name for name in PLOTS if name in outputs or "html" in outputs]
    pictures = {name: PLOTS[name][0](made) for name in wanted}
    contents = dict(pictures)
    if "json" in outputs:
        record = report.json_record(made, rows, named)
        contents["json"] = (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()
    if "html" in outputs:
        title = f"Placements replayed: {Path(args.trace).name}"
        contents["html"] = report.html_page(title, made, said, named, pictures).encode()
    return [(path, contents[kind]) for kind, path in outputs.items()]


class _Bar:
    """Progress on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._next = time.monotonic() + _LINE_S
        if sys.stderr.isatty():
            self._bar = tqdm(total=1, unit="sample", dynamic_ncols=True)

    def show(self, name: str, done: int, total: int) -> None:
        """A policy has done so many of its samples (offline: layers)."""
        if self._bar is not None:
            if self._bar.desc != f"{name}: ":
                self._bar.reset(total)
                self._bar.set_description(name)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_S
            print(f"replay: {name}, {done} of {total}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
