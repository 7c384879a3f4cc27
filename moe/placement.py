"""Placement: which physical slot holds which logical expert, and the default split of rows over slots."""

from collections.abc import Callable

import numpy as np

from moe.topology import check_experts

# (counts_PE, slot_to_expert_S) -> rows_PS, all [.., ..] int64 on the host
Split = Callable[[np.ndarray, np.ndarray], np.ndarray]


def home_slots(num_experts: int, ep_size: int) -> np.ndarray:
    """Homes only: slot s holds expert s, contiguous by rank.   Returns slot_to_expert_S [E] int64."""
    check_experts(num_experts, ep_size)
    return np.arange(num_experts, dtype=np.int64)


def even_split(counts_PE: np.ndarray, slot_to_expert_S: np.ndarray) -> np.ndarray:
    """Share the rows of every source rank evenly among the slots of their expert; earlier slots get the rest.

    counts_PE: [P, E] int64, copies of each expert on each rank;  slot_to_expert_S: [S] int64, -1 = empty
    slot.
    Returns rows_PS [P, S] int64; over the slots of an expert they sum to counts_PE.
    Raises ValueError for an expert that has copies and no slot.

    >>> even_split(np.array([[5, 2]]), np.array([0, 1, 0, -1])).tolist()
    [[3, 2, 2, 0]]
    """
    rows_PS = np.zeros((counts_PE.shape[0], slot_to_expert_S.shape[0]), dtype=np.int64)
    for expert in range(counts_PE.shape[1]):
        slots = np.flatnonzero(slot_to_expert_S == expert)
        copies_P = counts_PE[:, expert]
        if slots.size == 0:
            if copies_P.any():
                raise ValueError(
                    f"expert {expert} has {int(copies_P.sum())} copies and no slot; give every expert a slot"
                )
            continue
        share_P, rest_P = np.divmod(copies_P, slots.size)
        rows_PS[:, slots] = share_P[:, None] + (np.arange(slots.size) < rest_P[:, None])
    return rows_PS
