"""Zero: what DeepSpeed expects of a layer with experts. The only file of this package that imports deepspeed.

DeepSpeed (0.19.8) learns that a layer has experts by `isinstance` alone. Of the two classes that it knows,
`MoE` refuses ZeRO-3, so `ZeroMoELayer` derives from `AutoEPMoELayer`: attributes and parameter marks only, no
code of its forward. What that contract says, as read in its source and checked by the tests:

- `ep_size`, `num_experts`, `num_local_experts`, `ep_group_name` and the inherited `set_deepspeed_parallelism`
  make the process groups; homes stand in expert order;
- an expert parameter carries `allreduce=False`, `group_name`, and for ZeRO-3 `ds_zero_placement_family` and
  `ds_zero_partition_group_name`: it is reduced and partitioned over its expert-data-parallel group and
  divided by the full data-parallel size;
- optimizer groups must be split into dense and expert ones, each with a name;
- its own checkpoints (`engine.save_checkpoint`) want the parameters `experts.w1`, `w2`, `w3`, so no GELU
  experts, each with DS_AUTOEP_UC_META, and `ep_rank` and `expert_placement_descriptor` on the layer. They fit
  the shape that wrote them; its universal ones, made of these by `ds_to_universal`, load at another EP size
  and number of ranks too (seen at stages 1 and 3). Both are pickles: `moe/shards.py` needs neither.

What it gets wrong with experts, and `make_engine` mends:

- the global norm counts every expert once at stages 1 to 3. At stage 0 in float32 it is the mean of the
  ranks' norms, taken only to clip, and never reported; in bfloat16 (torch's optimizers) it leaves the experts
  out. And where it is not finite, float32 at stage 0 takes the step all the same, on every rank, while all
  others skip it everywhere: so does `global_norm`'s caller;
- in bfloat16 at stage 0 the optimizer's state is made by a step without gradients, which decays the weights
  and puts Adam's count one ahead.

What it gets wrong and is refused (`moe/zero_rules.py`): `contiguous_gradients: false` at stage 1, and a few
other settings, change the gradients of experts without a word. `zero_force_ds_cpu_optimizer` matters only for
an optimizer object handed over: with offload, `torch_adam: true` in the JSON is what avoids a compiled one.

It is private API: `contract_problems` says what a DeepSpeed at hand lacks, and a test holds it empty.
"""

import importlib
import inspect
import math
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.checkpoint import constants as ds_names
from deepspeed.checkpoint.autoep_affine import (
    autoep_placement_to_affine_map,
    legacy_uniform_autoep_placement_descriptor,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime import compiler
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from moe import zero_state
from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.topology import Topology

ROUTER = "router"  # the optimizer group of the gate weights
_SHM_OP = "deepspeed_shm_comm"
_STATE = {  # what moe/zero_state.py reads
    DeepSpeedZeroOptimizer: "single_partition_of_fp32_groups real_dp_process_group round_robin_bit16_groups "
    "round_robin_bit16_offsets update_lp_params",
    DeepSpeedZeroOptimizer_Stage3: "fp16_groups grad_position get_param_id fp32_partitioned_groups_flat "
    "persistent_parameters _get_param_partition_rank _reassign_or_swap_out_partitioned_parameters",
    BF16_Optimizer: "bf16_groups fp32_groups_flat_partition real_dp_process_group update_lp_params",
    FP16_UnfusedOptimizer: "fp16_groups fp32_groups unscale_and_clip_grads",
}


def contract_problems() -> list[str]:
    """What the installed DeepSpeed lacks of the private API that this file relies on; empty = all there."""
    problems = []
    if not hasattr(AutoEPMoELayer, "set_deepspeed_parallelism"):
        problems.append("AutoEPMoELayer.set_deepspeed_parallelism is gone")
    for name in ("DS_AUTOEP_UC_META", "AUTOEP_EXPERT_PLACEMENT", "AFFINE_MAP", "AUTOEP_PARAM_LOGICAL_SHAPE"):
        if not hasattr(ds_names, name):
            problems.append(f"deepspeed.checkpoint.constants.{name} is gone")
    for name in ("_take_model_step", "clip_fp32_gradients"):
        if not hasattr(deepspeed.DeepSpeedEngine, name):
            problems.append(f"DeepSpeedEngine.{name} is gone: the norm of stage 0 cannot be corrected")
    for optimizer, names in _STATE.items():
        source = inspect.getsource(optimizer)
        problems += [
            f"{optimizer.__name__}.{name} is gone: states cannot be saved"
            for name in names.split()
            if f"self.{name}" not in source and f"def {name}(" not in source
        ]
    if _SHM_OP not in getattr(deepspeed.ops, "__compatible_ops__", {}):
        problems.append(f"deepspeed.ops.__compatible_ops__[{_SHM_OP!r}] is gone: it kept an op from building")
    return problems


def init_distributed(backend: str) -> None:
    """Join the job under DeepSpeed, without its shared-memory op.

    The op serves inference on CPU only, but would be compiled here (a minute, with a compiler; an error
    without).
    backend: "gloo" or "nccl".   Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as launchers
    set them; a world of one needs none of them.
    """
    ops = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(ops, dict) and _SHM_OP in ops:
        ops[_SHM_OP] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


class ZeroMoELayer(MoELayer, AutoEPMoELayer):  # type: ignore[misc]
    """A MoELayer that a DeepSpeed engine recognises, at every ZeRO stage. Takes what MoELayer takes."""

    def __init__(self, config: MoEConfig, topology: Topology, **kwargs: Any) -> None:
        MoELayer.__init__(self, config, topology, **kwargs)
        if not np.array_equal(self.home_experts, topology.home_experts(config.router.num_experts)):
            raise ValueError(
                f"homes of rank {topology.rank} are experts {self.home_experts.tolist()}; under a DeepSpeed "
                f"engine they stand in expert order: "
                f"{topology.home_experts(config.router.num_experts).tolist()}, replicas behind them"
            )
        self.ep_size, self.ep_rank = topology.ep_size, topology.ep_rank
        self.num_experts = config.router.num_experts
        self.num_local_experts = self.num_experts // topology.ep_size
        self.ep_group_name = f"ep_size_{topology.ep_size}"
        self.ep_group = self.tp_group = self.folding_group_handles = None
        self.combine_impl, self.comm_backend = "auto", "comm"
        self.expert_placement_descriptor = legacy_uniform_autoep_placement_descriptor(
            self.num_experts, self.num_local_experts, self.ep_size
        )
        for parameter in self.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.ds_zero_placement_family = "replicated"  # type: ignore[attr-defined]
        for parameter in self.experts.parameters():
            self._mark_expert(parameter)

    def prefetch(self) -> None:
        """As in MoELayer; under ZeRO-3 nothing: weights are there inside of the experts' forward only."""
        if not hasattr(self.experts.w1, "ds_id"):
            MoELayer.prefetch(self)

    def _mark_expert(self, parameter: Any) -> None:
        parameter.allreduce = False
        parameter.group_name = self.ep_group_name
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name = self.ep_group_name
        shape = [self.num_experts, *parameter.shape[1:]]
        meta = {
            ds_names.AUTOEP_EXPERT_PLACEMENT: self.expert_placement_descriptor,
            ds_names.AFFINE_MAP: autoep_placement_to_affine_map(
                self.expert_placement_descriptor, shape
            ).to_dict(),
            ds_names.AUTOEP_PARAM_LOGICAL_SHAPE: shape,
            ds_names.AUTOEP_PARAM_EP_RANK: self.ep_rank,
            ds_names.AUTOEP_PARAM_LOCAL_EXPERTS: self.topology.home_experts(self.num_experts).tolist(),
        }
        setattr(parameter, ds_names.DS_AUTOEP_UC_META, meta)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups as the engine wants them: dense and expert parameters apart, norms without weight
    decay, and the gate weights of all MoE layers in a group named ROUTER, whose learning rate may be another
    (`set_learning_rates`)."""
    gates = {id(layer.router.gate.weight) for layer in model.modules() if isinstance(layer, MoELayer)}
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = {
        "matrices": [p for p in trained if p.ndim > 1 and id(p) not in gates],
        ROUTER: [p for p in trained if id(p) in gates],
        "vectors": [p for p in trained if p.ndim <= 1],
    }
    decays = {"matrices": weight_decay, ROUTER: weight_decay, "vectors": 0.0}
    groups = [{"params": kinds[name], "name": name, "weight_decay": decay} for name, decay in decays.items()]
    # no cut by size: the number of groups would differ with the EP size, and checkpoints count them
    split = split_params_into_different_moe_groups_for_optimizer(groups, max_group_size=math.inf)  # type: ignore[arg-type]
    return [group for group in split if group["params"]]


def set_learning_rates(engine: Any, lr: float, router_factor: float = 1.0) -> None:
    """Give every optimizer group the learning rate lr, and the routers' gates lr * router_factor.

    Before engine.step(), on every rank alike. lr, router_factor: 0 or more.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * router_factor if group.get("name") == ROUTER else lr


def make_engine(model: nn.Module, settings: dict[str, Any], weight_decay: float = 0.0) -> Any:
    """A DeepSpeed engine around a model of ZeroMoELayers.

    settings: DeepSpeed's JSON as a dict.   Raises ValueError where a trainable parameter got into no
    optimizer group, which would leave it frozen without a word.
    """
    groups = parameter_groups(model, weight_decay)
    grouped = sum(len(group["params"]) for group in groups)
    trainable = sum(p.requires_grad for p in model.parameters())
    if grouped != trainable:
        raise ValueError(f"{grouped} of {trainable} trainable parameters have an optimizer group; all must")
    _import_muon()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,  # pyright: ignore[reportArgumentType]  its annotation is wrong
        config=settings,
        dist_init_required=False,
    )
    zero_state.pieces(engine)  # an optimizer that could not be saved is told now, not at the first save
    if engine.zero_optimization_stage() == 0:
        _correct_norm(engine)
        _undo_first_step(engine.optimizer)
    return engine


def _import_muon() -> None:
    """Import DeepSpeed's Muon, as every engine does, without torch's compiler: that would take a second a
    rank."""
    compile_factory = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ImportError:
        pass  # another DeepSpeed: it imports what it needs
    finally:
        compiler.compile = compile_factory


@torch.no_grad()
def _undo_first_step(optimizer: Any) -> None:
    """Take back the step without gradients by which bfloat16's wrapper at stage 0 makes its state.

    It has decayed the master weights by lr * weight_decay, and would put Adam's bias correction one step
    ahead.
    """
    if not hasattr(optimizer, "fp32_groups"):
        return
    optimizer.optimizer.state.clear()
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            master.copy_(parameter)


def _correct_norm(engine: Any) -> None:
    """Give an engine of stage 0 the gradient norm that other stages have, to report and to clip by.

    In float32 DeepSpeed would take the mean of the ranks' norms, only to clip, and report none; in bfloat16
    it leaves the experts out. Where the norm is not finite, no rank takes the step: float32 would, the clip
    turning an infinite gradient into NaN weights on the rank that has it, alone.
    """
    take_step, optimizer = engine._take_model_step, engine.optimizer
    # of float32 copies, made within the step
    clip: Any = getattr(optimizer, "unscale_and_clip_grads", None)

    def take_step_with_norm(*args: Any, **kwargs: Any) -> Any:
        norm = global_norm(engine.module)
        if clip is not None:
            optimizer.unscale_and_clip_grads = lambda _, *more, **named: clip(norm, *more, **named)
        else:
            optimizer.overflow = not math.isfinite(norm)  # the engine counts a skipped step
            if optimizer.overflow:  # as the other stages: no step on any rank, not even of weight decay
                engine.zero_grad()
            elif 0 < engine.gradient_clipping() < norm:
                for parameter in engine.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(engine.gradient_clipping() / (norm + 1e-6))
        taken = take_step(*args, **kwargs)
        engine._global_grad_norm = norm
        return taken

    engine._take_model_step = take_step_with_norm
    engine.clip_fp32_gradients = lambda: None


@torch.no_grad()
def global_norm(model: nn.Module) -> float:
    """The norm of reduced gradients over all ranks: every logical expert once, every dense parameter once.

    Sums are float64, in one order, so that all ranks get the same number. A collective where ranks of an EP
    group hold different experts.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    experts = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    sums_2 = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            sums_2[int(id(parameter) in experts)] += parameter.grad.double().square().sum()
    if layers:
        sums_2[1] = layers[0].groups.ep.all_gather(sums_2[1:]).sum()
    return float(sums_2.sum().sqrt())


def gather_weights(model: nn.Module, topology: Topology) -> dict[str, torch.Tensor] | None:
    """The whole model's weights on rank 0, experts of all ranks in logical order; None on the others.

    Collective.   Returns name -> tensor on the CPU, buffers that are saved with the model included.
    """
    experts = {
        f"{name}.{leaf}": layer
        for name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for leaf in ("experts.w1", "experts.w2", "experts.w3")
    }
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weight = parameter.detach()
            if name in experts:
                weight = experts[name].groups.ep.all_gather(weight).flatten(0, 1)
            if topology.rank == 0:
                whole[name] = weight.to("cpu", copy=True).contiguous()
    if topology.rank != 0:
        return None
    parameters = set(whole)
    for name, value in model.state_dict().items():
        if name not in parameters and isinstance(value, torch.Tensor):
            whole[name] = value.detach().to("cpu", copy=True)
    return whole
