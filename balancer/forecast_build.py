"""Forecaster: what all forecasters share, around the one thing in which they differ, their mean.

A `Member` turns samples of shares into mean shares; `build` makes a forecaster of it: checks, samples without
load, missing samples, spread, and intervals that are calibrated on its own past forecasts. Then:

    counts -> shares, jumps and spread (spread.py) -> member -> mean -> interval (conformal.py)
                                  ^ errors of forecasts whose time has come (origins.py) ^
"""

import operator
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.conformal import (
    LAG_POWER,
    Bands,
    Conformal,
    NumpyBands,
    conformal_init,
    conformal_update,
    multipliers,
)
from balancer.forecast_record import (
    JUMPED,
    MOVING,
    SETTLED,
    UNKNOWN,
    Forecast,
    Forecaster,
    checked_horizons,
    checked_sample,
)
from balancer.origins import FREE, num_slots, place, take_due
from balancer.spread import Spread, shares_of, spread_init, spread_std, spread_update

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# samples for which a layer counts as jumped; and the change over the usual one from which it moves
_JUMPED_SAMPLES, _MOVING_RATIO = 20, 1.3
# samples without a jump after which a layer had something settled that a jump makes worthless
_SETTLED_SAMPLES = 8
# a layer that jumps so often that a horizon has no news for this many times its length takes what there is
_STARVED_LAGS = 2
NEVER = int(np.iinfo(np.int64).max)


class Sample(NamedTuple):
    """One sample as a member sees it.

    step [];  share_LE [L, E]: shares, of a layer without load those before;  total_L [L]: copies;  loaded_L
    [L]: layers with load;  jumped_L [L]: layers that jumped now;  restart_L [L]: those of them that had been
    settled, so that what was known may be worthless;  since_L, first_L [L]: step of a layer's last jump, or
    of its first load, and of its first load, NEVER before;  starved_HL [H, L]: horizons that had no news for
    long;  lag_H [H]: horizons in samples;  interval []: steps between samples.
    """

    step: int
    share_LE: Floats
    total_L: Floats
    loaded_L: Flags
    jumped_L: Flags
    restart_L: Flags
    since_L: Integers
    first_L: Integers
    starved_HL: Flags
    lag_H: Integers
    interval: float


class Member(NamedTuple):
    """init(num_layers, num_experts, horizons_H) -> state; update(sample, state) -> state;
    mean(lag_H, state) -> [H, L, E], 0 or more, summing to 1."""

    init: Callable[[int, int, Integers], Any]
    update: Callable[[Sample, Any], Any]
    mean: Callable[[Integers, Any], Floats]


class State(NamedTuple):
    """step, interval []: of the last sample, and between samples (0: unknown);  horizons_H [H];  since_L,
    first_L [L]: see Sample;  waited_HL [H, L]: samples since a forecast was met that knew of no jump since;
    spread, conformal;  member: the member's own;  mean_HLE [H, L, E]: its forecast now;
    origin_HQ [H, slots]: steps of the forecasts not yet met, with their root means root_HQLE and spreads
    std_HQLE (float32)."""

    step: Integers
    interval: Floats
    horizons_H: Integers
    since_L: Integers
    first_L: Integers
    waited_HL: Integers
    spread: Spread
    conformal: Conformal
    member: Any
    mean_HLE: Floats
    origin_HQ: Integers
    root_HQLE: NDArray[np.float32]
    std_HQLE: NDArray[np.float32]


def build(member: Member, level: float = 0.9, bands: Bands | None = None) -> Forecaster:
    """Return a forecaster around a member.

    level: coverage of the intervals, in (0, 1); 0.9. bands: the passes of the intervals; numpy's by default.
    Raises ValueError for another level.
    """
    conformal_init(1, 1, 1, level)
    used = NumpyBands() if bands is None else bands

    def init(num_layers: int, num_experts: int, horizons: Sequence[int]) -> State:
        return _init(member, level, num_layers, num_experts, horizons)

    def update(step: SupportsIndex, tokens_per_expert_LE: ArrayLike, state: State) -> State:
        return _update(member, used, step, tokens_per_expert_LE, state)

    def forecast(state: State) -> Forecast:
        return _forecast(used, state)

    return Forecaster(init, update, forecast)


def is_evidence(sample: Sample, h: int, made_at: int) -> Flags:
    """Whether a forecast made at a step, and met now at horizon h, is evidence about each layer [L].

    One from before a jump tells of the jump only, so it is left out; but a layer that jumps now and then
    would never learn about long horizons: where nothing has come in for long, it counts all the same.
    """
    since_L = np.where(sample.starved_HL[h], sample.first_L, sample.since_L)
    return sample.loaded_L & (made_at >= since_L)


def shares(values_XE: Floats) -> Floats:
    """Clip to 0 and divide by the sum over the experts; uniform where nothing is left."""
    clipped_XE = np.maximum(values_XE, 0.0)
    total_X1 = clipped_XE.sum(axis=-1, keepdims=True)
    return np.where(
        total_X1 > 0, clipped_XE / np.where(total_X1 > 0, total_X1, 1.0), 1.0 / values_XE.shape[-1]
    )


def lags(horizons_H: Integers, interval: float) -> Integers:
    """Horizons in samples [H], at least 1: of the first sample at or after the target, as scored."""
    if interval <= 0:
        return np.ones_like(horizons_H)
    return np.maximum(1, np.ceil(horizons_H / interval - 1e-6)).astype(np.int64)


def _init(member: Member, level: float, num_layers: int, num_experts: int, horizons: Sequence[int]) -> State:
    horizons_H = checked_horizons(num_layers, num_experts, horizons)
    slots = num_slots(2 * horizons_H.size * num_layers * num_experts)
    shape_HQLE = (horizons_H.size, slots, num_layers, num_experts)
    return State(
        step=np.array(-1),
        interval=np.array(0.0),
        horizons_H=horizons_H,
        since_L=np.full(num_layers, NEVER),
        first_L=np.full(num_layers, NEVER),
        waited_HL=np.zeros((horizons_H.size, num_layers), dtype=np.int64),
        spread=spread_init(num_layers, num_experts),
        conformal=conformal_init(horizons_H.size, num_layers, num_experts, level),
        member=member.init(num_layers, num_experts, horizons_H),
        mean_HLE=np.full((horizons_H.size, num_layers, num_experts), 1.0 / num_experts),
        origin_HQ=np.full(shape_HQLE[:2], FREE),
        root_HQLE=np.zeros(shape_HQLE, dtype=np.float32),
        std_HQLE=np.zeros(shape_HQLE, dtype=np.float32),
    )


def _update(
    member: Member, bands: Bands, step: SupportsIndex, tokens_per_expert_LE: ArrayLike, state: State
) -> State:
    num_layers, num_experts = state.mean_HLE.shape[1:]
    counts_LE = checked_sample(step, tokens_per_expert_LE, int(state.step), (num_layers, num_experts))
    step = operator.index(step)
    share_LE, loaded_L = shares_of(counts_LE, state.spread)
    total_L = counts_LE.sum(axis=-1)
    jumped_L, spread = spread_update(share_LE, total_L, loaded_L, state.spread)
    interval = _next_interval(step, state)
    begins_L = loaded_L & (state.spread.seen_L == 0)
    first_L = np.where(begins_L, step, state.first_L)
    since_L = np.where(begins_L | jumped_L, step, state.since_L)
    lag_H = lags(state.horizons_H, interval)
    restart_L = jumped_L & (state.spread.age_L >= _SETTLED_SAMPLES)
    starved_HL = state.waited_HL > _STARVED_LAGS * lag_H[:, None] + _SETTLED_SAMPLES
    sample = Sample(
        step=step,
        share_LE=share_LE,
        total_L=total_L,
        loaded_L=loaded_L,
        jumped_L=jumped_L,
        restart_L=restart_L,
        since_L=since_L,
        first_L=first_L,
        starved_HL=starved_HL,
        lag_H=lag_H,
        interval=interval,
    )
    conformal = _score(bands, sample, state)
    inner = member.update(sample, state.member)
    state = state._replace(
        step=np.array(step),
        interval=np.array(interval),
        since_L=since_L,
        first_L=first_L,
        spread=spread,
        conformal=conformal,
    )
    state = state._replace(member=inner, mean_HLE=member.mean(lag_H, inner))
    _keep(step, state)
    return state


def _next_interval(step: int, state: State) -> float:
    """Steps between samples: the least lately, so that a missing sample does not stretch it."""
    gap, known = float(step - state.step), float(state.interval)
    if state.step < 0:
        return 0.0
    return gap if known == 0.0 or gap < known else known + 0.1 * (gap - known)


def _score(bands: Bands, sample: Sample, state: State) -> Conformal:
    """Learn from the forecasts that this sample meets."""
    conformal, now_HL = state.conformal, multipliers(state.conformal, sample.lag_H)
    state.waited_HL[:] += 1
    for h, horizon in enumerate(state.horizons_H):
        made_Q = state.origin_HQ[h].copy()
        reach = float(sample.lag_H[h]) ** LAG_POWER
        for slot in take_due(state.origin_HQ[h], int(horizon), sample.step, sample.interval):
            state.waited_HL[h][sample.loaded_L & (made_Q[slot] >= sample.since_L)] = 0
            total_L = np.where(is_evidence(sample, h, int(made_Q[slot])), sample.total_L, 0.0)
            root_LE, std_LE = state.root_HQLE[h, slot], state.std_HQLE[h, slot]
            found = bands.tally(sample.share_LE, root_LE, std_LE, reach, total_L, now_HL[h])
            conformal = conformal_update(conformal, h, int(sample.lag_H[h]), *found)
    return conformal


def _keep(step: int, state: State) -> None:
    """Store the forecasts made now."""
    std_LE = None
    for h, horizon in enumerate(state.horizons_H):
        slot = place(state.origin_HQ[h], int(horizon), step)
        if slot != FREE:
            std_LE = spread_std(state.spread) if std_LE is None else std_LE
            state.root_HQLE[h, slot] = np.sqrt(state.mean_HLE[h])
            state.std_HQLE[h, slot] = std_LE


def _forecast(bands: Bands, state: State) -> Forecast:
    level = float(state.conformal.level)
    lag_H = lags(state.horizons_H, float(state.interval))
    reach_H, multiplier_HL = lag_H.astype(np.float64) ** LAG_POWER, multipliers(state.conformal, lag_H)
    normal = NormalDist().inv_cdf(0.5 + level / 2)
    found = bands.bands(state.mean_HLE, spread_std(state.spread), reach_H, multiplier_HL, normal)
    return Forecast(
        step=int(state.step),
        horizons_H=state.horizons_H.copy(),
        mean_HLE=state.mean_HLE.copy(),
        std_HLE=found[2],
        regime_L=_regime(state.spread),
        low_HLE=found[0],
        high_HLE=found[1],
        level=level,
    )


def _regime(spread: Spread) -> Integers:
    jumped_L = (spread.age_L < _JUMPED_SAMPLES) & (spread.age_L + 1 < spread.seen_L)
    moving_L = spread.change_L > _MOVING_RATIO * np.maximum(spread.slow_change_L, 1e-12)
    known = np.where(jumped_L, JUMPED, np.where(moving_L, MOVING, SETTLED))
    return np.where(spread.seen_L < 3, UNKNOWN, known).astype(np.int64)
