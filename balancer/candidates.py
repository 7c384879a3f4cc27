"""Candidates: placements that might be next, judged by scenarios that no search saw; the best as a Plan.

Under `balancer/planning.py` (plans in one call) and `balancer/placement.py` (the controller): what a plan
must keep to, the choice between the present placement and others, and the record of the one chosen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bound import Sizes, home_experts, peak_bound, sizes_of
from balancer.connect import connected_placement
from balancer.metrics import moved_slots
from balancer.moves import keep_slots, relabel
from balancer.packing import even_share_load
from balancer.placement_checks import check_placement, home_slots, list_moves, without_doubles
from balancer.plan import Plan
from balancer.search import layer_peaks, risk_of, search_placement

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# least-move relabelling grows with the third power of the ranks
_MOST_RELABELLED = 256


class Constraints(NamedTuple):
    """What placements must keep to, as keyword arguments of the planners."""

    num_ranks: int
    num_slots: int
    num_nodes: int
    num_groups: int
    home_slot_E: Integers | None
    speed_G: Floats | None
    most_experts_G: Integers | None

    def shared(self) -> dict[str, Any]:
        """Those that `search_placement` and `connected_placement` both take."""
        names = ("num_nodes", "num_groups", "home_slot_E", "speed_G", "most_experts_G")
        return {name: getattr(self, name) for name in names}


def constraints_of(
    shape_LE: tuple[int, ...],
    num_ranks: int,
    num_slots: int,
    num_nodes: int,
    num_groups: int,
    current: Integers | None,
    fixed_homes: bool,
    speed_G: Sequence[float] | Floats | None,
    most_experts_G: ArrayLike | None,
) -> Constraints:
    """The constraints, checked against each other and the present placement."""
    num_layers, num_experts = shape_LE
    for name, number in (("num_ranks", num_ranks), ("num_slots", num_slots), ("num_nodes", num_nodes)):
        if not hasattr(number, "__index__"):
            raise ValueError(f"{name}={number!r} must be an integer")
    sizes = sizes_of(num_experts, num_slots, num_ranks, num_nodes, num_groups, speed_G)
    if current is not None:
        if current.shape != (num_layers, num_slots):
            raise ValueError(
                f"current_LS has shape {current.shape}; expected [L, S] = [{num_layers}, {num_slots}]"
            )
        check_placement(current, num_experts=num_experts, num_ranks=num_ranks, distinct=False)
        _check_memory(current, num_ranks, most_experts_G)
        _check_nodes(current, sizes)
    homes = present_homes(current, num_experts, num_slots, num_ranks) if fixed_homes else None
    home_experts(homes, sizes)
    return Constraints(
        num_ranks=num_ranks,
        num_slots=num_slots,
        num_nodes=num_nodes,
        num_groups=num_groups,
        home_slot_E=homes,
        speed_G=None if speed_G is None else np.asarray(speed_G, np.float64),
        most_experts_G=None if most_experts_G is None else np.asarray(most_experts_G),
    )


def _check_nodes(current: Integers, sizes: Sizes) -> None:
    """Raise ValueError unless experts, and with them groups, are on one node each, where they must be."""
    if sizes.nodes == 1:
        return
    node_S = np.arange(sizes.slots) // (sizes.slots // sizes.nodes)
    for layer, slots_S in enumerate(current):
        node_E = np.full(sizes.experts, -1, np.int64)
        filled = slots_S >= 0
        node_E[slots_S[filled]] = node_S[filled]
        apart = filled & (node_E[slots_S] != node_S)
        if apart.any():
            slot = int(apart.argmax())
            raise ValueError(
                f"layer {layer} has expert {slots_S[slot]} on nodes {node_S[slot]} and "
                f"{node_E[slots_S[slot]]}; with groups it stays on one: start from default_placement with "
                "num_nodes and num_groups, or give num_groups=0"
            )
        split = (node_E.reshape(sizes.groups, -1) != node_E.reshape(sizes.groups, -1)[:, :1]).any(axis=1)
        if split.any():
            raise ValueError(
                f"layer {layer} has the experts of group {int(split.argmax())} on several nodes; put them on "
                "one, or give num_groups=0"
            )


def present_homes(current: Integers | None, num_experts: int, num_slots: int, num_ranks: int) -> Integers:
    """The usual homes; ValueError where the present placement has other experts there."""
    homes_E = home_slots(num_experts, num_slots, num_ranks)
    if current is not None and (current[:, homes_E] != np.arange(num_experts)).any():
        layer, expert = np.argwhere(current[:, homes_E] != np.arange(num_experts))[0].tolist()
        raise ValueError(
            f"layer {layer} has expert {current[layer, homes_E[expert]]} in slot {homes_E[expert]}, the home "
            f"of expert {expert}; with fixed_homes every rank's first slots are its homes, in order"
        )
    return homes_E


class Judged(NamedTuple):
    """Objective over the scenarios kept from the search, 1 = even, of the placement at first and that taken,
    [L];  moved_L: slots that receive an expert;  fresh: there was no placement at first."""

    before_L: Floats
    after_L: Floats
    moved_L: Integers
    fresh: bool


def best_of(
    search_KLE: Integers,
    judge_KLE: Integers,
    current: Integers | None,
    limits: Constraints,
    price: Floats,
    beta: float,
    tail: float,
    most_scores: int,
    compiled: bool,
    *,
    anew: bool = True,
    steepest: bool = False,
    depth: int = 0,
    tolerance: float = 1e-3,
    weight_K: Floats | None = None,
    fetch_price: Floats | float = 0.0,
) -> tuple[Integers, Judged]:
    """The best placement of each layer, of: the present one, the present one repaired, and with `anew` one
    made from nothing (its ranks renamed for few moves, where slots are free), and that one searched on; by
    scenarios that no search saw, the price of moves, and that of fetching.

    search_KLE, judge_KLE: [K, L, E] int64 copies, of the search with weight_K [K], and to judge by, alike;
    current: [L, S], None = none yet;  price: [L] or a number, of a slot that gets another expert, and
    fetch_price, in peak / even load;  the rest as `search_placement`.   Returns slots_LS [L, S] and `Judged`.
    """
    options: dict[str, Any] = {
        "weight_K": weight_K,
        "beta": beta,
        "tail": tail,
        "most_scores": most_scores,
        "compiled": compiled,
    }
    options |= limits.shared() | {"tolerance": tolerance, "fetch_price": fetch_price}
    candidates: list[Integers] = []
    if current is not None:
        current = without_doubles(current, limits.num_ranks)
        repaired = search_placement(
            search_KLE, current, limits.num_ranks, price=price, steepest=steepest, depth=depth, **options
        )
        candidates = [current, repaired.slots_LS]
    if anew or current is None:
        candidates += _made_anew(search_KLE, current, limits, options)
    start_LS = candidates[0]
    even_K = np.full(len(judge_KLE), 1.0 / len(judge_KLE))
    costs_XL: list[Floats] = []
    moved_XL: list[Integers] = []
    for slots_LS in candidates:
        ratio_KL = layer_times(slots_LS, judge_KLE, limits, fetch_price, compiled)
        costs_XL.append(risk_of(ratio_KL, even_K, beta, tail))
        moved = np.zeros(len(slots_LS), np.int64)
        moved_XL.append(moved if current is None else moved_slots(current, slots_LS, limits.num_ranks))
    cost_XL, moves_XL = np.stack(costs_XL), np.stack(moved_XL)
    chosen_L = (cost_XL + price * moves_XL).argmin(axis=0)  # of equal ones the first: the fewest changes
    idle_L = ~(search_KLE.any(axis=(0, 2)) | judge_KLE.any(axis=(0, 2)))
    chosen_L[idle_L] = 0
    layer_L = np.arange(len(start_LS))
    slots_LS = np.stack(candidates)[chosen_L, layer_L]
    judged = Judged(cost_XL[0], cost_XL[chosen_L, layer_L], moves_XL[chosen_L, layer_L], current is None)
    return slots_LS, judged


def peak_ratios(
    slots_LS: Integers, counts_KLE: Integers, limits: Constraints, compiled: bool = True
) -> Floats:
    """[K, L] float64: peak of the best split over an even load; 1 where there is no load."""
    peak_KL = layer_peaks(slots_LS, counts_KLE, limits.num_ranks, limits.speed_G, compiled=compiled)
    speed = float(limits.num_ranks if limits.speed_G is None else limits.speed_G.sum())
    even_KL = counts_KLE.sum(axis=2) / speed
    return np.where(even_KL > 0, peak_KL / np.where(even_KL > 0, even_KL, 1.0), 1.0)


def layer_times(
    slots_LS: Integers,
    counts_KLE: Integers,
    limits: Constraints,
    fetch_price: Floats | float = 0.0,
    compiled: bool = True,
) -> Floats:
    """[K, L] float64: time of a layer over that of an even load without replicas: `peak_ratios`, and what the
    busiest port fetches at its price."""
    ratio_KL = peak_ratios(slots_LS, counts_KLE, limits, compiled)
    return ratio_KL + fetch_price * busiest_port(slots_LS, limits)


def busiest_port(slots_LS: Integers, limits: Constraints) -> Integers:
    """[L] int64: replicas that the busiest rank sends or receives in a step; 0 without homes."""
    ports_LG = np.zeros((2, len(slots_LS), limits.num_ranks), np.int64)
    if limits.home_slot_E is None:
        return ports_LG.max(axis=(0, 2))
    per_rank = limits.num_slots // limits.num_ranks
    layer_n, slot_n = np.nonzero(slots_LS >= 0)
    home_n = limits.home_slot_E[slots_LS[layer_n, slot_n]] // per_rank
    away_n = home_n != slot_n // per_rank
    for port, rank_n in enumerate((home_n, slot_n // per_rank)):
        np.add.at(ports_LG[port], (layer_n[away_n], rank_n[away_n]), 1)
    return ports_LG.max(axis=(0, 2))


def as_plan(
    slots_LS: Integers,
    current: Integers | None,
    load_LE: Floats,
    limits: Constraints,
    reason: str,
    compiled: bool = True,
    *,
    shares: str = "exact",
    **more: Any,
) -> Plan:
    """The Plan of a placement: moves, peak and bound on a load; more: other fields of the plan."""
    homes = limits.home_slot_E
    bound_L = peak_bound(
        load_LE, limits.num_slots, limits.num_ranks, shares=shares, num_nodes=limits.num_nodes,
        num_groups=limits.num_groups, home_slot_E=homes, speed_G=limits.speed_G,
    )  # fmt: skip
    if shares == "even":
        load_LG = even_share_load(load_LE, slots_LS, limits.num_ranks)
        peak_L = (load_LG if limits.speed_G is None else load_LG / limits.speed_G).max(axis=1)
    else:
        peak_L = layer_peaks(slots_LS, load_LE, limits.num_ranks, limits.speed_G, compiled=compiled)[0]
    given: dict[str, Any] = {"expected_gain_s": 0.0, "move_cost_s": 0.0, "reason": reason, **more}
    return Plan(
        slot_to_expert_LS=slots_LS,
        home_slot_LE=None if homes is None else np.tile(homes, (len(load_LE), 1)),
        num_ranks=limits.num_ranks,
        moves=() if current is None else list_moves(current, slots_LS, limits.num_ranks),
        bound_L=bound_L,
        # loads in shares are counted in 2^32 parts of a layer: what that rounds is no gap
        peak_L=np.maximum(peak_L, bound_L * np.where(peak_L > bound_L * (1 - 1e-6), 1.0, 0.0)),
        **given,
    )


# ---- parts ----------------------------------------------------------------------------------------------


def _check_memory(current: Integers, num_ranks: int, most_experts_G: ArrayLike | None) -> None:
    """ValueError where the present placement has more on a rank than its memory is said to hold."""
    if most_experts_G is None or np.shape(most_experts_G) != (num_ranks,):
        return  # another shape is refused with the sizes
    filled_LG = (current.reshape(len(current), num_ranks, -1) >= 0).sum(axis=2)
    over = filled_LG > np.asarray(most_experts_G)
    if over.any():
        layer, rank = np.argwhere(over)[0].tolist()
        raise ValueError(
            f"layer {layer}, rank {rank}: current_LS has {filled_LG[layer, rank]} experts there, more than "
            f"most_experts_G[{rank}]={np.asarray(most_experts_G)[rank]}; empty slots (-1) first, or plan "
            "without current_LS"
        )


def _made_anew(
    search_KLE: Integers, current: Integers | None, limits: Constraints, options: dict[str, Any]
) -> list[Integers]:
    """A connected placement for the mean of the scenarios, and what a search makes of it."""
    new_LS = connected_placement(
        search_KLE.mean(axis=0), limits.num_slots, limits.num_ranks, compiled=options["compiled"],
        **limits.shared(),
    )  # fmt: skip
    if current is not None:
        new_LS = _renamed(current, new_LS, limits)
    searched_LS = search_placement(search_KLE, new_LS, limits.num_ranks, **options).slots_LS
    if current is not None:
        searched_LS = keep_slots(current, searched_LS, limits.num_ranks)
    return [new_LS, searched_LS]


def _renamed(current: Integers, new_LS: Integers, limits: Constraints) -> Integers:
    """The new placement with ranks and slots renamed for few moves, where nothing ties experts to ranks."""
    free = limits.home_slot_E is None and limits.most_experts_G is None
    if not free or limits.num_ranks > _MOST_RELABELLED:
        return keep_slots(current, new_LS, limits.num_ranks)
    sizes = sizes_of(int(new_LS.max()) + 1, limits.num_slots, limits.num_ranks)
    apart = limits.num_groups > 0 and limits.num_groups % limits.num_nodes == 0
    nodes = limits.num_nodes if apart else 1
    speed_G = None if limits.speed_G is None else sizes.speed_G * limits.speed_G
    return relabel(current, new_LS, limits.num_ranks, nodes, speed_G=speed_G)
