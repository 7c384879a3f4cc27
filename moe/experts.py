"""Experts: the weights of this rank's slots, and their feed-forward over rows grouped by slot.

    rows_RD = (slot 0 ....)(slot 1 ..)(slot 2 empty)(slot 3 ...)    rows_per_slot = [4, 2, 0, 3]

SwiGLU: w2 (silu(w1 x) * w3 x).   GELU: w2 gelu(w1 x).   Three ways to compute them:

    loop        slot after slot, the whole feed-forward in one autograd function (any type; the readable one)
    grouped_mm  one kernel a projection (16 and 32 bit, rows a multiple of 16 bytes)
    bmm         one batched product a projection, where every slot has the same number of rows

No way indexes a fused weight expert by expert under autograd: that would add up E gradients of the full size.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moe.config import ACTIVATIONS

METHODS = ("auto", "loop", "grouped_mm", "bmm")


class _LoopFeedForward(torch.autograd.Function):
    """Slot after slot, so that what lies between the products stays in the cache.

    weight_R multiplies a row before the second matrix (None: not at all). The activations are computed again
    in the backward from what the first products gave: cheaper than the memory they would take.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD, w1, w2, w3, weight_R, ends):
        gate_RF = rows_RD.new_empty((rows_RD.shape[0], w1.shape[1]))
        up_RF = None if w3 is None else torch.empty_like(gate_RF)
        out_RD = rows_RD.new_empty((rows_RD.shape[0], w2.shape[1]))
        for e, (start, end) in enumerate(_spans(ends)):
            if start == end:
                continue
            torch.mm(rows_RD[start:end], w1[e].t(), out=gate_RF[start:end])
            if w3 is not None and up_RF is not None:
                torch.mm(rows_RD[start:end], w3[e].t(), out=up_RF[start:end])
            hidden = _activate(gate_RF[start:end], None if up_RF is None else up_RF[start:end])
            if weight_R is not None:
                hidden.mul_(weight_R[start:end, None])
            torch.mm(hidden, w2[e].t(), out=out_RD[start:end])
        ctx.save_for_backward(rows_RD, w1, w2, w3, weight_R, gate_RF, up_RF)
        ctx.ends = ends
        return out_RD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        grad_RD = grad_outputs[0].contiguous()
        rows_RD, w1, w2, w3, weight_R, gate_RF, up_RF = ctx.saved_tensors
        grads: list[Any] = [
            None if t is None else torch.empty_like(t) for t in (rows_RD, w1, w2, w3, weight_R)
        ]
        grad_rows, grad_w1, grad_w2, grad_w3, grad_weight = grads
        for e, (start, end) in enumerate(_spans(ctx.ends)):
            if start == end:
                for grad in (grad_w1, grad_w2, grad_w3):
                    if grad is not None:
                        grad[e].zero_()
                continue
            span = slice(start, end)
            rows, gate = rows_RD[span], gate_RF[span]
            up = None if up_RF is None else up_RF[span]
            grad_hidden = grad_RD[span] @ w2[e]
            hidden = _activate(gate, up)
            if weight_R is not None:
                grad_weight[span] = (grad_hidden * hidden).sum(dim=1)
                hidden.mul_(weight_R[span, None])
                grad_hidden.mul_(weight_R[span, None])
            torch.mm(grad_RD[span].t(), hidden, out=grad_w2[e])
            grad_gate, grad_up = _activate_backward(grad_hidden, gate, up)
            torch.mm(grad_gate.t(), rows, out=grad_w1[e])
            torch.mm(grad_gate, w1[e], out=grad_rows[span])
            if grad_up is not None:
                torch.mm(grad_up.t(), rows, out=grad_w3[e])
                grad_rows[span].addmm_(grad_up, w3[e])
        return (*grads, None)


def _activate(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return F.gelu(gate) if up is None else F.silu(gate).mul_(up)


def _activate_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the first products; `grad` is used up."""
    if up is None:
        return torch.ops.aten.gelu_backward(grad, gate), None
    grad_up = F.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends))


def grouped_mm_is_legal(rows_RI: torch.Tensor, weight_eOI: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these: no float64, row strides of a multiple of 16 bytes."""
    size = rows_RI.element_size()
    strides_fit = all(n * size % 16 == 0 for n in (rows_RI.shape[1], *weight_eOI.shape[1:]))
    return rows_RI.dtype in (torch.bfloat16, torch.float16, torch.float32) and strides_fit


def choose_method(rows_RD: torch.Tensor, w1: torch.Tensor) -> str:
    """The fastest legal way: first what the types and sizes allow, then what was measured to be fast.

    Measured with `counterpoise bench layer` (D 256, F 512, 64 to 2048 rows a slot). On CPU the loop won or
    tied at every size in float32 and bfloat16: what lies between the products stays in the cache. On CUDA the
    loop would launch 3 kernels a slot and product, so one grouped kernel is taken where it is legal (not in
    float32, where it is none of the fast kernels). The rule looks at sizes alone, so a resumed run chooses
    alike.
    """
    grouped = rows_RD.is_cuda and rows_RD.element_size() == 2 and grouped_mm_is_legal(rows_RD, w1)
    return "grouped_mm" if grouped and rows_RD.shape[0] else "loop"


def feed_forward(
    rows_RD: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor | None,
    rows_per_slot: torch.Tensor,
    weight_R: torch.Tensor | None = None,
    method: str = "auto",
) -> torch.Tensor:
    """Run every slot's feed-forward over its rows.

    rows_RD: [R, D], grouped by slot;  w1, w3: [e, F, D], w2: [e, D, F]; w3 None = GELU instead of SwiGLU;
    rows_per_slot: [e] int64 on the host, sum R;  weight_R: [R] router weight, applied before the second
    matrix;
    method: one of METHODS.   Returns [R, D].
    Raises ValueError where the counts do not sum to R, and for a method that is unknown or not legal here.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    if int(rows_per_slot.sum()) != rows_RD.shape[0] or bool((rows_per_slot < 0).any()):
        raise ValueError(
            f"rows_per_slot {rows_per_slot.tolist()} must be 0 or more each and sum to the "
            f"{rows_RD.shape[0]} rows given"
        )
    if weight_R is not None:
        weight_R = weight_R.to(rows_RD.dtype)
    if method == "auto":
        method = choose_method(rows_RD, w1)
    if method == "loop":
        ends = rows_per_slot.cumsum(0).tolist()
        return _LoopFeedForward.apply(rows_RD, w1, w2, w3, weight_R, ends)
    product = (
        _grouped(rows_RD, w1, rows_per_slot) if method == "grouped_mm" else _batched(rows_RD, rows_per_slot)
    )
    hidden = (
        F.gelu(product(rows_RD, w1)) if w3 is None else F.silu(product(rows_RD, w1)) * product(rows_RD, w3)
    )
    return product(hidden if weight_R is None else hidden * weight_R[:, None], w2)


def _grouped(rows_RD: torch.Tensor, w1: torch.Tensor, rows_per_slot: torch.Tensor) -> Any:
    """The product of torch's grouped kernel."""
    if not grouped_mm_is_legal(rows_RD, w1):
        raise ValueError(
            f"grouped_mm takes no {rows_RD.dtype} rows of width {rows_RD.shape[1]} and {w1.shape[1]} (16 or "
            '32 bits, a multiple of 16 bytes): use method="loop"'
        )
    offs = rows_per_slot.cumsum(0).to(device=rows_RD.device, dtype=torch.int32)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # the clone in the backward: the kernel refuses an expanded gradient (that of a sum)
        return _OwnGradient.apply(F.grouped_mm(rows, weight.transpose(1, 2), offs=offs))

    return product


class _OwnGradient(torch.autograd.Function):
    """Identity whose gradient lies in memory row by row."""

    @staticmethod
    def forward(ctx: Any, rows):
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return grad_outputs[0].contiguous()


def _batched(rows_RD: torch.Tensor, rows_per_slot: torch.Tensor) -> Any:
    """The product of one batched matrix product."""
    if int(rows_per_slot.max()) != int(rows_per_slot.min()):
        raise ValueError(
            f"bmm takes the same number of rows for every slot, got {rows_per_slot.tolist()}: use "
            'method="loop"'
        )

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cut = rows.view(weight.shape[0], int(rows_per_slot[0]), rows.shape[1])
        return torch.bmm(cut, weight.transpose(1, 2)).flatten(0, 1)

    return product


class Experts(nn.Module):
    """The experts of this rank's slots, with fused weights: one tensor a matrix for all of them.

    w1, w3: [e, F, D];  w2: [e, D, F]; GELU experts have no w3.   Tensors in, tensors out.
    """

    def __init__(
        self, num_local: int, d_model: int, hidden: int, activation: str = "swiglu", method: str = "auto"
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        self.method = method
        self.w1 = nn.Parameter(torch.empty(num_local, hidden, d_model))
        self.w2 = nn.Parameter(torch.empty(num_local, d_model, hidden))
        self.w3 = nn.Parameter(torch.empty(num_local, hidden, d_model)) if activation == "swiglu" else None
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    def forward(
        self, rows_RD: torch.Tensor, rows_per_slot: torch.Tensor, weight_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows_RD [R, D] grouped by slot, rows_per_slot [e] int64 on the host, weight_R [R] or None -> [R,
        D]."""
        return feed_forward(rows_RD, self.w1, self.w2, self.w3, rows_per_slot, weight_R, self.method)


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
