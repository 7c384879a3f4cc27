"""Warm-up: compile what a layer calls before the first step, not within it."""

import torch

from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.meter import LoadMeter
from moe.topology import Topology
from routing import RouterConfig


def warm(dtype: torch.dtype) -> None:
    """Run tiny layers of this type forward and backward: their kernels are compiled, or come from the disk.

    The state of torch's global generator stays as it was.
    """
    router = RouterConfig(d_model=8, num_experts=2, top_k=1)
    with torch.random.fork_rng(devices=[]):
        for dedup in ("off", "on"):
            config = MoEConfig(router=router, expert_hidden=8, dedup=dedup)
            layer = MoELayer(config, Topology(), meter=LoadMeter()).to(dtype)
            y_TD, aux_loss = layer(torch.ones(3, 8, dtype=dtype))
            (y_TD.sum() + aux_loss).backward()
