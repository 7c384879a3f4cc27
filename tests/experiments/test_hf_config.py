"""config.json: published ones read right, every setting goes both ways, and what has no counterpart is
refused."""

import dataclasses

import pytest

from experiments.hf_config import from_transformers, to_transformers
from moe import ModelConfig, MoEConfig
from routing import RouterConfig

# as published with the weights of Mixtral-8x7B-v0.1 and Qwen3-30B-A3B
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 100,
}


def ours(
    layout: str = "mixtral", router: dict | None = None, moe: dict | None = None, **model
) -> ModelConfig:
    """A model that the layout can express, all numbers distinct, but for the changes."""
    shape = {"d_model": 48, "num_experts": 6, "top_k": 3, "balance_loss": 0.013, "z_loss": 0.0}
    settings = MoEConfig(router=RouterConfig(**shape | (router or {})), **{"expert_hidden": 40} | (moe or {}))
    sizes = {"vocab_size": 70, "num_layers": 5, "d_model": 48, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 16, "seq_len": 90, "norm_eps": 1e-4, "rope_base": 777.0, "dtype": "bfloat16"}
    sizes |= {"dense_hidden": 56 if layout == "qwen3_moe" else 40, "qk_norm": layout == "qwen3_moe"}
    return ModelConfig(moe=settings, **sizes | model)


def test_the_published_mixtral_is_read():
    config, remarks = from_transformers(MIXTRAL_8X7B)
    assert (config.d_model, config.num_layers, config.num_dense_layers, config.vocab_size) == (
        4096,
        32,
        0,
        32000,
    )
    assert (config.num_heads, config.kv_heads, config.head_width, config.qk_norm) == (32, 8, 128, False)
    assert (config.norm_eps, config.rope_base, config.seq_len, config.dtype) == (1e-5, 1e6, 32768, "bfloat16")
    router = config.moe.router
    assert (router.num_experts, router.top_k, router.score, router.normalize) == (8, 2, "softmax", True)
    assert config.moe.expert_hidden == 14336
    assert router.balance_loss == pytest.approx(0.02 * 2 / 32)
    assert any("router.balance_loss=0.00125" in remark for remark in remarks)


def test_the_published_qwen3_is_read():
    config, _ = from_transformers(QWEN3_30B)
    assert (config.num_heads, config.kv_heads, config.head_width, config.qk_norm) == (32, 4, 128, True)
    assert config.moe.expert_hidden == 768
    assert (config.moe.router.num_experts, config.moe.router.top_k) == (128, 8)
    assert config.moe.router.normalize
    assert not from_transformers(QWEN3_30B | {"norm_topk_prob": False})[0].moe.router.normalize


def test_the_new_spelling_of_the_positions_is_read():
    fields = {name: value for name, value in QWEN3_30B.items() if name != "rope_theta"}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert from_transformers(fields)[0].rope_base == 5e5


def test_what_is_left_out_has_the_values_of_transformers():
    config, remarks = from_transformers(LLAMA)
    assert (config.kv_heads, config.head_width, config.rope_base, config.norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (config.num_dense_layers, config.dense_hidden, config.dtype) == (2, 96, "float32")
    assert remarks == []


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"num_dense_layers": 2}),
        ("qwen3_moe", {"router": {"normalize": False}}),
    ],
    ids=str,
)
def test_our_settings_survive_the_way_there_and_back(layout, changes):
    config = ours(layout, **changes)
    back, _ = from_transformers(to_transformers(config, layout))
    assert back == config


def test_a_window_shorter_than_the_positions_shortens_the_sequence():
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
    config, (remark,) = from_transformers(mistral | {"sliding_window": 60})
    assert config.seq_len == 60
    assert "sliding_window of 60" in remark
    config, remarks = from_transformers(mistral | {"sliding_window": 128})
    assert config.seq_len == 128 and not remarks
    config, _ = from_transformers(QWEN3_30B | {"sliding_window": 60})  # which is off: use_sliding_window
    assert config.seq_len == 40960


def test_a_tied_head_and_half_precision_are_told():
    config, remarks = from_transformers(LLAMA | {"tie_word_embeddings": True, "dtype": "float16"})
    assert config.dtype == "float32"
    assert [remark.split()[0] for remark in remarks] == ["float16", "the"]


def test_leading_dense_blocks_are_ours_and_others_are_refused():
    assert from_transformers(QWEN3_30B | {"mlp_only_layers": [1, 0]})[0].num_dense_layers == 2
    with pytest.raises(ValueError, match=r"blocks \[3\] are dense .*only leading blocks"):
        from_transformers(QWEN3_30B | {"mlp_only_layers": [3]})
    with pytest.raises(ValueError, match=r"decoder_sparse_step=2"):
        from_transformers(QWEN3_30B | {"decoder_sparse_step": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, r"model_type='deepseek_v3' is not supported; use one of mixtral"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu', which our model does not have; only 'silu' works"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ({"router_jitter_noise": 0.01}, r"router_jitter_noise=0\.01"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, r"rope_parameters=.*yarn"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types has others than full_attention"),
        ({"n_shared_experts": 1}, r"unknown field n_shared_experts=1"),
        ({"hidden_size": None}, r"hidden_size=None must be an integer"),
        ({"num_experts": 9}, r"num_local_experts and num_experts give \[8, 9\]"),
    ],
)
def test_what_our_model_cannot_express_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        from_transformers(MIXTRAL_8X7B | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": {}}, r"model_type=\{\} is not supported"),
        ({"num_key_value_heads": "2"}, r"num_key_value_heads='2' must be an integer of at least 1"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0 must be an integer of at least 1"),
        ({"head_dim": "8"}, r"head_dim='8' must be an integer"),
        ({"head_dim": 8.0}, r"head_dim=8\.0 must be an integer"),
        ({"head_dim": True}, r"head_dim=True must be an integer"),
        ({"rms_norm_eps": None}, r"rms_norm_eps=None must be a finite number of at least 0"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan must be a finite number"),
        ({"rope_theta": None}, r"rope_theta=None must be a finite number"),
        ({"rope_theta": "x"}, r"rope_theta='x' must be a finite number"),
        ({"rope_theta": 10**400}, r"rope_theta=10+ must be a finite number"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"rope_parameters": []}, r"rope_parameters=\[\] must be an object"),
        ({"rope_parameters": {"rope_theta": None}}, r"rope_theta=None must be a finite number"),
        ({"router_aux_loss_coef": None}, r"router_aux_loss_coef=None must be a finite number"),
        ({"router_aux_loss_coef": -1}, r"router_aux_loss_coef=-1 must be a finite number of at least 0"),
        ({"mlp_only_layers": 3}, r"mlp_only_layers=3 must be a list in which each is of type int"),
        ({"mlp_only_layers": [[1]]}, r"mlp_only_layers=\[\[1\]\] must be a list"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step=0 must be an integer of at least 1"),
        ({"decoder_sparse_step": "1"}, r"decoder_sparse_step='1' must be an integer"),
        ({"decoder_sparse_step": None}, r"decoder_sparse_step=None must be an integer"),
        ({"num_experts": "4"}, r"num_experts='4' must be an integer"),
        ({"num_experts": [4]}, r"num_experts=\[4\] must be an integer"),
        ({"num_experts": 4.5}, r"num_experts=4\.5 must be an integer"),
        ({"num_experts": 10**9}, r"num_experts=1000000000 must be at most 4096"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000 must be at most 1000"),
        ({"num_attention_heads": 10**9}, r"num_attention_heads=1000000000 must be at most 4096"),
        ({"hidden_size": 10**30}, r"hidden_size=10+ must be at most 2147483647"),
        ({"layer_types": 5}, r"layer_types=5 must be a list in which each is of type str"),
        ({"sliding_window": "a", "use_sliding_window": True}, r"sliding_window='a' must be an integer"),
        ({"use_sliding_window": "false"}, r"use_sliding_window='false' must be true or false"),
        ({"norm_topk_prob": "false"}, r"norm_topk_prob='false' must be true or false"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings='false' must be true or false"),
        ({"torch_dtype": ["bfloat16"]}, r"torch_dtype=\['bfloat16'\] must be one of float16, float32"),
        ({"first_k_dense": 0}, r"unknown field first_k_dense=0"),
        ({"router_bias": 0.0}, r"unknown field router_bias=0\.0"),
    ],
    ids=lambda value: f"{value}"[:40] if isinstance(value, dict) else "",
)
def test_a_value_of_another_type_or_size_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        from_transformers(QWEN3_30B | changes)


@pytest.mark.parametrize("fields", [[], None, "mixtral", 3])
def test_a_file_that_is_no_object_is_refused(fields):
    with pytest.raises(ValueError, match=r"config\.json holds .*; it must be an object of fields"):
        from_transformers(fields)


@pytest.mark.parametrize(
    ("base", "name", "read"),
    [
        (MIXTRAL_8X7B, "num_key_value_heads", lambda config: config.kv_heads == 32),
        (MIXTRAL_8X7B, "head_dim", lambda config: config.head_width == 128),
        (LLAMA, "num_key_value_heads", lambda config: config.kv_heads == 4),
        (LLAMA, "head_dim", lambda config: config.head_width == 16),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 2},
            "sliding_window",
            lambda c: c.seq_len == 128,
        ),
        (QWEN3_30B | {"use_sliding_window": True}, "sliding_window", lambda config: config.seq_len == 40960),
        (QWEN3_30B, "mlp_only_layers", lambda config: config.num_dense_layers == 0),
        (QWEN3_30B, "layer_types", lambda config: config.num_layers == 48),
        (QWEN3_30B, "rope_parameters", lambda config: config.rope_base == 1e6),
        (QWEN3_30B, "num_local_experts", lambda config: config.moe.router.num_experts == 128),
        (QWEN3_30B, "torch_dtype", lambda config: config.dtype == "float32"),
        (QWEN3_30B, "some_field_of_tomorrow", lambda config: True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_null_stands_for_the_default_where_transformers_takes_it_so(base, name, read):
    assert read(from_transformers(base | {name: None})[0])


def test_a_window_that_is_on_but_left_out_has_the_size_of_transformers():
    fields = {name: value for name, value in QWEN3_30B.items() if name != "sliding_window"}
    assert from_transformers(fields | {"use_sliding_window": True})[0].seq_len == 4096


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("mixtral", {"router": {"score": "sigmoid"}}, r"router\.score=sigmoid: .*softmax"),
        ("mixtral", {"router": {"scale": 2.5}}, r"router\.scale=2\.5"),
        ("mixtral", {"router": {"forced": "uniform"}}, r"router\.forced='uniform'"),
        ("mixtral", {"router": {"normalize": False}}, r"normalize=false: .*--format qwen3_moe"),
        ("mixtral", {"moe": {"shared_hidden": 8}}, r"moe\.shared_hidden=8"),
        ("mixtral", {"moe": {"activation": "gelu"}}, r"moe\.activation=gelu"),
        ("mixtral", {"num_dense_layers": 1}, r"num_dense_layers=1: every block has experts"),
        ("mixtral", {"num_dense_layers": 5}, r"has no experts .*upcycle"),
        ("mixtral", {"qk_norm": True}, r"qk_norm=true: .*qwen3_moe"),
        ("qwen3_moe", {"qk_norm": False}, r"qk_norm=false: .*mixtral"),
        ("deepseek", {}, r"--format 'deepseek' is unknown; use one of mixtral, qwen3_moe"),
    ],
)
def test_what_transformers_cannot_express_is_refused(layout, changes, message):
    with pytest.raises(ValueError, match=message):
        to_transformers(ours(layout, **changes), layout)


def test_all_reasons_are_told_at_once():
    config = ours(router={"score": "sigmoid", "scale": 2.0}, moe={"shared_hidden": 8})
    with pytest.raises(ValueError) as caught:
        to_transformers(config, "mixtral")
    assert str(caught.value).count(";") == 2


def test_no_setting_of_the_model_is_forgotten():
    """A field added to the model must be looked at here: it is expressed, or refused, or has no part."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    assert known == {
        *("moe", "vocab_size", "num_layers", "num_dense_layers", "d_model", "num_heads", "num_kv_heads"),
        *("head_dim", "qk_norm", "norm_eps", "dense_hidden", "seq_len", "rope_base", "dtype"),
    }
