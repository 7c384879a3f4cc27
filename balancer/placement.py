"""Placement: the controller that decides, sample by sample, whether to place experts anew, and where.

Model-predictive control with a switching cost, per layer (the balancer's middle loop; the split below it
makes the most of whatever is placed). A sample goes

    counts -> forecast -> scenarios -> search from the placement in force -> a better placement, or none
                                                                          -> worth its moves? -> Plan

A layer changes for one of two reasons. Either the gain is clear: over scenarios that the search did not see,
the mean gain less its own error (the lower bound of confidence `confidence`), for as long as the plan is
taken to last, is more than what the moves cost, by `margin`. Or it has been missed for long enough: where a
placement would pay but is not sure to, what it would have saved on the loads that really came is added up,
and once that account, less its noise, is as much as the moves (times `theta`) they are made: ski rental.

A gain lasts until the load has changed: with a change (total variation) of c a sample, 1/c samples, at most
`horizon_steps`; where a bias loop pulls the load to uniform by `decay` a step, (1 - decay)^h of it is left
after h steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.candidates import Constraints, as_plan, best_of, constraints_of, layer_times
from balancer.dispersion import current_dispersion, init_dispersion
from balancer.forecast import forecaster
from balancer.forecast_record import Forecast, checked_sample
from balancer.metrics import moved_slots
from balancer.placement_checks import slot_table, without_doubles
from balancer.placement_config import PlacementConfig
from balancer.placement_state import (
    PlacementState,
    even_s,
    fetch_price,
    lasts,
    lower_bound,
    sure_account,
    told,
    weighed,
    whole_counts,
)
from balancer.plan import Plan
from balancer.scenarios import draw_scenarios

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# weight of the last load and of its trend among the scenarios of a search: a change that helps against what
# was just seen too is taken before one that helps against a draw alone (a tenth fewer moves for the same)
_KNOWN = (0.2, 0.05)
# slots up to which the best of all changes is looked for, fewer moves by a tenth; beyond, the first that pays
_STEEPEST = 128
# layers that a reason names
_NAMED = 3


class Controller(NamedTuple):
    """init(num_layers, num_experts, current_LS) -> state;  update(step, tokens_per_expert_LE, current_LS,
    state) -> (Plan or None, state)."""

    init: Callable[[int, int, ArrayLike], PlacementState]
    update: Callable[[int, ArrayLike, ArrayLike, PlacementState], tuple[Plan | None, PlacementState]]


def placement_controller(config: PlacementConfig) -> Controller:
    """The controller of one configuration.

    `init` takes the sizes and the placement in force; `update` one sample of counts (whole copies, taken
    while `current_LS` was in force) once every `sample_steps`, and the placement in force, and returns a Plan
    for all layers, or None where no layer is to change. `update` takes the state over. A plan that is not
    applied is made again, with a new version. Both raise ValueError for what does not fit.

    >>> from balancer.cost import CostModel
    >>> cost = CostModel.of_machine("infiniband", 1024, 1024)
    >>> config = PlacementConfig(num_ranks=2, num_slots=6, cost=cost, tolerance=0.0)
    >>> init, update = placement_controller(config)
    >>> slots_LS = np.array([[0, 1, 2, 2, 3, 0]])
    >>> plan, state = update(0, np.array([[100, 40000, 100, 100]]), slots_LS, init(1, 4, slots_LS))
    >>> plan.moves
    (Move(layer=0, slot=5, rank=1, expert=1, replaced=0),)
    """

    def init(num_layers: int, num_experts: int, current_LS: ArrayLike) -> PlacementState:
        slots = slot_table("current_LS", current_LS).copy()
        _limits(config, (num_layers, num_experts), slots)
        horizons = (config.delay_steps + config.plan_steps,)
        return PlacementState(
            forecast=forecaster(config.forecaster).init(num_layers, num_experts, horizons),
            dispersion=init_dispersion(num_layers, num_experts),
            previous_LE=np.zeros((num_layers, num_experts), np.int64),
            last_LE=np.zeros((num_layers, num_experts), np.int64),
            change_L=np.full(num_layers, np.nan),
            shadow_LS=slots,
            account_L=np.zeros(num_layers),
            squares_L=np.zeros(num_layers),
            counted_L=np.zeros(num_layers),
            step=-1,
            planned_at=-1,
            version=0,
        )

    def update(
        step: int, tokens_per_expert_LE: ArrayLike, current_LS: ArrayLike, state: PlacementState
    ) -> tuple[Plan | None, PlacementState]:
        slots = slot_table("current_LS", current_LS)
        counts = whole_counts(
            step, checked_sample(step, tokens_per_expert_LE, state.step, state.last_LE.shape)
        )
        limits = _limits(config, counts.shape, slots)
        gap_steps = config.sample_steps if state.step < 0 else step - state.step
        state = told(config, step, counts, state)
        if not counts.any():
            return None, state
        live_L: NDArray[np.bool_] = counts.max(axis=1) > 0
        state = _accounted(config, limits, slots, state, live_L, gap_steps)
        if not _due(config, step, state):
            return None, state
        return _decide(config, limits, slots, state, live_L)

    return Controller(init, update)


# ---- what is known ---------------------------------------------------------------------------------------


def _limits(config: PlacementConfig, shape_LE: tuple[int, ...], slots_LS: Integers) -> Constraints:
    return constraints_of(
        shape_LE, config.num_ranks, config.num_slots, config.num_nodes, config.num_groups, slots_LS,
        config.fixed_homes, config.speed_P, config.most_experts_P,
    )  # fmt: skip


def _due(config: PlacementConfig, step: int, state: PlacementState) -> bool:
    """Whether a plan may be made: the last one is in force, and old enough."""
    wait = max(config.every_steps, config.delay_steps)
    return state.planned_at < 0 or step - state.planned_at >= wait


def _accounted(
    config: PlacementConfig,
    limits: Constraints,
    slots: Integers,
    state: PlacementState,
    live_L: NDArray[np.bool_],
    gap_steps: int,
) -> PlacementState:
    """The account of what the shadow placement would have saved, with the last sample, where it has load."""
    loads, fetch_L = state.last_LE[None], fetch_price(config, state.last_LE)
    missed_L = (
        layer_times(slots, loads, limits, fetch_L, config.compiled)
        - layer_times(state.shadow_LS, loads, limits, fetch_L, config.compiled)
    )[0]
    missed_s_L = live_L * missed_L * even_s(config, state.last_LE) * gap_steps
    return state._replace(
        account_L=np.maximum(state.account_L + missed_s_L, 0.0),
        squares_L=state.squares_L + missed_s_L**2,
        counted_L=state.counted_L + live_L,
    )


# ---- the decision ----------------------------------------------------------------------------------------


def _decide(
    config: PlacementConfig,
    limits: Constraints,
    slots: Integers,
    state: PlacementState,
    live_L: NDArray[np.bool_],
) -> tuple[Plan | None, PlacementState]:
    """A plan where any layer is to change, and what is to be remembered; slots [L, S] in force, live_L [L]
    layers with load."""
    foreseen = forecaster(config.forecaster).forecast(state.forecast)
    search_KLE, weight_K, judge_KLE = _drawn(config, foreseen, state)
    even_s_L, lasts_L = even_s(config, state.last_LE), lasts(config, state.change_L)
    worth_L = np.maximum(even_s_L * lasts_L, 1e-30)  # seconds of one unit of peak / even load
    price_L = config.cost.move_s(np.ones(len(slots))) / worth_L
    fetch_L = fetch_price(config, state.last_LE)
    scenarios = (search_KLE, weight_K, judge_KLE)
    better_LS = _better(config, limits, slots, scenarios, price_L, fetch_L)
    moved_L = moved_slots(slots, better_LS, config.num_ranks)
    before_KL = layer_times(slots, judge_KLE, limits, fetch_L, config.compiled)
    gain_KL = before_KL - layer_times(better_LS, judge_KLE, limits, fetch_L, config.compiled)
    sure_L = lower_bound(gain_KL, config.confidence) * worth_L
    cost_L = config.cost.move_s(moved_L)
    clear_L = live_L & (moved_L > 0) & (sure_L > (1.0 + config.margin) * cost_L)
    # the account is that of the shadow placement: it decides whether that one is taken
    shadow_moved_L = moved_slots(slots, state.shadow_LS, config.num_ranks)
    shadow_cost_L = config.cost.move_s(shadow_moved_L)
    missed_L = (
        live_L
        & ~clear_L
        & (shadow_moved_L > 0)
        & (sure_account(config, state) >= config.theta * shadow_cost_L)
    )
    taken_LS = np.where(clear_L[:, None], better_LS, np.where(missed_L[:, None], state.shadow_LS, slots))
    changed_L = clear_L | missed_L
    # a plan is refused as a whole for what stands twice on a rank, in layers that stay too
    taken_LS = without_doubles(taken_LS, config.num_ranks) if changed_L.any() else taken_LS
    shadow_LS = _shadow(config, limits, slots, state, changed_L, taken_LS, scenarios)
    state = _remembered(state, slots, shadow_LS, changed_L)
    if not changed_L.any():
        return None, state
    taken_cost_s = float((cost_L * clear_L + shadow_cost_L * missed_L).sum())
    gain_KL = before_KL - layer_times(taken_LS, judge_KLE, limits, fetch_L, config.compiled)
    gain_s_L = gain_KL.mean(axis=0) * worth_L
    version = state.version + 1
    plan = as_plan(
        taken_LS, slots, judge_KLE.mean(axis=0), limits,
        _reason(before_KL, gain_KL, clear_L, missed_L, gain_s_L, taken_cost_s, lasts_L),
        config.compiled,
        expected_gain_s=float(gain_s_L[changed_L].sum()), move_cost_s=taken_cost_s, version=version,
        made_at_step=state.step, applies_at_step=state.step + config.delay_steps,
    )  # fmt: skip
    return plan, state._replace(version=version, planned_at=state.step)


def _better(
    config: PlacementConfig,
    limits: Constraints,
    slots: Integers,
    scenarios: tuple[Integers, Floats, Integers],
    price_L: Floats,
    fetch_L: Floats,
) -> Integers:
    """The present placement [L, S], repaired where that pays; scenarios: of the search, their weights, and
    those to judge by."""
    search_KLE, weight_K, judge_KLE = scenarios
    better_LS, _ = best_of(
        search_KLE, judge_KLE, slots, limits, price_L, config.beta, config.tail, config.most_scores,
        config.compiled, anew=False, steepest=config.num_slots <= _STEEPEST, depth=config.depth,
        tolerance=config.tolerance, weight_K=weight_K, fetch_price=fetch_L,
    )  # fmt: skip
    return better_LS


def _drawn(
    config: PlacementConfig, foreseen: Forecast, state: PlacementState
) -> tuple[Integers, Floats, Integers]:
    """Scenarios for the search with their weights, and others to judge by; without any drawn, the forecast
    for both."""
    # noise is that of a micro-batch: that is what is split
    copies_L = np.maximum(state.last_LE.sum(axis=1) // config.cost.micro_batches, 1)
    if config.num_scenarios == 0:
        mean_KLE = np.rint(foreseen.mean_HLE[:1] * copies_L[:, None]).astype(np.int64)
        return mean_KLE, np.ones(1), mean_KLE
    has_previous = bool(state.previous_LE.any())
    drawn_KLE = draw_scenarios(
        foreseen, int(foreseen.horizons_H[0]), copies=copies_L,
        seed=np.random.default_rng((config.seed, state.step)), num_scenarios=2 * config.num_scenarios,
        phi=current_dispersion(state.dispersion), last_LE=state.last_LE,
        previous_LE=state.previous_LE if has_previous else None,
    ).counts_KLE  # fmt: skip
    # the last load and its trend are for the search, the draws are shared out
    first = len(drawn_KLE) - 2 * config.num_scenarios
    known = [0, 2] if has_previous else [0]
    search_KLE = np.concatenate([drawn_KLE[known], drawn_KLE[first::2]])
    weight_K = np.full(len(search_KLE), (1.0 - sum(_KNOWN[: len(known)])) / config.num_scenarios)
    weight_K[: len(known)] = _KNOWN[: len(known)]
    return search_KLE, weight_K, drawn_KLE[first + 1 :: 2]


def _shadow(
    config: PlacementConfig,
    limits: Constraints,
    slots: Integers,
    state: PlacementState,
    changed_L: NDArray[np.bool_],
    taken_LS: Integers,
    scenarios: tuple[Integers, Floats, Integers],
) -> Integers:
    """The placement whose savings are counted from now on: the one before, while it saves anything; else the
    best one for a load that stays for the whole horizon, whatever the last changes say."""
    spent_L = (state.shadow_LS == slots).all(axis=1) | (state.account_L <= 0.0)
    kept_LS = np.where(changed_L[:, None], taken_LS, np.where(spent_L[:, None], slots, state.shadow_LS))
    fresh_L = spent_L & ~changed_L
    if not fresh_L.any():
        return kept_LS
    search_KLE, weight_K, judge_KLE = scenarios
    even_s_L = np.maximum(even_s(config, state.last_LE)[fresh_L], 1e-30)
    price_L = (
        (1.0 + config.margin)
        * config.cost.move_s(np.ones(int(fresh_L.sum())))
        / (even_s_L * weighed(config, config.horizon_steps))
    )
    kept_LS[fresh_L] = _better(
        config,
        limits,
        slots[fresh_L],
        (search_KLE[:, fresh_L], weight_K, judge_KLE[:, fresh_L]),
        price_L,
        fetch_price(config, state.last_LE)[fresh_L],
    )
    return kept_LS


def _remembered(
    state: PlacementState, slots: Integers, shadow_LS: Integers, changed_L: NDArray[np.bool_]
) -> PlacementState:
    """The state with the shadow placement; its account begins anew where it is another one."""
    other_L = changed_L | (shadow_LS != state.shadow_LS).any(axis=1) | (shadow_LS == slots).all(axis=1)
    return state._replace(
        shadow_LS=shadow_LS,
        account_L=np.where(other_L, 0.0, state.account_L),
        squares_L=np.where(other_L, 0.0, state.squares_L),
        counted_L=np.where(other_L, 0.0, state.counted_L),
    )


def _reason(
    before_KL: Floats,
    gain_KL: Floats,
    clear_L: NDArray[np.bool_],
    missed_L: NDArray[np.bool_],
    gain_s_L: Floats,
    cost_s: float,
    lasts_L: Floats,
) -> str:
    """Why the plan is made, with its figures."""
    changed = np.flatnonzero(clear_L | missed_L)
    by_gain = changed[np.argsort(-gain_s_L[changed], kind="stable")]
    named = ", ".join(
        f"layer {layer} {100 * (before_KL[:, layer].mean() - 1):.1f} -> "
        f"{100 * (before_KL[:, layer].mean() - gain_KL[:, layer].mean() - 1):.1f} %"
        for layer in by_gain[:_NAMED].tolist()
    )
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    why = [f"{int(clear_L.sum())} for a clear gain"] if clear_L.any() else []
    why += [f"{int(missed_L.sum())} for a gain missed too long"] if missed_L.any() else []
    return (
        f"{len(changed)} layers change ({', '.join(why)}); time above that of an even load: {named}{more}; "
        f"gain {gain_s_L[changed].sum():.3g} s over {lasts_L[changed].mean():.0f} steps, moves {cost_s:.3g} s"
    )
