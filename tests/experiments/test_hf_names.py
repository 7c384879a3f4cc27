"""Names of transformers' files: written out for both architectures, and the way there and back to the bit."""

import dataclasses

import pytest
import torch

from experiments.hf_names import entries, our_state, their_state
from moe import ModelConfig, MoEConfig
from moe.model import Transformer
from routing import RouterConfig

# all distinct, so that a transposed axis cannot pass; heads of 10 are not d_model / num_heads
WIDTH, HIDDEN, DENSE, VOCAB = 12, 14, 18, 22
Q, KV, HEAD = 30, 10, 10

MOE = MoEConfig(router=RouterConfig(d_model=WIDTH, num_experts=2, top_k=1), expert_hidden=HIDDEN)
MIXTRAL = ModelConfig(
    moe=MOE,
    vocab_size=VOCAB,
    num_layers=1,
    d_model=WIDTH,
    num_heads=3,
    num_kv_heads=1,
    head_dim=HEAD,
    dense_hidden=DENSE,
    seq_len=8,
)
QWEN3 = dataclasses.replace(MIXTRAL, num_layers=2, num_dense_layers=1, qk_norm=True)
CASES = [("mixtral", MIXTRAL), ("qwen3_moe", QWEN3)]

MIXTRAL_NAMES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH),
    "model.layers.0.input_layernorm.weight": (WIDTH,),
    "model.layers.0.self_attn.q_proj.weight": (Q, WIDTH),
    "model.layers.0.self_attn.k_proj.weight": (KV, WIDTH),
    "model.layers.0.self_attn.v_proj.weight": (KV, WIDTH),
    "model.layers.0.self_attn.o_proj.weight": (WIDTH, Q),
    "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
    "model.layers.0.block_sparse_moe.gate.weight": (2, WIDTH),
    "model.layers.0.block_sparse_moe.experts.0.w1.weight": (HIDDEN, WIDTH),
    "model.layers.0.block_sparse_moe.experts.0.w2.weight": (WIDTH, HIDDEN),
    "model.layers.0.block_sparse_moe.experts.0.w3.weight": (HIDDEN, WIDTH),
    "model.layers.0.block_sparse_moe.experts.1.w1.weight": (HIDDEN, WIDTH),
    "model.layers.0.block_sparse_moe.experts.1.w2.weight": (WIDTH, HIDDEN),
    "model.layers.0.block_sparse_moe.experts.1.w3.weight": (HIDDEN, WIDTH),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (VOCAB, WIDTH),
}


def qwen3_attention(layer: int) -> dict[str, tuple[int, ...]]:
    names = {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (Q, WIDTH),
        "self_attn.k_proj": (KV, WIDTH),
        "self_attn.v_proj": (KV, WIDTH),
        "self_attn.o_proj": (WIDTH, Q),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "post_attention_layernorm": (WIDTH,),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}


QWEN3_NAMES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH),
    **qwen3_attention(0),
    "model.layers.0.mlp.gate_proj.weight": (DENSE, WIDTH),
    "model.layers.0.mlp.up_proj.weight": (DENSE, WIDTH),
    "model.layers.0.mlp.down_proj.weight": (WIDTH, DENSE),
    **qwen3_attention(1),
    "model.layers.1.mlp.gate.weight": (2, WIDTH),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (HIDDEN, WIDTH),
    "model.layers.1.mlp.experts.0.up_proj.weight": (HIDDEN, WIDTH),
    "model.layers.1.mlp.experts.0.down_proj.weight": (WIDTH, HIDDEN),
    "model.layers.1.mlp.experts.1.gate_proj.weight": (HIDDEN, WIDTH),
    "model.layers.1.mlp.experts.1.up_proj.weight": (HIDDEN, WIDTH),
    "model.layers.1.mlp.experts.1.down_proj.weight": (WIDTH, HIDDEN),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (VOCAB, WIDTH),
}


def state_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    model.init_weights(1)
    return model.state_dict()


@pytest.mark.parametrize(
    ("layout", "config", "names"), [(*CASES[0], MIXTRAL_NAMES), (*CASES[1], QWEN3_NAMES)], ids=["m", "q"]
)
def test_names_and_shapes_are_those_of_the_files(layout, config, names):
    theirs = their_state(state_of(config), config, layout)
    assert {name: tuple(value.shape) for name, value in theirs.items()} == names


@pytest.mark.parametrize(("layout", "config"), CASES, ids=["mixtral", "qwen3"])
def test_there_and_back_is_the_same_to_the_bit_and_in_the_same_order(layout, config):
    ours = state_of(config)
    back = our_state(their_state(ours, config, layout), config, layout)
    assert list(back) == list(ours)
    for name, value in ours.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name], value), name


def test_entries_are_the_state_dict_of_the_model():
    for config in (MIXTRAL, QWEN3, dataclasses.replace(QWEN3, num_dense_layers=2)):
        listed = {entry.name: (entry.shape, entry.dtype) for entry in entries(config, "qwen3_moe")}
        for name, value in state_of(config).items():
            shape, dtype = listed.pop(name)
            assert shape == tuple(value.shape), name
            assert dtype == value.dtype, name
        assert not listed


def test_parts_go_where_their_names_say():
    """Every tensor of the file filled with a number of its own; then ours are read element by element."""
    theirs = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(QWEN3_NAMES.items())}
    number = {name: n for n, name in enumerate(QWEN3_NAMES)}
    ours = our_state(theirs, QWEN3, "qwen3_moe")
    qkv, attention = ours["blocks.1.attention.qkv.weight"], "model.layers.1.self_attn"
    assert qkv[:, 0].tolist() == (
        [number[f"{attention}.q_proj.weight"]] * Q
        + [number[f"{attention}.k_proj.weight"]] * KV
        + [number[f"{attention}.v_proj.weight"]] * KV
    )
    for leaf, projection in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
        experts = ours[f"blocks.1.feed_forward.experts.{leaf}"]
        wanted = [number[f"model.layers.1.mlp.experts.{e}.{projection}.weight"] for e in (0, 1)]
        assert experts[:, 0, 0].tolist() == wanted
        dense = ours[f"blocks.0.feed_forward.{leaf}.weight"]
        assert float(dense[0, 0]) == number[f"model.layers.0.mlp.{projection}.weight"]
    assert (
        float(ours["blocks.0.norm_2.weight"][0]) == number["model.layers.0.post_attention_layernorm.weight"]
    )
    assert not ours["blocks.1.feed_forward.router.bias.bias_E"].any()


def test_everything_that_does_not_fit_is_in_one_error():
    theirs = their_state(state_of(MIXTRAL), MIXTRAL, "mixtral")
    theirs["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(Q)
    theirs["lm_head.weight"] = torch.zeros(VOCAB + 1, WIDTH)
    del theirs["model.norm.weight"]
    with pytest.raises(ValueError) as caught:
        our_state(theirs, MIXTRAL, "mixtral")
    assert str(caught.value) == (
        "mixtral: the tensors do not fit the configuration: 1 missing: model.norm.weight [12]; "
        "1 unknown: model.layers.0.self_attn.q_proj.bias; "
        "1 of another shape: lm_head.weight is [23, 12], expected [22, 12]"
    )


def test_many_wrong_names_are_counted_and_some_are_shown():
    with pytest.raises(ValueError, match=r"16 missing: .* and 8 more"):
        our_state({}, MIXTRAL, "mixtral")


def test_experts_fused_as_in_memory_are_told_from_other_strangers():
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"fused as in memory.*save_pretrained"):
        our_state(fused, MIXTRAL, "mixtral")


def test_a_tensor_of_ours_with_no_place_there_is_named():
    moe = dataclasses.replace(MOE, shared_hidden=4)
    state = state_of(dataclasses.replace(MIXTRAL, moe=moe))
    with pytest.raises(ValueError, match=r"3 unknown: blocks\.0\.feed_forward\.shared_expert\.w1\.weight"):
        their_state(state, MIXTRAL, "mixtral")
