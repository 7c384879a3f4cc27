"""DenseMoE against the formulas, and the layer's auxiliary loss against it over any division of a batch."""

import pytest
import torch

from moe import DenseMoE, Groups, MoEConfig, MoELayer, SoloExchange, Topology
from moe.testing import run_loopback
from routing import RouterConfig, losses

# all distinct, so that a transposed axis cannot pass
EXPERTS, TOP_K, WIDTH, HIDDEN, SHARED, TOKENS = 8, 3, 6, 10, 7, 24
# the same batch over 1, 2 and 4 ranks, a rank without tokens among them
DIVISIONS = [(TOKENS,), (7, 17), (0, 24), (0, 1, 7, 16), (6, 6, 6, 6)]
WS = ("w1", "w2", "w3")


def config(shared=SHARED, **router):
    shape = {"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoEConfig(router=RouterConfig(**shape | router), expert_hidden=HIDDEN, shared_hidden=shared)


def make_reference(moe_config):
    reference = DenseMoE(moe_config, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference.gate.mul_(40)
    return reference


def rows(num_tokens=TOKENS):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, generator=generator)


def make_layer(moe_config, exchange):
    reference = make_reference(moe_config)
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    layer = MoELayer(moe_config, topology, groups=Groups(ep=exchange, edp=SoloExchange())).double()
    homes = topology.home_experts(EXPERTS)
    with torch.no_grad():
        layer.router.gate.weight.copy_(reference.gate)
        layer.router.bias.set(reference.bias.float())
        for name in WS:
            getattr(layer.experts, name).copy_(getattr(reference, name)[homes])
            if layer.shared_expert is not None:
                getattr(layer.shared_expert, name).weight.copy_(getattr(reference, f"shared_{name}"))
    return layer


@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_output_is_the_weighted_sum_over_a_dense_mask(score, shared):
    """All experts for all tokens in one einsum, with a [T, E] matrix of weights, zero where unselected."""
    reference, x = make_reference(config(shared, score=score, scale=1.5)), rows()
    logits_TE = x @ reference.gate.T
    scores_TE = logits_TE.softmax(1) if score == "softmax" else logits_TE.sigmoid()
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(TOP_K).indices, 1.0)
    weight_TE = 1.5 * scores_TE * chosen_TE / (scores_TE * chosen_TE).sum(1, keepdim=True)
    gate = torch.einsum("td,efd->tef", x, reference.w1)
    hidden = gate * gate.sigmoid() * torch.einsum("td,efd->tef", x, reference.w3)
    want = torch.einsum("te,tef,edf->td", weight_TE, hidden, reference.w2)
    if shared:
        gate = x @ reference.shared_w1.T
        want = want + (gate * gate.sigmoid() * (x @ reference.shared_w3.T)) @ reference.shared_w2.T
    y, _, counts_E = reference(x)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-12)
    assert counts_E.tolist() == chosen_TE.sum(0).long().tolist()


def test_ties_go_to_the_lowest_id_and_the_bias_selects_only():
    reference = make_reference(config())
    assert reference.choose(torch.zeros(EXPERTS, dtype=torch.float64)) == [0, 1, 2]
    reference.bias[5] = 0.1
    assert reference.choose(torch.zeros(EXPERTS, dtype=torch.float64)) == [5, 0, 1]


def test_padding_and_an_empty_batch_count_nothing():
    reference, x = make_reference(config()), rows(EXPERTS)  # as many tokens as experts
    mask_T = torch.arange(EXPERTS) % 3 > 0
    y, aux_loss, counts_E = reference(x, mask_T)
    alone, aux_alone, counts_alone = reference(x[mask_T])
    torch.testing.assert_close(y[mask_T], alone)
    torch.testing.assert_close(aux_loss, aux_alone)
    assert counts_E.tolist() == counts_alone.tolist()
    none, aux_none, _ = reference(x[:0])
    assert none.shape == (0, WIDTH) and float(aux_none) == 0


def step(exchange, moe_config, tokens_P, previous_E, use_y):
    """Gradients of one rank's part: of the gate, and of its rows."""
    layer = make_layer(moe_config, exchange)
    layer.end_step(previous_E)
    x = rows().split(tokens_P)[exchange.rank].clone().requires_grad_(True)
    y, aux_loss = layer(x)
    loss = (y.square().sum() if use_y else y.sum() * 0) + aux_loss
    loss.backward()
    return float(loss.detach()), layer.router.gate.weight.grad, x.grad


PREVIOUS_E = torch.arange(1, EXPERTS + 1) * 100


def summed(moe_config, tokens_P, previous_E=PREVIOUS_E, use_y=False):
    results = run_loopback(step, len(tokens_P), moe_config, tokens_P, previous_E, use_y)
    total, gate, x = zip(*results, strict=True)
    return sum(total), sum(gate), torch.cat(x)


def dense(moe_config, fraction_E=None, use_y=False):
    reference, x = make_reference(moe_config), rows().requires_grad_(True)
    y, aux_loss, _ = reference(x, fraction_E=fraction_E)
    loss = (y.square().sum() if use_y else y.sum() * 0) + aux_loss
    loss.backward()
    return float(loss.detach()), reference.gate.grad, x.grad


def close(got, want):
    """float64 sums of a few hundred terms in another order."""
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("tokens_P", DIVISIONS, ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["global", "previous"])
def test_auxiliary_gradient_does_not_depend_on_the_division_over_ranks(scope, score, tokens_P):
    moe_config = config(balance_scope=scope, score=score, balance_loss=0.7, z_loss=0.1)
    fraction_E = losses.load_fraction(PREVIOUS_E, torch.float64) if scope == "previous" else None
    close(summed(moe_config, tokens_P), dense(moe_config, fraction_E))


def test_scope_local_does_depend_on_it():
    """So the test above can fail: shares of a part are not those of the whole."""
    moe_config = config(balance_scope="local", balance_loss=0.7)
    close(summed(moe_config, (TOKENS,)), dense(moe_config))
    differs = (summed(moe_config, (6, 6, 6, 6))[1] - dense(moe_config)[1]).abs().max()
    assert differs > 1e-3


@pytest.mark.parametrize("parts", [(24,), (1, 23), (8, 8, 8)], ids=str)
def test_in_scope_previous_it_does_not_depend_on_the_micro_batches(parts):
    moe_config = config(balance_scope="previous", balance_loss=0.7, z_loss=0.1)
    layer = make_layer(moe_config, SoloExchange())
    layer.end_step(PREVIOUS_E)
    for part in rows().split(parts):
        layer(part)[1].backward()
    want = dense(moe_config, losses.load_fraction(PREVIOUS_E, torch.float64))[1]
    close([layer.router.gate.weight.grad], [want])


def test_the_first_step_of_scope_previous_has_no_gradient_and_the_value_one_per_token():
    nothing_E = torch.zeros(EXPERTS, dtype=torch.int64)
    total, gate_grad, _ = summed(
        config(balance_scope="previous", balance_loss=1.0, z_loss=0.0), (24,), nothing_E
    )
    assert total == pytest.approx(TOKENS, rel=1e-12)
    assert float(gate_grad.abs().max()) < 1e-12  # rounding of sum_e dp_e = 0


@pytest.mark.parametrize("name", ["balance_loss", "z_loss"])
def test_the_auxiliary_gradient_is_linear_in_its_coefficient(name):
    off = {"balance_loss": 0.0, "z_loss": 0.0}
    value, gate_grad, x_grad = summed(config(**off | {name: 0.25}), (7, 17))
    assert float(gate_grad.abs().max()) > 1e-3
    close(summed(config(**off | {name: 1.0}), (7, 17)), (4 * value, 4 * gate_grad, 4 * x_grad))


@pytest.mark.parametrize("tokens_P", [(24,), (7, 17), (0, 1, 7, 16)], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gate_learns_from_the_output_alone(score, tokens_P):
    """Auxiliary losses off: the gradient comes through the weights of combine, and equals the reference."""
    moe_config = config(score=score, balance_loss=0.0, z_loss=0.0)
    want = dense(moe_config, use_y=True)
    assert float(want[1].abs().max()) > 1e-2
    close(summed(moe_config, tokens_P, use_y=True), want)


@pytest.mark.parametrize("tokens_P", [(24,), (0, 24), (0, 1, 7, 16)], ids=str)
def test_memory_that_nobody_wrote_reaches_no_result(tokens_P, monkeypatch):
    """New buffers start as NaN: outputs and gradients of two steps stay finite, and equal the reference's."""
    new_empty, empty_like, empty = torch.Tensor.new_empty, torch.empty_like, torch.empty

    def poisoned(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-(2**40))

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *a, **k: poisoned(new_empty(t, *a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: poisoned(empty_like(t, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    for _ in range(2):
        close(summed(config(), tokens_P, use_y=True), dense(config(), use_y=True))


def test_per_sequence_scope_reads_the_sequences_of_a_batch():
    moe_config = config(balance_scope="sequence", balance_loss=1.0, z_loss=0.0)
    layer, x = make_layer(moe_config, SoloExchange()), rows()
    each = [dense_balance(moe_config, part) for part in x.split(8)]
    assert float(layer(x.view(3, 8, WIDTH))[1].detach()) == pytest.approx(sum(each), rel=1e-11)
    assert float(layer(x)[1].detach()) == pytest.approx(dense_balance(moe_config, x), rel=1e-11)


def dense_balance(moe_config, x):
    return float(make_reference(moe_config)(x)[1].detach())
