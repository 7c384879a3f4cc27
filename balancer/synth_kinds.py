"""Synthetic load traces by kind: each has one property that is exact in its true shares.

Beside the flow, like `balancer/synth.py`: for demos and tests, and to measure a forecast against the truth.
The true shares and the counting noise come from separate random streams of one seed, so that `true_shares`
knows what `synth_trace` counted whatever the number of copies. No share exceeds 1/K, since the K experts of a
token are distinct: what is over goes to the others in proportion, and a kind's property is exact where that
did not happen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.dispersion import draw_counts
from balancer.synth import levelled_counts
from balancer.synth_shares import (
    Sizes,
    balanced_by_bias,
    bursts,
    collapse_fast,
    collapse_slow,
    constant,
    correlated,
    drift,
    rotation,
    step,
    zipf,
)
from balancer.trace import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of trace: one line of help, its options with their defaults, and what makes its shares
    [W, L, E]."""

    help: str
    options: dict[str, int | float]
    shares: Callable[..., Floats]


KINDS: dict[str, Kind] = {
    "constant": Kind(
        help="shares that never change (log-normal, sd `spread`): all that moves is counting noise",
        options={"spread": 0.5},
        shares=constant,
    ),
    "zipf": Kind(
        help="the expert of rank r has a share in proportion to r^-exponent; which one, differs by layer",
        options={"exponent": 1.0},
        shares=zipf,
    ),
    "drift": Kind(
        help="log shares walk at random, sd `sd` a sample: the variance of log ratios grows in proportion",
        options={"sd": 0.02, "spread": 0.5},
        shares=drift,
    ),
    "step": Kind(
        help="shares replaced by others at sample `at` (0: half-way), constant before and after it",
        options={"at": 0, "spread": 1.0},
        shares=step,
    ),
    "rotation": Kind(
        help="mixture of `num_domains` profiles whose weights go round in `period` samples",
        options={"period": 40, "num_domains": 3, "spread": 1.0},
        shares=rotation,
    ),
    "bursts": Kind(
        help="`num_bursts` times in a layer, the odds p/(1-p) of one expert are `factor`-fold for a while",
        options={"num_bursts": 5, "length": 3, "factor": 5.0, "spread": 0.3},
        shares=bursts,
    ),
    "collapse-fast": Kind(
        help="entropy falls from `start` to `end` (1: even, 0: K experts take all) in `length` samples",
        options={"at": 0, "length": 2, "start": 0.98, "end": 0.05},
        shares=collapse_fast,
    ),
    "collapse-slow": Kind(
        help="entropy falls from `start` to `end` in a straight line over `frac` of the run",
        options={"at": 0, "frac": 0.5, "start": 0.98, "end": 0.05},
        shares=collapse_slow,
    ),
    "correlated": Kind(
        help="experts in `num_groups` groups that rise and fall together: log shares of that rank",
        options={"num_groups": 3, "sd": 0.5, "memory": 50.0, "spread": 0.5},
        shares=correlated,
    ),
    "balanced-by-bias": Kind(
        help="a jump every `every` samples, decaying to even load as (1 - gain)^h: a bias loop at work",
        options={"gain": 0.05, "every": 100, "spread": 1.0},
        shares=balanced_by_bias,
    ),
}


def true_shares(
    kind: str,
    *,
    seed: int = 0,
    num_samples: int = 500,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    **options: float,
) -> Floats:
    """Return the shares that the trace of `synth_trace` with the same arguments counts copies of.

    kind: one of KINDS. seed: of the random generator. num_samples: W. num_layers: L. num_experts: E, more
    than top_k. top_k: K, no share is above 1/K. options: of the kind, as KINDS lists them. Returns [W, L, E]
    float64, every row of which sums to 1. Raises ValueError for an unknown kind or option, or a value out of
    range.

    >>> true_shares("zipf", num_samples=1, num_layers=1, num_experts=4, top_k=1).round(3)
    array([[[0.16, 0.48, 0.24, 0.12]]])
    """
    made = _checked_kind(kind, options)
    sizes = Sizes(num_samples=num_samples, num_layers=num_layers, num_experts=num_experts, top_k=top_k)
    return made.shares(np.random.default_rng([seed, 0]), sizes, **_filled(made, options))


def synth_trace(
    kind: str,
    *,
    seed: int = 0,
    num_samples: int = 500,
    num_layers: int = 4,
    num_experts: int = 16,
    copies: int = 65536,
    top_k: int = 2,
    interval_steps: int = 10,
    dispersion: float = 1.0,
    **options: float,
) -> Trace:
    """Return a seeded trace of a kind.

    kind, seed, num_samples, num_layers, num_experts, top_k, options: as for `true_shares`. copies: N routed
    in every layer and sample, a multiple of top_k; 1000 * E keeps counting noise to 3 %. interval_steps:
    training steps between samples, from step 1 on. dispersion: phi, variance of the counts over that of a
    multinomial; 1, or more for tokens that choose together. Returns the Trace: each layer of each sample sums
    to `copies` (meta "copies_per_step"), no expert gets more than copies / top_k: what is drawn above that
    goes to the fullest others, so an expert whose true share is 1/K counts slightly less on average.
    Raises ValueError for an unknown kind or option, or a value out of range.

    >>> trace = synth_trace("constant", num_samples=2, num_layers=1, num_experts=4, copies=1000)
    >>> trace.steps_W, trace.tokens_per_expert_WLE.sum(axis=-1).ravel()
    (array([ 1, 11]), array([1000, 1000]))
    """
    _check_counting(copies, top_k, interval_steps, dispersion)
    shares_WLE = true_shares(
        kind,
        seed=seed,
        num_samples=num_samples,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        **options,
    )
    rng = np.random.default_rng([seed, 1])
    counts_WLE = np.zeros(shares_WLE.shape, dtype=np.int64)
    for w in range(num_samples):
        counts_WLE[w] = levelled_counts(draw_counts(rng, shares_WLE[w], copies, dispersion), copies // top_k)
    meta: dict[str, Any] = {
        "source": f"synthetic {kind}",
        "seed": seed,
        "copies_per_step": copies,
        "top_k": top_k,
        "dispersion": dispersion,
        "options": _filled(KINDS[kind], options),
    }
    steps_W = 1 + interval_steps * np.arange(num_samples, dtype=np.int64)
    return Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W, meta=meta)


def _checked_kind(kind: str, options: dict[str, float]) -> Kind:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; use one of {', '.join(KINDS)}")
    known = KINDS[kind].options
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"kind {kind!r} has no option {name!r}; it has {', '.join(known)}")
        if isinstance(known[name], int) and not float(value).is_integer():
            raise ValueError(f"{name}={value} must be a whole number, like {known[name]}")
    return KINDS[kind]


def _filled(kind: Kind, options: dict[str, float]) -> dict[str, int | float]:
    """Return all options of a kind, those given in place of the defaults, each of its type."""
    return {name: type(default)(options.get(name, default)) for name, default in kind.options.items()}


def _check_counting(copies: int, top_k: int, interval_steps: int, dispersion: float) -> None:
    if interval_steps < 1:
        raise ValueError(f"interval_steps={interval_steps} must be at least 1")
    if not 1.0 <= dispersion <= 1e6:
        raise ValueError(f"dispersion={dispersion} must be 1 (multinomial) or more, up to 1e6; 20 is usual")
    if top_k >= 1 and (copies < 1 or copies % top_k):
        near = max(top_k, copies // top_k * top_k)
        raise ValueError(
            f"copies={copies} is no multiple of top_k={top_k}, the copies of a token; use {near} or "
            f"{near + top_k}"
        )
