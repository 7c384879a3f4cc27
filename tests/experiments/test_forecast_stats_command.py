"""The command that asks statsmodels about a trace: tables on standard output, errors in one line."""

import numpy as np
import pytest

from balancer.synth import collapse_trace
from balancer.trace import save_npz
from experiments.forecast_stats_command import compare, main, runner_of


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    trace = collapse_trace(num_samples=32, num_layers=2, num_experts=4, copies=8000)
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    save_npz(path, trace)
    return str(path)


def test_identify_prints_a_line_for_each_layer_and_one_for_all(path, capsys):
    assert main(["identify", path, "--heaviest", "1", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 series, 0 constant left out, ") and lines[0].endswith("every 10 steps")
    assert lines[1].startswith("least AICc: ")
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["all", "0", "1"]


def test_compare_prints_the_forecaster_beside_moving_averages(path, capsys):
    arguments = [
        "--forecaster",
        "ets",
        "--layers",
        "1",
        "--every",
        "4",
        "--horizons",
        "10,50",
        "--workers",
        "1",
    ]
    assert main(["compare", path, *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("| ets | 0.") == out.count("| persistence | 0.") == 2
    assert "origins from sample 0 on" in out and "origins from sample 16 on" in out


def test_persistence_of_the_comparison_is_the_variation_between_the_samples():
    trace = collapse_trace(num_samples=14, num_layers=1, num_experts=3, copies=900)
    errors = compare(trace, "ets", runner_of("ets", 200, 1), [30], 5, True)
    shares = trace.tokens_per_expert_WLE[:, 0] / 900
    expected = [(w, 0.5 * np.abs(shares[w + 3] - shares[w]).sum()) for w in (0, 5, 10)]
    np.testing.assert_allclose(errors["persistence"].variation_H[0], expected, rtol=1e-12)
    # before the first fit the forecaster says the last share, too
    np.testing.assert_allclose(errors["ets"].variation_H[0][:2], expected[:2], rtol=1e-9)
    assert len(errors["ets"].refit_s) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--layers", "0,2"], "--layers 0,2: the trace has 2"),
        (
            ["identify", "--first", "20", "--last", "40"],
            "--first 20 --last 40: the trace has the samples 0 to 32",
        ),
        (["identify", "--heaviest", "0"], "series=0 experts of each layer must be at least 1"),
        (["compare", "--layers", "0", "--window", "5"], "window=5 samples are too few"),
    ],
)
def test_errors_are_one_line(path, capsys, arguments, message):
    assert main([arguments[0], path, *arguments[1:], "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
