"""DDP: what torch's DistributedDataParallel must know of a model with MoE layers.

Dense parameters are the same on every rank, and DDP averages their gradients. Experts are not: each rank has
its own, whose gradient already sums over the tokens of all ranks of the EP group. So DDP leaves them alone,
and their gradients are divided by the ranks here, as DDP divides the others, and summed over the copies of an
expert.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe.layer import MoELayer


def prepare_ddp(model: nn.Module) -> nn.Module:
    """Prepare a model's MoELayers for DistributedDataParallel(model); call it once, before that.

    Afterwards every gradient is that of the mean of the ranks' losses, with accumulation too. Returns the
    model. Raises ValueError for a model without MoELayer, or one that was prepared before.
    """
    experts = {
        f"{module_name}.experts.{name}".lstrip("."): (layer, parameter)
        for module_name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for name, parameter in layer.experts.named_parameters()
        if parameter.requires_grad
    }
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no MoELayer; DistributedDataParallel needs no help here"
        )
    if hasattr(model, "_ddp_params_and_buffers_to_ignore"):
        raise ValueError(f"{type(model).__name__} was prepared before; its gradients would be divided twice")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    for layer, parameter in experts.values():
        parameter.register_hook(_as_mean(layer))
    return model


def _as_mean(layer: MoELayer) -> Any:
    world_size, edp = layer.topology.world_size, layer.groups.edp
    if edp.size > 1 and not hasattr(edp, "group"):
        raise ValueError(
            f"{type(edp).__name__} has no process group, which copies of experts are summed over"
        )

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient / world_size
        if edp.size > 1:
            dist.all_reduce(gradient, group=edp.group)  # pyright: ignore[reportAttributeAccessIssue]
        return gradient

    return hook
