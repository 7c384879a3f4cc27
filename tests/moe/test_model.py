"""Transformer: sums over any division of a batch, causality, padding, sizes, and weights from a seed."""

import pytest
import torch

from moe import ModelConfig, MoEConfig, Topology
from moe.exchange import SoloExchange
from moe.groups import Groups
from moe.model import Attention, Transformer, count_parameters, rotary_angles, rotate
from routing import RouterConfig

# all distinct, so that a transposed axis cannot pass
VOCAB, WIDTH, HEADS, EXPERTS, TOP_K, HIDDEN, DENSE, SEQ = 19, 12, 3, 8, 2, 14, 10, 9


def config(num_layers=3, num_dense_layers=1, shared=0, attention=None, **router) -> ModelConfig:
    shape = {"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K}
    return ModelConfig(
        moe=MoEConfig(router=RouterConfig(**shape | router), expert_hidden=HIDDEN, shared_hidden=shared),
        vocab_size=VOCAB,
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        d_model=WIDTH,
        num_heads=HEADS,
        dense_hidden=DENSE,
        seq_len=SEQ,
        **attention or {},
    )


def make_model(seed=3, **changes) -> Transformer:
    model = Transformer(config(**changes))
    model.init_weights(seed)
    return model


def text(batch=4, length=SEQ, seed=5):
    return torch.randint(0, VOCAB, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def losses_of(model, tokens, mask=None):
    ce_sum, aux_sum = model(tokens[:, :-1], tokens[:, 1:], mask)
    return ce_sum, aux_sum


def test_logits_are_one_row_per_token():
    logits = make_model()(text()[:, :-1])
    assert logits.shape == (4, SEQ, VOCAB)
    assert torch.isfinite(logits).all()


def test_cross_entropy_is_the_sum_in_nats():
    model, tokens = make_model(), text()
    logprob = model(tokens[:, :-1]).log_softmax(-1)
    want = -sum(
        float(logprob[b, s, tokens[b, s + 1]].detach()) for b in range(tokens.shape[0]) for s in range(SEQ)
    )
    # float32 sum of 36 terms of size 3
    assert float(losses_of(model, tokens)[0].detach()) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("scope", ["previous", "sequence"])
def test_losses_of_a_batch_are_the_sums_over_its_halves(scope):
    """In the scopes whose fractions do not depend on who else is in the micro-batch."""
    model, tokens = make_model(balance_scope=scope, balance_loss=1.0), text()
    whole = losses_of(model, tokens)
    halves = [losses_of(model, part) for part in tokens.split((1, 3))]
    for one, parts in zip(whole, zip(*halves, strict=True), strict=True):
        assert float(one.detach()) == pytest.approx(sum(float(p.detach()) for p in parts), rel=1e-5)
        assert one.dtype == torch.float32


def test_a_batch_of_nobody_has_zero_losses_and_zero_gradients():
    model = make_model(shared=6)
    ce_sum, aux_sum = losses_of(model, text(batch=0))
    (ce_sum + aux_sum).backward()
    assert float(ce_sum.detach()) == float(aux_sum.detach()) == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert model(text(batch=0)[:, :-1]).shape == (0, SEQ, VOCAB)


@pytest.mark.parametrize("changed", [1, 5, SEQ - 1])
def test_a_later_token_changes_no_earlier_logit(changed):
    model, tokens = make_model(), text()[:, :-1]
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % VOCAB
    before, after = model(tokens), model(other)
    # rows meet other neighbours in the experts' matrices: float32 rounding
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-5, atol=1e-6)
    assert ((after - before)[:, changed].abs().amax(-1) > 1e-4).all()


def test_an_earlier_token_does_change_later_logits():
    model, tokens = make_model(), text()[:, :-1]
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % VOCAB
    assert ((model(other) - model(tokens))[:, -1].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("scope", ["global", "sequence"])
def test_trailing_padding_changes_no_loss_and_no_gradient(scope):
    """Sequences of 6 tokens, alone and padded to 9 with arbitrary ones; the padded target counts nowhere."""
    tokens = text(length=6)
    outcomes = []
    for padded in (False, True):
        model = make_model(balance_scope=scope, balance_loss=1.0)
        inputs, targets, mask = tokens[:, :-1], tokens[:, 1:], None
        if padded:
            fill = torch.full((4, 3), 7)
            inputs, targets = (torch.cat([part, fill], 1) for part in (inputs, targets))
            mask = (torch.arange(9) < 6).expand(4, -1)
        ce_sum, aux_sum = model(inputs, targets, mask)
        (ce_sum + aux_sum).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        outcomes.append((ce_sum.detach(), aux_sum.detach(), grads))
    # float32 sums of 24 tokens in another order
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-5)


def test_a_sequence_longer_than_the_config_is_refused():
    with pytest.raises(ValueError, match=r"sequence of 10 tokens is longer than model\.seq_len=9"):
        make_model()(text(length=10)[:, :-1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_dense_layers": 0},
        {"num_layers": 4, "num_dense_layers": 3},
        {"shared": 6},
        {"num_dense_layers": 2, "shared": 5, "num_experts": 4, "top_k": 3},
        {"attention": {"num_kv_heads": 1}},
        {"attention": {"head_dim": 10, "num_kv_heads": 1, "qk_norm": True}},
        {"num_dense_layers": 3},
    ],
    ids=str,
)
def test_parameters_are_counted_as_the_model_has_them(changes):
    model = Transformer(config(**changes))
    counted = count_parameters(model.config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    router = model.config.moe.router
    assert counted["experts"] == experts
    assert counted["dense"] == sum(sizes.values()) - experts
    assert counted["active"] == counted["dense"] + experts * router.top_k // router.num_experts


def ep_models(ep_size, seed=3):
    """The model as each rank of an EP group initialises it. No rank talks to another here."""
    models = []
    for rank in range(ep_size):
        topology = Topology(world_size=ep_size, ep_size=ep_size, rank=rank)
        groups = Groups(ep=SoloExchange(), edp=SoloExchange())
        models.append(Transformer(config(shared=6), topology, groups=groups))
        models[-1].init_weights(seed)
    return [dict(model.named_parameters()) for model in models]


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_the_model_is_the_same_for_every_number_of_ranks(ep_size):
    whole = ep_models(1)[0]
    ranks = ep_models(ep_size)
    for name, want in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([rank[name] for rank in ranks]), want), name
        else:
            assert all(torch.equal(rank[name], want) for rank in ranks), name


def test_no_two_weights_start_alike():
    """Experts of one rank, of different ranks, of different layers, and w1 against w3."""
    matrices = []
    for rank in ep_models(2):
        for name, weight in rank.items():
            if ".experts." in name:
                matrices += [w.detach().reshape(-1) for w in weight]
    assert len(matrices) == 2 * 3 * EXPERTS
    first = torch.stack([m[:20] for m in matrices])
    assert len(first.unique(dim=0)) == len(matrices)


def test_weights_do_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    first = make_model().state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in make_model().state_dict().items())


def test_deviations_of_the_weights_are_those_documented():
    wide = Transformer(
        ModelConfig(moe=MoEConfig(router=RouterConfig(d_model=128), expert_hidden=64), num_layers=2)
    )
    wide.init_weights(seed=0)
    weights = dict(wide.named_parameters())
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 0.02,
        "blocks.1.feed_forward.router.gate.weight": 0.02,
        "blocks.0.attention.qkv.weight": 128**-0.5,
        "blocks.0.attention.out.weight": 128**-0.5 / 2,  # scaled by (2 * 2 layers)^-1/2
        "blocks.1.feed_forward.experts.w1": 128**-0.5,
        "blocks.1.feed_forward.experts.w2": 64**-0.5 / 2,
    }
    for name, std in expected.items():
        # the smallest has 1024 values: 1 / sqrt(2 * 1024) = 2.2 %, four times over
        assert float(weights[name].detach().std()) == pytest.approx(std, rel=0.09), name
    assert torch.equal(weights["norm.weight"], torch.ones(128))


def test_attention_scores_depend_on_the_distance_only():
    """RoFormer's property: <R_m q, R_n k> is a function of m - n, and of nothing else."""
    head, length = 8, 40
    q, k = torch.randn(2, head, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_angles(length, head, 100.0, torch.device("cpu"))
    scores = rotate(q.expand(length, -1), cos, sin) @ rotate(k.expand(length, -1), cos, sin).T
    for distance in (-7, 0, 1, 13):
        diagonal = scores.diagonal(distance)
        # float32 angles up to 40: rounding 40 * 2^-24 of values of size 10
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert float(scores[0].std()) > 0.1, "and it does depend on the distance"


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    x = torch.randn(5, 6)
    cos, sin = rotary_angles(5, 6, 10000.0, torch.device("cpu"))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1))
    assert torch.equal(turned[0], x[0])
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_attention_sees_the_order_of_its_tokens():
    torch.manual_seed(0)
    attention = Attention(config())
    x = torch.randn(1, SEQ, WIDTH)
    swapped = x[:, [1, 0, *range(2, SEQ)]]
    assert float((attention(x) - attention(swapped))[:, -1].detach().abs().max()) > 1e-3


def test_different_seeds_give_different_weights():
    first, second = (dict(make_model(seed=seed).named_parameters()) for seed in (1, 2))
    for name, weight in first.items():
        if weight.ndim > 1:
            assert not torch.equal(weight, second[name]), name


def test_the_default_model_is_the_one_it_was():
    """Names, weights and logits, written down before attention got its options: checkpoints stay readable."""
    moe = MoEConfig(
        router=RouterConfig(d_model=16, num_experts=4, top_k=2), expert_hidden=12, shared_hidden=6
    )
    shape = {"vocab_size": 32, "num_layers": 2, "num_dense_layers": 1, "d_model": 16, "num_heads": 2}
    model = Transformer(ModelConfig(moe=moe, dense_hidden=20, seq_len=8, **shape))
    model.init_weights(7)
    state = model.state_dict()
    assert [name for name in state if ".attention." in name] == [
        f"blocks.{n}.attention.{leaf}.weight" for n in (0, 1) for leaf in ("qkv", "out")
    ]
    ends = {
        "blocks.0.attention.qkv.weight": [0.4053735, -0.0710774],
        "blocks.1.attention.out.weight": [-0.0971555, 0.0935778],
        "blocks.1.feed_forward.router.gate.weight": [0.0018556, -0.0096598],
        "blocks.1.feed_forward.experts.w2": [-0.144232, 0.0180061],
        "head.weight": [0.0336812, 0.0154501],
    }
    for name, end in ends.items():
        torch.testing.assert_close(state[name].flatten()[-2:].tolist(), end, rtol=0, atol=1e-6)
    logits = model.eval()(torch.arange(16).view(2, 8))
    want = [0.06346377730369568, -0.01465267688035965, -0.0683741420507431, -0.02608785778284073]
    last = [-0.10463514924049377, -0.10437092185020447, 0.058556634932756424, 0.012322932481765747]
    # the same bits where they were written down; other processors draw and sum with other rounding
    torch.testing.assert_close(logits[0, 0, :4].tolist(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits[1, 7, :4].tolist(), last, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_the_formula_head_by_head(kv_heads, qk_norm):
    """Query head h with key head h // (heads / kv_heads), norms ahead of the rotation, in plain loops."""
    heads, head, length = 4, 6, 5
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head, "qk_norm": qk_norm}
    torch.manual_seed(0)
    moe = MoEConfig(router=RouterConfig(d_model=WIDTH))
    attention = Attention(ModelConfig(d_model=WIDTH, moe=moe, norm_eps=1e-3, **options)).double()
    if qk_norm:
        for norm in (attention.q_norm, attention.k_norm):
            torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    x = torch.randn(1, length, WIDTH, dtype=torch.float64)
    q_rows, k_rows, v_rows = attention.qkv.weight.split([heads * head, kv_heads * head, kv_heads * head])
    cos, sin = rotary_angles(length, head, 10000.0, torch.device("cpu"), torch.float64)

    def project(rows, number, norm):
        y = x[0] @ rows[number * head : (number + 1) * head].T
        if norm is not None:
            y = y / (y.square().mean(1, keepdim=True) + 1e-3).sqrt() * norm.weight
        return y

    outputs = []
    for number in range(heads):
        shared = number // (heads // kv_heads)
        q = rotate(project(q_rows, number, attention.q_norm), cos, sin)
        k = rotate(project(k_rows, shared, attention.k_norm), cos, sin)
        scores = (q @ k.T / head**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(1) @ project(v_rows, shared, None))
    want = torch.cat(outputs, dim=1) @ attention.out.weight.T
    torch.testing.assert_close(attention(x)[0], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"head_dim": 10, "qk_norm": True}], ids=str)
def test_every_parameter_of_attention_gets_a_gradient(options):
    model, tokens = make_model(attention=options), text()
    sum(losses_of(model, tokens)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_the_norms_take_the_eps_of_the_config():
    model = make_model(attention={"norm_eps": 1e-2, "qk_norm": True})
    norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
    assert len(norms) == 3 * 4 + 1 and {norm.eps for norm in norms} == {1e-2}


def test_a_model_without_experts_runs():
    model = make_model(num_dense_layers=3)
    ce_sum, aux_sum = losses_of(model, text())
    assert torch.isfinite(ce_sum) and float(aux_sum) == 0
