"""A training run that is as small as one can be, started as a user starts it."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL_TOML = """
[data]
period_steps = 4
[model]
num_layers = 3
num_dense_layers = 1
d_model = 32
num_heads = 2
dense_hidden = 48
seq_len = 24
[moe]
expert_hidden = 40
shared_hidden = 16
[router]
num_experts = 4
balance_scope = "previous"
[train]
steps = 6
micro_batch = 2
accumulation = 2
warmup_steps = 2
log_every = 1
valid_every = 3
valid_sequences = 3
checkpoint_every = 3
heatmap_every = 3
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment() -> dict[str, str]:
    """This process's, without what launchers set, and with the project importable."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    ours = {name: value for name, value in os.environ.items() if name not in launchers}
    return {**ours, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def rank_env() -> dict[str, str]:
    return environment()


@pytest.fixture(scope="session")
def small_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(SMALL_TOML)
    return path


@pytest.fixture(scope="session")
def counterpoise() -> Run:
    """counterpoise(*arguments, cwd=...): run the command to its end, its output as text."""

    def run(*arguments: object, cwd: Path, timeout_s: float = 180.0) -> "subprocess.CompletedProcess[str]":
        command: Sequence[str] = [sys.executable, "-m", "experiments.cli", *map(str, arguments)]
        env = environment()
        return subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, counterpoise: Run, small_toml: Path) -> Path:
    """The folder of a run of 6 steps that nobody stopped."""
    folder = tmp_path_factory.mktemp("finished")
    done = counterpoise("train", "--config", small_toml, "--name", "whole", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "whole"
