"""Exchange: the two collectives that an expert-parallel layer needs, over ranks, threads or nobody.

    all_gather(row_X)                             -> [P, X]   no gradient
    all_to_all_v(rows_RD, input_splits, output_splits) -> rows   with gradient: the same call, splits swapped

Rows leave in blocks by destination rank and arrive in blocks by source rank:

    rank 0: (to 0)(to 1 ......)         rank 0: (from 0)(from 1)
    rank 1: (to 0)(to 1)           =>   rank 1: (from 0 ......)(from 1)

Every rank takes part in every call, with zero rows too, forward and backward. So the op hangs on an anchor
that requires a gradient: its backward runs on a rank whose own input needs none.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moe.naming import current_tag, tag


class Exchange(Protocol):
    """One rank's end of a group of `size` ranks."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def all_gather(self, row_X: torch.Tensor) -> torch.Tensor: ...
    def send_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor: ...
    def start_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> "Transfer": ...


class Transfer:
    """Rows in flight: `wait` gives them, once. Holds what is sent and what arrives until then."""

    def __init__(self, out_RD: torch.Tensor, sent_RD: torch.Tensor, work: Any = None) -> None:
        self._held = (out_RD, sent_RD, work)

    def wait(self) -> torch.Tensor:
        """The rows that have arrived."""
        out_RD, _, work = self._held
        if work is not None:
            work.wait()
        del self._held
        return out_RD


class SoloExchange:
    """A group of one rank: nothing travels."""

    size = 1
    rank = 0

    def all_gather(self, row_X: torch.Tensor) -> torch.Tensor:
        """[X] -> [1, X]."""
        return row_X[None]

    def send_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """The rows as they are."""
        return rows_RD

    def start_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> Transfer:
        """The rows as they are, at once."""
        return Transfer(rows_RD, rows_RD)


class DistExchange:
    """A process group of torch.distributed (gloo, NCCL); None is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_gather(self, row_X: torch.Tensor) -> torch.Tensor:
        """[X] on every rank -> [P, X] on every rank."""
        out = row_X.new_empty((self.size, *row_X.shape))
        dist.all_gather_single(out, row_X[None].contiguous(), group=self.group)
        return out

    def send_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """All-to-all-v of rows, without gradient (see `all_to_all_v`)."""
        return self.start_rows(rows_RD, input_splits, output_splits, async_op=False).wait()

    def start_rows(
        self,
        rows_RD: torch.Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        async_op: bool = True,
    ) -> Transfer:
        """Start an all-to-all-v of rows, without gradient."""
        rows_RD = rows_RD.contiguous()
        out = rows_RD.new_empty((sum(output_splits), *rows_RD.shape[1:]))
        work = dist.all_to_all_single(
            out, rows_RD, list(output_splits), list(input_splits), group=self.group, async_op=async_op
        )
        return Transfer(out, rows_RD, work)


class LoopbackWorld:
    """P ranks as threads of one process: the same collectives through shared memory, for tests and study.

    A rank that raises must call `abort`, which breaks the barrier, so that the others raise instead of
    waiting.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._posted: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def exchange(self, rank: int) -> "LoopbackExchange":
        """The end of one rank."""
        return LoopbackExchange(self, rank)

    def abort(self) -> None:
        """Break the barrier: every rank that waits, or will wait, raises threading.BrokenBarrierError."""
        self._barrier.abort()

    def swap(self, rank: int, item: Any) -> list[Any]:
        """Post an item, get everybody's, in rank order."""
        self._posted[rank] = item
        self._barrier.wait()
        everybody = list(self._posted)
        self._barrier.wait()  # nobody posts again before all have read
        return everybody


class LoopbackExchange:
    """One rank's end of a LoopbackWorld."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world = world
        self.size = world.size
        self.rank = rank

    def all_gather(self, row_X: torch.Tensor) -> torch.Tensor:
        """[X] on every rank -> [P, X] on every rank."""
        return torch.stack(self.world.swap(self.rank, row_X.detach().clone()))

    def send_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """All-to-all-v of rows, without gradient."""
        blocks = rows_RD.detach().clone().split(list(input_splits))
        received = [sent[self.rank] for sent in self.world.swap(self.rank, blocks)]
        sizes = [block.shape[0] for block in received]
        if sizes != list(output_splits):
            raise ValueError(f"rank {self.rank} expected rows {list(output_splits)} by source, got {sizes}")
        return torch.cat(received)

    def start_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> Transfer:
        """All-to-all-v of rows, done at once: threads share one memory."""
        return Transfer(self.send_rows(rows_RD, input_splits, output_splits), rows_RD)


class _AllToAllV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD, anchor, exchange, input_splits, output_splits):
        ctx.exchange, ctx.splits = exchange, (input_splits, output_splits)
        ctx.tag = current_tag()  # the backward bears the forward's, also in a thread of autograd's own
        # Unpacked first in the backward: under non-reentrant checkpointing that makes every rank recompute
        # here, at the same point, also one that has no rows.
        ctx.save_for_backward(rows_RD.new_empty(0))
        return exchange.send_rows(rows_RD, input_splits, output_splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_RD,) = grad_outputs
        _ = ctx.saved_tensors
        input_splits, output_splits = ctx.splits
        with tag(ctx.tag):
            grad_RD = ctx.exchange.send_rows(grad_RD, output_splits, input_splits)
        return grad_RD, None, None, None, None


def all_to_all_v(
    rows_RD: torch.Tensor, exchange: Exchange, input_splits: Sequence[int], output_splits: Sequence[int]
) -> torch.Tensor:
    """Send blocks of rows to the ranks of the group and receive theirs; the backward sends gradients back.

    rows_RD: [R, D], block p of input_splits[p] rows goes to rank p;  output_splits[p]: rows that come from p.
    Returns [sum(output_splits), D].   Raises ValueError before the call where the splits do not fit the rows:
    a backend may abort the whole process on that.
    """
    _check_splits(rows_RD, exchange, input_splits, output_splits)
    if exchange.size == 1:
        return rows_RD
    anchor = torch.zeros((), device=rows_RD.device, requires_grad=torch.is_grad_enabled())
    return _AllToAllV.apply(rows_RD, anchor, exchange, tuple(input_splits), tuple(output_splits))


def _check_splits(
    rows_RD: torch.Tensor, exchange: Exchange, input_splits: Sequence[int], output_splits: Sequence[int]
) -> None:
    if len(input_splits) != exchange.size or len(output_splits) != exchange.size:
        raise ValueError(
            f"{len(input_splits)} input and {len(output_splits)} output splits for {exchange.size} ranks"
        )
    if sum(input_splits) != rows_RD.shape[0]:
        raise ValueError(f"input_splits {list(input_splits)} do not sum to the {rows_RD.shape[0]} rows given")


# ---- the same, in flight --------------------------------------------------------------------------------


class InFlight:
    """An all-to-all-v between its start and its wait, which are two autograd nodes.

    What is computed between them runs while the rows travel. The backward replays in reverse: the wait's node
    starts the gradients' way back, what was computed between runs its backward, the start's node waits.
    """

    def __init__(self, exchange: Exchange, splits: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.exchange, self.splits, self.tag = exchange, splits, current_tag()
        self.rows: Transfer | None = None
        self.gradients: Transfer | None = None
        self.token: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The rows that have arrived, [sum(output_splits), D]; once."""
        token, self.token = self.token, None  # its graph holds this object: a cycle would keep the graph
        return _Wait.apply(token, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD, anchor, in_flight):
        ctx.in_flight = in_flight
        ctx.save_for_backward(rows_RD.new_empty(0))
        in_flight.rows = in_flight.exchange.start_rows(rows_RD, *in_flight.splits)
        return rows_RD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        assert ctx.in_flight.gradients is not None, "the wait's node has started the way back"
        return ctx.in_flight.gradients.wait(), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token, in_flight):
        ctx.in_flight = in_flight
        ctx.save_for_backward(token.new_empty(0))
        return in_flight.rows.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (empty,) = ctx.saved_tensors
        in_flight = ctx.in_flight
        input_splits, output_splits = in_flight.splits
        with tag(in_flight.tag):
            in_flight.gradients = in_flight.exchange.start_rows(grad_outputs[0], output_splits, input_splits)
        return empty, None


def start_all_to_all_v(
    rows_RD: torch.Tensor, exchange: Exchange, input_splits: Sequence[int], output_splits: Sequence[int]
) -> InFlight:
    """Start an all-to-all-v of rows; see `all_to_all_v`."""
    _check_splits(rows_RD, exchange, input_splits, output_splits)
    in_flight = InFlight(exchange, (tuple(input_splits), tuple(output_splits)))
    anchor = torch.zeros((), device=rows_RD.device, requires_grad=torch.is_grad_enabled())
    in_flight.token = _Start.apply(rows_RD, anchor, in_flight)
    return in_flight
