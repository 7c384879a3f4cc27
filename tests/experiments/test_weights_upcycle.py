"""Upcycling: the model with experts gives the dense model's output, in every way in which that can be."""

import dataclasses

import pytest
import torch

from experiments.weights_upcycle import dense_twin, upcycle
from moe import ModelConfig, MoEConfig, Topology
from moe.model import Transformer
from moe.testing import run_ranks
from routing import RouterConfig

HIDDEN = 16


def wanted(expert: int = HIDDEN, shared: int = 0, dense_layers: int = 0, **router) -> ModelConfig:
    shape = {"d_model": 12, "num_experts": 4, "top_k": 2}
    moe = MoEConfig(router=RouterConfig(**shape | router), expert_hidden=expert, shared_hidden=shared)
    return ModelConfig(
        moe=moe,
        vocab_size=20,
        num_layers=3,
        num_dense_layers=dense_layers,
        d_model=12,
        num_heads=3,
        dense_hidden=HIDDEN,
        seq_len=9,
        qk_norm=True,
    )


def dense_model(config: ModelConfig) -> Transformer:
    model = Transformer(dense_twin(config))
    model.init_weights(2)
    with torch.no_grad():
        for block in model.blocks:  # feed-forwards that are seen in the logits
            block.feed_forward.w2.weight.mul_(4)
    return model.eval()


def logits(model: Transformer) -> torch.Tensor:
    tokens = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        given = model(tokens)
    assert isinstance(given, torch.Tensor)
    return given


def upcycled(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    model.load_state_dict(upcycle(dense_model(config).state_dict(), config, seed=7), strict=True)
    return model.eval()


WAYS = [
    {},
    {"dense_layers": 1},
    {"top_k": 1},
    {"top_k": 4},
    {"score": "sigmoid"},
    {"scale": 2.5},
    {"expert": 10, "shared": 6},
    {"expert": 10, "shared": 6, "scale": 2.5, "score": "sigmoid"},
    {"shared": HIDDEN},
    {"shared": HIDDEN, "scale": 0.3},
    {"top_k": 4, "normalize": False},  # the softmax over all of them sums to 1
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_first_output_is_the_dense_one(way):
    config = wanted(**way)
    want = logits(dense_model(config))
    # float32 of size 0.3: weights that sum to 1 within rounding, and another order of sums
    torch.testing.assert_close(logits(upcycled(config)), want, rtol=0, atol=1e-6)


def test_the_feed_forwards_matter_to_that_output():
    config = wanted()
    model = upcycled(config)
    with torch.no_grad():
        model.blocks[2].feed_forward.experts.w2[1].mul_(1.1)
    assert float((logits(model) - logits(dense_model(config))).abs().max()) > 1e-4


def test_experts_are_copies_and_routers_are_drawn_as_the_model_draws_them():
    config = wanted(expert=10, shared=6)
    dense, state = dense_model(config).state_dict(), upcycle(dense_model(config).state_dict(), config, seed=7)
    drawn = Transformer(config)
    drawn.init_weights(7)
    for name, value in drawn.state_dict().items():
        if name.endswith("gate.weight"):
            assert torch.equal(state[name], value) and value.any()
        if ".experts." in name:
            assert torch.equal(state[name], state[name][:1].expand_as(value)), name
    w1 = dense["blocks.1.feed_forward.w1.weight"]
    assert torch.equal(state["blocks.1.feed_forward.shared_expert.w1.weight"], w1[:6])
    assert torch.equal(state["blocks.1.feed_forward.experts.w1"][3], w1[6:])
    assert list(state) == list(drawn.state_dict())


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"normalize": False}, r"router\.normalize=false: .* use router\.normalize=true"),
        ({"normalize": False, "top_k": 4, "score": "sigmoid"}, r"router\.normalize=false"),
        ({"expert": 8}, r"moe\.expert_hidden=8 with moe\.shared_hidden=0 .*use moe\.expert_hidden=16"),
        ({"expert": 8, "shared": 6}, r"use moe\.expert_hidden=10, or 16 for both"),
        ({"dense_layers": 3}, r"num_dense_layers=3 leaves no block for experts"),
    ],
    ids=str,
)
def test_where_no_weights_keep_the_output_it_is_refused(way, message):
    config = wanted(**way)
    with pytest.raises(ValueError, match=message):
        upcycle(dense_model(config).state_dict(), config, seed=0)


def test_gelu_experts_are_refused():
    config = wanted()
    gelu = dataclasses.replace(config, moe=dataclasses.replace(config.moe, activation="gelu"))
    with pytest.raises(ValueError, match=r"activation=gelu: the dense feed-forward is swiglu"):
        upcycle(dense_model(config).state_dict(), gelu, seed=0)


def test_a_state_that_is_not_dense_is_refused():
    config = wanted()
    model = Transformer(config)
    with pytest.raises(ValueError, match=r"the dense model: .* missing: blocks\.0\.feed_forward\.w1\.weight"):
        upcycle(model.state_dict(), config, seed=0)


def _difference_on_a_rank(rank: int, world: int) -> list[float]:
    found = []
    for way in WAYS:
        config = wanted(**way)
        state = upcycle(dense_model(config).state_dict(), config, seed=7)
        topology = Topology(world_size=world, ep_size=world, rank=rank)
        model = Transformer(config, topology).eval()
        homes = slice(rank * 4 // world, (rank + 1) * 4 // world)
        model.load_state_dict({k: v[homes] if ".experts." in k else v for k, v in state.items()})
        found.append(float((logits(model) - logits(dense_model(config))).abs().max()))
    return found


@pytest.mark.dist
def test_the_first_output_is_the_dense_one_over_two_ranks():
    for differences in run_ranks(_difference_on_a_rank, 2):
        assert max(differences) < 1e-6, differences
