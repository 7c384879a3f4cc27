"""Whether parameters that stand still are told: after ten steps that could move them, once, on all ranks."""

from types import SimpleNamespace

import pytest
import torch

from experiments.moving import STEPS, FrozenParameterError, Moving
from moe.testing import run_ranks


def trainer(dtype="float32", optimizer=torch.optim.AdamW):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    return SimpleNamespace(
        model=model,
        engine=SimpleNamespace(optimizer=optimizer(model.parameters(), lr=0.1)),
        job=SimpleNamespace(device=torch.device("cpu")),
        config=SimpleNamespace(model=SimpleNamespace(dtype=dtype)),
        records=None,
    )


def steps_until_told(rank, world, dtype, optimizer, rates, moves):
    """The step in which it raises or speaks, and the text; moves: ranks on which the second layer moves."""
    given, said = trainer(dtype, getattr(torch.optim, optimizer)), []
    moving = Moving(given, said.append)
    for step, lr in enumerate(rates, start=1):
        given.model[0].weight.data += 1
        if rank in moves:
            given.model[1].weight.data += 1
        try:
            moving.after(step, lr)
        except FrozenParameterError as error:
            return step, "raised", str(error)
        if said:
            return step, "said", said[0]
    return None


@pytest.mark.dist
@pytest.mark.parametrize(
    ("dtype", "optimizer", "rates", "moves", "outcome"),
    [
        ("float32", "AdamW", [1e-3] * 12, (), (STEPS, "raised")),
        ("float32", "AdamW", [1e-3] * 12, (1,), None),  # it moves on one rank: experts without rows
        ("float32", "AdamW", [0.0, 0.0, 1e-12] * 9, (), None),  # nothing could move
        ("float32", "AdamW", [0.0] * 5 + [1e-3] * 12, (), (5 + STEPS, "raised")),
        ("float32", "AdamW", [1e-3] * 9, (), None),  # a short run
        ("float32", "SGD", [1e-3] * 12, (), (STEPS, "said")),
        ("bfloat16", "AdamW", [1e-3] * 12, (), (STEPS, "said")),
    ],
)
def test_still_parameters_are_told_once_they_could_have_moved(dtype, optimizer, rates, moves, outcome):
    everybody = run_ranks(steps_until_told, 2, dtype, optimizer, rates, moves)
    assert everybody[0] == everybody[1]
    if outcome is None:
        assert everybody[0] is None
    else:
        assert everybody[0][:2] == outcome
        assert (
            f"step {outcome[0]}: 1 trainable parameters are as they were 10 steps ago: 1.weight"
            in (everybody[0][2])
        )
