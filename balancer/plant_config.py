"""Settings of the router plant, and the size of its population.

Under `balancer/plant.py`.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from balancer.bias_record import checked_sizes

SCORES = ("softmax", "sigmoid")
REPORTS = ("swaps", "scores", "margins", "pairs", "sample", "spread")
_LEAST_TOKENS, _MOST_TOKENS = 2048, 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantConfig:
    """What a plant is like. Raises ValueError for a bad value."""

    num_layers: int = field(default=1, metadata={"help": "independent copies L at once; seeds of one case"})
    num_experts: int = field(default=32, metadata={"help": "experts E"})
    top_k: int = field(default=2, metadata={"help": "experts K of each token, below E"})
    num_tokens: int = field(default=16384, metadata={"help": "tokens T of a step, of the whole batch"})
    score: str = field(default="softmax", metadata={"help": "of the logits", "choices": SCORES})
    expert_spread: float = field(
        default=0.5, metadata={"help": "sd over the experts of the part of a logit that all tokens share"}
    )
    token_spread: float = field(default=1.0, metadata={"help": "sd of the rest of a logit, over the tokens"})
    width_spread: float = field(
        default=0.2,
        metadata={"help": "sd of ln(token_spread) over the experts: how unequal their slopes are"},
    )
    reinforcement: float = field(
        default=0.0, metadata={"help": "rho: share of an imbalance that the router adds to it in a step"}
    )
    drift: float = field(default=0.0, metadata={"help": "sd of the random walk of y in a step"})
    phi: float = field(default=1.0, metadata={"help": "over-dispersion of the counts; 1 = multinomial"})
    noise: bool = field(default=True, metadata={"help": "False: counts are exactly as expected, fractions"})
    delay_steps: int = field(
        default=0, metadata={"help": "steps d that a bias waits before it routes, beyond the unavoidable one"}
    )
    imbalance: float = field(
        default=0.0, metadata={"help": "sd of y at the start, about; 0 = balanced under a bias of zero"}
    )
    statistics: tuple[str, ...] = field(
        default=("swaps", "scores"), metadata={"help": "what the router reports", "choices": REPORTS}
    )
    swaps_every: int = field(
        default=20, metadata={"help": "steps between swaps, or pairs; the first has them"}
    )
    scores_every: int = field(default=20, metadata={"help": "steps between histograms of the scores"})
    margins_every: int = field(default=1, metadata={"help": "steps between margins, and samples"})
    swap_delta: float = field(
        default=0.0,
        metadata={
            "help": "a small gap, in units of score, 0 = 1/(16 E), sigmoid 1/(4 E): a bias of it moves y by "
            "some 0.06 to 0.1 (small, else slopes come out low), yet each expert has hits"
        },
    )
    population: int = field(
        default=0, metadata={"help": "tokens M of the population; 0 = by the noise, see `population_size`"}
    )
    seed: int = field(default=0, metadata={"help": "of population, drift and counts"})
    compiled: bool | None = field(
        default=None, metadata={"help": "inner loops by numba; None = where it is installed"}
    )

    def __post_init__(self) -> None:
        checked_sizes(self.num_layers, self.num_experts, self.top_k)
        for name, least in (
            ("num_tokens", 1), ("delay_steps", 0), ("swaps_every", 1), ("scores_every", 1),
            ("margins_every", 1), ("population", 0), ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be {least} or more")
        for name in (
            "expert_spread", "token_spread", "width_spread", "reinforcement", "drift", "phi", "imbalance",
            "swap_delta",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more, and finite")
        if not self.token_spread > 0:
            raise ValueError("token_spread=0 leaves all tokens alike: give 1.0, or a little at least")
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r} is unknown; use one of {', '.join(SCORES)}")
        for name in self.statistics:
            if name not in REPORTS:
                raise ValueError(f"statistics: {name!r} is unknown; use some of {', '.join(REPORTS)}")


class PlantConstants(NamedTuple):
    """What of a config a step needs, as numbers, so that a state can be copied and saved as one.
    reports: bit i is set where REPORTS[i] is reported."""

    top_k: int
    num_tokens: int
    sigmoid: int
    expert_spread: float
    token_spread: float
    width_spread: float
    reinforcement: float
    drift: float
    phi: float
    noise: int
    imbalance: float
    reports: int
    swaps_every: int
    scores_every: int
    margins_every: int
    swap_delta: float
    seed: int
    compiled: int


def population_size(num_tokens: int, num_experts: int, top_k: int, phi: float = 1.0) -> int:
    """Return M, the tokens of a population fine enough for a batch of T tokens.

    One token more or less moves y = n/r - 1 of an expert by 1/(M r), r = K/E. That is to be at most a quarter
    of the standard deviation of y by counting, sqrt(phi (1 - r) / (T r)):

        M = 4 sqrt(T / (phi r (1 - r)))        at least 2,048, at most 65,536

    and at least min(T, 200 / r), which gives an expert some 25 swap counts at the usual gaps; fewer would say
    less of its slope than the router of a real batch does.
    """
    r = top_k / num_experts
    fine = 4.0 * math.sqrt(num_tokens / (max(phi, 1.0) * r * (1.0 - r)))
    seen = min(float(num_tokens), 200.0 / r)
    return int(min(max(math.ceil(fine), math.ceil(seen), _LEAST_TOKENS), _MOST_TOKENS))
