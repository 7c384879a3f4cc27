"""Describe: what a person reads about a run before its first step, and how figures are written."""

import math
import os
from typing import TYPE_CHECKING, Any

from experiments.estimate import GIB, available_bytes, estimate_memory
from moe.model import count_parameters

if TYPE_CHECKING:
    from experiments.session import Trainer


def describe(trainer: "Trainer") -> list[str]:
    """The run in a few lines: parameters, memory, ranks, data."""
    config, topology = trainer.config, trainer.job.topology
    counts = count_parameters(config.model)
    stage = int(trainer.settings.get("zero_optimization", {}).get("stage", 0))
    memory = estimate_memory(config, topology, stage)
    per_rank = counts["dense"] + counts["experts"] // topology.ep_size
    free = available_bytes(trainer.job.device, int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size)))
    domains = ", ".join(f"{d.name} {amount(d.train)}" for d in trainer.corpus.domains)
    return [
        f"run {trainer.run.path}",
        f"parameters: {millions(counts['dense'] + counts['experts'])} in all, {millions(per_rank)} a rank, "
        f"{millions(counts['active'])} active per token; {config.router.num_experts} experts, "
        f"top {config.router.top_k}",
        f"ranks: {topology.world_size} = EP {topology.ep_size} x EDP {topology.edp_size}, ZeRO {stage}, "
        f"{config.model.dtype} on {trainer.job.device.type}",
        f"memory: about {memory.total_bytes / GIB:.2f} GiB a rank of {free / GIB:.1f} free",
        f"data: {domains}; {config.data.schedule} mix",
        *trainer.corpus.notes,
    ]


def table(bits: dict[str, float]) -> str:
    mean = sum(bits.values()) / len(bits)
    parts = [f"{name} {value:.2f}" for name, value in bits.items() if not math.isnan(value)]
    return "  ".join([*parts, f"mean {mean:.3f}"])


def unit(trainer: "Trainer") -> str:
    return "bits per byte" if trainer.corpus.vocab_size == 256 else "bits per token"


def amount(tokens: Any) -> str:
    """How much there is of a domain: bytes of text, or tokens."""
    unit = "B" if tokens.dtype.itemsize == 1 else " tokens"
    number = len(tokens)
    return f"{number / 1e6:.1f} M{unit}" if number >= 1e5 else f"{number / 1e3:.1f} k{unit}"


def millions(number: float) -> str:
    return f"{number / 1e6:.2f} M"
