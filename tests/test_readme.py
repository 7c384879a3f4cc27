"""The README's own commands and code, run as they stand there (trainings shortened, ./lab test excepted)."""

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from experiments.launch import free_port

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
SHORT = (
    "--set train.steps=3 --set train.warmup_steps=1 --set train.micro_batch=1 --set train.valid_sequences=1"
)

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in block.splitlines()]
    return [line for line in lines if line and line != "./lab test"]


def shortened(command: str) -> str:
    """A training without a length of its own gets one of three steps."""
    trains = re.search(r"lab train|experiments/train\.py", command)
    return f"{command} {SHORT}" if trains and "train.steps" not in command else command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's root; runs go into it."""
    path = tmp_path_factory.mktemp("readme")
    (path / "experiments").symlink_to(ROOT / "experiments")
    (path / ".venv" / "bin").mkdir(parents=True)
    for program in ("deepspeed", "torchrun", "tensorboard"):
        (path / ".venv" / "bin" / program).symlink_to(BIN / program)
    if BIN == ROOT / ".venv" / "bin":
        (path / "lab").symlink_to(ROOT / "lab")
    else:  # another environment runs the tests: its counterpoise stands for that of .venv
        (path / "lab").write_text(f'#!/bin/sh\nexec {sys.executable} -m experiments.cli "$@"\n')
        (path / "lab").chmod(0o755)
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def test_every_command_of_the_readme_works(folder):
    """In the order in which they stand, since later ones use the runs of earlier ones."""
    ran = []
    for block in blocks("bash"):
        lines = [shortened(line) for line in commands(block)]
        if any("tensorboard" in line for line in lines):
            check_tensorboard(folder, lines)
            continue
        script = "set -e\n" + "\n".join(lines)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, script + "\n" + done.stdout + done.stderr
        ran += lines
    assert len(ran) >= 8, "the README shows fewer commands than this test was written for"
    assert {path.name for path in (folder / "runs").iterdir()} >= {"tiny-1", "first"}


def check_tensorboard(folder: Path, lines: list[str]) -> None:
    (line,) = lines
    port = free_port()
    process = subprocess.Popen(
        [*line.split(), "--port", str(port)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    assert answer.status == 200
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(f"{line} did not answer")
    finally:
        process.kill()
        process.wait()


def test_every_python_block_of_the_readme_works(folder):
    """After the commands: the blocks read the run that these made."""
    assert (folder / "runs" / "first").is_dir(), "the commands of the README have to run first"
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, block + done.stderr


def test_the_keys_that_may_change_on_resume_are_listed():
    from experiments.config import RESUMABLE

    listed = README[README.index("These settings may change") :].split("\n\n")[0]
    assert set(re.findall(r"`((?:train|control)\.\w+)`", listed)) == RESUMABLE
