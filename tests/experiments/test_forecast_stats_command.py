"""The command that asks statsmodels about a trace: tables on standard output, errors in one line."""

import numpy as np
import pytest

from balancer.synth import collapse_trace
from balancer.trace import Trace, save_npz
from experiments.forecast_stats_command import compare, main, print_compared, runner_of


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
    found, refit_s = compare(trace, "ets", runner_of("ets", 200, 1), [30])
    assert found.names == ("ets", "persistence", "ema 0.6", "ema 0.45", "ema 0.3", "ema 0.15")
    shares = trace.tokens_per_expert_WLE[:, 0] / 900
    expected = [0.5 * np.abs(shares[w + 3] - shares[w]).sum() for w in range(11)]
    np.testing.assert_allclose(found.tv_FHWL[1, 0, :11, 0], expected, rtol=1e-12)
    # before the first fit, at the tenth sample, the forecaster says the last share, too
    np.testing.assert_allclose(found.tv_FHWL[0, 0, :9, 0], expected[:9], rtol=1e-9)
    assert len(refit_s) == 1


def test_the_table_is_the_mean_over_the_origins_asked_for(capsys):
    trace = collapse_trace(num_samples=14, num_layers=2, num_experts=3, copies=900)
    compared = compare(trace, "ets", runner_of("ets", 200, 1), [10, 500_000_000])
    print_compared(compared, 4, 3)
    lines = capsys.readouterr().out.splitlines()
    tv = compared.found.tv_FHWL[:, 0, [6, 9, 12]].mean(axis=(1, 2))
    cover = compared.found.coverage_FHWL[0, 0, [6, 9, 12]].mean()
    assert lines[4].startswith(f"| ets | {tv[0]:.4f} | - | {cover:.2f} / - | ") and "1 times" in lines[4]
    assert lines[5] == f"| persistence | {tv[1]:.4f} | - | - / - |  |"


def test_an_idle_layer_and_idle_samples_take_no_part(tmp_path, capsys):
    counts = collapse_trace(num_samples=24, num_layers=2, num_experts=4, copies=800).tokens_per_expert_WLE
    steps = 10 * np.arange(24)
    wanted = [counts[:, 1:].copy(), counts.copy()]
    for loads in wanted:
        loads[[0, 7], -1] = 0
    wanted[1][:, 0] = 0
    said = []
    for w, loads in enumerate(wanted):
        save_npz(tmp_path / f"{w}.npz", Trace(tokens_per_expert_WLE=loads, steps_W=steps))
        layers = ",".join(map(str, range(loads.shape[1])))
        options = ["--layers", layers, "--every", "1", "--horizons", "10,50", "--workers", "1"]
        assert main(["compare", str(tmp_path / f"{w}.npz"), *options]) == 0
        out, err = capsys.readouterr()
        assert not err
        said.append([line.rsplit("|", 2)[0] for line in out.splitlines()])  # without the time of a refit
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--layers", "0,2"], "--layers 0,2: the trace has 2"),
        (
            ["identify", "--first", "20", "--last", "40"],
            "--last 40 must be 1 to 32, the samples of the trace",
        ),
        (["identify", "--first", "20", "--last", "20"], "--first 20 must be 0 to 19"),
        (["compare", "--layers", "0", "--last", "0"], "--last 0 must be 1 to 32"),
        (["compare", "--layers", "0", "--first", "-1"], "--first -1 must be 0 to 31"),
        (["compare", "--layers", "0", "--first", "99"], "--first 99 must be 0 to 31"),
        (["compare", "--layers", "0", "--every", "0"], "--every 0 must be at least 1"),
        (["compare", "--layers", "a"], "--layers a: expected whole numbers with commas, say 0,1,2"),
        (["compare", "--layers", ""], "--layers : expected whole numbers"),
        (["compare", "--layers", "1,1"], "use some of 0 to 1, each once"),
        (["compare", "--layers", "0", "--horizons", "1.5"], "--horizons 1.5: expected whole numbers"),
        (["compare", "--layers", "0", "--horizons", "900"], "spans 310 steps"),
        (["identify", "--heaviest", "0"], "series=0 experts of each layer must be at least 1"),
        (["compare", "--layers", "0", "--window", "5"], "window=5 samples are too few"),
    ],
)
def test_errors_are_one_line(path, capsys, arguments, message):
    assert main([arguments[0], path, *arguments[1:], "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
