"""The same logits as transformers, both ways: weights that it saves and we read, and that we write and it
reads."""

import json
from pathlib import Path

import pytest
import torch

from experiments.weights import load_initial, read_model
from experiments.weights_command import main
from moe.model import Transformer

transformers = pytest.importorskip("transformers", reason="compares with transformers' own models")

TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-3,  # large enough to be seen
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 10}
KINDS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe, weights not normalised": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen3": ("Qwen3", {"head_dim": 10}),
}
# float32 logits of size 3 to 10 over three blocks; seen: below 4e-6
TOLERANCE = 1e-5


def theirs(kind: str):
    """A model of transformers with weights large enough that every part of it shows in the logits."""
    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**TINY, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1]
            parameter.copy_(1 + 0.3 * drawn if parameter.ndim == 1 else drawn * 1.2 * fan_in**-0.5)
    return model


def logits(model, length: int = 12) -> torch.Tensor:
    tokens = torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        given = model(tokens)
    return given if isinstance(given, torch.Tensor) else given.logits


def ours(folder: Path) -> Transformer:
    model = Transformer(read_model(folder / "config.toml"))
    load_initial(model, folder)
    return model.eval()


@pytest.fixture(params=KINDS)
def imported(request, tmp_path):
    """(kind, transformers' model, the folder that we made of what it saved)."""
    model = theirs(request.param)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    return request.param, model, tmp_path / "ours"


def test_what_transformers_saves_gives_its_logits(imported):
    _, model, folder = imported
    want = logits(model)
    assert float(want.std()) > 0.5, "the weights are large enough to tell"
    torch.testing.assert_close(logits(ours(folder)), want, rtol=0, atol=TOLERANCE)


def test_what_we_write_gives_our_logits_in_transformers(imported, tmp_path):
    kind, _, folder = imported
    layout = kind.split(",")[0]
    if layout not in ("mixtral", "qwen3_moe"):  # a dense model: what is made of it is written
        config = read_model(folder / "config.toml")
        layout = "qwen3_moe" if config.qk_norm else "mixtral"
        settings = [f"router.num_experts={4}", "router.top_k=2"]
        arguments = [part for setting in settings for part in ("--set", setting)]
        assert main(["upcycle", str(folder), str(tmp_path / "moe"), *arguments]) == 0
        folder = tmp_path / "moe"
    assert main(["export", str(folder), str(tmp_path / "back"), "--format", layout, "--shard-mb", "1"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), logits(ours(folder)), rtol=0, atol=TOLERANCE)


def test_an_upcycled_model_gives_the_logits_of_the_dense_one(imported, tmp_path):
    kind, model, folder = imported
    if kind in ("llama", "mistral", "qwen3"):
        sizes = [
            "--set",
            "router.num_experts=8",
            "--set",
            "moe.shared_hidden=16",
            "--set",
            "router.scale=2.5",
        ]
        assert main(["upcycle", str(tmp_path / "theirs"), str(tmp_path / "moe"), *sizes]) == 0
        torch.testing.assert_close(logits(ours(tmp_path / "moe")), logits(model), rtol=0, atol=TOLERANCE)
    else:
        with pytest.raises(ValueError, match="has experts already"):
            main(["upcycle", str(folder), str(tmp_path / "moe")])


def test_bfloat16_weights_come_back_to_the_bit(tmp_path):
    model = theirs("mixtral").bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--format", "mixtral"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    state = back.state_dict()
    for name, value in model.state_dict().items():
        assert state[name].dtype == torch.bfloat16 and torch.equal(state[name], value), name
