"""Tune the forecaster: constants of the bank, one changed at a time, on synthetic traces and half a real one.

    python -m experiments.tune_forecast [--trace TRACE] [--json OUT]

Beside the flow: how the defaults of `balancer.bank_config.BankConfig` were chosen, so that anybody can choose
them again. Of a real trace only the first half of the time is read, so that the second half can judge the
choice. A figure is the total variation over that of the defaults, the geometric mean over traces and horizons
(of 1, 10 and 50 samples); seeds differ from those of the tests.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balancer.backtest import backtest
from balancer.forecast import forecaster
from balancer.synth import collapse_trace
from balancer.synth_kinds import KINDS, synth_trace
from balancer.trace import Trace, load_trace

SEED, SAMPLES, COPIES = 1000, 200, 65536
CANDIDATES: dict[str, list[Any]] = {
    "eta": [2.0, 4.0, 10.0],
    "switch": [0.003, 0.03],
    "bonus": [30.0, 100.0, 1000.0],
    "bonus_power": [1.0, 2.0],
    "borrow": [0.0, 0.25, 0.5, 1.0],
    "regression_weight": [0.05, 1.0],
    "ridge": [0.01, 0.1, 0.3],
    "memories": [(0.9,), (0.95,), (0.9, 0.95, 0.98), (0.8, 0.95), (0.8, 0.9, 0.95, 0.98)],
    "gains": [(1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.02)],
    "reference": [3, 4],
    "slow": [(), ("seasonal", "var"), ("seasonal", "level"), ("seasonal", "trend")],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Try every candidate and print its figure by trace."""
    top = argparse.ArgumentParser(prog="python -m experiments.tune_forecast", allow_abbrev=False)
    top.add_argument("--trace", metavar="TRACE", help="a real trace; the first half of it is read")
    top.add_argument("--json", metavar="OUT", help="file for the figures")
    args = top.parse_args(argv)
    traces = tuning_traces(args.trace)
    base = scores(traces, {})
    rows = []
    print(f"{'candidate':<44} {'all':>7} " + " ".join(f"{name[:9]:>9}" for name in traces))
    for field, values in CANDIDATES.items():
        for value in values:
            change = {field: value}
            if field == "reference":
                change["regressors"] = tuple(i for i in (0, 1, 3, 2, 5, 6, 7) if i != value)[:6]
            ratio = {
                name: float(np.exp(np.log(tv / base[name]).mean()))
                for name, tv in scores(traces, change).items()
            }
            mean = float(np.exp(np.mean(np.log(list(ratio.values())))))
            print(
                f"{field + ' = ' + str(value):<44} {mean:7.4f} "
                + " ".join(f"{r:9.4f}" for r in ratio.values()),
                flush=True,
            )
            rows.append({"change": change, "ratio": mean, "by_trace": ratio})
    if args.json:
        Path(args.json).write_text(
            json.dumps({"base": {k: v.tolist() for k, v in base.items()}, "rows": rows}, indent=1) + "\n"
        )
    return 0


def tuning_traces(path: str | None) -> dict[str, Trace]:
    """Synthetic traces of every kind, and the first half of a real one."""
    sizes: dict[str, Any] = {"num_samples": SAMPLES, "num_layers": 3, "num_experts": 32, "copies": COPIES}
    traces = {kind: synth_trace(kind, seed=SEED, dispersion=2.3, **sizes) for kind in KINDS}
    traces["collapse"] = collapse_trace(seed=SEED, **sizes)
    if path is not None:
        whole = load_trace(path)
        half = len(whole.steps_W) // 2
        first = {"tokens_per_expert_WLE": whole.tokens_per_expert_WLE[:half], "steps_W": whole.steps_W[:half]}
        traces["first half"] = Trace(**first, meta=dict(whole.meta))
    return traces


def scores(traces: dict[str, Trace], change: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Mean total variation of the regime forecaster with changed constants, by trace and horizon."""
    found = {}
    for name, trace in traces.items():
        interval = int(np.diff(trace.steps_W).min())
        horizons = (interval, 10 * interval, 50 * interval)
        result = backtest(trace, {"regime": forecaster("regime", **change)}, horizons)
        found[name] = np.nanmean(result.tv_FHWL[0], axis=(1, 2))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
