"""The EP layer against the dense float64 reference: outputs, losses and every gradient, rank by rank."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import (
    DenseMoE,
    Groups,
    MoEConfig,
    MoELayer,
    NonFiniteRouterError,
    SoloExchange,
    Topology,
    make_groups,
)
from moe.exchange import DistExchange
from moe.recompute import checkpoint as ours
from moe.testing import RankFailedError, run_loopback, run_ranks
from routing import RouterConfig

# all distinct, so that a transposed axis cannot pass
EXPERTS, TOP_K, WIDTH, HIDDEN, SHARED = 8, 3, 10, 14, 6

# gate rows are made from these, so that the routing is what the name says
ROUTINGS = ("mixed", "uneven", "one_expert_empty", "one_rank", "one_hot_token")
TOKENS = {1: [(64,), (0,), (1,)], 2: [(7, 64), (0, 7), (1, 0)], 4: [(0, 1, 7, 64), (7, 7, 7, 7)]}


def config(**router) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K, **router),
        expert_hidden=HIDDEN,
        shared_hidden=SHARED,
    )


def make_reference(moe_config: MoEConfig, routing: str) -> DenseMoE:
    reference = DenseMoE(moe_config, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        reference.gate.mul_(20)
        if routing == "uneven":
            reference.bias.copy_(torch.linspace(0.0, 0.3, EXPERTS, dtype=torch.float64))
        if routing == "one_expert_empty":
            reference.bias[3] = -5.0
        if routing == "one_rank":  # every copy to the last experts, which live on the last rank
            reference.bias[-TOP_K:] = 5.0
        if routing == "expert_5":
            reference.bias[5] = 5.0
        if routing == "one_hot_token":
            reference.bias[0] = 5.0
    return reference


def batch(tokens_P: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    x = [torch.randn(t, WIDTH, dtype=torch.float64, generator=generator) for t in tokens_P]
    target = [torch.randn(t, WIDTH, dtype=torch.float64, generator=generator) for t in tokens_P]
    return x, target


def load_weights(layer: MoELayer, reference: DenseMoE) -> None:
    mine = layer.topology.home_experts(EXPERTS)
    layer.double()
    with torch.no_grad():
        layer.router.gate.weight.copy_(reference.gate)
        layer.router.bias.set(reference.bias.float())
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(reference, name)[mine])
            getattr(layer.shared_expert, name).weight.copy_(getattr(reference, f"shared_{name}"))


def ep_step(topology, groups, moe_config, routing, tokens_P, masked=False):
    """One forward and backward on one rank; gradients are sums over the global batch once reduced."""
    reference = make_reference(moe_config, routing)
    layer = MoELayer(moe_config, topology, groups=groups)
    load_weights(layer, reference)
    x, target = (parts[topology.rank] for parts in batch(tokens_P))
    mask = None
    if masked:
        x, target, mask = pad(x, target)
    x.requires_grad_(True)
    y, aux_loss = layer(x, mask)
    loss = (y * target).sum() + aux_loss
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in layer.named_parameters()}
    return {"y": y.detach().numpy(), "loss": loss.item(), "x_grad": x.grad.numpy(), "grads": grads}


def pad(x, target):
    """Interleave padding rows of large values, whose targets are zero."""
    noise = torch.full_like(x, 3.0)
    mask = torch.tensor([True, False]).repeat(x.shape[0])
    padded = torch.stack([x, noise], 1).reshape(-1, WIDTH)
    return padded, torch.stack([target, torch.zeros_like(target)], 1).reshape(-1, WIDTH), mask


def dense_step(moe_config, routing, tokens_P):
    reference = make_reference(moe_config, routing)
    x, target = (torch.cat(parts) for parts in batch(tokens_P))
    x.requires_grad_(True)
    y, aux_loss, counts = reference(x)
    loss = (y * target).sum() + aux_loss
    loss.backward()
    return reference, y.detach().numpy(), loss.item(), x.grad.numpy(), counts


def compare(results, moe_config, routing, tokens_P, masked=False):
    """float64: 1e-10 in every element, and the ratio per tensor shows a constant factor by its size."""
    reference, y, loss, x_grad, _ = dense_step(moe_config, routing, tokens_P)
    bounds = np.cumsum([0, *tokens_P])
    assert sum(r["loss"] for r in results) == pytest.approx(loss, rel=1e-10, abs=1e-10)
    for rank, result in enumerate(results):
        rows = slice(bounds[rank], bounds[rank + 1])
        step = 2 if masked else 1
        np.testing.assert_allclose(result["y"][::step], y[rows], atol=1e-10)
        np.testing.assert_allclose(result["x_grad"][::step], x_grad[rows], atol=1e-10)
    dense = {"router.gate.weight": reference.gate, **{f"experts.{n}": getattr(reference, n) for n in WS}}
    dense |= {f"shared_expert.{n}.weight": getattr(reference, f"shared_{n}") for n in WS}
    for name, parameter in dense.items():
        parts = [r["grads"][name] for r in results]
        got = np.concatenate(parts) if name.startswith("experts") else sum(parts)
        want = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(got, want, atol=1e-10, err_msg=name)


WS = ("w1", "w2", "w3")
CASES = [(p, r, t) for p, shapes in TOKENS.items() for t in shapes for r in ROUTINGS]


def loopback_step(exchange, *args):
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    return ep_step(topology, Groups(ep=exchange, edp=SoloExchange()), *args)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("world", "routing", "tokens_P"), CASES, ids=str)
def test_ep_layer_equals_dense_reference(world, routing, tokens_P, score):
    moe_config = config(score=score, normalize=score == "softmax", scale=1.5)
    results = run_loopback(loopback_step, world, moe_config, routing, tokens_P)
    compare(results, moe_config, routing, tokens_P)


@pytest.mark.parametrize("tokens_P", [(64,), (7, 64), (0, 1, 7, 64)], ids=str)
def test_padding_changes_nothing(tokens_P):
    """Pad tokens of large values between the real ones: outputs, loss and every gradient stay the same."""
    results = run_loopback(loopback_step, len(tokens_P), config(), "mixed", tokens_P, True)
    compare(results, config(), "mixed", tokens_P, masked=True)
    for result in results:
        assert not result["x_grad"][1::2].any(), "a padding row must get no gradient (its target is 0)"


def dist_step(rank, world, moe_config, routing, tokens_P):
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    groups = Groups(ep=DistExchange(None), edp=SoloExchange()) if world > 1 else None
    return ep_step(topology, groups, moe_config, routing, tokens_P)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("tokens_P", "routing"),
    [
        ((64,), "mixed"),
        *(((7, 64), r) for r in ROUTINGS),
        ((0, 1, 7, 64), "mixed"),
        ((0, 1, 7, 64), "one_rank"),
    ],
    ids=str,
)
def test_ep_layer_equals_dense_reference_on_gloo_ranks(routing, tokens_P):
    results = run_ranks(dist_step, len(tokens_P), config(), routing, tokens_P)
    compare(results, config(), routing, tokens_P)


def edp_step(rank, world, moe_config, tokens_P):
    topology = Topology(world_size=world, ep_size=2, rank=rank)
    return ep_step(topology, make_groups(topology), moe_config, "mixed", tokens_P)


@pytest.mark.dist
def test_expert_data_parallel_copies_sum_to_the_reference():
    """World 4 = EP 2 x EDP 2: expert gradients summed over EDP, the global balance loss over all ranks."""
    tokens_P = (5, 0, 9, 3)
    results = run_ranks(edp_step, 4, config(balance_loss=0.5), tokens_P)
    for name in WS:
        for local in (0, 1):
            total = (
                results[local]["grads"][f"experts.{name}"] + results[local + 2]["grads"][f"experts.{name}"]
            )
            results[local]["grads"][f"experts.{name}"] = total
            results[local + 2]["grads"][f"experts.{name}"] = total[:0]
    compare(results, config(balance_loss=0.5), "mixed", tokens_P)


def test_zero_gradient_not_none_for_an_empty_expert():
    results = run_loopback(loopback_step, 2, config(), "one_rank", (7, 64))
    first_rank = results[0]["grads"]
    assert all(not first_rank[f"experts.{name}"].any() for name in WS)


def nan_on_rank_1(exchange):
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    layer = MoELayer(config(), topology, groups=Groups(ep=exchange, edp=SoloExchange()))
    x = torch.zeros(4, WIDTH)
    if exchange.rank == 1:
        x[2, 5] = float("nan")
    try:
        layer(x)
    except NonFiniteRouterError as error:
        return str(error), error.ranks
    return "nothing raised", []


def test_nan_in_one_ranks_logits_raises_on_all_ranks():
    outcomes = run_loopback(nan_on_rank_1, 4)
    assert outcomes == [("router logits of MoE layer 0 are NaN or infinite on rank 1", [1])] * 4


def no_gradient_wanted(exchange):
    """Inputs that need no gradient on one rank only: the backward's collectives still pair up."""
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    layer = MoELayer(config(), topology, groups=Groups(ep=exchange, edp=SoloExchange()))
    x = torch.randn(exchange.rank * 3, WIDTH, requires_grad=exchange.rank == 1)
    y, aux_loss = layer(x)
    (y.sum() * 0 + aux_loss).backward()
    return all(p.grad is not None for p in layer.parameters())


def test_every_rank_reaches_every_collective_of_the_backward():
    assert run_loopback(no_gradient_wanted, 4, timeout_s=20) == [True] * 4


def test_a_split_that_loses_rows_is_refused_before_any_collective():
    def losing(counts_PE, slot_to_expert_S):
        rows_PS = counts_PE.copy()
        rows_PS[0, rows_PS[0].argmax()] -= 1
        return rows_PS

    layer = MoELayer(config(), Topology(), split=losing)
    with pytest.raises(ValueError, match=r"split sends \d+ rows of rank 0 to expert \d, which has \d+"):
        layer(torch.randn(5, WIDTH))


def test_part_of_the_world_as_ep_group_needs_groups():
    with pytest.raises(ValueError, match="make_groups"):
        MoELayer(config(), Topology(world_size=4, ep_size=2))


def test_a_rank_that_raises_breaks_the_barrier():
    def one_raises(exchange):
        if exchange.rank == 1:
            raise KeyError("lost")
        exchange.all_gather(torch.zeros(1))

    with pytest.raises(RankFailedError, match="rank 1 of 3 raised KeyError"):
        run_loopback(one_raises, 3)


def solo_layer(**router) -> MoELayer:
    layer = MoELayer(config(**router), Topology()).double()
    with torch.no_grad():
        layer.router.gate.weight.mul_(50)
    return layer


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_that_is_not_finite_reaches_no_gradient(value, score):
    layer = solo_layer(score=score)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    mask_T = torch.arange(7) != 2
    x[2] = value
    y, aux_loss = layer(x, mask_T)
    (y[mask_T].square().sum() + aux_loss).backward()
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(
    "how",
    [{"use_reentrant": True}, {"use_reentrant": False}, {"keep": "rows"}],
    ids=["reentrant", "non_reentrant", "keep_rows"],
)
@pytest.mark.parametrize("scope", ["local", "global", "previous", "running", "sequence"])
def test_recomputation_changes_no_gradient_in_any_scope(scope, how):
    layer = solo_layer(balance_scope=scope, balance_loss=1.0)
    grads = []
    for recompute in (True, False):
        layer.zero_grad()
        layer.running_counts_E.zero_()
        for micro in range(3):
            generator = torch.Generator().manual_seed(micro)
            x = torch.randn(9, WIDTH, dtype=torch.float64, generator=generator).requires_grad_(True)
            y, aux_loss = (ours if "keep" in how else checkpoint)(layer, x, **how) if recompute else layer(x)
            (y.sum() + aux_loss).backward()
        grads.append(layer.router.gate.weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 3, dtype=torch.bool), torch.ones(6, dtype=torch.int64), torch.ones(7, dtype=torch.bool)],
)
def test_a_wrong_mask_is_an_error_that_says_what_it_should_be(mask):
    with pytest.raises(ValueError, match=r"expected \(6,\) of torch.bool: True for a real token"):
        solo_layer()(torch.randn(2, 3, WIDTH, dtype=torch.float64), mask)


def nan_in_one_ep_group(rank, world):
    topology = Topology(world_size=world, ep_size=2, rank=rank)
    layer = MoELayer(config(balance_scope="previous"), topology, groups=make_groups(topology))
    try:
        layer(torch.full((3, WIDTH), float("nan") if rank == 3 else 1.0))
    except NonFiniteRouterError as error:
        return error.ranks
    return []


@pytest.mark.dist
def test_nan_in_one_ep_group_raises_in_the_others_too():
    """World 4 = EP 2 x EDP 2, in a scope that asks for no counts of other ranks."""
    assert run_ranks(nan_in_one_ep_group, 4, timeout_s=60) == [[3]] * 4


def one_expert_step(exchange, tokens_P):
    """K = 1 and every token to expert 5: one rank computes everything."""
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    groups = Groups(ep=exchange, edp=SoloExchange())
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=1, normalize=False)
    moe_config = MoEConfig(router=router, expert_hidden=HIDDEN, shared_hidden=SHARED)
    return ep_step(topology, groups, moe_config, "expert_5", tokens_P), moe_config


@pytest.mark.parametrize("tokens_P", [(64,), (7, 64), (0, 1, 7, 64)], ids=str)
def test_all_tokens_to_one_expert_equals_the_reference(tokens_P):
    outcomes = run_loopback(one_expert_step, len(tokens_P), tokens_P)
    results, (moe_config, *_) = zip(*outcomes)
    compare(results, moe_config, "expert_5", tokens_P)
    *_, counts = dense_step(moe_config, "expert_5", tokens_P)
    assert counts.tolist() == [0, 0, 0, 0, 0, sum(tokens_P), 0, 0]


def gate_gradient(layer: MoELayer) -> torch.Tensor:
    x_TD = torch.randn(20, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    layer.zero_grad()
    layer(x_TD)[1].backward()
    return layer.router.gate.weight.grad.clone()


def test_the_gradient_is_linear_in_a_balance_loss_that_is_changed_while_it_trains():
    layer = solo_layer(balance_loss=0.3, z_loss=0.2)
    assert layer.balance_loss == 0.3
    at_first = gate_gradient(layer)
    layer.set_balance_loss(0.0)
    without = gate_gradient(layer)
    for value in (0.6, 3.0):
        layer.set_balance_loss(value)
        # float64 sums of two terms
        want = without + value / 0.3 * (at_first - without)
        torch.testing.assert_close(gate_gradient(layer), want, rtol=1e-10, atol=1e-12)
    assert (at_first - without).abs().max() > 1e-3
    assert layer.config.router.balance_loss == 0.3
    assert not any("balance_loss" in name for name in layer.state_dict())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_balance_loss_that_is_no_coefficient_is_refused_and_the_old_one_stays(value):
    layer = solo_layer(balance_loss=0.3)
    with pytest.raises(ValueError, match=rf"MoE layer 0: balance_loss={value} must be 0 or more, and finite"):
        layer.set_balance_loss(value)
    assert layer.balance_loss == 0.3
