"""Recompute: activation checkpointing that keeps its routes.

    y, aux = checkpoint(block, x, token_mask)

The second forward of a checkpoint must not route again: logits that differ in the last bit may select other
experts, then splits no longer pair up between ranks, and the job hangs. So the layers inside leave their
routes and counts with the first forward, and the second takes them from there: it asks nobody for counts, and
counts nothing.

keep="rows" keeps more than the choices: what the router computed, the rows that came back from the experts,
and their sum. Then the second forward of a layer is its dispatch and the experts' first products: one
exchange instead of two, two products of three. What is kept is out of sight of saved-tensor hooks that stand
around the call (an offload of saved tensors, say).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe.placement import Placement
from routing import Routing

_CURRENT: ContextVar["RouteMemory | None"] = ContextVar("routes", default=None)
KEEP = ("routes", "rows")


@dataclass(kw_only=True, slots=True)
class Route:
    """What one layer decided.

    expert_TK: [T, K] int64;  counts_PE: [P, E] int64 on the host;  counts_E: [E];  placement: the slots;
    rows_PS, rows_S: the split of the counts over the slots, [P, S], and its sum;  fetched_ahead: all replicas
    were fetched, before the split;  scope_counts_E: [E] those of the balance loss;  routing, aux_loss, y_TD:
    what the router and the experts gave, apart from its graph, where that is kept.
    """

    expert_TK: torch.Tensor
    counts_PE: np.ndarray
    counts_E: torch.Tensor
    placement: Placement
    rows_PS: np.ndarray | None = None
    rows_S: np.ndarray | None = None
    fetched_ahead: bool = False
    routing: Routing | None = None
    aux_loss: torch.Tensor | None = None
    y_TD: torch.Tensor | None = None
    scope_counts_E: torch.Tensor | None = None


@dataclass(slots=True)
class RouteMemory:
    """The routes of one checkpointed call, in the order of its layers."""

    keep_rows: bool = False
    routes: list[Route] = field(default_factory=list)
    replaying: bool = False
    inner: list["RouteMemory"] = field(default_factory=list)
    _next: int = 0
    _next_inner: int = 0

    def begin(self) -> None:
        """A forward starts: the first one records, later ones replay."""
        self.replaying = bool(self.routes) or bool(self.inner)
        self._next = self._next_inner = 0

    def replay(self) -> Route:
        """The route of the next layer."""
        route = self.routes[self._next]
        self._next += 1
        return route

    def nested(self, keep_rows: bool) -> "RouteMemory":
        """The memory of the next checkpointed call inside this one; the same one when this one runs again."""
        if self._next_inner == len(self.inner):
            self.inner.append(RouteMemory(keep_rows=keep_rows))
        self._next_inner += 1
        return self.inner[self._next_inner - 1]

    def record(self, route: Route, routing: Routing) -> None:
        """Take in the route of the next layer, and the routing itself where it is kept."""
        if self.keep_rows:
            tensors = ("weight_N", "scores_TE", "logits_TE")
            route.routing = replace(routing, **{name: as_leaf(getattr(routing, name)) for name in tensors})
        self.routes.append(route)


def current_memory() -> RouteMemory | None:
    """The memory of the checkpointed call that is running, if any."""
    return _CURRENT.get()


def kept(memory: RouteMemory | None) -> AbstractContextManager[Any]:
    """Tensors that are saved for the backward in here stay, where the call keeps more than its routes."""
    if memory is None or not memory.keep_rows:
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # before those of the checkpoint


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without their graph: what needs a gradient still says so, and is saved alike."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, keep: str = "routes"
) -> Any:
    """torch's activation checkpointing of function(*args), with the routes of the first forward kept.

    function: runs MoE layers, returns tensors;  use_reentrant: which of torch's two ways;  keep: "routes"
    takes the least memory, "rows" the least time: it keeps [R, D], [T, D] and a few [T, E] a layer too.
    Raises ValueError for another keep, and for "rows" with use_reentrant, which cannot keep a part.
    """
    if keep not in KEEP:
        raise ValueError(f"keep={keep!r} is unknown; use one of {', '.join(KEEP)}")
    if keep == "rows" and use_reentrant:
        raise ValueError('keep="rows" needs use_reentrant=False: the reentrant way keeps all or nothing')
    outer, rows = current_memory(), keep == "rows"
    memory = RouteMemory(keep_rows=rows) if outer is None else outer.nested(rows)

    def run(*inputs: Any) -> Any:
        memory.begin()
        token = _CURRENT.set(memory)
        try:
            return function(*inputs)
        finally:
            _CURRENT.reset(token)

    return torch_checkpoint(run, *args, use_reentrant=use_reentrant)
