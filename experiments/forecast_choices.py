"""What `counterpoise forecast` is asked for: horizons, forecasters, files, parts of the trace, a layer.

In front of `experiments/forecast_command.py`, which runs it: all is checked before any work is done.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from balancer.backtest_regimes import sample_changes
from balancer.forecast import FORECASTERS, forecaster
from balancer.forecast_record import Forecaster
from balancer.trace import Trace
from experiments.forecast_plots import PLOTS, typical_layer

# beside every forecaster with its own constants: what "in hindsight" chooses from
GRID = ("ema:gain=0.2", "ema:gain=0.3", "ema:gain=0.4", "ema:gain=0.6", "ema:gain=0.7", "ema:gain=0.8")
GRID += ("holt:gain=0.5:trend_gain=0.1:damping=0.8",)
# sampling intervals ahead, where no horizon is given
_DEFAULT_AHEAD = (1, 10, 50)
# samples of the early and the late part
FIRST, LAST = 40, 200
# options of forecasters that are no number: they can be given in Python only
_NO_NUMBERS = ("slow", "gains", "memories", "regressors", "compiled")


def chosen_horizons(text: str | None, trace: Trace) -> tuple[int, ...]:
    """The horizons in training steps: those given, or 1, 10 and 50 samples as far as the trace goes.

    Raises ValueError for what is no list of increasing steps, one below the sampling interval (the median),
    one longer than the trace, or a trace of one sample.
    """
    if len(trace.steps_W) < 2:
        raise ValueError(f"the trace has {len(trace.steps_W)} sample; a forecast is scored from 2 samples on")
    interval, span = int(np.median(np.diff(trace.steps_W))), int(trace.steps_W[-1] - trace.steps_W[0])
    if text is None:
        return tuple(ahead * interval for ahead in _DEFAULT_AHEAD if ahead * interval <= span)
    try:
        horizons = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--horizons {text}: expected training steps, say 10,100,500") from None
    if list(horizons) != sorted(set(horizons)):
        raise ValueError(f"--horizons {text}: must increase, say {','.join(map(str, sorted(set(horizons))))}")
    if horizons[0] < interval:
        raise ValueError(
            f"--horizons {horizons[0]} is below the sampling interval of {interval} steps; "
            f"use {interval} or more"
        )
    if horizons[-1] > span:
        raise ValueError(f"--horizons {horizons[-1]} is beyond the trace, which spans {span} steps")
    return horizons


def chosen_forecasters(text: str | None, stats: bool) -> dict[str, Forecaster]:
    """The forecasters by name: those named, or all; with the statistical ones on demand.

    Raises ValueError for an unknown or repeated name, or where the statistical ones cannot be imported.
    """
    more: dict[str, Forecaster] = {}
    if stats:
        try:
            more = import_module("balancer.forecast_stats").stats_forecasters()
        except ImportError as error:
            raise ValueError(f"--stats: {error}; it needs the package statsmodels") from None
        print("the statistical forecasters fit every series again and again: this takes minutes", flush=True)
    if text is None:
        return {spec: make_forecaster(spec) for spec in (*FORECASTERS, *GRID)} | more
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names):
        raise ValueError(f"--forecasters {text}: each name once")
    unknown = [name for name in names if name.split(":")[0] not in FORECASTERS and name not in more]
    if unknown:
        known = ", ".join([*sorted(FORECASTERS), *more])
        raise ValueError(f"--forecasters: {unknown[0]!r} is unknown; use some of {known}")
    return {name: more[name] if name in more else make_forecaster(name) for name in names}


def make_forecaster(spec: str) -> Forecaster:
    """The forecaster of a name with constants, such as "holt:gain=0.5:damping=0.8".

    Raises ValueError for a constant that is no number, an option that takes none, and as `forecaster` does.
    """
    name, *parts = spec.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key in _NO_NUMBERS:
            raise ValueError(
                f"--forecasters {spec}: {key} is no number and cannot be given here; only numbers can, say "
                "gain=0.3; the others: balancer.forecast.forecaster"
            )
        if key in options:
            raise ValueError(f"--forecasters {spec}: {key} is given twice; give it once")
        try:
            options[key] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ValueError(f"--forecasters {spec}: {part!r} is no constant; write gain=0.3") from None
    return forecaster(name, **options)


def chosen_outputs(args: argparse.Namespace) -> dict[str, Path]:
    """The files to write, by what they hold; ValueError for one in the way, before any work is done."""
    outputs = {kind: Path(getattr(args, kind)) for kind in ("json", "html") if getattr(args, kind)}
    if args.plots:
        outputs |= {name: Path(args.plots) / f"{name}.png" for name in PLOTS}
    for path in outputs.values():
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
        if path.exists() and not args.force:
            raise ValueError(f"{path} is there already; choose another name, or --force to overwrite it")
    if len(set(outputs.values())) < len(outputs):
        raise ValueError("--json and --html name the same file; give two names")
    return outputs


def chosen_slices(args: argparse.Namespace, trace: Trace) -> list[dict[str, int]]:
    """Early and late part: those given, else the usual ones where the trace is longer than they are."""
    number, slices = len(trace.steps_W), []
    for kind, usual in (("first", FIRST), ("last", LAST)):
        given = getattr(args, kind)
        if given is not None and not 1 <= given <= number:
            raise ValueError(f"--{kind} {given} must be 1 to {number}, the samples of the trace")
        if given is not None or number > usual:
            slices.append({kind: usual if given is None else given})
    return slices


def chosen_layer(given: int | None, trace: Trace) -> int:
    """The layer to draw: the one given, or one of median change."""
    number = trace.tokens_per_expert_WLE.shape[1]
    if given is None:
        return typical_layer(sample_changes(trace))
    if not 0 <= given < number:
        raise ValueError(f"--layer {given} must be 0 to {number - 1}, the layers of the trace")
    return given
