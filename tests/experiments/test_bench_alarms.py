"""`counterpoise bench alarms`: its loads are what they say, and its parts write what they print."""

import json

import numpy as np
import pytest

from balancer.metrics import normalized_entropy
from balancer.synth import collapse_trace
from balancer.trace import save_npz
from experiments.bench_alarms import main
from experiments.bench_alarms_loads import CASES, ONSET, Case, benign, collapse, dead_step
from experiments.bench_alarms_parts import TEST, Watched, upper

SMALL = Case(experts=8, top_k=2, tokens=8192)


def test_a_change_of_domain_changes_the_profile_and_nothing_else_does():
    counts, switches = zip(*benign(SMALL, 4, 700, 0, levelled=False))
    shares_WLE = np.array(counts) / (SMALL.tokens * SMALL.top_k)
    assert (np.array(counts).sum(axis=2) == SMALL.tokens * SMALL.top_k).all()
    at, layer = (int(i) for i in np.argwhere(np.array(switches)[100:600])[0] + [100, 0])
    before, after = shares_WLE[at - 50 : at, layer].mean(axis=0), shares_WLE[at : at + 50, layer].mean(axis=0)
    settled = shares_WLE[at + 50 : at + 100, layer].mean(axis=0)
    assert np.abs(after - before).sum() > 3 * np.abs(settled - after).sum()


@pytest.mark.parametrize("cause", ["growth", "feedback", "deaths", "ramp", "sudden"])
def test_every_cause_kills_after_its_onset_and_not_before(cause):
    steps = ONSET + {"sudden": 20, "ramp": 200}.get(cause, 900)
    counts = list(collapse(cause, SMALL, 2, steps, 3, length=200))
    dead_L = dead_step(counts, SMALL)
    assert (dead_L > ONSET).all()
    entropy_WL = normalized_entropy(np.array(counts))
    assert entropy_WL[:ONSET].min() > 0.9 and (entropy_WL[-20:].mean(axis=0) < 0.98).all()


def test_the_dead_are_counted_over_enough_copies():
    case = Case(experts=8, top_k=1, tokens=160)  # 20 copies each: 5 steps hold 100
    counts = [np.array([[20, 20, 20, 20, 20, 20, 20, 20 if t < 10 else 0]]) for t in range(30)]
    assert dead_step(counts, case).tolist() == [14]
    assert dead_step(counts[:12], case).tolist() == [-1]


def test_the_bound_of_nothing_seen_is_three():
    assert upper(0) == pytest.approx(3.0, rel=0.01)


def test_no_false_alarm_in_a_short_run_of_every_small_case():
    for case in [c for c in CASES if c.experts < 256]:
        one = Watched(case, 8)
        for t, (counts_LE, _) in enumerate(benign(case, 8, 250, TEST, levelled=False)):
            one.see(t, counts_LE)
        assert one.alarms == []


@pytest.mark.slow
@pytest.mark.parametrize("levelled", [False, True])
def test_one_false_alarm_at_most_in_a_million_layer_steps(levelled):
    alarms = 0
    for case in [c for c in CASES if c.experts < 256]:
        one = Watched(case, 128)
        for t, (counts_LE, _) in enumerate(benign(case, 128, 1303, TEST, levelled=levelled)):
            one.see(t, counts_LE)
        alarms += len(one.alarms)
    assert alarms <= 1


def test_every_part_writes_its_rows_and_plots(tmp_path, capsys):
    trace = collapse_trace(num_samples=20, num_layers=4)
    save_npz(tmp_path / "trace.npz", trace)
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    args = ["--quick", "--json", str(out), "--plots", str(plots), "--trace", str(tmp_path / "trace.npz")]
    assert main(args) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == {"false", "delay", "trace", "speed"}
    found = {(row["part"], row["case"], row["contender"], row["metric"]): row["value"] for row in rows}
    assert found["trace", "trace", "monitor", "layers_alarmed"] == 4.0
    assert found["speed", "60x256", "monitor", "update_ms"] > 0
    assert {file.name for file in plots.iterdir()} == {
        "alarms_leads.png",
        "alarms_ramps.png",
        "alarms_trace.png",
    }
    assert "upper_95" in capsys.readouterr().out


def test_a_trace_that_is_missing_is_asked_for():
    with pytest.raises(ValueError, match="--trace FILE"):
        main(["--part", "trace"])
