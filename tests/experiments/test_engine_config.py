"""DeepSpeed's JSON with experts: what is filled in for offloading, and refusals that name the file."""

import pytest

from experiments.config import CONFIGS, load_config
from experiments.engine_config import load_deepspeed_config, merge_deepspeed

PACKAGED = sorted(path.name for path in CONFIGS.glob("*.json"))
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture
def merged(tmp_path):
    """Merges settings with the defaults and overrides, for some ranks."""
    toml = tmp_path / "run.toml"
    toml.write_text("")

    def merge(given: dict, *overrides: str, world: int = 4) -> dict:
        return merge_deepspeed(given, load_config(toml, overrides), world, json_name="ds.json")

    return merge


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_json_goes_with_experts(merged, name, dtype):
    result = merged(load_deepspeed_config(name), f"model.dtype={dtype}", "train.ep_size=2")
    assert result["zero_optimization"]["stage"] == int(name[4])
    assert result.get("zero_force_ds_cpu_optimizer") == (False if "offload" in name else None)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_reads_the_packaged_offload(merged, stage):
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = merged(load_deepspeed_config(f"zero{stage}_offload.json"), world=1)
    parsed = DeepSpeedConfig(settings)
    assert parsed.zero_optimization_stage == stage
    offload = parsed.zero_config.offload_optimizer
    assert offload is not None
    assert offload.device == "cpu"
    assert parsed.zero_force_ds_cpu_optimizer is False


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({"zero_optimization": OFFLOAD}, False),
        ({"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": "auto"}, False),
        ({"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False}, False),
        ({"zero_optimization": OFFLOAD, "optimizer": {"type": "RMSprop"}}, False),
        # DeepSpeed's own optimizer is meant: it is compiled, and there is nothing to force
        ({"zero_optimization": OFFLOAD, "optimizer": {"type": "AdamW"}}, None),
        ({"zero_optimization": OFFLOAD, "optimizer": {"type": "Lion"}}, None),
        ({"zero_optimization": {"stage": 2}}, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}}, None),
        ({}, None),
    ],
)
def test_torchs_optimizer_is_named_where_its_state_is_offloaded(merged, given, filled):
    result = merged({**given, "zero_allow_untested_optimizer": True})
    assert result.get("zero_force_ds_cpu_optimizer") == filled


def test_forcing_deepspeeds_optimizer_and_naming_torchs_is_an_error(merged):
    given = {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": True}
    with pytest.raises(ValueError, match=r"ds.json: zero_force_ds_cpu_optimizer = true .* take .* out"):
        merged(given)
    own = {"optimizer": {"type": "AdamW", "params": {}}, **given}
    assert merged(own)["zero_force_ds_cpu_optimizer"] is True


def test_an_optimizer_without_a_type_is_torchs_adamw(merged):
    optimizer = merged({"optimizer": {"params": {"eps": 1e-6}}})["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert optimizer["params"]["torch_adam"] is True
    assert optimizer["params"]["eps"] == 1e-6


def test_every_refusal_names_the_json(merged):
    zero = {"stage": 2, "reduce_scatter": False, "zenflow": {}}
    with pytest.raises(ValueError) as caught:
        merged({"zero_optimization": zero})
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("ds.json: zero_optimization.reduce_scatter = false at ZeRO stage 2: ")
    assert lines[1].startswith("ds.json: zero_optimization.zenflow = {} at ZeRO stage 2: ")


def test_refusals_know_the_ranks_of_a_set_of_experts_and_the_type(merged):
    given = {"use_data_before_expert_parallelism": True}
    merged(given)  # all ranks share one set
    with pytest.raises(ValueError, match="use_data_before_expert_parallelism"):
        merged(given, "train.ep_size=2")
    sums = {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    merged(sums)
    with pytest.raises(ValueError, match="grad_accum_dtype"):
        merged(sums, "model.dtype=bfloat16")
