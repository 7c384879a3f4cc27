"""Bench forecast: the time of a step of every forecaster, and of drawing scenarios from what it says.

    counterpoise bench forecast --json OUT

Loads are multinomial around a drift; all contenders of a size see the same. A step is `update` with one
sample and `forecast` at three horizons, of 1, 10 and 50 samples; by then forecasts come due at all of them.
Figures are the median of the last half of the steps and the slowest of them, which has the pauses of the
machine in it.

    means      eight exponential means and their mix alone: the filters of scalar gain, as `regime` uses them
    weighted   the same as a forecaster: checks, weights learnt by error, calibrated intervals
    regime     the default: with regressions and the seasonal member; regime/numpy: without numba
    scenarios  16 draws and six fixed ones from one forecast, at micro-batch size
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balancer.bank import bank
from balancer.bank_config import BankConfig
from balancer.forecast import FORECASTERS, CompiledPasses, forecaster, warm_forecast
from balancer.forecast_build import NEVER, Sample
from balancer.forecast_record import Forecaster
from balancer.scenarios import draw_scenarios
from experiments.bench_layer import where

SIZES = [(24, 32), (58, 256)]
HORIZONS = (10, 100, 500)
COPIES = 262144
MEANS: dict[str, Any] = {"memories": (), "regressors": ()}
Counts = np.ndarray[Any, np.dtype[np.int64]]


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench forecast`."""
    top = argparse.ArgumentParser(prog="counterpoise bench forecast", allow_abbrev=False)
    top.add_argument("--json", metavar="OUT", help="file for the rows")
    top.add_argument("--steps", metavar="N", type=int, default=160, help="steps of every contender; 160")
    return top


def main(argv: Sequence[str]) -> int:
    """Time every contender of every size, print a table, write the file."""
    args = parser().parse_args(argv)
    if args.steps < 60:
        raise ValueError(
            f"--steps {args.steps} must be 60 or more: forecasts of 50 samples ahead must come due"
        )
    warm_forecast()
    rows: list[dict[str, Any]] = []
    head = f"{'case':<10} {'contender':<14} {'update ms':>10} {'slowest':>10}"
    print(f"{head} {'forecast ms':>12} {'slowest':>10}")
    for num_layers, num_experts in SIZES:
        case, counts_WLE = f"{num_layers}x{num_experts}", loads(args.steps, num_layers, num_experts)
        for name, run in contenders(counts_WLE).items():
            times = run()
            print(
                f"{case:<10} {name:<14} " + "{:>10.3f} {:>10.3f} {:>12.3f} {:>10.3f}".format(*times),
                flush=True,
            )
            metrics = ("update_ms", "update_max_ms", "forecast_ms", "forecast_max_ms")
            rows += [
                {"case": case, "contender": name, "metric": metric, "value": value}
                for metric, value in zip(metrics, times)
            ]
    if args.json:
        Path(args.json).write_text(json.dumps({**where(), "rows": rows}, indent=1) + "\n")
    return 0


def loads(samples: int, num_layers: int, num_experts: int) -> Counts:
    """Counts [W, L, E] around log shares that walk at random."""
    rng = np.random.default_rng(0)
    score_LE, counts = rng.standard_normal((num_layers, num_experts)), []
    for _ in range(samples):
        score_LE = score_LE + 0.02 * rng.standard_normal(score_LE.shape)
        share_LE = np.exp(score_LE) / np.exp(score_LE).sum(axis=-1, keepdims=True)
        counts.append(rng.multinomial(COPIES, share_LE))
    return np.array(counts)


def contenders(counts_WLE: Counts) -> dict[str, Callable[[], tuple[float, ...]]]:
    """What is timed on a load, by name."""
    runs: dict[str, Callable[[], tuple[float, ...]]] = {
        "means": lambda: time_means(counts_WLE),
        "weighted": lambda: time_forecaster(forecaster("regime", slow=(), **MEANS), counts_WLE),
    }
    for name in FORECASTERS:
        runs[name] = lambda name=name: time_forecaster(forecaster(name), counts_WLE)
    runs["regime/numpy"] = lambda: time_forecaster(forecaster("regime", compiled=False), counts_WLE)
    runs["scenarios"] = lambda: time_scenarios(counts_WLE)
    return runs


def time_forecaster(one: Forecaster, counts_WLE: Counts) -> tuple[float, ...]:
    """Median and slowest `update`, median and slowest `forecast`, in ms, of the last half of the steps."""
    init, update, forecast = one
    state, times = init(counts_WLE.shape[1], counts_WLE.shape[2], HORIZONS), []
    for w, counts_LE in enumerate(counts_WLE):
        start = time.perf_counter()
        state = update(1 + 10 * w, counts_LE, state)
        middle = time.perf_counter()
        forecast(state)
        times.append((middle - start, time.perf_counter() - middle))
    return _summary(times)


def time_means(counts_WLE: Counts) -> tuple[float, ...]:
    """The same for the exponential means alone: no origin comes due, nothing is learnt."""
    num_layers, num_experts = counts_WLE.shape[1:]
    member, times = bank(BankConfig(**MEANS), CompiledPasses()), []
    state = member.init(num_layers, num_experts, np.array([NEVER // 4]))
    all_L, none_L = np.ones(num_layers, dtype=np.bool_), np.zeros(num_layers, dtype=np.bool_)
    total_L, start_L = np.full(num_layers, float(COPIES)), np.zeros(num_layers, dtype=np.int64)
    lag_H, starved_1L = np.array([1]), none_L[None]
    for w, counts_LE in enumerate(counts_WLE):
        share_LE = counts_LE / COPIES
        sample = Sample(
            step=1 + 10 * w,
            share_LE=share_LE,
            total_L=total_L,
            loaded_L=all_L,
            jumped_L=none_L,
            restart_L=none_L,
            since_L=start_L,
            first_L=start_L,
            starved_HL=starved_1L,
            lag_H=lag_H,
            interval=10.0,
        )
        start = time.perf_counter()
        state = member.update(sample, state)
        middle = time.perf_counter()
        for _ in HORIZONS:
            member.mean(lag_H, state)
        times.append((middle - start, time.perf_counter() - middle))
    return _summary(times)


def time_scenarios(counts_WLE: Counts) -> tuple[float, ...]:
    """Time of drawing scenarios from the last forecast, in the columns of `update`; no forecast is timed."""
    init, update, forecast = forecaster("ema")
    state = init(counts_WLE.shape[1], counts_WLE.shape[2], HORIZONS)
    for w, counts_LE in enumerate(counts_WLE):
        state = update(1 + 10 * w, counts_LE, state)
    given, times = forecast(state), []
    for seed in range(len(counts_WLE) // 4):
        start = time.perf_counter()
        draw_scenarios(
            given,
            HORIZONS[1],
            copies=8192,
            seed=seed,
            num_scenarios=16,
            phi=2.3,
            last_LE=counts_WLE[-1],
            previous_LE=counts_WLE[-2],
        )
        times.append((time.perf_counter() - start, 0.0))
    return _summary(times)


def _summary(times: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    late = 1e3 * np.array(times[len(times) // 2 :])
    return tuple(float(value) for value in np.ravel([np.median(late, axis=0), late.max(axis=0)], order="F"))
