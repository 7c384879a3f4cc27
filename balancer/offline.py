"""Offline: the best that could have been done along a trace by somebody who knew all of it.

Behind a replay, which has the placements that policies used and the time of every sample under each. Which of
them to have in force when, moves paid for, is a shortest path, found exactly (Viterbi 1967) for each layer by
itself. It sees the future: a yardstick, never a policy. What it does not do is to invent placements: it is
the optimum over the pool, which is why a pool also gets placements made for single samples in hindsight.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.metrics import moved_slots

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def offline_optimum(
    pool_XS: ArrayLike, time_WX: ArrayLike, move_cost_XX: ArrayLike, start: int
) -> tuple[Integers, float]:
    """The cheapest sequence of placements of one layer, in hindsight.

    pool_XS: [X, S] integers, placements to choose from;  time_WX: [W, X] seconds that each sample takes under
    each;  move_cost_XX: [X, X] seconds from one to another, 0 on the diagonal;  start: the placement before
    the first sample, which may be left before it, at its cost.

    Returns path_W [W] int64, the placement of each sample, and its cost in seconds, times and moves together.
    Of equal paths one that changes late and to a low index. Time grows with W * X^2. Raises ValueError for
    shapes that do not fit, an entry that is negative or not finite, or a start outside the pool.

    >>> path_W, cost = offline_optimum([[0, 1], [1, 0]], [[1, 5], [1, 0], [1, 0]], [[0, 1], [1, 0]], 0)
    >>> path_W.tolist(), cost
    ([0, 1, 1], 2.0)
    """
    time, move_XX = _checked(np.asarray(pool_XS), time_WX, move_cost_XX, start)
    num_samples, num_placements = time.shape
    every_X = np.arange(num_placements, dtype=np.int64)
    cost_X = np.full(num_placements, np.inf)
    cost_X[start] = 0.0
    before_WX = np.empty((num_samples, num_placements), np.int64)
    for w, time_X in enumerate(time):
        reached_XX = cost_X[:, None] + move_XX
        before_X = reached_XX.argmin(axis=0)
        # of equal ways the one that stays
        reached_X = reached_XX[before_X, every_X]
        before_WX[w] = np.where(cost_X <= reached_X, every_X, before_X)
        cost_X = np.minimum(cost_X, reached_X) + time_X
    path_W = np.empty(num_samples, np.int64)
    at = int(cost_X.argmin())
    cost = float(cost_X[at])
    for w in range(num_samples - 1, -1, -1):
        path_W[w] = at
        at = int(before_WX[w, at])
    return path_W, cost


def move_costs(pool_XS: ArrayLike, num_ranks: int, move_s: float) -> Floats:
    """Seconds from every placement of a pool to every other: move_s for each slot that must receive an
    expert.

    pool_XS: [X, S] integers, -1 = empty;  num_ranks: P;  move_s: 0 or more.   Returns [X, X] float64, from
    the row to the column. Raises ValueError as `metrics.moved_slots` does, and for a negative price.
    """
    if not move_s >= 0:
        raise ValueError(f"move_s={move_s} must be 0 s or more")
    pool = np.asarray(pool_XS)
    rows = [moved_slots(before_S[None], pool, num_ranks) for before_S in pool]  # one by one: S^2 each
    return np.stack(rows).astype(np.float64) * float(move_s)


def distinct_placements(
    spans: Sequence[tuple[NDArray[np.int64], int, int]], start_S: Integers, limit: int
) -> Integers:
    """The placements of a layer that are worth a place in the pool.

    spans: placement [S], first sample and number of samples that it was in force for, over all policies;
    start_S: [S], always in, first;  limit: the most, start included. Equal up to the order of slots counts
    as different: slots are what moves. Half of the places go to those that were in force longest, the others
    to those that came first: where load changes fast, plans are short-lived.   Returns [X, S] int64.
    """
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 placement")
    span_of: dict[bytes, list[int]] = {}
    slots_of = {start_S.tobytes(): start_S}
    for slots_S, first, number in spans:
        key = slots_S.tobytes()
        slots_of.setdefault(key, slots_S)
        span = span_of.setdefault(key, [first, 0])
        span[0], span[1] = min(span[0], first), span[1] + number
    span_of.pop(start_S.tobytes(), None)
    longest = sorted(span_of, key=lambda key: (-span_of[key][1], span_of[key][0]))
    chosen = longest[: limit // 2]
    earliest = sorted(longest[limit // 2 :], key=lambda key: span_of[key][0])
    keys = [start_S.tobytes(), *chosen, *earliest[: max(limit - 1 - len(chosen), 0)]]
    return np.stack([slots_of[key] for key in keys[:limit]])


def _checked(
    pool: NDArray[np.int64], time_WX: ArrayLike, move_XX: ArrayLike, start: int
) -> tuple[Floats, Floats]:
    """Times and move costs as float64, checked."""
    time, move = np.asarray(time_WX, np.float64), np.asarray(move_XX, np.float64)
    if pool.ndim != 2 or len(pool) == 0:
        raise ValueError(f"pool_XS has shape {pool.shape}; expected [X, S] with at least one placement")
    size = len(pool)
    if time.ndim != 2 or len(time) == 0 or time.shape[1] != size or move.shape != (size, size):
        raise ValueError(
            f"{size} placements, time_WX of shape {time.shape} and move_cost_XX of {move.shape}; expected "
            f"[W, {size}] and [{size}, {size}]"
        )
    for name, array in (("time_WX", time), ("move_cost_XX", move)):
        bad = ~((array >= 0) & np.isfinite(array))
        if bad.any():
            where = np.argwhere(bad)[0].tolist()
            raise ValueError(f"{name}{where}={array[tuple(where)]} must be finite and 0 s or more")
    if not 0 <= start < size:
        raise ValueError(f"start={start} must be 0 to {size - 1}, one of the pool")
    return time, move
