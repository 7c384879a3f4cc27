"""Sampling noise of counted loads: what it is, how large it is, and how to draw it.

After the figures of merit and before forecasts and scenarios, which take the noise from here. A sample of N
copies with expected shares p counts N*p copies of an expert, with variance

    phi * N * p * (1 - p)        phi = 1: every copy chooses alone (multinomial)

phi, the over-dispersion, is above 1 where copies choose together (tokens of one text take the same experts)
and below 1 where they avoid each other: the K experts of a token are distinct, which alone gives about
(1 - K*p) / (1 - p). One phi for a layer is a model: on a real trace heavy experts show more of it than light
ones, so take it as the mean over the experts.

Square-root shares: with y = sqrt(share) a small error of the share is dy = dp / (2 sqrt p), so that

    var y = phi * (1 - p) / (4 N)

which hardly depends on p: one noise for all experts of a layer, as filters like it (Anscombe's square root of
a Poisson count, whose offset of 3/8 matters below some 4 counts only and is left out: a share of 0 stays 0).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.metrics import checked_load, load_shares

Floats = NDArray[np.float64]

# samples that one measurement of the noise looks at
_SPAN = 6
# experts that expect fewer copies (or miss fewer) say little, and their counts are no bell curve
_MIN_COPIES = 5.0
# a change of more than this many times the usual energy (three usual deviations) is a jump: no noise to
# measure there. Energy: mean squared change over that of multinomial noise; usual is at least the second.
_JUMP, _LEAST_ENERGY = 9.0, 0.1
# the usual energy of the running estimate forgets this many times faster than the noise's part of it
_LEVEL_RATE = 5.0


def sqrt_shares(counts_XE: ArrayLike) -> Floats:
    """Return square-root shares, whose sampling variance phi (1 - p) / (4 N) hardly depends on the share.

    counts_XE: [..., E] copies or shares. Returns [..., E] float64 whose squares sum to 1; NaN for a row of
    zero load. Raises ValueError for what is no load.

    >>> sqrt_shares([9, 16, 0])
    array([0.6, 0.8, 0. ])
    """
    return np.sqrt(load_shares(counts_XE))


def shares_from_sqrt(mean_XE: ArrayLike, var_XE: ArrayLike = 0.0) -> Floats:
    """Return the expected shares of square-root shares of a given mean and variance.

    mean_XE: [..., E], mean of sqrt(share); below 0 counts as 0. var_XE: its variance, broadcast; 0 or more.
    Returns [..., E] float64 that sum to 1: mean^2 + variance, which is exact for any distribution (without
    the variance, light experts come out too light), divided by the sum; a row of zeros becomes uniform.
    Raises ValueError for a negative variance or an entry that is not finite.

    >>> shares_from_sqrt([0.6, 0.8])
    array([0.36, 0.64])
    """
    mean, var = np.asarray(mean_XE, dtype=np.float64), np.asarray(var_XE, dtype=np.float64)
    if not np.isfinite(mean).all() or not np.isfinite(var).all() or (var < 0).any():
        raise ValueError("mean and variance of square-root shares must be finite, the variance 0 or more")
    square = np.maximum(mean, 0.0) ** 2 + var
    total = square.sum(axis=-1, keepdims=True)
    return np.where(total > 0, square / np.where(total > 0, total, 1.0), 1.0 / square.shape[-1])


def sampling_std(share: ArrayLike, copies: ArrayLike, phi: ArrayLike = 1.0) -> Floats:
    """Return the standard deviation of a counted share: sqrt(phi p (1 - p) / N).

    share: p, expected, in [0, 1]. copies: N that the sample counts, 1 or more. phi: over-dispersion, 0 or
    more; all broadcast. Returns float64. Raises ValueError for a value out of range.

    >>> float(sampling_std(0.5, 10000))
    0.005
    """
    p, n, factor = (np.asarray(x, dtype=np.float64) for x in (share, copies, phi))
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("a share must lie in [0, 1]; pass load_shares(counts)")
    if not (n >= 1).all() or not (factor >= 0).all():
        raise ValueError("copies must be 1 or more and phi 0 or more (1 is multinomial)")
    return np.sqrt(factor * p * (1.0 - p) / n)


def estimate_dispersion(window_WLE: ArrayLike) -> Floats:
    """Return the over-dispersion phi of each layer, from how neighbouring samples differ.

    window_WLE: [W, L, E] copies of W samples in order, 6 or more to say anything; 50 give about 10 % for 32
    experts. Returns phi_L [L] float64: 1 for multinomial noise, below 1 for distinct experts without other
    over-dispersion, 0 where the estimate is not above zero; NaN where nothing can be told (no 6 samples with
    load in a row, or no expert that expects 5 copies). Raises ValueError for what is no load [W, L, E].

    With D_w the change of a share from sample w to w + 1, a measurement is

        D_0 * (mean of D_2, D_3, D_4  -  D_1)        expectation: the noise variance of sample 1

    since D_0 and D_1 hold its noise with opposite signs and D_2.. hold none of it. A random walk of the share
    adds nothing (its steps are independent), nor does a trend (it adds the same to both products), so drift
    does not inflate phi as it does plain differences. Large cycles of fewer than some 80 samples make it too
    small (measured: a third of 2.3 at 40 samples, 0.9 of it at 80). Each expert's is divided by
    p (1 - p) / N; phi is the mean over the experts and samples. Six samples with a jump among them (the
    largest of their mean squared changes is over 9 times what it is in the median) are left out.

    >>> rng = np.random.default_rng(0)
    >>> window = rng.multinomial(10000, [0.1, 0.2, 0.3, 0.4], size=(4000, 1))
    >>> estimate_dispersion(window).round(1)
    array([1.])
    """
    window = checked_load(window_WLE, "window")
    if window.ndim != 3:
        raise ValueError(f"window has shape {window.shape}; expected [W, L, E]")
    phi_L = np.full(window.shape[1], np.nan)
    if window.shape[0] < _SPAN:
        return phi_L
    for layer in range(window.shape[1]):  # one at a time, so that a long trace costs little memory
        phi_L[layer] = _layer_dispersion(window[:, layer])
    return phi_L


class DispersionState(NamedTuple):
    """Running over-dispersion of every layer.

    shares_SLE, copies_SL: the last 6 samples, the newest last. level_L: largest mean squared change among
    six, over that of multinomial noise, lately; NaN before the first. noise_L, energy_L: weighted sums of the
    measured noise and of those largest changes, both over the level at their time. memory: [], samples.
    """

    shares_SLE: Floats
    copies_SL: Floats
    level_L: Floats
    noise_L: Floats
    energy_L: Floats
    memory: Floats


def init_dispersion(num_layers: int, num_experts: int, memory: float = 50.0) -> DispersionState:
    """Return the state before the first sample.

    memory: samples after which a measurement's weight is down to 1/e; 50: phi to 10 % for 32 experts, shorter
    follows a collapse sooner. Raises ValueError for a size below 1 or a memory below 6.
    """
    for name, value, least in (("num_layers", num_layers, 1), ("num_experts", num_experts, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if not memory >= _SPAN:
        raise ValueError(f"memory={memory} must be at least {_SPAN} samples; 50 is a good value")
    zero_L = np.zeros(num_layers)
    return DispersionState(
        shares_SLE=np.zeros((_SPAN, num_layers, num_experts)),
        copies_SL=np.zeros((_SPAN, num_layers)),
        level_L=np.full(num_layers, np.nan),
        noise_L=zero_L,
        energy_L=zero_L.copy(),
        memory=np.array(float(memory)),
    )


def update_dispersion(tokens_per_expert_LE: ArrayLike, state: DispersionState) -> DispersionState:
    """Return the state after one more sample; the given one stays as it is.

    tokens_per_expert_LE: [L, E] copies. A layer without load takes no part until six samples with load have
    come. Raises ValueError for another shape or what is no load.
    """
    counts = checked_load(tokens_per_expert_LE, "tokens_per_expert")
    if counts.shape != state.shares_SLE.shape[1:]:
        raise ValueError(
            f"tokens_per_expert has shape {counts.shape}, expected [L, E] = {state.shares_SLE.shape[1:]}"
        )
    copies_L = counts.sum(axis=-1)
    shares_LE = counts / np.where(copies_L > 0, copies_L, 1.0)[:, None]
    shares_SLE = np.concatenate([state.shares_SLE[1:], shares_LE[None]])
    copies_SL = np.concatenate([state.copies_SL[1:], copies_L[None]])
    parts = _measure(shares_SLE, copies_SL)
    energy_L, noise_L, weight_L = parts.energy_WL[0], parts.noise_WL[0], parts.weight_WL[0]

    level_L = np.maximum(np.where(np.isnan(state.level_L), energy_L, state.level_L), _LEAST_ENERGY)
    seen_L = weight_L > 0
    used_L = seen_L & (energy_L <= _JUMP * level_L)
    # a jump counts nine-fold at most, and slowly: one does not become the usual, a lasting change does
    keep = float(np.exp(-1.0 / state.memory))
    keep_level_L = np.where(used_L, keep**_LEVEL_RATE, keep)
    next_L = keep_level_L * level_L + (1 - keep_level_L) * np.minimum(energy_L, _JUMP * level_L)
    return DispersionState(
        shares_SLE=shares_SLE,
        copies_SL=copies_SL,
        level_L=np.where(seen_L, next_L, state.level_L),
        noise_L=np.where(used_L, keep * state.noise_L + noise_L / level_L, state.noise_L),
        energy_L=np.where(used_L, keep * state.energy_L + weight_L * energy_L / level_L, state.energy_L),
        memory=state.memory,
    )


def current_dispersion(state: DispersionState) -> Floats:
    """Return the over-dispersion phi_L [L] of a state: the noise's part of the changes times their level now.

    What counts as noise is as for `estimate_dispersion`; its part of the changes is remembered for `memory`
    samples, their level for a fifth of them, so that a collapse is soon forgotten.
    """
    known_L = state.energy_L > 0
    part_L = np.maximum(state.noise_L, 0.0) / np.where(known_L, state.energy_L, 1.0)
    return np.where(known_L, part_L * state.level_L, np.where(state.level_L > 0, 0.0, np.nan))


def draw_counts(
    rng: np.random.Generator, shares_XE: ArrayLike, copies: ArrayLike, phi: ArrayLike = 1.0
) -> NDArray[np.int64]:
    """Draw counts with expected shares, an exact sum, and phi times the variance of a multinomial.

    shares_XE: [..., E] expected, every row of them sums to 1. copies: integer N, or one for each row [...].
    phi: over-dispersion, or one for each row. Returns [..., E] int64 that sum to N: Dirichlet-multinomial of
    concentration a with (N + a) / (1 + a) = phi; at phi of 1 and below, and where N is at most 1, multinomial
    (less noise than that needs the tokens themselves); phi is at most (N + 1) / 2. Raises ValueError for a
    bad share, negative copies, or phi that is negative or not finite.

    >>> draw_counts(np.random.default_rng(0), [[0.5, 0.5], [1.0, 0.0]], 100, 2.0).sum(axis=-1)
    array([100, 100])
    """
    shares = load_shares(shares_XE, "shares")
    if np.isnan(shares).any():
        raise ValueError("shares have a row of zeros; give every row one share above 0 (uniform: all equal)")
    rows = shares.shape[:-1]
    copies_X = np.broadcast_to(np.asarray(copies), rows)
    phi_X = np.broadcast_to(np.asarray(phi, dtype=np.float64), rows)
    if copies_X.dtype.kind not in "iu" or (copies_X < 0).any():
        raise ValueError(f"copies={copies!r} must be an integer of 0 or more, or one for each row")
    if not np.isfinite(phi_X).all() or (phi_X < 0).any():
        raise ValueError(
            "phi must be finite and 0 or more; 1 is multinomial, where it is NaN nothing is known"
        )
    mixed_X = (phi_X > 1.0) & (copies_X > 1)
    if mixed_X.any():
        spread = _dirichlet(rng, shares, copies_X, np.where(mixed_X, phi_X, 2.0))
        shares = np.where(mixed_X[..., None], spread, shares)
    return rng.multinomial(copies_X, shares).astype(np.int64, copy=False)


def _dirichlet(
    rng: np.random.Generator, shares_XE: Floats, copies_X: NDArray[np.int64], phi_X: Floats
) -> Floats:
    concentration_X = np.maximum(1.0, (copies_X - phi_X) / (phi_X - 1.0))
    gamma_XE = rng.standard_gamma(concentration_X[..., None] * shares_XE)
    total_X = gamma_XE.sum(axis=-1, keepdims=True)
    # a total of zero is an underflow of very many, very small shapes
    return np.where(total_X > 0, gamma_XE / np.where(total_X > 0, total_X, 1.0), shares_XE)


class _Parts(NamedTuple):
    """Of every run of 6 samples: sums over the experts that count, in units of multinomial noise."""

    noise_WL: Floats  # measured noise
    weight_WL: Floats  # number of experts that count
    energy_WL: Floats  # the largest of the five mean squared changes


def _layer_dispersion(window_WE: Floats) -> float:
    copies_W1 = window_WE.sum(axis=-1)[:, None]
    shares_W1E = (window_WE / np.where(copies_W1 > 0, copies_W1, 1.0))[:, None]
    parts = _measure(shares_W1E, copies_W1)
    seen_WL = parts.weight_WL > 0
    if not seen_WL.any():
        return float("nan")
    usual = max(_LEAST_ENERGY, float(np.median(parts.energy_WL[seen_WL])))
    used_WL = seen_WL & (parts.energy_WL <= _JUMP * usual)
    return max(0.0, float(parts.noise_WL[used_WL].sum() / parts.weight_WL[used_WL].sum()))


def _measure(shares_WLE: Floats, copies_WL: Floats) -> _Parts:
    """Measure the noise in every run of 6 samples: [W, L, E] gives [W - 5, L]."""
    num = len(shares_WLE) - _SPAN + 1
    change = np.diff(shares_WLE, axis=0)
    d = [change[i : i + num] for i in range(_SPAN - 1)]
    product_WLE = d[0] * ((d[2] + d[3] + d[4]) / 3.0 - d[1])

    mean_WLE = sum((shares_WLE[i : i + num] for i in range(_SPAN)), np.zeros_like(d[0])) / _SPAN
    fewest_WL = np.min([copies_WL[i : i + num] for i in range(_SPAN)], axis=0)
    rare_WLE = np.minimum(mean_WLE, 1.0 - mean_WLE) * fewest_WL[..., None]
    counts_WLE = rare_WLE >= _MIN_COPIES
    unit_WLE = np.where(counts_WLE, mean_WLE * (1.0 - mean_WLE), 1.0)

    weight_WL = counts_WLE.sum(axis=-1).astype(np.float64)
    noise_WL = np.where(counts_WLE, product_WLE / unit_WLE, 0.0).sum(axis=-1) * copies_WL[1 : num + 1]
    # a change holds the noise of both its samples
    pair = [1.0 / np.maximum(copies_WL[i : i + num], 1.0) for i in range(_SPAN)]
    energies = [
        np.where(counts_WLE, d[i] ** 2 / unit_WLE, 0.0).sum(axis=-1)
        / (np.maximum(weight_WL, 1.0) * (pair[i] + pair[i + 1]))
        for i in range(_SPAN - 1)
    ]
    return _Parts(noise_WL, weight_WL, np.max(energies, axis=0))
