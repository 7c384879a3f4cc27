"""The `counterpoise` command: arguments pass untouched, mistakes are one line, and start-up stays light."""

import subprocess
import sys

import pytest

from experiments import cli
from experiments.cli import COMMANDS, Command, main, run_command


@pytest.fixture
def seen(monkeypatch) -> list[list[str]]:
    """Replaces `train` by a stand-in that notes its arguments and returns 7."""
    calls: list[list[str]] = []

    def stand_in(argv):
        calls.append(list(argv))
        return 7

    monkeypatch.setitem(COMMANDS, "train", Command(help="stand-in", load=lambda: stand_in))
    return calls


def test_what_follows_the_command_passes_untouched(seen):
    argv = ["train", "--config", "x.toml", "--set", "a.b=--c", "--help", "--", "-1", "doctor"]
    assert main(argv) == 7
    assert seen == [argv[1:]]


def test_the_process_arguments_are_the_default(seen, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["counterpoise", "train", "--x"])
    assert main() == 7
    assert seen == [["--x"]]


def test_none_counts_as_success():
    assert run_command(lambda: lambda argv: None, []) == 0


def test_a_users_mistake_is_one_line_and_code_2(capsys):
    def wrong(argv):
        raise ValueError("tiny.toml: train.steps=0 must be 1 or more")

    assert run_command(lambda: wrong, []) == 2
    captured = capsys.readouterr()
    assert captured.err == "counterpoise: error: tiny.toml: train.steps=0 must be 1 or more\n"
    assert captured.out == ""


def test_our_own_mistakes_keep_their_traceback():
    def wrong(argv):
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        run_command(lambda: wrong, [])


def test_ctrl_c_is_130_without_a_traceback():
    def interrupted(argv):
        raise KeyboardInterrupt

    assert run_command(lambda: interrupted, []) == 130


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["invalid choice", "trian", "train"]),
        ([], ["required", "COMMAND"]),
        (["--", "train"], ["--", "COMMAND"]),
        (["--config", "x"], ["invalid choice", "choose from"]),
    ],
)
def test_a_wrong_command_is_named_and_gives_2(capsys, argv, words):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"    {name} " in shown


def test_version_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda: "9.8.7")
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "counterpoise 9.8.7\n"


def test_the_command_line_itself_loads_nothing_heavy():
    code = (
        "import sys, experiments.cli as cli; cli.parser().format_help();"
        "print([m for m in ('torch', 'numpy', 'deepspeed', 'experiments.config') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
