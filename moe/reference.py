"""DenseMoE: the slow mixture of experts in one process. Token by token, choice by choice: the oracle of every
test.

It shares nothing with the fast layer but the router's settings: its own selection, weights and losses, in
plain loops that can be read against the papers.
"""

import torch
from torch import nn

from moe.config import MoEConfig


class DenseMoE(nn.Module):
    """All E experts in one process.

    gate: [E, D];  bias: [E], selects only;  w1, w3: [E, F, D];  w2: [E, D, F];  shared: (w1, w2, w3) or None.
    """

    bias: torch.Tensor

    def __init__(
        self,
        config: MoEConfig,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        router, hidden = config.router, config.expert_hidden
        experts, width = router.num_experts, router.d_model
        self.config = config

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=dtype, generator=generator) * std)

        self.gate = normal(experts, width, std=0.02)
        self.register_buffer("bias", torch.zeros(experts, dtype=dtype))
        self.w1 = normal(experts, hidden, width, std=width**-0.5)
        self.w2 = normal(experts, width, hidden, std=hidden**-0.5)
        self.w3 = normal(experts, hidden, width, std=width**-0.5)
        shared = config.shared_hidden
        self.shared_w1 = normal(shared, width, std=width**-0.5)
        self.shared_w2 = normal(width, shared, std=max(shared, 1) ** -0.5)
        self.shared_w3 = normal(shared, width, std=width**-0.5)

    def choose(self, scores_E: torch.Tensor) -> list[int]:
        """The K experts of one token: largest score + bias first, the lowest id among equals."""
        biased = (scores_E + self.bias).tolist()
        return sorted(range(len(biased)), key=lambda e: (-biased[e], e))[: self.config.router.top_k]

    def expert(self, e: int, x_D: torch.Tensor) -> torch.Tensor:
        """Feed-forward of one expert for one token, [D] -> [D]."""
        if self.config.activation == "gelu":
            return self.w2[e] @ torch.nn.functional.gelu(self.w1[e] @ x_D)
        return _swiglu(x_D, self.w1[e], self.w2[e], self.w3[e])

    def forward(
        self,
        x_TD: torch.Tensor,
        token_mask_T: torch.Tensor | None = None,
        fraction_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the whole global batch.

        x_TD: [T, D];  token_mask_T: [T] bool, False = padding;  fraction_E: [E] shares of the balance loss,
        default: this batch's own.
        Returns y_TD [T, D], the weighted auxiliary loss as a sum over valid tokens, and tokens_per_expert_E
        [E].
        """
        router = self.config.router
        mask = torch.ones(x_TD.shape[0], dtype=torch.bool) if token_mask_T is None else token_mask_T
        counts_E = torch.zeros(router.num_experts, dtype=torch.int64)
        outputs, probs, z_sum = [], [], x_TD.sum() * 0
        for x_D, valid in zip(x_TD, mask.tolist()):
            y_D = x_D * 0  # padding in, zeros out
            if valid:
                y_D = _swiglu(x_D, self.shared_w1, self.shared_w2, self.shared_w3)
                logits_E = self.gate @ x_D
                scores_E = logits_E.softmax(0) if router.score == "softmax" else logits_E.sigmoid()
                chosen = self.choose(scores_E.detach())
                total = sum(scores_E[e] for e in chosen) if router.normalize else 1.0
                for e in chosen:
                    y_D = y_D + router.scale * scores_E[e] / total * self.expert(e, x_D)
                    counts_E[e] += 1
                probs.append(scores_E / scores_E.sum())
                z_sum = z_sum + torch.logsumexp(logits_E, 0) ** 2
            outputs.append(y_D)
        y_TD = torch.stack(outputs) if outputs else x_TD * 1
        if fraction_E is None:
            fraction_E = counts_E.to(x_TD.dtype) / max(int(counts_E.sum()), 1)
        balance = router.num_experts * sum(((fraction_E * p).sum() for p in probs), x_TD.sum() * 0)
        return y_TD, router.balance_loss * balance + router.z_loss * z_sum, counts_E


def _swiglu(x_D: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    gate = w1 @ x_D
    return w2 @ (gate * torch.sigmoid(gate) * (w3 @ x_D))
