"""Dispatch and combine: token rows to the ranks of their experts, and back.

    copies in token order -> rows by slot -> all-to-all-v -> rows by (slot, source rank, token) -> experts
    y_TD <- weighted sum over a token's copies <- rows by slot <- all-to-all-v <-

`dispatch` returns the rows and a frozen handle; `combine` consumes the handle. The backward of each is the
other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe.exchange import Exchange, all_to_all_v
from moe.permute import block_index, expand_tokens, permute_rows, take_rows, transposed_blocks
from routing.record import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchHandle:
    """What combine must know of a dispatch. Opaque to everybody but `rows_per_local_slot`.

    rows_per_local_slot: [s] int64 on the host, rows that each of this rank's slots received
    """

    rows_per_local_slot: torch.Tensor
    exchange: Exchange
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    by_slot: torch.Tensor | None
    by_source: torch.Tensor | None
    row_of_copy: torch.Tensor
    weight_N: torch.Tensor
    token_N: torch.Tensor
    num_tokens: int
    top_k: int | None


def dispatch(
    x_TD: torch.Tensor,
    routing: Routing,
    rows_PS: np.ndarray,
    slot_to_expert_S: np.ndarray,
    exchange: Exchange,
) -> tuple[torch.Tensor, DispatchHandle]:
    """Send every routed copy to a slot of its expert.

    x_TD: [T, D] this rank's rows;  routing: their experts;  rows_PS: [P, S] int64 on the host, the rows that
    every source rank sends to every slot (the same array on all ranks);  slot_to_expert_S: [S] int64, slots
    contiguous by rank, -1 = empty.
    Returns rows_RD [R, D], in the order (local slot, source rank, token), and the handle for combine.
    Raises ValueError where rows_PS does not fit the ranks, the slots or this rank's counts.
    """
    num_ranks, num_slots = rows_PS.shape
    if num_ranks != exchange.size or num_slots % num_ranks or num_slots != slot_to_expert_S.shape[0]:
        raise ValueError(
            f"rows_PS has shape {rows_PS.shape}; expected ({exchange.size}, {slot_to_expert_S.shape[0]}) "
            "with slots a multiple of the ranks"
        )
    local = num_slots // num_ranks
    copy_of_row = _order_by_slot(routing.expert_N, rows_PS[exchange.rank], slot_to_expert_S)
    row_of_copy = torch.full_like(routing.expert_N, copy_of_row.shape[0])
    row_of_copy[copy_of_row] = torch.arange(copy_of_row.shape[0], device=x_TD.device)
    rows_ND = expand_tokens(x_TD, routing.token_N[copy_of_row], row_of_copy, routing.top_k)

    input_splits = tuple(rows_PS[exchange.rank].reshape(num_ranks, local).sum(axis=1).tolist())
    received_Ps = rows_PS[:, exchange.rank * local : (exchange.rank + 1) * local]
    output_splits = tuple(received_Ps.sum(axis=1).tolist())
    arrived_RD = all_to_all_v(rows_ND, exchange, input_splits, output_splits)
    by_slot, by_source = transposed_blocks(received_Ps, x_TD.device)
    handle = DispatchHandle(
        rows_per_local_slot=torch.from_numpy(received_Ps.sum(axis=0)),
        exchange=exchange,
        input_splits=input_splits,
        output_splits=output_splits,
        by_slot=by_slot,
        by_source=by_source,
        row_of_copy=row_of_copy,
        weight_N=routing.weight_N,
        token_N=routing.token_N,
        num_tokens=routing.num_tokens,
        top_k=routing.top_k,
    )
    return permute_rows(arrived_RD, by_slot, by_source), handle


def combine(rows_RD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
    """Send the experts' rows back and sum each token's, weighted, in float32 or better.

    rows_RD: [R, D] in the order in which dispatch gave them.   Returns y_TD [T, D] of the rows' type; a token
    without a routed copy gets zeros.
    """
    arrived_RD = permute_rows(rows_RD, handle.by_source, handle.by_slot)
    rows_ND = all_to_all_v(arrived_RD, handle.exchange, handle.output_splits, handle.input_splits)
    acc = torch.promote_types(rows_RD.dtype, handle.weight_N.dtype)
    copies_ND = _take_copies(rows_ND, handle.row_of_copy)
    weighted_ND = copies_ND.to(acc) * handle.weight_N.to(acc)[:, None]
    if handle.top_k is None:
        y_TD = weighted_ND.new_zeros((handle.num_tokens, rows_RD.shape[1]))
        y_TD = y_TD.index_add(0, handle.token_N, weighted_ND)
    else:
        y_TD = weighted_ND.view(handle.num_tokens, handle.top_k, rows_RD.shape[1]).sum(dim=1)
    return y_TD.to(rows_RD.dtype)


def _order_by_slot(expert_N: torch.Tensor, rows_S: np.ndarray, slot_to_expert_S: np.ndarray) -> torch.Tensor:
    """The copies to send, in the order (slot, token): copy_of_row [R] int64.

    Copies are sorted by expert first, stable in the token. The slots of an expert take theirs one after the
    other, so a slot's copies are one block of that order, and the blocks are gathered in slot order.
    """
    if rows_S[slot_to_expert_S < 0].any():
        raise ValueError("rows_PS sends rows to an empty slot (slot_to_expert is -1 there)")
    routed_last = torch.where(expert_N < 0, torch.iinfo(torch.int64).max, expert_N)
    by_expert = torch.argsort(routed_last, stable=True)
    slots_by_expert = np.argsort(slot_to_expert_S, kind="stable")
    length = rows_S[slots_by_expert]
    start_S = np.empty_like(rows_S)
    start_S[slots_by_expert] = np.cumsum(length) - length
    total = int(rows_S.sum())
    if np.array_equal(slots_by_expert, np.arange(slots_by_expert.shape[0])):
        return by_expert[:total]  # slots stand in expert order: the blocks do too
    return by_expert[block_index(start_S, rows_S, expert_N.device)]


class _TakeCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, row_of_copy):
        ctx.save_for_backward(row_of_copy)
        ctx.num_rows = rows_RD.shape[0]
        return take_rows(rows_RD, row_of_copy)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_ND,) = grad_outputs
        (row_of_copy,) = ctx.saved_tensors
        # every row stands for exactly one copy, so this is a permutation, not a sum
        grad_RD = grad_ND.new_empty((ctx.num_rows + 1, grad_ND.shape[1]))
        grad_RD.index_copy_(0, row_of_copy, grad_ND)
        return grad_RD[: ctx.num_rows], None


def _take_copies(rows_RD: torch.Tensor, row_of_copy: torch.Tensor) -> torch.Tensor:
    """The row of every copy [N, D], zeros where a copy was not sent."""
    return _TakeCopies.apply(rows_RD, row_of_copy)
