"""CommLedger: every collective of the process, with its bytes, its phase and its tag.

    with CommLedger() as ledger:
        ...                       training steps: our exchanges, autograd's backward, the engine's collectives
    ledger.totals()               bytes by (phase, op, tag)

The c10d operators are overridden at their autograd keys while a ledger is open, and only then: off, it costs
nothing. On, it adds work per collective, none per tensor operation, and never synchronises by itself. The
phase is
set by those who know it (`phase`, `tag`); inside a backward it is "backward".

Bytes are logical: what one rank sends to others, S the bytes of the full buffer, n the size of the group:

    all-reduce 2(n-1)/n S    all-gather, reduce-scatter (n-1)/n S    broadcast, scatter: (n-1) S of the root
    all-to-all-v: rows to other ranks    reduce, gather: S of all but the root    send S    barrier 0

Tensors made under torch.inference_mode have no autograd keys: their collectives are not seen.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_PHASE: contextvars.ContextVar[str] = contextvars.ContextVar("phase", default="other")
_TAG: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Collectives inside belong to this phase: forward, backward, recompute, optimizer..."""
    token = _PHASE.set(name)
    try:
        yield
    finally:
        _PHASE.reset(token)


@contextmanager
def tag(name: str) -> Iterator[None]:
    """Collectives inside carry this tag, for example "layer 3 dispatch"."""
    token = _TAG.set(name)
    try:
        yield
    finally:
        _TAG.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One collective as this rank issued it.

    op: name without c10d's underscores;  ranks: global ranks of the group;  rank: this one's place in it;
    dtype: of the payload;  input_splits, output_splits: rows by peer of an all-to-all-v, else empty;
    sent_bytes, received_bytes: logical bytes to and from other ranks;  sent_to: bytes to each rank of the
    group
    where the operation says who gets them, else to the next rank of the ring.
    """

    op: str
    ranks: tuple[int, ...]
    rank: int
    dtype: torch.dtype
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    sent_bytes: float
    received_bytes: float
    sent_to: tuple[float, ...]
    phase: str
    tag: str


class CommLedger:
    """Context manager that records every collective of this process. One may be open at a time."""

    _open = False

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._library: Any = None

    def __enter__(self) -> "CommLedger":
        if CommLedger._open:
            raise RuntimeError("a CommLedger is open already; one process has one ledger at a time")
        CommLedger._open = True
        self._library = torch.library.Library("c10d", "IMPL")
        for name, measure in _OPERATORS.items():
            if hasattr(torch.ops.c10d, name):
                for key in ("AutogradCPU", "AutogradCUDA"):
                    self._library.impl(name, self._override(name, measure), key)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        self._library = None
        CommLedger._open = False

    def totals(self, by: tuple[str, ...] = ("phase", "op", "tag")) -> dict[tuple[Any, ...], dict[str, float]]:
        """Count, sent and received bytes, grouped by fields of the entries."""
        sums: dict[tuple[Any, ...], dict[str, float]] = {}
        for entry in self.entries:
            key = tuple(getattr(entry, name) for name in by)
            row = sums.setdefault(key, {"count": 0, "sent_bytes": 0, "received_bytes": 0})
            row["count"] += 1
            row["sent_bytes"] += entry.sent_bytes
            row["received_bytes"] += entry.received_bytes
        return sums

    def bytes_to_rank(self, world_size: int) -> np.ndarray:
        """Bytes that this rank sent to every rank of the job, [world] float64: its row of the byte matrix."""
        row = np.zeros(world_size)
        for entry in self.entries:
            for peer, amount in zip(entry.ranks, entry.sent_to):
                row[peer] += amount
        return row

    def take(self) -> list[Entry]:
        """The entries since the last take; starts anew: once per step makes per-step totals."""
        taken, self.entries = self.entries, []
        return taken

    def _override(self, name: str, measure: "Measure") -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.entries.append(_entry(name, measure, args))
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args, **kwargs)

        return recorded


def _entry(name: str, measure: "Measure", args: tuple[Any, ...]) -> Entry:
    group = _group(args)
    ranks = tuple(dist.get_process_group_ranks(group))
    size, rank = group.size(), group.rank()
    traffic = measure(args, size, rank)
    in_backward = torch._C._current_graph_task_id() != -1
    current = _PHASE.get()
    if in_backward and current not in ("recompute", "backward"):
        current = "backward"
    return Entry(
        op=name.strip("_"),
        ranks=ranks,
        rank=rank,
        dtype=traffic.dtype,
        input_splits=traffic.input_splits,
        output_splits=traffic.output_splits,
        sent_bytes=float(sum(traffic.sent_to)),
        received_bytes=traffic.received,
        sent_to=traffic.sent_to,
        phase=current,
        tag=_TAG.get(),
    )


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among an operator's arguments: the first boxed object that is one."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    raise AssertionError("a c10d operator without process group")


# ---- the formulas ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traffic:
    dtype: torch.dtype
    sent_to: tuple[float, ...]
    received: float
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


Measure = Callable[[tuple[Any, ...], int, int], _Traffic]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _size(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(value))


def _dtype(value: Any) -> torch.dtype:
    tensors = _flat(value)
    return tensors[0].dtype if tensors else torch.uint8


def _ring(factor: int, which: int) -> Measure:
    """factor * (n-1)/n * S to the next rank of the ring; S: bytes of argument `which`, the full buffer."""

    def measure(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
        amount = factor * (size - 1) * _size(args[which]) / size
        return _Traffic(
            dtype=_dtype(args[which]), sent_to=_only(size, (rank + 1) % size, amount), received=amount
        )

    return measure


def _only(size: int, peer: int, amount: float) -> tuple[float, ...]:
    return tuple(amount if p == peer else 0.0 for p in range(size))


def _from_root(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    """Broadcast: the root sends S to everybody else."""
    amount, root = float(_size(args[0])), int(args[2])
    to = tuple(amount if rank == root and p != root else 0.0 for p in range(size))
    return _Traffic(dtype=_dtype(args[0]), sent_to=to, received=0.0 if rank == root else amount)


def _scatter(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    amount, root = float(_size(args[0])), int(args[3])
    to = tuple(amount if rank == root and p != root else 0.0 for p in range(size))
    return _Traffic(dtype=_dtype(args[0]), sent_to=to, received=0.0 if rank == root else amount)


def _to_root(which: int, root_at: int) -> Measure:
    """Reduce, gather: everybody but the root sends S to it."""

    def measure(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
        amount, root = float(_size(args[which])), int(args[root_at])
        received = amount * (size - 1) if rank == root else 0.0
        to = _only(size, root, 0.0 if rank == root else amount)
        return _Traffic(dtype=_dtype(args[which]), sent_to=to, received=received)

    return measure


def _all_to_all_v(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    output, rows, _, output_splits, input_splits, *_ = args
    row_bytes = rows.element_size() * (rows[0].numel() if rows.shape[0] else output[:1].numel() or 0)
    into = tuple(input_splits) or (rows.shape[0] // size,) * size
    out = tuple(output_splits) or (output.shape[0] // size,) * size
    to = tuple(0.0 if p == rank else float(n * row_bytes) for p, n in enumerate(into))
    received = float(sum(n * row_bytes for p, n in enumerate(out) if p != rank))
    return _Traffic(dtype=rows.dtype, sent_to=to, received=received, input_splits=into, output_splits=out)


def _all_to_all(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    outputs, inputs = args[0], args[1]
    to = tuple(0.0 if p == rank else float(_size(t)) for p, t in enumerate(inputs))
    received = float(sum(_size(t) for p, t in enumerate(outputs) if p != rank))
    return _Traffic(dtype=_dtype(inputs), sent_to=to, received=received)


def _send(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    return _Traffic(
        dtype=_dtype(args[0]), sent_to=_only(size, int(args[2]), float(_size(args[0]))), received=0.0
    )


def _receive(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    return _Traffic(dtype=_dtype(args[0]), sent_to=(0.0,) * size, received=float(_size(args[0])))


def _nothing(args: tuple[Any, ...], size: int, rank: int) -> _Traffic:
    return _Traffic(dtype=torch.uint8, sent_to=(0.0,) * size, received=0.0)


_OPERATORS: dict[str, Measure] = {
    "allreduce_": _ring(2, 0),
    "allreduce_coalesced_": _ring(2, 0),
    "allgather_": _ring(1, 0),
    "_allgather_base_": _ring(1, 0),
    "allgather_coalesced_": _ring(1, 0),
    "allgather_into_tensor_coalesced_": _ring(1, 0),
    "reduce_scatter_": _ring(1, 1),
    "_reduce_scatter_base_": _ring(1, 1),
    "reduce_scatter_tensor_coalesced_": _ring(1, 1),
    "alltoall_base_": _all_to_all_v,
    "alltoall_": _all_to_all,
    "broadcast_": _from_root,
    "scatter_": _scatter,
    "reduce_": _to_root(0, 3),
    "gather_": _to_root(1, 3),
    "send": _send,
    "recv_": _receive,
    "recv_any_source_": _receive,
    "barrier": _nothing,
    "monitored_barrier_": _nothing,
}
