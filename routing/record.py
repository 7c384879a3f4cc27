"""Routing: what a router says about a batch, in the form that dispatch, losses and meter read."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The copies that a batch sends to experts, with what the losses need.

    Copies stand in the order (token, choice): copy n belongs to token n // top_k where routing is regular.

    token_N:    [N] int64, the token that a copy belongs to
    expert_N:   [N] int64, the expert that it goes to; -1 = not routed (padding)
    weight_N:   [N] float32 or float64, the factor on the expert's output; 0 where not routed
    scores_TE:  [T, E] float32 or float64, the gate's scores without bias
    logits_TE:  [T, E] float32 or float64, the gate's logits
    demand_E:   [E] int64, copies that the router wanted to send to each expert
    routed_E:   [E] int64, copies that are sent to each expert, after drops
    num_tokens: T
    top_k:      K where every token has K copies in a row, None where it varies
    token_mask_T: [T] bool, False = padding; None = every token is valid
    """

    token_N: torch.Tensor
    expert_N: torch.Tensor
    weight_N: torch.Tensor
    scores_TE: torch.Tensor
    logits_TE: torch.Tensor
    demand_E: torch.Tensor
    routed_E: torch.Tensor
    num_tokens: int
    top_k: int | None
    token_mask_T: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_copies = self.token_N.shape[0]
        for name in ("token_N", "expert_N", "weight_N"):
            shape = tuple(getattr(self, name).shape)
            if shape != (num_copies,):
                raise ValueError(f"{name} has shape {shape}, expected ({num_copies},) like token_N")
        if self.top_k is not None and num_copies != self.num_tokens * self.top_k:
            raise ValueError(
                f"{num_copies} copies do not make {self.num_tokens} tokens of top_k={self.top_k}; "
                "give top_k=None for routing in which the number of copies varies"
            )
        if self.demand_E.dtype != torch.int64 or self.routed_E.dtype != torch.int64:
            raise ValueError(
                f"counts are {self.demand_E.dtype} and {self.routed_E.dtype}, expected torch.int64 (exact)"
            )

    @property
    def num_experts(self) -> int:
        """E, the number of logical experts."""
        return self.scores_TE.shape[1]


def count_experts(expert_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the copies of each expert, exactly and without a host sync.

    expert_N: any shape int64, expert ids; -1 is not counted.   Returns [E] int64.
    """
    bins = expert_N.reshape(-1) + 1  # -1 lands in a bin of its own, which is cut off
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:]
