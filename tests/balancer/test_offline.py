"""The offline optimum is that of going through all paths, and its pool holds what was in force."""

import itertools

import numpy as np
import pytest

from balancer.metrics import moved_slots
from balancer.offline import distinct_placements, move_costs, offline_optimum


def brute(time_WX, move_XX, start):
    """The cheapest cost over all sequences."""
    num_samples, num = time_WX.shape
    best = np.inf
    for path in itertools.product(range(num), repeat=num_samples):
        steps = zip((start, *path[:-1]), path)
        best = min(best, sum(move_XX[a, b] for a, b in steps) + time_WX[np.arange(num_samples), path].sum())
    return best


def cost_of(path_W, time_WX, move_XX, start):
    before_W = np.concatenate([[start], path_W[:-1]])
    return time_WX[np.arange(len(path_W)), path_W].sum() + move_XX[before_W, path_W].sum()


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_that_of_all_paths(seed):
    rng = np.random.default_rng(seed)
    num_samples, num = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    pool_XS = rng.integers(0, 4, size=(num, 4))
    time_WX = rng.random((num_samples, num))
    # not a metric either: a detour may be cheaper than the way
    move_XX = np.where(np.eye(num, dtype=bool), 0.0, rng.random((num, num)) * rng.choice([0.01, 0.3, 2]))
    start = int(rng.integers(num))
    path_W, cost = offline_optimum(pool_XS, time_WX, move_XX, start)
    # sums of the same few numbers in another order
    assert cost == pytest.approx(brute(time_WX, move_XX, start), rel=1e-12)
    assert cost_of(path_W, time_WX, move_XX, start) == pytest.approx(cost, rel=1e-12)


def test_dear_moves_keep_the_start_and_free_moves_follow_every_sample():
    time_WX = np.array([[1.0, 3.0], [3.0, 1.0], [1.0, 3.0]])
    away_XX = 1.0 - np.eye(2)
    assert offline_optimum([[0, 1], [1, 0]], time_WX, 100 * away_XX, 1)[0].tolist() == [1, 1, 1]
    path_W, cost = offline_optimum([[0, 1], [1, 0]], time_WX, 0 * away_XX, 1)
    assert path_W.tolist() == [0, 1, 0] and cost == 3.0


def test_of_equal_paths_it_stays():
    path_W, cost = offline_optimum([[0], [1]], np.ones((4, 2)), np.zeros((2, 2)), 1)
    assert cost == 4.0 and len(set(path_W[1:].tolist())) == 1


def test_move_costs_count_what_a_rank_must_receive():
    pool_XS = np.array([[0, 1, 2, 3], [1, 0, 2, 0], [2, 3, 0, 1]])
    cost_XX = move_costs(pool_XS, 2, 0.5)
    for a, b in itertools.product(range(3), repeat=2):
        assert cost_XX[a, b] == 0.5 * moved_slots(pool_XS[a], pool_XS[b], 2)
    assert cost_XX[0, 1] == 0.5 and cost_XX[0, 2] == 2.0 and not cost_XX.diagonal().any()


def test_the_pool_holds_the_start_the_longest_and_the_earliest():
    start_S = np.array([0, 1])
    spans = [(np.array([i, i]), 10 * i, number) for i, number in enumerate([1, 1, 50, 40, 2, 2, 2])]
    spans += [(start_S, 0, 5), (np.array([4, 4]), 3, 60)]  # what comes again adds up
    pool_XS = distinct_placements(spans, start_S, 5)
    assert pool_XS.tolist() == [[0, 1], [4, 4], [2, 2], [0, 0], [1, 1]]
    assert distinct_placements(spans, start_S, 1).tolist() == [[0, 1]]
    assert len(distinct_placements(spans, start_S, 100)) == 8
    with pytest.raises(ValueError, match="limit=0"):
        distinct_placements(spans, start_S, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_XS": [0, 1]}, "pool_XS has shape"),
        ({"time_WX": [[1.0]]}, r"expected \[W, 2\]"),
        ({"time_WX": np.empty((0, 2))}, r"expected \[W, 2\]"),
        ({"time_WX": [[1.0, np.nan]]}, r"time_WX\[0, 1\]=nan must be finite"),
        ({"move_cost_XX": [[0, -1], [0, 0]]}, r"move_cost_XX\[0, 1\]=-1"),
        ({"start": 2}, "start=2 must be 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {
        "pool_XS": [[0, 1], [1, 0]],
        "time_WX": [[1.0, 2.0]],
        "move_cost_XX": np.zeros((2, 2)),
        "start": 0,
    }
    with pytest.raises(ValueError, match=message):
        offline_optimum(**{**given, **change})
    with pytest.raises(ValueError, match="move_s=-1"):
        move_costs([[0, 1]], 2, -1)
