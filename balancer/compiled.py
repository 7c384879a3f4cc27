"""Compiled: a file of kernels turned into machine code by numba, which is imported here and on use.

Under `balancer/split.py` and `balancer/forecast.py`. The kernels' own file stays plain Python.
"""

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any


def compile_file(module: ModuleType, signatures: Mapping[str, Any], fastmath: Any = False) -> dict[str, Any]:
    """Return the entries of one file by name, compiled and kept on disk beside it.

    signatures: entry -> numba signature (compiled now), or None (compiled for the types of its first call).
    fastmath: numba's option; {"reassoc", "nsz"} lets sums become vector instructions. They and their
    helpers are copies: the module's own functions stay plain.
    """
    from numba import njit

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    inner: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    names = dict(vars(module))
    for name, plain in vars(module).items():
        if isinstance(plain, FunctionType):
            copy = FunctionType(plain.__code__, names, name)
            names[name] = copy if name in signatures else njit(**options, **inner)(copy)
    return {
        name: njit(cache=True, **options)(names[name])
        if types is None
        else njit(types, cache=True, **options)(names[name])
        for name, types in signatures.items()
    }
