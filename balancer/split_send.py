"""Kernel of split.py, phase 5: the rows of every slot -> the rows that each source rank sends to it.

A plain function over arrays, which split.py compiles; as it stands it is its twin. What a slot takes is
settled by split_kernels.py; here every source's copies of an expert are dealt to the expert's slots, first
on its own rank, then in its own node, then by the north-west corner: sources in order fill slots in order.
That is as local as those rows of the slots allow.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
from typing import NamedTuple

import numpy as np

ENTRIES = ("send_rows",)


class Rows(NamedTuple):
    """Where to write: rows_PS where rank is -1, else that rank's row_S and the columns_Ps of its slots."""

    rank: int
    rows_PS: np.ndarray
    row_S: np.ndarray
    columns_Ps: np.ndarray


class Slots(NamedTuple):
    """Slots with an expert, by expert: those of expert e are slot_X[first_E[e] : first_E[e + 1]], ascending,
    on the ranks rank_X."""

    first_E: np.ndarray
    slot_X: np.ndarray
    rank_X: np.ndarray


def group_by_expert(slot_to_expert_S, num_experts, num_ranks):
    """Counting sort of the slots by expert."""
    per_rank = slot_to_expert_S.shape[0] // num_ranks
    first_E = np.zeros(num_experts + 1, np.int64)
    for expert in slot_to_expert_S:
        if expert >= 0:
            first_E[expert + 1] += 1
    for expert in range(num_experts):
        first_E[expert + 1] += first_E[expert]
    next_E = first_E[:-1].copy()
    slot_X, rank_X = np.empty(first_E[-1], np.int64), np.empty(first_E[-1], np.int64)
    for rank in range(num_ranks):
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = slot_to_expert_S[slot]
            if expert >= 0:
                slot_X[next_E[expert]], rank_X[next_E[expert]] = slot, rank
                next_E[expert] += 1
    return Slots(first_E, slot_X, rank_X)


def send(out, source, slot, rows):
    """Note rows from a source rank to a slot."""
    if out.rank < 0:
        out.rows_PS[source, slot] += rows
        return
    if source == out.rank:
        out.row_S[slot] += rows
    local = slot - out.rank * out.columns_Ps.shape[1]
    if 0 <= local < out.columns_Ps.shape[1]:
        out.columns_Ps[source, local] += rows


def corner(out, source, source_end, place, place_end, left_P, left_S, slot_X):
    """North-west corner: sources in order fill slots in order, as far as both go.   Returns the rows sent."""
    sent = 0
    while source < source_end and place < place_end:
        slot = slot_X[place]
        rows = min(left_P[source], left_S[slot])
        if rows:
            send(out, source, slot, rows)
            left_P[source] -= rows
            left_S[slot] -= rows
            sent += rows
        if left_P[source] == 0:
            source += 1
        else:
            place += 1
    return sent


def send_single(counts_PE, slots, local, ranks_per_node, out):
    """The rows of experts with one slot.   Returns how many stay on their rank, and in their node."""
    num_sources, num_experts = counts_PE.shape
    expert_X, slot_X = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    singles, on_rank, on_node = 0, 0, 0
    for expert in range(num_experts):
        place = slots.first_E[expert]
        if slots.first_E[expert + 1] - place != 1:
            continue
        rank, slot = slots.rank_X[place], slots.slot_X[place]
        expert_X[singles], slot_X[singles] = expert, slot
        singles += 1
        on_rank += counts_PE[rank, expert] if local else 0
        if ranks_per_node:
            start = rank - rank % ranks_per_node
            on_node += counts_PE[start : start + ranks_per_node, expert].sum()
        if rank == out.rank:
            local_slot = slot - rank * out.columns_Ps.shape[1]
            for source in range(num_sources):
                out.columns_Ps[source, local_slot] = counts_PE[source, expert]
    for source in range(num_sources):
        if out.rank < 0 or source == out.rank:
            row_S = out.row_S if source == out.rank else out.rows_PS[source]
            for k in range(singles):
                row_S[slot_X[k]] = counts_PE[source, expert_X[k]]
    return on_rank, on_node


def send_shared(counts_PE, slots, expert, local, ranks_per_node, left_S, left_P, out):
    """The rows of an expert with several slots.   Returns how many stay on their rank, and in their node."""
    first, end = slots.first_E[expert], slots.first_E[expert + 1]
    left_P[:] = counts_PE[:, expert]
    on_rank = 0
    if local:
        for place in range(first, end):
            rank = slots.rank_X[place]
            on_rank += corner(out, rank, rank + 1, place, place + 1, left_P, left_S, slots.slot_X)
    on_node, place = on_rank, first
    while ranks_per_node and place < end:
        start = slots.rank_X[place] - slots.rank_X[place] % ranks_per_node
        place_end = place
        while place_end < end and slots.rank_X[place_end] < start + ranks_per_node:
            place_end += 1
        stop = start + ranks_per_node
        on_node += corner(out, start, stop, place, place_end, left_P, left_S, slots.slot_X)
        place = place_end
    corner(out, 0, counts_PE.shape[0], first, end, left_P, left_S, slots.slot_X)
    return on_rank, on_node


def send_rows(counts_PE, slot_to_expert_S, rows_S, num_ranks, local, ranks_per_node, out, off):
    """Phase 5.   Writes `out`, zeros so far, and off [2]: rows that leave their rank, their node.

    local: source p is rank p;  ranks_per_node: 0 = nodes count nothing.
    """
    slots = group_by_expert(slot_to_expert_S, counts_PE.shape[1], num_ranks)
    on_rank, on_node = send_single(counts_PE, slots, local, ranks_per_node, out)
    left_S, left_P = rows_S.copy(), np.empty(counts_PE.shape[0], np.int64)
    for expert in range(counts_PE.shape[1]):
        if slots.first_E[expert + 1] - slots.first_E[expert] > 1:
            same_rank, same_node = send_shared(
                counts_PE, slots, expert, local, ranks_per_node, left_S, left_P, out
            )
            on_rank += same_rank
            on_node += same_node
    off[0], off[1] = rows_S.sum() - on_rank, rows_S.sum() - on_node
