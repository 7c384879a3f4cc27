"""Placement checks: what a placement of all layers must be like, and what changes from one to the next.

Under `balancer/plan.py`, and under planners and evaluators that handle placements without a plan.
"""

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.split_checks import check_slots

Integers = NDArray[np.int64]


class Move(NamedTuple):
    """A slot that receives an expert which its rank does not hold; replaced: expert there now, -1 = empty."""

    layer: int
    slot: int
    rank: int
    expert: int
    replaced: int


def home_slots(num_experts: int, num_slots: int, num_ranks: int) -> Integers:
    """The usual homes: experts in order over the ranks, each rank's in its first slots.

    num_experts: E;  num_slots: S, a multiple of num_ranks, E or more;  num_ranks: P. The first E mod P ranks
    own ceil(E/P) experts, the others floor(E/P).   Returns home_slot_E [E] int64. Raises ValueError with the
    nearest numbers of slots that fit.

    >>> home_slots(5, 8, 2).tolist()
    [0, 1, 2, 4, 5]
    """
    check_slots(num_slots, num_ranks)
    if not 1 <= num_experts <= num_slots:
        least = -(-num_experts // num_ranks) * num_ranks
        raise ValueError(
            f"num_experts={num_experts} must be 1 to num_slots={num_slots}; use {least} slots or more"
        )
    per_rank, more = divmod(num_experts, num_ranks)
    owned_G = per_rank + (np.arange(num_ranks) < more)
    first_G = np.cumsum(owned_G) - owned_G
    rank_E = np.repeat(np.arange(num_ranks), owned_G)
    return rank_E * (num_slots // num_ranks) + np.arange(num_experts) - first_G[rank_E]


def list_moves(before_LS: ArrayLike | None, after_LS: ArrayLike, num_ranks: int) -> tuple[Move, ...]:
    """The slots that must receive an expert which their rank does not hold now, by layer, then slot.

    before_LS, after_LS: [L, S] integers, expert of each slot now and then, -1 = empty; before None = every
    slot is empty now;  num_ranks: P, a divisor of S.   Returns as many moves as `metrics.moved_slots` counts.
    Raises ValueError for arrays that are no placements or of different shapes.

    >>> list_moves([[0, 1, 2, -1]], [[1, 0, 2, 0]], 2)
    (Move(layer=0, slot=3, rank=1, expert=0, replaced=-1),)
    """
    after = slot_table("after", after_LS)
    before = np.full_like(after, -1) if before_LS is None else slot_table("before", before_LS)
    if before.shape != after.shape:
        raise ValueError(f"before is {before.shape} and after {after.shape}; give the same layers and slots")
    check_slots(after.shape[1], num_ranks)
    local = after.shape[1] // num_ranks
    held_LG1s = before.reshape(len(before), num_ranks, 1, local)
    wanted_LGs1 = after.reshape(len(after), num_ranks, local, 1)
    new_LGs = (wanted_LGs1[..., 0] >= 0) & ~(wanted_LGs1 == held_LG1s).any(axis=3)
    layer_n, slot_n = np.nonzero(new_LGs.reshape(after.shape))
    columns = (layer_n, slot_n, slot_n // local, after[layer_n, slot_n], before[layer_n, slot_n])
    return tuple(map(Move._make, zip(*(column.tolist() for column in columns))))


def check_placement(
    slot_to_expert_LS: ArrayLike,
    *,
    num_experts: int,
    num_ranks: int,
    home_slot_LE: ArrayLike | None = None,
    distinct: bool = True,
) -> Integers:
    """Raise ValueError unless a placement can be run, naming layer, rank and expert; return it as int64.

    slot_to_expert_LS: [L, S] integers, -1 = empty;  num_experts: E;  num_ranks: P, a divisor of S;
    home_slot_LE: [L, E] integers, slots that must hold their expert, None = no homes;  distinct: refuse an
    expert twice on one rank while another rank has none of it (with more slots of it than ranks it is
    unavoidable).   Returns [L, S] int64. Refused: experts out of range, an expert without a slot, moved
    homes, over-claimed replicas.
    """
    slots = slot_table("slot_to_expert_LS", slot_to_expert_LS)
    check_slots(slots.shape[1], num_ranks)
    local = slots.shape[1] // num_ranks
    unknown = (slots < -1) | (slots >= num_experts)
    if unknown.any():
        layer, slot = first_true(unknown)
        raise ValueError(
            f"layer {layer}, rank {slot // local}: slot {slot} has expert {slots[layer, slot]}, out of "
            f"0..{num_experts - 1} (-1 = empty)"
        )
    sorted_LGs = np.sort(slots.reshape(len(slots), num_ranks, local), axis=2)
    again_LGs = np.zeros(sorted_LGs.shape, np.bool_)
    again_LGs[..., 1:] = (sorted_LGs[..., 1:] == sorted_LGs[..., :-1]) & (sorted_LGs[..., 1:] >= 0)
    layer_n, rank_n, index_n = np.nonzero(~again_LGs & (sorted_LGs >= 0))
    expert_n = sorted_LGs[layer_n, rank_n, index_n]
    counts = np.bincount(layer_n * num_experts + expert_n, minlength=len(slots) * num_experts)
    ranks_LE = counts.reshape(len(slots), num_experts)
    if (ranks_LE == 0).any():
        layer, expert = first_true(ranks_LE == 0)
        raise ValueError(f"layer {layer}: expert {expert} has no slot on any rank; every expert needs one")
    if home_slot_LE is not None:
        homes = slot_table("home_slot_LE", home_slot_LE)
        if homes.shape[1] != num_experts:
            raise ValueError(f"home_slot_LE has {homes.shape[1]} experts instead of {num_experts}")
        check_homes(slots, homes)
    if distinct:
        _check_distinct(slots.reshape(sorted_LGs.shape), sorted_LGs, again_LGs, ranks_LE)
    return slots


def without_doubles(slots_LS: Integers, num_ranks: int) -> Integers:
    """The placement with slots emptied where an expert stands again on a rank while another has none of it.

    slots_LS: [L, S] int64;  num_ranks: P.   Returns [L, S] int64; the first slot on the rank stays, which is
    the home where homes come first.
    """
    slots_LGs = slots_LS.reshape(len(slots_LS), num_ranks, -1).copy()
    for slot in range(1, slots_LGs.shape[2]):
        mine_LG1 = slots_LGs[:, :, slot, None]
        again_LG = (mine_LG1 >= 0) & (slots_LGs[:, :, :slot] == mine_LG1)
        for layer, rank in np.argwhere(again_LG.any(axis=2)).tolist():
            held_Gs = slots_LGs[layer] == slots_LGs[layer, rank, slot]
            if not held_Gs.any(axis=1).all():
                slots_LGs[layer, rank, slot] = -1
    return slots_LGs.reshape(slots_LS.shape)


# ---- pieces ---------------------------------------------------------------------------------------------


def first_true(wrong: NDArray[np.bool_]) -> list[int]:
    """Where the first True is."""
    return cast("list[int]", np.argwhere(wrong)[0].tolist())


def slot_table(name: str, given: ArrayLike) -> Integers:
    """The array as [.., ..] int64."""
    array = np.asarray(given)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; expected integers with two axes, a row a layer"
        )
    return np.array(array, np.int64, order="C")


def check_homes(slots_LS: Integers, home_slot_LE: Integers, place: str = "the placement") -> None:
    """Raise ValueError unless every home slot holds its expert. place: what an error calls the slots."""
    num_layers, num_slots = slots_LS.shape
    if len(home_slot_LE) != num_layers:
        raise ValueError(f"home_slot_LE has {len(home_slot_LE)} layers instead of {num_layers}")
    outside = (home_slot_LE < 0) | (home_slot_LE >= num_slots)
    if outside.any():
        layer, expert = first_true(outside)
        slot = home_slot_LE[layer, expert]
        raise ValueError(f"layer {layer}: home of expert {expert} is slot {slot}, out of 0..{num_slots - 1}")
    held_LE: Integers = np.take_along_axis(slots_LS, home_slot_LE, axis=1)
    moved = np.asarray(held_LE != np.arange(home_slot_LE.shape[1]), np.bool_)
    if moved.any():
        layer, expert = first_true(moved)
        raise ValueError(
            f"layer {layer}: slot {home_slot_LE[layer, expert]} is the home of expert {expert} and holds "
            f"{held_LE[layer, expert]} in {place}; homes stay where they are, only replicas move"
        )


def _check_distinct(
    slots_LGs: Integers, sorted_LGs: Integers, again_LGs: NDArray[np.bool_], ranks_LE: Integers
) -> None:
    """Raise ValueError where an expert stands twice on a rank and on another not at all."""
    num_ranks = slots_LGs.shape[1]
    layer_n, rank_n, index_n = np.nonzero(again_LGs)
    expert_n = sorted_LGs[layer_n, rank_n, index_n]
    avoidable = np.flatnonzero(ranks_LE[layer_n, expert_n] < num_ranks)
    if avoidable.size:
        layer, rank, expert = (int(where[avoidable[0]]) for where in (layer_n, rank_n, expert_n))
        without = int((slots_LGs[layer] != expert).all(axis=1).argmax())
        raise ValueError(
            f"layer {layer}, rank {rank}: expert {expert} stands there twice and rank {without} has none "
            "of it; an over-claimed replica balances nothing, put it there"
        )
