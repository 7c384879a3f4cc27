"""`counterpoise replay` says what was gained and what it cost, writes it three ways, refuses the rest."""

import contextlib
import io
import json
import re

import numpy as np
import pytest

from balancer.policies import POLICIES, policy
from balancer.synth import collapse_trace
from balancer.trace import Trace, TraceWriter, load_trace, save_npz
from experiments import replay_command
from experiments.replay_command import chosen_policies, demo_main, main, quick
from experiments.replay_page import number, percent, reasons, table_cells, table_head, text_table, verdicts
from experiments.replay_plots import PLOTS
from experiments.replay_run import Change, PolicyRun, figures, replay

NAMES = ("none", "eplb", "even", "lplb-ring", "offline")


@pytest.fixture(scope="module")
def trace():
    return collapse_trace(num_samples=40, num_layers=2, num_experts=8, copies=8000)


@pytest.fixture(scope="module")
def path(trace, tmp_path_factory):
    made = tmp_path_factory.mktemp("replay") / "load <1>.npz"
    save_npz(made, trace)
    return made


@pytest.fixture(scope="module")
def run(path):
    """One run with everything written: its folder, and what it printed."""
    folder = path.parent
    argv = [str(path), "--ranks", "4", "--policy", *NAMES, "--json", str(folder / "out.json")]
    argv += ["--html", str(folder / "deep" / "out.html"), "--plots", str(folder / "plots")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(argv) == 0
    return folder, out.getvalue()


def refused(argv, message):
    with pytest.raises(ValueError, match=message):
        main([str(arg) for arg in argv])


# ---- what it says ------------------------------------------------------------------------------------------


def test_the_json_rows_are_those_of_the_replay(run, trace):
    text = (run[0] / "out.json").read_text()
    said = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["policy"] for row in said["rows"]] == list(NAMES)
    assert said["setup"]["num_slots"] == 16 and said["scored_samples"] == 39 and said["steps"] == 390
    setup = replay_command.chosen_setup(replay_command.parser().parse_args(["t", "--ranks", "4"]), trace)
    made = replay(trace, [policy(name) for name in NAMES[:-1]], setup, offline=True)
    for row, one in zip(said["rows"], made.runs):
        again = figures(made, one)
        for name in ("balancedness_mean", "balancedness_sum", "balancedness_first20", "balancedness_after20"):
            assert row[name] == pytest.approx(again[name]), name
        assert (row["moves"], row["plans"]) == (again["moves"], again["plans"])
        assert set(row) == set(again) and "plan_ms_median" in row
    assert len(said["plans"]["eplb"]) == said["rows"][1]["plans"] and "offline" not in said["plans"]
    assert all(set(plan) == {"step", "moves", "layers", "reason"} for plan in said["plans"]["even"])


def test_the_terminal_shows_the_verdict_before_the_table(run):
    folder, text = run
    rows = {row["policy"]: row for row in json.loads((folder / "out.json").read_text())["rows"]}
    best = min(
        (r for r in rows.values() if r["policy"] != "offline"), key=lambda r: r["time_s"] + r["moves_s"]
    )
    line = re.findall(r"^.*ranks busy .*$", text, flags=re.M)[0]
    assert line.startswith(best["policy"]) and f"{100 * best['balancedness_sum']:.1f} %" in line
    for part in (
        f"{best['moves']:,} experts copied over 390 steps",
        "knowing the future: " + percent(rows["offline"]["balancedness_sum"]),
        "homes fixed", "4 ranks, 16 slots a layer, 8 spare", "40 from step 1 to 391",
    ):  # fmt: skip
        assert part in re.sub(r"\s+", " ", text), part
    assert text.index("ranks busy") < text.index("mean %")
    (eplb,) = re.findall(r"^eplb +(.*)$", text, flags=re.M)
    assert eplb.split()[:2] == ["even", "free"] and f"{rows['eplb']['moves']:,}" in eplb.split()


def test_the_page_holds_everything_and_asks_for_nothing(run):
    text = (run[0] / "deep" / "out.html").read_text()
    assert text.count("data:image/png;base64,") == len(PLOTS) == 6
    assert "load &lt;1&gt;.npz" in text and "<1>" not in text
    assert not re.search(r"<script|<link|https?://|@import|url\(", text)
    order = [
        text.index(part) for part in ("ranks busy", "<figure>", "Policies", "Plots", "Why each plan was made")
    ]
    assert order == sorted(order)
    assert "due every 100 steps" in text and "worth its moves" in text
    for tag in ("table", "section", "figure", "tr", "ul"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag


def test_the_plots_are_pictures_of_a_readable_size(run):
    assert {path.stem for path in (run[0] / "plots").iterdir()} == set(PLOTS)
    for path in (run[0] / "plots").iterdir():
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert data.startswith(b"\x89PNG") and 800 <= width <= 2000 and 200 <= height <= 2000


def test_long_lists_of_reasons_are_cut_and_figures_are_short():
    changes = tuple(Change(i, i, 1, 1, f"why {i}") for i in range(40))
    nothing = np.zeros((1, 1))
    run = PolicyRun(
        name="a", shares="even", free_slots=False, peak_WL=nothing, bound_WL=nothing, time_WL=nothing,
        moves_WL=nothing.astype(int), changes=changes,
    )  # fmt: skip
    found = reasons(run)
    assert list(found.values()) == ["why 0", "why 1", "why 38", "why 39"]
    assert list(found)[-1] == "step 39: 1 copies, 1 layers"
    assert [number(v) for v in (None, 0.01234, 12.34, 1234.5)] == ["-", "0.0123", "12.3", "1,234"]
    assert percent(None) == "-" and percent(0.12345, 2) == "12.35 %"


def test_a_policy_that_is_faster_than_ours_is_called_so(trace):
    setup = replay_command.chosen_setup(replay_command.parser().parse_args(["t", "--ranks", "4"]), trace)
    made = replay(trace, [policy("split"), policy("even")], setup)
    rows = [figures(made, run) for run in made.runs]
    for factor, words in ((2.0, "next best, even"), (0.5, "faster still by the cost model, even")):
        rows[1]["time_s"] = factor * rows[0]["time_s"]
        assert verdicts(made, rows)[2].startswith(words)


def said_of(trace, names, *more, offline=False):
    """The verdicts of a replay on 4 ranks, and its rows by name."""
    args = replay_command.parser().parse_args(["t", "--ranks", "4", *more])
    made = replay(
        trace, [policy(name) for name in names], replay_command.chosen_setup(args, trace), offline=offline
    )
    rows = [figures(made, run) for run in made.runs]
    return verdicts(made, rows), {row["policy"]: row for row in rows}


def test_what_the_split_gains_is_told_apart_from_what_planning_gains(trace):
    said, rows = said_of(trace, ["none", "none+split", "split"])
    split, none = rows["none+split"], rows["none"]
    assert f"instead of {percent(none['balancedness_sum'])}" in said[0]
    alone = f"{percent(split['balancedness_sum'])}, {none['time_s'] / split['time_s']:.2f} times"
    assert f"(none+split, the exact split alone: {alone})" in said[0]
    assert len(said) == 2  # nothing that stands still is a contender
    assert "none+split" not in " ".join(said_of(trace, ["none", "split"])[0])


def test_a_policy_that_moves_homes_has_no_regret_where_they_are_fixed(trace):
    said, rows = said_of(trace, ["eplb"], offline=True)
    assert rows["eplb"]["regret_s"] is None
    assert "homes kept, knowing the future" in said[-1] and "% longer" not in said[-1]
    assert "eplb moved homes, so its time is not compared" in said[-1]
    cells = dict(zip(table_head(), table_cells([rows["eplb"]])[0]))
    assert cells["regret s"] == "-"
    said, rows = said_of(trace, ["eplb"], "--homes", "free", offline=True)
    assert rows["eplb"]["regret_s"] >= 0 and "eplb takes" in said[-1] and "homes kept" not in said[-1]


def test_nodes_are_said_to_change_prices_only(path, capsys):
    argv = ["--ranks", "4", "--policy", "none"]
    assert main([str(path), *argv, "--nodes", "2"]) == 0
    assert "4 ranks on 2 nodes (which change prices only)" in capsys.readouterr().out
    assert main([str(path), *argv]) == 0
    assert "nodes" not in capsys.readouterr().out


def test_idle_layers_are_told_and_nothing_is_printed_as_nan(trace, path):
    counts_WLE = trace.tokens_per_expert_WLE.copy()
    counts_WLE[4:, 1] = 0
    idle = Trace(tokens_per_expert_WLE=counts_WLE, steps_W=trace.steps_W)
    setup = replay_command.chosen_setup(replay_command.parser().parse_args(["t", "--ranks", "4"]), idle)
    made = replay(idle, [policy("eplb")], setup, offline=True)
    rows = [figures(made, run) for run in made.runs]
    assert "36 times a layer had no load: left out of the means" in verdicts(made, rows)
    assert "nan" not in text_table(rows)
    for draw, _ in PLOTS.values():
        assert draw(made).startswith(b"\x89PNG")


def test_two_samples_and_one_policy_make_a_page(trace, tmp_path):
    counts_WLE = trace.tokens_per_expert_WLE[:2].copy()
    save_npz(tmp_path / "two.npz", Trace(tokens_per_expert_WLE=counts_WLE, steps_W=trace.steps_W[:2]))
    argv = [
        tmp_path / "two.npz",
        "--ranks",
        "8",
        "--spare",
        "0",
        "--policy",
        "none",
        "--html",
        tmp_path / "o.html",
    ]
    assert main([str(arg) for arg in argv]) == 0
    assert "no policy changed anything" in (tmp_path / "o.html").read_text()


def test_quick_keeps_the_first_samples_and_some_of_the_rest(trace):
    assert quick(trace) is trace
    steps_W = np.arange(400, dtype=np.int64)
    long = Trace(tokens_per_expert_WLE=np.ones((400, 1, 2), np.int64), steps_W=steps_W)
    kept = quick(long).steps_W
    assert len(kept) == 80 and kept[:26].tolist() == list(range(26)) and kept[-1] == 399


def test_a_folder_that_is_mapped_read_only_can_be_replayed(trace, tmp_path, capsys):
    with TraceWriter(tmp_path / "loads", 2, 8) as writer:
        for step, counts_LE in zip(trace.steps_W[:6], trace.tokens_per_expert_WLE):
            writer.append(int(step), counts_LE)
    argv = [
        str(tmp_path / "loads"),
        "--ranks",
        "2",
        "--policy",
        "eplb",
        "--homes",
        "free",
        "--serving",
        "--every",
        "10",
    ]
    assert main(argv) == 0
    assert "serving" in capsys.readouterr().out


# ---- what it refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", 0], "--ranks 0 must be at least 1"),
        (["--ranks", 3, "--spare", 3], "8 experts and 3 spare slots are 11 slots, not as many.*use 1 or 4"),
        (["--ranks", 4, "--spare", -4], "--spare -4 must be 0 or more"),
        (["--ranks", 4, "--spare", 1], "use 0 or 4"),
        (["--ranks", 4, "--nodes", 3], "num_nodes=3 does not divide num_ranks=4"),
        (["--ranks", 4, "--every", 0], "--every 0 must be 1 step or more"),
        (["--ranks", 4, "--cost", "abacus"], "machine='abacus' is not known; use one of nvlink"),
        (["--ranks", 4, "--hidden", 0], "hidden=0"),
        (["--ranks", 4, "--policy", "evn"], "'evn' is unknown; did you mean 'even'"),
        (["--ranks", 4, "--policy", "none", "ofline"], "did you mean 'offline'"),
        (["--ranks", 4, "--policy", "none", "none"], "each name once"),
        (["--ranks", 4, "--policy", "offline"], "name one beside it"),
        (["--ranks", 6, "--spare", 4, "--policy", "lplb-cube"], "a cube of 6 ranks: use 4 or 8"),
    ],
)
def test_what_cannot_be_is_refused(path, argv, message):
    refused([path, *argv], message)


def test_ranks_that_do_not_divide_the_experts_get_spare_slots_that_fit(trace):
    args = replay_command.parser().parse_args(["t", "--ranks", "3"])
    assert replay_command.chosen_setup(args, trace).num_slots == 15  # 8 experts, 2 a rank, and one to fit


def test_existing_outputs_are_refused_before_any_work_and_overwritten_by_force(path, tmp_path):
    out = tmp_path / "out.json"
    out.write_text("mine")
    argv = [path, "--ranks", 4, "--policy", "none", "--json", out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_command, "load_trace", lambda *a: pytest.fail("work was done"))
        refused(argv, "is there already; choose another name, or --force")
        refused([path, "--ranks", 4, "--html", tmp_path], "is a folder; name a file")
        refused([path, "--ranks", 4, "--html", "same", "--json", "same"], "give two names")
    assert out.read_text() == "mine"
    assert main([str(arg) for arg in [*argv, "--force"]]) == 0
    assert json.loads(out.read_text())["rows"][0]["policy"] == "none"


def test_all_policies_run_where_none_is_named():
    policies, offline = chosen_policies(None)
    assert [one.name for one in policies] == list(POLICIES) and offline
    known = ["none", "none+split", "eplb", "eplb-strong", "even", "split", "lplb-ring", "lplb-cube"]
    assert list(POLICIES) == known


# ---- the demo ----------------------------------------------------------------------------------------------


def test_the_demo_makes_a_trace_and_a_page_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    small = {"num_samples": 6, "num_layers": 1, "num_experts": 8, "copies": 800}
    monkeypatch.setattr(replay_command, "_DEMO_SIZES", small)
    monkeypatch.setattr(
        replay_command, "chosen_policies", lambda names: ([policy("eplb"), policy("even")], True)
    )
    argv = ["rotation", "--out", str(tmp_path / "demo")]
    assert demo_main(argv) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 40 and "ranks busy" in text and "'rotation'" in text
    assert load_trace(tmp_path / "demo" / "loads.npz").tokens_per_expert_WLE.shape == (6, 1, 8)
    assert "<figure>" in (tmp_path / "demo" / "replay.html").read_text()
    ran = []
    with pytest.raises(ValueError, match=r"replay\.html is there already.*--force"):
        demo_main(argv)
    (tmp_path / "demo" / "replay.html").unlink()
    with pytest.raises(ValueError, match=r"loads\.npz is there already"):
        demo_main(argv)
    monkeypatch.setattr(replay_command, "_run", lambda args, *_: ran.append(args.force))
    assert demo_main([*argv, "--force"]) == 0
    assert ran == [True] and (tmp_path / "demo" / "loads.npz").exists()


def test_an_unknown_demo_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"demo 'rotatin' is unknown; did you mean 'rotation'.*collapse"):
        demo_main(["rotatin"])
