"""`counterpoise bench forecast` times every forecaster and writes what it prints."""

import json

import pytest

from balancer.forecast import FORECASTERS
from experiments import bench_forecast
from experiments.bench import main


def test_every_forecaster_is_timed_in_every_case(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_forecast, "SIZES", [(2, 4), (1, 8)])
    assert main(["forecast", "--steps", "60", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    names = {"means", "weighted", "regime/numpy", "scenarios", *FORECASTERS}
    for case in ("2x4", "1x8"):
        assert {row["contender"] for row in rows if row["case"] == case} == names
    times = {
        row["metric"]: row["value"] for row in rows if row["case"] == "2x4" and row["contender"] == "ema"
    }
    assert 0 < times["update_ms"] <= times["update_max_ms"] and times["forecast_ms"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * len(names)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="--steps 10 must be 60 or more"):
        main(["forecast", "--steps", "10"])
