"""Checkpoints on disk: complete or absent, verified byte by byte, the newest complete one found."""

import json

import pytest

from experiments import checkpoint
from experiments.rundir import RunDir


def write(run: RunDir, step: int, keep: int = 9):
    aside = checkpoint.begin(run, step)
    (aside / "state").mkdir()
    (aside / "state" / "rank-0").write_bytes(bytes(range(200)) * (step % 100))
    (aside / "model.safetensors").write_bytes(b"weights")
    return checkpoint.finish(aside, step, world_size=2, keep=keep)


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(path=tmp_path)


def never(text: str) -> None:
    raise AssertionError(text)


def test_finished_checkpoint_verifies_and_lists_every_file(run):
    path = write(run, 7)
    found = checkpoint.latest(run, say=never)
    assert found == checkpoint.Checkpoint(path=path, step=7, world_size=2)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].keys() == {"state/rank-0", "model.safetensors"}
    assert manifest["files"]["state/rank-0"]["bytes"] == 1400


def test_none_where_there_is_none(run):
    assert checkpoint.latest(run, say=never) is None


def test_a_save_that_never_finished_does_not_count_and_is_cleared_away(run):
    write(run, 1)
    aside = checkpoint.begin(run, 2)
    (aside / "half").write_bytes(b"x")
    found = checkpoint.latest(run, say=never)
    assert found is not None
    assert found.step == 1
    checkpoint.begin(run, 3)
    assert not aside.exists()


DAMAGES = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-3]), r"rank-0 has 597 bytes, expected 600"),
    "flipped bit": (
        lambda p: p.write_bytes(b"\x01" + p.read_bytes()[1:]),
        "rank-0 differs from its sha256",
    ),
    "removed": (lambda p: p.unlink(), "rank-0 is missing"),
    "no manifest": (lambda p: (p.parents[1] / "manifest.json").unlink(), "manifest.json cannot be read"),
    "torn manifest": (lambda p: (p.parents[1] / "manifest.json").write_text('{"format"'), "cannot be read"),
    "other format": (lambda p: (p.parents[1] / "manifest.json").write_text("[]"), "no manifest of format 3"),
    "earlier format": (
        lambda p: (p.parents[1] / "manifest.json").write_text(
            '{"format": 2, "step": 3, "world_size": 2, "files": {}}'
        ),
        "is of format 2, and this version reads format 3: resume with the version that wrote it",
    ),
    "no fields": (
        lambda p: (p.parents[1] / "manifest.json").write_text('{"format": 3}'),
        "no manifest of format 3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(run, damage):
    for step in (1, 2, 3):
        path = write(run, step)
    spoil, message = DAMAGES[damage]
    spoil(path / "state" / "rank-0")
    with pytest.raises(ValueError, match=message):
        checkpoint.verify(path)
    said = []
    found = checkpoint.latest(run, say=said.append)
    assert found is not None
    assert found.step == 2
    assert len(said) == 1
    assert "step 3 is not usable" in said[0]


def test_where_all_are_broken_nothing_starts_over(run):
    for step in (1, 2):
        (write(run, step) / "model.safetensors").unlink()
    said = []
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints in .* is usable; move that folder away"):
        checkpoint.latest(run, say=said.append)
    assert len(said) == 2


def steps_of(run: RunDir) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.checkpoints.iterdir())


def test_only_the_newest_are_kept(run):
    for step in (5, 10, 15, 100_000_000):
        write(run, step, keep=2)
    assert steps_of(run) == [15, 100_000_000]


def test_coming_back_to_an_older_step_drops_the_later_ones_and_keeps_the_new(run):
    """A damaged step 250 was passed over: the checkpoint of step 100 that follows must stay, not it."""
    for step in (50, 200, 250):
        write(run, step)
    write(run, 100, keep=1)
    assert steps_of(run) == [100]


def test_a_step_that_is_saved_again_replaces_the_old_one(run):
    write(run, 4)
    (run.checkpoints / "step-00000004" / "model.safetensors").write_bytes(b"broken")
    path = write(run, 4)
    assert checkpoint.verify(path).step == 4
