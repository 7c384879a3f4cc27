"""What is told of the control: few figures, all drawn, and a line for every alarm and action."""

import json
import re

import numpy as np
import pytest

from balancer import training_layout
from balancer.control_config import ControlConfig
from balancer.loop import BalancerLoop
from balancer.supervisor import Action
from experiments.config import load_config
from experiments.control_records import alarm_lines, scalars, tell
from experiments.records import Recorder
from experiments.rundir import RunDir

CONFIG = ControlConfig(bias="identified", supervisor=True, rollback=False)


def reports(num_layers, steps, growth=0.0, layers=()):
    """Reports of a loop over a load of 16 experts that grows uneven in some layers."""
    rng, now = np.random.default_rng(0), {}
    sizes = {"num_layers": num_layers, "num_experts": 16, "top_k": 2}
    loop = BalancerLoop(CONFIG, lambda: now, lambda bias_LE, plan: 0, balance_loss=0.01, **sizes)
    for step in range(1, steps + 1):
        logits_LE = np.tile(np.linspace(-0.1, 0.1, 16), (num_layers, 1))
        logits_LE[list(layers)] *= np.exp(growth * step)
        share_LE = np.exp(logits_LE) / np.exp(logits_LE).sum(axis=1, keepdims=True)
        counts_LE = np.array([rng.multinomial(2 * 8192, share_E) for share_E in share_LE])
        now.clear()
        now |= {"step": step, "tokens_per_expert_LE": counts_LE, "num_tokens": 8192}
        now |= {"swaps_LE": counts_LE // 8, "wide_swaps_LE": counts_LE // 4, "swap_delta": 0.01}
        now |= {
            "balance_loss_L": np.ones(num_layers),
            "rows_to_rank_LP": counts_LE.reshape(num_layers, 2, -1).sum(2),
        }
        now |= {"logit_rms_L": np.ones(num_layers), "confidence_L": np.full(num_layers, 0.2)}
        yield loop.step()


def test_the_figures_are_few_whatever_the_layers_and_all_are_drawn_once():
    (few,), (many,) = ([list(reports(layers, 3))[-1]] for layers in (2, 20))
    assert scalars(few).keys() == scalars(many).keys()
    assert len(scalars(many)) < 30
    patterns = [p for charts in training_layout().values() for chart in charts.values() for p in chart]
    for tag in scalars(many):
        assert sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1, tag
    assert all(np.isfinite(value) for value in scalars(many).values())


def test_means_and_worst_layers_are_those_of_the_layers():
    (report,) = [list(reports(3, 30, growth=0.05, layers=(1,)))[-1]]
    found = scalars(report)
    assert found["collapse/entropy_least"] == report.figures["entropy"][1] == report.figures["entropy"].min()
    assert found["collapse/excess_mean"] == pytest.approx(report.figures["excess"].mean())
    assert found["control/bias_largest"] == np.abs(report.bias_LE).max()
    assert found["control/balance_loss_mean"] == pytest.approx(report.balance_loss_L.mean())
    states = [verdict.state for verdict in report.verdicts]
    collapsing = sum(state in ("COLLAPSING", "COLLAPSED") for state in states)
    assert found["collapse/layers_collapsing"] == collapsing


def test_parts_that_are_off_have_no_figures():
    sample = {"step": 1, "tokens_per_expert_LE": [[30, 10, 10, 10]]}
    sizes = {"num_layers": 1, "num_experts": 4, "top_k": 1}
    loop = BalancerLoop(ControlConfig(bias="sign", monitor=False), lambda: sample, lambda *_: 0, **sizes)
    assert scalars(loop.step()) == {"control/bias_largest": pytest.approx(1.5e-3)}


def alarming(layers=(1,), num_layers=4):
    return next(report for report in reports(num_layers, 400, growth=0.03, layers=layers) if report.alarms)


def test_an_alarm_is_one_line_with_its_layer_its_verdict_and_its_reason():
    (line,) = alarm_lines(alarming().alarms)
    assert re.match(r"ALARM layer 1 COLLAPSING: entropy 0\.\d+ of 1, was 0\.\d+, and falling", line)


def test_many_layers_in_one_step_are_one_line():
    (verdict,) = alarming().alarms
    (line,) = alarm_lines([verdict, *alarming(layers=(2,)).alarms])
    assert line.startswith("ALARM layer 1, 2 COLLAPSING: entropy")
    assert line.endswith(("(layer 1)", "(layer 2)"))


def test_a_recovery_is_told_without_alarm():
    (verdict,) = alarming().alarms
    well = type(verdict)(0, "HEALTHY", 9, "COLLAPSING", verdict._seen)
    (line,) = alarm_lines([well])
    assert line.startswith("layer 0 HEALTHY, was COLLAPSING")


def test_alarms_and_actions_reach_the_console_the_metrics_and_the_board(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "config.toml").write_text("[train]\n")
    config = load_config("tiny.toml", ["router.num_experts=16"])
    recorder, said = Recorder(RunDir(path=tmp_path), config, 4, 2, None), []
    report = alarming()
    assert any(isinstance(action, Action) for action in report.actions)
    tell(report, recorder, said.append)
    recorder.close()
    assert said[0].startswith(f"step {report.step}: ALARM layer 1 COLLAPSING: ")
    assert said[1].startswith(f"step {report.step}: CONTROL balance_loss: layer 1 COLLAPSING since step ")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "alarm"
    assert (lines[0]["layer"], lines[0]["state"], lines[0]["step"]) == (1, "COLLAPSING", report.step)
    assert lines[0]["reasons"]
    assert (lines[1]["kind"], lines[1]["action"], lines[1]["layers"]) == ("control", "balance_loss", [1])
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0})
    events.Reload()
    (text,) = events.Tensors("alarms")
    assert text.step == report.step
    assert b"ALARM layer 1 COLLAPSING" in text.tensor_proto.string_val[0]


def test_a_quiet_step_tells_nothing(tmp_path):
    (tmp_path / "config.toml").write_text("[train]\n")
    config = load_config("tiny.toml", ["router.num_experts=16"])
    recorder, said = Recorder(RunDir(path=tmp_path), config, 2, 2, None), []
    for report in reports(2, 5):
        tell(report, recorder, said.append)
    recorder.close()
    assert said == []
    assert not (tmp_path / "metrics.jsonl").read_text()
