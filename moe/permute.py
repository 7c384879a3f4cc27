"""Permute: rows <-> slots. Index arithmetic and gathers, no communication.

On CPU the passes over rows are compiled kernels, elsewhere (and for types that they lack) torch operations:
twins, and a test holds them equal.

A *block* is a run of rows that stay together. Two layouts of the rows that a rank receives (2 local slots):

    as they arrive, by source rank:   (r0,s0)(r0,s1)(r1,s0)(r1,s1)
    as the experts want them:         (s0,r0)(s0,r1)(s1,r0)(s1,r1)
"""

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from moe.kernels import as_array, has_kernel, kernels


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for what the device is at."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def block_index(start_B: np.ndarray, length_B: np.ndarray, device: torch.device) -> torch.Tensor:
    """The index that gathers blocks one after the other.

    start_B, length_B: [B] int64, first row and number of rows of each block, in the order wanted.
    Returns [sum(length_B)] int64 on `device`.

    >>> block_index(np.array([3, 0]), np.array([2, 3]), torch.device("cpu")).tolist()
    [3, 4, 0, 1, 2]
    """
    total = int(length_B.sum())
    shift_B = start_B - (np.cumsum(length_B) - length_B)  # from place in the new order to place in the old
    shift, length = (
        to_device(torch.from_numpy(np.ascontiguousarray(a)), device) for a in (shift_B, length_B)
    )
    return torch.arange(total, device=device) + torch.repeat_interleave(shift, length, output_size=total)


def transposed_blocks(
    length_AB: np.ndarray, device: torch.device, order_B: np.ndarray | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Index and inverse index that turn rows in (a, b) order into (b, a) order; None, None = already there.

    length_AB: [A, B] int64, rows of each block as they stand, a-major;  order_B: the order in which the b's
    are wanted; it may leave out those without rows. None = ascending.
    """
    if order_B is None:
        if length_AB.shape[0] == 1 or length_AB.shape[1] == 1:
            return None, None
        order_B = np.arange(length_AB.shape[1])
    start_AB = (np.cumsum(length_AB) - length_AB.reshape(-1)).reshape(length_AB.shape)
    length_bA = np.ascontiguousarray(length_AB.T[order_B])
    start_BA = np.zeros(length_AB.T.shape, dtype=np.int64)
    start_BA[order_B] = (np.cumsum(length_bA) - length_bA.reshape(-1)).reshape(length_bA.shape)
    index = block_index(start_AB.T[order_B].reshape(-1), length_bA.reshape(-1), device)
    inverse = block_index(start_BA.T.reshape(-1), length_AB.reshape(-1), device)
    return index, inverse


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD, index, inverse):
        ctx.save_for_backward(inverse)
        return rows_RD.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_RD,) = grad_outputs
        (inverse,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse), None, None


def permute_rows(
    rows_RD: torch.Tensor, index: torch.Tensor | None, inverse: torch.Tensor | None
) -> torch.Tensor:
    """rows[index]; the backward is a gather through the inverse, where indexing alone would scatter with
    atomics."""
    if index is None or inverse is None:
        return rows_RD
    return _Permute.apply(rows_RD, index, inverse)


class _ExpandTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD, token_of_row, row_of_copy, top_k):
        ctx.save_for_backward(token_of_row, row_of_copy)
        ctx.top_k, ctx.num_tokens = top_k, x_TD.shape[0]
        return x_TD.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        token_of_row, row_of_copy = ctx.saved_tensors
        grad_RD = grad_outputs[0].contiguous()
        if ctx.top_k is None:
            acc = torch.promote_types(grad_RD.dtype, torch.float32)
            grad_TD = grad_RD.new_zeros((ctx.num_tokens, grad_RD.shape[1]), dtype=acc)
            grad_TD.index_add_(0, token_of_row, grad_RD.to(acc))
            return grad_TD.to(grad_RD.dtype), None, None, None
        return sum_rows(grad_RD, row_of_copy.view(ctx.num_tokens, ctx.top_k), None), None, None, None


def expand_tokens(
    x_TD: torch.Tensor, token_of_row: torch.Tensor, row_of_copy: torch.Tensor, top_k: int | None
) -> torch.Tensor:
    """One row for every copy that is sent; the backward sums a token's copies in float32 or better.

    x_TD: [T, D];  token_of_row: [R] int64;  row_of_copy: [N] int64, where copy n stands among the rows, R =
    not sent;  top_k: K where routing is regular.   Returns [R, D].
    """
    return _ExpandTokens.apply(x_TD, token_of_row, row_of_copy, top_k)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD, weight_TK, row_of_copy_TK):
        ctx.save_for_backward(rows_RD, weight_TK, row_of_copy_TK)
        return sum_rows(rows_RD, row_of_copy_TK, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_RD, weight_TK, row_of_copy_TK = ctx.saved_tensors
        grads = weighted_sum_backward(grad_outputs[0].contiguous(), rows_RD, weight_TK, row_of_copy_TK)
        return (*grads, None)


def weighted_sum(
    rows_RD: torch.Tensor, weight_TK: torch.Tensor, row_of_copy_TK: torch.Tensor
) -> torch.Tensor:
    """y_t = sum_k weight_tk * rows[row_of_copy_tk], in float32 or better, without atomics.

    rows_RD: [R, D], each the row of one copy;  weight_TK: [T, K] float32 or float64;  row_of_copy_TK: [T, K]
    int64, R = a copy that was not sent, which counts nothing.   Returns [T, D] of the rows' type.
    """
    return _WeightedSum.apply(rows_RD.contiguous(), weight_TK.contiguous(), row_of_copy_TK)


# ---- passes over rows: numba on CPU, torch elsewhere ----------------------------------------------------


def order_copies(
    expert_N: torch.Tensor, rows_S: np.ndarray, slot_to_expert_S: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies to send, in the order (slot, token), and where each copy stands in it.

    expert_N: [N] int64, -1 = not routed;  rows_S: [S] int64, this rank's rows for every slot: over the slots
    of an expert they sum to its copies, which fill them one after the other in token order;
    slot_to_expert_S: [S]. Returns copy_of_row [R] int64 and row_of_copy [N] int64, R for a copy that is not
    sent. Raises ValueError for rows that go to an empty slot, and on CPU where the rows are not the copies.
    """
    if rows_S[slot_to_expert_S < 0].any():
        raise ValueError("rows_PS sends rows to an empty slot (slot_to_expert is -1 there)")
    if expert_N.device.type != "cpu":  # to compare the counts would wait for the device
        return order_copies_torch(expert_N, rows_S, slot_to_expert_S)
    copy_of_row = torch.empty(int(rows_S.sum()), dtype=torch.int64)
    row_of_copy = torch.empty_like(expert_N)
    arrays = (np.ascontiguousarray(rows_S), slot_to_expert_S, copy_of_row.numpy(), row_of_copy.numpy())
    if not kernels().order(expert_N.numpy(), *arrays):
        raise ValueError(f"rows {rows_S.tolist()} for the slots do not sum to the copies of their experts")
    return copy_of_row, row_of_copy


def order_copies_torch(
    expert_N: torch.Tensor, rows_S: np.ndarray, slot_to_expert_S: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `order_copies`: copies sorted by expert, stable; a slot's are one block, gathered in slot
    order."""
    routed_last = torch.where(expert_N < 0, torch.iinfo(torch.int64).max, expert_N)
    by_expert = torch.argsort(routed_last, stable=True)
    slots_by_expert = np.argsort(slot_to_expert_S, kind="stable")
    length = rows_S[slots_by_expert]
    start_S = np.empty_like(rows_S)
    start_S[slots_by_expert] = np.cumsum(length) - length
    copy_of_row = by_expert[block_index(start_S, rows_S, expert_N.device)]
    row_of_copy = torch.full_like(expert_N, copy_of_row.shape[0])
    row_of_copy[copy_of_row] = torch.arange(copy_of_row.shape[0], device=expert_N.device)
    return copy_of_row, row_of_copy


def sum_rows(
    rows_RD: torch.Tensor, row_of_copy_TK: torch.Tensor, weight_TK: torch.Tensor | None
) -> torch.Tensor:
    """sum_k weight_tk * rows[row_of_copy_tk] without gradient; None for weights of 1.   Returns [T, D]."""
    if not has_kernel(rows_RD):
        return sum_rows_torch(rows_RD, row_of_copy_TK, weight_TK)
    if weight_TK is None:
        acc = torch.promote_types(rows_RD.dtype, torch.float32)
        weight_TK = torch.ones(row_of_copy_TK.shape, dtype=acc)
    out_TD = rows_RD.new_empty((row_of_copy_TK.shape[0], rows_RD.shape[1]))
    function = kernels().sum_rows_half if rows_RD.dtype == torch.bfloat16 else kernels().sum_rows
    function(as_array(rows_RD), row_of_copy_TK.numpy(), as_array(weight_TK), as_array(out_TD))
    return out_TD


def sum_rows_torch(
    rows_RD: torch.Tensor, row_of_copy_TK: torch.Tensor, weight_TK: torch.Tensor | None
) -> torch.Tensor:
    """Twin of `sum_rows`."""
    acc = torch.promote_types(rows_RD.dtype, torch.float32 if weight_TK is None else weight_TK.dtype)
    copies_TKD = take_rows(rows_RD, row_of_copy_TK)
    if weight_TK is None:
        return copies_TKD.sum(dim=1, dtype=acc).to(rows_RD.dtype)
    return (copies_TKD.to(acc) * weight_TK.to(acc)[..., None]).sum(dim=1).to(rows_RD.dtype)


def weighted_sum_backward(
    grad_TD: torch.Tensor, rows_RD: torch.Tensor, weight_TK: torch.Tensor, row_of_copy_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `weighted_sum`: of the rows [R, D] and of the weights [T, K]."""
    if not has_kernel(rows_RD):
        return weighted_sum_backward_torch(grad_TD, rows_RD, weight_TK, row_of_copy_TK)
    grad_RD, grad_TK = torch.empty_like(rows_RD), torch.empty_like(weight_TK)
    half = rows_RD.dtype == torch.bfloat16
    function = kernels().weighted_sum_backward_half if half else kernels().weighted_sum_backward
    arrays = (as_array(t) for t in (grad_TD, rows_RD, weight_TK, row_of_copy_TK, grad_RD, grad_TK))
    function(*arrays)
    return grad_RD, grad_TK


def weighted_sum_backward_torch(
    grad_TD: torch.Tensor, rows_RD: torch.Tensor, weight_TK: torch.Tensor, row_of_copy_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `weighted_sum_backward`."""
    acc = torch.promote_types(rows_RD.dtype, weight_TK.dtype)
    grad_TK = (take_rows(rows_RD, row_of_copy_TK).to(acc) * grad_TD.to(acc)[:, None]).sum(dim=2)
    spread_ND = (weight_TK.to(acc)[..., None] * grad_TD.to(acc)[:, None]).flatten(0, 1).to(rows_RD.dtype)
    # every row stands for one copy: a permutation, not a sum. Unsent copies share a row, which is cut off.
    grad_RD = rows_RD.new_empty((rows_RD.shape[0] + 1, rows_RD.shape[1]))
    grad_RD.index_copy_(0, row_of_copy_TK.reshape(-1), spread_ND)
    return grad_RD[: rows_RD.shape[0]], grad_TK.to(weight_TK.dtype)


def take_rows(rows_RD: torch.Tensor, row_of_copy: torch.Tensor) -> torch.Tensor:
    """rows[row_of_copy], where row number R (a copy that was not sent) gives a row of zeros."""
    if row_of_copy.numel() != rows_RD.shape[0]:  # else every copy was sent: a permutation
        rows_RD = torch.cat([rows_RD, rows_RD.new_zeros((1, rows_RD.shape[1]))])
    return rows_RD.index_select(0, row_of_copy.reshape(-1)).view(*row_of_copy.shape, rows_RD.shape[1])
