"""Placement: which physical slot holds which logical expert, and the default split of rows over slots.

    rank 0          rank 1              P = 2, slots of a rank contiguous, as many on every rank
    [0 1 2 | 3 -1]  [3 4 5 | 0 2]       homes | spare slots: replicas of experts at home elsewhere, -1 = empty

An expert's *home* owns its weights and their optimizer state, and never moves in training. Any other slot of
it is a *replica*, which borrows the weights for one forward. So a change of the replicas moves nothing.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moe.topology import check_experts

# (counts_PE, slot_to_expert_S) -> rows_PS, all [.., ..] int64 on the host
Split = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Slots of one EP group, checked.

    slot_to_expert_S: [S] int64, slots contiguous by rank, -1 = empty;  home_slot_E: [E] int64, the slot that
    owns each expert;  num_ranks: P, which S is a multiple of;  version: the plan's number.
    Then is_home_S: [S] bool;  replica_slots: ascending slots that are neither homes nor empty;
    fingerprint: a number that ranks compare, different for different placements (but for one in 2^32).
    Raises ValueError, naming slot, rank and expert.
    """

    slot_to_expert_S: np.ndarray
    home_slot_E: np.ndarray
    num_ranks: int
    version: int = 0
    is_home_S: np.ndarray = field(init=False)
    replica_slots: np.ndarray = field(init=False)
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        slots, home = self.slot_to_expert_S, self.home_slot_E
        outside = np.flatnonzero((home < 0) | (home >= slots.shape[0]))
        if outside.size:
            raise ValueError(
                f"home_slot of expert {outside[0]} is {home[outside[0]]}, out of 0..{slots.shape[0] - 1}"
            )
        wrong = np.flatnonzero(slots[home] != np.arange(home.shape[0]))
        if wrong.size:
            slot = home[wrong[0]]
            raise ValueError(f"slot {slot} is to be the home of expert {wrong[0]} and holds {slots[slot]}")
        is_home_S = np.zeros(slots.shape[0], dtype=np.bool_)
        is_home_S[home] = True
        object.__setattr__(self, "is_home_S", is_home_S)
        object.__setattr__(self, "replica_slots", np.flatnonzero((slots >= 0) & ~is_home_S))
        numbers = np.concatenate([slots, home, [self.version, self.num_ranks]]).astype(np.int64)
        object.__setattr__(self, "fingerprint", zlib.crc32(numbers.tobytes()))

    @property
    def slots_per_rank(self) -> int:
        """Slots of every rank, empty ones included."""
        return self.slot_to_expert_S.shape[0] // self.num_ranks

    @property
    def home_rank_E(self) -> np.ndarray:
        """[E] int64, the rank that owns each expert."""
        return self.home_slot_E // self.slots_per_rank

    def home_slots(self, rank: int) -> np.ndarray:
        """Slots of the group that are homes on this rank, ascending int64."""
        return self.home_columns(rank) + rank * self.slots_per_rank

    def home_columns(self, rank: int) -> np.ndarray:
        """The same by their numbers on the rank, from 0."""
        first, local = rank * self.slots_per_rank, self.slots_per_rank
        return np.flatnonzero(self.is_home_S[first : first + local])

    def with_replicas(self, slot_to_expert_S: np.ndarray, version: int | None = None) -> "Placement":
        """The same homes with other replicas; the number of slots may change.

        A rank's homes keep their order; each stands in the first slot on its rank that holds it. version:
        None = one more than this one's.   Raises ValueError where a home is missing or out of order.
        """
        num_experts = self.home_slot_E.shape[0]
        slots = check_slots(slot_to_expert_S, num_experts, self.num_ranks)
        local = slots.shape[0] // self.num_ranks
        home_slot_E = np.empty(num_experts, dtype=np.int64)
        for rank in range(self.num_ranks):
            on_rank = slots[rank * local : (rank + 1) * local]
            experts = self.slot_to_expert_S[self.home_slots(rank)]
            for expert in experts.tolist():
                found = np.flatnonzero(on_rank == expert)
                if not found.size:
                    raise ValueError(
                        f"slots of rank {rank} are {on_rank.tolist()}: expert {expert}, which is at home "
                        "there, is missing; homes stay where they are, only replicas move"
                    )
                home_slot_E[expert] = rank * local + found[0]
            if (np.diff(home_slot_E[experts]) < 0).any():
                raise ValueError(
                    f"slots of rank {rank} are {on_rank.tolist()}: its homes {experts.tolist()} must keep "
                    "their order"
                )
        version = self.version + 1 if version is None else version
        return Placement(
            slot_to_expert_S=slots, home_slot_E=home_slot_E, num_ranks=self.num_ranks, version=version
        )


def make_placement(
    slot_to_expert_S: np.ndarray | None,
    num_experts: int,
    num_ranks: int,
    home_slot_E: np.ndarray | None = None,
    version: int = 0,
) -> Placement:
    """A placement from what is given.

    slot_to_expert_S: [S], None = homes only, in expert order;  home_slot_E: [E]; None = the one slot of each
    expert where each has one, else the first E/P slots of every rank.   Raises ValueError.

    >>> make_placement(np.array([0, 1, 2, 2, 3, 0]), 4, 2).home_slot_E.tolist()
    [0, 1, 3, 4]
    """
    if slot_to_expert_S is None:
        slot_to_expert_S = home_slots(num_experts, num_ranks)
    slots = check_slots(slot_to_expert_S, num_experts, num_ranks)
    if home_slot_E is None:
        home_slot_E = _usual_homes(slots, num_experts, num_ranks)
    home_slot_E = np.asarray(home_slot_E, dtype=np.int64)
    if home_slot_E.shape != (num_experts,):
        raise ValueError(f"home_slot has shape {home_slot_E.shape}, expected ({num_experts},): one an expert")
    return Placement(slot_to_expert_S=slots, home_slot_E=home_slot_E, num_ranks=num_ranks, version=version)


def _usual_homes(slots: np.ndarray, num_experts: int, num_ranks: int) -> np.ndarray:
    copies_E = np.bincount(slots[slots >= 0], minlength=num_experts)
    if (copies_E == 0).any():
        raise ValueError(
            f"expert {int(np.flatnonzero(copies_E == 0)[0])} stands in no slot; every expert has a home"
        )
    if (copies_E == 1).all():
        homes = np.flatnonzero(slots >= 0)
    else:
        local = slots.shape[0] // num_ranks
        homes = np.flatnonzero(np.arange(slots.shape[0]) % local < num_experts // num_ranks)
    experts = slots[homes]
    if not np.array_equal(np.sort(experts), np.arange(num_experts)):
        raise ValueError(
            f"the first {num_experts // num_ranks} slots of every rank hold {experts.tolist()}, not each of "
            f"the {num_experts} experts once: pass home_slot_E, the slot that owns each expert"
        )
    home_slot_E = np.empty(num_experts, dtype=np.int64)
    home_slot_E[experts] = homes
    return home_slot_E


def home_slots(num_experts: int, ep_size: int) -> np.ndarray:
    """Homes only: slot s holds expert s, contiguous by rank.   Returns slot_to_expert_S [E] int64."""
    check_experts(num_experts, ep_size)
    return np.arange(num_experts, dtype=np.int64)


def check_slots(slot_to_expert_S: np.ndarray, num_experts: int, num_ranks: int) -> np.ndarray:
    """The slots as int64, after checking their shape and range.

    slot_to_expert_S: [S], slots contiguous by rank, -1 = empty.   Raises ValueError, naming slot and expert.
    """
    given = np.asarray(slot_to_expert_S)
    if given.ndim != 1 or not given.shape[0] or given.shape[0] % num_ranks:
        raise ValueError(
            f"slot_to_expert has shape {given.shape}; expected [S] with S a multiple of ep_size={num_ranks}"
        )
    if given.dtype.kind not in "iu":
        raise ValueError(f"slot_to_expert is {given.dtype}; expected integers, -1 = an empty slot")
    slots = given.astype(np.int64)
    wrong = np.flatnonzero((slots < -1) | (slots >= num_experts))
    if wrong.size:
        raise ValueError(
            f"slot {wrong[0]} has expert {slots[wrong[0]]}, out of 0..{num_experts - 1} (-1 = an empty slot)"
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
    used = np.flatnonzero(slot_to_expert_S >= 0)
    expert_u = slot_to_expert_S[used]
    copies_E = np.bincount(expert_u, minlength=counts_PE.shape[1])
    homeless = np.flatnonzero((copies_E == 0) & counts_PE.any(axis=0))
    if homeless.size:
        expert = int(homeless[0])
        raise ValueError(
            f"expert {expert} has {int(counts_PE[:, expert].sum())} copies and no slot; give every expert a "
            "slot"
        )
    order = np.argsort(expert_u, kind="stable")
    first_E = np.cumsum(copies_E) - copies_E
    turn_u = np.empty_like(used)  # first, second... slot of its expert
    turn_u[order] = np.arange(used.shape[0]) - first_E[expert_u[order]]
    share_Pu, rest_Pu = np.divmod(counts_PE[:, expert_u], copies_E[expert_u])
    rows_PS = np.zeros((counts_PE.shape[0], slot_to_expert_S.shape[0]), dtype=np.int64)
    rows_PS[:, used] = share_Pu + (turn_u < rest_Pu)
    return rows_PS
