"""Records of a run: the figures agree with the sample, and a resumed run continues them."""

import json

import numpy as np
import pytest

from balancer import load_trace
from experiments.config import load_config
from experiments.records import Recorder, balance_scalars
from experiments.rundir import RunDir
from moe import LoadSample

CONFIG = load_config("tiny.toml", ["router.num_experts=4"])


def sample(step: int, counts_LE=((40, 20, 10, 10), (20, 20, 20, 20))) -> LoadSample:
    counts_LE = np.array(counts_LE, dtype=np.int64)
    return LoadSample(
        step=step,
        tokens_per_expert_LE=counts_LE,
        rows_to_rank_LP=counts_LE.reshape(2, 2, 2).sum(axis=2),
        balance_loss_L=np.array([1.5, 1.0]),
        z_loss_L=np.array([2.0, 4.0]),
        num_tokens=40,
        extra_X=np.zeros(0),
    )


def recorder(folder, resume_step=None) -> Recorder:
    (folder / "config.toml").write_text("[train]\n")
    return Recorder(RunDir(path=folder), CONFIG, 2, 2, resume_step)


def test_balance_figures_are_those_of_their_definitions():
    figures = balance_scalars(sample(1), np.full((2, 4), 500), top_k=2)
    assert figures["balance/layer_00"] == pytest.approx(40 / 60)
    assert figures["balance/layer_01"] == 1.0
    assert figures["balance/balancedness_mean"] == pytest.approx((40 / 60 + 1) / 2)
    assert figures["balance/balancedness_sum"] == pytest.approx(80 / 100)
    assert figures["balance/max_violation"] == pytest.approx((1.0 + 0.0) / 2)
    assert figures["loss/balance"] == 1.25
    assert figures["loss/z"] == 3.0
    assert figures["balance/dead_experts"] == 0.0


def test_dead_experts_are_counted_over_the_steps_since_the_last_line(tmp_path):
    dead = ((400, 400, 400, 0), (300, 300, 300, 300))
    records = recorder(tmp_path)
    for step in (1, 2, 3):
        records.load(sample(step, dead))
    first = records.step(sample(3, dead), {}, {})
    assert first["balance/dead_experts"] == 0.5, "one of two layers has a dead expert"
    records.load(sample(4))
    assert np.isnan(records.step(sample(4), {}, {})["balance/dead_experts"]), "80 copies are too few to tell"
    records.close()


def test_resumed_records_replace_what_came_after_the_checkpoint(tmp_path):
    records = recorder(tmp_path)
    for step in (1, 2, 3, 4):
        records.load(sample(step))
        records.step(sample(step), {"loss/ce": float(step)}, {"step": 1.0})
    records.close()
    records = recorder(tmp_path, resume_step=2)
    records.load(sample(3))
    records.step(sample(3), {"loss/ce": 33.0}, {"step": 1.0})
    records.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss/ce"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 33.0)]
    assert load_trace(tmp_path / "loads").steps_W.tolist() == [1, 2, 3]


def test_validation_and_events_are_in_the_metrics(tmp_path):
    records = recorder(tmp_path)
    records.validation(5, {"prose": 2.0, "python": 4.0})
    records.event(5, "checkpoint", path="step-00000005")
    records.heatmap(sample(5))
    records.sync()
    records.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "kind": "valid", "step": 5, "bits_per_byte": {"prose": 2.0, "python": 4.0}, "mean": 3.0,
    }  # fmt: skip
    assert lines[1] == {"kind": "checkpoint", "step": 5, "path": "step-00000005"}
