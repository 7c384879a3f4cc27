"""The layer's benchmark: every contender computes the same thing, and the rows are what they say."""

import json

import pytest
import torch

from experiments import bench_layer
from experiments.bench_contenders import CONTENDERS, make_inputs, peak_bytes
from experiments.bench_layer import Case, markdown, print_case, run_case
from moe import Topology
from moe.testing import run_ranks
from routing.select import top_k

TINY = Case(experts=4, top_k=2, tokens=24, width=32, hidden=16)


def test_the_inputs_route_every_expert_the_same_number_of_copies():
    for rank in range(2):
        inputs = make_inputs(TINY, rank)
        logits_TE = inputs.x_TD @ inputs.gate_ED.T
        counts = torch.bincount(top_k(logits_TE, None, 2).reshape(-1), minlength=4)
        assert counts.tolist() == [12, 12, 12, 12]
    assert not torch.equal(make_inputs(TINY, 0).x_TD, make_inputs(TINY, 1).x_TD)
    assert torch.equal(make_inputs(TINY, 0).w2, make_inputs(TINY, 1).w2)


def outputs_rank(rank: int, world: int, names: list[str]):
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    runs = {name: CONTENDERS[name](TINY, make_inputs(TINY, rank), topology) for name in names}
    return {name: run.outputs().tolist() for name, run in runs.items()}


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["counterpoise", "observed", "recompute", "ds_native", "ds_autoep"]),
        (1, ["counterpoise", "hf_eager", "hf_grouped"]),
    ],
)
def test_all_contenders_give_the_same_rows(world, names):
    if any(name.startswith(("hf", "ds_autoep")) for name in names):
        pytest.importorskip("transformers", reason="the contenders made of transformers need it")
    for outputs in run_ranks(outputs_rank, world, names, env={"DS_ACCELERATOR": "cpu"}):
        wanted = torch.tensor(outputs.pop("counterpoise"))
        assert wanted.abs().max() > 0.1
        for name, rows in outputs.items():
            torch.testing.assert_close(torch.tensor(rows), wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.dist
def test_rows_have_what_is_compared_and_a_contender_that_fails_says_why(capsys, monkeypatch):
    rows = run_case(TINY, ["floor", "counterpoise", "observed", "floor_recompute"], 3)
    found = {(row["contender"], row["metric"]): row for row in rows}
    assert len(found) == len(rows) == 8
    for row in rows:
        assert set(row) == {"case", "contender", "metric", "value", "ratio_to_best_peer", "ratio_to_floor"}
        assert row["value"] > 0
    assert found["floor", "step_ms"]["ratio_to_floor"] == 1.0
    assert found["counterpoise", "step_ms"]["ratio_to_best_peer"] is None, "no other layer ran"
    assert found["observed", "step_ms"]["ratio_to_best_peer"] > 0
    odd = Case(experts=3, top_k=2, tokens=24, width=32, hidden=16)
    failed = run_case(odd, ["counterpoise"], 1)
    assert failed[0]["value"] is None and "3" in failed[0]["why"]
    print_case(rows + failed)
    assert "of floor" in capsys.readouterr().out
    assert markdown(rows).count("\n") == 3


def test_peak_memory_is_that_of_the_tensors_alive_at_once():
    from experiments.bench_contenders import Run

    def step():
        for _ in range(3):
            torch.ones(1000, 100)  # freed each time
        kept = torch.ones(250, 1000)
        del kept

    assert peak_bytes(Run(step=step)) == pytest.approx(1_000_000, abs=2000)


def test_the_command_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="matches none of"):
        bench_layer.main(["--cases", "E7"])
    with pytest.raises(ValueError, match="'deepep' is unknown"):
        bench_layer.main(["--contenders", "floor,deepep"])
    with pytest.raises(ValueError, match="--rounds 0"):
        bench_layer.main(["--rounds", "0"])


def test_the_command_writes_rows_with_machine_and_commit(tmp_path, monkeypatch, capsys):
    row = {"case": "c", "contender": "floor", "metric": "step_ms", "value": 1.0}
    row |= {"ratio_to_best_peer": None, "ratio_to_floor": 1.0}
    peak = {**row, "metric": "peak_mib", "value": 2.0}
    monkeypatch.setattr(bench_layer, "run_case", lambda *_: [row, peak])
    out, table = tmp_path / "rows.json", tmp_path / "table.md"
    arguments = ["--cases", "E16 K2 T2048 D256", "--json", str(out), "--markdown", str(table)]
    assert bench_layer.main(arguments) == 0
    written = json.loads(out.read_text())
    assert set(written) == {"machine", "commit", "torch", "rows"} and written["rows"][0] == row
    assert table.read_text().startswith("| case | floor ms |")
    assert "[1/" in capsys.readouterr().out
