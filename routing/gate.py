"""Gate: logits and scores of every expert for every token, in float32 or better."""

import torch
from torch import nn
from torch.nn import functional as F


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which router arithmetic is done: max(float32, dtype), so float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


class Gate(nn.Module):
    """The router's only parameter: a linear map from a token's row to one logit per expert.

    Tensors in, tensors out, so that engines which gather parameters around a module's forward can wrap it.
    """

    def __init__(self, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Logits [T, E] in max(float32, dtype of x), from x_TD [T, D]."""
        dtype = score_dtype(x_TD.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):  # which would take 16 bits
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))


def log_scores(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    """Logarithm of the scores, finite where the score itself would underflow to 0.

    logits_TE: [T, E];  score: "softmax" or "sigmoid".   Returns [T, E] of the same type.
    """
    if score == "softmax":
        return F.log_softmax(logits_TE, dim=-1)
    if score == "sigmoid":
        return F.logsigmoid(logits_TE)
    raise ValueError(f"score={score!r} is unknown; use one of softmax, sigmoid")


def scores(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    """Scores in [0, 1]: softmax over the experts, or the sigmoid of each logit.   [T, E] -> [T, E]."""
    if score == "softmax":
        return F.softmax(logits_TE, dim=-1)
    if score == "sigmoid":
        return torch.sigmoid(logits_TE)
    raise ValueError(f"score={score!r} is unknown; use one of softmax, sigmoid")
