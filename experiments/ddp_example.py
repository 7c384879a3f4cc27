"""A mixture-of-experts layer in a plain torch model with DistributedDataParallel, no engine.

torchrun --nproc_per_node 2 -m experiments.ddp_example
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe import MoEConfig, MoELayer, Topology, prepare_ddp
from routing import RouterConfig


class Net(nn.Module):
    def __init__(self, topology: Topology) -> None:
        super().__init__()
        router = RouterConfig(d_model=32, num_experts=8, top_k=2)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)
        self.moe = MoELayer(MoEConfig(router=router, expert_hidden=64), topology)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux_loss = self.moe(self.first(x))
        return self.last(y), aux_loss / len(x)


def train(rank: int, world: int) -> None:
    torch.manual_seed(0)  # alike on all ranks: the layer draws each expert by its number
    net = prepare_ddp(Net(Topology(world_size=world, ep_size=world, rank=rank)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(200):
        x = torch.randn(256, 16, generator=data)
        y, aux_loss = model(x)
        loss = nn.functional.mse_loss(y, x.sin().sum(dim=1, keepdim=True)) + aux_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    gc.collect()  # a model that still holds its group at the end may abort the process
    dist.destroy_process_group()
