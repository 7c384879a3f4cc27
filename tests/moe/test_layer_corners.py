"""Corners of the layer: autocast, frozen experts, no backward, second derivatives, wrong splits, nesting."""

import gc
import weakref

import numpy as np
import pytest
import torch

from moe import MoEConfig, MoELayer, SoloExchange, Topology
from moe.dispatch import dispatch
from moe.exchange import start_all_to_all_v
from moe.groups import Groups
from moe.placement import even_split
from moe.recompute import checkpoint
from moe.testing import run_loopback
from routing import RouterConfig

WIDTH, EXPERTS, HIDDEN = 8, 4, 16


def make_layer(topology=None, groups=None, *, split=even_split, slots=None, **config):
    torch.manual_seed(0)
    scope = config.pop("balance_scope", "local")
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=2, balance_scope=scope, balance_loss=1.0)
    moe_config = MoEConfig(router=router, expert_hidden=HIDDEN, **config)
    topology = topology or Topology()
    return MoELayer(moe_config, topology, groups=groups, split=split, slot_to_expert_S=slots)


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_under_autocast_experts_compute_in_its_type_and_the_router_in_float32(activation, position):
    layer = make_layer(activation=activation, weight_position=position, shared_hidden=4)
    x = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        got, aux_loss = layer(x)
        routing = layer.router.route(x)
    assert routing.logits_TE.dtype == torch.float32
    assert torch.equal(routing.logits_TE, layer.router.route(x).logits_TE), "routes must not depend on it"
    torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)  # bfloat16 in three products
    (got.float().sum() + aux_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("frozen", [["w1", "w2", "w3"], ["w2"], ["w1"], ["w3"]])
def test_frozen_experts_get_no_gradient_and_the_others_the_same(frozen):
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    grads = []
    for freeze in ([], frozen):
        layer, rows = make_layer(), x.clone().requires_grad_(True)
        for name in freeze:
            getattr(layer.experts, name).requires_grad_(False)
        y, aux_loss = layer(rows)
        (y.square().sum() + aux_loss).backward()
        grads.append({"x": rows.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, grad in grads[1].items():
        if name.removeprefix("experts.") in frozen:
            assert grad is None
        else:
            assert torch.equal(grad, grads[0][name]), name


def test_a_second_derivative_is_refused_where_it_would_be_wrong():
    layer = make_layer()
    x = torch.randn(5, WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def graph_left_behind(exchange):
    """Whether what the forward saved is gone once its results are, though no backward ran."""
    rows = torch.ones(4, 3, requires_grad=True) * 2
    in_flight = start_all_to_all_v(rows.exp(), exchange, [2, 2], [2, 2])
    arrived = in_flight.wait()
    node = weakref.ref(arrived.grad_fn.next_functions[0][0])
    del arrived, in_flight
    return node() is None


def test_a_forward_without_backward_leaves_no_graph_behind():
    gc.collect()
    gc.disable()
    try:
        assert run_loopback(graph_left_behind, 2) == [True, True]
    finally:
        gc.enable()


def to_an_empty_slot(exchange):
    def split(counts_PE, slot_to_expert_S):
        rows_PS = even_split(counts_PE, slot_to_expert_S)
        rows_PS[0, -1] = 1
        return rows_PS

    topology = Topology(world_size=2, ep_size=2, rank=exchange.rank)
    slots = np.array([0, 1, -1, 2, 3, -1])
    layer = make_layer(topology, Groups(ep=exchange, edp=SoloExchange()), split=split, slots=slots)
    with pytest.raises(ValueError, match=r"sends 1 rows of rank 0 to slot 5, which is empty"):
        layer(torch.randn(5, WIDTH))
    return "raised"


def test_rows_for_an_empty_slot_raise_on_every_rank_before_any_is_sent():
    assert run_loopback(to_an_empty_slot, 2, timeout_s=5) == ["raised", "raised"]


@pytest.mark.parametrize("change", [+1, -1])
def test_dispatch_refuses_rows_that_are_not_the_copies(change):
    layer = make_layer()
    x = torch.randn(5, WIDTH)
    routing = layer.router.route(x)
    rows_PS = routing.routed_E.numpy()[None].copy()
    rows_PS[0, int(rows_PS.argmax())] += change
    with pytest.raises(ValueError, match="do not sum to the copies of their experts"):
        dispatch(x, routing, rows_PS, layer.slot_to_expert_S, SoloExchange())


def peak(function):
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_a_forward_without_gradients_keeps_no_slots_activations():
    layer, x = make_layer(), torch.randn(512, WIDTH)

    def evaluate():
        with torch.no_grad():
            layer(x)

    assert peak(evaluate) < peak(lambda: layer(x)) - 512 * 2 * HIDDEN * 4, "gate or up of every copy"


def nested_step(exchange, how):
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    layer = make_layer(topology, Groups(ep=exchange, edp=SoloExchange()), balance_scope="global").double()
    with torch.no_grad():  # threads share torch's generator: no seed would hold
        for number, parameter in enumerate(layer.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    gathers = []
    gather = layer.gather_counts
    layer.gather_counts = lambda routing: gathers.append(1) or gather(routing)
    generator = torch.Generator().manual_seed(exchange.rank)
    x = torch.randn(6 * exchange.rank, WIDTH, dtype=torch.float64, generator=generator).requires_grad_(True)

    def inner(x):
        y, aux_loss = checkpoint(layer, x) if how == "nested" else layer(x)
        return x + y, aux_loss

    y, aux_loss = inner(x) if how == "plain" else checkpoint(inner, x)
    (y.square().sum() + aux_loss).backward()
    return len(gathers), [x.grad, *(p.grad for p in layer.parameters())]


def test_a_checkpoint_inside_a_checkpoint_keeps_its_routes_too():
    wanted = run_loopback(nested_step, 2, "plain")
    for how in ("single", "nested"):
        for (gathers, got), (_, reference) in zip(run_loopback(nested_step, 2, how, timeout_s=20), wanted):
            assert gathers == 1, "one gather of counts, in the first forward"
            for ours, theirs in zip(got, reference):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("keep", ["routes", "rows"])
def test_two_forwards_before_their_backwards_keep_their_own_running_counts(keep):
    grads = []
    for how in ("plain", keep):
        layer = make_layer(balance_scope="running").double()
        generator = torch.Generator().manual_seed(3)
        roots = []
        for _ in range(2):
            x = torch.randn(7, WIDTH, dtype=torch.float64, generator=generator).requires_grad_(True)
            y, aux_loss = layer(x) if how == "plain" else checkpoint(layer, x, keep=keep)
            roots.append(y.sum() + aux_loss)
        for root in roots:
            root.backward()
        grads.append(layer.router.gate.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda rows: rows.astype(float) * np.nan,
            r"rows of float64 and shape \(1, 4\); expected an array of int64",
        ),
        (lambda rows: rows.tolist(), r"rows of list and shape no shape; expected an array of int64"),
        (
            lambda rows: rows[:, :-1],
            r"rows of int64 and shape \(1, 3\); expected an array of int64 and shape \(1, 4\)",
        ),
        (
            lambda rows: rows - np.eye(1, 4, 2, dtype=np.int64) * 100,
            r"split sends -\d+ rows of rank 0 to slot 2; 0 or more",
        ),
        (lambda rows: None, "rows of NoneType"),
    ],
)
def test_a_split_of_the_wrong_kind_is_named_before_anything_travels(wrong, message):
    layer = make_layer(split=lambda counts_PE, slots: wrong(even_split(counts_PE, slots)))
    with pytest.raises(ValueError, match=message):
        layer(torch.ones(4, layer.config.router.d_model))
