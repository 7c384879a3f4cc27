"""Deduplicated dispatch and combine: a token's row travels once to each rank, with however many copies there.

    x_TD -> one row a pair (token, rank) -> all-to-all-v -> copies by (slot, source rank, token) -> experts
    y_TD <- sum of a token's pairs <- all-to-all-v <- weighted sum of each pair's copies <-

A *pair* is a token and a rank that hosts a slot which a copy of it is sent to; a rank's pairs stand in the
order (rank, token). The rank that expands them learns from the metadata, one [N, 2] all-to-all-v, which pair
each copy belongs to (its position within the pairs of its source) and its router weight. Nothing else need
travel: a source's pairs are as many as its last position says, and slots are known, for copies come in the
order (slot, token) and rows_PS is the same everywhere. The backward of each is the other, as deduplicated,
and the weights' gradients travel back.

Letters of this file: U pairs that this rank sends, V pairs that it receives, J the most copies of one pair,
Q = min(K, P) the most pairs of one token. moe/dedup_rule.py says what this saves, and when it pays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from moe.dedup_tables import Arrivals, Pairs, count_arrivals, count_pairs, index_pairs, place_copies
from moe.exchange import Exchange, Transfer, all_to_all_v, start_all_to_all_v
from moe.naming import current_tag, tag
from moe.permute import (
    expand_tokens,
    order_copies,
    sum_rows,
    take_rows,
    to_device,
    weighted_sum,
)
from routing.record import Routing

# the integers that carry a weight's bits, and the position beside it
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class UniqueHandle:
    """What combine_unique must know of a dispatch_unique. Opaque but for the first four.

    rows_Ps:   [1, s] int64 on the host, rows of each of this rank's slots: one block a slot
    weight_R:  [R] the router's weight of every row, differentiable back to routing.weight_N
    sent_pairs_P, received_pairs_P: [P] int64 on the host, pairs to and from each rank
    """

    rows_Ps: torch.Tensor
    weight_R: torch.Tensor
    sent_pairs_P: np.ndarray
    received_pairs_P: np.ndarray
    exchange: Exchange
    sent: Pairs
    arrived: Arrivals


def dispatch_unique(
    x_TD: torch.Tensor,
    routing: Routing,
    rows_PS: np.ndarray,
    slot_to_expert_S: np.ndarray,
    exchange: Exchange,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, UniqueHandle]:
    """Send every token's row once to each rank that hosts a slot of its copies, and expand it there.

    x_TD: [T, D] this rank's rows;  routing: their experts, regular (top_k is not None; -1 = not routed);
    rows_PS: [P, S] int64 on the host, the rows that every source rank sends to every slot (the same array on
    all ranks);  slot_to_expert_S: [S] int64, slots contiguous by rank, -1 = empty;  meanwhile: work to do
    while the rows are in flight (its backward runs while their gradients are).
    Returns rows_RD [R, D], in the order (local slot, source rank, token), and the handle for combine_unique.
    A collective: two all-to-all-v, the first of which the host waits for. Raises ValueError where the routing
    is not regular, or rows_PS does not fit the ranks, the slots or this rank's counts.
    """
    _check(routing, rows_PS, slot_to_expert_S, exchange)
    copies = order_copies(routing.expert_N, rows_PS[exchange.rank], slot_to_expert_S)
    outgoing = _Outgoing(routing, copies, rows_PS, exchange)
    metadata = outgoing.send(routing.weight_N)  # while it travels, the rows are made ready
    sent = outgoing.index()
    rows_UD = expand_tokens(x_TD, sent.token_of_pair, sent.pair_TQ.view(-1), sent.pair_TQ.shape[1])

    position_A, bits_A = metadata.wait().T.contiguous().unbind()
    counts_X = count_arrivals(position_A, outgoing.received_Ps.sum(axis=1)).cpu().numpy()  # a host sync
    splits = outgoing.pairs_P.tolist(), counts_X[:-1].tolist()
    solo = exchange.size == 1
    in_flight = None if solo else start_all_to_all_v(rows_UD, exchange, *splits)
    arrived = place_copies(position_A, outgoing.received_Ps, counts_X[:-1], int(counts_X[-1]))
    weight_R = outgoing.weights(routing.weight_N, bits_A, arrived)
    if meanwhile is not None:
        meanwhile()
    rows_VD = rows_UD if in_flight is None else in_flight.wait()
    handle = UniqueHandle(
        rows_Ps=torch.from_numpy(outgoing.received_Ps.sum(axis=0, keepdims=True)),
        weight_R=weight_R,
        sent_pairs_P=outgoing.pairs_P,
        received_pairs_P=counts_X[:-1],
        exchange=exchange,
        sent=sent,
        arrived=arrived,
    )
    row_VJ = arrived.row_VJ
    return expand_tokens(rows_VD, arrived.pair_of_row, row_VJ.view(-1), row_VJ.shape[1]), handle


def combine_unique(rows_RD: torch.Tensor, handle: UniqueHandle, *, weighted: bool = True) -> torch.Tensor:
    """Sum the copies of each pair in float32 or better, send the sums back, and add each token's alike.

    rows_RD: [R, D] in the order in which dispatch_unique gave them;  weighted: multiply by the router's
    weights (False: the experts have done so).   Returns y_TD [T, D] of the rows' type, which is the type on
    the wire too; a token without a routed copy gets zeros. A collective: one all-to-all-v.
    """
    arrived, sent = handle.arrived, handle.sent
    if weighted:
        weight_VJ = _Spread.apply(handle.weight_R, arrived.row_VJ)
        sums_VD = weighted_sum(rows_RD, weight_VJ, arrived.row_VJ)
    else:
        sums_VD = _SumGroups.apply(rows_RD, arrived.row_VJ, arrived.pair_of_row)
    splits = handle.received_pairs_P.tolist(), handle.sent_pairs_P.tolist()
    sums_UD = all_to_all_v(sums_VD, handle.exchange, *splits)
    return _SumGroups.apply(sums_UD, sent.pair_TQ, sent.token_of_pair)


def _check(routing: Routing, rows_PS: np.ndarray, slot_to_expert_S: np.ndarray, exchange: Exchange) -> None:
    if routing.top_k is None:
        raise ValueError("top_k=None: deduplicated dispatch needs K copies of every token; use dispatch")
    if routing.weight_N.dtype not in BITS:
        raise ValueError(f"router weights are {routing.weight_N.dtype}; use float32 or float64")
    num_ranks, num_slots = rows_PS.shape
    if num_ranks != exchange.size or num_slots % num_ranks or num_slots != slot_to_expert_S.shape[0]:
        raise ValueError(
            f"rows_PS has shape {rows_PS.shape}; expected ({exchange.size}, {slot_to_expert_S.shape[0]}) "
            "with slots a multiple of the ranks"
        )


# ---- metadata ---------------------------------------------------------------------------------------------


class _Outgoing:
    """The copies that this rank sends, their pairs, and the metadata of both on the way out and back.

    pairs_P: [P] int64 on the host, its pairs for each rank;  received_Ps: [P, s] int64 on the host, copies
    for each of its slots from each rank.
    """

    def __init__(
        self,
        routing: Routing,
        copies: tuple[torch.Tensor, torch.Tensor],
        rows_PS: np.ndarray,
        exchange: Exchange,
    ) -> None:
        assert routing.top_k is not None
        self.exchange, self.tag = exchange, f"{current_tag()} metadata".strip()
        self.copy_of_row, self.row_of_copy = copies
        rows_PPs = rows_PS.reshape(exchange.size, exchange.size, -1)
        self.received_Ps = np.ascontiguousarray(rows_PPs[:, exchange.rank])
        sent_P = rows_PPs[exchange.rank].sum(axis=1)
        self.splits = tuple(sent_P.tolist()), tuple(self.received_Ps.sum(axis=1).tolist())
        self.row_TK = self.row_of_copy.view(routing.num_tokens, routing.top_k)
        rank_R = np.repeat(np.arange(exchange.size), sent_P)
        self.rank_R = to_device(torch.from_numpy(rank_R), self.row_TK.device)
        counted = count_pairs(self.row_TK, self.copy_of_row, self.rank_R, exchange.size)
        self.position_R, self.pairs_on_device_P = counted
        self.pairs_P = np.zeros(exchange.size, dtype=np.int64)

    def send(self, weight_N: torch.Tensor) -> Transfer:
        """Start each copy's position and weight to the rank of its slot, [R, 2]."""
        bits = BITS[weight_N.dtype]
        weight_R = weight_N.detach().index_select(0, self.copy_of_row)
        packed_R2 = torch.stack([self.position_R.to(bits), weight_R.view(bits)], dim=1)
        if self.exchange.size == 1:
            return Transfer(packed_R2, packed_R2)
        with tag(self.tag):
            return self.exchange.start_rows(packed_R2, *self.splits)

    def index(self) -> Pairs:
        """The tables of the pairs; another host sync, while the metadata travels."""
        self.pairs_P = self.pairs_on_device_P.cpu().numpy()
        base_P = self.pairs_on_device_P.cumsum(0) - self.pairs_on_device_P
        pair_R = base_P[self.rank_R] + self.position_R
        width = min(self.row_TK.shape[1], self.exchange.size)
        return index_pairs(self.row_TK, self.copy_of_row, pair_R, int(self.pairs_P.sum()), width)

    def weights(self, weight_N: torch.Tensor, bits_A: torch.Tensor, arrived: Arrivals) -> torch.Tensor:
        """The weights that have arrived, as bits, in the order of the rows [R]; differentiable."""
        # The anchor makes the gradients' way back run on every rank, as in moe/exchange.py.
        anchor = torch.zeros((), device=weight_N.device, requires_grad=torch.is_grad_enabled())
        arrived_A = bits_A.view(weight_N.dtype)
        back = self.exchange, self.splits, self.tag
        return _Weights.apply(
            weight_N, anchor, arrived_A, arrived.by_slot, arrived.by_source, self.row_of_copy, back
        )


class _Weights(torch.autograd.Function):
    """weight_N, anchor, weight_A as they arrived, tables, where they came from -> weight_R."""

    @staticmethod
    def forward(ctx: Any, weight_N, anchor, weight_A, by_slot, by_source, row_of_copy, back):
        ctx.back = back
        # the empty one is unpacked first in the backward: see moe/exchange.py
        ctx.save_for_backward(weight_N.new_empty(0), by_source, row_of_copy)
        return weight_A.index_select(0, by_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        _, by_source, row_of_copy = ctx.saved_tensors
        exchange, (input_splits, output_splits), name = ctx.back
        grad_R1 = grad_outputs[0].index_select(0, by_source)[:, None]
        if exchange.size > 1:
            with tag(name):
                grad_R1 = exchange.send_rows(grad_R1, output_splits, input_splits)
        return take_rows(grad_R1, row_of_copy)[:, 0], *[None] * 6


# ---- groups of rows: the copies of a pair, the pairs of a token -------------------------------------------


class _Spread(torch.autograd.Function):
    """weight_R, row_VJ -> the weights of each pair's copies [V, J], 0 where there is none."""

    @staticmethod
    def forward(ctx: Any, weight_R, row_VJ):
        ctx.save_for_backward(row_VJ)
        ctx.num_rows = weight_R.shape[0]
        return torch.cat([weight_R, weight_R.new_zeros(1)])[row_VJ]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_VJ,) = ctx.saved_tensors
        # every row stands once in the table: a permutation. The padding shares a place, which is cut off.
        grad_R = grad_outputs[0].new_empty(ctx.num_rows + 1)
        grad_R.index_copy_(0, row_VJ.view(-1), grad_outputs[0].reshape(-1))
        return grad_R[: ctx.num_rows], None


class _SumGroups(torch.autograd.Function):
    """rows_RD, row_GJ, group_of_row -> the sum of each group's rows [G, D], in float32 or better: the
    transpose of expand_tokens."""

    @staticmethod
    def forward(ctx: Any, rows_RD, row_GJ, group_of_row):
        ctx.save_for_backward(group_of_row)
        return sum_rows(rows_RD.contiguous(), row_GJ, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (group_of_row,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, group_of_row), None, None
