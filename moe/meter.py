"""LoadMeter: what the layers saw in one optimizer step, reduced over the job once -> LoadSample.

    layers: record(...) each micro-batch -> columns of a [L, X] float64 sum -> one all-reduce -> LoadSample

Layers register at construction; nothing searches for them. They report training batches only, each token
once: never in eval, never in the recomputation of an activation checkpoint, and never padding.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from moe import meter_stats
from moe.load_sample import LoadSample as LoadSample
from moe.meter_sums import StepSums
from routing import Routing


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
    margins_every: the same for the histogram of the margins, L * E * 226 numbers: 0, or 20;
    pairs_every:  the same for swap counts by pairs, L * E * E * 2 numbers, 8 MB a layer at E = 710: 0, or 20;
    sample_every: the same for the scores of sample_tokens tokens of each rank: 0, or 20;
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
        margins_every: int = 0,
        pairs_every: int = 0,
        sample_every: int = 0,
        sample_tokens: int = 32,
        swap_delta: float | None = None,
        reduce: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is out of 0..{world_size - 1} (world_size={world_size})")
        self._every = {"scores": scores_every, "swaps": swaps_every, "margins": margins_every}
        self._every |= {"pairs": pairs_every, "sample": sample_every}
        for name, every in self._every.items():
            if every < 0:
                raise ValueError(f"{name}_every={every} must be 0 (never) or more steps; 1 = every step")
        if sample_tokens < 1:
            raise ValueError(
                f"sample_tokens={sample_tokens} must be 1 or more; sample_every=0 takes no sample"
            )
        if swap_delta is not None and not 0 < swap_delta < 1:
            raise ValueError(f"swap_delta={swap_delta} is out of (0, 1), the range of scores; 0.001 is usual")
        self._world_size, self._rank, self._reduce = world_size, rank, reduce
        self._swap_delta, self._sample_tokens = swap_delta, sample_tokens
        self._layers: list[MeteredLayer] = []
        self._num_experts = 0
        self._sums: StepSums | None = None
        self._requested: frozenset[str] = frozenset()
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
        self._add_statistics({name: sums_LX[layer] for name, sums_LX in device.items()}, routing, bias_E)

    def _add_statistics(self, sums: dict[str, torch.Tensor], routing: Routing, bias_E: torch.Tensor) -> None:
        """Add one batch to a layer's own columns, [width] by name, of the statistics that are due."""
        experts = self._num_experts
        meter_stats.add_spread(routing, sums["spread"])
        if "scores" in sums:
            meter_stats.add_scores(routing, sums["scores"], sums["histogram"].view(experts, -1))
        if "swaps" in sums:
            meter_stats.add_swaps(routing, bias_E, self.swap_delta, sums["swaps"], sums["wide_swaps"])
        if "margins" in sums:
            meter_stats.add_margins(routing, bias_E, sums["margins"].view(experts, -1))
        if "pairs" in sums:
            near_EE, wide_EE = (sums[name].view(experts, experts) for name in ("pairs", "wide_pairs"))
            meter_stats.add_pairs(routing, bias_E, self.swap_delta, near_EE, wide_EE)
        if "sample" in sums:
            rows_PSE = sums["sample"].view(self._world_size, self._sample_tokens, experts)
            taken_P = sums["sampled"]
            meter_stats.add_sample(routing, rows_PSE[self._rank], taken_P[self._rank : self._rank + 1])

    def _begin(self, device: torch.device, rows: int | np.ndarray) -> "StepSums":
        """The columns of a step whose first batch has come."""
        experts, world = self._num_experts, self._world_size
        on_device = {"counts": experts, "squares": experts, "losses": 2, "spread": 2, "masked_tokens": 2}
        of_statistics = {
            "scores": {"scores": experts, "histogram": experts * meter_stats.NUM_BINS},
            "swaps": {"swaps": experts, "wide_swaps": experts},
            "margins": {"margins": experts * meter_stats.NUM_MARGIN_BINS},
            "pairs": {"pairs": experts**2, "wide_pairs": experts**2},
            "sample": {"sample": world * self._sample_tokens * experts, "sampled": world},
        }
        for name, widths in of_statistics.items():
            if self.due(name):
                on_device |= widths
        on_host = {"rows": self._world_size, "tokens": 2}
        if self._world_size == 1 or not isinstance(rows, int):
            groups = 1 if isinstance(rows, int) else self._world_size // max(1, len(rows))
            on_host |= {"peak_rows": groups, "largest_rows": groups}
        return StepSums(self.num_layers, on_device, on_host, device)

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

    def request(self, statistics: Iterable[str]) -> None:
        """Have the next step to be recorded measure these too, whatever its turn; the last call counts.

        Every rank must ask for the same, before the step's first batch: the sums are reduced as one. Raises
        ValueError for a name that is not one of `due`'s, RuntimeError in the middle of a step.
        """
        requested = frozenset(statistics)
        unknown = requested - set(self._every)
        if unknown:
            raise ValueError(f"statistics {sorted(unknown)} are not known; use some of {list(self._every)}")
        if self._sums is not None and requested != self._requested:
            raise RuntimeError("statistics were requested in the middle of a step; do it before its forward")
        self._requested = requested

    def due(self, statistics: str) -> bool:
        """Whether the step that is being recorded has "scores", "swaps", "margins", "pairs" or "sample"."""
        every = self._every[statistics]
        return statistics in self._requested or (every > 0 and (self.next_step - 1) % every == 0)

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
        self._requested = frozenset()
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

        def given(name: str, *by_expert: int) -> np.ndarray | None:
            if name not in columns:
                return None
            return whole(name).reshape(self.num_layers, *by_expert, -1)

        experts = self._num_experts
        tokens_L2 = columns["tokens"] + columns["masked_tokens"]
        losses_L2 = columns["losses"] / np.maximum(tokens_L2[:, :1], 1)
        spread_L2 = columns["spread"] / np.maximum(tokens_L2[:, :1], 1)
        scores = columns.get("scores")
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
            score_histogram_LEB=given("histogram", experts),
            score_edges_X=None if scores is None else meter_stats.score_edges(),
            swaps_LE=given("swaps"),
            wide_swaps_LE=given("wide_swaps"),
            swap_delta=self.swap_delta if "swaps" in columns or "pairs" in columns else None,
            swap_pairs_LEE=given("pairs", experts),
            wide_swap_pairs_LEE=given("wide_pairs", experts),
            margin_histogram_LEB=given("margins", experts),
            margin_edges_X=meter_stats.margin_edges() if "margins" in columns else None,
            sample_LME=self._sampled(columns),
            logit_rms_L=np.sqrt(spread_L2[:, 0] / experts),
            confidence_L=spread_L2[:, 1],
        )

    def _sampled(self, columns: dict[str, np.ndarray]) -> np.ndarray | None:
        """[L, M, E] rows of the ranks that had tokens."""
        if "sample" not in columns:
            return None
        shape = (self.num_layers, self._world_size, self._sample_tokens, self._num_experts)
        there_P = columns["sampled"].min(axis=0) > 0
        rows_LPSE = columns["sample"].reshape(shape)[:, there_P]
        return rows_LPSE.reshape(self.num_layers, -1, self._num_experts)
