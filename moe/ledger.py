"""CommLedger: every collective of the process, with its bytes, its phase and its tag.

    with CommLedger() as ledger:
        ...                       training steps: our exchanges, autograd's backward, the engine's collectives
    ledger.totals()               count and bytes by (phase, op, tag)
    ledger.matrix(world_size)     [P, P] bytes, from rank to rank

While a ledger is open, and only then, the c10d operators (which every collective of torch.distributed passes)
are overridden at the dispatch key BackendSelect: off, it costs nothing. On, it adds a few microseconds per
collective (most of them torch's, for passing through Python), none per tensor operation, copies nothing and
never synchronises. Why that key: it lies below autograd and above
every device, and no context removes it. An override at the autograd keys misses what runs under
torch.inference_mode, and what runs on a device that nobody listed.

The bytes are logical; moe/traffic.py has the formulas. Phase and tag come from moe/naming.py. Not seen:
replays of a CUDA graph, which issue no operator, and backends called without their group.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe.naming import current_phase, current_tag
from moe.traffic import FORMULAS, Facts, Formula

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


# What a collective leaves behind while the step runs; an Entry is made of it when somebody asks.
# (name, formula, facts, (ranks of the group, own place in it), phase, tag)
_Note = tuple[str, Formula, Facts, tuple[tuple[int, ...], int], str, str]


class CommLedger:
    """Context manager that records every collective of this process, from all its threads.

    One may be open at a time: opening a second raises RuntimeError. It may be opened again after it was
    closed and then adds to its entries.
    """

    def __init__(self) -> None:
        self._notes: list[_Note] = []
        self._lock = threading.Lock()  # autograd's threads record while another takes
        self._groups: dict[int, Any] = {}
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
            library.impl(operator, self._override(operator), "BackendSelect", with_keyset=True)
        self._library = library
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        self._library = None
        self._groups.clear()

    @property
    def entries(self) -> list[Entry]:
        """The entries since the last take, in the order of issue; they stay."""
        with self._lock:
            notes = list(self._notes)
        return [_entry(*note) for note in notes]

    def take(self) -> list[Entry]:
        """The entries since the last take, in the order of issue; once per step makes per-step totals."""
        with self._lock:
            notes, self._notes = self._notes, []
        return [_entry(*note) for note in notes]

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
        for entry in self.entries if entries is None else entries:
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
        for entry in self.entries if entries is None else entries:
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

    def _override(self, operator: Any) -> Callable[..., Any]:
        """The operator, recorded: facts are read before the call and kept once the backend has taken it."""
        name, group_at = operator._opname, _group_position(operator)
        formula = FORMULAS.get(name) or _no_formula(name)
        read, name = formula.read, name.strip("_")
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        keysets: dict[int, Any] = {}  # made once for each that is met: it takes as long as all the reading
        redispatch, unbox = operator._handle.redispatch_boxed, dist.ProcessGroup.unbox
        hidden, lock, group_of = _HIDDEN.get, self._lock, self._group

        def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            raw = keyset.raw_repr()
            rest = keysets.get(raw)
            if rest is None:
                rest = keysets[raw] = keyset & below
            if hidden():
                return redispatch(rest, *args, **kwargs)
            facts, group = read(args), group_of(unbox(args[group_at]))
            note = (name, formula, facts, group, current_phase(), current_tag())
            result = redispatch(rest, *args, **kwargs)
            with lock:
                self._notes.append(note)
            return result

        return recorded

    def _group(self, group: dist.ProcessGroup) -> tuple[tuple[int, ...], int]:
        """Its ranks and this one's place in it, looked up once.

        Kept by address, with a weak reference that tells whether it is still the same group: a strong one
        would keep the group's threads and connections when the job takes it down.
        """
        known = self._groups.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        facts = (tuple(dist.get_process_group_ranks(group)), group.rank())
        self._groups[id(group)] = (weakref.ref(group), facts)
        return facts


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


def _no_formula(name: str) -> Formula:
    """Refuses the collective when it is called: before that, nobody may need it."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"the collective c10d::{name} of torch {torch.__version__} has no formula in moe/traffic.py, and "
            "the ledger misses nothing silently; add one to FORMULAS, or close the ledger around it"
        )

    return Formula(read=refuse, traffic=refuse)


def _entry(
    name: str, formula: Formula, facts: Facts, group: tuple[tuple[int, ...], int], phase: str, tag: str
) -> Entry:
    ranks, rank = group
    traffic = formula.traffic(facts, len(ranks), rank)
    return Entry(
        op=name,
        ranks=ranks,
        rank=rank,
        dtype=traffic.dtype,
        input_splits=traffic.input_splits,
        output_splits=traffic.output_splits,
        sent_bytes=sum(traffic.sent_to),
        received_bytes=traffic.received,
        sent_to=traffic.sent_to,
        phase=phase,
        tag=tag,
    )
