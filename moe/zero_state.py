"""Zero state: where an engine keeps master weights and moments, told as intervals of whole parameters.

An engine cuts its float32 master weights by stage, world and EP size; each form of it is one function here.
All become pieces: this rank keeps elements start .. start + n of the flattened *logical* parameter (all
experts, in their order). In such terms a checkpoint fits every stage and every number of ranks:
`moe/shards.py` writes and reads the files. No deepspeed import; the attributes read here are private ones of
DeepSpeed 0.19, as `moe/zero.py` says.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe.layer import MoELayer
from moe.topology import Topology

MASTER = "master"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
DRIVEN = ("lr", "betas", "momentum", "step")  # numbers of an optimizer group that schedules move


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """What this rank keeps of one logical parameter.

    name, shape: of the whole parameter, experts of all ranks included;  start: first element, flattened;
    master: [n] view of the weights that the optimizer updates;  holder, at: the optimizer's own parameter,
    and where in it, flattened, the piece begins;  written: False on ranks whose copy another one saves.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    master: torch.Tensor
    holder: torch.Tensor
    at: int
    written: bool = True

    def moments(self, state: Mapping[Any, dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Views [n] of the optimizer's state that has one value per weight (exp_avg, ...), by its name."""
        found = {}
        for key, value in state.get(self.holder, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                if value.shape != self.holder.shape:
                    raise ValueError(
                        f"optimizer state {key!r} of {self.name} has shape {tuple(value.shape)} for weights "
                        f"of shape {tuple(self.holder.shape)}: only state with one value per weight can be "
                        "saved; use Adam, AdamW, SGD or Lion"
                    )
                found[key] = value.view(-1)[self.at : self.at + self.master.numel()]
        return found

    def scalars(self, state: Mapping[Any, dict[str, Any]]) -> dict[str, list[Any]]:
        """The rest of the optimizer's state (step), as [type, number]; None is left out."""
        found = {}
        for key, value in state.get(self.holder, {}).items():
            if isinstance(value, torch.Tensor) and not value.ndim:
                found[key] = [str(value.dtype).removeprefix("torch."), value.item()]
            elif isinstance(value, (int, float)):
                found[key] = ["number", value]
        return found


# ---- where the weights are ------------------------------------------------------------------------------


def pieces(engine: Any) -> list[Piece]:
    """This rank's pieces of all parameters, frozen ones included.

    Raises ValueError for a wrapper of the optimizer that is not known here, and for trainable parameters that
    the optimizer does not have: they would be saved by nobody.
    """
    whole = _whole_parameters(engine.module)
    found, seen = [], set()
    for parameter, start, holder, at, numel in _places(engine):
        seen.add(id(parameter))
        if numel < 1 or id(parameter) not in whole:
            continue
        name, shape, base, first_copy = whole[id(parameter)]
        found.append(
            Piece(
                name=name,
                shape=shape,
                start=base + start,
                master=holder.detach().view(-1)[at : at + numel],
                holder=holder,
                at=at,
                written=engine.zero_optimization_stage() > 0 or first_copy,
            )
        )
    lost = []
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            found += _frozen(engine, parameter, whole[id(parameter)])
        elif id(parameter) not in seen:
            lost.append(name)
    if lost:
        raise ValueError(
            f"{', '.join(lost)} are trainable, and the engine's optimizer does not have them: they would "
            "neither be trained nor saved; make the engine after modules are swapped"
        )
    return found


def _whole_parameters(model: nn.Module) -> dict[int, tuple[str, tuple[int, ...], int, bool]]:
    """id -> name, logical shape, where this rank's part begins in it, is this rank the first with the
    part?"""
    experts = {
        id(parameter): layer
        for layer in model.modules()
        if isinstance(layer, MoELayer)
        for parameter in layer.experts.parameters()
    }
    topologies = [layer.topology for layer in model.modules() if isinstance(layer, MoELayer)]
    topology = topologies[0] if topologies else Topology()
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        base, first = 0, topology.rank == 0
        if id(parameter) in experts:
            base, first = topology.ep_rank * math.prod(shape), topology.edp_rank == 0
            shape = (shape[0] * topology.ep_size, *shape[1:])
        found[id(parameter)] = name, shape, base, first
    return found


Place = tuple[torch.Tensor, int, torch.Tensor, int, int]
"""parameter, start in it (flattened), holder, where in the holder, elements: none where less than one"""


def _places(engine: Any) -> Iterator[Place]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return _stage_3(optimizer)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _stage_1_and_2(optimizer)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _bfloat16_stage_1(optimizer)
    if hasattr(optimizer, "fp32_groups"):
        return _bfloat16_stage_0(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return ((p, 0, p, 0, p.numel()) for p in parameters)
    raise ValueError(
        f"where {type(optimizer).__name__} keeps its weights is not known, so that it could not be saved; "
        'use ZeRO 1, 2 or 3, or one of torch\'s optimizers ("torch_adam": true)'
    )


def _stage_3(optimizer: Any) -> Iterator[Place]:
    for parameter in (p for group in optimizer.fp16_groups for p in group):
        group, at, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * numel
        stop = min(start + numel, parameter.ds_numel)  # the last rank's part ends in padding
        yield parameter, start, optimizer.fp32_partitioned_groups_flat[group], at, stop - start


def _stage_1_and_2(optimizer: Any) -> Iterator[Place]:
    for group, holder in enumerate(optimizer.single_partition_of_fp32_groups):
        first = dist.get_rank(optimizer.real_dp_process_group[group]) * holder.numel()
        parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets
        yield from _cut(parameters, offsets[group], holder, first)


def _bfloat16_stage_1(optimizer: Any) -> Iterator[Place]:
    """With data_types.grad_accum_dtype = "fp32" DeepSpeed takes another optimizer, which pads nothing."""
    for group, holder in enumerate(optimizer.fp32_groups_flat_partition):
        first = dist.get_rank(optimizer.real_dp_process_group[group]) * holder.numel()
        parameters = optimizer.bf16_groups[group]
        offsets = [sum(p.numel() for p in parameters[:number]) for number in range(len(parameters))]
        yield from _cut(parameters, offsets, holder, first)


def _cut(parameters: Any, offsets: list[int], holder: torch.Tensor, first: int) -> Iterator[Place]:
    """What of parameters that lie one behind the other falls into first .. first + holder.numel()."""
    for parameter, offset in zip(parameters, offsets, strict=True):
        left, right = max(offset, first), min(offset + parameter.numel(), first + holder.numel())
        yield parameter, left - offset, holder, left - first, right - left


def _bfloat16_stage_0(optimizer: Any) -> Iterator[Place]:
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            yield parameter, 0, master, 0, master.numel()


def _frozen(engine: Any, parameter: Any, whole: tuple[str, tuple[int, ...], int, bool]) -> Iterator[Piece]:
    name, shape, base, first_copy = whole
    start, holder, numel = 0, parameter.data, parameter.numel()
    if engine.zero_optimization_stage() == 3:
        holder, written = parameter.ds_tensor, True
        start = engine.optimizer._get_param_partition_rank(parameter) * holder.numel()
        numel = max(0, min(holder.numel(), parameter.ds_numel - start))
    else:
        written = first_copy
    if numel:
        master = holder.detach().view(-1)[:numel]
        yield Piece(
            name=name, shape=shape, start=base + start, master=master, holder=holder, at=0, written=written
        )


# ---- state and counters ---------------------------------------------------------------------------------


def optimizer_state(engine: Any) -> dict[Any, dict[str, Any]]:
    """The state of torch's optimizer inside of the engine's: holder -> name -> tensor or number."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer).state


def make_state(engine: Any, holder: torch.Tensor, keys: Mapping[str, list[Any] | None]) -> None:
    """See that the optimizer has the state of a holder: zeros where keys say None, else [type, number]."""
    state = optimizer_state(engine)[holder]
    # torch's fused and capturable optimizers count on the device, others on the CPU
    on_device = any(g.get("fused") or g.get("capturable") for g in engine.optimizer.param_groups)
    for key, scalar in keys.items():
        if scalar is None:
            if key not in state:
                state[key] = torch.zeros_like(holder, requires_grad=False)
        else:
            kind, number = scalar
            device = holder.device if on_device else "cpu"
            dtype = None if kind == "number" else getattr(torch, kind)
            state[key] = number if dtype is None else torch.tensor(number, dtype=dtype, device=device)


def counters(engine: Any) -> dict[str, Any]:
    """Steps taken, the numbers of every optimizer group (lr, ...), and the scheduler's state; plain JSON."""
    groups = [
        {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in engine.optimizer.param_groups
    ]
    scheduler = getattr(engine, "lr_scheduler", None)
    return {
        **{name: int(getattr(engine, name)) for name in COUNTERS},
        "optimizer": optimizer_name(engine),
        "groups": groups,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def set_counters(engine: Any, saved: Mapping[str, Any]) -> None:
    """Take back what `counters` gave, or its JSON.

    Raises ValueError, before anything is set, where the optimizer or its hyperparameters are others.
    """
    groups, name = engine.optimizer.param_groups, optimizer_name(engine)
    if (saved["optimizer"], len(saved["groups"])) != (name, len(groups)):
        raise ValueError(
            f"the checkpoint is of {saved['optimizer']} with {len(saved['groups'])} groups of parameters, "
            f"and the engine has {name} with {len(groups)}: moments do not carry over; keep the optimizer, "
            "or resume with the version that wrote it, where that had no group of the routers' weights"
        )
    scheduler = getattr(engine, "lr_scheduler", None)
    if (scheduler is None) != (saved["scheduler"] is None):
        raise ValueError("the checkpoint and the engine differ in whether DeepSpeed has a scheduler")
    # JSON has no tuples
    values_G = [{k: tuple(v) if isinstance(v, list) else v for k, v in g.items()} for g in saved["groups"]]
    for group, values in zip(groups, values_G, strict=True):
        for key in values.keys() & group.keys() - set(DRIVEN):
            if group[key] != values[key]:
                raise ValueError(
                    f"the optimizer's {key} was {values[key]!r} and is now {group[key]!r}: a resumed run "
                    "keeps it"
                )
    for group, values in zip(groups, values_G, strict=True):
        group.update({key: value for key, value in values.items() if key in DRIVEN})
    for name in COUNTERS:
        setattr(engine, name, saved[name])
    engine.micro_steps = saved["global_steps"] * engine.gradient_accumulation_steps()
    if scheduler is not None:
        scheduler.load_state_dict(saved["scheduler"])


def _is_plain(value: Any) -> bool:
    """A number, or a list of numbers: what a hyperparameter is. Names differ with the EP size."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float))


def optimizer_name(engine: Any) -> str:
    """The class of torch's optimizer inside of the engine's."""
    return type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__


def before_load(engine: Any) -> None:
    """At stage 3, let go of whole copies of small parameters, which the engine keeps. A collective there."""
    kept = getattr(engine.optimizer, "persistent_parameters", [])
    if kept:
        kept[0].partition(kept)


@torch.no_grad()
def refresh(engine: Any) -> None:
    """Make the model's weights those of the masters, after these were written. A collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        kept = optimizer.persistent_parameters
        if kept:
            kept[0].all_gather(kept)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.data)
