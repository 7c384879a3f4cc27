"""Experts: the weights of this rank's slots, and their SwiGLU feed-forward over rows grouped by slot.

    rows_RD = (slot 0 ....)(slot 1 ..)(slot 2 empty)(slot 3 ...)    rows_per_slot = [4, 2, 0, 3]

One autograd function a projection writes one weight gradient, zeros for a slot without rows. (Indexing a
fused
weight expert by expert under autograd would add up E gradients of the full size: quadratic in E.)
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

METHODS = ("auto", "loop", "grouped_mm")


class _LoopLinear(torch.autograd.Function):
    """rows of slot e times W[e]^T, slot after slot."""

    @staticmethod
    def forward(ctx: Any, rows_RI, weight_eOI, ends):
        ctx.save_for_backward(rows_RI, weight_eOI)
        ctx.ends = ends
        out_RO = rows_RI.new_empty((rows_RI.shape[0], weight_eOI.shape[1]))
        for e, (start, end) in enumerate(_spans(ends)):
            torch.mm(rows_RI[start:end], weight_eOI[e].t(), out=out_RO[start:end])
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        (grad_RO,) = grad_outputs
        rows_RI, weight_eOI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_RI, grad_eOI = torch.empty_like(rows_RI), torch.empty_like(weight_eOI)
        for e, (start, end) in enumerate(_spans(ctx.ends)):
            torch.mm(grad_RO[start:end], weight_eOI[e], out=grad_RI[start:end])
            torch.mm(grad_RO[start:end].t(), rows_RI[start:end], out=grad_eOI[e])
        return grad_RI, grad_eOI, None


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends))


def grouped_mm_is_legal(rows_RI: torch.Tensor, weight_eOI: torch.Tensor) -> bool:
    """Whether torch's grouped matrix product takes these: no float64, row strides of a multiple of 16
    bytes."""
    size = rows_RI.element_size()
    strides_fit = all(n * size % 16 == 0 for n in (rows_RI.shape[1], *weight_eOI.shape[1:]))
    return rows_RI.dtype in (torch.bfloat16, torch.float16, torch.float32) and strides_fit


def grouped_linear(
    rows_RI: torch.Tensor, weight_eOI: torch.Tensor, rows_per_slot: torch.Tensor, method: str = "auto"
) -> torch.Tensor:
    """Multiply each slot's rows by its own matrix.

    rows_RI: [R, I], grouped by slot;  weight_eOI: [e, O, I];  rows_per_slot: [e] int64 on the host, sum R;
    method: "loop" (any type), "grouped_mm" (one kernel), or "auto": grouped_mm for 16-bit types on CUDA where
    it
    is legal, else the loop.   Returns [R, O].   Raises ValueError where the counts do not sum to R.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    ends = rows_per_slot.cumsum(0)
    if int(rows_per_slot.sum()) != rows_RI.shape[0] or int(rows_per_slot.min()) < 0:
        raise ValueError(
            f"rows_per_slot {rows_per_slot.tolist()} must be 0 or more each and sum to the "
            f"{rows_RI.shape[0]} rows given"
        )
    if method == "grouped_mm" and not grouped_mm_is_legal(rows_RI, weight_eOI):
        raise ValueError(
            f"grouped_mm takes no {rows_RI.dtype} rows of width {rows_RI.shape[1]} (16 or 32 bits, rows "
            'a multiple of 16 bytes): use method="loop"'
        )
    if method == "auto":
        fast = rows_RI.is_cuda and rows_RI.dtype != torch.float32 and grouped_mm_is_legal(rows_RI, weight_eOI)
        method = "grouped_mm" if fast and rows_RI.shape[0] else "loop"
    if method == "grouped_mm":
        offs = ends.to(device=rows_RI.device, dtype=torch.int32)
        return F.grouped_mm(rows_RI, weight_eOI.transpose(1, 2), offs=offs)
    return _LoopLinear.apply(rows_RI, weight_eOI, ends.tolist())


class Experts(nn.Module):
    """SwiGLU experts, w2(silu(w1 x) * w3 x), with fused weights: one tensor a matrix for all local experts.

    w1, w3: [e, F, D];  w2: [e, D, F].   Tensors in, tensors out.
    """

    def __init__(self, num_local: int, d_model: int, hidden: int, method: str = "auto") -> None:
        super().__init__()
        self.method = method
        self.w1 = nn.Parameter(torch.empty(num_local, hidden, d_model))
        self.w2 = nn.Parameter(torch.empty(num_local, d_model, hidden))
        self.w3 = nn.Parameter(torch.empty(num_local, hidden, d_model))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    def forward(self, rows_RD: torch.Tensor, rows_per_slot: torch.Tensor) -> torch.Tensor:
        """rows_RD [R, D] grouped by slot, rows_per_slot [e] int64 on the host -> [R, D]."""
        gate_RF = grouped_linear(rows_RD, self.w1, rows_per_slot, self.method)
        up_RF = grouped_linear(rows_RD, self.w3, rows_per_slot, self.method)
        return grouped_linear(F.silu(gate_RF) * up_RF, self.w2, rows_per_slot, self.method)


class SwiGLU(nn.Module):
    """The same feed-forward for every row: a dense block's, or the shared expert."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, hidden, bias=False)
        self.w2 = nn.Linear(hidden, d_model, bias=False)
        self.w3 = nn.Linear(d_model, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
