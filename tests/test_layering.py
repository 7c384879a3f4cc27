"""Who may import whom: the rules of the packages as data, held over the syntax tree of every file.

    routing      -> torch
    moe          -> routing, torch, numpy, safetensors; deepspeed in zero.py only, numba in kernels.py only
    balancer     -> numpy; more inside functions, file by file; adapters: the framework that they adapt to
    experiments  -> everything; nobody else imports experiments, and nothing imports tests

The standard library is free to all. An import counts as made on use inside a function or under TYPE_CHECKING.
"""

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """always: top-level names that every file of a package may import anywhere. in_file: more for one file.
    on_use: more for one file, inside functions only."""

    always: frozenset[str]
    in_file: dict[str, frozenset[str]] = field(default_factory=dict)
    on_use: dict[str, frozenset[str]] = field(default_factory=dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# typing_extensions is the typing module of newer Pythons; torch requires it, so it costs nothing beside torch
RULES = {
    "routing": Rule(always=_names("routing torch typing_extensions")),
    "moe": Rule(
        always=_names("moe routing torch numpy safetensors typing_extensions"),
        in_file={
            "moe/zero.py": _names("deepspeed"),
            "moe/kernels.py": _names("numba"),
            # finds the caller's function again in a fresh process, by the name of its module
            "moe/testing.py": _names("<module>"),
        },
    ),
    "balancer": Rule(
        always=_names("balancer numpy"),
        on_use={
            "balancer/compiled.py": _names("numba"),
            "balancer/split.py": _names("numba"),
            "balancer/kernels.py": _names("numba"),
            "balancer/forecast.py": _names("numba"),
            "balancer/plant.py": _names("numba"),
            "balancer/bound.py": _names("scipy"),
            "balancer/moves.py": _names("scipy"),
            "balancer/forecast_stats.py": _names("statsmodels"),
            "balancer/dashboard.py": _names("tensorboard matplotlib PIL"),
            "balancer/heatmap.py": _names("matplotlib"),
            "balancer/adapters/autoep.py": _names("torch deepspeed"),
            "balancer/adapters/deepspeed_moe.py": _names("torch deepspeed"),
            "balancer/adapters/transformers.py": _names("torch transformers"),
            "balancer/adapters/megatron.py": _names("torch megatron"),
            "balancer/adapters/vllm.py": _names("torch vllm"),
            "balancer/adapters/sglang.py": _names("torch sglang"),
            "balancer/adapters/eplb.py": _names("torch eplb"),
        },
    ),
}
# experiments may import whatever it likes, but this; so may all others by the rules above
NOBODY_IMPORTS = "tests"


class _Imports(ast.NodeVisitor):
    """Collects (line, top-level name, on use?) of every import of a file of one package."""

    def __init__(self, package: str) -> None:
        self.package, self.depth = package, 0
        self.found: list[tuple[int, str, bool]] = []

    def _add(self, node: ast.AST, name: str) -> None:
        self.found.append((node.lineno, name.partition(".")[0], self.depth > 0))

    def _visit_deferred(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_deferred

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.depth += 1
            for child in node.body:
                self.visit(child)
            self.depth -= 1
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add(node, self.package if node.level else str(node.module))

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
                name = name.values[0]  # f"package.{module}": the package stands there
            constant = isinstance(name, ast.Constant)
            self._add(node, str(name.value) if constant else f"<{ast.unparse(name)}>")
        self.generic_visit(node)


def violations(path: str, source: str) -> list[str]:
    """Return what a file imports against the rules. path: relative to the root, with forward slashes."""
    package = path.partition("/")[0]
    collector = _Imports(package)
    collector.visit(ast.parse(source))
    rule = RULES.get(package)
    result = []
    for line, name, on_use in collector.found:
        if rule is None:
            allowed = name != NOBODY_IMPORTS
        else:
            names = rule.always | rule.in_file.get(path, frozenset())
            names |= rule.on_use.get(path, frozenset()) if on_use else frozenset()
            allowed = name in names or name in sys.stdlib_module_names
        if not allowed:
            result.append(f"{path}:{line} imports {name} {'on use' if on_use else 'at module level'}")
    return result


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", [*RULES, "experiments"])
def test_every_file_of_a_package_keeps_the_import_rules(package):
    broken = []
    for file in _files(package):
        broken += violations(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", list(RULES))
def test_the_rules_look_at_something(package):
    assert _files(package)


def test_tests_hold_no_init_file_that_would_shadow_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("path", "source", "imported"),
    [
        ("routing/gate.py", "import numpy", "numpy"),
        ("routing/gate.py", "from moe.layer import MoELayer", "moe"),
        ("routing/gate.py", "def f():\n    import balancer", "balancer"),
        ("moe/layer.py", "import deepspeed.comm as dist", "deepspeed"),
        ("moe/layer.py", "def f():\n    from deepspeed import comm", "deepspeed"),
        ("moe/zero.py", "import numba", "numba"),
        ("moe/afd/zero.py", "import deepspeed", "deepspeed"),
        ("moe/kernels.py", "import deepspeed", "deepspeed"),
        ("moe/permute.py", "import numba", "numba"),
        ("moe/meter.py", "import numba", "numba"),
        ("moe/meter.py", "import balancer.metrics", "balancer"),
        ("moe/meter.py", "from experiments import train", "experiments"),
        ("moe/meter.py", "import importlib\nimportlib.import_module('balancer')", "balancer"),
        ("moe/meter.py", "m = __import__(name)", "<name>"),
        ("moe/testing.py", "m = import_module(other)", "<other>"),
        ("moe/meter.py", "m = import_module(f'balancer.{name}')", "balancer"),
        ("moe/meter.py", "m = import_module(f'{name}')", "<f'{name}'>"),
        ("balancer/loop.py", "from typing_extensions import override", "typing_extensions"),
        ("balancer/loop.py", "import torch", "torch"),
        ("balancer/loop.py", "def f():\n    import torch", "torch"),
        ("balancer/split.py", "import numba", "numba"),
        ("balancer/split.py", "try:\n    import numba\nexcept ImportError:\n    numba = None", "numba"),
        ("balancer/split.py", "class A:\n    import numba", "numba"),
        ("balancer/split.py", "if x:\n    import numba", "numba"),
        ("balancer/split.py", "def f():\n    import scipy", "scipy"),
        ("balancer/metrics.py", "def f():\n    import matplotlib", "matplotlib"),
        ("balancer/dashboard.py", "from matplotlib.figure import Figure", "matplotlib"),
        ("balancer/dashboard.py", "def f():\n    import torch.utils.tensorboard", "torch"),
        ("balancer/adapters/vllm.py", "import vllm", "vllm"),
        ("balancer/adapters/vllm.py", "def f():\n    import sglang", "sglang"),
        ("balancer/loop.py", "import moe", "moe"),
        ("balancer/loop.py", "if TYPE_CHECKING:\n    import moe", "moe"),
        ("experiments/train.py", "from tests import conftest", "tests"),
    ],
)
def test_a_forbidden_import_is_found(path, source, imported):
    (found,) = violations(path, source)
    assert f" imports {imported} " in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("routing/gate.py", "import math\nimport torch.nn as nn\nfrom routing.record import Routing"),
        (
            "moe/layer.py",
            "import numpy\nfrom torch import nn\nfrom . import permute\nfrom routing import Router",
        ),
        ("moe/zero.py", "import deepspeed"),
        ("moe/__init__.py", "def f():\n    return import_module(f'moe.{name}')"),
        ("moe/kernels.py", "def f():\n    import numba"),
        ("balancer/split.py", "import numpy as np\ndef f():\n    import numba"),
        ("balancer/split.py", "if TYPE_CHECKING:\n    import numba\nelse:\n    import numpy"),
        ("balancer/dashboard.py", "class A:\n    def f(self):\n        from tensorboard.compat import proto"),
        ("balancer/adapters/vllm.py", "async def f():\n    import vllm, torch\n    from .. import plan"),
        ("experiments/train.py", "import deepspeed, moe, balancer, routing, torch, tqdm"),
    ],
)
def test_an_allowed_import_passes(path, source):
    assert violations(path, source) == []
