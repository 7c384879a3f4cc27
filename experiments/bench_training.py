"""Bench training: does control of the router pay in training? Many small runs, paired by seed.

    counterpoise bench training --part collapse --json OUT --plots DIR
    counterpoise bench training --part quality

    collapse   four causes by which routing collapses; control off, supervisor alone, bias law and supervisor
    quality    bits per byte against the violation over its floor, on equal tokens, for each way of balancing

Figures are of seeds 11 and up. A rival's setting is chosen on seeds 100 and 101, by the fewest bits per byte
among three. Causes and sizes of the part `collapse` were chosen on seed 0 by their bits per byte: a collapse
costs where every batch holds all domains and the experts are small. "narrow data", one domain after the
other, stays in although control cost bits there on that seed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench_layer import where
from experiments.studies import Result, Run, interval, paired, train_all
from experiments.training_plots import bits_by_violation, dead_over_steps

CONFIG = "collapse.toml"
CAUSES: dict[str, tuple[str, ...]] = {
    "no balance loss": (),
    "fast router": ("router.top_k=2", "router.normalize=true", "train.router_lr_factor=8"),
    "drifting mix": ("data.schedule=rotation", "data.drift=0.8"),
    "narrow data": ("data.schedule=step", "data.drift=1.0", "data.period_steps=20"),
}
ARMS: dict[str, tuple[str, ...]] = {
    "off": (),
    "supervisor": ("control.supervisor=true",),
    "bias + supervisor": ("control.bias=identified", "control.supervisor=true"),
}
# of the part quality: overrides, and what else the setting may be
QUALITY_BASE = ("router.top_k=2", "router.normalize=true")
CONTENDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "nothing": ((),),
    "identified": (("control.bias=identified",),),
    "sign": tuple(("control.bias=sign", f"control.bias_step={step}") for step in (1e-3, 5e-3, 2e-2)),
    "quantile-damped": tuple(
        ("control.bias=quantile-damped", f"control.bias_step={step}") for step in (0.1, 0.3, 0.6)
    ),
    "balance loss": tuple((f"router.balance_loss={value}",) for value in (1e-3, 1e-2, 5e-2)),
}
TUNING_SEEDS = (100, 101)
FIRST_SEED = 11


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench training`."""
    top = argparse.ArgumentParser(prog="counterpoise bench training", allow_abbrev=False)
    top.add_argument("--part", choices=("collapse", "quality"), action="append", help="both without it")
    top.add_argument("--seeds", type=int, default=5, help="runs of each kind (5)")
    top.add_argument("--steps", type=int, default=1000, help="optimizer steps of a run (1000)")
    top.add_argument("--workers", type=int, default=2, help="runs side by side, a core each (2)")
    top.add_argument("--folder", default="runs/training", help="of the runs; those there are not repeated")
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--plots", metavar="DIR", help="folder for the plots (PNG)")
    return top


def main(argv: Sequence[str]) -> int:
    """Train what is missing, print the tables, write the files."""
    args = parser().parse_args(argv)
    for name in ("seeds", "steps", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be 1 or more")
    rows: list[dict[str, Any]] = []
    plots: dict[str, bytes] = {}
    for part in args.part or ("collapse", "quality"):
        new_rows, plot = (_collapse if part == "collapse" else _quality)(args)
        rows += [{"part": part, **row} for row in new_rows]
        plots[part] = plot
    if args.json:
        Path(args.json).write_text(json.dumps({**where(), "rows": rows}, indent=1) + "\n")
    if args.plots:
        Path(args.plots).mkdir(parents=True, exist_ok=True)
        for part, png in plots.items():
            (Path(args.plots) / f"training_{part}.png").write_bytes(png)
    return 0


def _run_all(args: argparse.Namespace, runs: Sequence[Run]) -> dict[Run, Result]:
    steps = (f"train.steps={args.steps}", f"train.warmup_steps={min(20, args.steps)}")
    runs = [run._replace(overrides=(*run.overrides, *steps)) for run in runs]
    return train_all(runs, CONFIG, Path(args.folder), workers=args.workers)


def _collapse(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bytes]:
    runs = [
        Run(cause, arm, seed, (*settings, *control))
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds)
        for cause, settings in CAUSES.items()
        for arm, control in ARMS.items()
    ]
    found = _run_all(args, runs)
    rows: list[dict[str, Any]] = []
    print(f"\n{'cause':18s} {'control':18s} dead of 16   MaxVio over floor   bits per byte   against off")
    for cause in CAUSES:
        off = _bits(found, cause, "off")
        for arm in ARMS:
            results = _of(found, cause, arm)
            dead = interval(np.array([r.dead for r in results]))
            excess = interval(np.array([r.excess for r in results]))
            bits = interval(np.array([r.bits_per_byte for r in results]))
            gain = paired(_bits(found, cause, arm), off)
            print(f"{cause:18s} {arm:18s} {dead[0]:10.2f} {excess[0]:19.2f} {bits[0]:15.4f}   {_pm(gain)}")
            figures = {"dead": dead, "excess": excess, "bits_per_byte": bits, "bits_less_off": gain}
            rows += _rows(cause, arm, figures)
    return rows, dead_over_steps({c: {a: _of(found, c, a) for a in ARMS} for c in CAUSES})


def _quality(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bytes]:
    chosen = {name: _tuned(args, name, settings) for name, settings in CONTENDERS.items()}
    runs = [
        Run("quality", name, seed, (*QUALITY_BASE, *settings))
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds)
        for name, settings in chosen.items()
    ]
    found = _run_all(args, runs)
    rows: list[dict[str, Any]] = []
    ours = _bits(found, "quality", "identified")
    print(f"\n{'balance by':18s} {'setting':38s} MaxVio over floor   bits per byte   less identified")
    points: dict[str, list[Result]] = {}
    for name, settings in chosen.items():
        points[name] = _of(found, "quality", name)
        excess = interval(np.array([r.excess for r in points[name]]))
        bits = interval(np.array([r.bits_per_byte for r in points[name]]))
        less = paired(_bits(found, "quality", name), ours)
        setting = " ".join(settings[-1:])
        print(f"{name:18s} {setting:38s} {excess[0]:17.2f} {bits[0]:15.4f}   {_pm(less)}")
        rows += _rows(
            "quality", name, {"excess": excess, "bits_per_byte": bits, "bits_less_identified": less}
        )
    return rows, bits_by_violation(points)


def _tuned(args: argparse.Namespace, name: str, settings: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The setting of the fewest bits per byte on the tuning seeds."""
    if len(settings) == 1:
        return settings[0]
    runs = [
        Run("tuning", f"{name} {index}", seed, (*QUALITY_BASE, *setting))
        for index, setting in enumerate(settings)
        for seed in TUNING_SEEDS
    ]
    found = _run_all(args, runs)
    bits = [
        np.mean(list(_bits(found, "tuning", f"{name} {index}").values())) for index in range(len(settings))
    ]
    return settings[int(np.argmin(bits))]


def _of(found: dict[Run, Result], case: str, contender: str) -> list[Result]:
    return [result for run, result in found.items() if (run.case, run.contender) == (case, contender)]


def _bits(found: dict[Run, Result], case: str, contender: str) -> dict[int, float]:
    return {
        run.seed: result.bits_per_byte
        for run, result in found.items()
        if (run.case, run.contender) == (case, contender)
    }


def _pm(figure: tuple[float, float, float]) -> str:
    return f"{figure[0]:+.4f} ({figure[1]:+.4f} to {figure[2]:+.4f})"


def _rows(case: str, contender: str, figures: dict[str, tuple[float, float, float]]) -> list[dict[str, Any]]:
    return [
        {
            "case": case,
            "contender": contender,
            "metric": metric,
            "value": value,
            "lowest": low,
            "highest": high,
        }
        for metric, (value, low, high) in figures.items()
    ]
