"""Activation: what lies between the matrix products of an expert, and its gradient, each in one pass.

    hidden = silu(gate) * up      (SwiGLU: Shazeer, GLU Variants Improve Transformer)
    hidden = gelu(gate)           up is None

On CPU a SwiGLU in float32 and bfloat16 is a kernel, everything else torch operations: twins, held equal by a
test.
"""

import torch
from torch.nn import functional as F

from moe.kernels import as_array, kernels


def activate(gate_RF: torch.Tensor, up_RF: torch.Tensor | None, out_RF: torch.Tensor) -> None:
    """Write the activation of gate_RF and up_RF (None: GELU) to out_RF; [R, F], contiguous, one type."""
    assert gate_RF.dtype == out_RF.dtype, (
        f"{gate_RF.dtype} and {out_RF.dtype}: kernels take them for one type"
    )
    if up_RF is None:
        torch.ops.aten.gelu.out(gate_RF, out=out_RF)
    elif _has_kernel(gate_RF):
        half = gate_RF.dtype == torch.bfloat16
        function = kernels().swiglu_half if half else kernels().swiglu
        function(as_array(gate_RF), as_array(up_RF), as_array(out_RF))
    else:
        activate_torch(gate_RF, up_RF, out_RF)


def activate_torch(gate_RF: torch.Tensor, up_RF: torch.Tensor, out_RF: torch.Tensor) -> None:
    """Twin of `activate` for SwiGLU."""
    torch.ops.aten.silu.out(gate_RF, out=out_RF).mul_(up_RF)


def activate_backward(
    grad_RF: torch.Tensor,
    gate_RF: torch.Tensor,
    up_RF: torch.Tensor | None,
    hidden_RF: torch.Tensor,
    grad_up_RF: torch.Tensor | None,
) -> None:
    """The activation again into hidden_RF, and its gradients: of the gate over grad_RF, of up to grad_up_RF.

    grad_RF: [R, F] gradient of the activation, replaced;  gate_RF, up_RF: as in the forward.
    """
    if up_RF is None or grad_up_RF is None:
        torch.ops.aten.gelu.out(gate_RF, out=hidden_RF)
        torch.ops.aten.gelu_backward.grad_input(grad_RF.clone(), gate_RF, grad_input=grad_RF)
    elif _has_kernel(gate_RF):
        half = gate_RF.dtype == torch.bfloat16
        function = kernels().swiglu_backward_half if half else kernels().swiglu_backward
        function(*(as_array(t) for t in (grad_RF, gate_RF, up_RF, hidden_RF, grad_up_RF)))
    else:
        activate_backward_torch(grad_RF, gate_RF, up_RF, hidden_RF, grad_up_RF)


def activate_backward_torch(
    grad_RF: torch.Tensor,
    gate_RF: torch.Tensor,
    up_RF: torch.Tensor,
    hidden_RF: torch.Tensor,
    grad_up_RF: torch.Tensor,
) -> None:
    """Twin of `activate_backward` for SwiGLU."""
    silu_RF = F.silu(gate_RF)
    torch.mul(silu_RF, up_RF, out=hidden_RF)
    torch.mul(silu_RF, grad_RF, out=grad_up_RF)
    grad_RF.copy_(torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF))


def _has_kernel(gate_RF: torch.Tensor) -> bool:
    return gate_RF.device.type == "cpu" and gate_RF.dtype in (torch.float32, torch.bfloat16)
