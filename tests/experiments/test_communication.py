"""The traffic of a run: what the ranks sent, by phase and from rank to rank, in every report."""

import json
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from balancer.dashboard import training_layout
from balancer.heatmap import traffic_heatmap
from experiments.communication import PHASES, Communication, Traffic, reports
from experiments.config import load_config
from moe.naming import phase
from moe.testing import run_ranks


def two_steps_rank(rank, world):
    """Two steps whose bytes depend on the step; then the report, summed as the meter sums it."""
    with Communication(world, rank) as communication:
        for size in (3, 5):
            with phase("forward"):
                dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size))
            with phase("a name of its own"):
                dist.broadcast(torch.ones(size), 0)
            communication.end_step()
            if size == 3:
                assert communication.figures(False).numel() == 0
        figures_X = communication.figures(True)
        dist.all_reduce(figures_X)  # falls into the next step
        traffic = communication.traffic(figures_X.numpy())
        communication.end_step()
        after_X = communication.figures(True)
    assert traffic is not None
    return traffic.phase_bytes, traffic.bytes_PP.tolist(), traffic.scalars(), after_X.tolist()


@pytest.mark.dist
def test_a_report_is_the_mean_step_of_the_whole_job():
    for rank, (by_phase, bytes_PP, scalars, after) in enumerate(run_ranks(two_steps_rank, 2)):
        # a mean of 4 floats a block: one block from each rank to the other; the broadcast from rank 0
        assert by_phase == dict.fromkeys(PHASES, 0.0) | {"forward": 2 * 16.0, "other": 16.0}
        assert bytes_PP == [[0.0, 16.0 + 16.0], [16.0, 0.0]]
        assert scalars["comm/forward_mib"] == 32 / 2**20
        assert scalars["comm/total_mib"] == 48 / 2**20
        # only the all-reduce of the report: 2 (n - 1) / n of its bytes, to the next rank
        reduced = 8.0 * (len(PHASES) + 4)
        assert after[PHASES.index("other")] == reduced
        assert np.reshape(after[len(PHASES) :], (2, 2))[rank, 1 - rank] == reduced


def test_switched_off_it_overrides_nothing_and_gives_no_figures():
    before = torch._C._dispatch_dump("c10d::allreduce_")
    with Communication(2, 0, on=False) as communication:
        assert torch._C._dispatch_dump("c10d::allreduce_") == before
        communication.end_step()
        figures_X = communication.figures(True)
    assert figures_X.shape == (0,)
    assert communication.traffic(figures_X.numpy()) is None


def test_reports_fall_on_the_steps_that_are_logged_or_drawn():
    length = ["train.log_every=4", "train.steps=13", "train.warmup_steps=1"]
    train = load_config("tiny.toml", [*length, "train.heatmap_every=6"]).train
    assert [step for step in range(1, 14) if reports(train, step)] == [1, 4, 6, 8, 12, 13]
    train = load_config("tiny.toml", [*length, "train.heatmap_every=0"]).train
    assert [step for step in range(1, 14) if reports(train, step)] == [4, 8, 12, 13]


def test_every_scalar_has_its_place_on_the_dashboard():
    traffic = Traffic(phase_bytes=dict.fromkeys(PHASES, 1.0), bytes_PP=np.zeros((1, 1)))
    patterns = [p for charts in training_layout().values() for chart in charts.values() for p in chart]
    for tag in traffic.scalars():
        assert sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1, tag


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_runs_bytes_are_those_of_its_shapes(finished_run):
    """2 ranks, 2 micro-batches of 2 x 24 tokens, 2 MoE layers, ZeRO 1 (rules: test_ledger_engine.py)."""
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "train"}
    width, hidden, vocab = 32, 40, 256
    dense = 2 * vocab * width + 3 * 4 * width * width + 7 * width
    dense += 3 * width * 48 + 2 * (4 * width + 3 * width * 16)
    experts = 2 * 3 * 2 * width * hidden  # of one rank: alone in its EDP group, so nothing of it travels
    assert experts > 0
    for step in (2, 3, 5, 6):
        line = steps[step]
        rows = line["comm/forward_mib"] * 2**20 - 2 * 2 * 2 * (4 + 2) * 8  # without the counts
        assert rows == pytest.approx(line["comm/backward_mib"] * 2**20 - 2 * dense * 4)
        assert rows % (width * 4) == pytest.approx(0, abs=1e-6)
        assert 0 < rows < 2 * 2 * 2 * 2 * (2 * 24 * 2) * width * 4
        weights = line["comm/optimizer_mib"] * 2**20
        assert 0 <= weights - 2 * dense * 4 / 2 < 200, "an all-gather, padding and norms"
        assert line["comm/sample_mib"] > 0
        assert line["comm/recompute_mib"] == line["comm/other_mib"] == 0
    # a validation and a checkpoint come after the step's report, so they are in the next one's
    assert steps[4]["comm/eval_mib"] > 0
    assert steps[4]["comm/checkpoint_mib"] > 0
    assert steps[3]["comm/eval_mib"] == 0


# ---- the picture ----------------------------------------------------------------------------------------


def cells(image: np.ndarray, ranks: int) -> np.ndarray:
    """The colour in the middle of each cell, by the margins that the picture has."""
    height, width = image.shape[0] - 34 - 50, image.shape[1] - 58 - 96
    rows = 34 + (2 * np.arange(ranks) + 1) * height // (2 * ranks)
    columns = 58 + (2 * np.arange(ranks) + 1) * width // (2 * ranks)
    return image[np.ix_(rows, columns)].astype(int)


def test_traffic_map_is_brighter_where_more_is_sent_and_white_on_the_diagonal():
    bytes_PP = np.full((4, 4), 1000.0)
    bytes_PP[1, 3], bytes_PP[2, 0] = 4000.0, 200.0
    np.fill_diagonal(bytes_PP, 0.0)
    colours = cells(traffic_heatmap(bytes_PP), 4)
    assert (colours[np.arange(4), np.arange(4)] == 255).all()
    brightness = np.where(np.eye(4, dtype=bool), -1, colours.sum(axis=2))
    assert np.unravel_index(brightness.argmax(), (4, 4)) == (1, 3)
    assert brightness[2, 0] == brightness[brightness >= 0].min()
    assert (cells(traffic_heatmap(7 * bytes_PP), 4) == colours).all()


def test_traffic_map_of_no_traffic_is_white_and_bad_bytes_are_refused():
    for ranks in (1, 3):
        assert (cells(traffic_heatmap(np.zeros((ranks, ranks))), ranks) == 255).all()
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        traffic_heatmap(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="0 or more"):
        traffic_heatmap([[0.0, -1.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="finite"):
        traffic_heatmap([[0.0, np.nan], [0.0, 0.0]])
