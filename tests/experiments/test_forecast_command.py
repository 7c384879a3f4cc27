"""`counterpoise forecast` prints what the backtest found, writes it three ways, refuses what it cannot."""

import contextlib
import io
import json
import re
import types

import numpy as np
import pytest

from balancer.backtest import backtest
from balancer.forecast import FORECASTERS, forecaster
from balancer.synth import collapse_trace
from balancer.trace import Trace, TraceWriter, save_npz
from experiments import forecast_choices, forecast_command, page
from experiments.forecast_choices import GRID, chosen_horizons
from experiments.forecast_command import main
from experiments.forecast_plots import PLOTS, telling_experts, typical_layer

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = "persistence,ema,regime"


def write(path, counts_WLE, steps_W=None):
    counts_WLE = np.asarray(counts_WLE, dtype=np.int64)
    steps_W = 1 + 10 * np.arange(len(counts_WLE)) if steps_W is None else np.asarray(steps_W)
    save_npz(path, Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W.astype(np.int64)))
    return str(path)


def wobbling(num_samples, num_layers=2, num_experts=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(50, 150, size=(num_samples, num_layers, num_experts))


@pytest.fixture(scope="module")
def trace():
    return collapse_trace(num_samples=80, num_layers=3, num_experts=8, copies=8000)


@pytest.fixture(scope="module")
def run(trace, tmp_path_factory):
    """One run with everything written: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("forecast")
    save_npz(folder / "load <1>.npz", trace)
    argv = [str(folder / "load <1>.npz"), "--forecasters", NAMES, "--ranks", "4", "--last", "20"]
    argv += ["--json", str(folder / "out.json"), "--html", str(folder / "deep" / "out.html")]
    argv += ["--plots", str(folder / "plots")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(argv) == 0
    return folder, out.getvalue()


# ---- what it says ------------------------------------------------------------------------------------------


def test_the_json_rows_are_those_of_the_backtest(run, trace):
    folder, _ = run
    said = json.loads((folder / "out.json").read_text())
    assert said["horizons"] == [10, 100, 500] and said["trace"]["num_samples"] == 80
    assert said["trace"]["copies_least"] == said["trace"]["copies_most"] == 8000
    found = backtest(trace, {n: forecaster(n) for n in NAMES.split(",")}, (10, 100, 500), num_ranks=4)
    rows = {(r["forecaster"], r["horizon"], r["slice"], r["regime"]): r for r in said["rows"]}
    # 3 forecasters, 3 horizons; all, 4 regimes, first 40, last 20
    assert len(rows) == len(said["rows"]) == 3 * 3 * 7
    for kw, key in (
        ({}, ("all", "all")),
        ({"regime": "after"}, ("all", "after")),
        ({"last": 20}, ("last 20", "all")),
    ):
        for score in found.table(**kw):
            row = rows[score.forecaster, score.horizon, *key]
            for name in ("tv", "ratio_to_best_single", "coverage", "width", "rank_tv", "difference_se"):
                value = getattr(score, name)
                assert row[name] is None if np.isnan(value) else row[name] == pytest.approx(value), name
            assert row["best_single"] == score.best_single


def test_the_terminal_shows_table_regimes_slices_and_verdict(run):
    folder, text = run
    rows = json.loads((folder / "out.json").read_text())["rows"]
    for part in ("10 steps ahead", "500 steps ahead", "counting noise alone", "rank TV", "first 40 origins"):
        assert part in text, part
    for part in ("last 20 origins", "jump (", "after (", "best single: ", "8,000", "1 to 791, every 10"):
        assert part in text, part
    by_key = {(r["forecaster"], r["horizon"]): r for r in rows if (r["slice"], r["regime"]) == ("all", "all")}
    (line,) = re.findall(r"^persistence +(.*)$", text.split("jump (")[0], flags=re.M)
    assert line.split()[0] == f"{by_key['persistence', 10]['tv']:.4f}"
    away = 100 * (by_key["regime", 10]["ratio_to_best_single"] - 1)
    side = "below" if away < 0 else "above"
    assert f"regime: {abs(away):.1f} % {side} the best single forecaster" in text


def test_the_page_holds_everything_and_asks_for_nothing(run):
    folder, _ = run
    text = (folder / "deep" / "out.html").read_text()
    assert text.count("data:image/png;base64,") == 4 == len(PLOTS)
    assert "load &lt;1&gt;.npz" in text and "<1>" not in text
    assert not re.search(r"<script|<link|https?://|@import|url\(", text)
    for part in ("prefers-color-scheme: dark", "@media print", "default-src 'none'", "counting noise alone"):
        assert part in text, part
    for tag in ("table", "section", "figure", "tr", "ul"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag


def test_the_plots_are_pictures_of_a_readable_size(run):
    folder, _ = run
    assert {path.stem for path in (folder / "plots").iterdir()} == set(PLOTS)
    for path in (folder / "plots").iterdir():
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert data.startswith(PNG) and 800 <= width <= 1300 and 400 <= height <= 1300, path.name


def test_verdict_without_a_combination_is_against_persistence(tmp_path, capsys):
    path = write(tmp_path / "a.npz", wobbling(60))
    main([path, "--forecasters", "persistence,ema", "--horizons", "10"])
    assert "ema: the best single forecaster at 10 steps, " in capsys.readouterr().out


def test_a_short_comparison_says_that_it_may_be_luck(tmp_path, capsys):
    main([write(tmp_path / "a.npz", wobbling(2)), "--forecasters", NAMES])
    assert "too few origins to tell it from luck" in capsys.readouterr().out


# ---- odd traces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["two samples", "one expert", "idle layer", "irregular", "constant", "gap"])
def test_odd_traces_are_reported_and_drawn(case, tmp_path, capsys):
    counts, steps = wobbling(50), None
    if case == "two samples":
        counts = counts[:2]
    elif case == "one expert":
        counts = counts[:, :, :1]
    elif case == "idle layer":
        counts[:, 0] = 0
        counts[20:25] = 0
    elif case == "irregular":
        steps = np.cumsum(np.random.default_rng(0).integers(1, 9, size=50))
    elif case == "constant":
        counts[:] = 7
    else:
        steps = np.where(np.arange(50) < 25, 0, 400) + 10 * np.arange(50)
    path = write(tmp_path / "a.npz", counts, steps)
    with np.errstate(divide="raise", invalid="raise"):
        drawn = [] if case in ("irregular", "gap") else ["--html", str(tmp_path / "a.html")]
        assert main([path, *drawn, "--json", str(tmp_path / "a.json")]) == 0
    assert "RuntimeWarning" not in capsys.readouterr().err
    assert json.loads((tmp_path / "a.json").read_text())["rows"]
    assert not drawn or (tmp_path / "a.html").read_text().count("data:image/png") == 4


def test_a_trace_of_one_sample_says_so(tmp_path):
    with pytest.raises(ValueError, match="has 1 sample"):
        main([write(tmp_path / "a.npz", wobbling(1))])


def test_a_trace_without_load_says_so(tmp_path):
    with pytest.raises(ValueError, match="nothing to score"):
        main([write(tmp_path / "a.npz", np.zeros((5, 2, 3)))])


def test_a_torn_folder_is_read_as_far_as_it_goes(tmp_path, capsys):
    with TraceWriter(tmp_path / "loads", 2, 4) as writer:
        for w, counts_LE in enumerate(wobbling(12)):
            writer.append(10 * w, counts_LE)
    (rows,) = [p for p in (tmp_path / "loads").iterdir() if p.suffix != ".json"]
    rows.write_bytes(rows.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="torn"):
        main([str(tmp_path / "loads"), "--forecasters", "ema"])
    assert "11 samples of 2 layers x 4 experts" in capsys.readouterr().out


# ---- choices -----------------------------------------------------------------------------------------------


def test_default_horizons_follow_the_sampling_interval():
    def of(steps):
        counts = np.ones((len(steps), 1, 2), dtype=np.int64)
        return chosen_horizons(None, Trace(tokens_per_expert_WLE=counts, steps_W=np.asarray(steps)))

    assert of(range(0, 400, 4)) == (4, 40, 200)
    assert of(range(100)) == (1, 10, 50)
    assert of(range(0, 120, 10)) == (10, 100)
    assert of([3, 8]) == (5,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "below the sampling interval of 10 steps; use 10 or more"),
        ("10,600", "beyond the trace, which spans 490 steps"),
        ("ten", "expected training steps"),
        ("100,10", "say 10,100"),
        ("10,10", "must increase"),
        ("", "expected training steps"),
    ],
)
def test_a_wrong_horizon_names_the_bound(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([write(tmp_path / "a.npz", wobbling(50)), "--horizons", text])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--forecasters", "ema,nobody"], "'nobody' is unknown; use some of "),
        (["--forecasters", "ema,ema"], "each name once"),
        (["--forecasters", "ema:gain=fast"], "'gain=fast' is no constant; write gain=0.3"),
        (["--forecasters", "ema:gain=2"], "gain=2 must lie between 0.0 and 1"),
        (["--forecasters", "ema:gian=0.2"], "'ema' has no option gian; it has gain"),
        (["--forecasters", "regime:slow=3"], "regime:slow=3: slow is no number and cannot be given here"),
        (["--forecasters", "regime:gains=3"], "gains is no number"),
        (["--forecasters", "regime:memories=0.9"], "memories is no number"),
        (["--forecasters", "regime:regressors=1"], "regressors is no number"),
        (["--forecasters", "ema:gain=0.3:gain=0.4"], "ema:gain=0.3:gain=0.4: gain is given twice"),
        (["--forecasters", "ema:compiled=1"], "compiled is no number"),
        (["--first", "51"], "--first 51 must be 1 to 50"),
        (["--last", "0"], "--last 0 must be 1 to 50"),
        (["--layer", "2"], "--layer 2 must be 0 to 1"),
        (["--ranks", "3"], "num_ranks=3 does not divide the 4 experts"),
    ],
)
def test_a_wrong_choice_is_named(argv, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main([write(tmp_path / "a.npz", wobbling(50)), *argv])


def test_files_in_the_way_are_refused_before_any_work(tmp_path, monkeypatch):
    path = write(tmp_path / "a.npz", wobbling(50))
    (tmp_path / "plots").mkdir()
    for name in ("a.json", "a.html", "plots/error_by_horizon.png"):
        (tmp_path / name).write_text("mine")
    monkeypatch.setattr(forecast_command, "load_trace", lambda *_: pytest.fail("work was done"))
    for option, name in (("--json", "a.json"), ("--html", "a.html"), ("--plots", "plots")):
        with pytest.raises(ValueError, match="is there already"):
            main([path, option, str(tmp_path / name)])
    with pytest.raises(ValueError, match="is a folder"):
        main([path, "--json", str(tmp_path / "plots")])
    with pytest.raises(ValueError, match="the same file"):
        main([path, "--json", str(tmp_path / "b"), "--html", str(tmp_path / "b")])
    assert (tmp_path / "a.json").read_text() == "mine"


def test_force_overwrites_whole(tmp_path):
    path = write(tmp_path / "a.npz", wobbling(50))
    (tmp_path / "a.json").write_text("x" * 10**6)
    main([path, "--forecasters", "ema", "--json", str(tmp_path / "a.json"), "--force"])
    assert json.loads((tmp_path / "a.json").read_text())["horizons"] == [10, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.npz"]


def test_parts_by_target_are_named_so(tmp_path):
    path = write(tmp_path / "a.npz", wobbling(50))
    main([path, "--last", "10", "--by", "target", "--json", str(tmp_path / "a.json")])
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {row["slice"] for row in rows} == {"all", "first 40 targets", "last 10 targets"}
    by_target = [r for r in rows if r["slice"] == "last 10 targets" and r["horizon"] == 100]
    assert by_target[0]["num_scores"] == 2 * 10


def test_all_forecasters_run_by_default(tmp_path):
    main([write(tmp_path / "a.npz", wobbling(20)), "--json", str(tmp_path / "a.json")])
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {row["forecaster"] for row in rows} == {*FORECASTERS, *GRID}


def test_the_verdict_names_the_best_single_one_and_the_best_of_constant_gain(tmp_path, capsys):
    path = write(tmp_path / "a.npz", wobbling(50))
    main([path, "--forecasters", "regime,ar,ema:gain=0.2,window:length=3", "--horizons", "10"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("regime: ")]
    assert len(said) == 2
    assert re.search(r"the best single forecaster \((ar|ema:gain=0.2|window:length=3)\) at 10", said[0])
    assert re.search(r"of constant gain \((ema:gain=0.2|window:length=3)\) at 10", said[1])


def test_the_format_is_handed_on_only_where_given(tmp_path, monkeypatch):
    path, given = write(tmp_path / "a.npz", wobbling(20)), []
    real = forecast_command.load_trace
    monkeypatch.setattr(forecast_command, "load_trace", lambda p, **kw: given.append(kw) or real(p))
    main([path, "--forecasters", "ema"])
    main([path, "--forecasters", "ema", "--format", "npz"])
    assert given == [{}, {"format": "npz"}]


def test_stats_adds_the_comparators_and_warns_of_the_time(tmp_path, monkeypatch, capsys):
    stand_in = types.SimpleNamespace(stats_forecasters=lambda: {"ets": forecaster("persistence")})
    monkeypatch.setattr(forecast_choices, "import_module", lambda name: stand_in)
    path = write(tmp_path / "a.npz", wobbling(20))
    main([path, "--stats", "--forecasters", "ema,ets"])
    out = capsys.readouterr().out
    assert "minutes" in out and re.search(r"^ets ", out, flags=re.M)

    def absent(name):
        raise ImportError("No module named 'statsmodels'")

    monkeypatch.setattr(forecast_choices, "import_module", absent)
    with pytest.raises(ValueError, match="--stats: No module named 'statsmodels'"):
        main([path, "--stats"])


def test_progress_is_lines_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forecast_command, "_LINE_S", 0.0)
    main([write(tmp_path / "a.npz", wobbling(20)), "--forecasters", "ema"])
    assert capsys.readouterr().err.splitlines()[-1] == "forecast: 20 of 20 samples"


# ---- pieces ------------------------------------------------------------------------------------------------


def test_the_experts_drawn_are_the_telling_ones():
    counts_WE = np.array([[50, 1, 20, 9, 5], [50, 1, 0, 29, 5], [50, 1, 20, 9, 5]])
    assert telling_experts(counts_WE) == {0: "the heaviest", 2: "of median load", 3: "changes most"}
    assert telling_experts(np.ones((3, 1), dtype=int)) == {0: "the heaviest"}
    assert telling_experts(np.zeros((3, 4), dtype=int)) == {0: "no load"}


def test_the_layer_drawn_changes_as_much_as_most():
    change_WL = np.array([[np.nan] * 4, [0.5, 0.1, np.nan, 0.2], [0.5, 0.1, np.nan, 0.2]])
    assert typical_layer(change_WL) == 3
    assert typical_layer(np.full((3, 2), np.nan)) == 0


def test_a_page_escapes_what_it_is_given():
    evil = "<b>&\"'"
    parts = [page.words(evil), page.table([evil], [[evil]], caption=evil), page.facts({evil: evil})]
    text = page.page(evil, [page.section(evil, [*parts, page.bullets([evil]), page.picture(PNG, evil)])])
    assert "<b>" not in text and text.count("&lt;b&gt;&amp;&quot;&#x27;") == 12


def test_a_page_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="2 columns"):
        page.table(["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="2 columns"):
        page.table(["a", "b"], [], groups=[("x", 3)])
    with pytest.raises(ValueError, match="no PNG"):
        page.picture(b"GIF89a", "x")
