"""Dispatch and combine: token rows to the ranks of their experts, and back.

    copies in token order -> rows by slot -> all-to-all-v -> rows by (slot, source rank, token) -> experts
    y_TD <- weighted sum over a token's copies <- rows by slot <- all-to-all-v <-

`dispatch` returns the rows and a frozen handle; `combine` consumes the handle. The backward of each is the
other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moe.exchange import Exchange, all_to_all_v, start_all_to_all_v
from moe.permute import expand_tokens, order_copies, permute_rows, transposed_blocks, weighted_sum
from routing.record import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchHandle:
    """What combine must know of a dispatch. Opaque to everybody but for the rows of every slot.

    rows_by_source_Ps: [P, s] int64 on the host, rows that each of this rank's slots received from each rank
    """

    rows_by_source_Ps: torch.Tensor
    exchange: Exchange
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    by_slot: torch.Tensor | None
    by_source: torch.Tensor | None
    copy_of_row: torch.Tensor
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
    meanwhile: Callable[[], None] | None = None,
    *,
    by_slot: bool = True,
) -> tuple[torch.Tensor, DispatchHandle]:
    """Send every routed copy to a slot of its expert.

    x_TD: [T, D] this rank's rows;  routing: their experts;  rows_PS: [P, S] int64 on the host, the rows that
    every source rank sends to every slot (the same array on all ranks);  slot_to_expert_S: [S] int64, slots
    contiguous by rank, -1 = empty;  meanwhile: work to do while the rows are in flight (its backward runs
    while their gradients are);  by_slot: False leaves the rows as they arrive, in blocks by (source rank,
    local slot), for experts that take them there.
    Returns rows_RD [R, D], in the order (local slot, source rank, token), and the handle for combine. Raises
    ValueError where rows_PS does not fit the ranks, the slots or this rank's counts.
    """
    num_ranks, num_slots = rows_PS.shape
    if num_ranks != exchange.size or num_slots % num_ranks or num_slots != slot_to_expert_S.shape[0]:
        raise ValueError(
            f"rows_PS has shape {rows_PS.shape}; expected ({exchange.size}, {slot_to_expert_S.shape[0]}) "
            "with slots a multiple of the ranks"
        )
    local = num_slots // num_ranks
    copy_of_row, row_of_copy = order_copies(routing.expert_N, rows_PS[exchange.rank], slot_to_expert_S)
    rows_ND = expand_tokens(x_TD, routing.token_N[copy_of_row], row_of_copy, routing.top_k)

    input_splits = tuple(rows_PS[exchange.rank].reshape(num_ranks, local).sum(axis=1).tolist())
    received_Ps = rows_PS[:, exchange.rank * local : (exchange.rank + 1) * local]
    output_splits = tuple(received_Ps.sum(axis=1).tolist())
    if meanwhile is None or exchange.size == 1:
        arrived_RD = all_to_all_v(rows_ND, exchange, input_splits, output_splits)
        if meanwhile is not None:
            meanwhile()
    else:
        in_flight = start_all_to_all_v(rows_ND, exchange, input_splits, output_splits)
        meanwhile()
        arrived_RD = in_flight.wait()
    order, inverse = transposed_blocks(received_Ps, x_TD.device) if by_slot else (None, None)
    handle = DispatchHandle(
        rows_by_source_Ps=torch.from_numpy(received_Ps.copy()),
        exchange=exchange,
        input_splits=input_splits,
        output_splits=output_splits,
        by_slot=order,
        by_source=inverse,
        copy_of_row=copy_of_row,
        row_of_copy=row_of_copy,
        weight_N=routing.weight_N,
        token_N=routing.token_N,
        num_tokens=routing.num_tokens,
        top_k=routing.top_k,
    )
    return permute_rows(arrived_RD, order, inverse), handle


def dispatch_weights(handle: DispatchHandle) -> torch.Tensor:
    """Send every routed copy's router weight after its row: weight_R [R], in the rows' order,
    differentiable."""
    weight_N1 = handle.weight_N[handle.copy_of_row][:, None]
    arrived_R1 = all_to_all_v(weight_N1, handle.exchange, handle.input_splits, handle.output_splits)
    return permute_rows(arrived_R1, handle.by_slot, handle.by_source)[:, 0]


def combine(rows_RD: torch.Tensor, handle: DispatchHandle, *, weighted: bool = True) -> torch.Tensor:
    """Send the experts' rows back and sum each token's in float32 or better.

    rows_RD: [R, D] in the order in which dispatch gave them;  weighted: multiply by the router's weights
    (False: the experts have done so).   Returns y_TD [T, D] of the rows' type; a token without a routed copy
    gets zeros.
    """
    weight_N = handle.weight_N if weighted else torch.ones_like(handle.weight_N, requires_grad=False)
    arrived_RD = permute_rows(rows_RD, handle.by_source, handle.by_slot)
    rows_ND = all_to_all_v(arrived_RD, handle.exchange, handle.output_splits, handle.input_splits)
    if handle.top_k is not None:
        shape = (handle.num_tokens, handle.top_k)
        return weighted_sum(rows_ND, weight_N.view(shape), handle.row_of_copy.view(shape))
    acc = torch.promote_types(rows_RD.dtype, handle.weight_N.dtype)
    sent_N = handle.row_of_copy < rows_ND.shape[0]
    copies_ND = rows_ND.index_select(0, handle.row_of_copy[sent_N]).to(acc)
    y_TD = copies_ND.new_zeros((handle.num_tokens, rows_RD.shape[1]))
    y_TD = y_TD.index_add(0, handle.token_N[sent_N], copies_ND * weight_N[sent_N].to(acc)[:, None])
    return y_TD.to(rows_RD.dtype)
