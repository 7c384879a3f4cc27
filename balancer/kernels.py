"""Kernels of the planners: the entries of their files, compiled by numba and kept on disk, or as they stand.

Under the bias law, `balancer/even.py` and the planner for the exact split. What the loops do, the kernels'
own files say.
"""

import threading
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

from balancer import bias_kernels as bias_file
from balancer import connect_kernels as connect_file
from balancer import pack_kernels as pack_file
from balancer import search_kernels as search_file
from balancer.compiled import compile_file

_COMPILING = threading.Lock()


def pack_kernels(compiled: bool = True) -> SimpleNamespace:
    """Entries of pack_kernels.py; compiled: False runs the twins, plain Python. Threads may call it."""
    if not compiled:
        return _plain(pack_file)
    with _COMPILING:  # ranks may be threads
        return _pack_compiled()


def search_kernels(compiled: bool = True) -> SimpleNamespace:
    """Entries of search_kernels.py and connect_kernels.py, and the records that they take (Options)."""
    if not compiled:
        return SimpleNamespace(**vars(_plain(search_file)), **vars(_plain(connect_file)))
    with _COMPILING:
        return _search_compiled()


def bias_kernels(compiled: bool = True) -> SimpleNamespace:
    """Entries of bias_kernels.py; compiled: False runs the twins, plain Python. Threads may call it."""
    if not compiled:
        return _plain(bias_file)
    with _COMPILING:
        return _bias_compiled()


def _plain(module: ModuleType) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(module, name) for name in module.ENTRIES})


@lru_cache(maxsize=1)
def _bias_compiled() -> SimpleNamespace:
    from numba import types

    layer, table = (types.Array(types.float64, n, "C", readonly=False) for n in (1, 2))
    real = types.float64
    measure = types.void(table, real, *[table] * 6, *[real] * 3, *[table] * 4)
    act = types.void(
        table, table, layer, table, layer, layer, real, *[table] * 3, *[real] * 3, table, real, table
    )
    found = types.Array(real, 3, "C", readonly=False)
    read = [
        types.void(types.Array(kind, 3, "C", readonly=True), layer, layer, found)
        for kind in (types.int64, real)
    ]
    signatures = {"read_margins": read, "measure_layers": measure, "act_layers": act}
    return SimpleNamespace(**compile_file(bias_file, signatures))


@lru_cache(maxsize=1)
def _pack_compiled() -> SimpleNamespace:
    from numba import types

    def array(dtype: Any, dimensions: int) -> Any:
        return types.Array(dtype, dimensions, "C", readonly=False)

    number, real = types.int64, types.float64
    loads, flags, speed, node = array(real, 3), array(number, 2), array(real, 1), array(number, 1)
    pack = types.void(array(real, 2), flags, array(real, 2), speed, number, number, flags)
    repair = types.void(loads, flags, speed, node, real, real, number, number, flags)
    return SimpleNamespace(**compile_file(pack_file, {"pack_rows": pack, "repair_layers": repair}))


@lru_cache(maxsize=1)
def _search_compiled() -> SimpleNamespace:
    from numba import types

    def array(dtype: Any, dimensions: int) -> Any:
        return types.Array(dtype, dimensions, "C", readonly=False)

    number, real = types.int64, types.float64
    numbers, rows, scenes = array(number, 1), array(number, 2), array(number, 3)
    reals, table = array(real, 1), array(real, 2)
    options = types.NamedTuple(
        (real, real, real, number, number, number, number, number), search_file.Options
    )
    search = types.void(
        rows, rows, scenes, reals, reals, numbers, rows, numbers, reals, reals, options, table
    )
    peak = types.void(rows, scenes, reals, table)
    connect = types.void(table, rows, rows, reals, numbers, rows, numbers)
    searched = compile_file(search_file, {"search_layers": search, "peak_layers": peak})
    return SimpleNamespace(**searched, **compile_file(connect_file, {"connect_layers": connect}))
