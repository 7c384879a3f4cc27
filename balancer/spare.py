"""Spare slots: a simple rule that fills them with replicas, for the exact split.

Stands before the split: homes stay where they are, replicas go where the exact split can use them. The
planner of placements does better over time and over uncertain loads; this is its floor, and a fair start.

What bounds the peak is a set X of ranks whose experts have slots in X only. So as long as there is such a
set, the heaviest expert that lives inside X only gets a replica on the least loaded rank outside.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from balancer.split import balanced_peak

Integers = NDArray[np.int64]


def fill_spare_slots(
    load_E: Integers, home_slot_E: Integers, slots_per_rank: int, num_ranks: int
) -> Integers:
    """Placement with every expert in its home slot and replicas in the other slots.

    load_E: [E] integers, copies of each expert;  home_slot_E: [E] integers, its home among the slots;
    slots_per_rank: s;  num_ranks: P.   Returns slot_to_expert_S [P * s] int64. An expert has at most one slot
    a rank; a slot that no expert may take stays empty, -1, with a warning. Once the peak is as low as an even
    load, and where the load is zero, spare slots go to the experts with the most load for each slot of
    theirs, then the fewest slots. Raises ValueError for homes that are not one slot each, and for what is no
    load.

    >>> fill_spare_slots(np.array([8, 1, 2]), np.array([0, 2, 4]), 2, 3).tolist()
    [0, 2, 1, 0, 2, 0]
    """
    load_E, home_slot_E = np.asarray(load_E), np.asarray(home_slot_E)
    slot_to_expert_S = _homes_alone(load_E, home_slot_E, slots_per_rank, num_ranks)
    home_E = home_slot_E // slots_per_rank
    expert_on_EP = home_E[:, None] == np.arange(num_ranks)
    while True:
        rows_S, _, cut_P = balanced_peak(load_E, slot_to_expert_S, num_ranks)
        slot_PS = slot_to_expert_S.reshape(num_ranks, slots_per_rank)
        free_P = (slot_PS < 0).sum(axis=1)
        rank_load_P = rows_S.reshape(slot_PS.shape).sum(axis=1)
        found = _out_of_the_cut(load_E, expert_on_EP, cut_P, free_P, rank_load_P)
        found = found or _most_load_for_a_slot(load_E, home_E, expert_on_EP, free_P, rank_load_P)
        if found is None:
            if free_P.any():
                warnings.warn(
                    f"{free_P.sum()} spare slots stay empty: every expert has a slot on their ranks already; "
                    "fewer slots a rank would do",
                    stacklevel=2,
                )
            return slot_to_expert_S
        expert, rank = found
        slot_PS[rank, int((slot_PS[rank] < 0).argmax())] = expert
        expert_on_EP[expert, rank] = True


def _homes_alone(load_E: Integers, home_slot_E: Integers, slots_per_rank: int, num_ranks: int) -> Integers:
    """The placement without replicas, checked."""
    num_experts = load_E.shape[0]
    if slots_per_rank < 1 or num_ranks < 1:
        raise ValueError(f"slots_per_rank={slots_per_rank} and num_ranks={num_ranks} must be at least 1")
    if num_experts == 0:
        raise ValueError("load_E is empty; give the load of at least one expert")
    num_slots = num_ranks * slots_per_rank
    if num_experts > num_slots:
        least = -(-num_experts // num_ranks)
        raise ValueError(
            f"{num_experts} experts need more than {num_slots} slots; use slots_per_rank={least} or more"
        )
    if home_slot_E.shape != load_E.shape or home_slot_E.dtype.kind not in "iu":
        raise ValueError(
            f"home_slot_E is {home_slot_E.dtype} {home_slot_E.shape}; "
            f"expected a slot for each of {num_experts} experts"
        )
    if home_slot_E.min() < 0 or home_slot_E.max() >= num_slots:
        low, high = home_slot_E.min(), home_slot_E.max()
        raise ValueError(f"home_slot_E goes from {low} to {high}; use 0..{num_slots - 1}")
    slot_to_expert_S = np.full(num_slots, -1, dtype=np.int64)
    slot_to_expert_S[home_slot_E] = np.arange(num_experts)
    for expert, slot in enumerate(home_slot_E.tolist()):
        other = int(slot_to_expert_S[slot])
        if other != expert:
            raise ValueError(f"slot {slot} is the home of experts {expert} and {other}; give one each")
    return slot_to_expert_S


def _out_of_the_cut(
    load_E: Integers,
    expert_on_EP: NDArray[np.bool_],
    cut_P: NDArray[np.bool_],
    free_P: Integers,
    rank_load_P: Integers,
) -> tuple[int, int] | None:
    """The heaviest expert inside the cut only, and the least loaded rank outside with a free slot."""
    (outside,) = np.nonzero(~cut_P & (free_P > 0))
    inside_E = (load_E > 0) & ~expert_on_EP[:, ~cut_P].any(axis=1)
    if not outside.size or not inside_E.any():
        return None
    return int(np.where(inside_E, load_E, -1).argmax()), int(outside[rank_load_P[outside].argmin()])


def _most_load_for_a_slot(
    load_E: Integers,
    home_E: Integers,
    expert_on_EP: NDArray[np.bool_],
    free_P: Integers,
    rank_load_P: Integers,
) -> tuple[int, int] | None:
    """The expert with the most load for each of its slots, and the least loaded rank that has room for it.

    Of equal ranks the one with the most free slots, then the next after the home: else the last free slots
    would be on the ranks that the last experts are on already.
    """
    slots_E = expert_on_EP.sum(axis=1)
    room_EP = ~expert_on_EP & (free_P > 0)
    order_E = np.lexsort((slots_E, -load_E / slots_E, ~room_EP.any(axis=1)))
    expert = int(order_E[0])
    (ranks,) = np.nonzero(room_EP[expert])
    if not ranks.size:
        return None
    after_home = (ranks - home_E[expert]) % free_P.shape[0]
    return expert, int(ranks[np.lexsort((after_home, -free_P[ranks], rank_load_P[ranks]))[0]])
