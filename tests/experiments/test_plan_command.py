"""`counterpoise plan`: a plan from a trace, its figures, its file, and what it refuses."""

import json

import numpy as np
import pytest

from balancer.plan import check_plan, plan_from_dict
from balancer.trace import Trace, save_npz
from experiments.plan_command import chosen_slots, main


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
        (["--ranks", "0"], "--ranks 0 must be 1 or more"),
        (["--ranks", "4", "--spare", "-4"], "--spare -4"),
        (["--ranks", "4", "--nodes", "3"], "num_nodes=3 does not divide"),
        (["--ranks", "4", "--samples", "0"], "--samples 0 must be 1 or more"),
        (["--ranks", "4", "--effort", "repair"], "needs current_LS"),
        (["--ranks", "4", "--move-price", "-1"], "price"),
        (["--ranks", "4", "--current", "nowhere.json"], "--current nowhere.json"),
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


def test_a_plan_file_that_is_none_is_refused_by_name(trace, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"broken\.json: a plan lacks the keys"):
        main([str(trace), "--ranks", "4", "--current", str(broken)])


def test_slots_by_default_are_two_spare_ones_a_rank():
    assert chosen_slots(32, 8, None) == 48
    assert chosen_slots(10, 4, None) == 20
