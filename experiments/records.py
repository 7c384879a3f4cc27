"""Records: what a run writes while it trains: metrics.jsonl (the truth), the load trace, TensorBoard's
view."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from balancer.dashboard import Dashboard, training_layout
from balancer.heatmap import load_heatmap, traffic_heatmap
from balancer.jsonl import JsonlSink
from balancer.metrics import (
    balancedness,
    dead_experts,
    max_violation,
    mean_balancedness,
    normalized_entropy,
    sum_balancedness,
    violation_floor,
)
from balancer.trace import TraceWriter
from experiments.communication import Traffic
from experiments.config import Config
from experiments.rundir import RunDir
from moe import LoadSample


class Recorder:
    """Writes one run's records; rank 0 has one.

    ep_size: ranks that share the experts;  resume_step: None for a new run, else the step of the checkpoint
    from which it goes on: what was recorded
    after
    it belongs to steps that are done again, and is cut off.
    """

    def __init__(
        self, run: RunDir, config: Config, num_layers: int, ep_size: int, resume_step: int | None
    ) -> None:
        self._config, self._ep_size = config, ep_size
        experts = config.router.num_experts
        self.metrics = JsonlSink(run.metrics, resume_after_step=resume_step)
        meta = {"source": "training", "top_k": config.router.top_k}
        self.loads = TraceWriter(run.loads, num_layers, experts, meta, resume_after_step=resume_step)
        purge = None if resume_step is None else resume_step + 1
        self.board = Dashboard(run.tensorboard, purge_step=purge)
        if resume_step is None:
            self.board.layout(training_layout())
            self.board.text(0, "config", f"```toml\n{run.config.read_text()}```")
        self._window_LE = np.zeros((num_layers, experts), dtype=np.int64)

    def load(self, sample: LoadSample) -> None:
        """Every step: one row of the load trace."""
        self.loads.append(sample.step, sample.tokens_per_expert_LE)
        self._window_LE += sample.tokens_per_expert_LE

    def step(
        self, sample: LoadSample, values: Mapping[str, float], times_ms: Mapping[str, float]
    ) -> dict[str, float]:
        """Every log_every steps: scalars of the step and of the load since the last call. Returns the
        scalars."""
        scalars = {**values, **balance_scalars(sample, self._window_LE, self._config.router.top_k)}
        self._window_LE[:] = 0
        scalars |= {f"time_ms/{phase}": ms for phase, ms in times_ms.items()}
        self.metrics.write({"kind": "train", "step": sample.step, **scalars})
        self.board.scalars(sample.step, {k: v for k, v in scalars.items() if not math.isnan(v)})
        return scalars

    def heatmap(self, sample: LoadSample) -> None:
        """The loads of one step as an image, layers x experts."""
        self.board.image(
            sample.step, "load/experts", load_heatmap(sample.tokens_per_expert_LE, num_ranks=self._ep_size)
        )

    def traffic(self, step: int, traffic: Traffic) -> None:
        """What the ranks send to one another in a step as an image, ranks x ranks."""
        self.board.image(step, "comm/ranks", traffic_heatmap(traffic.bytes_PP))

    def validation(self, step: int, bits: Mapping[str, float]) -> None:
        """Bits per byte of every domain, and their mean."""
        mean = float(np.mean(list(bits.values())))
        self.metrics.write({"kind": "valid", "step": step, "bits_per_byte": dict(bits), "mean": mean})
        self.board.scalars(
            step, {**{f"bpb/valid/{name}": b for name, b in bits.items()}, "bpb/valid/mean": mean}
        )

    def alarms(self, step: int, lines: Sequence[str]) -> None:
        """Alarms and actions of the control, as one text of the step."""
        self.board.text(step, "alarms", "\n\n".join(lines))

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Something that happened: start, baselines, resume, checkpoint, alarm, control, rollback, error."""
        self.metrics.write({"kind": kind, "step": step, **facts})

    def sync(self) -> None:
        """Bring everything to the disk, before a checkpoint counts as complete."""
        self.metrics.flush()
        self.loads.flush()
        self.board.flush()

    def close(self) -> None:
        """Flush and close all files."""
        self.metrics.close()
        self.loads.close()
        self.board.close()


def balance_scalars(sample: LoadSample, window_LE: np.ndarray, top_k: int) -> dict[str, float]:
    """The balance of one step's load, and the dead experts of the load since the last line.

    balancedness is over ranks (rows computed), the others over experts (copies wanted), averaged over layers;
    max_violation is printed beside the floor that counting noise alone gives.
    """
    counts_LE, rows_LP = sample.tokens_per_expert_LE, sample.rows_to_rank_LP
    floor = violation_floor(max(sample.num_tokens, 1), counts_LE.shape[1], top_k)
    scalars = {
        "loss/balance": float(sample.balance_loss_L.mean()),
        "loss/z": float(sample.z_loss_L.mean()),
        "balance/balancedness_mean": float(mean_balancedness(rows_LP)),
        "balance/balancedness_sum": float(sum_balancedness(rows_LP)),
        "balance/max_violation": float(np.mean(max_violation(counts_LE))),
        "balance/max_violation_floor": floor,
        "balance/entropy": float(np.mean(normalized_entropy(counts_LE))),
        "balance/dead_experts": float(np.mean(dead_experts(window_LE))),
    }
    layers = {f"balance/layer_{layer:02d}": float(b) for layer, b in enumerate(balancedness(rows_LP))}
    return scalars | layers
