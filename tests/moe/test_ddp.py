"""MoE layers in a plain torch model under DistributedDataParallel: gradients of the mean of all losses."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe import LoopbackWorld, MoEConfig, MoELayer, SoloExchange, Topology, make_groups, prepare_ddp
from moe.groups import Groups
from moe.testing import run_ranks
from routing import RouterConfig

TOKENS, MICRO_BATCHES = 12, 2


class Net(nn.Module):
    """Dense, two layers of experts, dense; balance loss over all ranks, so that the reference has it too."""

    def __init__(self, topology: Topology, groups: Groups | None = None) -> None:
        super().__init__()
        router = RouterConfig(d_model=10, num_experts=6, top_k=2, balance_scope="global", balance_loss=0.3)
        config = MoEConfig(router=router, expert_hidden=7, shared_hidden=5)
        self.first, self.last = nn.Linear(9, 10), nn.Linear(10, 1)
        self.layers = nn.ModuleList(MoELayer(config, topology, groups=groups) for _ in range(2))

    def forward(self, x):
        x, total = self.first(x), 0.0
        for layer in self.layers:
            y, aux_loss = layer(x)
            x, total = x + y, total + aux_loss
        return (self.last(x).square().sum() + total) / len(x)


def batch(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    return torch.randn(TOKENS, 9, generator=generator, dtype=torch.float64)


def gradients_rank(rank: int, world: int, ep_size: int):
    torch.manual_seed(0)
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    net = Net(topology, make_groups(topology)).double()
    model = DistributedDataParallel(prepare_ddp(net))
    for micro in range(MICRO_BATCHES):
        if micro < MICRO_BATCHES - 1:
            with model.no_sync():
                model(batch(rank, micro)).backward()
        else:
            model(batch(rank, micro)).backward()
    homes = [layer.home_experts.tolist() for layer in net.layers]
    return homes, {name: p.grad.tolist() for name, p in net.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2), (2, 1)])
def test_gradients_are_those_of_one_process_with_the_whole_batch(world, ep_size):
    torch.manual_seed(0)
    net = Net(Topology(), Groups(ep=SoloExchange(), edp=SoloExchange())).double()
    for micro in range(MICRO_BATCHES):
        net(torch.cat([batch(rank, micro) for rank in range(world)])).backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    for homes, grads in run_ranks(gradients_rank, world, ep_size):
        for name, grad in grads.items():
            expected = wanted[name]
            if ".experts." in name:
                expected = expected[homes[int(name.split(".")[1])]]
            torch.testing.assert_close(
                torch.tensor(grad, dtype=torch.float64), expected, rtol=1e-10, atol=1e-13
            )
            assert expected.abs().max() > 0, name


def test_frozen_experts_and_exchanges_without_a_group():
    net = Net(Topology(), Groups(ep=SoloExchange(), edp=SoloExchange()))
    net.layers[0].experts.requires_grad_(False)
    assert prepare_ddp(net) is net
    loopback = LoopbackWorld(2).exchange(0)
    net = Net(Topology(world_size=2, ep_size=1, rank=0), Groups(ep=SoloExchange(), edp=loopback))
    with pytest.raises(ValueError, match="LoopbackExchange has no process group"):
        prepare_ddp(net)


def test_a_model_is_prepared_once_and_only_where_it_has_experts():
    net = Net(Topology(), Groups(ep=SoloExchange(), edp=SoloExchange()))
    assert prepare_ddp(net) is net
    with pytest.raises(ValueError, match="prepared before"):
        prepare_ddp(net)
    with pytest.raises(ValueError, match="Linear has no MoELayer"):
        prepare_ddp(nn.Linear(2, 2))
