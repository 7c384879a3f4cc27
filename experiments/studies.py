"""Studies: many small training runs side by side, and what they say together.

Under `counterpoise bench training`. A run is a process of one rank with a folder, named by a hash of its
settings and of the code: a study that was stopped goes on where it was, runs that two studies share are
trained once, and after a change of code all are trained anew.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.config import find_file

Floats = NDArray[np.float64]

_DRAWS = 10_000
_ROOT = Path(__file__).resolve().parents[1]
# whose code makes a training's result, but the benchmarks', which only read it
_PACKAGES, _READERS = ("balancer", "experiments", "moe", "routing"), "bench*.py"


class Run(NamedTuple):
    """One training: of a case, by a contender, with a seed; overrides are those of `--set`."""

    case: str
    contender: str
    seed: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """What a run left: bits_per_byte at its end (mean over the domains), and by logged step [W] the dead
    experts (mean over the layers), MaxVio and entropy; floor: MaxVio of counting noise; alarms: (step, state)
    of each layer's alarms, in order."""

    bits_per_byte: float
    step_W: Floats
    dead_W: Floats
    violation_W: Floats
    entropy_W: Floats
    floor: float
    alarms: tuple[tuple[int, str], ...]

    @property
    def excess(self) -> float:
        """MaxVio over its floor, mean over the last third of the run."""
        return float(self.violation_W[-max(1, len(self.violation_W) // 3) :].mean()) - self.floor

    @property
    def dead(self) -> float:
        """Dead experts a layer, mean over the last third of the run."""
        return float(self.dead_W[-max(1, len(self.dead_W) // 3) :].mean())


def train_all(
    runs: Sequence[Run], config: str, folder: Path, *, workers: int, say: Callable[[str], None] = print
) -> dict[Run, Result]:
    """Train the runs that the folder does not hold yet, `workers` at a time; every run's result.

    say: gets a line a run, and one on those that are there already. Raises RuntimeError where a run fails,
    with the end of what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Run, Result] = {}
    begun, done = time.monotonic(), 0
    missing = [run for run in runs if not _is_complete(folder / _name(run, config))]
    if len(missing) < len(runs):
        say(f"{len(runs) - len(missing)} of {len(runs)} runs are in {folder} already, of the same code")
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(_train, run, config, folder): run for run in missing}
        for job in as_completed(jobs):
            job.result()
            done += 1
            left_s = (time.monotonic() - begun) / done * (len(missing) - done)
            run = jobs[job]
            say(f"{done}/{len(missing)} {run.case}, {run.contender}, seed {run.seed}; {left_s:.0f} s left")
    for run in runs:
        found[run] = read_result(folder / _name(run, config))
    return found


def _name(run: Run, config: str) -> str:
    text = find_file(config).read_text()  # a changed config is another run
    settings = json.dumps([text, run.seed, sorted(run.overrides), code_digest(_ROOT)])
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


@lru_cache
def code_digest(root: Path) -> str:
    """Return a digest of the files of code below root that a training depends on, as they are at first."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if not path.match(_READERS):
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _is_complete(path: Path) -> bool:
    return (path / "complete").is_file()


def _train(run: Run, config: str, folder: Path) -> None:
    path = folder / _name(run, config)
    shutil.rmtree(path, ignore_errors=True)  # what was stopped half-way
    seeds = (f"data.seed={run.seed}", f"train.seed={run.seed}")
    command = [sys.executable, "-m", "experiments.cli", "train", "--ranks", "1", "--config", config]
    for override in (*run.overrides, *seeds):
        command += ["--set", override]
    command += ["--runs-dir", str(folder), "--name", path.name]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=_ROOT)
    if ended.returncode:
        said = "\n".join((ended.stdout + ended.stderr).splitlines()[-8:])
        raise RuntimeError(
            f"{run.case}, {run.contender}, seed {run.seed} ended with {ended.returncode}:\n{said}"
        )
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    (path / "complete").touch()


def read_result(path: Path) -> Result:
    """The result of a run out of its metrics.jsonl. Raises ValueError where it holds no validation."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    valid = [line["mean"] for line in lines if line["kind"] == "valid"]
    if not steps or not valid:
        raise ValueError(f"{path}: the run was not validated; it has {len(steps)} logged steps")

    def series(name: str) -> Floats:
        return np.array([line[name] for line in steps], dtype=np.float64)

    grave = ("COLLAPSING", "COLLAPSED")
    return Result(
        bits_per_byte=float(valid[-1]),
        step_W=series("step"),
        dead_W=series("balance/dead_experts"),
        violation_W=series("balance/max_violation"),
        entropy_W=series("balance/entropy"),
        floor=float(steps[-1]["balance/max_violation_floor"]),
        alarms=tuple(
            (line["step"], line["state"])
            for line in lines
            if line["kind"] == "alarm" and line["state"] in grave
        ),
    )


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float]:
    """Mean difference over the seeds that both have, with its 95 % bootstrap interval (resampled by seed).

    Raises ValueError where no seed is shared.

    >>> paired({1: 1.0, 2: 2.0}, {1: 0.5, 2: 1.5})
    (0.5, 0.5, 0.5)
    """
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        raise ValueError(f"seeds {sorted(ours)} and {sorted(theirs)} have none in common: nothing is paired")
    return interval(np.array([ours[seed] - theirs[seed] for seed in shared]))


def interval(value_N: Floats) -> tuple[float, float, float]:
    """Mean with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = value_N[rng.integers(0, len(value_N), (_DRAWS, len(value_N)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(value_N.mean()), float(low), float(high)
