"""Checkpointing that keeps its routes: what is done again, and what is not."""

import pytest
import torch
from torch import nn

from moe import LoadMeter, MoEConfig, MoELayer, Topology
from moe.experts import Experts
from moe.recompute import checkpoint
from routing import Router, RouterConfig

WIDTH = 6


class Block(nn.Module):
    """Two layers, a product with the auxiliary loss, and a mask: all that a second forward must meet."""

    def __init__(self, meter: LoadMeter) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = RouterConfig(d_model=WIDTH, num_experts=5, top_k=2)
        config = MoEConfig(router=router, expert_hidden=7, shared_hidden=4)
        self.layers = nn.ModuleList(MoELayer(config, Topology(), meter=meter) for _ in range(2))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x, mask):
        total = x.new_ones(())
        for layer in self.layers:
            y, aux_loss = layer(self.mix(x).tanh(), mask)
            x, total = x + y, total * (1 + aux_loss)
        return x, total


def gradients(how):
    """Of the block's parameters and input, and the meter's counts."""
    meter = LoadMeter()
    block = Block(meter)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, WIDTH, dtype=torch.float64, generator=generator).requires_grad_(True)
    mask = torch.arange(9) != 4
    y, total = block(x, mask) if how is None else checkpoint(block, x, mask, **how)
    (y.square().sum() * total).backward()
    return [x.grad, *(p.grad for p in block.parameters())], meter.sample(1).tokens_per_expert_LE


@pytest.mark.parametrize("how", [{}, {"use_reentrant": True}, {"keep": "rows"}], ids=str)
def test_a_block_of_layers_has_the_same_gradients(how):
    wanted, counts = gradients(None)
    got, counted = gradients(how)
    for ours, reference in zip(got, wanted):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-14)  # sums in another order
    assert (counted == counts).all() and counts.sum() == 2 * 8 * 2


@pytest.mark.parametrize(("keep", "routed", "computed"), [("routes", 2, 2), ("rows", 1, 2)])
def test_a_layer_that_keeps_its_rows_routes_once(keep, routed, computed, monkeypatch):
    calls = []
    for cls, name in ((Router, "route"), (Experts, "forward")):
        original = getattr(cls, name)

        def counted(self, *args, _original=original, _name=name):
            calls.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(cls, name, counted)
    config = MoEConfig(router=RouterConfig(d_model=WIDTH, num_experts=5, top_k=2), expert_hidden=7)
    layer = MoELayer(config, Topology())
    y, aux_loss = checkpoint(layer, torch.randn(4, WIDTH, requires_grad=True), keep=keep)
    (y.sum() + aux_loss).backward()
    assert (calls.count("route"), calls.count("forward")) == (routed, computed)


def saved_bytes(keep):
    """Bytes that the forward leaves behind for the backward; None: without checkpoint."""
    router = RouterConfig(d_model=64, num_experts=4, top_k=2)
    layer = MoELayer(MoEConfig(router=router, expert_hidden=256), Topology())
    x, saved = torch.randn(128, 64, requires_grad=True), {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if keep is None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(saved.values())
    from torch.profiler import ProfilerActivity, profile

    checkpoint(layer, x, keep=keep)  # compile before it is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = checkpoint(layer, x, keep=keep)
    events = profiler.profiler.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return held - sum(output.numel() * output.element_size() for output in outputs)


def test_keeping_rows_takes_more_memory_than_routes_and_far_less_than_everything():
    routes, rows, everything = saved_bytes("routes"), saved_bytes("rows"), saved_bytes(None)
    combined = 128 * 2 * 64 * 4
    assert routes < combined / 4, "only what says where rows go"
    assert combined < rows < combined * 1.6
    assert everything > 5 * rows


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="keep='all' is unknown; use one of routes, rows"):
        checkpoint(lambda x: x, torch.ones(1), keep="all")
    with pytest.raises(ValueError, match="needs use_reentrant=False"):
        checkpoint(lambda x: x, torch.ones(1), keep="rows", use_reentrant=True)
