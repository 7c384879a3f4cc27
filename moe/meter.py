"""LoadMeter: what the layers saw in one optimizer step, reduced over the job once -> LoadSample.

Layers register at construction; nothing searches for them. They report training batches only, each token
once:
never in eval, never in the recomputation of an activation checkpoint.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """The load of one optimizer step, summed over ranks and micro-batches.

    step:                 optimizer step that it belongs to
    tokens_per_expert_LE: [L, E] int64, copies that the router wanted to send to each expert
    rows_to_rank_LP:      [L, world] int64, rows that each rank's experts computed
    balance_loss_L:       [L] float64, balance loss per token (1 at balance), without coefficient
    z_loss_L:             [L] float64, router z-loss per token, without coefficient
    num_tokens:           valid tokens of the step, each once
    extra_X:              [X] float64, the caller's own figures, summed over ranks in the same reduction
    """

    step: int
    tokens_per_expert_LE: np.ndarray
    rows_to_rank_LP: np.ndarray
    balance_loss_L: np.ndarray
    z_loss_L: np.ndarray
    num_tokens: int
    extra_X: np.ndarray


class MeteredLayer(Protocol):
    """What the meter asks of a layer."""

    def end_step(self, tokens_per_expert_E: torch.Tensor) -> None: ...


class LoadMeter:
    """Collects what the layers of one rank report, and reduces it in a single stacked sum.

    world_size, rank: of the job (every rank has tokens of its own).
    """

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is out of 0..{world_size - 1} (world_size={world_size})")
        self._world_size, self._rank = world_size, rank
        self._layers: list[MeteredLayer] = []
        self._num_experts = 0
        self._sums_LX: torch.Tensor | None = None

    @property
    def num_layers(self) -> int:
        """L, the layers that have registered."""
        return len(self._layers)

    def register(self, layer: MeteredLayer, num_experts: int) -> int:
        """Take in a layer; its number (0, 1, ...) is what it reports under.

        Raises ValueError where the layers differ in their number of experts.
        """
        if self._layers and num_experts != self._num_experts:
            raise ValueError(
                f"layer {len(self._layers)} has {num_experts} experts, the ones before {self._num_experts}: "
                "one meter takes layers of one size; use a second meter"
            )
        self._num_experts = num_experts
        self._layers.append(layer)
        return len(self._layers) - 1

    def record(
        self,
        layer: int,
        demand_E: torch.Tensor,
        *,
        rows: int,
        balance_sum: torch.Tensor,
        z_sum: torch.Tensor,
        num_tokens: int | torch.Tensor,
    ) -> None:
        """Add one micro-batch of a layer. No collective, no host sync.

        demand_E: [E] int64 on this rank;  rows: rows that this rank's experts computed;  balance_sum, z_sum:
        sums over this rank's valid tokens;  num_tokens: valid tokens of this rank.
        """
        if self._sums_LX is None:
            width = self._num_experts + self._world_size + 3
            self._sums_LX = torch.zeros(self.num_layers, width, dtype=torch.float64, device=demand_E.device)
        sums_X, experts = self._sums_LX[layer], self._num_experts
        sums_X[:experts] += demand_E  # float64 holds counts exactly up to 2^53
        sums_X[experts + self._rank] += rows
        sums_X[-3] += balance_sum.detach()
        sums_X[-2] += z_sum.detach()
        sums_X[-1] += num_tokens

    def sample(self, step: int, extra_X: torch.Tensor | None = None) -> LoadSample:
        """Reduce over the job, tell every layer the global counts, start the next step.

        Collective: every rank calls it once per optimizer step.   extra_X: [X] figures of the caller's own,
        summed over the ranks in the same call.   Raises RuntimeError where nothing was recorded.
        """
        if self._sums_LX is None:
            raise RuntimeError(
                f"no layer has recorded a batch in step {step}: is the model in training mode?"
            )
        sums_LX, self._sums_LX = self._sums_LX, None
        extra_X = sums_LX.new_zeros(0) if extra_X is None else extra_X.to(sums_LX)
        stacked = torch.cat([sums_LX.reshape(-1), extra_X])
        if self._world_size > 1:
            dist.all_reduce(stacked)
        sums_LX, extra_X = stacked[: sums_LX.numel()].view_as(sums_LX), stacked[sums_LX.numel() :]
        counts_LE = sums_LX[:, : self._num_experts].round().to(torch.int64)
        for layer, counts_E in zip(self._layers, counts_LE):
            layer.end_step(counts_E)
        return self._as_sample(step, sums_LX.cpu().numpy(), counts_LE.cpu().numpy(), extra_X.cpu().numpy())

    def _as_sample(
        self, step: int, sums_LX: np.ndarray, counts_LE: np.ndarray, extra_X: np.ndarray
    ) -> LoadSample:
        experts = self._num_experts
        tokens_L = np.maximum(sums_LX[:, -1], 1)
        return LoadSample(
            step=step,
            tokens_per_expert_LE=counts_LE,
            rows_to_rank_LP=sums_LX[:, experts : experts + self._world_size].round().astype(np.int64),
            balance_loss_L=sums_LX[:, -3] / tokens_L,
            z_loss_L=sums_LX[:, -2] / tokens_L,
            num_tokens=int(sums_LX[0, -1]),
            extra_X=extra_X,
        )
