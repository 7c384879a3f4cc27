"""MoEConfig and ModelConfig: every value out of bounds is refused with what would work."""

import dataclasses

import pytest

from moe import ModelConfig, MoEConfig
from routing import RouterConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_hidden": 0}, r"moe\.expert_hidden=0 must be at least 1"),
        ({"shared_hidden": -1}, r"moe\.shared_hidden=-1 must be 0 \(no shared expert\) or more"),
    ],
)
def test_expert_shapes_out_of_bounds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, rf"model\.{name}=0 must be at least 1")
            for name in ("vocab_size", "num_layers", "d_model", "num_heads", "dense_hidden", "seq_len")
        ),
        ({"num_dense_layers": -1}, r"model\.num_dense_layers=-1 is out of 0\.\.4.*model\.num_layers=4"),
        ({"num_dense_layers": 5}, r"model\.num_dense_layers=5 is out of 0\.\.4.*model\.num_layers=4"),
        (
            {"num_kv_heads": 3},
            r"model\.num_kv_heads=3 does not divide .*num_heads=4; use one of 1, 2, 4, or 0",
        ),
        ({"num_kv_heads": 8}, r"model\.num_kv_heads=8 does not divide"),
        ({"num_kv_heads": -2}, r"model\.num_kv_heads=-2 does not divide"),
        ({"head_dim": 7}, r"model\.head_dim=7 must be even"),
        ({"head_dim": -2}, r"model\.head_dim=-2 must be even.* 0 for d_model / num_heads"),
        ({"norm_eps": 0.0}, r"model\.norm_eps=0\.0 must be above 0 and below 1; 1e-6"),
        ({"norm_eps": float("nan")}, r"model\.norm_eps=nan must be above 0"),
        (
            {"d_model": 100},
            r"model\.d_model=100 is not an even multiple of model\.num_heads=4.*use 96 or 104",
        ),
        ({"d_model": 6}, r"model\.d_model=6 is not .*use 8 or 16"),
        ({"dtype": "float16"}, r"model\.dtype='float16' is unknown; use one of float32, bfloat16"),
        ({"d_model": 64}, r"moe\.router\.d_model=128 differs from model\.d_model=64"),
    ],
)
def test_model_shapes_out_of_bounds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize("width", [96, 104])
def test_the_widths_that_the_message_names_do_work(width):
    moe = MoEConfig(router=RouterConfig(d_model=width))
    assert ModelConfig(d_model=width, moe=moe).d_model == width


def test_all_layers_may_be_dense():
    """Such a model is what experts are made from; to train one is refused where training starts."""
    assert ModelConfig(num_dense_layers=4).num_dense_layers == 4


def test_zero_stands_for_as_many_heads_and_for_the_width_they_leave():
    config = ModelConfig()
    assert (config.kv_heads, config.head_width) == (4, 32)
    grouped = ModelConfig(num_kv_heads=2, head_dim=48)
    assert (grouped.kv_heads, grouped.head_width) == (2, 48)


def test_a_head_width_frees_the_model_width_from_the_number_of_heads():
    moe = MoEConfig(router=RouterConfig(d_model=100))
    assert ModelConfig(d_model=100, head_dim=16, moe=moe).head_width == 16


@pytest.mark.parametrize("config", [MoEConfig, ModelConfig])
def test_every_field_of_its_own_is_documented(config):
    for field in dataclasses.fields(config):
        if field.name not in ("router", "moe"):  # those are tables of their own
            assert field.metadata["help"], field.name
            assert field.default in field.metadata.get("choices", (field.default,)), field.name
