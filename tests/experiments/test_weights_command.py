"""`counterpoise weights`: dense to experts to transformers and back; nothing is overwritten, nothing is left
half done."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import checkpoint, rundir
from experiments.cli import main
from experiments.config import check_world, load_config
from experiments.weights import read_model, to_toml_text
from moe import ModelConfig, MoEConfig
from moe.model import Transformer
from routing import RouterConfig


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """Our folder with a dense model."""
    moe = MoEConfig(router=RouterConfig(d_model=12))
    shape = {"num_layers": 2, "num_dense_layers": 2, "d_model": 12, "num_heads": 2, "dense_hidden": 16}
    config = ModelConfig(moe=moe, seq_len=9, **shape)
    model = Transformer(config)
    model.init_weights(0)
    folder = tmp_path / "dense"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.toml").write_text(to_toml_text(config))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["weights", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def upcycled(dense, tmp_path, capsys) -> Path:
    settings = ("--set", "router.num_experts=4", "--set", "moe.shared_hidden=4", "--seed", "3")
    code, out, err = run(capsys, "upcycle", dense, tmp_path / "moe", *settings)
    assert (code, err) == (0, "")
    assert f"train it with: counterpoise train --config {tmp_path}/moe/config.toml" in out
    return tmp_path / "moe"


def test_a_dense_model_becomes_one_with_experts_that_trains(upcycled):
    config = read_model(upcycled / "config.toml")
    assert (config.num_dense_layers, config.moe.expert_hidden, config.moe.shared_hidden) == (0, 12, 4)
    assert check_world(load_config(upcycled / "config.toml"), 2) == 2
    Transformer(config).load_state_dict(load_file(upcycled / "model.safetensors"), strict=True)


def test_a_dense_model_is_not_trained(dense):
    with pytest.raises(
        ValueError, match=r"num_dense_layers=2 leaves no block with experts.*at most 1.*upcycle"
    ):
        check_world(load_config(dense / "config.toml"), 2)


def test_export_and_import_give_the_same_files(dense, tmp_path, capsys):
    assert run(capsys, "upcycle", dense, tmp_path / "moe")[0] == 0
    code, out, _ = run(capsys, "export", tmp_path / "moe", tmp_path / "hf", "--format", "mixtral")
    assert code == 0
    assert "1 file of weights, config.json (mixtral)" in out
    code, out, _ = run(capsys, "import", tmp_path / "hf", tmp_path / "back")
    assert code == 0
    assert "note: router_aux_loss_coef became router.balance_loss=0.01" in out
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("moe", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("action", ["import", "upcycle", "export"])
def test_a_folder_with_files_is_never_written_into(action, dense, upcycled, tmp_path, capsys):
    run(capsys, "upcycle", dense, tmp_path / "plain")
    run(capsys, "export", tmp_path / "plain", tmp_path / "hf", "--format", "mixtral")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    source = {"import": tmp_path / "hf", "upcycle": dense, "export": tmp_path / "plain"}[action]
    more = ("--format", "mixtral") if action == "export" else ()
    code, _, err = run(capsys, action, source, full, *more)
    assert code == 2
    assert "exists and is not an empty folder" in err
    assert [file.name for file in full.iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_welcome(dense, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run(capsys, "upcycle", dense, tmp_path / "empty")[0] == 0
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == [
        "config.toml",
        "model.safetensors",
    ]


def test_what_fails_halfway_leaves_nothing(dense, tmp_path, capsys):
    state = load_file(dense / "model.safetensors")
    state["head.weight"][0, 0] = torch.nan
    save_file(state, dense / "model.safetensors")
    code, _, err = run(capsys, "upcycle", dense, tmp_path / "moe")
    assert code == 2
    assert "head.weight has values that are NaN" in err
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.num_heads=3"], "model.num_heads=3 (the dense model has 2)"),
        (["model.dense_hidden=20"], "model.dense_hidden=20 (the dense model has 16)"),
        (["train.lr=1"], "only model, moe and router"),
        (["router.top_k=99"], "the new model"),
        (["moe.expert_hidden=5"], "use moe.expert_hidden=16"),
        (["router.normalize=false"], "use router.normalize=true"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_one_line(settings, message, dense, tmp_path, capsys):
    arguments = [part for setting in settings for part in ("--set", setting)]
    code, _, err = run(capsys, "upcycle", dense, tmp_path / "moe", *arguments)
    assert code == 2
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "moe").exists()


def test_a_shared_expert_is_not_dropped_silently(upcycled, tmp_path, capsys):
    code, _, err = run(capsys, "export", upcycled, tmp_path / "hf", "--format", "mixtral")
    assert code == 2
    assert "moe.shared_hidden=4: it has no shared expert" in err


def test_a_selection_bias_is_not_dropped_silently(dense, tmp_path, capsys):
    run(capsys, "upcycle", dense, tmp_path / "moe")
    state = load_file(tmp_path / "moe" / "model.safetensors")
    state["blocks.1.feed_forward.router.bias.bias_E"][2] = 0.01
    save_file(state, tmp_path / "moe" / "model.safetensors")
    code, _, err = run(capsys, "export", tmp_path / "moe", tmp_path / "hf", "--format", "mixtral")
    assert code == 2
    assert "blocks.1.feed_forward.router.bias.bias_E is not 0" in err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import", "nowhere", "out"), "nowhere has no config.json"),
        (("export", "nowhere", "out", "--format", "mixtral"), "no run 'nowhere'"),
        (("upcycle", "nowhere", "out", "--seed", "-1"), "--seed -1 must be 0 or more"),
        (("export", "nowhere", "out", "--format", "mixtral", "--shard-mb", "0"), "--shard-mb 0"),
    ],
)
def test_what_is_not_there_is_named(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_the_last_checkpoint_of_a_run_is_exported(dense, tmp_path, capsys):
    run(capsys, "upcycle", dense, tmp_path / "moe")
    made = rundir.create(tmp_path / "runs", "tried", "tiny")
    made.config.write_text((tmp_path / "moe" / "config.toml").read_text())
    arguments = ("export", "tried", tmp_path / "hf", "--format", "mixtral", "--runs-dir", tmp_path / "runs")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "has no complete checkpoint yet" in err
    for step in (1, 2):
        state = load_file(tmp_path / "moe" / "model.safetensors")
        state["norm.weight"] += step
        aside = checkpoint.begin(made, step)
        save_file(state, aside / "model.safetensors")
        checkpoint.finish(aside, step, 1, keep=2)
    assert run(capsys, *arguments)[0] == 0
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], torch.full((12,), 3.0))


def test_a_checkpoint_without_the_whole_model_says_why(dense, tmp_path, capsys):
    made = rundir.create(tmp_path / "runs", "tried", "tiny")
    made.config.write_text((dense / "config.toml").read_text())
    checkpoint.finish(checkpoint.begin(made, 1), 1, 1, keep=2)
    code, _, err = run(capsys, "export", made.path, tmp_path / "hf", "--format", "mixtral")
    assert code == 2 and "train.export = false" in err
