"""LPLB-like placements: which ranks share experts is a fixed pattern, which experts is chosen from the load.

A baseline beside our planner, for the exact split. After the description of DeepSeek's LPLB: each spare slot
of a rank is tied to one other rank and holds a replica of one of its experts, so that ranks and replicas form
a graph along which load can flow; and a linear program shares out the rows of each batch.

Like it: the cube of 8 ranks with its diagonals, and the hypercube for more; replicas of the heaviest experts;
an optimal split of each batch (ours is exact over integers, theirs the linear program's). Not like it: here
originals stay at home, there they are placed anew by EPLB first; the tie between slots and ranks is our
reading of the pattern (every edge of the graph once before one comes twice); no torus, and the ring, which it
does not offer, as the simplest graph that connects all ranks.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.packing import replicate
from balancer.placement_checks import home_slots

Integers = NDArray[np.int64]

KINDS = ("ring", "cube")
_CUBE = (1, 2, 4, 7)  # edges of a cube of 8 ranks along its three axes, and through its middle


def partners(kind: str, num_ranks: int, num_spare: int) -> Integers:
    """The rank whose experts each spare slot of each rank replicates.

    kind: "ring": that 1, 2, 3... further on, by slot;  "cube": neighbours in a cube of 8 ranks, diagonals
    included, or in a hypercube of 2, 4, 16, 32...  num_ranks: P;  num_spare: X spare slots of a rank.
    Returns partner_GX [P, X] int64. Raises ValueError for an unknown kind, or a cube whose number of ranks is
    not a power of 2.

    >>> partners("ring", 4, 2).tolist()
    [[1, 2], [2, 3], [3, 0], [0, 1]]
    >>> partners("cube", 4, 1).tolist()
    [[1], [3], [0], [2]]
    """
    rank_G1, slot_X = np.arange(num_ranks)[:, None], np.arange(num_spare)
    if kind == "ring":
        return (rank_G1 + 1 + slot_X % max(num_ranks - 1, 1)) % num_ranks
    if kind != "cube":
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    if num_ranks < 2 or num_ranks & (num_ranks - 1):
        below = 1 << max(num_ranks.bit_length() - 1, 1)
        raise ValueError(f"a cube of {num_ranks} ranks: use {below} or {2 * below} ranks, or the ring")
    edges = _CUBE if num_ranks == 8 else tuple(1 << axis for axis in range(num_ranks.bit_length() - 1))
    # an edge joins a rank of an even number of ones to one of an odd number: of the two ends of an edge
    # only one takes it, before edges come twice
    ones_G1 = np.array([[rank.bit_count()] for rank in range(num_ranks)])
    turn_X = 2 * slot_X + (0 if len(edges) % 2 else 2 * slot_X // len(edges))
    return rank_G1 ^ np.array(edges)[(ones_G1 + turn_X) % len(edges)]


def lplb_placement(load_LE: ArrayLike, num_slots: int, num_ranks: int, *, kind: str = "ring") -> Integers:
    """Homes, and in the spare slots the heaviest experts of the ranks that the pattern ties them to.

    load_LE: [L, E] counts or shares;  num_slots: S, a multiple of num_ranks, E or more;  num_ranks: P;  kind:
    of `partners`.   Returns [L, S] int64, -1 = empty: where the partner has no expert left that the rank
    does not hold. The first slot that is tied to a rank gets its heaviest expert, the next one the second
    heaviest, then from the heaviest on again. Raises ValueError for a bad load or sizes that do not fit.

    >>> lplb_placement([[1, 9, 5, 2]], 6, 2).tolist()
    [[0, 1, 2, 2, 3, 1]]
    """
    load_LE = np.asarray(load_LE)
    replicate(load_LE, load_LE.shape[-1] if load_LE.ndim else 1)  # for its checks of the load
    num_experts = load_LE.shape[-1]
    home_E = home_slots(num_experts, num_slots, num_ranks)
    local = num_slots // num_ranks
    owner_E = home_E // local
    slots_LS = np.full((len(load_LE), num_slots), -1, np.int64)
    slots_LS[:, home_E] = np.arange(num_experts)
    order_LE = np.argsort(-load_LE.astype(np.float64), axis=1, kind="stable")
    partner_GX = partners(kind, num_ranks, local)
    own_G = np.bincount(owner_E, minlength=num_ranks)
    for layer, slots_S in enumerate(slots_LS):
        heaviest = [order_LE[layer][owner_E[order_LE[layer]] == rank].tolist() for rank in range(num_ranks)]
        _fill(slots_S.reshape(num_ranks, local), own_G, partner_GX, heaviest)
    return slots_LS


def _fill(slots_Gs: Integers, own_G: Integers, partner_GX: Integers, heaviest: list[list[int]]) -> None:
    """Put replicas into the spare slots of one layer, in place, slot by slot over all ranks."""
    given = [0] * len(slots_Gs)  # replicas of each rank so far
    for spare in range(partner_GX.shape[1]):
        for rank, held_s in enumerate(slots_Gs):
            slot, partner = int(own_G[rank]) + spare, int(partner_GX[rank, spare])
            experts = heaviest[partner]
            if slot >= len(held_s) or not experts:
                continue
            turn = given[partner] % len(experts)
            wanted = [e for e in experts[turn:] + experts[:turn] if e not in held_s]
            if wanted:
                held_s[slot] = wanted[0]
                given[partner] += 1
