"""Wrappers around a bias law: a dead band, a limit on the rate of change, a limit on the change.

Beside the laws, under `balancer/bias.py`. Each takes a `Law` and gives a `Law` of the same name; they nest:
clip(dead_band(law("sign"), sd=2.0), most=1e-3). What a wrapper withholds it reports to the law as lost, as is
done for the limit of the bias: an integral inside the law does not run on against it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from balancer.bias_record import Actuated, Floats, Law, Measurement

Shape = Callable[[Floats, Measurement, Floats], Floats]


class Wrapped(NamedTuple):
    """State of a wrapper: last_LE [L, E] its last change, held_LE [L, E] that less the law's own; inner: the
    law's state."""

    last_LE: Floats
    held_LE: Floats
    inner: Any


def dead_band(law: Law, sd: float) -> Law:
    """Return the law with no action on experts whose error is within the noise of counting.

    sd: an expert rests while |n - r| < sd * sqrt(r (1 - r) / T), the standard deviation of its share if every
    token chose alone; 2 lets 5 % of balanced experts act. Real counts are noisier: a dispersion of phi needs
    sqrt(phi) times as much. Raises ValueError for sd < 0.
    """
    if not 0 <= sd < np.inf:
        raise ValueError(f"dead_band: sd={sd} must be 0 or more standard deviations")

    def shape(change_LE: Floats, measurement: Measurement, last_LE: Floats) -> Floats:
        r = measurement.top_k / measurement.counts_LE.shape[1]
        band = sd * float(np.sqrt((1.0 - r) / (r * measurement.num_tokens)))  # of y = n / r - 1
        return np.where(np.abs(measurement.violation_LE) < band, 0.0, change_LE)

    return _wrapped(law, shape)


def rate_limit(law: Law, most: float) -> Law:
    """Return the law with a change that differs from the last one by at most `most`, units of score a step.

    The first change counts from 0; after a change of law from the last change of the law before. Raises
    ValueError for most <= 0.
    """
    _check_most("rate_limit", most)

    def shape(change_LE: Floats, measurement: Measurement, last_LE: Floats) -> Floats:
        return np.clip(change_LE, last_LE - most, last_LE + most)

    return _wrapped(law, shape)


def clip(law: Law, most: float) -> Law:
    """Return the law with changes of at most `most` an expert, units of score.

    Raises ValueError for most <= 0.
    """
    _check_most("clip", most)

    def shape(change_LE: Floats, measurement: Measurement, last_LE: Floats) -> Floats:
        return np.clip(change_LE, -most, most)

    return _wrapped(law, shape)


def _wrapped(law: Law, shape: Shape) -> Law:
    def init(num_layers: int, num_experts: int, top_k: int) -> Wrapped:
        zeros_LE = np.zeros((num_layers, num_experts))
        return Wrapped(zeros_LE, zeros_LE.copy(), law.init(num_layers, num_experts, top_k))

    def update(measurement: Measurement, actuated: Actuated, state: Wrapped) -> tuple[Floats, Wrapped]:
        lost_LE = actuated.lost_LE + state.held_LE - state.held_LE.mean(axis=1, keepdims=True)
        wanted_LE, inner = law.update(measurement, actuated._replace(lost_LE=lost_LE), state.inner)
        change_LE = shape(wanted_LE, measurement, state.last_LE)
        return change_LE, Wrapped(change_LE.copy(), change_LE - wanted_LE, inner)

    return law._replace(
        init=init,
        update=update,
        asks=_asking(law),
        report=_reporting(law),
        raise_gain=_raising(law),
        take_over=_taking_over(law),
    )


def _asking(law: Law) -> Callable[[Any], tuple[str, ...]] | None:
    inner = law.asks
    return None if inner is None else lambda state: inner(state.inner)


def _reporting(law: Law) -> Callable[[Any], dict[str, Floats]] | None:
    inner = law.report
    return None if inner is None else lambda state: inner(state.inner)


def _raising(law: Law) -> Callable[[Floats, Any], Any] | None:
    inner = law.raise_gain
    return None if inner is None else lambda gain_L, state: state._replace(inner=inner(gain_L, state.inner))


def _taking_over(law: Law) -> Callable[[Floats, Measurement, Actuated, Any], Wrapped]:
    def take_over(change_LE: Floats, measurement: Measurement, actuated: Actuated, state: Wrapped) -> Wrapped:
        inner = state.inner
        if law.take_over is not None:
            inner = law.take_over(change_LE, measurement, actuated, inner)
        return Wrapped(change_LE.copy(), state.held_LE, inner)

    return take_over


def _check_most(wrapper: str, most: float) -> None:
    if not 0 < most < np.inf:
        raise ValueError(f"{wrapper}: most={most} must be above 0 and finite, in units of score")
