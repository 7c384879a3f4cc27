"""Loads of `counterpoise bench alarms`: benign ones with changes of domain, and induced collapses.

Definitions, fixed before the alarms of a test seed were looked at (tuning seeds 0-99, test seeds 100 up):

    benign     log shares = profile + AR(1) of coefficient .9 and sd .1; profile normal, sd .3; every 500 to
               2,000 steps another profile of the same sd (a change of domain); counts over-dispersed, phi 8;
               plain: the profile stays; levelled: it decays as (1 - g)^h, g .02 to .3: a bias loop at work
    growth     K experts gain on all others, their log shares by .01 to .04 a step
    feedback   rich get richer: log shares gain rho y a step, rho .003 to .02, y the violation of the counts
    deaths     one expert after the other (every 20 to 60 steps, the first E / 2 in the end) loses its load,
               log share by 1 / 25 to 1 / 60 a step
    ramp       entropy falls in a straight line from .98 to .05 (0 = K experts have all), given steps
    sudden     the same in 2 samples
    dead       10 % of the experts (1 at least) under 1 % of fair share, summed over the fewest last steps
               that hold 100 copies of fair share
    lead       steps from the first alarm (COLLAPSING or COLLAPSED) after the onset to `dead`; the onset is
               400 steps after the first sample, and the load is benign until then
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.dispersion import draw_counts
from balancer.synth import capped_shares, entropy_shares

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

SPREAD, JITTER, MEMORY, PHI = 0.3, 0.1, 0.9, 8.0
ONSET = 400
SIZES = ((8, 2), (32, 2), (256, 8))
TOKENS = (1024, 8192, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: E experts, K of each token, T tokens of a step."""

    experts: int
    top_k: int
    tokens: int

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"E{self.experts} T{self.tokens // 1024}k"


CASES = tuple(Case(experts=e, top_k=k, tokens=t) for e, k in SIZES for t in TOKENS)


class Jitter:
    """AR(1) noise of log shares, [L, E]."""

    def __init__(self, rng: np.random.Generator, layers: int, experts: int) -> None:
        self._rng = rng
        self.value_LE = JITTER * rng.standard_normal((layers, experts))

    def step(self) -> Floats:
        """The noise of the next step."""
        new_LE = self._rng.standard_normal(self.value_LE.shape)
        self.value_LE = MEMORY * self.value_LE + JITTER * (1 - MEMORY**2) ** 0.5 * new_LE
        return self.value_LE


def counted(rng: np.random.Generator, log_LE: Floats, case: Case, phi: float = PHI) -> Counts:
    """Counts of one step for log shares."""
    soft_LE = np.exp(log_LE - log_LE.max(axis=1, keepdims=True))
    shares_LE = soft_LE / soft_LE.sum(axis=1, keepdims=True)
    if shares_LE.max() > 1.0 / case.top_k:
        shares_LE = capped_shares(shares_LE, case.top_k)
    return draw_counts(rng, shares_LE, case.tokens * case.top_k, phi)


def benign(
    case: Case, layers: int, steps: int, seed: int, *, levelled: bool, spread: float = SPREAD
) -> Iterator[tuple[Counts, NDArray[np.bool_]]]:
    """Counts [L, E] step by step, and which layers changed their domain just now."""
    rng = np.random.default_rng([seed, case.experts, case.tokens, int(levelled)])
    shape = (layers, case.experts)
    jitter = Jitter(rng, *shape)
    profile_LE = spread * rng.standard_normal(shape)
    gain_L1 = (
        np.exp(rng.uniform(np.log(0.02), np.log(0.3), (layers, 1))) if levelled else np.zeros((layers, 1))
    )
    next_L = rng.integers(100, 2000, layers)
    for t in range(steps):
        switch_L = t >= next_L
        if switch_L.any():
            profile_LE[switch_L] = spread * rng.standard_normal((int(switch_L.sum()), case.experts))
            next_L[switch_L] = t + rng.integers(500, 2001, int(switch_L.sum()))
        yield counted(rng, profile_LE + jitter.step(), case), switch_L
        profile_LE = profile_LE * (1.0 - gain_L1)


def collapse(
    cause: str, case: Case, layers: int, steps: int, seed: int, length: int = 1000
) -> Iterator[Counts]:
    """Counts [L, E] step by step of runs that collapse from step ONSET on; each layer is one."""
    rng = np.random.default_rng([seed, case.experts, case.tokens, len(cause), length])
    shape = (layers, case.experts)
    jitter, profile_LE = Jitter(rng, *shape), SPREAD * rng.standard_normal(shape)
    grow = CAUSES[cause](rng, case, shape, length)
    for t in range(steps):
        log_LE = profile_LE + jitter.step()
        if t >= ONSET:
            log_LE = grow.apply(t - ONSET, log_LE)
        counts_LE = counted(rng, log_LE, case)
        grow.see(t - ONSET, counts_LE)
        yield counts_LE


class Growth:
    """K experts gain on all others."""

    def __init__(self, rng: np.random.Generator, case: Case, shape: tuple[int, int], length: int) -> None:
        del length
        self.rate_L1 = np.exp(rng.uniform(np.log(0.01), np.log(0.04), (shape[0], 1)))
        self.hot_LE = rng.random(shape).argsort(axis=1) < case.top_k

    def apply(self, t: int, log_LE: Floats) -> Floats:
        """Log shares t steps after the onset."""
        return log_LE + t * self.rate_L1 * self.hot_LE

    def see(self, t: int, counts_LE: Counts) -> None:
        """What the router saw."""


class Feedback(Growth):
    """Rich get richer."""

    def __init__(self, rng: np.random.Generator, case: Case, shape: tuple[int, int], length: int) -> None:
        super().__init__(rng, case, shape, length)
        self.rho_L1 = np.exp(rng.uniform(np.log(0.003), np.log(0.02), (shape[0], 1)))
        self.gained_LE = np.zeros(shape)

    def apply(self, t: int, log_LE: Floats) -> Floats:
        """Log shares t steps after the onset."""
        return log_LE + self.gained_LE

    def see(self, t: int, counts_LE: Counts) -> None:
        """What the router saw."""
        if t >= 0:
            self.gained_LE += self.rho_L1 * (counts_LE / counts_LE.mean(axis=1, keepdims=True) - 1.0)


class Deaths(Growth):
    """One expert after the other loses its load."""

    def __init__(self, rng: np.random.Generator, case: Case, shape: tuple[int, int], length: int) -> None:
        super().__init__(rng, case, shape, length)
        rank_LE = rng.random(shape).argsort(axis=1).argsort(axis=1)
        every_L1, self.rate_L1 = rng.uniform(20, 60, (shape[0], 1)), 1 / rng.uniform(25, 60, (shape[0], 1))
        every_L1 = every_L1 * min(1.0, 32 / case.experts)
        self.start_LE = np.where(rank_LE < case.experts // 2, rank_LE * every_L1, np.inf)

    def apply(self, t: int, log_LE: Floats) -> Floats:
        """Log shares t steps after the onset."""
        return log_LE - np.minimum(12.0, self.rate_L1 * np.maximum(0.0, t - self.start_LE))


class Ramp(Growth):
    """Entropy falls in a straight line."""

    def __init__(self, rng: np.random.Generator, case: Case, shape: tuple[int, int], length: int) -> None:
        super().__init__(rng, case, shape, length)
        self.length = length
        score_LE = np.tanh(0.8 * rng.standard_normal(shape))
        floor = np.log(case.top_k) / np.log(case.experts)
        self.height_G = np.linspace(0.98, 0.05, 48)
        self.score_LE = score_LE
        gains = []
        for height in self.height_G:
            wanted_L = np.full(shape[0], floor + (1 - floor) * height)
            shares_LE = entropy_shares(score_LE, wanted_L, case.top_k)
            low_L, high_L = score_LE.argmin(axis=1), score_LE.argsort(axis=1)[:, case.experts // 2]
            rows = np.arange(shape[0])
            ratio_L = np.log(shares_LE[rows, high_L]) - np.log(shares_LE[rows, low_L])
            gains.append(ratio_L / (score_LE[rows, high_L] - score_LE[rows, low_L]))
        self.gain_GL = np.array(gains)

    def apply(self, t: int, log_LE: Floats) -> Floats:
        """Log shares t steps after the onset: the profile goes over into the ramp's."""
        at = min(1.0, t / self.length) * (len(self.height_G) - 1)
        low = min(int(at), len(self.height_G) - 2)
        gain_L = (1 - (at - low)) * self.gain_GL[low] + (at - low) * self.gain_GL[low + 1]
        return log_LE + gain_L[:, None] * self.score_LE


CAUSES: dict[str, Any] = {
    "growth": Growth,
    "feedback": Feedback,
    "deaths": Deaths,
    "ramp": Ramp,
    "sudden": lambda rng, case, shape, length: Ramp(rng, case, shape, 2),
}


def dead_step(counts: list[Counts], case: Case) -> NDArray[np.int64]:
    """First step of each layer at which 10 % of the experts are dead, -1 for never; see the definitions."""
    counts_WLE = np.array(counts)
    need = int(np.ceil(100 * case.experts / (case.tokens * case.top_k)))
    total_WLE = np.cumsum(counts_WLE, axis=0, dtype=np.int64)
    window_WLE = total_WLE.copy()
    window_WLE[need:] -= total_WLE[:-need]
    fair_WL1 = window_WLE.mean(axis=2, keepdims=True)
    dead_WL = (window_WLE < 0.01 * fair_WL1).sum(axis=2) >= max(1.0, 0.1 * case.experts)
    dead_WL[: need - 1] = False
    return np.where(dead_WL.any(axis=0), dead_WL.argmax(axis=0), -1)
