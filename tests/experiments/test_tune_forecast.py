"""The tuning script reads half of a trace, and its figures are ratios to the defaults."""

import json

from balancer.synth_kinds import KINDS, synth_trace
from balancer.trace import save_npz
from experiments import tune_forecast


def test_candidates_are_compared_with_the_defaults_on_half_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_forecast, "SAMPLES", 60)
    monkeypatch.setattr(tune_forecast, "KINDS", {"drift": KINDS["drift"]})
    monkeypatch.setattr(tune_forecast, "CANDIDATES", {"eta": [6.0, 0.0], "reference": [3]})
    save_npz(tmp_path / "real.npz", synth_trace("step", num_samples=130, num_layers=1, num_experts=4))
    out = tmp_path / "out.json"
    assert tune_forecast.main(["--trace", str(tmp_path / "real.npz"), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["base"]) == {"drift", "collapse", "first half"}
    same, still, _ = (row["ratio"] for row in found["rows"])
    assert same == 1.0 and still != 1.0  # the defaults have eta 6; 0 never learns
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_second_half_is_not_read(tmp_path):
    save_npz(tmp_path / "real.npz", synth_trace("step", num_samples=100, num_layers=1, num_experts=4))
    half = tune_forecast.tuning_traces(str(tmp_path / "real.npz"))["first half"]
    assert len(half.steps_W) == 50 and half.steps_W[-1] == 491
