"""kill -9 of a rank at any moment, of training or of saving: the run goes on from its last complete
checkpoint, and ends where one that nobody killed ends."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from balancer import load_trace
from experiments.checkpoint import verify

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]


def start(folder: Path, env: dict[str, str], *arguments: object) -> "subprocess.Popen[str]":
    """`counterpoise train` with a mark in its environment, by which its ranks are found."""
    command = [sys.executable, "-m", "experiments.cli", "train", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**env, "MARK": str(folder)}, **pipes)


def pid_of_rank(folder: Path, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if f"MARK={folder}".encode() in variables and f"RANK={rank}".encode() in variables:
                return int(path.parent.name)
    raise AssertionError(f"rank {rank} is not there")


def complete(run: Path) -> list[int]:
    """Steps of the checkpoints that have their name."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*[0-9]"))


def wait_for_partial(run: Path, process: "subprocess.Popen[str]") -> None:
    while process.poll() is None and not list((run / "checkpoints").glob("*.partial")):
        time.sleep(0.0005)


def kill_at_random(folder: Path, process: "subprocess.Popen[str]", dice: random.Random, saving: bool) -> str:
    """Kill one rank, in the middle of a save or wherever it is; all that the run had said."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            break
    victim = pid_of_rank(folder, dice.randrange(2))
    if saving:
        wait_for_partial(folder / "runs" / "killed", process)
        time.sleep(dice.uniform(0, 0.01))
    else:
        time.sleep(dice.uniform(0, 0.4))
    os.kill(victim, signal.SIGKILL)
    rest, _ = process.communicate(timeout=90)
    return "".join(lines) + rest


@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 1), pytest.param(20, 2, marks=pytest.mark.slow)], ids=["3", "20"]
)
def test_killed_runs_resume_from_the_last_complete_checkpoint(rank_env, small_toml, tmp_path, kills, seed):
    dice, run = random.Random(seed), tmp_path / "runs" / "killed"
    settings = ["--set", "train.schedule=constant", "--set", "train.valid_every=0"]
    settings += ["--set", "train.checkpoint_every=2", "--set", "train.accumulation=1"]
    arguments = ["--config", small_toml, "--name", "killed", *settings, "--set", "train.steps=100000"]
    halfway, steps = 0, []
    for number in range(kills):
        process = start(tmp_path, rank_env, *arguments)
        said = kill_at_random(tmp_path, process, dice, saving=number % 2 == 0)
        if number:
            assert (f"after step {steps[-1]}" if steps else "starting from step 0") in said, said
        steps = complete(run)
        for step in steps:
            assert verify(run / "checkpoints" / f"step-{step:08d}").step == step, "named means complete"
        halfway += bool(list((run / "checkpoints").glob("*.partial")))
        arguments = ["--resume", "killed"]
    assert halfway >= 1, "no kill hit a save: the test is not what it says"
    last = (steps[-1] if steps else 0) + 3  # a slow machine may have completed none
    for more in (["--resume", "killed"], ["--config", small_toml, "--name", "whole", *settings]):
        output, _ = start(tmp_path, rank_env, *more, "--set", f"train.steps={last}").communicate(timeout=300)
        assert f"done: {last} steps" in output, output
        begun = f"resuming runs/killed after step {steps[-1]}" if steps else "starting from step 0"
        assert "killed" not in more or begun in output, output
    assert_same(run, tmp_path / "runs" / "whole")


def assert_same(run: Path, whole: Path) -> None:
    """Losses, load trace and weights of every step, to the bit."""
    assert losses(run) == losses(whole)
    ours, theirs = load_trace(run / "loads"), load_trace(whole / "loads")
    assert ours.steps_W.tolist() == theirs.steps_W.tolist()
    np.testing.assert_array_equal(ours.tokens_per_expert_WLE, theirs.tokens_per_expert_WLE)
    ours, theirs = weights(run), weights(whole)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def losses(run: Path) -> dict[int, tuple[float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: (r["loss/total"], r["optim/grad_norm"]) for r in records if r["kind"] == "train"}


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / f"step-{complete(run)[-1]:08d}" / "model.safetensors")
