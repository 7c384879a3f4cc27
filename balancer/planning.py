"""Planning: loads in, plan out: `plan_placement`, in one call and without any state.

    loads or their history  ->  scenarios  ->  the present placement, repaired, made anew: the best  ->  Plan

For a plan now and then, by hand or in somebody else's code; `balancer/placement.py` is the controller that
plans along a run. "robust" plans are for systems that split every batch exactly, over scenarios of what may
come; "fast" ones for systems that share an expert's rows evenly, on the load as it is.

A search fits the scenarios that it sees. So half of them are kept from it, and a placement is judged by
those: one that a search made worse is not taken, nor one whose gain is less than its moves cost.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.candidates import Constraints, Judged, as_plan, best_of, constraints_of
from balancer.dispersion import estimate_dispersion
from balancer.even import even_placement, even_repair
from balancer.forecast import forecaster
from balancer.metrics import checked_load, load_shares, moved_slots
from balancer.placement_checks import slot_table, without_doubles
from balancer.plan import Plan
from balancer.scenarios import draw_scenarios
from balancer.search import checked_prices, scenario_counts

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

EFFORTS = ("fast", "repair", "robust")
# what a slot that receives an expert must gain, as a share of the layer's time, where no cost says more
MOVE_PRICE = 0.002
# scenarios and changes scored of a repair, which is to take a tenth of the time of a plan
_REPAIR = (8, 24)
# copies of a layer in a scenario, where the load comes in shares: noise of counting is none then
_COPIES = 2**20


def plan_placement(
    load: ArrayLike,
    *,
    num_ranks: int,
    num_slots: int,
    num_nodes: int = 1,
    num_groups: int = 0,
    current_LS: ArrayLike | None = None,
    fixed_homes: bool = False,
    effort: str = "robust",
    speed_G: Sequence[float] | Floats | None = None,
    most_experts_G: ArrayLike | None = None,
    spread: float = 0.15,
    move_price: ArrayLike = MOVE_PRICE,
    num_scenarios: int = 32,
    beta: float = 0.1,
    tail: float = 0.1,
    seed: int = 0,
    most_scores: int = 150,
    compiled: bool = True,
) -> Plan:
    """Plan where the experts of all layers go, and how many slots each gets.

    load: [L, E] counts or shares, or [W, L, E] their history, the newest last;  num_ranks: P;  num_slots: S
    over all ranks, a multiple of P, E or more;  num_nodes, num_groups: M nodes, and groups of experts that a
    router is limited to; with groups a multiple of nodes an expert and its replicas stay on one node;
    current_LS: [L, S] integers, the placement in force, slots contiguous by rank, -1 = empty; None = none
    yet;  fixed_homes: every expert keeps its home, as training needs it: the first slots of each rank, in
    order (`home_slots`);  effort: "robust" (some 10 ms a layer of 256 experts; the exact split, over
    scenarios), "repair" (the same from the placement in force alone, fewer scenarios; a tenth of the time)
    or "fast" (some milliseconds for all layers; even shares, the load as it is, the newest of a history;
    spread, scenarios and the constants of the search play no part);  speed_G:
    [P] relative speeds;  most_experts_G: [P] experts that the memory of each rank holds, None = all slots
    (robust only);  spread: how far off a single load may be, standard deviation of the logarithm of a share;
    a history says so itself;  move_price: what a slot that receives an expert must gain, in peak / even load,
    a number or [L];  num_scenarios: for the search, and as many to judge by;  beta, tail: as
    `search_placement`;  seed: of the scenarios; equal seeds give equal plans;  most_scores: changes that are
    scored in a layer;  compiled: False runs the twins.

    Returns a Plan, whose peak_L and bound_L are those of the expected load (the given one; the mean of the
    forecast for a history); seconds and steps are 0, for want of a cost model and a run. A layer changes only
    where that pays by the scenarios kept from the search. A layer without load keeps what it has. Raises
    ValueError for a bad load, sizes that do not fit with the nearest that do, or an unknown effort.

    >>> plan = plan_placement([[90, 10, 40, 20], [10, 10, 10, 10]], num_ranks=2, num_slots=6)
    >>> plan.slot_to_expert_LS.tolist()
    [[2, 0, 3, 2, 0, 1], [3, 1, 0, 3, 1, 2]]
    >>> plan.peak_L.tolist(), plan.bound_L.tolist()
    ([80.0, 20.0], [80.0, 20.0])
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r} is unknown; use one of {', '.join(EFFORTS)}")
    given = checked_load(load, "load")
    if given.ndim not in (2, 3) or 0 in given.shape:
        raise ValueError(f"load has shape {given.shape}; expected [L, E], or [W, L, E] for a history")
    history = given[None] if given.ndim == 2 else given
    current = None if current_LS is None else slot_table("current_LS", current_LS)
    limits = constraints_of(
        history.shape[1:], num_ranks, num_slots, num_nodes, num_groups, current, fixed_homes, speed_G,
        most_experts_G,
    )  # fmt: skip
    price_L = checked_prices(move_price, history.shape[1])
    _check_options(spread, num_scenarios, seed, beta, tail, most_scores)
    if effort == "fast":
        return _fast(history[-1], limits, current, price_L, compiled)
    if effort == "repair" and current is None:
        raise ValueError(
            "effort='repair' needs current_LS, the placement to repair; use 'robust' without one"
        )
    if effort == "repair":
        num_scenarios, most_scores = min(num_scenarios, _REPAIR[0]), min(most_scores, _REPAIR[1])
    expected_LE, counts = _scenarios(history, spread, num_scenarios, seed)
    slots_LS, figures = best_of(
        counts[0::2], counts[1::2], current, limits, price_L, beta, tail,
        most_scores, compiled, anew=effort == "robust",
    )  # fmt: skip
    reason = _words(figures, len(counts) // 2, expected_LE.max(axis=1) > 0) + _leftover(slots_LS, limits)
    return as_plan(slots_LS, current, expected_LE, limits, reason, compiled)


# ---- parts ----------------------------------------------------------------------------------------------


def _check_options(
    spread: float, num_scenarios: int, seed: int, beta: float, tail: float, most_scores: int
) -> None:
    """Raise ValueError for an option out of range, whether this effort looks at it or not."""
    if not 0 <= spread <= 3:
        raise ValueError(f"spread={spread} must lie between 0 (the load is certain) and 3; 0.15 is usual")
    if num_scenarios < 1 or most_scores < 0:
        raise ValueError(
            f"num_scenarios={num_scenarios} must be at least 1 (32 is a good value) and "
            f"most_scores={most_scores} at least 0"
        )
    if seed < 0:
        raise ValueError(f"seed={seed} must be 0 or more")
    if not 0 <= beta <= 1 or not 0 < tail <= 1:
        raise ValueError(
            f"beta={beta} must lie between 0 (mean alone) and 1, tail={tail} be above 0 and at most 1"
        )


def _scenarios(history: Floats, spread: float, num_scenarios: int, seed: int) -> tuple[Floats, Integers]:
    """The expected load [L, E] and 2 K scenarios, every other one for the search, the rest to judge by."""
    if len(history) == 1:
        rng = np.random.default_rng(seed)
        off_KLE = np.exp(spread * rng.standard_normal((2 * num_scenarios, *history.shape[1:])))
        return history[0], scenario_counts(history[0] * off_KLE)
    idle_L1: NDArray[np.bool_] = (history.max(axis=(0, 2)) == 0)[:, None]
    # shares are no counts: as one copy they would be all noise
    whole_L1 = (history == np.rint(history)).min(axis=(0, 2))[:, None]
    counted_L1 = whole_L1 & (history.sum(axis=2).max(axis=0)[:, None] > 1.5)
    share_WLE = load_shares(np.where(idle_L1, 1.0, history))
    history = np.where(counted_L1, history, np.nan_to_num(np.rint(share_WLE * _COPIES)))
    copies_L = np.clip(history[-1].sum(axis=1), 1, 2**50).astype(np.int64)
    init, update, forecast = forecaster("regime")
    state = init(history.shape[1], history.shape[2], (1,))
    for step, load_LE in enumerate(history):
        state = update(step, load_LE, state)
    told = forecast(state)
    phi_L = estimate_dispersion(history) if len(history) > 6 and copies_L.min() > 1 else 1.0
    drawn = draw_scenarios(
        told, 1, copies=copies_L, seed=seed, num_scenarios=2 * num_scenarios, phi=phi_L,
        last_LE=history[-1], previous_LE=history[-2],
    )  # fmt: skip
    expected_LE = np.where(idle_L1, 0.0, told.mean_HLE[0] * copies_L[:, None])
    return expected_LE, np.where(idle_L1, 0, drawn.counts_KLE)


def _fast(
    load_LE: Floats, limits: Constraints, current: Integers | None, price_L: Floats, compiled: bool
) -> Plan:
    """Even shares on one load: made anew, or repaired where there is a placement."""
    if limits.most_experts_G is not None:
        raise ValueError("most_experts_G is for effort='robust'; with 'fast' give as many slots as fit")
    common: dict[str, Any] = {"home_slot_E": limits.home_slot_E, "speed_G": limits.speed_G}
    if current is None:
        slots_LS = even_placement(
            load_LE, limits.num_slots, limits.num_ranks, num_nodes=limits.num_nodes,
            num_groups=limits.num_groups, compiled=compiled, **common,
        )  # fmt: skip
        reason = "first placement, for even shares of the load given"
    else:
        apart = limits.num_groups > 0 and limits.num_groups % limits.num_nodes == 0
        start_LS, slots_LS = without_doubles(current, limits.num_ranks), current.copy()
        for price in np.unique(price_L).tolist():
            same_L = price_L == price
            slots_LS[same_L] = even_repair(
                load_LE[same_L], [1.0], start_LS[same_L], limits.num_ranks, compiled=compiled,
                num_nodes=limits.num_nodes if apart else 1, move_price=price, **common,
            )  # fmt: skip
        moved = int(moved_slots(current, slots_LS, limits.num_ranks).sum())
        reason = f"{moved} moves for even shares of the load given, each worth its price"
    reason += _leftover(slots_LS, limits)
    return as_plan(slots_LS, current, load_LE, limits, reason, compiled, shares="even")


def _leftover(slots_LS: Integers, limits: Constraints) -> str:
    """What the reason says of slots that no expert can use: more of them than a copy on every rank."""
    sorted_LGs = np.sort(slots_LS.reshape(len(slots_LS), limits.num_ranks, -1), axis=2)
    doubles = (sorted_LGs[:, :, 1:] == sorted_LGs[:, :, :-1]) & (sorted_LGs[:, :, 1:] >= 0)
    empty = int((slots_LS < 0).sum()) + int(doubles.sum())
    if not empty:
        return ""
    return f"; {empty} slots serve nothing: they are empty, or hold an expert that their rank has already"


def _words(judged: Judged, num_scenarios: int, live_L: NDArray[np.bool_]) -> str:
    """The reason of a plan, with its figures; layers without load have none."""
    if not live_L.any():
        return "no layer has any load: nothing is known, experts are spread evenly, or stay"
    lost = 100 * (judged.after_L[live_L].mean() - 1)
    over = f"over {num_scenarios} scenarios that the search did not see"
    if judged.fresh:
        return f"first placement: the fullest rank is {lost:.2f} % above an even load {over}"
    changed = int((judged.moved_L > 0).sum())
    if not changed:
        return f"no change pays: the fullest rank is {lost:.2f} % above an even load {over}"
    before = 100 * (judged.before_L[live_L].mean() - 1)
    moves = int(judged.moved_L.sum())
    return (
        f"{moves} move{'' if moves == 1 else 's'} in {changed} of {len(judged.moved_L)} layers: the fullest "
        f"rank is {lost:.2f} % above an even load instead of {before:.2f} % {over}"
    )
