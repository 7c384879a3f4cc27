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
        """Replace the bias by bias_E [E], finite.   Raises ValueError for another shape or NaN/inf."""
        if bias_E.shape != self.bias_E.shape:
            raise ValueError(
                f"bias has shape {tuple(bias_E.shape)}, expected {tuple(self.bias_E.shape)} (one per expert)"
            )
        if not bool(torch.isfinite(bias_E).all()):
            worst = int((~torch.isfinite(bias_E)).nonzero()[0])
            raise ValueError(f"bias of expert {worst} is {float(bias_E[worst])}, expected a finite number")
        self.bias_E.copy_(bias_E)

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        kept = self.bias_E
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if self.bias_E.dtype != torch.float32:  # moved to the new device, but not rounded
            self.bias_E = kept.to(device=self.bias_E.device)
        return self
