"""Run directories: named, never overwritten, locked, and their settings read back."""

import json

import pytest

from experiments import rundir
from experiments.config import load_config


def test_free_number_is_taken_when_no_name_is_given(tmp_path):
    paths = [rundir.create(tmp_path / "runs", None, "tiny").path.name for _ in range(3)]
    assert paths == ["tiny-1", "tiny-2", "tiny-3"]


def test_existing_name_is_refused_with_the_way_on(tmp_path):
    rundir.create(tmp_path, "mine", "tiny")
    with pytest.raises(ValueError, match="mine exists already; continue it with --resume mine"):
        rundir.create(tmp_path, "mine", "tiny")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs"])
def test_name_must_be_a_plain_folder_name(tmp_path, name):
    with pytest.raises(ValueError, match="must be a plain name"):
        rundir.create(tmp_path, name, "tiny")


def test_settings_read_back_and_versions_are_there(tmp_path):
    run = rundir.create(tmp_path, "mine", "tiny")
    config = load_config("tiny.toml", ["train.lr=0.00123"])
    rundir.write_settings(run, config, {"zero_optimization": {"stage": 1}}, {"world_size": 2})
    assert load_config(run.config) == config
    facts = rundir.read_facts(run)
    assert facts["world_size"] == 2
    assert facts["torch"]
    assert json.loads(run.deepspeed.read_text())["zero_optimization"]["stage"] == 1


def test_find_takes_a_name_or_a_path_and_lists_what_there_is(tmp_path):
    run = rundir.create(tmp_path, "mine", "tiny")
    run.config.write_text("")
    assert rundir.find(tmp_path, "mine").path == rundir.find("elsewhere", str(run.path)).path == run.path
    with pytest.raises(ValueError, match=r"no run 'other' under .*; there are: mine"):
        rundir.find(tmp_path, "other")


def test_unreadable_versions_are_named(tmp_path):
    run = rundir.create(tmp_path, "mine", "tiny")
    run.versions.write_text("{")
    with pytest.raises(ValueError, match=r"versions\.json: cannot be read"):
        rundir.read_facts(run)


def test_lock_is_exclusive_until_closed(tmp_path):
    run = rundir.create(tmp_path, "mine", "tiny")
    held = rundir.lock(run)
    with pytest.raises(ValueError, match="another process is writing to this run"):
        rundir.lock(run)
    held.close()
    rundir.lock(run).close()


@pytest.mark.parametrize("written", [0, 1, 2])
def test_settings_that_a_kill_left_half_written_are_finished(tmp_path, monkeypatch, written):
    """After none of the three files, or one, or two: `find` writes the others."""
    run = rundir.create(tmp_path, "half", "tiny")
    rundir.write_settings(run, load_config("tiny.toml"), {"stage": 1}, {"world_size": 2})
    new = load_config("tiny.toml", ["train.ep_size=1"])
    write_whole, calls = rundir.write_whole, []

    def killed(path, text):
        if len(calls) > written:
            raise KeyboardInterrupt
        calls.append(path)
        write_whole(path, text)

    monkeypatch.setattr(rundir, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        rundir.write_settings(run, new, {"stage": 3}, {"world_size": 1})
    monkeypatch.undo()
    assert rundir.find(tmp_path, "half") == run
    assert load_config(run.config) == new
    assert json.loads(run.deepspeed.read_text()) == {"stage": 3}
    assert rundir.read_facts(run)["world_size"] == 1
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.toml", "deepspeed.json", "versions.json"}
