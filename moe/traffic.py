"""Traffic of one collective: logical bytes between the ranks of a group, from an operator's arguments alone.

    arguments of a c10d operator, group size n, own place in it  ->  MEASURES[operator]  ->  Traffic

moe/ledger.py calls this for every collective. Only shapes and dtypes are read, never a value: no device is
waited for. S is the full buffer in bytes, S_p the block of rank p:

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


Measure = Callable[[Sequence[Any], int, int], Traffic]


def _num_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if not isinstance(value, torch.Tensor):
        return sum(_num_bytes(item) for item in value)
    if value.layout != torch.strided:
        raise NotImplementedError(
            f"the ledger has no formula for a collective over a {value.layout} tensor; send a dense one, or "
            "its indices and values one after the other"
        )
    return value.numel() * value.element_size()


def _dtype(value: Any) -> torch.dtype:
    """Of the first tensor in nested lists."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value.dtype


def _to(size: int, peer: int, amount: float) -> tuple[float, ...]:
    return tuple(amount if p == peer else 0 for p in range(size))


def _ring(dtype: torch.dtype, size: int, rank: int, sent: float, received: float) -> Traffic:
    return Traffic(dtype=dtype, sent_to=_to(size, (rank + 1) % size, sent), received=received)


def _all_reduce(args: Sequence[Any], size: int, rank: int) -> Traffic:
    total = 2 * (size - 1) * _num_bytes(args[0])
    amount = total / size if total % size else total // size
    return _ring(_dtype(args[0]), size, rank, amount, amount)


def _blocks(which: int, lag_sent: int, lag_received: int) -> Measure:
    """All-gather, reduce-scatter over a list (argument `which`) of one block a rank, equal or not.

    A rank sends all blocks but that of rank + lag_sent, and receives all but that of rank + lag_received.
    """

    def measure(args: Sequence[Any], size: int, rank: int) -> Traffic:
        block_P = [_num_bytes(block) for block in args[which][0]]
        total = sum(block_P)
        sent = total - block_P[(rank + lag_sent) % size]
        received = total - block_P[(rank + lag_received) % size]
        return _ring(_dtype(args[which]), size, rank, sent, received)

    return measure


def _equal_blocks(which: int) -> Measure:
    """All-gather, reduce-scatter over full buffers (argument `which`) of n equal blocks."""

    def measure(args: Sequence[Any], size: int, rank: int) -> Traffic:
        amount = (size - 1) * (_num_bytes(args[which]) // size)
        return _ring(_dtype(args[which]), size, rank, amount, amount)

    return measure


def _from_root(root_at: int) -> Measure:
    """Broadcast, scatter: the root sends the bytes of argument 0 to everybody else."""

    def measure(args: Sequence[Any], size: int, rank: int) -> Traffic:
        amount, root = _num_bytes(args[0]), args[root_at]
        to = tuple(amount if rank == root and p != root else 0 for p in range(size))
        return Traffic(dtype=_dtype(args[0]), sent_to=to, received=0 if rank == root else amount)

    return measure


def _to_root(which: int, root_at: int) -> Measure:
    """Reduce, gather: everybody but the root sends the bytes of argument `which` to it."""

    def measure(args: Sequence[Any], size: int, rank: int) -> Traffic:
        amount, root = _num_bytes(args[which]), args[root_at]
        to = _to(size, root, 0 if rank == root else amount)
        received = amount * (size - 1) if rank == root else 0
        return Traffic(dtype=_dtype(args[which]), sent_to=to, received=received)

    return measure


def _all_to_all_v(args: Sequence[Any], size: int, rank: int) -> Traffic:
    output, rows, _, output_splits, input_splits = args[:5]
    # the row's shape and not a row: there may be none, on either side
    row_bytes = rows.element_size() * math.prod(rows.shape[1:])
    into = tuple(input_splits) or (rows.shape[0] // size,) * size
    out = tuple(output_splits) or (output.shape[0] // size,) * size
    to = tuple(0 if p == rank else num_rows * row_bytes for p, num_rows in enumerate(into))
    received = (sum(out) - out[rank]) * row_bytes
    return Traffic(dtype=rows.dtype, sent_to=to, received=received, input_splits=into, output_splits=out)


def _all_to_all(args: Sequence[Any], size: int, rank: int) -> Traffic:
    outputs, inputs = args[0], args[1]
    to = tuple(0 if p == rank else _num_bytes(tensor) for p, tensor in enumerate(inputs))
    received = _num_bytes(outputs) - _num_bytes(outputs[rank])
    return Traffic(dtype=_dtype(inputs), sent_to=to, received=received)


def _send(args: Sequence[Any], size: int, rank: int) -> Traffic:
    return Traffic(dtype=_dtype(args[0]), sent_to=_to(size, args[2], _num_bytes(args[0])), received=0)


def _receive(args: Sequence[Any], size: int, rank: int) -> Traffic:
    return Traffic(dtype=_dtype(args[0]), sent_to=(0,) * size, received=_num_bytes(args[0]))


def _nothing(args: Sequence[Any], size: int, rank: int) -> Traffic:
    return Traffic(dtype=_dtype(args[0]), sent_to=(0,) * size, received=0)


# every c10d operator that takes a process group -> its formula
MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "allreduce_": _all_reduce,
        "allreduce_coalesced_": _all_reduce,
        "allgather_": _blocks(0, 1, 0),
        "_allgather_base_": _equal_blocks(0),
        "allgather_coalesced_": _equal_blocks(0),
        "allgather_into_tensor_coalesced_": _equal_blocks(0),
        "reduce_scatter_": _blocks(1, 0, -1),
        "_reduce_scatter_base_": _equal_blocks(1),
        "reduce_scatter_tensor_coalesced_": _equal_blocks(1),
        "alltoall_base_": _all_to_all_v,
        "alltoall_": _all_to_all,
        "broadcast_": _from_root(2),
        "scatter_": _from_root(3),
        "reduce_": _to_root(0, 3),
        "gather_": _to_root(1, 3),
        "send": _send,
        "recv_": _receive,
        "recv_any_source_": _receive,
        "barrier": _nothing,
        "monitored_barrier_": _nothing,
    }
)
