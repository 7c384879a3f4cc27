"""What statsmodels says about a trace: `python -m experiments.forecast_stats_command identify|compare TRACE`.

`identify` fits models to the heaviest experts of every layer and prints order, signal-to-noise ratio and the
gain that an exponential moving average should have, over all samples or a part of them. `compare` runs one
forecaster of `balancer/forecast_stats.py` over a few layers beside persistence and moving averages, on the
same layers and origins: total variation at each horizon, coverage of the 90 % interval, time of a refit; over
all origins, and over those of the second half.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from balancer.forecast_record import Forecaster
from balancer.metrics import total_variation
from balancer.trace import Trace, load_trace

# gains of the moving averages beside it; 1 is persistence
GAINS = (1.0, 0.6, 0.45, 0.3, 0.15)
# "ima" is ARIMA(0,1,1) alone, "level" the local level alone: models that return to no mean
FORECASTERS = ("ets", "arima", "unobserved", "ima", "level")
# half the width of a 90 % interval of a normal, in standard deviations
_NORMAL_90 = 1.645


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """What a forecaster did at each horizon: (origin sample, figure) pairs; and the seconds of its refits."""

    variation_H: tuple[list[tuple[int, float]], ...]
    covered_H: tuple[list[tuple[int, float]], ...]
    refit_s: list[float] = field(default_factory=list)


def compare(
    trace: Trace, name: str, runner: Forecaster, horizons: Sequence[int], every: int, quiet: bool
) -> dict[str, Errors]:
    """Run a forecaster and the moving averages over a trace; every `every`-th sample is an origin."""
    counts_WLE, steps_W = trace.tokens_per_expert_WLE, trace.steps_W
    shares_WLE = counts_WLE / counts_WLE.sum(axis=-1, keepdims=True)
    names = [name, *(_gain_name(gain) for gain in GAINS)]
    errors = {
        one: Errors(variation_H=tuple([] for _ in horizons), covered_H=tuple([] for _ in horizons))
        for one in names
    }
    levels = {gain: shares_WLE[0].copy() for gain in GAINS}
    state = runner.init(counts_WLE.shape[1], counts_WLE.shape[2], horizons)
    for w in tqdm(range(len(steps_W)), unit="sample", disable=quiet or not sys.stderr.isatty()):
        fitted_at, begun = int(state.fitted_at), time.perf_counter()
        state = runner.update(int(steps_W[w]), counts_WLE[w], state)
        if int(state.fitted_at) != fitted_at:
            errors[name].refit_s.append(time.perf_counter() - begun)
        for gain, level in levels.items():
            level += gain * (shares_WLE[w] - level)
        if w % every:
            continue
        forecast = runner.forecast(state)
        for h, horizon in enumerate(horizons):
            target = int(np.searchsorted(steps_W, steps_W[w] + horizon))
            if target == len(steps_W):
                continue
            real_LE = shares_WLE[target]
            errors[name].variation_H[h].append((w, _variation(forecast.mean_HLE[h], real_LE)))
            inside = np.abs(real_LE - forecast.mean_HLE[h]) <= _NORMAL_90 * forecast.std_HLE[h]
            errors[name].covered_H[h].append((w, float(inside.mean())))
            for gain, level in levels.items():
                errors[_gain_name(gain)].variation_H[h].append((w, _variation(level, real_LE)))
    return errors


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


def _variation(share_LE: NDArray[np.float64], real_LE: NDArray[np.float64]) -> float:
    return float(total_variation(share_LE, real_LE).mean())


def _gain_name(gain: float) -> str:
    return "persistence" if gain == 1 else f"ema {gain:g}"


def print_compared(errors: dict[str, Errors], horizons: Sequence[int], first: int) -> None:
    """Print a Markdown table over the origins from sample `first` on."""
    print(f"\norigins from sample {first} on")
    print("| forecaster | " + " | ".join(f"TV h={h}" for h in horizons) + " | cover 90 % | refit |")
    print("|---" * (len(horizons) + 3) + "|")
    for name, found in errors.items():
        cells = [_mean(one, first, ".4f") for one in found.variation_H]
        cells.append(" / ".join(_mean(one, first, ".2f") for one in found.covered_H))
        times = found.refit_s
        cells.append(f"{np.median(times):.2f} s, {len(times)} times" if times else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


def _mean(figures: list[tuple[int, float]], first: int, form: str) -> str:
    chosen = [figure for origin, figure in figures if origin >= first]
    return format(np.mean(chosen), form) if chosen else "-"


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


def _part(trace: Trace, first: int, last: int | None) -> Trace:
    if not 0 <= first < (last or len(trace.steps_W)) <= len(trace.steps_W):
        raise ValueError(
            f"--first {first} --last {last}: the trace has the samples 0 to {len(trace.steps_W)}"
        )
    return Trace(
        tokens_per_expert_WLE=trace.tokens_per_expert_WLE[first:last], steps_W=trace.steps_W[first:last]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = parser().parse_args(argv)
    try:
        trace = load_trace(arguments.trace)
        if arguments.command == "identify":
            part = _part(trace, arguments.first, arguments.last)
            print_identified(part, arguments.heaviest, arguments.workers, arguments.quiet)
            return 0
        # a forecaster starts at the beginning, wherever the first origin is
        part = _part(trace, 0, arguments.last)
        layers = [int(layer) for layer in arguments.layers.split(",")]
        if max(layers) >= part.tokens_per_expert_WLE.shape[1] or min(layers) < 0:
            raise ValueError(
                f"--layers {arguments.layers}: the trace has {part.tokens_per_expert_WLE.shape[1]}"
            )
        few = Trace(
            tokens_per_expert_WLE=np.ascontiguousarray(part.tokens_per_expert_WLE[:, layers]),
            steps_W=part.steps_W,
        )
        horizons = [int(horizon) for horizon in arguments.horizons.split(",")]
        name = arguments.forecaster
        runner = runner_of(name, arguments.window, arguments.workers)
        errors = compare(few, name, runner, horizons, arguments.every, arguments.quiet)
        for first in sorted({arguments.first, len(few.steps_W) // 2}):
            print_compared(errors, horizons, first)
    except (OSError, ValueError) as error:
        print(f"forecast_stats_command: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("forecast_stats_command: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
