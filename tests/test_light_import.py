"""`import balancer` stays light: other programs copy the folder and must not pay for what they do not use."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch",
    "numba",
    "scipy",
    "statsmodels",
    "tensorboard",
    "matplotlib",
    "PIL",
    "deepspeed",
    "moe",
    "routing",
)
CODE = """
import json, sys, time
start = time.perf_counter()
import {module}
spent = time.perf_counter() - start
print(json.dumps([spent, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""


def _import(module: str) -> tuple[float, set[str]]:
    """Return the seconds that an import takes in a fresh interpreter, and the packages loaded after it."""
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    spent, loaded = json.loads(run.stdout)
    return spent, set(loaded)


def test_import_balancer_loads_numpy_and_nothing_heavy_within_half_a_second():
    runs = [_import("balancer") for _ in range(3)]
    for _, loaded in runs:
        assert "numpy" in loaded
        assert not loaded & set(HEAVY)
    # best of three: the first reads from disk, and others may use the cores
    assert min(spent for spent, _ in runs) < 0.5


def test_a_heavy_import_would_be_noticed():
    _, loaded = _import("balancer, matplotlib")
    assert "matplotlib" in loaded & set(HEAVY)


@pytest.mark.parametrize("module", ["experiments.cli", "experiments.train", "moe.config", "moe, routing"])
def test_settings_are_read_without_torch(module):
    """A wrong setting is told at once; torch takes a second and a half."""
    _, loaded = _import(module)
    assert not loaded & {"torch", "numba", "deepspeed", "tensorboard", "matplotlib"}


@pytest.mark.parametrize("package", ["moe", "routing"])
def test_every_public_name_of_a_lazy_package_is_there(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
