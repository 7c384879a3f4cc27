"""The control in training: every rank alike, bit by bit on resuming, and back to an older checkpoint."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from balancer import bias_identified, bias_slopes, kernels, load_trace
from balancer.bias import LAWS
from balancer.control_config import ControlConfig
from experiments.config import load_config
from experiments.control import _compile, meter_settings
from experiments.state_tree import unpack
from moe.testing import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]

ON = ("control.bias=identified", "control.supervisor=true", "control.trim_memory_steps=5")
COLLAPSE = {**dict.fromkeys(range(5, 10), "COLLAPSING"), 10: "COLLAPSED"}


def train_here(folder, toml, name, *sets, resume=False, each_step=None):
    """A run in this process, as one of its ranks; returns what is left of its control.

    each_step(trainer, step): called after every step, before it is recorded.
    """
    from experiments import session
    from experiments.arguments import train_parser
    from experiments.train import train

    kept = {}
    build, record_step = session.build, session.record_step

    def building(*args):
        kept["trainer"] = build(*args)
        kept["compiled"] = kernels._bias_compiled.cache_info().currsize
        return kept["trainer"]

    def recording(trainer, outcome, progress):
        if each_step is not None:
            each_step(trainer, outcome.sample.step)
        record_step(trainer, outcome, progress)

    session.build, session.record_step = building, recording
    try:
        arguments = ["--runs-dir", str(folder), *(["--resume", name] if resume else ["--name", name])]
        arguments += [] if resume else ["--config", str(toml)]
        arguments += [part for text in sets for part in ("--set", text)]
        assert train(train_parser().parse_args(arguments)) == 0
    finally:
        session.build, session.record_step = build, record_step
    return router_settings(kept["trainer"]) | {"compiled": kept["compiled"]}


def router_settings(trainer):
    control = trainer.control
    layers = control._layers if control is not None else []
    supervisor = None if control is None else control.loop.supervisor
    return {
        "bias": [layer.router.bias.bias_E.tolist() for layer in layers],
        "dtypes": [str(layer.router.bias.bias_E.dtype) for layer in layers],
        "coefficients": [layer.balance_loss for layer in layers],
        "factor": trainer.router_lr_factor,
        "rollbacks": None if supervisor is None else supervisor.state.rollbacks_R3.tolist(),
        "checkpoints": list(trainer.checkpoint_steps),
    }


def pretend(trainer, verdicts):
    """Let the monitor give these verdicts of layer 1, by step."""
    monitor = trainer.control.loop.monitor
    update = monitor.update

    def updated(sample, *rest):
        found = update(sample, *rest)
        state = verdicts.get(sample["step"], "HEALTHY")
        return [
            dataclasses.replace(verdict, state=state if verdict.layer == 1 else "HEALTHY")
            for verdict in found
        ]

    monitor.update = updated


def everything(trainer):
    """Weights, moments and buffers of this rank, as numbers that would differ in the last bit."""
    from moe import zero_state

    state = zero_state.optimizer_state(trainer.engine)
    weights = trainer.model.named_parameters()
    tensors = {f"weight {name}": getattr(value, "ds_tensor", value) for name, value in weights}
    tensors |= {f"buffer {name}": value for name, value in trainer.model.named_buffers()}
    for number, piece in enumerate(zero_state.pieces(trainer.engine)):
        for kind, value in {"master": piece.master, **piece.moments(state)}.items():
            tensors[f"{kind} {number}"] = value
    return {name: value.detach().float().numpy().copy() for name, value in tensors.items()}


def rolled_back(folder, toml, *sets):
    """A run in which layer 1 collapses, so that step 10 goes back to the weights of step 3."""
    seen = {}

    def collapsing(trainer, step):
        if step == 1:
            pretend(trainer, COLLAPSE)
        if step in (3, 9, 10):
            seen[step] = everything(trainer)
            seen["there"] = trainer.checkpoint_steps
            seen["steps"] = trainer.engine.global_steps

    saving = ("train.checkpoint_every=3", "train.keep_checkpoints=1", "train.export=false")
    return train_here(folder, toml, "back", *sets, *saving, each_step=collapsing) | seen


def all_runs(rank, world, folder, toml):
    """One process a rank for all runs: what takes long is to import the engine, and to read the data."""
    from experiments import session

    corpus = session.read_corpus(load_config(toml))  # the same for all
    session.read_corpus = lambda config: corpus
    found = {}
    found["whole"] = train_here(folder, toml, "whole", *ON)
    train_here(folder, toml, "parts", *ON, "train.steps=6")
    found["parts"] = train_here(folder, toml, "parts", "train.steps=12", resume=True)

    found["back"] = rolled_back(folder, toml, *ON)

    def meddling(trainer, step):
        if step == 2 and rank == 1:
            trainer.control._layers[0].router.bias.bias_E[0] += 1e-6

    try:
        train_here(folder, toml, "meddled", *ON, each_step=meddling)
    except RuntimeError as error:
        found["meddled"] = str(error)
    return found


def twelve_steps(folder, small_toml):
    """The small configuration for 12 steps, quicker."""
    toml = folder / "small.toml"
    text = small_toml.read_text().replace("steps = 6", 'steps = 12\nschedule = "constant"', 1)
    text = text.replace("valid_every = 3", "valid_every = 0").replace(
        "heatmap_every = 3", "heatmap_every = 0"
    )
    toml.write_text(text.replace("checkpoint_every = 3", "checkpoint_every = 6"))
    return toml


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_toml):
    """(what each rank says of the runs, the folder of the runs)"""
    folder = tmp_path_factory.mktemp("control")
    toml = twelve_steps(folder, small_toml)
    return run_ranks(all_runs, 2, str(folder), str(toml), env={"DS_ACCELERATOR": "cpu"}), folder


def records(run: Path, kind: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


# ---- every rank alike -----------------------------------------------------------------------------------


def test_bias_and_coefficients_are_the_same_on_all_ranks_and_for_every_layer(runs):
    (first, second), _ = runs
    assert first["whole"] == second["whole"]
    bias_LE = np.array(first["whole"]["bias"])
    assert bias_LE.shape == (2, 4), "the first block has no experts, and both others have a bias"
    assert (np.abs(bias_LE).max(axis=1) > 0).all()
    np.testing.assert_allclose(bias_LE.mean(axis=1), 0, atol=1e-8)
    assert first["whole"]["dtypes"] == ["torch.float32"] * 2
    assert first["whole"]["compiled"] == 1, "before the first step"


def test_the_bias_is_updated_once_a_step_under_accumulation(runs):
    _, folder = runs
    state = unpacked(folder / "whole", 12)
    assert state["version"] == 12, "two micro-batches a step"
    assert state["loop"]["bias"]["step"] == 12
    assert len(records(folder / "whole", "train")) == 12


def test_a_rank_whose_router_was_set_otherwise_ends_the_run_at_the_next_step(runs):
    ranks, _ = runs
    for said in ranks:
        assert (
            "step 3: bias, balance loss or learning rate of the routers of rank 1 are not those of rank 0"
            in (said["meddled"])
        )


# ---- state ----------------------------------------------------------------------------------------------


def unpacked(run: Path, step: int) -> dict:
    path = checkpoint_of(run, step)
    packed = json.loads((path / "run.json").read_text())["loops"]["control"]
    return unpack(packed, load_file(path / "loops.safetensors"))


def assert_same(mine, theirs, where="state"):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for name in mine:
            assert_same(mine[name], theirs[name], f"{where}.{name}")
    elif isinstance(mine, list):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        np.testing.assert_array_equal(mine, theirs, err_msg=where)


def test_a_resumed_run_equals_one_that_never_stopped_to_the_bit(runs):
    (said, _), folder = runs
    assert said["parts"] == said["whole"]
    assert_same(unpacked(folder / "parts", 12), unpacked(folder / "whole", 12))
    for name in ("model.safetensors", "buffers.safetensors"):
        mine, theirs = (load_file(checkpoint_of(folder / run, 12) / name) for run in ("parts", "whole"))
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key
    losses = [
        [(r["step"], r["loss/ce"]) for r in records(folder / run, "train")] for run in ("parts", "whole")
    ]
    assert losses[0] == losses[1]


# ---- rollback -------------------------------------------------------------------------------------------


def assert_went_back(said):
    before, collapsed, after = (said[step] for step in (3, 9, 10))
    assert any((collapsed[name] != value).any() for name, value in before.items())
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert said["steps"] == 10, "the engine's steps go on"
    assert said["factor"] == 0.5
    assert said["rollbacks"][0] == [5, 9, 3]
    assert said["there"] == (3, 9), "the one that is needed and the newest, though only one is to be kept"


def rolled_back_rank(rank, world, folder, toml, sets):
    return rolled_back(folder, toml, *ON, *sets)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ("train.deepspeed=zero0.json",),
        ("train.deepspeed=zero2.json",),
        ("train.deepspeed=zero3.json",),
        ("train.deepspeed=zero3.json", "train.ep_size=1"),
        ("model.dtype=bfloat16",),
    ],
    ids=["zero0", "zero2", "zero3", "zero3-ep1", "bfloat16"],
)
def test_a_rollback_works_at_every_stage(tmp_path, small_toml, sets):
    toml = twelve_steps(tmp_path, small_toml)
    found = run_ranks(rolled_back_rank, 2, str(tmp_path), str(toml), sets, env={"DS_ACCELERATOR": "cpu"})
    for said in found:
        assert_went_back(said)
        assert said["dtypes"] == ["torch.float32"] * 2
    assert found[0]["bias"] == found[1]["bias"]


def test_a_collapse_takes_weights_moments_and_buffers_from_before_it(runs):
    ranks, folder = runs
    for said in ranks:
        assert_went_back(said["back"])
    (action,) = [r for r in records(folder / "back", "control") if r["action"] == "rollback"]
    assert (action["step"], action["values"]) == (10, [0.5])
    assert "layer 1 COLLAPSED, the first alarm in step 5: back to the weights of step 3" in action["message"]


def test_after_a_rollback_nothing_is_done_or_written_twice(runs):
    (said, _), folder = runs
    assert load_trace(folder / "back" / "loads").steps_W.tolist() == list(range(1, 13))
    assert [r["step"] for r in records(folder / "back", "train")] == list(range(1, 13))
    assert [r["step"] for r in records(folder / "back", "checkpoint")] == [3, 6, 9, 12]
    assert said["back"]["checkpoints"] == [12]
    assert said["back"]["coefficients"][1] == ControlConfig().override_balance_loss
    assert unpacked(folder / "back", 12)["loop"]["supervisor"]["supervisor"]["router_lr_factor"] == 0.5


def toggled(rank, world, folder, toml):
    """A monitor that is turned on, then off, in a run that nothing else controls."""
    length = [f"train.steps={steps}" for steps in (3, 6, 9)]
    without = train_here(folder, toml, "toggled", "control.monitor=false", length[0])
    on = train_here(folder, toml, "toggled", "control.monitor=true", length[1], resume=True)
    off = train_here(folder, toml, "toggled", "control.monitor=false", length[2], resume=True)
    return [len(found["bias"]) for found in (without, on, off)]


@pytest.mark.slow
def test_a_monitor_may_come_and_go_with_a_resume(tmp_path, small_toml):
    toml = twelve_steps(tmp_path, small_toml)
    env = {"DS_ACCELERATOR": "cpu"}
    assert run_ranks(toggled, 2, str(tmp_path), str(toml), env=env) == [[0, 2, 0]] * 2
    tags = [set(record) for record in records(tmp_path / "toggled", "train")]
    assert ["collapse/entropy_least" in found for found in tags] == [False] * 3 + [True] * 3 + [False] * 3


# ---- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), {}),
        (("control.bias=identified",), {"scores_every": 20, "swaps_every": 20, "margins_every": 20}),
        (("control.bias=quantile",), {"scores_every": 20, "margins_every": 1}),
        (("control.bias=laplacian",), {"scores_every": 20, "pairs_every": 20}),
        (("control.bias=bip",), {"scores_every": 20, "sample_every": 1, "sample_tokens": 256}),
        (
            ("control.bias=bip", "train.micro_batch=1", "model.seq_len=64"),
            {"scores_every": 20, "sample_every": 1, "sample_tokens": 64},
        ),
        (("control.bias=sign", "router.score=sigmoid"), {"scores_every": 20, "swap_delta": 0.125}),
    ],
)
def test_the_meter_measures_what_the_law_needs(sets, expected):
    assert meter_settings(load_config("tiny.toml", sets)) == expected


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("control.bias=sign", "router.forced=uniform"), "has no effect: router.forced='uniform'"),
        (("control.bias=sign", "router.top_k=8"), "every token selects all"),
        (("control.supervisor=true", "router.balance_loss=0.5"), "control.balance_loss_most"),
        (
            ("control.supervisor=true", "router.forced=zipf:3"),
            "control.supervisor=true has no effect on the load: router.forced='zipf:3'",
        ),
        (
            ("control.bias=identified", "control.bias_step=3"),
            r"tiny\.toml .*control\.bias_step=3\.0: gain=3\.0",
        ),
        (("control.supervisor=true", "train.schedule=deepspeed"), "control.rollback=false"),
        (("control.bias=sing",), "control.bias='sing' is unknown"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(sets, words):
    with pytest.raises(ValueError, match=words):
        load_config("tiny.toml", sets)


@pytest.mark.parametrize(
    "control",
    [
        ControlConfig(bias="identified"),
        ControlConfig(bias="identified", dead_band=1.0, rate_limit=0.1, delay_steps=1),
    ],
    ids=["plain", "wrapped"],
)
@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (8, 7), (64, 2)])
def test_the_kernels_of_the_law_run_before_the_first_step(monkeypatch, control, experts, top_k):
    compiled, called = kernels.bias_kernels(), set()

    def noted():
        return SimpleNamespace(**{name: noting(name, run) for name, run in vars(compiled).items()})

    def noting(name, run):
        return lambda *given: called.add(name) or run(*given)

    for module in (bias_identified, bias_slopes):
        monkeypatch.setattr(module, "bias_kernels", noted)
    _compile(control, experts, top_k)
    assert called == set(vars(compiled))


@pytest.mark.parametrize("name", LAWS)
def test_every_law_can_be_compiled(name):
    _compile(ControlConfig(bias=name), 4, 2)
