"""The benchmark of the stages: formulas by hand-made numbers, and tiny engines that meet them to the byte."""

import json
from dataclasses import replace

import pytest
import torch

from experiments import bench_stages
from experiments.bench_stages_forms import (
    Parameter,
    Shape,
    kind_of,
    moe_bytes,
    paper_bytes,
    sent_bytes,
    state_bytes,
)
from experiments.config import load_config
from moe import Topology
from moe.ledger import Entry

# on 4 ranks, EP 2 x EDP 2: groups of 10 + 5 (matrices), 3 (vectors), 7 (experts) elements
PARAMETERS = [
    Parameter(numel=10, ndim=2, expert=False),
    Parameter(numel=3, ndim=1, expert=False),
    Parameter(numel=7, ndim=3, expert=True),
    Parameter(numel=5, ndim=2, expert=False),
]


def shape(stage: int, **changes) -> Shape:
    topology = Topology(world_size=4, ep_size=2, rank=0)
    return replace(Shape(parameters=PARAMETERS, topology=topology, stage=stage, element=4), **changes)


@pytest.mark.parametrize(
    ("stage", "accumulation", "times"), [(0, 3, 2), (1, 3, 2), (2, 1, 2), (2, 3, 4), (3, 1, 3), (3, 3, 9)]
)
def test_the_paper_counts_shares_of_all_parameters(stage, accumulation, times):
    # (n-1)/n of 18 dense parameters over 4 ranks and of 7 of experts over 2, 4 bytes each: 54 + 14
    assert paper_bytes(shape(stage, accumulation=accumulation)) == times * 68
    assert paper_bytes(shape(stage, accumulation=accumulation, element=2)) == times * 34


@pytest.mark.parametrize(
    ("stage", "accumulation", "gradients", "parameters"),
    [
        (0, 3, 136, 0),  # one all-reduce, 2 * 68
        # flat groups of 15, 3 and 7 are padded to 16 and 8 over 4 ranks (of 8) and to 8 over 2 (of 4):
        # 3/4 * 24 * 4 + 1/2 * 8 * 4
        (1, 3, 136, 88),
        (2, 3, 3 * 136, 88),
        # 10, 5 and 3 are padded to 12, 8 and 4, 7 to 8: 3/4 * 24 * 4 + 1/2 * 8 * 4
        (3, 1, 88, 2 * 88),
        (3, 3, 3 * 88, 6 * 88),
    ],
)
def test_deepspeed_all_reduces_and_pads(stage, accumulation, gradients, parameters):
    found = sent_bytes(shape(stage, accumulation=accumulation))
    assert found == {"gradients": gradients, "parameters": parameters}


def test_a_parameter_that_is_kept_is_gathered_once():
    assert sent_bytes(shape(3, kept=True)) == {"gradients": 88, "parameters": 88}


def test_states_of_a_rank_are_its_shares_with_their_padding():
    assert state_bytes(shape(0)) == {"weights": 100, "gradients": 100, "masters": 0, "moments": 200}
    assert state_bytes(shape(0, element=2)) == {
        "weights": 50,
        "gradients": 50,
        "masters": 100,
        "moments": 200,
    }
    # shares of 16/4, 8/4 and 8/2 elements; rank 0's gradients are those of the parameters that begin in them
    first = {"weights": 4 * 32, "gradients": 4 * (10 + 3 + 7), "masters": 40, "moments": 80}
    assert state_bytes(shape(1)) == state_bytes(shape(2)) == first
    # rank 3 has elements 12..16 of the 15, 6..8 of the 3 and 4..8 of the 7: with padding 5 + 1, 2 and 7 + 1
    last = state_bytes(shape(2, topology=Topology(world_size=4, ep_size=2, rank=3)))
    assert last == {**first, "gradients": 4 * (6 + 2 + 8)}
    # each parameter by itself: 3 + 2, 1 and 4 elements
    assert state_bytes(shape(3)) == {"weights": 40, "gradients": 40, "masters": 40, "moments": 80}


def test_rows_travel_four_times_and_counts_once():
    # rank 1 sends 3 rows of 10 bytes to rank 0 and gets 5 from there: (3 + 5) * 10, forward and backward;
    # counts of 6 experts and 2 numbers to one rank of EP, of 6 and 2 to one of EDP, in each of 2 forwards
    topology = Topology(world_size=4, ep_size=2, rank=1)
    assert moe_bytes(topology, [[7, 5], [3, 9]], 2, 6, 10) == 2 * 80 + 2 * (8 + 8) * 8


@pytest.mark.parametrize(
    ("op", "dtype", "phase", "tag", "kind"),
    [
        ("alltoall_base", torch.float32, "backward", "layer 1 dispatch", "moe"),
        ("allgather_base", torch.int64, "forward", "layer 1 counts", "moe"),
        ("allgather_base", torch.bfloat16, "forward", "layer 1 route", "parameters"),
        ("allgather_base", torch.float32, "optimizer", "", "parameters"),
        ("allgather_base", torch.float64, "optimizer", "", "other"),  # the norm of stage 0
        ("allreduce", torch.float32, "backward", "", "gradients"),
        ("reduce_scatter_base", torch.bfloat16, "backward", "", "gradients"),
        ("allreduce", torch.float32, "optimizer", "", "other"),
    ],
)
def test_collectives_are_told_apart(op, dtype, phase, tag, kind):
    entry = Entry(
        op=op, ranks=(0, 1), rank=0, dtype=dtype, input_splits=(), output_splits=(), sent_bytes=4,
        received_bytes=4, sent_to=(0, 4), phase=phase, tag=tag,
    )  # fmt: skip
    assert kind_of(entry) == kind


# widths that leave every group and most tensors to be padded
TINY = (
    "model.num_layers=2", "model.num_dense_layers=1", "model.d_model=26", "model.num_heads=1",
    "model.dense_hidden=35", "model.seq_len=12", "moe.expert_hidden=29", "moe.shared_hidden=21",
    "router.num_experts=6", "train.micro_batch=2",
)  # fmt: skip


def check(block, accumulation: int, element: int) -> None:
    rows = {row["stage"]: row for row in block["rows"]}
    assert list(rows) == ["0", "1", "2", "3", "3 kept"]
    for row in rows.values():
        assert row["sent"] == row["sent_form"] and row["sent_exact"], row["stage"]
        assert row["states"] == row["states_form"] and row["states_exact"], row["stage"]
        assert row["other"] < 64, "norms and flags"
        assert row["peak"] > sum(row["states"].values())
        assert 0 < row["spread_ms"][0] <= row["step_ms"] <= row["spread_ms"][1]
    states = {name: sum(row["states"].values()) for name, row in rows.items()}
    assert states["3"] == states["3 kept"] < states["0"]
    one = rows["0"]["paper"]
    assert one > 1000
    assert rows["1"]["paper"] == one
    assert rows["3"]["paper"] == pytest.approx(1.5 * accumulation * one)
    # without padding, stage 0 holds what the formula says, but for float32's masters
    masters = 0 if element == 2 else 4 / 20
    assert states["0"] == pytest.approx((1 - masters) * rows["0"]["estimate"], abs=8)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_the_command_measures_what_the_formulas_say(tmp_path, capsys):
    out, table = tmp_path / "stages.json", tmp_path / "stages.md"
    sets = [part for size in TINY for part in ("--set", size)]
    argv = ["--dtype", "bfloat16", "--ep-size", "1", "--accumulation", "2", "--rounds", "2"]
    assert bench_stages.main([*argv, "--json", str(out), "--markdown", str(table), *sets]) == 0
    (block,) = json.loads(out.read_text())["blocks"]
    check(block, accumulation=2, element=2)
    counts = 2 * (6 + 1) * 8
    assert [row["sent"]["moe"] for row in block["rows"]] == [counts] * 5, "over EDP; no rows travel"
    lines = table.read_text().splitlines()
    assert lines[0].startswith("bfloat16, 2 ranks = EP 1 x EDP 2, ")
    assert "(2 + 2 + 12)" in lines[2] and lines[-1] == "Sent and held: to the byte, on every rank."
    assert [line.split(" | ")[0] for line in lines[4:9]] == ["| 0", "| 1", "| 2", "| 3", "| 3 kept"]
    assert all(line.count("(1.000)") == 2 for line in lines[4:9])
    assert table.read_text() in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.slow
def test_float32_and_four_ranks_with_two_copies_of_every_expert_too():
    config = load_config("tiny.toml", [*TINY, "train.accumulation=3", "train.ep_size=2"])
    block = bench_stages.run_block(config, 4, 1)
    check(block, accumulation=3, element=4)
    for row in block["rows"]:
        assert row["sent"]["moe"] > 3 * 2 * 26 * 4, "rows have travelled"


def test_what_is_not_met_is_said():
    row = {"stage": "1", "sent_exact": True, "states_exact": False, "paper": 0, "estimate": 0, "peak": 0}
    row |= {"sent": {"moe": 0}, "sent_form": {"moe": 0}, "states": {"w": 3 * 2**20}}
    row |= {"states_form": {"w": 2 * 2**20}, "step_ms": 1, "spread_ms": [1, 1], "ratio_to_stage_0": 1}
    model = {"dtype": "float32", "ranks": 2, "ep_size": 2, "dense": 1, "experts": 1, "tokens_a_rank": 1}
    text = bench_stages.markdown(
        {"model": {**model, "accumulation": 1}, "rows": [{**row, "tokens_per_s": 1}]}
    )
    assert "(1.500)" in text and text.endswith("Not to the byte: stage 1: states.\n")


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--ranks 0 and --rounds 5 must be 1 or more"):
        bench_stages.main(["--ranks", "0"])
    with pytest.raises(ValueError, match=r"--set model\.dtype: the benchmark sets it; use --dtype"):
        bench_stages.main(["--set", "model.dtype=bfloat16"])
    with pytest.raises(ValueError, match="does not divide the 4 ranks"):
        bench_stages.main(["--ranks", "4", "--ep-size", "3"])


def test_another_model_comes_without_the_default_sizes():
    args = bench_stages.parser().parse_args(["--model", "tiny.toml", "--set", "train.micro_batch=1"])
    config = bench_stages.read_config(args, "float32")
    assert (config.model.d_model, config.train.micro_batch) == (128, 1)
    own = bench_stages.parser().parse_args(["--set", "model.d_model=64"])
    assert bench_stages.read_config(own, "float32").model.d_model == 64
    assert bench_stages.read_config(own, "float32").moe.shared_hidden == 512
