"""Relabelled: the strong baseline, what public planners reach with care and without new mathematics.

After `packing.rebalance_experts`, before a replay that compares policies. EPLB's greedy plan on the last
load; its ranks renamed so that the fewest experts travel (`moves.relabel`); and a layer changes only where
that is worth it. It looks at one load, shares rows evenly, and every slot is free: no homes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.metrics import balancedness
from balancer.moves import relabel
from balancer.packing import even_share_load, rebalance_experts

Integers = NDArray[np.int64]


def strong_baseline(
    load_LE: ArrayLike,
    current_LS: ArrayLike | None,
    num_ranks: int,
    *,
    num_slots: int | None = None,
    num_nodes: int = 1,
    num_groups: int = 0,
    hysteresis: float = 0.05,
) -> Integers:
    """The greedy placement with the fewest moves, in the layers that it improves enough.

    load_LE: [L, E] counts or shares, the last ones;  current_LS: [L, S] integers, placement in force, -1 =
    empty, None = there is none, and every layer is planned;  num_ranks: P;  num_slots: S, needed without
    current_LS;  num_nodes, num_groups: M and groups, as of `rebalance_experts`;  hysteresis: a layer changes
    where its balancedness with even shares, on this load, becomes more than 1 + this times what it is now;
    0.05, 0 = wherever it improves.

    Returns [L, S] int64; layers that stay are those of current_LS, a layer without load among them. Raises
    ValueError for a bad load, sizes that do not fit, or a negative hysteresis.

    >>> strong_baseline([[8, 2, 5, 1]], [[1, 0, 2, 3, 0, 2]], 2).tolist()
    [[1, 0, 2, 3, 0, 2]]
    >>> strong_baseline([[8, 2, 5, 1]], [[0, 2, 0, 2, 1, 3]], 2).tolist()
    [[0, 2, 1, 2, 0, 3]]
    """
    if not hysteresis >= 0:
        raise ValueError(f"hysteresis={hysteresis} must be 0 or more; 0.05 asks for 5 % better balance")
    if current_LS is None:
        if num_slots is None:
            raise ValueError("num_slots and current_LS are both None; say how many slots there are")
        return rebalance_experts(load_LE, num_slots, num_groups, num_nodes, num_ranks)[0]
    current = np.asarray(current_LS)
    now_L = balancedness(even_share_load(load_LE, current, num_ranks))
    current = current.astype(np.int64)
    if num_slots not in (None, current.shape[1]):
        raise ValueError(f"num_slots={num_slots} but current_LS has {current.shape[1]} slots; drop num_slots")
    planned = rebalance_experts(load_LE, current.shape[1], num_groups, num_nodes, num_ranks)[0]
    # a plan that took no notice of nodes may be spread over them in any way
    nodes = num_nodes if num_groups and num_groups % num_nodes == 0 else 1
    planned = relabel(current, planned, num_ranks, nodes)
    then_L = balancedness(even_share_load(load_LE, planned, num_ranks))
    better_L = then_L > now_L * (1 + hysteresis)  # never so without load: NaN
    return np.where(better_L[:, None], planned, current)
