"""The slope of every expert: how far a bias must go to change its load, for the default bias law.

Under `balancer/bias_identified.py`. tau = r / J_ee, the bias per unit of violation at balance, J = dn/db.

    swap counts   J_ee = a_e E / (E - 1), a_e = tokens within delta of choosing otherwise / (2 T delta); the
                  factor is that of the nonzero eigenvalues of a complete graph to its diagonal
    margins       tau = (Q(r (1 - w)) - Q(r (1 + w))) / (2 w), Q(p) the margin above which p of the tokens lie

Swap counts come of all tokens near the choice, margins of those near balance: the first say more of an expert
that is about right, the second hold for one that is far off, or whose scores are narrower than delta.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bias_record import Floats, Measurement
from balancer.histogram import finite_edges
from balancer.kernels import bias_kernels

LEAST_SLOPE = 0.05  # of the layer's median: below it an expert's own slope is not believed
_SMOOTHING = 0.2  # weight of a new sample of swap counts: five samples, a hundred steps
_PRIOR_HITS = 10.0  # swaps that the layer's mean slope counts as: few hits say little
_TOO_WIDE = 1.5  # times the tau of the margins: beyond it that of the swaps is not believed
_BLEND = 0.3  # weight of new margins in the tau that they give
_WIDTH = 0.25  # of r: between shares that far to both sides of r the slope at balance is taken


class SlopeState(NamedTuple):
    """[L, E] or [L] float64, 0 before the first counts.

    near_LE, wide_LE, tokens_L: smoothed swap counts and the tokens they are of. delta_L: half the width.
    swap_tau_LE, margin_tau_LE: tau as either statistic gives it. tau_LE: the one that is believed.
    """

    near_LE: Floats
    wide_LE: Floats
    tokens_L: Floats
    delta_L: Floats
    swap_tau_LE: Floats
    margin_tau_LE: Floats
    tau_LE: Floats


def init_slopes(num_layers: int, num_experts: int) -> SlopeState:
    """Return the state before any counts."""
    experts = np.zeros((num_layers, num_experts))
    layers = np.zeros(num_layers)
    return SlopeState(
        near_LE=experts, wide_LE=experts.copy(), tokens_L=layers, delta_L=layers.copy(),
        swap_tau_LE=experts.copy(), margin_tau_LE=experts.copy(), tau_LE=experts.copy(),
    )  # fmt: skip


def read_slopes(measurement: Measurement, state: SlopeState) -> tuple[Floats | None, SlopeState]:
    """Learn the slopes from what this step has.

    Returns how far each bias is to go, [L, E] float64 in units of score, None without margins; and the state.
    Raises ValueError for edges that do not fit, or swaps without a swap_delta above 0.
    """
    counts_LEB, edges_X = measurement.margin_histogram_LEB, measurement.margin_edges_X
    if counts_LEB is None or edges_X is None or not measurement.num_tokens:
        return None, state if measurement.swaps_LE is None else _with_tau(_swapped(measurement, state))
    margin_LE3, width = _read_margins(counts_LEB, edges_X, measurement)
    found_LE, old_LE = (margin_LE3[..., 0] - margin_LE3[..., 2]) / (2.0 * width), state.margin_tau_LE
    near_LE = (found_LE < 2.0 * old_LE) & (old_LE < 2.0 * found_LE)
    smooth_LE = old_LE + _BLEND * (found_LE - old_LE)
    tau_LE = np.where(near_LE, smooth_LE, np.where(found_LE > 0.0, found_LE, old_LE))
    state = _swapped(measurement, state._replace(margin_tau_LE=tau_LE))
    return -margin_LE3[..., 1], _with_tau(state)


def _with_tau(state: SlopeState) -> SlopeState:
    """The tau of the swaps, or of the margins where there are no swaps, or where they are too wide."""
    swap_LE, margin_LE = state.swap_tau_LE, state.margin_tau_LE
    believed_LE = (swap_LE > 0.0) & ((margin_LE == 0.0) | (swap_LE < _TOO_WIDE * margin_LE))
    return state._replace(tau_LE=np.where(believed_LE, swap_LE, margin_LE))


def _read_margins(
    counts_LEB: NDArray[Any], edges_X: Floats, measurement: Measurement
) -> tuple[Floats, float]:
    """Margins [L, E, 3] above which r (1 - width), r and r (1 + width) of the tokens lie, and the width."""
    r = measurement.top_k / counts_LEB.shape[1]
    tokens = r * measurement.num_tokens
    width = min(max(_WIDTH, min(0.5, 4.0 / math.sqrt(tokens))), 0.5 * (1.0 - r) / r)
    counts_LEB = np.ascontiguousarray(counts_LEB, np.int64 if counts_LEB.dtype.kind in "iu" else np.float64)
    margin_LE3 = np.empty((*counts_LEB.shape[:2], 3))
    wanted_3 = tokens * np.array([1.0 - width, 1.0, 1.0 + width])
    bias_kernels().read_margins(counts_LEB, finite_edges(edges_X, counts_LEB.shape[2]), wanted_3, margin_LE3)
    return margin_LE3, width


def _swapped(measurement: Measurement, state: SlopeState) -> SlopeState:
    """Take in swap counts, where this step has them."""
    if measurement.swaps_LE is None or measurement.wide_swaps_LE is None or not measurement.num_tokens:
        return state
    delta = measurement.swap_delta
    if delta is None or not delta > 0:
        raise ValueError(f"swap_delta={delta} must be above 0: swap counts are tokens with a gap below it")
    old_L = np.where((state.delta_L == delta) & (state.tokens_L > 0), 1.0 - _SMOOTHING, 0.0)[:, None]
    # wanted is the slope at balance, and a share's slope goes about with the share
    share_LE = np.clip(1.0 + measurement.violation_LE, 1.0 / 3.0, 8.0)
    near_LE = old_L * state.near_LE + measurement.swaps_LE / share_LE
    wide_LE = old_L * state.wide_LE + measurement.wide_swaps_LE / share_LE
    tokens_L = old_L[:, 0] * state.tokens_L + measurement.num_tokens
    scaled_LE = (2.0 * near_LE - 0.5 * wide_LE) / (2.0 * tokens_L[:, None] * delta)
    slope_LE = _shrunk(np.maximum(scaled_LE, 0.0), near_LE * _near_balance(measurement.violation_LE) ** 2)
    r = measurement.top_k / slope_LE.shape[1]
    eigen = slope_LE.shape[1] / (slope_LE.shape[1] - 1)
    tau_LE = np.where(slope_LE > 0, r / np.maximum(slope_LE * eigen, 1e-300), state.swap_tau_LE)
    return state._replace(
        near_LE=near_LE, wide_LE=wide_LE, tokens_L=tokens_L, delta_L=np.full_like(tokens_L, delta),
        swap_tau_LE=tau_LE,
    )  # fmt: skip


def _near_balance(y_LE: Floats) -> Floats:
    """min(n/r, r/n): 1 at balance, 0 for an expert that gets nothing."""
    share_LE = 1.0 + y_LE
    return np.minimum(share_LE, 1.0 / np.maximum(share_LE, 1e-9))


def _shrunk(slope_LE: Floats, hits_LE: Floats) -> Floats:
    """Slopes drawn to the layer's mean where there are few hits, and none far below the median.

    hits_LE: swaps that each expert's own slope rests on; far from balance they say little about it.
    """
    hits_L1 = hits_LE.sum(axis=1, keepdims=True)
    plain_L1 = slope_LE.mean(axis=1, keepdims=True)
    mean_L1 = ((hits_LE * slope_LE).sum(axis=1, keepdims=True) + plain_L1) / (hits_L1 + 1.0)
    slope_LE = (hits_LE * slope_LE + _PRIOR_HITS * mean_L1) / (hits_LE + _PRIOR_HITS)
    median_L1 = np.median(slope_LE, axis=1, keepdims=True)
    return np.maximum(slope_LE, LEAST_SLOPE * median_L1)
