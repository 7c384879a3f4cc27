"""Bias laws that look at the tokens: by quantiles of their margins, and by a linear program over a sample.

Under `balancer/bias.py`. They find where the bias should be instead of feeling their way by the load, at the
price of what they read: a histogram of the margins of all tokens, or the scores of some.

    margin of a token for an expert = score + bias - K-th largest score + bias of the other experts
    selected where it is above 0, so the share n of an expert is what lies above 0; r should:
    shift the expert by less than its quantile at 1 - r, and with all others fixed it gets exactly r
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.bias_laws import Nothing
from balancer.bias_record import Actuated, Floats, Law, Measurement
from balancer.histogram import finite_edges


def quantile_law(delay_steps: int = 0, absolute: bool = False) -> Law:
    """u_e = -(quantile at 1 - r of the margins of expert e): the whole way in one step.

    All experts move at once, so the step is too long by about the share that the others take back, and with
    delay the loop rings or diverges. absolute: count the step from the bias under which the margins were
    measured (as quantile balancing is published: the bias is found anew) instead of from the newest; the same
    without delay. A step without margins: no action. Source: Su 2026, quantile balancing ("Optimal allocation
    for equilibrium"), there on scores less a threshold of the token.
    """
    del delay_steps
    return _quantile("quantile", 1.0, absolute)


def quantile_damped_law(delay_steps: int = 0, step: float = 0.3, absolute: bool = False) -> Law:
    """`step` of the change of `quantile_law`: the damped rival that steps over noise and delay.

    step: share of the way, in (0, 1]; 0.3 is stable to a delay of 2. Raises ValueError for a step out of
    range.
    """
    del delay_steps
    if not 0 < step <= 1:
        raise ValueError(f"law 'quantile-damped': step={step} must be above 0 and at most 1, a share")
    return _quantile("quantile-damped", step, absolute)


def bip_law(delay_steps: int = 0, rounds: int = 4) -> Law:
    """u = b_new - b, b_new = -q from the dual of the assignment that serves each expert alike.

    max sum of scores over assignments of K experts to each token and M K / E tokens to each expert has prices
    p of the tokens and q of the experts; they are found in turn, `rounds` times, from
    the bias at hand: p_t = (K+1)-th largest of s_te - q_e, q_e = (M K / E + 1)-th largest of s_te - p_t, none
    below 0. It reads scores, never the load: the noise is that of M tokens. A step without a sample: no
    action. Source: Sun 2025, algorithm 1 (arXiv 2502.15451), which takes all tokens of the batch. Raises
    ValueError for rounds < 1.
    """
    del delay_steps
    if rounds < 1:
        raise ValueError(f"law 'bip': rounds={rounds} must be 1 or more")

    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        if measurement.sample_LME is None:
            return np.zeros_like(actuated.newest_LE), state
        sample_LME = np.asarray(measurement.sample_LME, dtype=np.float64)
        price_LE = actuated.newest_LE.max(axis=1, keepdims=True) - actuated.newest_LE
        for _ in range(rounds):
            price_LE = _prices(sample_LME, price_LE, measurement.top_k)
        change_LE = -price_LE - actuated.newest_LE
        return change_LE - change_LE.mean(axis=1, keepdims=True), state

    return Law("bip", _no_state, update, needs=("sample",))


def margin_quantile(counts_LEB: NDArray[Any], edges_X: Floats, top_k: int) -> Floats:
    """Return the margin above which r = K / E of each expert's tokens lie, spread evenly within a bin.

    counts_LEB: [L, E, B] tokens by margin. edges_X: [B + 1] increasing; the outermost may be infinite, and
    the outermost bins are then taken to end at their inner edge. Of several such margins (empty bins) the one
    next to 0: a share that is right needs no shift. Returns [L, E] float64 in units of score, 0 where nothing
    was counted. Raises ValueError for edges that do not fit.

    >>> margin_quantile(np.array([[[2, 2, 0, 4], [0, 4, 1, 3]]]), np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), 1)
    array([[0.   , 0.   ]])
    """
    edges_X = finite_edges(edges_X, counts_LEB.shape[-1])
    num_experts = counts_LEB.shape[1]
    upto_LEB = np.cumsum(counts_LEB, axis=-1)
    wanted_LE = upto_LEB[..., -1] * (num_experts - top_k) / num_experts  # exact where it is a whole number
    first_LE = _first(upto_LEB, wanted_LE, strictly=False)
    last_LE = _first(upto_LEB, wanted_LE, strictly=True)
    inside_LE = np.take_along_axis(counts_LEB, first_LE[..., None], axis=-1)[..., 0]
    over_LE = np.take_along_axis(upto_LEB, first_LE[..., None], axis=-1)[..., 0] - wanted_LE
    part_LE = over_LE / np.maximum(inside_LE, 1)
    low_LE = edges_X[first_LE + 1] - part_LE * (edges_X[first_LE + 1] - edges_X[first_LE])
    high_LE = np.where(last_LE > first_LE, edges_X[last_LE], low_LE)
    return np.where(upto_LEB[..., -1] > 0, np.clip(0.0, low_LE, high_LE), 0.0)


def _quantile(name: str, step: float, absolute: bool) -> Law:
    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        counts_LEB, edges_X = measurement.margin_histogram_LEB, measurement.margin_edges_X
        if counts_LEB is None or edges_X is None:
            return np.zeros_like(actuated.newest_LE), state
        change_LE = -margin_quantile(counts_LEB, edges_X, measurement.top_k)
        if absolute:
            change_LE += actuated.measured_LE - actuated.newest_LE
        return step * change_LE, state

    return Law(name, _no_state, update, needs=("margins",))


def _no_state(num_layers: int, num_experts: int, top_k: int) -> Nothing:
    return Nothing()


def _prices(sample_LME: Floats, price_LE: Floats, top_k: int) -> Floats:
    """One round of the dual: prices of the tokens, then of the experts."""
    _, tokens, experts = sample_LME.shape
    at = experts - 1 - top_k
    token_LM = np.partition(sample_LME - price_LE[:, None, :], at, axis=2)[:, :, at]
    rest_LME = sample_LME - np.maximum(token_LM, 0.0)[:, :, None]
    at = tokens - 1 - tokens * top_k // experts
    return np.maximum(np.partition(rest_LME, at, axis=1)[:, at, :], 0.0)


def _first(upto_LEB: NDArray[Any], wanted_LE: Floats, *, strictly: bool) -> NDArray[np.int64]:
    """[L, E] first bin with upto >= wanted (strictly: > wanted), the last bin where there is none.

    Bisection: a comparison of whole histograms would read all of them.
    """
    num_bins = upto_LEB.shape[-1]
    low_LE = np.zeros(wanted_LE.shape, dtype=np.int64)
    high_LE = np.full(wanted_LE.shape, num_bins - 1)
    for _ in range((num_bins - 1).bit_length()):
        middle_LE = (low_LE + high_LE) // 2
        upto_LE = np.take_along_axis(upto_LEB, middle_LE[..., None], axis=-1)[..., 0]
        found_LE = upto_LE > wanted_LE if strictly else upto_LE >= wanted_LE
        high_LE = np.where(found_LE, middle_LE, high_LE)
        low_LE = np.where(found_LE, low_LE, np.minimum(middle_LE + 1, high_LE))
    return high_LE
