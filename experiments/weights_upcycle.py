"""Upcycling: a dense model becomes one with experts that computes the same, to be trained on from there.

Every expert starts as a copy of its block's dense feed-forward, the router is drawn anew; so whatever the
router selects, a token's weighted sum is the dense output times the sum of its weights. Source: Komatsuzaki
et al., Sparse Upcycling, section 3, where the weights are normalised too, and the first output is kept.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from experiments.hf_names import BIAS, COUNTS, QWEN3_MOE, Entry, check_names, entries
from experiments.weights import DTYPES
from experiments.weights_files import Planned
from moe.config import ModelConfig
from moe.model import fill_normal

Read = Callable[[str], torch.Tensor]
_GATE = "router.gate.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which hidden units of the dense feed-forward go to a part of the layer, and a factor on its output."""

    first: int
    end: int
    factor: float


def upcycle(dense: dict[str, torch.Tensor], config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """The state dict of a model with experts that gives the dense model's output.

    dense: state dict of our Transformer with num_dense_layers == num_layers;  config: the model wanted, whose
    dense_hidden is the dense model's;  seed: of the routers. Raises ValueError for tensors that do not fit,
    and for settings under which no weights keep the output.
    """
    expected = {entry.name: entry.shape for entry in entries(dense_twin(config), QWEN3_MOE)}
    check_names(expected, {name: tuple(value.shape) for name, value in dense.items()}, "the dense model")
    return {planned.name: planned.make() for planned in plan_upcycle(dense.__getitem__, config, seed)}


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The same model with dense blocks only: what a model with experts can be upcycled from."""
    return dataclasses.replace(config, num_dense_layers=config.num_layers)


def plan_upcycle(read: Read, config: ModelConfig, seed: int) -> list[Planned]:
    """Every tensor of the model wanted, to be made when it is written.   read: tensor of the dense model."""
    expert, shared = shares(config)
    plan: list[Planned] = []
    for entry in entries(config, QWEN3_MOE):
        plan.append(_planned(entry, read, config, expert, seed))
        if shared is not None and entry.name.endswith(".experts.w3"):
            layer = entry.name.removesuffix(".experts.w3")
            plan += [_shared(layer, leaf, read, config, shared) for leaf in ("w1", "w2", "w3")]
    return plan


def shares(config: ModelConfig) -> tuple[Share, Share | None]:
    """The share of every expert and of the shared expert (None: there is none).

    With normalised weights that sum to `router.scale`, y = shared(x) + scale * expert(x). The two divide the
    hidden units, whose outputs add up, or both have them all and give half. Raises ValueError where neither
    is possible, or the sum of the weights differs from token to token.
    """
    moe, router, hidden = config.moe, config.moe.router, config.dense_hidden
    _check_sum(config)
    factor = 1.0 / router.scale
    if not moe.shared_hidden and moe.expert_hidden == hidden:
        return Share(first=0, end=hidden, factor=factor), None
    if moe.shared_hidden and moe.shared_hidden + moe.expert_hidden == hidden:
        cut = moe.shared_hidden
        return Share(first=cut, end=hidden, factor=factor), Share(first=0, end=cut, factor=1.0)
    if moe.shared_hidden == moe.expert_hidden == hidden:
        return Share(first=0, end=hidden, factor=0.5 * factor), Share(first=0, end=hidden, factor=0.5)
    wanted = max(hidden - moe.shared_hidden, 1)
    raise ValueError(
        f"moe.expert_hidden={moe.expert_hidden} with moe.shared_hidden={moe.shared_hidden} cannot give the "
        f"output of a dense feed-forward of {hidden} hidden units; use moe.expert_hidden={wanted}"
        + (f", or {hidden} for both" if moe.shared_hidden else "")
    )


def _check_sum(config: ModelConfig) -> None:
    """Raise ValueError unless the weights of every token have the same sum, and experts are SwiGLU."""
    moe, router = config.moe, config.moe.router
    if config.num_dense_layers == config.num_layers:
        raise ValueError(
            f"model.num_dense_layers={config.num_dense_layers} leaves no block for experts; use fewer than "
            f"model.num_layers={config.num_layers}"
        )
    if moe.activation != "swiglu":
        raise ValueError(f"moe.activation={moe.activation}: the dense feed-forward is swiglu; use that")
    everything = router.score == "softmax" and router.top_k == router.num_experts
    if not router.normalize and not everything:
        raise ValueError(
            "router.normalize=false: the weights of a token would not sum to 1, and by how much differs from "
            "token to token, so no weights keep the dense output; use router.normalize=true"
        )


def _planned(entry: Entry, read: Read, config: ModelConfig, share: Share, seed: int) -> Planned:
    dtype, name = DTYPES[config.dtype], entry.name
    if name.endswith((BIAS, COUNTS)):
        dtype, make = entry.dtype, partial(torch.zeros, entry.shape, dtype=entry.dtype)
    elif name.endswith(_GATE):
        make = partial(_gate, entry, dtype, seed)
    elif entry.stacked:
        layer, leaf = name.split(".experts.")
        source = f"{layer}.{leaf}.weight"
        make = partial(_expert, read, source, leaf, share, entry.shape[0], dtype)
    else:
        make = partial(_copy, read, name, dtype)
    return Planned(name=name, shape=entry.shape, dtype=dtype, make=make)


def _shared(layer: str, leaf: str, read: Read, config: ModelConfig, share: Share) -> Planned:
    units, width = share.end - share.first, config.d_model
    shape = (width, units) if leaf == "w2" else (units, width)
    dtype, source = DTYPES[config.dtype], f"{layer}.{leaf}.weight"
    make = partial(_units, read, source, leaf, share, dtype)
    return Planned(name=f"{layer}.shared_expert.{leaf}.weight", shape=shape, dtype=dtype, make=make)


def _copy(read: Read, name: str, dtype: torch.dtype) -> torch.Tensor:
    return read(name).to(dtype)


def _gate(entry: Entry, dtype: torch.dtype, seed: int) -> torch.Tensor:
    weight = torch.empty(entry.shape)
    fill_normal(weight, 1.0, seed, entry.name)
    return weight.to(dtype)


def _units(read: Read, name: str, leaf: str, share: Share, dtype: torch.dtype) -> torch.Tensor:
    """The share's hidden units: columns of w2, which has the factor too, rows of w1 and w3."""
    weight = read(name)
    if leaf == "w2":
        return (weight[:, share.first : share.end] * share.factor).to(dtype)
    return weight[share.first : share.end].to(dtype)


def _expert(
    read: Read, name: str, leaf: str, share: Share, num_experts: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.stack([_units(read, name, leaf, share, dtype)] * num_experts)
