"""Placement state: what the controller knows, and what it makes of it in seconds and steps.

Under `balancer/placement.py`, which decides: the state and how a sample changes it, the time of an even load,
the price of fetching, how long a gain lasts, and lower confidence bounds of gains foreseen and missed.
"""

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.dispersion import DispersionState, update_dispersion
from balancer.forecast import forecaster
from balancer.metrics import total_variation
from balancer.placement_config import PlacementConfig

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# how fast the change of the load is learnt, of the newest sample
_CHANGE_GAIN = 0.3
# a load that does not change at all still may tomorrow
_LEAST_CHANGE = 1e-3
# counts go through float64, which counts one by one up to here
_MOST_COPIES = 2**53


class PlacementState(NamedTuple):
    """What the controller knows: arrays and numbers alone, so that it can be saved.

    forecast, dispersion: states of theirs;  previous_LE: the sample before the last;  last_LE: the last one;
    change_L: total variation from sample to sample, smoothed, NaN = none yet;  shadow_LS: the better
    placement that was not taken;  account_L: seconds that it would have saved since;  squares_L, counted_L:
    squares of these savings, added up, and how many there are;  step: of the last sample, -1 = none;
    planned_at: step of the last plan, -1 = none;  version: of that plan.
    """

    forecast: Any
    dispersion: DispersionState
    previous_LE: Integers
    last_LE: Integers
    change_L: Floats
    shadow_LS: Integers
    account_L: Floats
    squares_L: Floats
    counted_L: Floats
    step: int
    planned_at: int
    version: int


def told(config: PlacementConfig, step: int, counts: Integers, state: PlacementState) -> PlacementState:
    """The state after one more sample."""
    seen_L = state.last_LE.any(axis=1) & counts.any(axis=1)
    change_L = np.where(seen_L, total_variation(state.last_LE, counts), np.nan)
    smooth_L = np.where(
        np.isnan(state.change_L), change_L, state.change_L + _CHANGE_GAIN * (change_L - state.change_L)
    )
    live_L1 = counts.any(axis=1, keepdims=True)
    return state._replace(
        forecast=forecaster(config.forecaster).update(step, counts, state.forecast),
        dispersion=update_dispersion(counts, state.dispersion),
        previous_LE=np.where(live_L1, state.last_LE, state.previous_LE),
        last_LE=np.where(live_L1, counts, state.last_LE),
        change_L=np.where(np.isnan(change_L), state.change_L, smooth_L),
        step=step,
    )


def whole_counts(step: int, counts_LE: Floats) -> Integers:
    """The counts as int64; ValueError for shares, which would all be 0, and for too large sums."""
    broken = counts_LE != np.floor(counts_LE)
    if broken.any():
        layer, expert = np.argwhere(broken)[0].tolist()
        raise ValueError(
            f"step {step}, layer {layer}, expert {expert}: {counts_LE[layer, expert]} is no whole number; "
            "give counts of copies, not shares"
        )
    total_L = counts_LE.sum(axis=1)
    if total_L.max() > _MOST_COPIES:
        layer = int(total_L.argmax())
        raise ValueError(
            f"step {step}, layer {layer}: {total_L[layer]} copies are more than 2^53; give those of a step"
        )
    return counts_LE.astype(np.int64)


def even_s(config: PlacementConfig, counts_LE: Integers) -> Floats:
    """Seconds of a step that each layer takes at an even load: [L], of counts_LE [L, E] copies."""
    speed = config.num_ranks if config.speed_P is None else sum(config.speed_P)
    return counts_LE.sum(axis=1) / speed * config.cost.row_s


def fetch_price(config: PlacementConfig, counts_LE: Integers) -> Floats:
    """One more replica for the busiest port, as a share of each layer's time at an even load: [L]."""
    return np.minimum(config.cost.fetch_s() / np.maximum(even_s(config, counts_LE), 1e-30), 1e6)


def lasts(config: PlacementConfig, change_L: Floats) -> Floats:
    """Steps that a gain is taken to last [L], each weighed by what is left of it; change_L: TV a sample."""
    # a first sample says nothing: a plan made then is to be good for long, and not made again at once
    change_L = np.where(np.isnan(change_L), _LEAST_CHANGE, np.maximum(change_L, _LEAST_CHANGE))
    steps_L = np.clip(config.sample_steps / change_L, config.plan_steps, config.horizon_steps)
    return weighed(config, steps_L)


def weighed(config: PlacementConfig, steps: Any) -> Any:
    """Steps, each weighed by what the bias loop leaves of a gain by then."""
    return steps if config.decay == 0 else (1.0 - (1.0 - config.decay) ** steps) / config.decay


def lower_bound(gain_KL: Floats, confidence: float) -> Floats:
    """Lower confidence bound of the mean gain [L]."""
    error_L = gain_KL.std(axis=0, ddof=1 if len(gain_KL) > 1 else 0) / math.sqrt(len(gain_KL))
    return gain_KL.mean(axis=0) - NormalDist().inv_cdf(confidence) * error_L


def sure_account(config: PlacementConfig, state: PlacementState) -> Floats:
    """Lower confidence bound of the account [L], seconds: its sum less what its noise adds up to."""
    spread_L = state.squares_L - state.account_L**2 / np.maximum(state.counted_L, 1.0)
    noise_L = np.sqrt(np.maximum(spread_L, 0.0))
    return state.account_L - NormalDist().inv_cdf(config.confidence) * noise_L
