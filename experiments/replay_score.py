"""What a placement gives on a sample: load of each rank, its time by the cost model, and their lower bounds.

Under `replay_run.py`, which walks a trace. Shares are "even", every slot of an expert the same, or "exact",
the split with the smallest peak that the placement allows.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bound import peak_bound
from balancer.cost import CostModel
from balancer.packing import even_share_load
from balancer.policies import Setup
from balancer.split import balanced_peak

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class RankLoad(NamedTuple):
    """load_LG: [L, P] float64 rows of each rank;  active_LG: [L, P] int64, its slots that have rows."""

    load_LG: Floats
    active_LG: Integers


def rank_loads(counts_LE: Integers, slots_LS: Integers, shares: str, num_ranks: int) -> RankLoad:
    """The load of each rank under a placement.

    counts_LE: [L, E] int64;  slots_LS: [L, S] int64, -1 = empty;  shares: "even" or "exact". A row of both is
    a layer, or a sample of one layer: all are alike here. Raises ValueError as `even_share_load` and
    `balanced_peak` do.
    """
    rows_LS = np.empty(slots_LS.shape, np.int64)
    if shares == "even":
        load_LG = even_share_load(counts_LE, slots_LS, num_ranks)
        rows_LS[:] = np.take_along_axis(counts_LE, slots_LS.clip(0), axis=1)
        rows_LS[slots_LS < 0] = 0
    else:
        for rows_S, counts_E, slots_S in zip(rows_LS, counts_LE, slots_LS):
            rows_S[:] = balanced_peak(counts_E, slots_S, num_ranks).rows_S
        load_LG = rows_LS.reshape(len(rows_LS), num_ranks, -1).sum(axis=2).astype(np.float64)
    active_LG = (rows_LS > 0).reshape(len(rows_LS), num_ranks, -1).sum(axis=2, dtype=np.int64)
    return RankLoad(load_LG, active_LG)


def layer_times(
    setup: Setup, load_XG: Floats, active_XG: NDArray[Any], replica_XG: Floats | None, *, solved: bool
) -> Floats:
    """Seconds of each layer in one step, [X] float64.

    load_XG, active_XG: [X, P] as in `RankLoad`, X any layers and samples;  replica_XG: [X, P] bytes for
    replicas, None = none;  solved: the exact split is solved for every batch.
    """
    cost = setup.cost
    node = cost.exchange_bytes(load_XG, setup.num_nodes) if setup.num_nodes > 1 else None
    return cost.layer_time_s(
        load_XG, active_XG, cost.exchange_bytes(load_XG), replica_XG, node_bytes_LG=node, solved=solved
    )


def replica_bytes(setup: Setup, slots_LS: Integers, *, free_slots: bool) -> Floats:
    """Bytes of each port for replicas in a step, [L, P]; free slots: an expert's first slot is its home."""
    homes = None if free_slots or not setup.fixed_homes else setup.home_slot_LE
    return setup.cost.replica_bytes_LG(slots_LS, setup.num_ranks, homes)


def time_floors(setup: Setup, counts_WLE: Integers) -> Floats:
    """Seconds below which no placement gets a layer, [W, L] float64: even load, no replica traffic.

    counts_WLE: [W, L, E] int64. The slowest rank has no less than the mean load, and the mean number of
    experts to read; the exchange is convex in the load.
    """
    num_ranks, counts_XE = setup.num_ranks, counts_WLE.reshape(-1, counts_WLE.shape[2])
    load_XG = np.repeat(counts_XE.sum(axis=1)[:, None] / num_ranks, num_ranks, axis=1)
    active_XG = np.repeat((counts_XE > 0).sum(axis=1)[:, None] / num_ranks, num_ranks, axis=1)
    return layer_times(setup, load_XG, active_XG, None, solved=False).reshape(counts_WLE.shape[:2])


def peak_bounds(setup: Setup, counts_WLE: Integers, shares: str, *, free_slots: bool) -> Floats:
    """Loads below which no placement gets the hottest rank, [W, L] float64 copies.

    counts_WLE: [W, L, E] int64;  shares, free_slots: as the policy whose placements are compared.
    """
    counts_XE = counts_WLE.reshape(-1, counts_WLE.shape[2])
    home_E = None if free_slots or not setup.fixed_homes else setup.home_slot_E
    bound_X = peak_bound(counts_XE, setup.num_slots, setup.num_ranks, shares=shares, home_slot_E=home_E)
    return bound_X.reshape(counts_WLE.shape[:2])


def move_seconds(cost: CostModel, moves: NDArray[np.int64] | int) -> float:
    """Seconds of so many moves in all."""
    return float(cost.move_s(int(np.sum(moves))))
