"""Recompute: activation checkpointing that keeps its routes.

    y, aux = checkpoint(block, x, token_mask)

The second forward of a checkpoint must not route again: logits that differ in the last bit may select other
experts, then splits no longer pair up between ranks, and the job hangs. So the layers inside leave their
routes and counts with the first forward, and the second takes them from there: it asks nobody for counts, and
counts nothing.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_CURRENT: ContextVar["RouteMemory | None"] = ContextVar("routes", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What one layer decided. expert_TK: [T, K] int64;  counts_PE: [P, E] int64 on the host;  counts_E:
    [E]."""

    expert_TK: torch.Tensor
    counts_PE: np.ndarray
    counts_E: torch.Tensor


@dataclass(slots=True)
class RouteMemory:
    """The routes of one checkpointed call, in the order of its layers."""

    routes: list[Route] = field(default_factory=list)
    replaying: bool = False
    _next: int = 0

    def begin(self) -> None:
        """A forward starts: the first one records, later ones replay."""
        self.replaying = bool(self.routes)
        self._next = 0

    def replay(self) -> Route:
        """The route of the next layer."""
        route = self.routes[self._next]
        self._next += 1
        return route


def current_memory() -> RouteMemory | None:
    """The memory of the checkpointed call that is running, if any."""
    return _CURRENT.get()


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
    """torch's activation checkpointing of function(*args), with the routes of the first forward kept.

    function: runs MoE layers, returns tensors;  use_reentrant: which of torch's two ways.
    """
    memory = RouteMemory()

    def run(*inputs: Any) -> Any:
        memory.begin()
        token = _CURRENT.set(memory)
        try:
            return function(*inputs)
        finally:
            _CURRENT.reset(token)

    return torch_checkpoint(run, *args, use_reentrant=use_reentrant)
