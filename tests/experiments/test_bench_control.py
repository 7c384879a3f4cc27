"""`counterpoise bench control`: its statistics are right, and a part writes what it prints."""

import json

import numpy as np
import pytest

from experiments.bench_control import main
from experiments.bench_control_basin import threshold, wilson
from experiments.bench_control_parts import interval, make, values_of
from experiments.bench_control_suite import CASES


def test_the_wilson_band_is_that_of_the_formula_and_stays_in_range():
    z, n, p = 1.959964, 20, 0.25
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    np.testing.assert_allclose(wilson(5, n), (middle - half, middle + half), rtol=1e-4)
    assert wilson(0, n)[0] == pytest.approx(0, abs=1e-12) and wilson(n, n)[1] == pytest.approx(1)


def test_the_fitted_threshold_is_where_half_of_the_runs_collapse():
    rho = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
    share = 1 / (1 + np.exp(-4 * (np.log(rho) - np.log(0.15))))
    assert threshold(rho, np.round(200 * share), 200) == pytest.approx(0.15, rel=0.1)


def test_the_interval_holds_the_mean_and_narrows_with_more_runs():
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)
    low, high = interval(values)
    assert low < 3.0 < high
    few_low, few_high = interval(values[:20])
    assert few_high - few_low > 2 * (high - low)


def test_the_suite_covers_what_the_claim_names():
    assert {c.rho for c in CASES} >= {0.01, 0.3} and {c.score for c in CASES} == {"softmax", "sigmoid"}
    assert {c.experts for c in CASES} >= {8, 256} and {c.top_k for c in CASES} >= {1, 8}
    assert min(c.log_tokens for c in CASES) == 12 and max(c.log_tokens for c in CASES) == 20


def test_laws_with_a_setting_have_equal_budgets():
    assert {len(values_of(name)) for name in ("sign", "smebu", "linear", "quantile-damped")} == {6}
    assert values_of("identified") == (None,)
    assert make("sign", values_of("sign")[0]).name == "sign"


def test_a_part_writes_rows_and_plots(tmp_path, capsys):
    assert main(["--part", "speed", "--quick", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["contender"] for row in rows} >= {"identified", "linear"}
    assert "identified" in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not exist"):
        main(["--part", "speed", "--json", str(tmp_path / "none" / "out.json")])
