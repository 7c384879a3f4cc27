"""`counterpoise plan`: a plan from a trace, its figures, its file, and what it refuses."""

import json

import numpy as np
import pytest

from balancer.plan import check_plan, plan_from_dict
from balancer.trace import Trace, save_npz
from experiments.plan_command import main
from experiments.sizes_arguments import chosen_slots


@pytest.fixture
def trace(tmp_path):
    """Twelve samples of two layers of eight experts: in layer 0 one expert has half the load."""
    rng = np.random.default_rng(0)
    shares_LE = np.array([[0.5, *[0.5 / 7] * 7], [1 / 8] * 8])
    counts = np.stack([[rng.multinomial(8000, row) for row in shares_LE] for _ in range(12)])
    path = tmp_path / "loads.npz"
    save_npz(path, Trace(tokens_per_expert_WLE=counts, steps_W=np.arange(12) * 10, meta={}))
    return path


def test_the_plan_is_printed_and_written_and_can_be_read_back(trace, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main([str(trace), "--ranks", "4", "--spare", "4", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "4 ranks, 12 slots for 8 experts, homes fixed" in said
    assert "first placement" in said
    plan = plan_from_dict(json.loads(out.read_text()))
    check_plan(plan, num_experts=8)
    assert (plan.version, plan.made_at_step) == (1, 110)
    # half of the load on one expert at home on one of four ranks: two ranks' worth must leave it
    assert plan.peak_L[0] == pytest.approx(2000, rel=0.01)
    row = next(line for line in said.splitlines() if line.startswith("      0 "))
    assert float(row.split()[1]) < 45 < 99 < float(row.split()[2])


def test_the_same_load_again_moves_nothing(trace, tmp_path, capsys):
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    arguments = [str(trace), "--ranks", "4", "--spare", "4"]
    main([*arguments, "--json", str(first)])
    main([*arguments, "--current", str(first), "--json", str(second)])
    assert "no change pays" in capsys.readouterr().out
    plan = plan_from_dict(json.loads(second.read_text()))
    assert plan.moves == ()
    assert plan.version == 2


@pytest.mark.parametrize("effort", ["fast", "repair"])
def test_other_efforts(trace, tmp_path, capsys, effort):
    first = tmp_path / "1.json"
    arguments = [str(trace), "--ranks", "4", "--spare", "4", "--homes", "free"]
    main([*arguments, "--json", str(first)])
    assert main([*arguments, "--effort", effort, "--current", str(first)]) == 0
    assert f"{effort}:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "4", "--spare", "3"], "use 0 or 4"),
        (["--ranks", "3"], None),
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--ranks", "4", "--spare", "-4"], "--spare -4"),
        (["--ranks", "4", "--nodes", "3"], "num_nodes=3 does not divide"),
        (["--ranks", "4", "--samples", "0"], "--samples 0 must be 1 or more"),
        (["--ranks", "4", "--effort", "repair"], "needs current_LS"),
        (["--ranks", "4", "--move-price", "-1"], "price"),
        (["--ranks", "4", "--current", "nowhere.json"], "--current nowhere.json"),
        (["--ranks", "4", "--json", ".", "--force"], r"--json \. is a folder; name a file"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(trace, arguments, words):
    if words is None:
        assert main([str(trace), *arguments]) == 0  # 8 experts on 3 ranks: homes are uneven, slots are not
        return
    with pytest.raises(ValueError, match=words):
        main([str(trace), *arguments])


def test_files_are_not_overwritten_unless_asked(trace, tmp_path):
    out = tmp_path / "plan.json"
    out.write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        main([str(trace), "--ranks", "4", "--json", str(out)])
    assert out.read_text() == "mine"
    main([str(trace), "--ranks", "4", "--json", str(out), "--force"])
    assert plan_from_dict(json.loads(out.read_text())).num_ranks == 4


def test_an_output_in_the_way_is_refused_before_any_work(tmp_path):
    missing = str(tmp_path / "no trace.npz")
    (tmp_path / "plan.json").write_text("mine")
    for out, more in ((tmp_path, ["--force"]), (tmp_path, []), (tmp_path / "plan.json", [])):
        with pytest.raises(ValueError, match=r"is a folder; name a file|is there already"):
            main([missing, "--ranks", "4", "--json", str(out), *more])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--ranks", "2", "--spare", "4"], "a plan for 4 ranks, --ranks says 2; give --ranks 4, or"),
        (
            ["--ranks", "4"],
            r"a plan for 12 slots, asked for are 16 \(8 experts and 8 spare\); give --spare 4",
        ),
    ],
)
def test_a_plan_in_force_for_other_ranks_or_slots_is_refused(trace, tmp_path, asked, words):
    first = tmp_path / "1.json"
    main([str(trace), "--ranks", "4", "--spare", "4", "--homes", "free", "--json", str(first)])
    with pytest.raises(ValueError, match=words):
        main([str(trace), *asked, "--homes", "free", "--current", str(first)])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("effort", ["robust", "fast"])
@pytest.mark.parametrize("idle", ["some", "all"])
def test_layers_without_load_are_dashes_and_left_out_of_the_means(tmp_path, capsys, idle, effort):
    counts_WLE = np.zeros((9, 3, 8), np.int64)
    if idle == "some":
        counts_WLE[:, 1] = [4000, *[500] * 7]
    save_npz(tmp_path / "t.npz", Trace(tokens_per_expert_WLE=counts_WLE, steps_W=np.arange(9), meta={}))
    assert main([str(tmp_path / "t.npz"), "--ranks", "4", "--effort", effort]) == 0
    said = capsys.readouterr().out
    assert "nan" not in said.split("step 8", 1)[1]
    table = {cells[0]: cells[1:] for cells in map(str.split, said.splitlines()) if len(cells) == 5}
    assert table["0"] == table["2"] == ["-"] * 4
    assert table["mean"] == (table["1"] if idle == "some" else ["-"] * 4)
    assert ("-" in table["1"][:2]) == (idle == "all")


def test_a_fast_plan_says_that_it_looks_at_one_sample(trace, capsys):
    for effort, words in (
        ("fast", "the newest sample alone (--effort fast"),
        ("robust", "12 samples, up to"),
    ):
        main([str(trace), "--ranks", "4", "--effort", effort])
        assert words in capsys.readouterr().out
    main([str(trace), "--ranks", "4", "--samples", "1"])
    assert ": 1 sample, up to step 110" in capsys.readouterr().out


def test_the_help_says_when_nodes_count_and_where_homes_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # lines are broken at hyphens too
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "nodes that the ranks are on; they bind only with --groups" in said
    assert "the first slots of every rank keep its own experts, in order" in said


def test_a_plan_file_that_is_none_is_refused_by_name(trace, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"broken\.json: a plan lacks the keys"):
        main([str(trace), "--ranks", "4", "--current", str(broken)])


def test_slots_by_default_are_two_spare_ones_a_rank():
    assert chosen_slots(32, 8, None) == 48
    assert chosen_slots(10, 4, None) == 20
