"""`counterpoise trace info` and `convert`: the figures are those of the metrics, nothing is overwritten."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from balancer import metrics
from balancer.synth import collapse_trace
from balancer.trace import Trace, TraceWriter, load_trace, save_npz
from experiments import trace_command
from experiments.cli import run_command
from experiments.trace_info import sampling
from experiments.trace_plot import shown_steps
from experiments.trace_words import sparkline

STEPS = [0, 10, 20, 50, 60, 63]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command(lambda: trace_command.main, list(map(str, arguments)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six samples of two layers and four experts, with a jump of layer 1, in the loads/ of a run."""
    counts = np.tile([[30, 30, 30, 10], [25, 25, 25, 25]], (6, 1, 1))
    counts[4:, 1] = [100, 0, 0, 0]
    with TraceWriter(tmp_path / "run" / "loads", 2, 4, {"copies_per_step": 100, "top_k": 2}) as writer:
        for step, table in zip(STEPS, counts):
            writer.append(step, table)
    return tmp_path / "run"


def test_info_says_what_a_trace_is_and_what_changed_when(trace, tmp_path, capsys):
    code, out, err = run(capsys, "info", trace, "--json", tmp_path / "info.json", "--ranks", 2)
    assert (code, err) == (0, "")
    for line in (
        f"{trace}: load trace (folder)",
        "samples   6 x 2 layers x 4 experts",
        "steps     0 to 63, every 10; 2 samples missing (2 after 20); 1 distance between samples irregular",
        "copies    100 in every layer of every sample: conserved",
        "meta      top_k=2",
        "  0.750  layer 1   steps 50-60",
    ):
        assert line in out.splitlines()
    record = json.loads((tmp_path / "info.json").read_text())
    loads = load_trace(trace).tokens_per_expert_WLE
    last = record["phases"][-1]
    assert (last["name"], last["first_step"], last["samples"]) == ("last 10 %", 63, 1)
    assert last["entropy"] == pytest.approx(metrics.normalized_entropy(loads[-1]).mean())
    assert last["max_violation"] == pytest.approx(metrics.max_violation(loads[-1]).mean())
    assert last["effective_experts"] == pytest.approx(metrics.effective_experts(loads[-1]).mean())
    balance = metrics.sum_balancedness(metrics.rank_load(loads[-1], 2))
    assert last["sum_balancedness"] == pytest.approx(float(balance))
    assert last["dead_experts"] is None  # 25 copies of a fair share are too few to tell
    assert record["violation_floor"] == pytest.approx(metrics.violation_floor(100, 4, 1))
    assert [change["total_variation"] for change in record["changes"]] == [0.75]
    assert record["gaps"] == [[20, 2]]


def test_the_figures_do_not_depend_on_how_many_samples_are_looked_at_together(trace, monkeypatch):
    loads = load_trace(trace)
    whole = trace_command.Curves(loads, 2, lambda _: None)
    monkeypatch.setattr("experiments.trace_info._PIECE_VALUES", 16)
    seen = []
    pieces = trace_command.Curves(loads, 2, seen.append)
    assert seen == [2, 2, 2]
    for name in ("entropy_WL", "change_WL", "sum_balance_W", "copies_WL", "violation_WL"):
        np.testing.assert_array_equal(getattr(pieces, name), getattr(whole, name))


def test_counts_that_were_lost_are_said(tmp_path, capsys):
    counts = np.full((3, 1, 2), 4)
    counts[1, 0, 1] = 3
    lost = Trace(tokens_per_expert_WLE=counts, steps_W=np.array([1, 2, 3]), meta={"copies_per_step": 8})
    save_npz(tmp_path / "t.npz", lost)
    _, out, _ = run(capsys, "info", tmp_path / "t.npz")
    assert "7 to 8 a layer and sample: not constant, though the meta says 8: counts were lost" in out
    whole = Trace(tokens_per_expert_WLE=counts[:1], steps_W=np.array([1]), meta={"copies_per_step": 9})
    save_npz(tmp_path / "u.npz", whole)
    assert (
        "8 in every layer of every sample, but the meta says 9" in run(capsys, "info", tmp_path / "u.npz")[1]
    )


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (2, 1, 3)])
def test_small_traces_and_zero_loads_are_said_without_a_warning(shape, tmp_path, capsys, recwarn):
    counts = np.zeros(shape, dtype=np.int64)
    save_npz(tmp_path / "t.npz", Trace(tokens_per_expert_WLE=counts, steps_W=np.arange(shape[0])))
    plot = () if not shape[0] else ("--plot", tmp_path / "p.png")
    code, out, err = run(capsys, "info", tmp_path / "t.npz", *plot)
    assert (code, err) == (0, "")
    assert ("it holds no sample yet" in out) == (shape[0] == 0)
    assert not recwarn.list


def test_a_picture_of_no_sample_is_refused_before_anything_is_written(tmp_path, capsys):
    TraceWriter(tmp_path / "loads", 2, 4).close()
    files = ("--json", tmp_path / "i.json", "--plot", tmp_path / "p.png")
    code, out, err = run(capsys, "info", tmp_path / "loads", *files)
    assert (code, out, err.count("\n")) == (2, "", 1) and "holds no sample to draw yet" in err
    assert [path.name for path in tmp_path.iterdir()] == ["loads"]


@pytest.mark.parametrize("steps", [[2**62 - 3, 2**62 - 2, 2**62 - 1], [0, 1, 2**62 - 1], [2**62 - 1]])
def test_steps_that_float64_cannot_tell_apart_are_drawn_without_a_warning(steps, tmp_path, capsys, recwarn):
    counts = np.arange(6 * len(steps)).reshape(len(steps), 2, 3)
    save_npz(tmp_path / "t.npz", Trace(tokens_per_expert_WLE=counts, steps_W=np.array(steps)))
    code, out, err = run(capsys, "info", tmp_path / "t.npz", "--plot", tmp_path / "p.png")
    assert (code, err) == (0, "") and f"{steps[-1]}" in out
    assert (tmp_path / "p.png").stat().st_size > 10**4 and not recwarn.list


def test_the_axis_of_late_steps_counts_from_the_first():
    late, first = shown_steps(np.array([2**60, 2**60 + 1]))
    assert late.tolist() == [0.0, 1.0] and first == 2**60
    early, first = shown_steps(np.array([5, 2**53]))
    assert early.tolist() == [5.0, 2.0**53] and first == 0


def test_the_picture_is_a_picture_of_all_layers(tmp_path, capsys):
    save_npz(tmp_path / "t.npz", collapse_trace(num_samples=40, num_layers=4, num_experts=8, copies=8000))
    code, out, _ = run(capsys, "info", tmp_path / "t.npz", "--plot", tmp_path / "p.png")
    assert (code, f"wrote {tmp_path}/p.png" in out) == (0, True)
    with Image.open(tmp_path / "p.png") as image:
        assert min(image.size) > 800
        assert len(image.convert("RGB").getcolors(2**24)) > 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", 3), "--ranks 3 does not divide the 4 experts; use 1, 2, 4"),
        (("--plot", "p.pdf"), "must end in .png"),
        (("--json", "there"), "there already; name another file"),
        (("--num-experts", 0), "num_experts=0 must be at least 1"),
        (("--num-experts", 5), "holds 4 experts, num_experts=5 was given"),
        (("--assume-map-constant",), "assume_map_constant is for sglang-pt dumps"),
        (("--format", "csv"), "a folder; the form csv is a file"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(arguments, message, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("mine")
    code, out, err = run(capsys, "info", trace, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert Path("there").read_text() == "mine"


# --- convert ---


@pytest.mark.parametrize(
    ("out", "to", "form"),
    [
        ("new", (), "folder"),
        ("new.npz", (), "npz"),
        ("new.csv", (), "csv"),
        ("new.json", (), "json"),
        ("new.txt", ("--to", "csv"), "csv"),
    ],
)
def test_a_trace_is_converted_and_comes_back(out, to, form, trace, tmp_path, capsys):
    before = load_trace(trace)
    place = tmp_path / "below" / out
    code, said, err = run(capsys, "convert", trace, place, *to)
    assert (code, err) == (0, "")
    assert said.startswith(f"wrote {place} ({form}, from folder): 6 x 2 x 4 counts, read again and the same")
    after = load_trace(place)
    assert (after.tokens_per_expert_WLE == before.tokens_per_expert_WLE).all()
    assert after.steps_W.tolist() == STEPS
    if form == "csv":
        assert "left out copies_per_step, top_k" in said
    else:
        assert {key: after.meta[key] for key in before.meta} == before.meta
    assert [path.name for path in place.parent.iterdir()] == [out]


def test_nothing_is_overwritten_and_nothing_half_done_stays(trace, tmp_path, capsys, monkeypatch):
    (tmp_path / "new.csv").write_text("mine")
    code, _, err = run(capsys, "convert", trace, tmp_path / "new.csv")
    assert (code, "something is there already" in err) == (2, True)
    assert (tmp_path / "new.csv").read_text() == "mine"
    code, _, err = run(capsys, "convert", trace, tmp_path / "new.xls")
    assert (code, "the ending .xls names no form; say it with --to" in err) == (2, True)
    monkeypatch.setattr(trace_command, "_csv_lines", lambda trace: iter(["step,layer,expert_0\n0,0,7\n"]))
    code, _, err = run(capsys, "convert", trace, tmp_path / "other.csv")
    assert (code, "reads back as another trace" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "run"]


def test_what_another_tool_recorded_is_converted_with_its_notes(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {s} layer 0 exp_counts: [3, {s}]\n" for s in range(4)))
    code, out, err = run(capsys, "convert", log, tmp_path / "loads")
    assert (code, err) == (0, "")
    assert "(folder, from exp-counts)" in out
    assert load_trace(tmp_path / "loads").meta["source"] == "exp-counts"
    dump = tmp_path / "t.json"
    dump.write_text('{"logical_count": [[[3, 1]], [[0, 0]]]}')
    code, out, err = run(capsys, "info", dump)
    assert code == 0
    assert re.fullmatch(r"note: .*t\.json: the last 1 of 2 steps are zero everywhere.*\n", err)


# --- parts ---


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], (None, [], 0)),
        ([5], (None, [], 0)),
        ([1, 11, 21, 31], (10, [], 0)),
        ([1, 11, 41, 51, 61], (10, [(11, 2)], 0)),
        ([1, 2, 3, 5, 6], (1, [(3, 1)], 0)),
        ([0, 10, 20, 25, 35], (10, [], 1)),
        ([0, 10, 20, 35, 45], (10, [], 1)),
    ],
)
def test_sampling_finds_interval_gaps_and_what_is_irregular(steps, expected):
    assert sampling(np.array(steps, dtype=np.int64)) == expected


def test_a_sparkline_is_darker_for_more():
    assert sparkline([0.0, 0.55, 1.0, None]) == " +@?"
    assert len(sparkline([0.5] * 1000)) == 60
    assert sparkline([]) == ""


def test_a_real_trace_is_described(traces_dir, capsys):
    code, out, _ = run(capsys, "info", traces_dir / "smartmoe.npz")
    assert code == 0
    assert "samples   501 x 24 layers x 32 experts" in out
    assert "steps     1 to 5001, every 10\n" in out
    assert re.search(r"^first +1 +0\.994 ", out, re.MULTILINE)
