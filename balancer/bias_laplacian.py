"""The full-Laplacian law: Newton's step with the whole matrix of gains instead of its diagonal.

A law of `balancer/bias.py`, the reference twin of the default's diagonal: dearer by a factor E in what the
router counts and what a step costs.

    J = dn/db = D - A, a_ij = (C_ij + C_ji) / (2 T delta), D = row sums           swap graph, J 1 = 0
    v = (J + eps I)^-1 (r - n),  u = g v

C_ij: tokens with the K-th expert i, the (K+1)-th j, and less than delta between them. a(delta) is too low by
a part proportional to delta for a density that falls off to both sides: 2 a(delta) - a(2 delta) has it out.
"""

import math
from typing import NamedTuple

import numpy as np

from balancer.bias_record import Actuated, Floats, Law, Measurement

_LEAST_RATE = 0.2  # weight of a new sample of pairs: the graph changes with the bias and with training
_MOST_OF_LIMIT = 0.5  # a raised gain goes no further: at the limit itself the loop swings for ever


class LaplacianState(NamedTuple):
    """slope_LEE: [L, E, E] a_ij smoothed over the samples, 1 / score. inverse_LEE: (J + eps I)^-1, 0 before
    the first sample. unit_L: [L] bias that brings an average expert from nothing to its share. samples: pair
    counts seen. gain_L: [L] g in force."""

    slope_LEE: Floats
    inverse_LEE: Floats
    unit_L: Floats
    samples: int
    gain_L: Floats


def laplacian_law(
    delay_steps: int = 0, gain: float | None = None, ridge: float = 0.05, most: float = 1.0
) -> Law:
    """Return the law.

    gain: g, the share of an error that a step takes away; None: min(0.75, 1 / (2 d + 1)), a third of the
    stability limit 2 sin(pi / (2 (2 d + 1))). ridge: eps as a share of the mean diagonal of J; it bounds what
    is done about experts that hardly swap with others (dead ones). most: an expert moves in one step by at
    most this many times the shift that brings an average expert from nothing to its fair share. Before the
    first pair counts: no action. Raises ValueError for a gain not inside (0, the limit), ridge or most <= 0.
    """
    limit = 2.0 * math.sin(math.pi / (2 * (2 * delay_steps + 1)))
    own = min(0.75, 1.0 / (2 * delay_steps + 1)) if gain is None else gain
    if not 0 < own < limit:
        raise ValueError(
            f"law 'laplacian': gain={gain} must lie in (0, {limit:.3f}), the stability limit at delay_steps="
            f"{delay_steps}"
        )
    for name, value in (("ridge", ridge), ("most", most)):
        if not 0 < value < np.inf:
            raise ValueError(f"law 'laplacian': {name}={value} must be above 0 and finite")

    def init(num_layers: int, num_experts: int, top_k: int) -> LaplacianState:
        shape_LEE = (num_layers, num_experts, num_experts)
        unit_L, gain_L = np.zeros(num_layers), np.full(num_layers, own)
        return LaplacianState(np.zeros(shape_LEE), np.zeros(shape_LEE), unit_L, 0, gain_L)

    def update(
        measurement: Measurement, actuated: Actuated, state: LaplacianState
    ) -> tuple[Floats, LaplacianState]:
        state = _identify(measurement, state, ridge)
        r = measurement.top_k / measurement.counts_LE.shape[1]
        error_LE = -r * measurement.violation_LE  # r - n
        shift_LE = (state.inverse_LEE @ error_LE[:, :, None])[:, :, 0]
        # a dead expert stands apart in the graph: the others share one large shift, which is no change at all
        shift_LE = shift_LE - np.median(shift_LE, axis=1, keepdims=True)
        most_L1 = most * state.unit_L[:, None]
        return np.clip(state.gain_L[:, None] * shift_LE, -most_L1, most_L1), state

    def report(state: LaplacianState) -> dict[str, Floats]:
        return {"gain": state.gain_L.copy(), "most_gain": np.full_like(state.gain_L, limit)}

    def raise_gain(least_gain_L: Floats, state: LaplacianState) -> LaplacianState:
        least_L = np.minimum(least_gain_L, _MOST_OF_LIMIT * limit)
        return state._replace(gain_L=np.maximum(own, least_L))

    return Law("laplacian", init, update, needs=("pairs",), report=report, raise_gain=raise_gain)


def _identify(measurement: Measurement, state: LaplacianState, ridge: float) -> LaplacianState:
    """Take in pair counts, where this step has them."""
    near_LEE, wide_LEE = measurement.swap_pairs_LEE, measurement.wide_swap_pairs_LEE
    if near_LEE is None or wide_LEE is None:
        return state
    delta = measurement.swap_delta
    if delta is None or not delta > 0:
        raise ValueError(f"swap_delta={delta} must be above 0: pair counts are of tokens with a gap below it")
    extra_LEE = (2.0 * near_LEE - 0.5 * wide_LEE) / (2.0 * measurement.num_tokens * delta)
    slope_LEE = extra_LEE + extra_LEE.transpose(0, 2, 1)
    rate = max(1.0 / (state.samples + 1), _LEAST_RATE)
    slope_LEE = state.slope_LEE + rate * (slope_LEE - state.slope_LEE)
    num_experts = slope_LEE.shape[1]
    swaps_LEE = np.maximum(slope_LEE, 0.0)
    diagonal_LE = swaps_LEE.sum(axis=2)
    mean_L = diagonal_LE.mean(axis=1)
    scale_L = np.where(mean_L > 0, mean_L, 1.0)  # no swaps at all: no action
    matrix_LEE = -swaps_LEE
    matrix_LEE[:, range(num_experts), range(num_experts)] += diagonal_LE + ridge * scale_L[:, None]
    inverse_LEE = np.linalg.inv(matrix_LEE) * (mean_L > 0)[:, None, None]
    unit_L = np.where(mean_L > 0, measurement.top_k / (num_experts * scale_L), 0.0)
    return state._replace(
        slope_LEE=slope_LEE, inverse_LEE=inverse_LEE, unit_L=unit_L, samples=state.samples + 1
    )
