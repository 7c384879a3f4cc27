"""Experts: the weights of this rank's slots, and the module that runs their feed-forward over the rows.

`feed_forward.py` has the ways to compute it.
"""

import zlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from moe.config import ACTIVATIONS
from moe.feed_forward import as_computed, feed_forward
from moe.replicate import Replicas


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
        init_experts(self, np.arange(num_local))

    def fetch(self, replicas: Replicas) -> None:
        """Send the replicas' weights on their way now, ahead of the forward that wants them."""
        replicas.start([w for w in as_computed(self.w1, self.w2, self.w3) if w is not None])

    def forward(
        self,
        rows_RD: torch.Tensor,
        rows_Ps: torch.Tensor,
        weight_R: torch.Tensor | None = None,
        output: bool = True,
        replicas: Replicas | None = None,
    ) -> torch.Tensor:
        """Rows [R, D] in blocks by (source, slot), their numbers [P, e] or [e], weights [R] -> [R, D].

        The replicas' weights are fetched in here: an engine may have gathered w1, w2, w3 for this call only.
        """
        return feed_forward(
            rows_RD, self.w1, self.w2, self.w3, rows_Ps, weight_R, self.method, output, replicas
        )


def init_experts(experts: Experts, expert_e: np.ndarray) -> None:
    """Draw every expert by its number, from one number of torch's global generator.

    So ranks that were seeded alike start with different experts, and copies of one expert are equal.
    expert_e: [e] the logical experts of the slots.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.no_grad():
        for name, weight in experts.named_parameters():
            for local, expert in enumerate(expert_e.tolist()):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{expert}".encode()))
                drawn = torch.randn(weight.shape[1:], generator=generator, device="cpu")
                weight[local].copy_(drawn * weight.shape[2] ** -0.5)


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
