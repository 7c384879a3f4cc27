"""Naming: what the collectives of a piece of code are called, and the phase of training that they belong to.

    with phase("optimizer"), tag("layer 3 dispatch"):
        ...                     collectives in here: the ledger books them, the watch records them, by these

Both belong to a thread and its context. On CUDA the backward runs in threads of its own, so the exchange's
autograd functions carry their tag over from the forward.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

_PHASE: ContextVar[str] = ContextVar("phase", default="other")
_TAG: ContextVar[str] = ContextVar("tag", default="")


@contextmanager
def _set(variable: ContextVar[str], value: str) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tag(name: str) -> AbstractContextManager[None]:
    """Collectives inside this context carry this tag, say "layer 3 dispatch"; the innermost holds."""
    return _set(_TAG, name)


def current_tag() -> str:
    """The tag set by the innermost `tag`, "" outside of any."""
    return _TAG.get()


def phase(name: str) -> AbstractContextManager[None]:
    """Collectives inside this context belong to a phase: forward, backward, recompute, optimizer, other...

    Inside a backward only "recompute" holds; any other name gives way to "backward" there.
    Raises ValueError for an empty name.
    """
    if not name:
        raise ValueError("phase name is empty; use forward, backward, recompute, optimizer or your own")
    return _set(_PHASE, name)


def forward_phase() -> AbstractContextManager[None]:
    """Phase of a layer's forward: "recompute" where a backward runs it again, else what is set around it.

    Where nothing is set around it, "forward".
    """
    outer = _PHASE.get()
    return _set(_PHASE, "recompute" if in_backward() else "forward" if outer == "other" else outer)


def current_phase() -> str:
    """The phase as a collective that is issued now belongs to."""
    name = _PHASE.get()
    return "backward" if name != "recompute" and in_backward() else name


def in_backward() -> bool:
    """Whether this thread runs a backward: its autograd nodes, and a forward that they compute again."""
    return torch._C._current_graph_task_id() != -1
