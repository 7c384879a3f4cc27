"""What a run may change when it goes on in another shape, and what a person is told of it."""

import pytest

from experiments.config import load_config
from experiments.reshape import BATCH, check_batch, check_kept, remarks, sequences, without_batch


def config(**train_and_router):
    keys = {"micro_batch": "train", "accumulation": "train", "balance_scope": "router", "forced": "router"}
    return load_config("tiny.toml", [f"{keys[k]}.{k}={v}" for k, v in train_and_router.items()])


OLD = {"micro_batch": 4, "accumulation": 2}


def test_the_same_number_of_sequences_passes():
    old = config(**OLD)
    assert sequences(old, 4) == 32
    for micro_batch, accumulation, ranks in ((4, 2, 4), (8, 2, 2), (4, 8, 1), (1, 4, 8)):
        check_batch(old, 4, config(micro_batch=micro_batch, accumulation=accumulation), ranks)


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "ranks", "remedy"),
    [
        (4, 2, 2, "--set train.micro_batch=4 --set train.accumulation=4"),
        (3, 1, 2, "--set train.micro_batch=2 --set train.accumulation=8"),
        (64, 1, 1, "--set train.micro_batch=32 --set train.accumulation=1"),
        (4, 2, 3, "a number of ranks that divides 32"),
        (1, 1, 64, "a number of ranks that divides 32"),
    ],
)
def test_another_number_is_refused_with_one_that_fits(micro_batch, accumulation, ranks, remedy):
    new = config(micro_batch=micro_batch, accumulation=accumulation)
    with pytest.raises(ValueError, match=rf"but the run has had 32, .* use {remedy}$"):
        check_batch(config(**OLD), 4, new, ranks)


@pytest.mark.parametrize(
    ("scope", "new", "ranks", "told"),
    [
        ("global", {"micro_batch": 8}, 2, None),
        ("global", {"micro_batch": 4, "accumulation": 4}, 2, "were of 16 sequences and are of 8"),
        ("running", {"micro_batch": 4, "accumulation": 4}, 2, "were of 16 sequences and are of 8"),
        ("local", {"micro_batch": 4, "accumulation": 4}, 2, None),
        ("local", {"micro_batch": 8}, 2, "were of 4 sequences and are of 8"),
        ("previous", {"micro_batch": 4, "accumulation": 4}, 2, None),
        ("sequence", {"micro_batch": 4, "accumulation": 4}, 2, None),
    ],
)
def test_a_balance_loss_that_becomes_another_is_told(scope, new, ranks, told):
    old, new = config(**OLD, balance_scope=scope), config(**{**OLD, **new}, balance_scope=scope)
    said = remarks(old, 4, new, ranks)
    assert len(said) == (told is not None)
    assert told is None or told in said[0]


def test_forced_routes_are_told():
    old = config(**OLD, balance_scope="previous", forced="uniform")
    assert remarks(old, 4, old, 4) == []
    (said,) = remarks(old, 4, config(micro_batch=8, forced="uniform", balance_scope="previous"), 2)
    assert "router.forced=uniform draws rank by rank" in said


def test_only_where_states_are_may_change():
    own = {"optimizer": {"lr": 1}, "zero_optimization": {"stage": 1}, "train_batch_size": 8}
    check_kept(own, own, "a")
    moved = {**own, "zero_optimization": {"stage": 3}, "train_batch_size": 4}
    check_kept(moved, own, "a", free=("zero_optimization", *BATCH))
    with pytest.raises(ValueError, match=r"^a in train_batch_size, zero_optimization: .* add --reshape"):
        check_kept(moved, own, "a")
    for other in (
        {**own, "optimizer": {"lr": 2}},
        {**moved, "optimizer": {"lr": 2}},
        {**own, "scheduler": {}},
    ):
        with pytest.raises(ValueError, match=r"^a in (optimizer|scheduler): .* or start a new run"):
            check_kept(other, own, "a", free=("zero_optimization", *BATCH))
    assert without_batch(own) == {key: own[key] for key in ("optimizer", "zero_optimization")}
