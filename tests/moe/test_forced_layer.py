"""A layer whose router is forced: the counts that were asked for, and the values of the reference."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe import DenseMoE, Groups, LoadMeter, MoEConfig, MoELayer, SoloExchange, Topology
from moe.recompute import checkpoint
from moe.testing import run_loopback
from routing import RouterConfig

# all distinct, so that a transposed axis cannot pass
EXPERTS, TOP_K, WIDTH, HIDDEN, SHARED = 6, 2, 10, 14, 4
TOKENS_P = (7, 12)


def config(forced: str, **router) -> MoEConfig:
    settings = {"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K, "forced": forced} | router
    return MoEConfig(router=RouterConfig(**settings), expert_hidden=HIDDEN, shared_hidden=SHARED)


class Told(DenseMoE):
    """The reference with experts that it is told, token after token, in place of its own choice."""

    told: Iterator[list[int]]

    def choose(self, scores_E: torch.Tensor) -> list[int]:
        return next(self.told)


def make_reference(moe_config: MoEConfig) -> Told:
    reference = Told(moe_config, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        reference.gate.mul_(20)
    return reference


def batch() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(t, WIDTH, dtype=torch.float64, generator=generator) for t in TOKENS_P]


def make_layer(moe_config: MoEConfig, exchange, **options) -> MoELayer:
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    layer = MoELayer(moe_config, topology, groups=Groups(ep=exchange, edp=SoloExchange()), **options).double()
    reference, mine = make_reference(moe_config), topology.home_experts(EXPERTS)
    with torch.no_grad():
        layer.router.gate.weight.copy_(reference.gate)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(reference, name)[mine])
            getattr(layer.shared_expert, name).weight.copy_(getattr(reference, f"shared_{name}"))
    return layer


def ep_step(exchange, moe_config):
    counts = []

    def watching(counts_PE, slot_to_expert_S):
        counts.append(counts_PE)
        return counts_PE  # one slot an expert, in order

    layer = make_layer(moe_config, exchange, split=watching)
    x_TD = batch()[exchange.rank].requires_grad_(True)
    layer.eval()  # the draws of the training forward that follows
    experts = layer.router.route(x_TD).expert_N.view(-1, TOP_K).tolist()
    layer.train()
    y_TD, aux_loss = layer(x_TD)
    (y_TD.square().sum() + aux_loss).backward()
    grads = {name: p.grad.numpy() for name, p in layer.named_parameters()}
    return {
        "experts": experts,
        "counts_PE": counts[0],
        "y": y_TD.detach().numpy(),
        "x_grad": x_TD.grad.numpy(),
        "grads": grads,
    }


@pytest.mark.parametrize("forced", ["always:0", "only:0-1", "zipf:1.0"])
def test_two_ranks_give_the_counts_and_the_values_of_the_reference(forced):
    moe_config = config(forced)
    results = run_loopback(ep_step, 2, moe_config)
    counts_PE = results[0]["counts_PE"]
    assert (counts_PE == results[1]["counts_PE"]).all()
    assert counts_PE.sum(axis=1).tolist() == [TOP_K * tokens for tokens in TOKENS_P]
    if forced == "always:0":
        assert counts_PE[:, 0].tolist() == list(TOKENS_P)
        assert counts_PE[:, 1:].sum(axis=1).tolist() == list(TOKENS_P)
    if forced == "only:0-1":  # both choices of every token, all on rank 0
        assert counts_PE.tolist() == [[tokens, tokens, 0, 0, 0, 0] for tokens in TOKENS_P]
    reference = make_reference(moe_config)
    reference.told = iter(results[0]["experts"] + results[1]["experts"])
    x_TD = torch.cat(batch()).requires_grad_(True)
    y_TD, aux_loss, told_counts_E = reference(x_TD)
    (y_TD.square().sum() + aux_loss).backward()
    assert told_counts_E.tolist() == counts_PE.sum(axis=0).tolist()
    # float64: rounding of sums in another order
    np.testing.assert_allclose(np.concatenate([r["y"] for r in results]), y_TD.detach().numpy(), atol=1e-10)
    np.testing.assert_allclose(np.concatenate([r["x_grad"] for r in results]), x_TD.grad.numpy(), atol=1e-10)
    gate = sum(r["grads"]["router.gate.weight"] for r in results)
    np.testing.assert_allclose(gate, reference.gate.grad.numpy(), atol=1e-10)
    for name in ("w1", "w2", "w3"):
        got = np.concatenate([r["grads"][f"experts.{name}"] for r in results])
        np.testing.assert_allclose(got, getattr(reference, name).grad.numpy(), atol=1e-10, err_msg=name)


def two_layers(exchange, metered):
    meter = LoadMeter(exchange.size, exchange.rank) if metered else None
    numbers = [None, None] if metered else [0, 1]
    drawn = []
    for number in numbers:
        layer = make_layer(config("uniform"), exchange, meter=meter, layer_id=number)
        drawn.append(layer.router.route(torch.zeros(40, WIDTH, dtype=torch.float64)).expert_N.tolist())
    return drawn


@pytest.mark.parametrize("metered", [True, False], ids=["numbered_by_the_meter", "numbered_by_hand"])
def test_layers_and_ranks_draw_for_themselves(metered):
    drawn = [tuple(expert_N) for of_rank in run_loopback(two_layers, 2, metered) for expert_N in of_rank]
    assert len(set(drawn)) == 4
    again = [tuple(expert_N) for of_rank in run_loopback(two_layers, 2, metered) for expert_N in of_rank]
    assert drawn == again


@pytest.mark.parametrize(("keep", "reentrant"), [("routes", True), ("routes", False), ("rows", False)])
def test_recomputation_keeps_the_draws_and_counts_them_once(keep, reentrant):
    outcomes = []
    for recompute in (True, False):
        layer = make_layer(config("zipf:1.0"), SoloExchange())
        for _ in range(2):
            x_TD = batch()[0].requires_grad_(True)
            if recompute:
                y_TD, aux_loss = checkpoint(layer, x_TD, use_reentrant=reentrant, keep=keep)
            else:
                y_TD, aux_loss = layer(x_TD)
            (y_TD.square().sum() + aux_loss).backward()
        assert int(layer.router.forced.draws) == 2
        outcomes.append(layer.router.gate.weight.grad)
    assert torch.equal(*outcomes)


def test_torchs_own_checkpoint_is_refused():
    layer = make_layer(config("uniform"), SoloExchange())
    y_TD, _ = torch_checkpoint(layer, batch()[0].requires_grad_(True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="cannot be drawn again in a backward"):
        y_TD.sum().backward()
