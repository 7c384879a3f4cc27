"""`counterpoise trace synth`: what it writes, says, lists and refuses."""

import numpy as np
import pytest

from balancer.synth import collapse_trace
from balancer.synth_kinds import KINDS, synth_trace
from balancer.trace import check_conservation, load_trace
from experiments.cli import run_command
from experiments.trace_synth import main


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("out", ["loads.npz", "loads", "deep/er/loads.npz"])
def test_what_is_written_is_the_trace_of_its_arguments(out, capsys):
    sizes = {"samples": 12, "layers": 2, "experts": 6, "copies": 3000, "top-k": 3, "interval": 5, "seed": 8}
    flags = [f"--{name}={size}" for name, size in sizes.items()]
    assert main(["rotation", out, *flags, "--set", "period=6", "--set", "dispersion=2.5"]) == 0
    expected = synth_trace(
        "rotation",
        seed=8,
        num_samples=12,
        num_layers=2,
        num_experts=6,
        copies=3000,
        top_k=3,
        interval_steps=5,
        dispersion=2.5,
        period=6,
    )
    trace = load_trace(out)
    assert (trace.tokens_per_expert_WLE == expected.tokens_per_expert_WLE).all()
    assert (trace.steps_W == expected.steps_W).all() and trace.meta == expected.meta
    check_conservation(trace)
    said = capsys.readouterr().out
    for text in (
        f"wrote {out}: rotation (seed 8, period=6, num_domains=3",
        "12 samples, steps 1 to 56; 2 layers x 6 experts; 3,000 copies",
        f"counterpoise trace info {out}",
        f"counterpoise forecast {out}",
    ):
        assert text in said


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_with_its_defaults(kind):
    main([kind, "loads.npz"])
    assert load_trace("loads.npz").tokens_per_expert_WLE.shape == (500, 4, 16)


def test_the_collapse_is_that_of_the_library():
    main(["collapse", "loads", "--samples", "20", "--seed", "2"])
    expected = collapse_trace(seed=2, num_samples=20)
    np.testing.assert_array_equal(load_trace("loads").tokens_per_expert_WLE, expected.tokens_per_expert_WLE)


def test_the_list_and_the_help_show_every_kind_and_option(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name, kind in KINDS.items():
        assert f"  {name} " in listed and kind.help in listed
        assert all(f"{option}={value}" in listed for option, value in kind.options.items())
    assert "  collapse " in listed
    assert max(map(len, listed.splitlines())) <= 110
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "collapse-fast" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["there.npz", "there"])
def test_what_is_there_is_left_alone(out, tmp_path):
    place = tmp_path / out
    place.mkdir() if out == "there" else place.write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists already; choose another name"):
        main(["zipf", out])
    assert [path.name for path in tmp_path.iterdir()] == [out]
    assert place.is_dir() or place.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["wave", "x.npz"], "'wave' is unknown.*collapse-slow.*collapse"),
        (["zipf", "x.csv"], r"writes name.npz or a folder; make that.*trace convert IN x.csv"),
        (["zipf", "x.npz", "--set", "exponent"], "must have the form OPTION=VALUE"),
        (["zipf", "x.npz", "--set", "exponent=steep"], "exponent='steep' is no number"),
        (["zipf", "x.npz", "--set", "slope=1"], "no option 'slope'; it has exponent"),
        (["zipf", "x.npz", "--set", "exponent=1", "--set", "exponent=2"], "given twice"),
        (["zipf", "x.npz", "--set", "seed=1"], "has a flag of its own"),
        (["zipf", "x.npz", "--seed", "-1"], "--seed -1 must be 0 or more"),
        (["zipf", "x.npz", "--samples", "0"], "num_samples=0 must be at least 1"),
        (["zipf", "x.npz", "--copies", "101"], "use 100 or 102"),
        (["collapse", "x.npz", "--set", "dispersion=2"], "'collapse' has no option 'dispersion'"),
        (
            ["zipf", "x.npz", "--layers", "100000", "--experts", "100000"],
            "--samples 500 x --layers 100000 x --experts 100000 are 5000000000000 counts, at most 67108864",
        ),
        (
            ["collapse", "x.npz", "--samples", "100000"],
            "--samples 100000 x --layers 24 x --experts 32 are 76",
        ),
        (["zipf", "x.npz", "--copies", str(10**30)], f"--copies {10**30} must be at most 2.53"),
        (
            ["zipf", "x.npz", "--interval", str(2**60)],
            f"--interval {2**60} x --samples 500 must be below 2.62",
        ),
        (["collapse", "x.npz", "--interval", "2"], "'collapse' has no option 'interval_steps'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(argv, message, tmp_path, capsys):
    with pytest.raises(ValueError, match=message):
        main(argv)
    assert run_command(lambda: main, argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_kind_and_a_place_are_needed(capsys):
    for argv in ([], ["zipf"]):
        with pytest.raises(SystemExit):
            main(argv)
        assert "give KIND and OUT" in capsys.readouterr().err


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("experiments.trace_synth.save_npz", full)
    with pytest.raises(OSError, match="disk full"):
        main(["zipf", "x.npz", "--samples", "5"])
    assert not list(tmp_path.iterdir())
