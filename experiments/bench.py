"""Bench: `counterpoise bench NAME`, one module a benchmark."""

from collections.abc import Callable, Sequence

from experiments import (
    bench_alarms,
    bench_control,
    bench_forecast,
    bench_layer,
    bench_placement,
    bench_skew,
    bench_split,
    bench_stages,
    bench_training,
)

BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "alarms": bench_alarms.main,
    "control": bench_control.main,
    "forecast": bench_forecast.main,
    "layer": bench_layer.main,
    "placement": bench_placement.main,
    "skew": bench_skew.main,
    "split": bench_split.main,
    "stages": bench_stages.main,
    "training": bench_training.main,
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first argument names.   Raises ValueError for another name."""
    if not argv or argv[0] not in BENCHES:
        given = argv[0] if argv else "nothing"
        raise ValueError(f"bench: {given!r} is no benchmark; use one of {', '.join(BENCHES)}")
    return BENCHES[argv[0]](argv[1:])
