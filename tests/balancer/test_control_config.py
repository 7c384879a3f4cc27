"""Control settings: every mistake is refused with its remedy, and a law comes out as it was asked for."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from balancer.bias import LAWS
from balancer.bias_record import Actuated, Measurement
from balancer.control_config import ControlConfig, build_law, monitor_config, step_name

ROOT = Path(__file__).resolve().parents[2]


def measurement(counts=((30, 10, 10, 10),)):
    counts_LE = np.array(counts, dtype=np.float64)
    return Measurement(step=1, counts_LE=counts_LE, num_tokens=int(counts_LE[0].sum()), top_k=1)


def change(config: ControlConfig):
    law, zeros_LE = build_law(config), np.zeros((1, 4))
    assert law is not None
    return law.update(measurement(), Actuated(zeros_LE, zeros_LE, zeros_LE), law.init(1, 4, 1))[0]


def test_the_default_watches_and_touches_nothing():
    config = ControlConfig()
    assert (config.on, config.acts) == (True, False)
    assert build_law(config) is None
    assert not ControlConfig(monitor=False).on
    assert ControlConfig(bias="sign", monitor=False).acts
    assert ControlConfig(supervisor=True).acts


@pytest.mark.parametrize("name", LAWS)
def test_every_law_is_built_by_its_name_and_takes_a_step_where_it_has_one(name):
    law = build_law(ControlConfig(bias=name))
    assert law is not None
    assert law.name == name
    if step_name(name) is None:
        with pytest.raises(ValueError, match=f"bias_step=0.1 has no effect: the law {name} has neither"):
            ControlConfig(bias=name, bias_step=0.1)
    else:
        assert build_law(ControlConfig(bias=name, bias_step=0.1)) is not None


def test_the_help_of_the_step_names_every_law_that_has_one_under_its_unit():
    (help_,) = [entry.metadata["help"] for entry in fields(ControlConfig) if entry.name == "bias_step"]
    in_score, of_the_way = help_.split("share of the way")
    for name in LAWS:
        named = [part for part in (in_score, of_the_way) if re.search(rf"\b{name}\b(?!-)", part)]
        assert len(named) == (step_name(name) is not None), name
    # the law's own, which is in range, as its builder has it
    for name, own in (("sign", "1e-3"), ("smebu", "5e-4"), ("longcat", "0.1"), ("quantile-damped", "0.3")):
        assert re.search(rf"\b{name}\b[^;]* {own}", help_), name
        assert inspect.signature(LAWS[name]).parameters["step"].default == float(own)


def test_the_step_and_the_wrappers_reach_the_law():
    np.testing.assert_allclose(change(ControlConfig(bias="sign", bias_step=0.02))[0, 0], -0.02)
    limited = change(ControlConfig(bias="sign", bias_step=0.02, rate_limit=0.005))
    np.testing.assert_allclose(limited[0, 0], -0.005)
    # 30 of 60 copies against 15: an error of 4.5 sd of the noise sqrt(r (1 - r) / T)
    assert change(ControlConfig(bias="sign", dead_band=1.0)).any()
    assert not change(ControlConfig(bias="sign", dead_band=6.0)).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bias": "sing"}, ["control.bias='sing'", "unknown", "sign", "off"]),
        ({"bias_step": 0.1}, ["control.bias_step=0.1 has no effect", "choose a law"]),
        ({"delay_steps": 1}, ["control.delay_steps=1 has no effect"]),
        ({"dead_band": 1.0}, ["control.dead_band=1.0 has no effect"]),
        ({"supervisor": True, "monitor": False}, ["control.supervisor=true", "turn the monitor on"]),
        ({"bias": "sign", "bias_step": -1.0}, ["control.bias_step=-1.0 must be 0 to"]),
        ({"bias": "sign", "bias_step": float("nan")}, ["control.bias_step=nan"]),
        (
            {"bias": "identified", "bias_step": 3.0},
            ["control.bias_step=3.0: gain=3.0 must lie in (0, 2.000)"],
        ),
        ({"bias": "identified", "bias_step": 0.7, "delay_steps": 2}, ["control.bias_step=0.7", "(0, 0.618)"]),
        ({"bias": "laplacian", "bias_step": 2.0}, ["control.bias_step=2.0: ", "must lie in (0, 2.000)"]),
        ({"bias": "quantile-damped", "bias_step": 1.5}, ["control.bias_step=1.5: ", "at most 1, a share"]),
        ({"bias": "sign", "delay_steps": -1}, ["control.delay_steps=-1"]),
        ({"bias": "sign", "delay_steps": 7}, ["control.trim_memory_steps=50", "use 75 or more"]),
        ({"stale_after_steps": 0}, ["control.stale_after_steps=0 must be 1"]),
        ({"trim_rate": -0.1}, ["control.trim_rate=-0.1"]),
        ({"release_steps": 0}, ["control.release_steps=0"]),
        ({"override_gain": 1.5}, ["control.override_gain=1.5 must be 0 to 1"]),
        ({"override_balance_loss": 0.5}, ["control.override_balance_loss=0.5 is out of", "0.1"]),
        ({"balance_loss_start": 1e-5}, ["control.balance_loss_start=1e-05 is out of"]),
        ({"balance_loss_least": 0.0}, ["control.balance_loss_least=0.0"]),
        ({"balance_loss_least": 0.2}, ["is out of control.balance_loss_least=0.2"]),
        ({"rollback_lr_factor": 1.0}, ["control.rollback_lr_factor=1.0"]),
        ({"most_rollbacks": -1}, ["control.most_rollbacks=-1"]),
    ],
)
def test_a_bad_setting_is_refused_with_what_would_work(settings, words):
    with pytest.raises(ValueError) as caught:
        ControlConfig(**settings)
    for word in words:
        assert word in str(caught.value)


def test_settings_are_checked_without_loading_a_compiler():
    code = (
        "import sys; from balancer import ControlConfig; from balancer.bias import LAWS; "
        "[ControlConfig(bias=name) for name in LAWS]; "
        "print(sorted({'numba', 'scipy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_monitor_gets_its_age_limit():
    assert monitor_config(ControlConfig(stale_after_steps=7)).stale_after_steps == 7
