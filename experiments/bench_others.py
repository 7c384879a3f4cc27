"""Bench others: the layers of other people, with the weights and rows that every contender gets.

ds_native        DeepSpeed's own MoE, dropless
ds_autoep        the layer that DeepSpeed's AutoEP makes of a Mixtral block of transformers
hf_eager, hf_grouped     transformers' own block on one rank, by its loop and by its grouped products
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.bench_inputs import Inputs, Run, layer_run
from experiments.bench_layer import Case
from moe import Topology


class _NativeExpert(nn.Module):
    """The expert that DeepSpeed's native layer copies."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def deepspeed_native(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """DeepSpeed's own MoE, dropless, its random choices off."""
    from deepspeed.moe.layer import MoE

    from moe import zero

    zero.init_distributed("gloo")
    layer = MoE(
        case.width, _NativeExpert(case.width, case.hidden), case.experts, topology.ep_size, case.top_k,
        drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    layer = layer.to(inputs.x_TD.dtype)
    moe: Any = layer.deepspeed_moe
    with torch.no_grad():
        moe.gate.wg.weight.copy_(inputs.gate_ED)
        for local, expert in enumerate(topology.home_experts(case.experts)):
            for name in ("w1", "w2", "w3"):
                getattr(moe.experts.deepspeed_experts[local], name).weight.copy_(
                    getattr(inputs, name)[expert]
                )

    def forward(x: torch.Tensor) -> Any:
        y, aux, _ = layer(x[None])
        return y, aux

    return layer_run(forward, inputs, layer.parameters())


def deepspeed_autoep(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The layer that AutoEP makes of a Mixtral block."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from transformers import MixtralConfig, MixtralForCausalLM  # pyright: ignore[reportMissingImports]

    from moe import zero

    zero.init_distributed("gloo")
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=8, hidden_size=case.width, intermediate_size=case.hidden, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=case.experts,
            num_experts_per_tok=case.top_k,
        )
    )  # fmt: skip
    settings = parse_autoep_config(
        {"enabled": True, "autoep_size": topology.ep_size, "preset_model": "mixtral"}
    )
    auto = AutoEP(model, settings)
    for spec in auto.ep_parser():
        auto.replace_moe_layer(spec, topology.ep_size, topology.ep_rank)
    layer: Any = model.model.layers[0].mlp
    layer.set_deepspeed_parallelism()
    layer = layer.to(inputs.x_TD.dtype)
    home = topology.home_experts(case.experts)
    with torch.no_grad():
        layer.router.gate.weight.copy_(inputs.gate_ED)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(inputs, name)[home])

    def forward(x: torch.Tensor) -> Any:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out), None

    return layer_run(forward, inputs, layer.parameters())


def hf_eager(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The block of transformers with its loop over experts."""
    return _transformers(case, inputs, "eager")


def hf_grouped(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The block of transformers with grouped products."""
    return _transformers(case, inputs, "grouped_mm")


def _transformers(case: Case, inputs: Inputs, implementation: str) -> Run:
    """A Mixtral block with all experts on this rank. Its router says no balance loss."""
    from transformers import MixtralConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.mixtral.modeling_mixtral import (  # pyright: ignore[reportMissingImports]
        MixtralSparseMoeBlock,
    )

    settings: dict[str, Any] = {
        "hidden_size": case.width,
        "intermediate_size": case.hidden,
        "num_local_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "experts_implementation": implementation,
    }
    config = MixtralConfig(**settings)
    if config._experts_implementation != implementation:
        raise ValueError(f"transformers took {config._experts_implementation!r} for {implementation!r}")
    block: Any = MixtralSparseMoeBlock(config).to(inputs.x_TD.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(inputs.gate_ED)
        block.experts.gate_up_proj.copy_(torch.cat([inputs.w1, inputs.w3], dim=1))
        block.experts.down_proj.copy_(inputs.w2)

    def forward(x: torch.Tensor) -> Any:
        return block(x[None]), None

    return layer_run(forward, inputs, block.parameters())
