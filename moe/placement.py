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


def check_homes(slot_to_expert_S: np.ndarray, num_experts: int, ep_size: int) -> np.ndarray:
    """The placement as int64, after checking that it has one slot for every expert and as many for every
    rank.

    slot_to_expert_S: [S], slots contiguous by rank, -1 = empty.   Raises ValueError, naming slot and expert.
    """
    slots = np.asarray(slot_to_expert_S, dtype=np.int64)
    if slots.ndim != 1 or slots.shape[0] % ep_size:
        raise ValueError(
            f"slot_to_expert has shape {slots.shape}; expected [S] with S a multiple of ep_size={ep_size}"
        )
    wrong = np.flatnonzero((slots < -1) | (slots >= num_experts))
    if wrong.size:
        raise ValueError(
            f"slot {wrong[0]} has expert {slots[wrong[0]]}, out of 0..{num_experts - 1} (-1 = an empty slot)"
        )
    copies_E = np.bincount(slots[slots >= 0], minlength=num_experts)
    if (copies_E != 1).any():
        expert = int(np.flatnonzero(copies_E != 1)[0])
        raise ValueError(
            f"expert {expert} stands in {copies_E[expert]} slots; every expert has one, its home"
        )
    return slots


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
