"""`counterpoise trace synth`: writes a synthetic load trace, so that there is something to look at.

    counterpoise trace synth --list                                the kinds, a line each
    counterpoise trace synth rotation loads.npz --experts 32 --set period=60
    counterpoise trace synth collapse loads                        a folder, as training writes it

OUT is written aside and renamed when it is whole; what is there already is left alone.
"""

import argparse
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from balancer.metrics import normalized_entropy
from balancer.synth import collapse_trace
from balancer.synth_kinds import KINDS, synth_trace
from balancer.trace import Trace, TraceWriter, save_npz
from balancer.trace_folder import STEP_LIMIT

COLLAPSE = "collapse"
COLLAPSE_HELP = "a run whose routing collapses within 3 samples, partly recovers, and slowly relapses"
# endings that somebody may expect to decide the format
OTHER_FORMATS = (".csv", ".json", ".jsonl", ".pt", ".txt", ".npy", ".gz", ".zip")
# A trace is made in memory, some 32 bytes for each count: 2^26 of them (500 samples of 60 layers of 2048
# experts) take 2 GiB.
MAX_COUNTS = 2**26
# shares times copies are float64: up to here whole numbers are exact
MAX_COPIES = 2**53
SIZES = {
    "samples": ("num_samples", "samples in time (default: 500; collapse: 501)"),
    "layers": ("num_layers", "MoE layers (default: 4; collapse: 24)"),
    "experts": ("num_experts", "experts of a layer, more than top-k (default: 16; collapse: 32)"),
    "copies": ("copies", "routed copies of a layer and sample (default: 65536; collapse: 262144)"),
    "top-k": ("top_k", "experts of a token; no expert gets more than copies / top-k (default: 2)"),
    "interval": ("interval_steps", "training steps between samples (default: 10; not for collapse)"),
    "seed": ("seed", "of the random generator; one seed, one trace (default: 0)"),
}


def main(argv: Sequence[str]) -> int:
    """`counterpoise trace synth`. Raises ValueError for a user's mistake; then nothing is written."""
    made = parser()
    args = made.parse_args(argv)
    if args.list:
        print(kinds_text())
        return 0
    if args.kind is None or args.out is None:
        made.error("give KIND and OUT, or --list to see the kinds")
    check_out(args.out)
    trace = make_trace(args.kind, _sizes(args), args.set)
    write_trace(args.out, trace)
    _tell(args.out, args.kind, trace)
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise trace synth`; its help lists every kind with its options."""
    made = argparse.ArgumentParser(
        prog="counterpoise trace synth",
        description="Write a seeded load trace with a known property: counts [samples, layers, experts].",
        epilog=kinds_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("kind", metavar="KIND", nargs="?", help="one of the kinds below")
    made.add_argument("out", metavar="OUT", nargs="?", help="name.npz, or a folder to make")
    made.add_argument("--list", action="store_true", help="show the kinds, and end")
    for flag, (name, text) in SIZES.items():
        made.add_argument(f"--{flag}", metavar="N", dest=name, type=int, help=text)
    made.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="option of the kind, or dispersion=PHI for counts of PHI times multinomial variance; repeatable",
    )
    return made


def kinds_text() -> str:
    """Every kind with one line of help and its options with their defaults."""
    lines = ["kinds, with their options (--set) and defaults; at=0 is a sample that the kind chooses:"]
    for name, kind in KINDS.items():
        options = ", ".join(f"{key}={value}" for key, value in kind.options.items())
        lines += [f"  {name:16s} {kind.help}", f"  {'':16s} ({options})"]
    return "\n".join([*lines, f"  {COLLAPSE:16s} {COLLAPSE_HELP}", f"  {'':16s} (no options)"])


def make_trace(kind: str, sizes: dict[str, int], settings: Sequence[str]) -> Trace:
    """Make the trace of a kind. sizes: arguments of the maker that were given. settings: OPTION=VALUE."""
    options = parse_settings(settings)
    if kind == COLLAPSE:
        refused = [*options, *(name for name in sizes if name == "interval_steps")]
        if refused:
            raise ValueError(
                f"kind 'collapse' has no option {refused[0]!r}; its sizes and its seed can be set"
            )
        _check_sizes(collapse_trace, sizes)
        return collapse_trace(**sizes)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join([*KINDS, COLLAPSE])}")
    _check_sizes(synth_trace, sizes)
    options_known: dict[str, Any] = {**sizes, **options}
    return synth_trace(kind, **options_known)


def _check_sizes(maker: Callable[..., Trace], sizes: dict[str, int]) -> None:
    """Raise ValueError for a trace that would not fit in memory, or whose numbers would not be exact."""
    usual: dict[str, Any] = {name: one.default for name, one in signature(maker).parameters.items()}
    whole: dict[str, int] = {name: {**usual, **sizes}.get(name, 1) for name, _ in SIZES.values()}
    if whole["copies"] > MAX_COPIES:
        raise ValueError(f"--copies {whole['copies']} must be at most 2^53 = {MAX_COPIES}")
    shape = [whole[name] for name in ("num_samples", "num_layers", "num_experts")]
    if min(shape) > 0 and math.prod(shape) > MAX_COUNTS:
        raise ValueError(
            f"--samples {shape[0]} x --layers {shape[1]} x --experts {shape[2]} are {math.prod(shape)} "
            f"counts, at most {MAX_COUNTS} are made; use fewer of one of them"
        )
    if whole["num_samples"] * whole["interval_steps"] >= STEP_LIMIT:
        raise ValueError(
            f"--interval {whole['interval_steps']} x --samples {shape[0]} must be below 2^62, the last step; "
            "use a shorter interval"
        )


def parse_settings(settings: Sequence[str]) -> dict[str, float]:
    """Parse OPTION=VALUE texts. Raises ValueError for another form, a value that is no number, a repeat."""
    result: dict[str, float] = {}
    for text in settings:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise ValueError(f"--set {text!r} must have the form OPTION=VALUE, like period=60")
        if name in result or name in {maker_name for maker_name, _ in SIZES.values()}:
            raise ValueError(f"--set {name} is given twice, or has a flag of its own (see --help)")
        try:
            result[name] = float(value)
        except ValueError:
            raise ValueError(f"--set {name}={value!r} is no number") from None
    return result


def check_out(out: str) -> None:
    """Raise ValueError where OUT is taken, or its ending belongs to a format that is not written here."""
    place = Path(out)
    if place.exists() or place.is_symlink():
        raise ValueError(f"{out} exists already; choose another name, or move it away")
    if place.suffix.lower() in OTHER_FORMATS:
        raise ValueError(
            f"{out}: synth writes name.npz or a folder; make that, then: counterpoise trace convert IN {out}"
        )


def write_trace(out: str, trace: Trace) -> None:
    """Write a trace aside and rename it. out: name.npz, or the folder to make."""
    place = Path(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{place.name}.", suffix=".partial", dir=place.parent) as aside:
        partial = Path(aside) / place.name
        if place.suffix == ".npz":
            save_npz(partial, trace)
        else:
            _write_folder(partial, trace)
        partial.rename(place)


def _write_folder(folder: Path, trace: Trace) -> None:
    counts_WLE = trace.tokens_per_expert_WLE
    with TraceWriter(folder, counts_WLE.shape[1], counts_WLE.shape[2], trace.meta) as writer:
        for step, counts_LE in zip(trace.steps_W, counts_WLE):
            writer.append(int(step), counts_LE)


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that were given; the others keep the defaults of the trace's maker."""
    given = {name: getattr(args, name) for name, _ in SIZES.values()}
    sizes = {name: value for name, value in given.items() if value is not None}
    if sizes.get("seed", 0) < 0:
        raise ValueError(f"--seed {sizes['seed']} must be 0 or more")
    return sizes


def _tell(out: str, kind: str, trace: Trace) -> None:
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    steps_W, meta = trace.steps_W, trace.meta
    options = "".join(f", {name}={value}" for name, value in meta.get("options", {}).items())
    print(f"wrote {out}: {kind} (seed {meta['seed']}{options})")
    print(f"  {COLLAPSE_HELP if kind == COLLAPSE else KINDS[kind].help}")
    print(
        f"  {num_samples} samples, steps {steps_W[0]} to {steps_W[-1]}; {num_layers} layers x {num_experts} "
        f"experts; {meta['copies_per_step']:,} copies a layer and sample, top-{meta['top_k']}"
    )
    samples = [0, num_samples // 2, num_samples - 1]
    first, middle, last = normalized_entropy(trace.tokens_per_expert_WLE[samples]).mean(axis=-1)
    print(f"  normalised entropy, 1 is even: {first:.3f} at first, {middle:.3f} half-way, {last:.3f} at last")
    print(f"look at it with: counterpoise trace info {shlex.quote(out)}")
    print(f"forecast it with: counterpoise forecast {shlex.quote(out)}")
