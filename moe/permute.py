"""Permute: rows <-> slots. Index arithmetic and gathers, no communication.

A *block* is a run of rows that stay together. Two layouts of the rows that a rank receives (2 local slots):

    as they arrive, by source rank:   (r0,s0)(r0,s1)(r1,s0)(r1,s1)
    as the experts want them:         (s0,r0)(s0,r1)(s1,r0)(s1,r1)
"""

from typing import Any

import numpy as np
import torch


def block_index(start_B: np.ndarray, length_B: np.ndarray, device: torch.device) -> torch.Tensor:
    """The index that gathers blocks one after the other.

    start_B, length_B: [B] int64, first row and number of rows of each block, in the order wanted.
    Returns [sum(length_B)] int64 on `device`.

    >>> block_index(np.array([3, 0]), np.array([2, 3]), torch.device("cpu")).tolist()
    [3, 4, 0, 1, 2]
    """
    total = int(length_B.sum())
    shift_B = start_B - (np.cumsum(length_B) - length_B)  # from place in the new order to place in the old
    shift, length = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (shift_B, length_B))
    return torch.arange(total, device=device) + torch.repeat_interleave(shift, length, output_size=total)


def transposed_blocks(
    length_AB: np.ndarray, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Index and inverse index that turn rows in (a, b) order into (b, a) order; None, None = already there.

    length_AB: [A, B] int64, rows of each block as they stand, a-major.
    """
    if length_AB.shape[0] == 1 or length_AB.shape[1] == 1:
        return None, None
    start_AB = (np.cumsum(length_AB) - length_AB.reshape(-1)).reshape(length_AB.shape)
    length_BA = np.ascontiguousarray(length_AB.T)
    start_BA = (np.cumsum(length_BA) - length_BA.reshape(-1)).reshape(length_BA.shape)
    index = block_index(start_AB.T.reshape(-1), length_BA.reshape(-1), device)
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
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_RD,) = grad_outputs
        token_of_row, row_of_copy = ctx.saved_tensors
        acc = torch.promote_types(grad_RD.dtype, torch.float32)
        if ctx.top_k is None:
            grad_TD = grad_RD.new_zeros((ctx.num_tokens, grad_RD.shape[1]), dtype=acc)
            grad_TD.index_add_(0, token_of_row, grad_RD.to(acc))
        else:
            copies_ND = take_rows(grad_RD, row_of_copy)
            grad_TD = copies_ND.view(ctx.num_tokens, ctx.top_k, grad_RD.shape[1]).sum(dim=1, dtype=acc)
        return grad_TD.to(grad_RD.dtype), None, None, None


def expand_tokens(
    x_TD: torch.Tensor, token_of_row: torch.Tensor, row_of_copy: torch.Tensor, top_k: int | None
) -> torch.Tensor:
    """One row for every copy that is sent; the backward sums a token's copies in float32 or better.

    x_TD: [T, D];  token_of_row: [R] int64;  row_of_copy: [N] int64, where copy n stands among the rows, R =
    not
    sent;  top_k: K where routing is regular.   Returns [R, D].
    """
    return _ExpandTokens.apply(x_TD, token_of_row, row_of_copy, top_k)


def take_rows(rows_RD: torch.Tensor, row_of_copy: torch.Tensor) -> torch.Tensor:
    """rows[row_of_copy], where row number R (a copy that was not sent) gives a row of zeros."""
    if row_of_copy.shape[0] == rows_RD.shape[0]:  # every copy was sent: a permutation
        return rows_RD.index_select(0, row_of_copy)
    padded = torch.cat([rows_RD, rows_RD.new_zeros((1, rows_RD.shape[1]))])
    return padded.index_select(0, row_of_copy)
