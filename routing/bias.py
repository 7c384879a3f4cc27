"""ExpertBias: the control input of the router. It selects experts and never enters a weight."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override


class ExpertBias(nn.Module):
    """One number per expert, added to its score for the selection only. Set from outside, no gradient.

    Stays float32 when the model is cast (`model.bfloat16()`): steps of a bias law are far below bfloat16's
    resolution. Source: Wang et al., Auxiliary-loss-free load balancing, section 3.
    """

    bias_E: torch.Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("bias_E", torch.zeros(num_experts, dtype=torch.float32))

    @torch.no_grad()
    def set(self, bias_E: torch.Tensor) -> None:
        """Replace the bias by bias_E, rounded to float32.

        bias_E: [E], any type (float64 of a bias law), on any device, finite also in float32. From the CPU it
        reaches a GPU without a wait for it; what lies on a GPU is waited for, to be checked. Raises
        ValueError for another shape or NaN/inf; the old bias then stays.
        """
        if bias_E.shape != self.bias_E.shape:
            raise ValueError(
                f"bias has shape {tuple(bias_E.shape)}, expected {tuple(self.bias_E.shape)} (one per expert)"
            )
        rounded_E = bias_E.to(torch.float32)
        finite_E = torch.isfinite(rounded_E)
        if not bool(finite_E.all()):
            worst = int((~finite_E).nonzero()[0])
            raise ValueError(
                f"bias of expert {worst} is {float(bias_E[worst])}, expected a finite number of float32"
            )
        if self.bias_E.is_cuda and not rounded_E.is_cuda:
            rounded_E = rounded_E.pin_memory()  # else the copy would wait for the device
        self.bias_E.copy_(rounded_E, non_blocking=True)

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        kept = self.bias_E
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if self.bias_E.dtype != torch.float32:  # moved to the new device, but not rounded
            self.bias_E = kept.to(device=self.bias_E.device)
        return self
