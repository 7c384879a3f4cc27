"""The true shares of every kind of synthetic trace: random generator and sizes in, shares [W, L, E] out.

Comes before `balancer/synth_kinds.py`, which counts copies of these shares. Experts of one layer have
unlike shares by log-normal draws, softmax(spread * normal); every function ends in shares of at most 1/K.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.synth import capped_shares, entropy_shares

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """num_samples W, num_layers L, num_experts E, top_k K. Raises ValueError for a size out of range."""

    num_samples: int
    num_layers: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_layers", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_experts <= self.top_k:
            raise ValueError(
                f"num_experts={self.num_experts} must be more than top_k={self.top_k}, or every token takes "
                f"them all; use {self.top_k + 1} or more"
            )


def constant(rng: np.random.Generator, sizes: Sizes, *, spread: float) -> Floats:
    """The same shares in every sample."""
    _check("spread", spread, 0, 5)
    return _over_time(capped_shares(_drawn(rng, sizes, spread), sizes.top_k), sizes)


def zipf(rng: np.random.Generator, sizes: Sizes, *, exponent: float) -> Floats:
    """The expert of rank r has a share in proportion to r^-exponent; which expert, differs by layer."""
    _check("exponent", exponent, 0, 5)
    by_rank_E = np.arange(1.0, sizes.num_experts + 1) ** -exponent
    ranks_LE = np.stack([rng.permutation(sizes.num_experts) for _ in range(sizes.num_layers)])
    return _over_time(capped_shares((by_rank_E / by_rank_E.sum())[ranks_LE], sizes.top_k), sizes)


def drift(rng: np.random.Generator, sizes: Sizes, *, sd: float, spread: float) -> Floats:
    """Log shares walk at random: ln(p_i / p_j) changes by 2 sd^2 W in variance over W samples."""
    _check("sd", sd, 0, 1)
    _check("spread", spread, 0, 5)
    first_LE = spread * rng.standard_normal((sizes.num_layers, sizes.num_experts))
    shape = (sizes.num_samples - 1, sizes.num_layers, sizes.num_experts)
    steps_WLE = np.concatenate([first_LE[None], sd * rng.standard_normal(shape)])
    return capped_shares(_softmax(np.cumsum(steps_WLE, axis=0)), sizes.top_k)


def step(rng: np.random.Generator, sizes: Sizes, *, at: int, spread: float) -> Floats:
    """One set of shares before sample `at` (0: half-way), another drawn apart from it on."""
    _check("at", at, 0, sizes.num_samples - 1)
    _check("spread", spread, 0, 5)
    before_LE, after_LE = (capped_shares(_drawn(rng, sizes, spread), sizes.top_k) for _ in range(2))
    later_W = np.arange(sizes.num_samples) >= (at or (sizes.num_samples + 1) // 2)
    return np.where(later_W[:, None, None], after_LE, before_LE)


def rotation(
    rng: np.random.Generator, sizes: Sizes, *, period: int, num_domains: int, spread: float
) -> Floats:
    """Mixture of profiles: domain d weighs (1 + cos(2 pi (w / period - d / D))) / D in sample w."""
    _check("period", period, 2, 10**6)
    _check("num_domains", num_domains, 2, 1000)
    _check("spread", spread, 0, 5)
    profiles_DLE = np.stack(
        [capped_shares(_drawn(rng, sizes, spread), sizes.top_k) for _ in range(num_domains)]
    )
    # the phase of sample w, exactly that of w + period; the cosines of D evenly spread phases sum to 0
    phase_W = (np.arange(sizes.num_samples) % period) / period
    turns_WD = phase_W[:, None] - np.arange(num_domains) / num_domains
    weight_WD = (1.0 + np.cos(2 * np.pi * turns_WD)) / num_domains
    return np.einsum("wd,dle->wle", weight_WD, profiles_DLE)


def bursts(
    rng: np.random.Generator, sizes: Sizes, *, num_bursts: int, length: int, factor: float, spread: float
) -> Floats:
    """Exactly num_bursts a layer, none in sample 0, at least one quiet sample between two."""
    free = sizes.num_samples - num_bursts * length
    _check("num_bursts", num_bursts, 0, 10**6)
    _check("length", length, 1, sizes.num_samples)
    _check("factor", factor, 1, 1000)
    _check("spread", spread, 0, 5)
    if free <= num_bursts:
        raise ValueError(
            f"num_bursts={num_bursts} of length={length} do not fit into num_samples={sizes.num_samples} "
            f"with quiet between; use at most {(sizes.num_samples - 1) // (length + 1)} bursts"
        )
    shares_LE = _drawn(rng, sizes, spread)
    shares_WLE = np.repeat(shares_LE[None], sizes.num_samples, axis=0)
    for layer in range(sizes.num_layers):
        # places among the quiet samples, in order, pushed back by the bursts before
        places = np.sort(rng.choice(np.arange(1, free + 1), num_bursts, replace=False))
        for i, place in enumerate(places):
            start, expert = int(place) + i * length, int(rng.integers(sizes.num_experts))
            shares_WLE[start : start + length, layer] = _with_odds(shares_LE[layer], expert, factor)
    return capped_shares(shares_WLE, sizes.top_k)


def collapse_fast(
    rng: np.random.Generator, sizes: Sizes, *, at: int, length: int, start: float, end: float
) -> Floats:
    """Entropy `start` before sample `at` (0: a quarter of the run), `end` from sample at + length - 1 on."""
    _check("length", length, 1, 3)
    return _collapse(rng, sizes, at or sizes.num_samples // 4, length, start, end)


def collapse_slow(
    rng: np.random.Generator, sizes: Sizes, *, at: int, frac: float, start: float, end: float
) -> Floats:
    """Entropy from `start` to `end` in a straight line over `frac` of the run from sample `at` on."""
    _check("frac", frac, 0, 1)
    length = max(1, round(frac * sizes.num_samples))
    return _collapse(rng, sizes, at or sizes.num_samples // 4, length, start, end)


def correlated(
    rng: np.random.Generator, sizes: Sizes, *, num_groups: int, sd: float, memory: float, spread: float
) -> Floats:
    """Log shares = constant + a factor of the expert's group: AR(1) of `sd`, coefficient exp(-1 / memory)."""
    _check("num_groups", num_groups, 2, sizes.num_experts)
    _check("sd", sd, 0, 5)
    _check("memory", memory, 0.1, 10**6)
    _check("spread", spread, 0, 5)
    base_LE = spread * rng.standard_normal((sizes.num_layers, sizes.num_experts))
    group_LE = np.stack([rng.permutation(sizes.num_experts) % num_groups for _ in range(sizes.num_layers)])
    keep = math.exp(-1.0 / memory)
    factor_WLG = sd * rng.standard_normal((sizes.num_samples, sizes.num_layers, num_groups))
    for w in range(1, sizes.num_samples):
        factor_WLG[w] = keep * factor_WLG[w - 1] + math.sqrt(1 - keep * keep) * factor_WLG[w]
    index_WLE = np.broadcast_to(group_LE, (sizes.num_samples, *group_LE.shape))
    return capped_shares(_softmax(base_LE + np.take_along_axis(factor_WLG, index_WLE, axis=-1)), sizes.top_k)


def balanced_by_bias(
    rng: np.random.Generator, sizes: Sizes, *, gain: float, every: int, spread: float
) -> Floats:
    """p - 1/E = (1 - gain)^h (jump - 1/E), h samples after the last jump; jumps at 0, every, 2 every.."""
    _check("gain", gain, 0, 1)
    _check("every", every, 1, 10**9)
    _check("spread", spread, 0, 5)
    shares_WLE = np.empty((sizes.num_samples, sizes.num_layers, sizes.num_experts))
    even = 1.0 / sizes.num_experts
    for first in range(0, sizes.num_samples, every):
        jump_LE = capped_shares(_drawn(rng, sizes, spread), sizes.top_k)
        left_H = (1.0 - gain) ** np.arange(min(every, sizes.num_samples - first))
        shares_WLE[first : first + every] = even + left_H[:, None, None] * (jump_LE - even)
    return shares_WLE


def _collapse(
    rng: np.random.Generator, sizes: Sizes, at: int, length: int, start: float, end: float
) -> Floats:
    """Shares whose height (h - h_min) / (1 - h_min) falls from start to end; h_min = ln K / ln E."""
    _check("at", at, 0, sizes.num_samples)
    for name, value in (("start", start), ("end", end)):
        _check(name, value, 0.002, 0.998)
    # squashed scores: ln share falls evenly over the ranks of the experts, a long tail of dead ones
    score_LE = np.tanh(0.8 * rng.standard_normal((sizes.num_layers, sizes.num_experts)))
    along_W = np.clip((np.arange(sizes.num_samples) - at + 1) / length, 0.0, 1.0)
    lowest = math.log(sizes.top_k) / math.log(sizes.num_experts)
    entropy_W = lowest + (1.0 - lowest) * (start + (end - start) * along_W)
    path_V, which_W = np.unique(entropy_W, return_inverse=True)  # most samples share the first or the last
    shares = [entropy_shares(score_LE, np.full(sizes.num_layers, h), sizes.top_k) for h in path_V]
    return np.stack(shares)[which_W]


def _with_odds(shares_E: Floats, expert: int, factor: float) -> Floats:
    """Multiply one expert's odds p / (1 - p); the others keep their ratios."""
    raised_E = shares_E.copy()
    raised_E[expert] *= factor
    return raised_E / raised_E.sum()


def _drawn(rng: np.random.Generator, sizes: Sizes, spread: float) -> Floats:
    return _softmax(spread * rng.standard_normal((sizes.num_layers, sizes.num_experts)))


def _softmax(logits_XE: Floats) -> Floats:
    soft = np.exp(logits_XE - logits_XE.max(axis=-1, keepdims=True))
    return soft / soft.sum(axis=-1, keepdims=True)


def _over_time(shares_LE: Floats, sizes: Sizes) -> Floats:
    return np.repeat(shares_LE[None], sizes.num_samples, axis=0)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} must lie between {low} and {high}")
