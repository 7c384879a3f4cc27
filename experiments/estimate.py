"""Estimate: how much memory one rank of a run needs, before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from experiments.config import Config
from moe import Topology
from moe.model import count_parameters

GIB = 1 << 30
# buffers of collectives, fragmentation, the interpreter and its libraries
_OVERHEAD_BYTES = 400 << 20
_SLACK = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        parts = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes, self.activations_bytes)
        return int(_SLACK * sum(parts)) + _OVERHEAD_BYTES


def estimate_memory(config: Config, topology: Topology, zero_stage: int) -> MemoryEstimate:
    """Weights, gradients, AdamW state by ZeRO stage, and the activations of one micro-batch.

    Source: Rajbhandari et al., ZeRO, section 3: (2 + 2 + 12) bytes a parameter in 16 bit, (4 + 4 + 12) here
    in float32, where DeepSpeed keeps a flat master copy too (at stage 0 none: 8); sharded over the
    data-parallel ranks of the parameter, which for experts are the expert-data-parallel ones.
    """
    model = config.model
    element = 2 if model.dtype == "bfloat16" else 4
    counts = count_parameters(model)
    shares = (
        (counts["dense"], topology.world_size),
        (counts["experts"] / topology.ep_size, topology.edp_size),
    )
    state = 8 if zero_stage == 0 and element == 4 else 12
    weights = gradients = optimizer = 0.0
    for parameters, ranks in shares:
        weights += parameters * element / (ranks if zero_stage >= 3 else 1)
        gradients += parameters * element / (ranks if zero_stage >= 2 else 1)
        optimizer += parameters * state / (ranks if zero_stage >= 1 else 1)
    return MemoryEstimate(
        weights_bytes=int(weights),
        gradients_bytes=int(gradients),
        optimizer_bytes=int(optimizer),
        activations_bytes=activation_bytes(config, element),
    )


def without_offloaded(estimate: MemoryEstimate, zero_settings: Mapping[str, Any]) -> MemoryEstimate:
    """What stays on the device where zero_optimization keeps the optimizer or weights elsewhere."""

    def offloaded(table: str) -> bool:
        return (zero_settings.get(table) or {}).get("device", "none") != "none"

    if offloaded("offload_optimizer"):
        estimate = replace(estimate, optimizer_bytes=0)
    if offloaded("offload_param"):
        estimate = replace(estimate, weights_bytes=0)
    return estimate


def activation_bytes(config: Config, element: int) -> int:
    """Bytes kept for the backward of one micro-batch, without recomputation, at balanced load."""
    model, moe, top_k = config.model, config.moe, config.router.top_k
    width, tokens = model.d_model, config.train.micro_batch * model.seq_len
    queries, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    normed = (queries + keys) * model.qk_norm
    # the block's rows, qkv, both rotated, the heads' output twice
    attention = (5 * width + 4 * queries + 3 * keys + normed) * element
    expert = top_k * (element * (3 * width + 4 * moe.expert_hidden) + 4 * width)
    router = 4 * 4 * config.router.num_experts
    shared = 4 * moe.shared_hidden * element
    dense = 4 * model.dense_hidden * element
    moe_layers = model.num_layers - model.num_dense_layers
    per_token = model.num_layers * attention + moe_layers * (expert + router + shared)
    per_token += model.num_dense_layers * dense + model.vocab_size * (element + 8)
    return tokens * per_token


def available_bytes(device: torch.device, local_ranks: int) -> int:
    """Free memory for one rank: of its GPU, or its share of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // local_ranks


def check_fits(estimate: MemoryEstimate, free_bytes: int) -> None:
    """Raise ValueError where a rank would need more than there is."""
    need = estimate.total_bytes
    if need > free_bytes:
        raise ValueError(
            f"the model will not fit: a rank needs about {need / GIB:.1f} GiB (weights "
            f"{estimate.weights_bytes / GIB:.1f}, gradients {estimate.gradients_bytes / GIB:.1f}, optimizer "
            f"{estimate.optimizer_bytes / GIB:.1f}, activations {estimate.activations_bytes / GIB:.1f}) and "
            f"has {free_bytes / GIB:.1f}; lower train.micro_batch or the model's sizes, use a higher ZeRO "
            "stage or more ranks"
        )
