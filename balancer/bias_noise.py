"""How much of a violation is noise: the part of the default bias law that settles its gain.

Under `balancer/bias_identified.py`. Once the effect of the bias is taken out, the violation y of an expert
moves as a random walk x (the router learns, the text changes) that is seen through counting noise v:

    y(t) = x(t) + v(t) + effect of b        x(t + 1) = x(t) + rho y(t) + w(t)

The changes c(t) of y less the effect of b then have var c = var w + 2 var v and, one step apart, the
covariance -var v, so that the two variances are known from running moments, pooled over the experts of a
layer. The gain that tracks x best is the steady Kalman gain of a local level (`kalman_gain`). An error far
above the noise needs no such patience: against a flat prior the best estimate of x from one measurement is
(1 - var v / y^2) y (James and Stein), which answers a switch of the data at once and fades with the error.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bias_kernels import (
    CHANGE_EARLIER,
    CHANGE_LAST,
    CHANGE_SQUARE,
    EARLIER_SQUARE,
    LAST_EARLIER,
    SQUARE,
)

Floats = NDArray[np.float64]

_MEMORY_STEPS = 100.0  # moments look back this far: E * 100 changes tell a variance to 5 % for 8 experts
_PRIOR_STEPS = 10.0  # weight of what is believed at the start: multinomial noise and as much drift
_OUTLIER = 4.0  # a step whose mean square is this many times the usual is a jump, and says little of noise
_USUAL_RATE = (
    0.05  # the usual moves by so much of e at most a step: a jump is over before it has become usual
)
_MOST_NOISE = 100.0  # times that of counting: more is a loop that swings, and no reason to rest
_SURE = 2.0  # standard deviations by which figures must exceed chance before they count
_TINY = 1e-300


class NoiseState(NamedTuple):
    """Moments of one bias loop, [L] float64.

    steps: number of measurements. usual_L: mean square of c in an ordinary step. part_L: how much the last
    step counted, 0 to 1. variance_L, covariance_L: of c, and of c one step apart. noise_L, drift_L: var v and
    var w. growth_L, echo_L, earlier_L: mean c(t + 1) y(t - 1), y(t) y(t - 1) and y(t - 1)^2. square_L: mean
    y^2 of the last measurement alone.
    """

    steps: int
    usual_L: Floats
    part_L: Floats
    variance_L: Floats
    covariance_L: Floats
    noise_L: Floats
    drift_L: Floats
    growth_L: Floats
    echo_L: Floats
    earlier_L: Floats
    square_L: Floats


def init_noise(num_layers: int) -> NoiseState:
    """Return the state before any measurement."""
    return NoiseState(0, *(np.zeros(num_layers) for _ in NoiseState._fields[1:]))


def update_noise(sums_LX: Floats, num_experts: int, counting_var: float, state: NoiseState) -> NoiseState:
    """Return the state after one more measurement.

    sums_LX: [L, NUM_SUMS] of `bias_kernels.measure_layers`. num_experts: E. counting_var: (1 - r) / (r T),
    the variance of y if every token chose alone: what is believed of the noise at first, and half of it at
    any time.
    """
    means_XL = np.ascontiguousarray(sums_LX.T) / num_experts
    if state.steps == 0:
        return _believed(means_XL[SQUARE], counting_var, state)
    change_L = np.maximum(means_XL[CHANGE_SQUARE], _TINY)
    ratio_L = change_L / state.usual_L
    part_L = np.minimum(1.0, _OUTLIER / ratio_L) ** 2
    rate = 1.0 / min(state.steps + _PRIOR_STEPS, _MEMORY_STEPS)
    variance_L = state.variance_L + rate * (part_L * change_L - state.variance_L)
    rate = rate if state.steps >= 2 else 0.0  # before the third measurement there are no two changes
    weight_L = rate * part_L
    # a product of two changes counts as both did
    product_L = np.sqrt(part_L * state.part_L) * means_XL[CHANGE_LAST]
    covariance_L = state.covariance_L + rate * (product_L - state.covariance_L)
    least = 0.5 * counting_var
    noise_L = np.clip(np.minimum(-covariance_L, 0.5 * variance_L), least, _MOST_NOISE * counting_var)
    return NoiseState(
        steps=state.steps + 1,
        usual_L=np.maximum(state.usual_L * np.clip(ratio_L, 1 / math.e, math.e) ** _USUAL_RATE, _TINY),
        part_L=part_L,
        variance_L=variance_L,
        covariance_L=covariance_L,
        noise_L=noise_L,
        drift_L=np.maximum(variance_L - 2.0 * noise_L, 0.0),
        growth_L=(1 - rate) * state.growth_L + weight_L * means_XL[CHANGE_EARLIER],
        echo_L=(1 - rate) * state.echo_L + weight_L * means_XL[LAST_EARLIER],
        earlier_L=(1 - rate) * state.earlier_L + weight_L * means_XL[EARLIER_SQUARE],
        square_L=means_XL[SQUARE],
    )


def _believed(square_L: Floats, counting_var: float, state: NoiseState) -> NoiseState:
    """The state after the first measurement: multinomial noise, and a drift as large."""
    noise_L = np.full_like(square_L, counting_var)
    return state._replace(
        steps=1,
        usual_L=np.maximum(3.0 * noise_L, _TINY),
        variance_L=3.0 * noise_L,
        covariance_L=-noise_L,
        noise_L=noise_L,
        drift_L=noise_L.copy(),
        square_L=square_L,
    )


def kalman_gain(drift_over_noise: Floats) -> Floats:
    """Return the steady gain of a local level, K = (-q + sqrt(q^2 + 4 q)) / 2 with q = var w / var v.

    drift_over_noise: q, 0 or more. Returns float64 in [0, 1): about sqrt(q) for small q.

    >>> kalman_gain(np.array([0.0, 0.5, 1e6])).round(3)
    array([0. , 0.5, 1. ])
    """
    q = np.minimum(drift_over_noise, 1e8)
    # 2 q / (q + sqrt(q^2 + 4 q)) is the same without the cancellation of large q
    return 2.0 * q / np.maximum(q + np.sqrt(q * q + 4.0 * q), _TINY)


def tracking_gain(state: NoiseState) -> Floats:
    """Return the gain [L] that tracks the drift through the noise: the Kalman gain of the two variances."""
    return kalman_gain(state.drift_L / np.maximum(state.noise_L, _TINY))


def surprise_gain(num_experts: int, state: NoiseState) -> Floats:
    """Return the share [L] of the last violation that is no noise: 1 - c var v / mean y^2, or 0.

    c = 1 + 2 sqrt(2 / (E - 1)): noise alone exceeds it in 2 of 100 steps.
    """
    factor = 1.0 + _SURE * math.sqrt(2.0 / (num_experts - 1))
    return np.maximum(1.0 - factor * state.noise_L / np.maximum(state.square_L, _TINY), 0.0)


def reinforcement(num_experts: int, state: NoiseState) -> Floats:
    """Return rho [L], the share of a violation that the router adds to it a step; 0 where nothing shows.

    From c(t + 1) on y(t) with y(t - 1) as the instrument, since y(t) and c(t + 1) hold the same noise. Where
    violations have no memory (well held) there is nothing to learn from, and a ratio of two chance numbers
    would be anything: each is drawn towards "nothing" by two of its standard deviations.
    """
    samples = num_experts * min(state.steps + 1.0, _MEMORY_STEPS)
    echo_sd_L = state.earlier_L / math.sqrt(samples)
    growth_sd_L = np.sqrt(state.variance_L * state.earlier_L / samples)
    growth_L = np.maximum(state.growth_L - _SURE * growth_sd_L, 0.0)
    below_L = np.maximum(state.echo_L, 0.0) + _SURE * echo_sd_L
    return np.where(state.echo_L > 0, growth_L / np.maximum(below_L, _TINY), 0.0)
