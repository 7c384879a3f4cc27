"""RouterConfig: every value out of bounds is refused with its name, its value and what would work."""

import dataclasses

import pytest

from routing import RouterConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_model", 0, r"router\.d_model=0 must be at least 1"),
        ("num_experts", 0, r"router\.num_experts=0 must be at least 1"),
        ("top_k", 0, r"router\.top_k=0 must be at least 1"),
        ("top_k", 9, r"router\.top_k=9 is more than router\.num_experts=8.*use top_k <= 8"),
        ("score", "tanh", r"router\.score='tanh' is unknown; use one of softmax, sigmoid"),
        (
            "balance_scope",
            "all",
            r"balance_scope='all' is unknown; use one of local, sequence, global, previous, running",
        ),
        ("balance_loss", -0.1, r"router\.balance_loss=-0\.1 must be 0 or more"),
        ("balance_loss", float("nan"), r"router\.balance_loss=nan must be 0 or more"),
        ("z_loss", -1e-9, r"router\.z_loss=-1e-09 must be 0 or more"),
        ("scale", 0.0, r"router\.scale=0\.0 must be more than 0; 1\.0 leaves"),
        ("scale", float("nan"), r"router\.scale=nan must be more than 0"),
        ("forced", "random", r"router\.forced='random' is unknown; use one of .*uniform, zipf:A"),
        ("forced_seed", 3, r"router\.forced_seed=3 has no effect: nothing is forced; set router\.forced"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{field: value})


def test_the_bounds_themselves_are_allowed():
    config = RouterConfig(d_model=1, num_experts=1, top_k=1, balance_loss=0.0, z_loss=0.0)
    assert config.top_k == config.num_experts == 1


def test_a_forced_seed_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"router\.forced_seed=-1 must be 0 or more"):
        RouterConfig(forced="uniform", forced_seed=-1)
    assert RouterConfig(forced="uniform", forced_seed=2**62).forced_seed == 2**62


def test_every_field_is_documented_and_every_default_is_a_choice():
    for field in dataclasses.fields(RouterConfig):
        assert field.metadata["help"], field.name
        assert field.default in field.metadata.get("choices", (field.default,)), field.name


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RouterConfig().top_k = 3  # type: ignore[misc]
