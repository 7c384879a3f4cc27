"""The layer's benchmark: every contender computes the same thing, and the rows are what they say."""

import json

import pytest
import torch

from experiments import bench_layer
from experiments.bench_contenders import CONTENDERS, peak_bytes
from experiments.bench_inputs import Run, make_inputs
from experiments.bench_layer import Case, run_case
from experiments.bench_table import markdown, print_case
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
    assert len(found) == len(rows) == 12
    ratios = {"ratio_to_best_peer", "ratio_to_floor", "ratio_to_balanced"}
    for row in rows:
        assert set(row) == {"case", "contender", "metric", "value"} | ratios
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


SKEWED = Case(experts=4, top_k=2, tokens=96, width=32, hidden=16, skew="only:0-1")


@pytest.mark.dist
def test_under_skew_replicas_give_the_same_rows_and_spread_them_over_the_ranks(capsys):
    inputs = make_inputs(SKEWED, 0)
    chosen = top_k(inputs.x_TD @ inputs.gate_ED.T, None, 2)
    assert chosen.max() == 1, "the gate selects what was forced"
    for outputs in run_ranks(skewed_rank, 2):
        assert outputs["fullest"] == 192 and outputs["replicated"] > 0
        torch.testing.assert_close(torch.tensor(outputs["replicas"]), torch.tensor(outputs["counterpoise"]))
    rows = run_case(SKEWED, ["balanced", "counterpoise", "replicas", "resident"], 2)
    found = {(row["contender"], row["metric"]): row for row in rows}
    assert found["balanced", "step_ms"]["ratio_to_balanced"] == 1.0
    for name in ("counterpoise", "replicas", "resident"):
        assert found[name, "step_ms"]["ratio_to_balanced"] > 0
        assert found[name, "step_ms"]["ratio_to_floor"] is None
    weights = 2 * 3 * 32 * 16 * 4 / 2**20  # there and back, of one expert
    assert found["replicas", "sent_mib"]["value"] >= found["resident", "sent_mib"]["value"] + weights
    print_case(rows)
    assert "of balanced" in capsys.readouterr().out
    assert markdown(rows).startswith(
        "| case (times over those of balanced routing) | balanced ms | counterpoise |"
    )


def skewed_rank(rank: int, world: int):
    from experiments.bench_contenders import replicated_layer

    topology = Topology(world_size=world, ep_size=world, rank=rank)
    inputs = make_inputs(SKEWED, rank)
    layer = replicated_layer(SKEWED, inputs, topology)
    counts_PE, _ = layer.gather_counts(layer.router.route(inputs.x_TD))
    rows_PS = layer.split(counts_PE, layer.slot_to_expert_S)
    outputs = {
        n: CONTENDERS[n](SKEWED, inputs, topology).outputs().tolist() for n in ("counterpoise", "replicas")
    }
    fullest = int(rows_PS.sum(axis=0).reshape(world, -1).sum(axis=1).max())
    return {**outputs, "fullest": fullest, "replicated": layer.placement.replica_slots.size}


@pytest.mark.dist
def test_deduplication_sends_fewer_bytes_and_gives_the_same_rows():
    case = Case(experts=4, top_k=4, tokens=24, width=32, hidden=16, skew="uniform", dedup=True)
    rows = run_case(case, list(case.contenders), 2)
    sent = {row["contender"]: row["value"] for row in rows if row["metric"] == "sent_mib"}
    # each of 24 tokens has two copies on the other rank: 1 row for 2, four times; 12 bytes a copy and a few
    assert 0.5 < sent["dedup"] / sent["counterpoise"] < 0.7
    for row in rows:  # K = E: the formula's expectation is what happens
        if row["metric"] == "formula_mib":
            assert row["value"] == pytest.approx(sent[row["contender"]], rel=1e-9)
    for outputs in run_ranks(dedup_rank, 2, case):
        torch.testing.assert_close(torch.tensor(outputs["dedup"]), torch.tensor(outputs["counterpoise"]))
    assert markdown(rows).startswith(
        "| case (times over those of plain dispatch) | counterpoise ms | dedup |"
    )


def dedup_rank(rank: int, world: int, case: Case):
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    inputs = make_inputs(case, rank)
    return {name: CONTENDERS[name](case, inputs, topology).outputs().tolist() for name in case.contenders}


def test_peak_memory_is_that_of_the_tensors_alive_at_once():

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
    row |= {"ratio_to_best_peer": None, "ratio_to_floor": 1.0, "ratio_to_balanced": None}
    peak = {**row, "metric": "peak_mib", "value": 2.0}
    ours = [{**r, "contender": "counterpoise"} for r in (row, peak, {**peak, "metric": "sent_mib"})]
    floor = [row, peak, {**peak, "metric": "sent_mib"}]
    monkeypatch.setattr(bench_layer, "run_case", lambda *_: floor + ours)
    out, table = tmp_path / "rows.json", tmp_path / "table.md"
    arguments = ["--cases", "E16 K2 T2048 D256", "--json", str(out), "--markdown", str(table)]
    assert bench_layer.main(arguments) == 0
    written = json.loads(out.read_text())
    assert set(written) == {"machine", "commit", "torch", "rows"} and written["rows"][0] == row
    assert table.read_text().startswith("| case (times over the floor's) | floor ms | counterpoise |")
    assert "[1/" in capsys.readouterr().out
