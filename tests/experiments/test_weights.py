"""Files of weights and the way into a model: read by slices, every mistake named, pickles never read."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.hf_names import their_state
from experiments.weights import check_meaning, load_initial, open_source, read_model, to_toml_text
from experiments.weights_files import INDEX, WEIGHTS, Planned, open_tensors, write_shards
from moe import Groups, ModelConfig, MoEConfig, SoloExchange, Topology
from moe.model import Transformer
from routing import RouterConfig

EXPERTS = 4
CONFIG = ModelConfig(
    moe=MoEConfig(router=RouterConfig(d_model=12, num_experts=EXPERTS), expert_hidden=14, shared_hidden=6),
    vocab_size=256,
    num_layers=3,
    num_dense_layers=1,
    d_model=12,
    num_heads=3,
    dense_hidden=10,
    seq_len=9,
)


def make_model(seed: int, config: ModelConfig = CONFIG, **topology: int) -> Transformer:
    groups = Groups(ep=SoloExchange(), edp=SoloExchange())
    model = Transformer(config, Topology(**topology), groups=groups)
    model.init_weights(seed)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Our folder with the weights of seed 5, a bias among them."""
    model = make_model(5)
    model.blocks[1].feed_forward.router.bias.set(torch.arange(EXPERTS) / 8)
    save_file(model.state_dict(), tmp_path / WEIGHTS)
    (tmp_path / "config.toml").write_text(to_toml_text(CONFIG))
    return tmp_path


def replace(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    state = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        state.pop(name, None)
        if value is not None:
            state[name] = value
    save_file(state, folder / WEIGHTS)


# ---- into a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_every_rank_gets_its_own_experts_and_all_of_the_rest(folder, ep_size):
    whole = load_file(folder / WEIGHTS)
    for rank in range(ep_size):
        model = make_model(9, world_size=ep_size, ep_size=ep_size, rank=rank)
        load_initial(model, folder)
        local = EXPERTS // ep_size
        for name, value in model.state_dict().items():
            want = whole[name]
            if ".experts." in name:
                want = want[rank * local : (rank + 1) * local]
            assert torch.equal(value, want), name
    assert whole["blocks.1.feed_forward.router.bias.bias_E"].any()


def test_the_file_itself_will_do_and_types_are_converted(folder):
    model = make_model(9).bfloat16()
    load_initial(model, folder / WEIGHTS)
    want = load_file(folder / WEIGHTS)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name].to(value.dtype)), name


def test_nothing_is_changed_where_something_does_not_fit(folder):
    gate = "blocks.1.feed_forward.router.gate.weight"
    replace(folder, {"norm.weight": None, gate: torch.zeros(3, 12), "extra": torch.zeros(1)})
    model = make_model(9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_initial(model, folder)
    for part in (
        "1 missing: norm.weight [12]",
        "1 unknown: extra",
        f"1 of another shape: {gate} is [3, 12], expected [4, 12]",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_means_something_else_is_refused_though_the_shapes_fit(folder):
    router = dataclasses.replace(CONFIG.moe.router, score="sigmoid")
    moe = dataclasses.replace(CONFIG.moe, router=router)
    model = make_model(9, dataclasses.replace(CONFIG, num_heads=6, rope_base=5.0, moe=moe))
    with pytest.raises(ValueError) as caught:
        load_initial(model, folder)
    told = str(caught.value)
    assert "model.num_heads is 3 there and 6 here" in told
    assert "model.rope_base is 10000.0 there and 5.0 here" in told
    assert "router.score is 'softmax' there and 'sigmoid' here" in told


@pytest.fixture
def run(folder: Path) -> Path:
    """A run with one checkpoint, of the weights of `folder`; config.toml is the run's alone."""
    weights = folder / "run" / "checkpoints" / "step-00000005" / WEIGHTS
    weights.parent.mkdir(parents=True)
    (folder / WEIGHTS).rename(weights)
    (folder / "config.toml").rename(folder / "run" / "config.toml")
    return folder / "run"


@pytest.mark.parametrize("given", ["run/checkpoints/step-00000005/model.safetensors", "link", "here"])
def test_weights_of_a_checkpoint_mean_what_their_run_says(run, given, monkeypatch, capsys):
    step = run / "checkpoints" / "step-00000005"
    (run.parent / "link").symlink_to(step)
    monkeypatch.chdir(step if given == "here" else run.parent)
    path = Path(WEIGHTS if given == "here" else given)
    router = dataclasses.replace(CONFIG.moe.router, score="sigmoid")
    moe = dataclasses.replace(CONFIG.moe, router=router)
    other = make_model(9, dataclasses.replace(CONFIG, num_heads=6, rope_base=5.0, moe=moe))
    with pytest.raises(ValueError) as caught:
        load_initial(other, path)
    for name in ("model.num_heads", "model.rope_base", "router.score"):
        assert f"{name} is " in str(caught.value)
    assert str(run / "config.toml") in str(caught.value)
    load_initial(make_model(9), path)
    assert capsys.readouterr().out == ""


def test_it_is_said_once_where_nothing_tells_what_weights_mean(folder, capsys):
    (folder / "config.toml").unlink()
    load_initial(make_model(9), folder / WEIGHTS)
    told = capsys.readouterr().out
    assert told.count("no config.toml tells what these weights mean") == 1
    assert "rope_base" in told and "router.score" in told
    load_initial(make_model(9, world_size=2, ep_size=2, rank=1), folder / WEIGHTS)
    assert capsys.readouterr().out == ""


def test_another_top_k_and_length_are_not_another_meaning():
    router = dataclasses.replace(CONFIG.moe.router, top_k=1)
    moe = dataclasses.replace(CONFIG.moe, router=router)
    check_meaning(CONFIG, dataclasses.replace(CONFIG, seq_len=4, moe=moe), Path("x"))


def test_values_that_are_not_finite_are_named(folder):
    replace(folder, {"norm.weight": torch.full((12,), torch.nan)})
    with pytest.raises(ValueError, match=r"norm\.weight has values that are NaN or infinite"):
        load_initial(make_model(9), folder)


# ---- files ----------------------------------------------------------------------------------------------


def test_a_pickle_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ValueError, match=r"save_pretrained\("), open_tensors(path):
            pass


def test_a_truncated_file_is_named(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole file"):
        load_initial(make_model(9), folder)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none: no such file or folder"), open_tensors(tmp_path / "none"):
        pass


def test_quantized_types_are_refused(tmp_path):
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"w has type I8 \(quantized\?\)"), open_tensors(tmp_path):
        pass


def planned(state: dict[str, torch.Tensor]) -> list[Planned]:
    return [
        Planned(name=name, shape=tuple(value.shape), dtype=value.dtype, make=lambda value=value: value)
        for name, value in state.items()
    ]


@pytest.mark.parametrize("shard_bytes", [1, 60, 10_000])
def test_what_is_written_reads_back_whatever_the_shards(tmp_path, shard_bytes):
    """Odd sizes and mixed types: data of each must stay aligned. Also by safetensors' own reader."""
    state = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(3),
        "d": torch.randn(1, dtype=torch.float64),
    }
    seen: list[tuple[str, int]] = []
    files = write_shards(tmp_path, planned(state), shard_bytes, lambda *one: seen.append(one))
    assert files == {1: 4, 60: 2, 10_000: 1}[shard_bytes]
    assert sorted(seen) == [("a", 60), ("b", 14), ("c", 24), ("d", 8)]
    with open_tensors(tmp_path) as tensors:
        assert tensors.num_bytes == 106
        for name, value in state.items():
            assert torch.equal(tensors.read(name), value)
            assert torch.equal(tensors.rows(name, 0, 1), value[:1])
    read = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    assert all(torch.equal(read[name], value) for name, value in state.items())
    assert (tmp_path / INDEX).exists() == (files > 1)


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"w has values that are NaN or infinite"):
        write_shards(tmp_path, planned({"w": torch.tensor([1.0, torch.inf])}), 100, lambda *_: None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, r"not a plain file name"),
        ({"weight_map": {"a": "x.safetensors"}}, r"x\.safetensors is no whole file"),
        ({"weight_map": {"a": "y.safetensors", "b": "y.safetensors"}}, r"do not agree on \['b'\]"),
        ({"weights": {}}, r"is no index of shards"),
        ([], r"is no index of shards"),
    ],
)
def test_an_index_that_lies_is_found_out(tmp_path, index, message):
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message), open_tensors(tmp_path):
        pass


# ---- transformers' folders, without transformers --------------------------------------------------------

THEIRS = {
    "model_type": "mixtral",
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 9,
    "vocab_size": 30,
}


def theirs(folder: Path, changes: dict[str, object], drop: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Write a folder as transformers would; returns our weights of the same model."""
    (folder / "config.json").write_text(json.dumps(THEIRS | changes))
    moe = MoEConfig(router=RouterConfig(d_model=12, num_experts=EXPERTS), expert_hidden=14)
    shape = {
        "vocab_size": 30,
        "num_layers": 2,
        "d_model": 12,
        "num_heads": 3,
        "num_kv_heads": 1,
        "seq_len": 9,
    }
    config = ModelConfig(moe=moe, **shape)
    ours = make_model(3, config).state_dict()
    file = {name: value.clone() for name, value in their_state(ours, config, "mixtral").items()}
    save_file({name: value for name, value in file.items() if name not in drop}, folder / WEIGHTS)
    return ours


def test_a_folder_of_transformers_is_read_under_our_names(tmp_path):
    ours = theirs(tmp_path, {})
    with open_source(str(tmp_path), "") as source:
        assert not source.ours
        for name, value in ours.items():
            assert torch.equal(source.read(name), value), name


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{", '{"model_type": []}'])
def test_a_config_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: "), open_source(str(tmp_path), ""):
        pass


def test_a_tied_head_is_the_embedding(tmp_path):
    ours = theirs(tmp_path, {"tie_word_embeddings": True}, drop=("lm_head.weight",))
    with open_source(str(tmp_path), "") as source:
        assert torch.equal(source.read("head.weight"), ours["embedding.weight"])


def test_a_tied_head_that_differs_is_refused(tmp_path):
    theirs(tmp_path, {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"), open_source(str(tmp_path), ""):
        pass


def test_a_head_that_is_not_tied_must_be_there(tmp_path):
    theirs(tmp_path, {}, drop=("lm_head.weight",))
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"), open_source(str(tmp_path), ""):
        pass


def test_the_toml_of_the_model_reads_back_with_any_vocabulary(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=1000, qk_norm=True, norm_eps=1e-5, num_kv_heads=1)
    (tmp_path / "config.toml").write_text(to_toml_text(config))
    assert read_model(tmp_path / "config.toml") == config
    with pytest.raises(ValueError, match=r"--set train\.lr=1: only model, moe and router"):
        read_model(tmp_path / "config.toml", ("train.lr=1",))
    with pytest.raises(ValueError) as caught:
        read_model(tmp_path / "config.toml", ("router.top_k=9",))
    assert "data.paths" not in str(caught.value)
