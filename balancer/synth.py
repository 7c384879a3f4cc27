"""A synthetic load trace with a routing collapse, for demos and tests where no real trace is at hand.

Beside the flow: it makes a `Trace` as training would write it. The shape is that of a collapse seen in the
training of a GPT with top-2 routing and no effective balance loss: nearly uniform at the first sample,
collapsed onto few experts one to three samples later, a partial recovery until a tenth of the run, then a
slow relapse. Per sample:

    preference of each expert, drifting      walk that keeps its variance, + jitter that does not last
    reference of the normalised entropy h    a curve over the run, spread over the layers
    shares                                   softmax(gain * preference), gain such that h is met, at most 1/K
    counts                                   Dirichlet-multinomial: over-dispersed, with an exact sum
"""

import math

import numpy as np
from numpy.typing import NDArray

from balancer.dispersion import draw_counts
from balancer.trace import Trace

# Normalised entropy, mean over layers, where two of 32 experts sharing everything (h = 0.2) are the floor.
_START, _COLLAPSE, _RECOVERED, _END = 0.994, (0.408, 0.282, 0.243), 0.654, 0.551
_SCALE_FLOOR = 0.2
_RECOVERED_AT_FRAC = 0.1
# Standard deviation of h over the layers: at the start, in the first collapsed sample, at the bottom, at the
# end.
_SPREAD_START, _SPREAD_FALL, _SPREAD_BOTTOM, _SPREAD_END = 0.002, 0.15, 0.06, 0.12
# Variance of the counts over that of a multinomial: in the collapse, and once the router is settled.
_DISPERSION_COLLAPSE, _DISPERSION_SETTLED = 20.0, 2.3
# New part of the preferences in sample w: 1/w of their spread, at least the first. Jitter of one sample: the
# second.
_DRIFT_SETTLED, _JITTER = 0.006, 0.015


def collapse_trace(
    seed: int = 0,
    num_samples: int = 501,
    num_layers: int = 24,
    num_experts: int = 32,
    copies: int = 262144,
    top_k: int = 2,
) -> Trace:
    """Return a seeded trace of a run whose routing collapses, partly recovers, and slowly relapses.

    seed: of the random generator; one seed, one trace. num_samples: W, one every 10 steps from step 1 on;
    501. num_layers: L. num_experts: E, more than top_k. copies: routed copies N of every layer and sample;
    1000 * E or more keeps counting noise small. top_k: K, no expert gets more than N/K. Returns the Trace;
    each layer of each sample sums to `copies`, also in its meta as "copies_per_step". The entropies are those
    of E 32, K 2, scaled to what other E and K allow. Raises ValueError for a size out of range.

    >>> trace = collapse_trace(num_samples=3, num_layers=2, num_experts=8, copies=800)
    >>> trace.steps_W, trace.tokens_per_expert_WLE.sum(axis=-1).tolist()
    (array([ 1, 11, 21]), [[800, 800], [800, 800], [800, 800]])
    """
    _check_sizes(num_samples, num_layers, num_experts, copies, top_k)
    rng = np.random.default_rng(seed)
    counts_WLE = np.zeros((num_samples, num_layers, num_experts), dtype=np.int64)
    # which layers stay high in the collapse is not which do so later
    fall_L, late_L = _centred(rng, num_layers), _centred(rng, num_layers)
    preference_LE = rng.standard_normal((num_layers, num_experts))
    for w in range(num_samples):
        settled = _settled(w, num_samples)
        if w:
            preference_LE = _drift(rng, preference_LE, max(_DRIFT_SETTLED, 1.0 / w))
        entropy_L = _entropy_reference(w, num_samples) + _spread(w, settled, fall_L, late_L)
        jitter_LE = _JITTER * rng.standard_normal(preference_LE.shape)
        # squashed, so that ln share falls evenly over the ranks of the experts: a long tail of dead ones
        score_LE = np.tanh(0.8 * preference_LE + jitter_LE)
        shares_LE = entropy_shares(score_LE, _scaled(entropy_L, num_experts, top_k), top_k)
        dispersion = _DISPERSION_COLLAPSE ** (1 - settled) * _DISPERSION_SETTLED**settled
        counts_WLE[w] = _draw(rng, shares_LE, copies, dispersion, math.ceil(copies / top_k))
    meta = {"source": "synthetic collapse", "seed": seed, "copies_per_step": copies, "top_k": top_k}
    steps_W = 1 + 10 * np.arange(num_samples, dtype=np.int64)
    return Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W, meta=meta)


def _check_sizes(num_samples: int, num_layers: int, num_experts: int, copies: int, top_k: int) -> None:
    sizes = {"num_samples": num_samples, "num_layers": num_layers, "copies": copies, "top_k": top_k}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_experts <= top_k:
        raise ValueError(
            f"num_experts={num_experts} must be more than top_k={top_k}, or every token takes them all; "
            f"use {top_k + 1} or more"
        )


def _settled(w: int, num_samples: int) -> float:
    """Return how far the router has left the collapse: 0 until sample 3, 1 from the recovery's end on."""
    return min(1.0, max(0, w - 3) / (_recovered_at(num_samples) - 3))


def _recovered_at(num_samples: int) -> int:
    return max(8, round(_RECOVERED_AT_FRAC * (num_samples - 1)))


def _entropy_reference(w: int, num_samples: int) -> float:
    """Return the normalised entropy of sample w, mean over layers, on the scale of E 32, K 2."""
    recovered_at = _recovered_at(num_samples)
    if w <= 3:
        return (_START, *_COLLAPSE)[w]
    if w <= recovered_at:
        return _COLLAPSE[-1] + (_RECOVERED - _COLLAPSE[-1]) * _eased(_settled(w, num_samples), 3.0)
    along = (w - recovered_at) / max(1, num_samples - 1 - recovered_at)
    return _RECOVERED + (_END - _RECOVERED) * _eased(along, 3.0)


def _eased(x: float, rate: float) -> float:
    """Return an exponential approach from 0 at x = 0 to 1 at x = 1."""
    return (1 - math.exp(-rate * x)) / (1 - math.exp(-rate))


def _centred(rng: np.random.Generator, num_layers: int) -> NDArray[np.float64]:
    """Return one normal number a layer with mean exactly 0 and, from three layers on, deviation 1."""
    draw_L = rng.standard_normal(num_layers)
    centred_L = draw_L - draw_L.mean()
    return centred_L / centred_L.std() if num_layers > 2 else centred_L


def _spread(
    w: int, settled: float, fall_L: NDArray[np.float64], late_L: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each layer's distance from the mean entropy in sample w, [L]."""
    if w == 0:
        return _SPREAD_START * fall_L
    fall = _SPREAD_BOTTOM + (_SPREAD_FALL - _SPREAD_BOTTOM) * max(0.0, 1 - (w - 1) / 2)
    return (1 - settled) * fall * fall_L + settled * _SPREAD_END * late_L


def _drift(rng: np.random.Generator, preference_LE: NDArray[np.float64], new: float) -> NDArray[np.float64]:
    """Mix a share of new preferences in; the variance stays 1."""
    return math.sqrt(1 - new * new) * preference_LE + new * rng.standard_normal(preference_LE.shape)


def _scaled(entropy_L: NDArray[np.float64], num_experts: int, top_k: int) -> NDArray[np.float64]:
    """Map entropies from the scale of E 32, K 2 to what K of E experts can reach."""
    floor = math.log(top_k) / math.log(num_experts)
    height_L = np.clip((entropy_L - _SCALE_FLOOR) / (1 - _SCALE_FLOOR), 0.002, 0.998)
    return floor + (1 - floor) * height_L


def entropy_shares(
    score_LE: NDArray[np.float64], entropy_L: NDArray[np.float64], top_k: int
) -> NDArray[np.float64]:
    """Return shares softmax(gain * score), at most 1/K each, of given normalised entropies.

    score_LE: [L, E], in -1..1, unlike. entropy_L: [L], between ln K / ln E and 1. A layer's gain is found by
    bisection of ln gain. Returns [L, E] float64.
    """
    num_layers, num_experts = score_LE.shape
    # scores lie in -1..1: a gain of e^5.5 = 245 leaves shares of 1e-213 and more, small but divisible
    low_L, high_L = np.full(num_layers, -7.0), np.full(num_layers, 5.5)
    shares_LE = np.zeros_like(score_LE)
    for _ in range(24):  # 12.5 / 2^24: ln gain to 1e-6
        middle_L = (low_L + high_L) / 2
        logits_LE = np.exp(middle_L)[:, None] * score_LE
        soft_LE = np.exp(logits_LE - logits_LE.max(axis=-1, keepdims=True))
        shares_LE = capped_shares(soft_LE / soft_LE.sum(axis=-1, keepdims=True), top_k)
        log_LE = np.log(np.where(shares_LE > 0, shares_LE, 1.0))
        even_L = -(shares_LE * log_LE).sum(axis=-1) / math.log(num_experts) > entropy_L
        low_L, high_L = np.where(even_L, middle_L, low_L), np.where(even_L, high_L, middle_L)
    return shares_LE


def capped_shares(shares_LE: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Clip shares [..., E] to 1/K and give what is over to the others in proportion; rows sum to 1."""
    cap = 1.0 / top_k
    for _ in range(top_k):  # each pass can lift at most one more expert over the cap
        full_LE = shares_LE >= cap
        rest_LE = np.where(full_LE, 0.0, shares_LE)
        room_L = 1.0 - cap * full_LE.sum(axis=-1, keepdims=True)
        total_L = rest_LE.sum(axis=-1, keepdims=True)
        shares_LE = np.where(full_LE, cap, rest_LE * (room_L / np.where(total_L > 0, total_L, 1.0)))
    clipped_LE = np.minimum(shares_LE, cap)
    return clipped_LE / clipped_LE.sum(axis=-1, keepdims=True)


def _draw(
    rng: np.random.Generator, shares_LE: NDArray[np.float64], copies: int, dispersion: float, limit: int
) -> NDArray[np.int64]:
    """Draw counts [L, E] whose variance is `dispersion` times a multinomial's, each at most `limit`."""
    return levelled_counts(draw_counts(rng, shares_LE, copies, dispersion), limit)


def levelled_counts(counts_XE: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Move what is over the limit to the fullest experts that have room.

    counts_XE: [..., E] int64. limit: most copies of an expert; E times it must hold each row. Returns
    [..., E] int64 of the same sums.
    """
    num_experts = counts_XE.shape[-1]
    result_RE = np.minimum(counts_XE, limit).reshape(-1, num_experts)
    left_R = counts_XE.reshape(-1, num_experts).sum(axis=-1) - result_RE.sum(axis=-1)
    for row in np.flatnonzero(left_R):
        order_E = np.argsort(-counts_XE.reshape(-1, num_experts)[row], kind="stable")
        room_E = limit - result_RE[row, order_E]
        before_E = np.cumsum(room_E) - room_E  # one is filled to the limit before the next gets any
        result_RE[row, order_E] += np.clip(left_R[row] - before_E, 0, room_E)
    return result_RE.reshape(counts_XE.shape)
