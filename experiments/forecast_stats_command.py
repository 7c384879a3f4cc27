"""What statsmodels says about a trace: `python -m experiments.forecast_stats_command identify|compare TRACE`.

`identify` fits models to the heaviest experts of every layer and prints order, signal-to-noise ratio and the
gain that an exponential moving average should have, over all samples or a part of them. `compare` runs one
forecaster of `balancer/forecast_stats.py` over a few layers beside persistence and moving averages, on the
same layers and origins (`balancer/backtest.py`): total variation at each horizon, coverage of the 90 %
interval, time of a refit; over all origins, and over those of the second half.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from balancer.backtest import backtest
from balancer.backtest_table import Backtest
from balancer.forecast import forecaster
from balancer.forecast_record import Forecaster
from balancer.trace import Trace, load_trace

# gains of the moving averages beside it; 1 is persistence
GAINS = (1.0, 0.6, 0.45, 0.3, 0.15)
# "ima" is ARIMA(0,1,1) alone, "level" the local level alone: models that return to no mean
FORECASTERS = ("ets", "arima", "unobserved", "ima", "level")


class Compared(NamedTuple):
    """The backtest of a forecaster, its first, beside moving averages; and the seconds of its refits."""

    found: Backtest
    refit_s: list[float]


def compare(
    trace: Trace, name: str, runner: Forecaster, horizons: Sequence[int], quiet: bool = True
) -> Compared:
    """Run a forecaster and the moving averages over a trace."""
    refit_s: list[float] = []
    averages = {_gain_name(gain): forecaster("ema", gain=gain) for gain in GAINS}
    with tqdm(unit="sample", disable=quiet or not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = backtest(trace, {name: _timed(runner, refit_s), **averages}, horizons, progress=progress)
    return Compared(found, refit_s)


def _timed(runner: Forecaster, refit_s: list[float]) -> Forecaster:
    """Return the forecaster, which now notes the seconds of every update that fits."""

    def update(step: int, tokens_per_expert_LE: ArrayLike, state: Any) -> Any:
        fitted_at, begun = int(state.fitted_at), time.perf_counter()
        state = runner.update(step, tokens_per_expert_LE, state)
        if int(state.fitted_at) != fitted_at:
            refit_s.append(time.perf_counter() - begun)
        return state

    return runner._replace(update=update)


def runner_of(name: str, window: int, workers: int) -> Forecaster:
    """Return one of FORECASTERS."""
    from balancer.forecast_stats import arima, ets, unobserved

    if name == "ets":
        return ets(window=window, workers=workers)
    if name == "arima":
        return arima(window=window, workers=workers)
    if name == "ima":
        return arima(orders=[(0, 1, 1)], window=window, workers=workers)
    if name == "level":
        return unobserved(components=["level"], window=window, workers=workers)
    return unobserved(window=window, workers=workers)


def _gain_name(gain: float) -> str:
    return "persistence" if gain == 1 else f"ema {gain:g}"


def print_compared(compared: Compared, first: int, every: int) -> None:
    """Print a Markdown table over every `every`-th sample as an origin, from sample `first` on."""
    found = compared.found
    print(f"\norigins from sample {first} on")
    print("| forecaster | " + " | ".join(f"TV h={h}" for h in found.horizons_H) + " | cover 90 % | refit |")
    print("|---" * (len(found.horizons_H) + 3) + "|")
    origins = np.arange(0, len(found.steps_W), every)
    origins = origins[origins >= first]
    for f, name in enumerate(found.names):
        cells = [_mean(score_WL[origins], ".4f") for score_WL in found.tv_FHWL[f]]
        covered = found.coverage_FHWL[f] if f == 0 else np.full_like(found.coverage_FHWL[f], np.nan)
        cells.append(" / ".join(_mean(score_WL[origins], ".2f") for score_WL in covered))
        times = compared.refit_s if f == 0 else []
        cells.append(f"{np.median(times):.2f} s, {len(times)} times" if times else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


def _mean(score_WL: NDArray[np.float64], form: str) -> str:
    known = score_WL[~np.isnan(score_WL)]
    return format(known.mean(), form) if known.size else "-"


def print_identified(trace: Trace, series: int, workers: int, quiet: bool) -> None:
    """Print what identification says: all layers together, then each."""
    from balancer.forecast_identify import identify

    with tqdm(unit="series", disable=quiet or not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = identify(trace, series=series, workers=workers, progress=progress)
    print(
        f"{len(found.layer_N)} series, {found.num_constant} constant left out, "
        f"{len(found.not_converged)} not converged, {found.num_warnings} warnings; "
        f"a sample every {found.interval_steps:g} steps"
    )
    orders = {name: found.order_N.count(name) for name in (*found.models, "none")}
    print("least AICc: " + ", ".join(f"{name} {num}" for name, num in orders.items() if num))
    print("| layer | q (quartiles) | gain K | AR(1) of differences | Ljung-Box p |")
    print("|---|---|---|---|---|")
    for layer in (None, *sorted(set(found.layer_N.tolist()))):
        figures = [f"{a:.3g} / {b:.3g} / {c:.3g}" for a, b, c in found.quartiles(layer).values()]
        print(f"| {'all' if layer is None else layer} | " + " | ".join(figures) + " |")


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    result = argparse.ArgumentParser(
        prog="python -m experiments.forecast_stats_command",
        description="What statsmodels says about a load trace: which model, which gain, how good.",
        allow_abbrev=False,
    )
    commands = result.add_subparsers(dest="command", required=True)
    for name, text in (("identify", "fit models once"), ("compare", "run a forecaster over the trace")):
        one = commands.add_parser(name, help=text, allow_abbrev=False)
        one.add_argument("trace", metavar="TRACE")
        one.add_argument(
            "--first", type=int, metavar="W", default=0, help="first sample, or origin (default: 0)"
        )
        one.add_argument("--last", type=int, metavar="W", help="end before this sample (default: all)")
        one.add_argument(
            "--workers", type=int, metavar="N", default=2, help="processes that fit (default: 2)"
        )
        one.add_argument("--quiet", action="store_true", help="no progress bar")
    identify, comparing = commands.choices["identify"], commands.choices["compare"]
    identify.add_argument(
        "--heaviest", type=int, metavar="N", default=4, help="experts of a layer (default: 4)"
    )
    comparing.add_argument("--forecaster", choices=FORECASTERS, default="ets")
    comparing.add_argument("--layers", metavar="L,L", default="0,1,2,3", help="(default: 0,1,2,3)")
    comparing.add_argument("--window", type=int, metavar="W", default=200, help="of a fit (default: 200)")
    comparing.add_argument(
        "--every", type=int, metavar="N", default=10, help="samples per origin (default: 10)"
    )
    comparing.add_argument("--horizons", metavar="H,H", default="10,100,500", help="(default: 10,100,500)")
    return result


def _check_part(first: int, last: int | None, num_samples: int) -> None:
    if last is not None and not 1 <= last <= num_samples:
        raise ValueError(f"--last {last} must be 1 to {num_samples}, the samples of the trace")
    end = num_samples if last is None else last
    if not 0 <= first < end:
        raise ValueError(f"--first {first} must be 0 to {end - 1}, a sample before the last of {end}")


def _numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list like 0,1,2."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{option} {text}: expected whole numbers with commas, say 0,1,2") from None


def _of_layers(trace: Trace, text: str) -> Trace:
    """Return the trace of the layers asked for."""
    layers, number = _numbers("layers", text), trace.tokens_per_expert_WLE.shape[1]
    if not all(0 <= layer < number for layer in layers) or len(set(layers)) != len(layers):
        raise ValueError(f"--layers {text}: the trace has {number}; use some of 0 to {number - 1}, each once")
    return Trace(
        tokens_per_expert_WLE=np.ascontiguousarray(trace.tokens_per_expert_WLE[:, layers]),
        steps_W=trace.steps_W,
    )


def _run(arguments: argparse.Namespace) -> None:
    trace = load_trace(arguments.trace)
    first, last = arguments.first, arguments.last
    _check_part(first, last, len(trace.steps_W))
    # a forecaster starts at the beginning, wherever the first origin is
    start = first if arguments.command == "identify" else 0
    part = Trace(
        tokens_per_expert_WLE=trace.tokens_per_expert_WLE[start:last], steps_W=trace.steps_W[start:last]
    )
    if arguments.command == "identify":
        print_identified(part, arguments.heaviest, arguments.workers, arguments.quiet)
        return
    if arguments.every < 1:
        raise ValueError(f"--every {arguments.every} must be at least 1, the samples from origin to origin")
    few, horizons = _of_layers(part, arguments.layers), _numbers("horizons", arguments.horizons)
    runner = runner_of(arguments.forecaster, arguments.window, arguments.workers)
    compared = compare(few, arguments.forecaster, runner, horizons, arguments.quiet)
    for origin in sorted({first, len(few.steps_W) // 2}):
        print_compared(compared, origin, arguments.every)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        _run(parser().parse_args(argv))
    except (OSError, ValueError) as error:
        print(f"forecast_stats_command: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("forecast_stats_command: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
