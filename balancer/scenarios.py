"""Scenarios: loads that may come, as whole counts, for a placement that is to be good for all of them.

After the forecast and before the planner: what goes in is a `Forecast` and the last loads, what comes out are
K equally likely counts [L, E] of one micro-batch:

    fixed ones (with last_LE)      last; half last, half forecast mean
    (with previous_LE too)         trend = last + 0.7 of its last change; half trend, half forecast mean;
                                   mean of the last two; previous
    drawn ones                     forecast distribution x Dirichlet-multinomial(phi) at micro-batch size

Forecast and counting both have covariances in proportion to diag(p) - p p', so their product has exactly the
mean and the covariance of one Dirichlet whose variance is the sum of both. That one is drawn, a third of the
time of the chain of three draws, and rounded to whole counts at random (variance 1/4 at most, mean kept).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.forecast_record import Forecast
from balancer.metrics import load_shares

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# the spread of a forecast is at most this share of the largest that shares can have (one expert has all)
_MOST_SPREAD = 0.5
# counts go through float64: above this, not every whole number is one, and sums would be off
_MOST_COPIES = 2**53
# a Dirichlet needs some variance: 1/1000 of a multinomial's is none beside the rounding
_LEAST_PHI = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scenarios:
    """Loads that may come.

    counts_KLE: [K, L, E] int64, copies. weight_K: [K] float64, how likely each is; sums to 1. labels: [K],
    what each is, like "last" or "draw 3". Raises ValueError where the three do not fit together.
    """

    counts_KLE: Integers
    weight_K: Floats
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        counts, weight = self.counts_KLE, self.weight_K
        if counts.dtype != np.int64 or counts.ndim != 3 or (counts < 0).any():
            raise ValueError(
                f"counts_KLE is {counts.dtype} {counts.shape}; expected int64 [K, L, E], 0 or more"
            )
        if weight.shape != (len(counts),) or len(self.labels) != len(counts):
            raise ValueError(
                f"{len(counts)} scenarios, weight_K of shape {weight.shape} and {len(self.labels)} labels; "
                "each scenario needs one of both"
            )
        if not (weight >= 0).all() or abs(float(weight.sum()) - 1.0) > 1e-9:
            raise ValueError(f"weight_K must be 0 or more and sum to 1, not to {weight.sum()}")


def draw_scenarios(
    forecast: Forecast,
    horizon: int,
    *,
    copies: ArrayLike,
    seed: int | np.random.Generator,
    num_scenarios: int = 8,
    phi: ArrayLike = 1.0,
    last_LE: ArrayLike | None = None,
    previous_LE: ArrayLike | None = None,
    forecast_copies: ArrayLike | None = None,
    part: float = 0.7,
) -> Scenarios:
    """Return equally likely loads at one horizon of a forecast, the fixed ones first.

    forecast: mean and standard deviation of the shares. horizon: training steps ahead, one of
    forecast.horizons_H. copies: integer N that a layer of a scenario holds, that of a micro-batch, or [L];
    at most 2^53.
    seed: integer, or a generator that is drawn from. num_scenarios: drawn ones; 8 to 16. phi: over-dispersion
    of the counts, or [L] (`estimate_dispersion`); below 1 for less noise than multinomial, NaN (not known)
    counts as 1. last_LE, previous_LE: [L, E], copies of the last sample and the one before, for the fixed
    ones; a layer without load takes the forecast mean. forecast_copies: copies of the samples that
    forecast.std_HLE speaks of, or [L]; those of last_LE by default, else `copies`. part: of the last change
    that the trend adds; 0.7.

    Returns Scenarios; every layer of every scenario sums to N. In each layer the forecast's own variance is
    std^2 less the noise phi p (1 - p) / forecast_copies, in proportion to p (1 - p) with the layer's sum kept
    (that of one expert only where std has that form). It is 0 where std is below the noise, and at most half
    of p (1 - p). At copies = forecast_copies the variance of the drawn shares is std^2 again. Raises
    ValueError for an unknown horizon, or a value or shape out of range.
    """
    mean_LE, std_LE = _at_horizon(forecast, horizon)
    num_layers = mean_LE.shape[0]
    copies_L = _for_layers("copies", copies, num_layers, least=0).astype(np.int64)
    if (np.asarray(copies) > _MOST_COPIES).any():
        raise ValueError(f"copies={copies!r} must be at most 2^53 = {_MOST_COPIES}, those of a micro-batch")
    phi_L = np.nan_to_num(_for_layers("phi", phi, num_layers, least=0), nan=1.0)
    fixed = dict(_fixed(mean_LE, last_LE, previous_LE, part))
    if num_scenarios < 0 or num_scenarios + len(fixed) < 1:
        raise ValueError(
            f"num_scenarios={num_scenarios} must be at least {0 if fixed else 1}; 8 to 16 are usual"
        )

    if forecast_copies is None and last_LE is not None:
        counted_L = np.asarray(last_LE, dtype=np.float64).sum(axis=-1)
    else:
        given = copies_L if forecast_copies is None else forecast_copies
        counted_L = _for_layers("forecast_copies", given, num_layers, least=0)
    own_L = _own_spread(mean_LE, std_LE, phi_L / np.maximum(counted_L, 1.0))
    total_phi_L = copies_L * own_L + phi_L * (1.0 - own_L)

    drawn_KLE = _drawn(np.random.default_rng(seed), num_scenarios, mean_LE, copies_L, total_phi_L)
    fixed_KLE = [_whole(shares_LE, copies_L)[None] for shares_LE in fixed.values()]
    counts_KLE = np.concatenate([*fixed_KLE, drawn_KLE])
    labels = (*fixed, *(f"draw {k}" for k in range(num_scenarios)))
    weight_K = np.full(len(labels), 1.0 / len(labels))
    return Scenarios(counts_KLE=counts_KLE, weight_K=weight_K, labels=labels)


def _at_horizon(forecast: Forecast, horizon: int) -> tuple[Floats, Floats]:
    """Return mean and standard deviation [L, E] at a horizon, checked."""
    known = [int(h) for h in forecast.horizons_H]
    if horizon not in known:
        raise ValueError(f"horizon={horizon} is not forecast; use one of {known} training steps")
    h = known.index(horizon)
    mean_LE, std_LE = forecast.mean_HLE[h], forecast.std_HLE[h]
    if mean_LE.shape != std_LE.shape or not (np.isfinite(std_LE).all() and (std_LE >= 0).all()):
        raise ValueError(f"std_HLE must be finite, 0 or more, of the shape of mean_HLE; got {std_LE.shape}")
    shares_LE = load_shares(mean_LE, "mean_HLE")
    if not (abs(mean_LE.sum(axis=-1) - 1.0) < 1e-6).all():
        raise ValueError("mean_HLE must sum to 1 over the experts; pass shares, not copies")
    return shares_LE, std_LE


def _for_layers(name: str, value: ArrayLike, num_layers: int, least: float) -> Floats:
    """Return one number for each layer as [L] float64. NaN passes for phi alone."""
    array = np.asarray(value)
    if array.shape not in ((), (num_layers,)) or array.dtype.kind not in ("iu" if name != "phi" else "iuf"):
        kind = "a number" if name == "phi" else "an integer"
        raise ValueError(f"{name} is {array.dtype} {array.shape}; expected {kind}, or [L] = [{num_layers}]")
    if (array < least).any() or np.isinf(array).any():
        raise ValueError(f"{name}={value!r} must be finite and at least {least:g}")
    return np.broadcast_to(array, (num_layers,)).astype(np.float64)


def _own_spread(mean_LE: Floats, std_LE: Floats, noise_L: Floats) -> Floats:
    """Return the variance of the forecast's shares over p (1 - p), without the noise of counting, [L].

    Shares of variance x p (1 - p), counted with noise n p (1 - p) around them, have x + n (1 - x) in all.
    """
    most_L = (mean_LE * (1.0 - mean_LE)).sum(axis=-1)
    total_L = (std_LE**2).sum(axis=-1) / np.where(most_L > 0, most_L, np.inf)
    usual_L = np.minimum(noise_L, 0.5)  # a sample of few copies; all of the spread is noise there
    return np.clip((total_L - usual_L) / (1.0 - usual_L), 0.0, _MOST_SPREAD)


def _fixed(
    mean_LE: Floats, last_LE: ArrayLike | None, previous_LE: ArrayLike | None, part: float
) -> Iterator[tuple[str, Floats]]:
    """Yield the label and the shares [L, E] of every scenario that is not drawn."""
    if last_LE is None:
        if previous_LE is not None:
            raise ValueError("previous_LE without last_LE; pass both, or last_LE alone")
        return
    if not 0 <= part <= 10:
        raise ValueError(f"part={part} must lie between 0 and 10; 0.7 of the last change is a good value")
    last = _shares_or("last_LE", last_LE, mean_LE)
    yield "last", last
    yield "last and mean", (last + mean_LE) / 2
    if previous_LE is not None:
        previous = _shares_or("previous_LE", previous_LE, last)
        trend = load_shares(np.maximum(last + part * (last - previous), 0.0))
        yield "trend", trend
        yield "trend and mean", (trend + mean_LE) / 2
        yield "mean of last two", (last + previous) / 2
        yield "previous", previous


def _shares_or(name: str, counts_LE: ArrayLike, other_LE: Floats) -> Floats:
    """Return the shares of a load, those of another for layers without load."""
    shares_LE = load_shares(counts_LE, name)
    if shares_LE.shape != other_LE.shape:
        raise ValueError(f"{name} has shape {shares_LE.shape}, expected [L, E] = {other_LE.shape}")
    return np.where(np.isnan(shares_LE), other_LE, shares_LE)


def _drawn(
    rng: np.random.Generator, num_scenarios: int, mean_LE: Floats, copies_L: Integers, phi_L: Floats
) -> Integers:
    """Draw counts [K, L, E] with phi times the variance of a multinomial and exact sums."""
    # Dirichlet of concentration a: variance p (1 - p) / (1 + a) = phi p (1 - p) / N
    concentration_L = np.maximum(1.0, copies_L / np.maximum(phi_L, _LEAST_PHI) - 1.0)
    shape_KLE = np.broadcast_to(concentration_L[:, None] * mean_LE, (num_scenarios, *mean_LE.shape))
    until_KLE = np.cumsum(rng.standard_gamma(shape_KLE), axis=-1)
    total_KL1 = until_KLE[..., -1:]
    # a total of zero is an underflow of many tiny shapes: the mean stands in
    until_KLE = np.where(total_KL1 > 0, until_KLE, np.cumsum(mean_LE, axis=-1))
    until_KLE *= copies_L[:, None] / until_KLE[..., -1:]
    # running sums with one random offset a layer, rounded down: every count keeps its mean
    until_KLE += rng.random((*until_KLE.shape[:-1], 1))
    whole_KLE = until_KLE.astype(np.int64)
    whole_KLE[..., -1] = copies_L
    return np.diff(np.minimum(whole_KLE, copies_L[:, None]), axis=-1, prepend=0)


def _whole(shares_LE: Floats, copies_L: Integers) -> Integers:
    """Return whole counts with exact sums, each less than one copy off: rounded running sums."""
    until_LE = np.rint(np.cumsum(shares_LE, axis=-1) * copies_L[:, None]).astype(np.int64)
    until_LE = np.minimum(until_LE, copies_L[:, None])
    until_LE[:, -1] = copies_L
    return np.diff(until_LE, axis=-1, prepend=0)
