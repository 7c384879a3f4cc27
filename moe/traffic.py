"""Traffic of one collective: logical bytes between the ranks of a group, from an operator's arguments alone.

    arguments of a c10d operator                    -> FORMULAS[operator].read    -> facts: dtype, sizes, root
    facts, group size n, own place in it            -> FORMULAS[operator].traffic -> Traffic

moe/ledger.py reads the facts at every collective, and does the arithmetic when somebody asks. Only shapes and
dtypes are read, never a value: no device is waited for. S is the full buffer in bytes, S_p the block of
rank p:

    all-reduce        sent 2(n-1)/n S      received the same
    all-gather        sent S - S_next      received S - S_own          (n-1)/n S where the blocks are equal
    reduce-scatter    sent S - S_own       received S - S_previous     (n-1)/n S where the blocks are equal
    all-to-all(-v)    sent what goes to other ranks, received what comes from them
    broadcast, scatter    the root sends S to each other rank (scatter: one block to each)
    reduce, gather        each other rank sends S to the root
    send, receive     S          barrier     0

Ring algorithms give all their bytes to the next rank of the ring. Amounts are integers, but for an all-reduce
whose 2(n-1) S does not divide by n: a float then.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one rank sends and receives in one collective.

    dtype: of the payload;  sent_to: bytes to each rank of the group;  received: bytes from all other ranks;
    input_splits, output_splits: rows by peer of an all-to-all-v, else empty.
    """

    dtype: torch.dtype
    sent_to: tuple[float, ...]
    received: float
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """Bytes that one rank sends to, and receives from, other ranks."""

    sent_bytes: int
    received_bytes: int


# what an operator's arguments say: the payload's dtype, then integers, or tuples of them
Facts = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """One operator's formula, in two halves.

    read: arguments -> facts, a few hundred nanoseconds, keeps no tensor;  traffic: facts, group size, own
    place in the group -> Traffic. Calling it does both.
    """

    read: Callable[[Sequence[Any]], Facts]
    traffic: Callable[[Facts, int, int], Traffic]

    def __call__(self, args: Sequence[Any], size: int, rank: int) -> Traffic:
        return self.traffic(self.read(args), size, rank)


# ---- reading ----------------------------------------------------------------------------------------------


def _num_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if not isinstance(value, torch.Tensor):
        return sum(map(_num_bytes, value))
    if value.layout is not torch.strided:
        raise NotImplementedError(
            f"the ledger has no formula for a collective over a {value.layout} tensor; send a dense one, or "
            "its indices and values one after the other"
        )
    return value.nbytes


def _dtype(value: Any) -> torch.dtype:
    """Of the first tensor in nested lists."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value.dtype


def _whole(which: int, also: int | None = None) -> Callable[[Sequence[Any]], Facts]:
    """dtype and bytes of argument `which`, and argument `also` as it is: a root, a destination."""
    if also is None:
        return lambda args: (_dtype(args[which]), _num_bytes(args[which]))
    return lambda args: (_dtype(args[which]), _num_bytes(args[which]), args[also])


def _each(which: int) -> Callable[[Sequence[Any]], Facts]:
    """dtype and bytes of each block of the list in argument `which`."""
    return lambda args: (_dtype(args[which]), tuple(map(_num_bytes, args[which][0])))


def _rows(args: Sequence[Any]) -> Facts:
    """dtype, bytes of a row, rows in and out, and their splits, which are empty where they are even."""
    output, rows, _, output_splits, input_splits = args[:5]
    # the row's shape and not a row: there may be none, on either side
    shape = rows.shape
    row_bytes = rows.itemsize * (shape[1] if len(shape) == 2 else math.prod(shape[1:]))
    return rows.dtype, row_bytes, shape[0], output.shape[0], tuple(input_splits), tuple(output_splits)


def _lists(args: Sequence[Any]) -> Facts:
    """dtype, and bytes of each tensor that leaves and of each that arrives."""
    return _dtype(args[1]), tuple(map(_num_bytes, args[1])), tuple(map(_num_bytes, args[0]))


# ---- arithmetic -------------------------------------------------------------------------------------------


def _to(size: int, peer: int, amount: float) -> tuple[float, ...]:
    return tuple(amount if p == peer else 0 for p in range(size))


def _ring(dtype: torch.dtype, size: int, rank: int, sent: float, received: float) -> Traffic:
    return Traffic(dtype=dtype, sent_to=_to(size, (rank + 1) % size, sent), received=received)


def _all_reduce(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, buffer = facts
    total = 2 * (size - 1) * buffer
    amount = total / size if total % size else total // size
    return _ring(dtype, size, rank, amount, amount)


def _all_but(lag_sent: int, lag_received: int) -> Callable[[Facts, int, int], Traffic]:
    """All-gather, reduce-scatter of one block a rank, equal or not.

    A rank sends all blocks but that of rank + lag_sent, and receives all but that of rank + lag_received.
    """

    def traffic(facts: Facts, size: int, rank: int) -> Traffic:
        dtype, block_P = facts
        total = sum(block_P)
        sent = total - block_P[(rank + lag_sent) % size]
        received = total - block_P[(rank + lag_received) % size]
        return _ring(dtype, size, rank, sent, received)

    return traffic


def _all_but_one(facts: Facts, size: int, rank: int) -> Traffic:
    """All-gather, reduce-scatter of a full buffer of n equal blocks."""
    dtype, buffer = facts
    amount = (size - 1) * (buffer // size)
    return _ring(dtype, size, rank, amount, amount)


def _from_root(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, amount, root = facts
    to = tuple(amount if rank == root and p != root else 0 for p in range(size))
    return Traffic(dtype=dtype, sent_to=to, received=0 if rank == root else amount)


def _to_root(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, amount, root = facts
    to = _to(size, root, 0 if rank == root else amount)
    return Traffic(dtype=dtype, sent_to=to, received=amount * (size - 1) if rank == root else 0)


def _all_to_all_v(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, row_bytes, rows_in, rows_out, input_splits, output_splits = facts
    into = input_splits or (rows_in // size,) * size
    out = output_splits or (rows_out // size,) * size
    to = tuple(0 if p == rank else num_rows * row_bytes for p, num_rows in enumerate(into))
    received = (sum(out) - out[rank]) * row_bytes
    return Traffic(dtype=dtype, sent_to=to, received=received, input_splits=into, output_splits=out)


def _all_to_all(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, sent_P, received_P = facts
    to = tuple(0 if p == rank else amount for p, amount in enumerate(sent_P))
    return Traffic(dtype=dtype, sent_to=to, received=sum(received_P) - received_P[rank])


def _send(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, amount, to = facts
    return Traffic(dtype=dtype, sent_to=_to(size, to, amount), received=0)


def _receive(facts: Facts, size: int, rank: int) -> Traffic:
    dtype, amount = facts
    return Traffic(dtype=dtype, sent_to=(0,) * size, received=amount)


def _nothing(facts: Facts, size: int, rank: int) -> Traffic:
    return Traffic(dtype=facts[0], sent_to=(0,) * size, received=0)


# every c10d operator that takes a process group -> its formula
FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "allreduce_": Formula(read=_whole(0), traffic=_all_reduce),
        "allreduce_coalesced_": Formula(read=_whole(0), traffic=_all_reduce),
        "allgather_": Formula(read=_each(0), traffic=_all_but(1, 0)),
        "_allgather_base_": Formula(read=_whole(0), traffic=_all_but_one),
        "allgather_coalesced_": Formula(read=_whole(0), traffic=_all_but_one),
        "allgather_into_tensor_coalesced_": Formula(read=_whole(0), traffic=_all_but_one),
        "reduce_scatter_": Formula(read=_each(1), traffic=_all_but(0, -1)),
        "_reduce_scatter_base_": Formula(read=_whole(1), traffic=_all_but_one),
        "reduce_scatter_tensor_coalesced_": Formula(read=_whole(1), traffic=_all_but_one),
        "alltoall_base_": Formula(read=_rows, traffic=_all_to_all_v),
        "alltoall_": Formula(read=_lists, traffic=_all_to_all),
        "broadcast_": Formula(read=_whole(0, 2), traffic=_from_root),
        "scatter_": Formula(read=_whole(0, 3), traffic=_from_root),
        "reduce_": Formula(read=_whole(0, 3), traffic=_to_root),
        "gather_": Formula(read=_whole(1, 3), traffic=_to_root),
        "send": Formula(read=_whole(0, 2), traffic=_send),
        "recv_": Formula(read=_whole(0), traffic=_receive),
        "recv_any_source_": Formula(read=_whole(0), traffic=_receive),
        "barrier": Formula(read=_whole(0), traffic=_nothing),
        "monitored_barrier_": Formula(read=_whole(0), traffic=_nothing),
    }
)
