"""CommLedger: every collective of the process, with its bytes, its phase and its tag.

    with CommLedger() as ledger:
        ...                       training steps: our exchanges, autograd's backward, the engine's collectives
    ledger.totals()               count and bytes by (phase, op, tag)
    ledger.matrix(world_size)     [P, P] bytes, from rank to rank

While a ledger is open, and only then, the c10d operators (which every collective of torch.distributed passes)
are overridden at the dispatch key BackendSelect: off, it costs nothing. On, it adds work per collective, none
per tensor operation, copies nothing and never synchronises. Why that key: it lies below autograd and above
every device, and no context removes it. An override at the autograd keys misses what runs under
torch.inference_mode, and what runs on a device that nobody listed.

The bytes are logical; moe/traffic.py has the formulas. Phase and tag come from moe/naming.py. Not seen:
replays of a CUDA graph, which issue no operator, and backends called without their group.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe.naming import current_phase, current_tag
from moe.traffic import MEASURES, Measure

_HIDDEN: ContextVar[bool] = ContextVar("hidden", default=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One collective as this rank issued it.

    op: name without c10d's outer underscores;  ranks: global ranks of the group;  rank: own place in it;
    dtype: of the payload;  input_splits, output_splits: rows by peer of an all-to-all-v, else empty;
    sent_bytes, received_bytes: logical bytes to and from other ranks (integers where they divide);
    sent_to: bytes to each rank of the group where the operation says who gets them, else all to the next rank
    of the ring;  phase, tag: as set around it.
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
    """Context manager that records every collective of this process, from all its threads.

    One may be open at a time: opening a second raises RuntimeError. It may be opened again after it was
    closed and then adds to its entries.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._lock = threading.Lock()  # autograd's threads record while another takes
        self._library: Any = None

    def __enter__(self) -> "CommLedger":
        operators = _operators()
        if any(torch._C._dispatch_has_kernel_for_dispatch_key(o.name(), "BackendSelect") for o in operators):
            raise RuntimeError(
                "the c10d operators are overridden already: close the CommLedger that is open, one process "
                "has one at a time"
            )
        library = torch.library.Library("c10d", "IMPL")
        for operator in operators:
            measure = MEASURES.get(operator._opname, partial(_no_formula, operator._opname))
            library.impl(operator, self._override(operator, measure), "BackendSelect", with_keyset=True)
        self._library = library
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        self._library = None

    def take(self) -> list[Entry]:
        """The entries since the last take, in the order of issue; once per step makes per-step totals."""
        with self._lock:
            taken, self.entries = self.entries, []
        return taken

    def totals(
        self, by: tuple[str, ...] = ("phase", "op", "tag"), entries: Iterable[Entry] | None = None
    ) -> dict[tuple[Any, ...], dict[str, float]]:
        """Sums over entries with the same fields `by`: {values of by: {count, sent_bytes, received_bytes}}.

        entries: those of a `take`; None = all that the ledger holds.
        Raises ValueError where `by` names no field of Entry.
        """
        known = [field.name for field in fields(Entry)]
        if unknown := [name for name in by if name not in known]:
            raise ValueError(f"by={unknown} names no field of an entry; use some of {', '.join(known)}")
        sums: dict[tuple[Any, ...], dict[str, float]] = {}
        for entry in self._held(entries):
            key = tuple(getattr(entry, name) for name in by)
            row = sums.setdefault(key, {"count": 0, "sent_bytes": 0, "received_bytes": 0})
            row["count"] += 1
            row["sent_bytes"] += entry.sent_bytes
            row["received_bytes"] += entry.received_bytes
        return sums

    def bytes_to_rank(self, world_size: int, entries: Iterable[Entry] | None = None) -> np.ndarray:
        """Bytes that this rank sent to every rank of the job, [world_size] float64: its row of `matrix`.

        Raises ValueError where an entry's group has a rank that world_size does not.
        """
        row_P = np.zeros(world_size)
        for entry in self._held(entries):
            if max(entry.ranks) >= world_size:
                raise ValueError(
                    f"world_size={world_size} is too small: a group of {entry.op} has rank "
                    f"{max(entry.ranks)}; use the number of ranks of the whole job"
                )
            row_P[list(entry.ranks)] += entry.sent_to
        return row_P

    def matrix(self, world_size: int, entries: Iterable[Entry] | None = None) -> np.ndarray:
        """Bytes from rank (row) to rank (column), [world_size, world_size] float64.

        A row sums to what its rank sent, a column to what its rank received. A collective of the default
        group, which every rank calls and which is not recorded itself.
        Raises ValueError where world_size is not the number of ranks.
        """
        if world_size != dist.get_world_size():
            raise ValueError(f"world_size={world_size} is not the number of ranks, {dist.get_world_size()}")
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        row_P = torch.from_numpy(self.bytes_to_rank(world_size, entries)).to(device)
        bytes_PP = row_P.new_empty(world_size, world_size)
        token = _HIDDEN.set(True)
        try:
            dist.all_gather(list(bytes_PP.unbind()), row_P)
        finally:
            _HIDDEN.reset(token)
        return bytes_PP.cpu().numpy()

    def _held(self, entries: Iterable[Entry] | None) -> Iterable[Entry]:
        if entries is not None:
            return entries
        with self._lock:
            return list(self.entries)

    def _override(self, operator: Any, measure: Measure) -> Callable[..., Any]:
        """The operator, recorded: an entry is made before the call and kept once the backend has taken it."""
        name = operator._opname.strip("_")
        group_at = _group_position(operator)
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if _HIDDEN.get():
                return operator.redispatch(keyset & below, *args, **kwargs)
            entry = _entry(name, measure, args, dist.ProcessGroup.unbox(args[group_at]))
            result = operator.redispatch(keyset & below, *args, **kwargs)
            with self._lock:
                self.entries.append(entry)
            return result

        return recorded


def _operators() -> list[Any]:
    """All operators of c10d that take a process group, whatever this torch has."""
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name[:6] == "c10d::"]
    split = [name.partition(".") for name in names]
    operators = [getattr(getattr(torch.ops.c10d, name), overload or "default") for name, _, overload in split]
    return [operator for operator in operators if _group_position(operator) >= 0]


def _group_position(operator: Any) -> int:
    """Which argument is the process group; -1 where there is none."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return next((i for i, name in enumerate(types) if name.endswith("ProcessGroup")), -1)


def _no_formula(name: str, args: Sequence[Any], size: int, rank: int) -> Any:
    raise NotImplementedError(
        f"the collective c10d::{name} of torch {torch.__version__} has no formula in moe/traffic.py, and the "
        "ledger misses nothing silently; add one to MEASURES, or close the ledger around it"
    )


def _entry(name: str, measure: Measure, args: Sequence[Any], group: dist.ProcessGroup) -> Entry:
    traffic = measure(args, group.size(), group.rank())
    return Entry(
        op=name,
        ranks=tuple(dist.get_process_group_ranks(group)),
        rank=group.rank(),
        dtype=traffic.dtype,
        input_splits=traffic.input_splits,
        output_splits=traffic.output_splits,
        sent_bytes=sum(traffic.sent_to),
        received_bytes=traffic.received,
        sent_to=traffic.sent_to,
        phase=current_phase(),
        tag=current_tag(),
    )
