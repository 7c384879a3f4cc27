"""Kernels: what numba compiles for this package on CPU. The only user of numba here.

The functions stand as plain loops over arrays in permute_kernels.py, dedup_kernels.py, activation_kernels.py
and meter_kernels.py. Each has a torch twin beside its caller, for other devices and for types that it lacks.
"""

import threading
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moe import activation_kernels, dedup_kernels, meter_kernels, permute_kernels

_COMPILING = threading.Lock()


def kernels() -> SimpleNamespace:
    """The kernels, compiled for the types that they are called with, and kept on disk."""
    with _COMPILING:  # ranks may be threads: the helpers must be compiled once
        return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> SimpleNamespace:
    from numba import njit

    # "contract" allows fused multiply-add, "arcp" division by multiplication; reassociation makes dot
    # products vectors. Nothing here lets a NaN or an infinity go missing.
    fast = {"contract", "reassoc", "nsz", "arcp"}
    options: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": fast, "error_model": "numpy"}
    compiled: dict[str, Any] = {}
    for module in (permute_kernels, dedup_kernels, activation_kernels, meter_kernels):
        for name in module.HELPERS:
            setattr(module, name, njit(inline="always", **options)(getattr(module, name)))
        compiled |= {name: njit(**options)(getattr(module, name)) for name in module.KERNELS}
    return SimpleNamespace(**compiled)


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether the kernels over rows take this tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64, torch.bfloat16)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as a kernel takes it: bfloat16 as uint16."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
