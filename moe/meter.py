"""LoadMeter: what the layers saw in one optimizer step, reduced over the job once -> LoadSample.

    layers: record(...) each micro-batch -> columns of a [L, X] float64 sum -> one all-reduce -> LoadSample

Layers register at construction; nothing searches for them. They report training batches only, each token
once: never in eval, never in the recomputation of an activation checkpoint, and never padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from moe import meter_stats
from routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """The load of one optimizer step, summed over ranks and micro-batches.

    A *batch* is what one rank routes in one forward of the layers; padding is in nothing. G are the EP groups
    of the job, in the order of their ranks; B the bins of the histograms.

    step:                 optimizer step that it belongs to
    tokens_per_expert_LE: [L, E] int64, copies that the router wanted to send to each expert
    rows_to_rank_LP:      [L, world] int64, rows that each rank's experts computed
    balance_loss_L:       [L] float64, balance loss per token (1 at balance), without coefficient
    z_loss_L:             [L] float64, router z-loss per token, without coefficient
    num_tokens:           valid tokens of the step, each once
    extra_X:              [X] float64, the caller's own figures, summed over ranks in the same reduction

    squares_LE:           [L, E] float64, sum over the batches of (copies of this batch)^2: of each rank's own
                          counts, not of their sum over a group, so that a step without accumulation has
                          as many draws as ranks. With r = tokens_per_expert / num_tokens, the over-dispersion
                          of the counts is phi = (squares - r^2 tokens_squared) /
                          (r (1 - r) (num_tokens - tokens_squared / num_tokens)), and the counts of T more
                          tokens, of one rank or of all, have the variance phi r (1 - r) T as long as ranks
                          draw sequences of their own. 0 / 0 where the step was one batch
    tokens_squared:       sum over the batches of (valid tokens)^2
    peak_rows_LG:         [L, G] int64, sum over the micro-batches of the most rows that any rank of the group
                          computed in each: what the group waits for. None where the layers did not say
    largest_rows_LG:      [L, G] int64, the most of them in any one micro-batch: what must fit in memory

    In steps that score statistics are due (None in between, `LoadMeter`):
    score_sum_LE:         [L, E] float64, sum over the tokens of the router's scores, without bias
    score_histogram_LEB:  [L, E, B] int64, tokens by score; `moe.meter_stats.score_quantile` reads it
    score_edges_X:        [B + 1] float64, the bins' edges, always the same (`meter_stats.score_edges`)

    In steps that swap counts are due (None in between):
    swaps_LE:             [L, E] int64, tokens whose K-th and (K+1)-th expert by score + bias lie less than
                          swap_delta apart and which have this expert as one of the two. swaps_LE /
                          (2 num_tokens swap_delta) is the diagonal of dn/db, the gain of the selection bias
    wide_swaps_LE:        the same for 2 swap_delta: 2 a(delta) - a(2 delta) takes most of the bias of a
                          finite delta away
    swap_delta:           delta, in units of score
    """

    step: int
    tokens_per_expert_LE: np.ndarray
    rows_to_rank_LP: np.ndarray
    balance_loss_L: np.ndarray
    z_loss_L: np.ndarray
    num_tokens: int
    extra_X: np.ndarray
    squares_LE: np.ndarray | None = None
    tokens_squared: int | None = None
    peak_rows_LG: np.ndarray | None = None
    largest_rows_LG: np.ndarray | None = None
    score_sum_LE: np.ndarray | None = None
    score_histogram_LEB: np.ndarray | None = None
    score_edges_X: np.ndarray | None = None
    swaps_LE: np.ndarray | None = None
    wide_swaps_LE: np.ndarray | None = None
    swap_delta: float | None = None


class MeteredLayer(Protocol):
    """What the meter asks of a layer."""

    def end_step(self, tokens_per_expert_E: torch.Tensor) -> None: ...


class LoadMeter:
    """Collects what the layers of one rank report, and reduces it in a single stacked sum.

    world_size, rank: of the job (every rank has tokens of its own), EP groups being runs of ranks;
    scores_every: score sums and histograms in the first step and every so many steps after it, 0 = never;
                  1 costs under 0.1 % of a layer's time on CPU, and L * E * 123 numbers more in the reduction:
                  take 20 where that is some MB;
    swaps_every:  the same for swap counts: 20;
    swap_delta:   the small change of bias, in units of score. None = 1 / (16 E): 0.15 to 0.3 of the usual gap
                  between the K-th and the (K+1)-th softmax score. Sigmoid scores lie wider apart: 1 / E;
    reduce:       sums a tensor over the job in place; None = torch.distributed's all_reduce.
    Raises ValueError for numbers out of their bounds.

    `next_step` is the step that is being recorded, 1 at first and one more after each sample; set it on
    resuming, so that the statistics fall due in the same steps.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        *,
        scores_every: int = 1,
        swaps_every: int = 20,
        swap_delta: float | None = None,
        reduce: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is out of 0..{world_size - 1} (world_size={world_size})")
        for name, every in (("scores_every", scores_every), ("swaps_every", swaps_every)):
            if every < 0:
                raise ValueError(f"{name}={every} must be 0 (never) or more steps; 1 = every step")
        if swap_delta is not None and not 0 < swap_delta < 1:
            raise ValueError(f"swap_delta={swap_delta} is out of (0, 1), the range of scores; 0.001 is usual")
        self._world_size, self._rank, self._reduce = world_size, rank, reduce
        self._every = {"scores": scores_every, "swaps": swaps_every}
        self._swap_delta = swap_delta
        self._layers: list[MeteredLayer] = []
        self._num_experts = 0
        self._sums: _StepSums | None = None
        self.next_step = 1

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
        routing: Routing,
        *,
        rows: int | np.ndarray,
        bias_E: torch.Tensor,
        balance_sum: torch.Tensor,
        z_sum: torch.Tensor,
    ) -> None:
        """Add one micro-batch of a layer. No collective, no host sync.

        routing: this rank's;  rows: rows that every rank of this rank's EP group computed, [P] int64 on the
        host, or this rank's alone (then the sample has no peaks);  bias_E: [E], as the selection had it;
        balance_sum, z_sum: sums over this rank's valid tokens.
        """
        if self._sums is None:
            self._sums = self._begin(routing.demand_E.device, rows)
        device, host = self._sums.device, self._sums.host
        demand_E = routing.demand_E.to(torch.float64)  # holds counts exactly up to 2^53
        device["counts"][layer].add_(demand_E)  # += would copy the result onto itself once more
        device["squares"][layer].addcmul_(demand_E, demand_E)
        device["losses"][layer, 0].add_(balance_sum.detach())
        device["losses"][layer, 1].add_(z_sum.detach())
        if routing.token_mask_T is None:
            host["tokens"][layer] += (routing.num_tokens, float(routing.num_tokens) ** 2)
        else:
            tokens = routing.token_mask_T.sum(dtype=torch.float64)
            device["masked_tokens"][layer].add_(torch.stack([tokens, tokens * tokens]))
        self._add_rows(host, layer, rows)
        if "scores" in device:
            sum_E, count_EB = device["scores"][layer], device["histogram"][layer]
            meter_stats.add_scores(routing, sum_E, count_EB.view(self._num_experts, -1))
        if "swaps" in device:
            near_E, wide_E = device["swaps"][layer], device["wide_swaps"][layer]
            meter_stats.add_swaps(routing, bias_E, self.swap_delta, near_E, wide_E)

    def _begin(self, device: torch.device, rows: int | np.ndarray) -> "_StepSums":
        """The columns of a step whose first batch has come."""
        experts = self._num_experts
        on_device = {"counts": experts, "squares": experts, "losses": 2, "masked_tokens": 2}
        if self.due("scores"):
            on_device |= {"scores": experts, "histogram": experts * meter_stats.NUM_BINS}
        if self.due("swaps"):
            on_device |= {"swaps": experts, "wide_swaps": experts}
        on_host = {"rows": self._world_size, "tokens": 2}
        if self._world_size == 1 or not isinstance(rows, int):
            groups = 1 if isinstance(rows, int) else self._world_size // max(1, len(rows))
            on_host |= {"peak_rows": groups, "largest_rows": groups}
        return _StepSums(self.num_layers, on_device, on_host, device)

    def _add_rows(self, host: dict[str, np.ndarray], layer: int, rows: int | np.ndarray) -> None:
        """This rank's rows, and for the first rank of a group, in the group's column, their maximum."""
        if isinstance(rows, int):
            host["rows"][layer, self._rank] += rows
            rows_P = np.array([rows]) if self._world_size == 1 else None
        else:
            if len(rows) == 0 or self._world_size % len(rows):
                raise ValueError(f"rows of {len(rows)} ranks, expected a divisor of {self._world_size} ranks")
            host["rows"][layer, self._rank] += rows[self._rank % len(rows)]
            rows_P = rows
        if rows_P is None or self._rank % len(rows_P):
            return
        group, most = self._rank // len(rows_P), rows_P.max()
        host["peak_rows"][layer, group] += most
        host["largest_rows"][layer, group] = max(host["largest_rows"][layer, group], most)

    @property
    def swap_delta(self) -> float:
        """The change of bias, in units of score, that swap counts are taken for."""
        return 1 / (16 * self._num_experts) if self._swap_delta is None else self._swap_delta

    def due(self, statistics: str) -> bool:
        """Whether the step that is being recorded has "scores", or "swaps"."""
        every = self._every[statistics]
        return every > 0 and (self.next_step - 1) % every == 0

    def sample(self, step: int, extra_X: torch.Tensor | None = None) -> LoadSample:
        """Reduce over the job, tell every layer the global counts, start the next step.

        Collective: every rank calls it once per optimizer step.   extra_X: [X] figures of the caller's own,
        summed over the ranks in the same call.   Raises RuntimeError where nothing was recorded.
        """
        if self._sums is None:
            raise RuntimeError(
                f"no layer has recorded a batch in step {step}: is the model in training mode?"
            )
        sums, self._sums = self._sums, None
        self.next_step = step + 1
        stacked = sums.stacked(extra_X)
        if self._reduce is not None:
            self._reduce(stacked)
        elif self._world_size > 1:
            dist.all_reduce(stacked)
        counts_LE = sums.columns(stacked)["counts"].round().to(torch.int64)
        for layer, counts_E in zip(self._layers, counts_LE):
            layer.end_step(counts_E)
        host_X = stacked.cpu().numpy()  # the only wait for the device
        return self._as_sample(step, sums.arrays(host_X), host_X[sums.size :].copy())

    def _as_sample(self, step: int, columns: dict[str, np.ndarray], extra_X: np.ndarray) -> LoadSample:
        def whole(name: str) -> np.ndarray:
            return np.rint(columns[name]).astype(np.int64)

        def given(name: str) -> np.ndarray | None:
            return whole(name) if name in columns else None

        tokens_L2 = columns["tokens"] + columns["masked_tokens"]
        losses_L2 = columns["losses"] / np.maximum(tokens_L2[:, :1], 1)
        scores, histogram = columns.get("scores"), given("histogram")
        shape = (self.num_layers, self._num_experts, meter_stats.NUM_BINS)
        return LoadSample(
            step=step,
            tokens_per_expert_LE=whole("counts"),
            rows_to_rank_LP=whole("rows"),
            balance_loss_L=losses_L2[:, 0],
            z_loss_L=losses_L2[:, 1],
            num_tokens=int(tokens_L2[0, 0]),
            extra_X=extra_X,
            squares_LE=columns["squares"].copy(),
            tokens_squared=int(tokens_L2[0, 1]),
            peak_rows_LG=given("peak_rows"),
            largest_rows_LG=given("largest_rows"),
            score_sum_LE=None if scores is None else scores.copy(),
            score_histogram_LEB=None if histogram is None else histogram.reshape(shape),
            score_edges_X=None if histogram is None else meter_stats.score_edges(),
            swaps_LE=given("swaps"),
            wide_swaps_LE=given("wide_swaps"),
            swap_delta=self.swap_delta if "swaps" in columns else None,
        )


class _StepSums:
    """The sums of one step, [L, width] float64 by name: those of tensors, and those of figures of the host.

    Figures that the host knows stay there until the reduction: each would cost the device a kernel a batch.
    """

    def __init__(
        self, num_layers: int, on_device: dict[str, int], on_host: dict[str, int], device: torch.device
    ) -> None:
        self._widths = on_device | on_host
        self._device_LX = torch.zeros(num_layers, sum(on_device.values()), dtype=torch.float64, device=device)
        self._host_LX = torch.zeros(num_layers, sum(on_host.values()), dtype=torch.float64)
        self.device = dict(zip(on_device, self._device_LX.split(list(on_device.values()), dim=1)))
        host = self._host_LX.split(list(on_host.values()), dim=1)
        self.host = {name: part.numpy() for name, part in zip(on_host, host)}

    @property
    def size(self) -> int:
        """Numbers in all columns of all layers."""
        return self._device_LX.numel() + self._host_LX.numel()

    def stacked(self, extra_X: torch.Tensor | None) -> torch.Tensor:
        """All columns and the caller's figures as one vector on the device."""
        host_LX = self._host_LX
        if self._device_LX.is_cuda:  # pinned: the copy does not wait for the device
            host_LX = host_LX.pin_memory().to(self._device_LX.device, non_blocking=True)
        parts = [torch.cat([self._device_LX, host_LX], dim=1).reshape(-1)]
        if extra_X is not None:
            parts.append(extra_X.to(self._device_LX))
        return torch.cat(parts)

    def arrays(self, host_X: np.ndarray) -> dict[str, np.ndarray]:
        """The columns [L, width] of such a vector on the host, by name; views."""
        table_LX = host_X[: self.size].reshape(self._device_LX.shape[0], -1)
        return dict(zip(self._widths, np.split(table_LX, np.cumsum([*self._widths.values()])[:-1], axis=1)))

    def columns(self, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns [L, width] of such a vector, by name."""
        table_LX = stacked[: self.size].view(self._device_LX.shape[0], -1)
        return dict(zip(self._widths, table_LX.split(list(self._widths.values()), dim=1)))
