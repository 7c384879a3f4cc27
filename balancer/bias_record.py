"""What a bias law is and what it reads: the records of the feedback half of the balancer.

First in the flow of the bias loop: `balancer/bias.py` runs a `Law` on one `Measurement` an optimizer step,
and sets the router's selection bias to what comes out.

    counts of a step -> Measurement -> law.update -> change of the bias [L, E] -> b, mean 0, within its limit

A law is functions over a state of arrays, which holds everything it remembers: saved and loaded with a run it
goes on bit by bit.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.forecast_record import MOST_COPIES, MOST_STEPS

Floats = NDArray[np.float64]

# name of a statistic -> the fields of a sample that hold it
STATISTICS: dict[str, tuple[str, ...]] = {
    "swaps": ("swaps_LE", "wide_swaps_LE", "swap_delta"),
    "scores": ("score_histogram_LEB", "score_edges_X"),
    "margins": ("margin_histogram_LEB", "margin_edges_X"),
    "pairs": ("swap_pairs_LEE", "wide_swap_pairs_LEE", "swap_delta"),
    "sample": ("sample_LME",),
    "spread": ("squares_LE", "tokens_squared"),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measurement:
    """The load of one optimizer step, and what else the router said of it. None: not in this step.

    step: of training. counts_LE: [L, E] float64, copies that the router wanted to send to each expert, over
    the whole global batch. num_tokens: valid tokens T of that batch. top_k: K experts of each token, so that
    the share n = counts / T of an expert is r = K / E at balance.

    swaps_LE, wide_swaps_LE: [L, E], tokens whose K-th and (K+1)-th expert by score + bias lie less than
    swap_delta (2 swap_delta) apart and which have this expert as one of the two.
    swap_pairs_LEE, wide_swap_pairs_LEE: [L, E, E], the same by (K-th, (K+1)-th).
    swap_delta: in units of score.
    score_histogram_LEB, score_edges_X: [L, E, B] tokens by score without bias, [B + 1] edges of the bins.
    margin_histogram_LEB, margin_edges_X: [L, E, B'] tokens by margin, [B' + 1] edges. Margin of a token for
    an expert: score + bias, less the K-th largest score + bias among the *other* experts; the token selects
    the expert where it is above 0.
    sample_LME: [L, M, E] scores without bias of M tokens.
    squares_LE, tokens_squared: sums over the batches of the step of (copies)^2 and (tokens)^2.
    """

    step: int
    counts_LE: Floats
    num_tokens: int
    top_k: int
    swaps_LE: NDArray[Any] | None = None
    wide_swaps_LE: NDArray[Any] | None = None
    swap_delta: float | None = None
    score_histogram_LEB: NDArray[Any] | None = None
    score_edges_X: Floats | None = None
    margin_histogram_LEB: NDArray[Any] | None = None
    margin_edges_X: Floats | None = None
    swap_pairs_LEE: NDArray[Any] | None = None
    wide_swap_pairs_LEE: NDArray[Any] | None = None
    sample_LME: NDArray[Any] | None = None
    squares_LE: Floats | None = None
    tokens_squared: float | None = None

    @property
    def violation_LE(self) -> Floats:
        """[L, E] y = n / r - 1: 0 at balance, -1 for an expert that gets nothing."""
        return self.counts_LE * (self.counts_LE.shape[1] / (self.num_tokens * self.top_k)) - 1.0


class Actuated(NamedTuple):
    """What the router has been told: all [L, E] float64, in units of score.

    measured_LE: the bias under which the measurement's tokens were routed, delay_steps before the newest.
    newest_LE: the bias set last. lost_LE: the last change as it was made less what the law commanded, where
    a limit stood in the way (0 else); the common part of all experts, which changes nothing, left out.
    """

    measured_LE: Floats
    newest_LE: Floats
    lost_LE: Floats


class Law(NamedTuple):
    """A bias law.

    init(num_layers, num_experts, top_k) -> state, a NamedTuple of arrays and such tuples.
    update(measurement, actuated, state) -> (change_LE, state): the change of the bias, [L, E] float64; 0 for
    exact balance. It takes the state over (`copy_state` keeps one), and touches neither argument.
    needs: statistics (keys of STATISTICS) without which it cannot work at all in any step; most come only
    every so many steps. uses: those that it works better with.
    asks(state) -> statistics among these that it would like to have of the next step, out of turn; None
    where it never does. A host that cannot give them leaves it.
    report(state) -> figures by name, [L] each: "gain" (share of an error that one step takes away),
    "reinforcement" (share that the router adds a step by itself, as estimated), "most_gain" (stability
    limit); what a law does not know is left out.
    raise_gain(least_gain_L, state) -> state: from now on at least this gain (0 = the law's own), never beyond
    the stability limit; None where the law has no gain to raise.
    take_over(change_LE, measurement, actuated, state) -> state: so that the next change goes on from the last
    one of another law (bumpless); None where there is nothing to prepare.
    """

    name: str
    init: Callable[[int, int, int], Any]
    update: Callable[[Measurement, Actuated, Any], tuple[Floats, Any]]
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    asks: Callable[[Any], tuple[str, ...]] | None = None
    report: Callable[[Any], dict[str, Floats]] | None = None
    raise_gain: Callable[[Floats, Any], Any] | None = None
    take_over: Callable[[Floats, Measurement, Actuated, Any], Any] | None = None


def read_measurement(sample: Any, top_k: int) -> Measurement:
    """Return the measurement in a sample of any framework.

    sample: an object with attributes, or a mapping: step, tokens_per_expert_LE [L, E] counts, num_tokens
    (absent: copies / K, which must then be whole), and any of the optional fields of `Measurement` by its
    names. top_k: K. Raises ValueError for a count that is negative, NaN or infinite, a step that is no
    integer, copies that are not num_tokens * K, or a field whose shape is not that of the counts.
    """
    get = _getter(sample)
    counts_LE, step = _counts(get("tokens_per_expert_LE")), _step(get("step"))
    num_tokens = _tokens(counts_LE, get("num_tokens"), top_k, step)
    fields: dict[str, Any] = {}
    for name in {name for names in STATISTICS.values() for name in names}:
        value = get(name)
        if value is None:
            continue
        if name.endswith(("_LE", "_LEB", "_LEE", "_LME")):
            value = np.asarray(value)
            _check_field(name, value, counts_LE.shape, step)
        fields[name] = value
    return Measurement(step=step, counts_LE=counts_LE, num_tokens=num_tokens, top_k=top_k, **fields)


def _getter(sample: Any) -> Callable[[str], Any]:
    if isinstance(sample, Mapping):
        return cast("Mapping[str, Any]", sample).get
    return lambda name: getattr(sample, name, None)


def _counts(value: Any) -> Floats:
    if value is None:
        raise ValueError("the sample has no tokens_per_expert_LE; it must hold counts [L, E]")
    counts = np.asarray(value)
    if counts.dtype.kind not in "iuf" or counts.ndim != 2 or counts.size == 0:
        raise ValueError(f"tokens_per_expert_LE is {counts.dtype} {counts.shape}, expected counts [L, E]")
    counts_LE = counts.astype(np.float64)
    bad_LE = ~((counts_LE >= 0) & (counts_LE <= MOST_COPIES))
    if bad_LE.any():
        layer, expert = (int(i) for i in np.argwhere(bad_LE)[0])
        raise ValueError(
            f"layer {layer}, expert {expert}: {counts_LE[layer, expert]} is no count; it must be 0 to 2^63"
        )
    return counts_LE


def _step(value: SupportsIndex | None) -> int:
    if value is None or isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise ValueError(f"step={value!r} must be an integer, the training step of the sample")
    step = operator.index(value)
    if not 0 <= step <= MOST_STEPS:
        raise ValueError(f"step={step} must be 0 to 2^62")
    return step


def _tokens(counts_LE: Floats, given: Any, top_k: int, step: int) -> int:
    """T, checked: every layer's copies are T * K."""
    num_experts = counts_LE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} is out of 1..{num_experts}, the number of experts")
    copies_L = counts_LE.sum(axis=1)
    tokens = round(float(copies_L[0]) / top_k) if given is None else _whole(given, step)
    off_L = np.abs(copies_L - tokens * top_k)
    if off_L.max() > 1e-9 * max(1.0, tokens * top_k):
        layer = int(off_L.argmax())
        raise ValueError(
            f"step {step}, layer {layer}: {copies_L[layer]:.0f} copies for {tokens} tokens of top_k={top_k} "
            f"are off by {copies_L[layer] - tokens * top_k:+.0f}; give the counts before any drops, of the "
            "whole global batch"
        )
    return tokens


def _whole(num_tokens: Any, step: int) -> int:
    value = float(num_tokens) if np.ndim(num_tokens) == 0 and np.isreal(num_tokens) else math.nan
    if not (value >= 0 and value.is_integer()):
        raise ValueError(f"step {step}: num_tokens={num_tokens!r} must be a whole number of valid tokens")
    return int(value)


def _check_field(name: str, value: NDArray[Any], shape_LE: tuple[int, ...], step: int) -> None:
    layers, experts = shape_LE
    wanted = {"_LE": (layers, experts), "_LEE": (layers, experts, experts)}
    suffix = name[name.rindex("_") :]
    fits = (
        value.shape[:2] == shape_LE and value.ndim == 3
        if suffix == "_LEB"
        else value.ndim == 3 and (value.shape[0], value.shape[2]) == shape_LE
        if suffix == "_LME"
        else value.shape == wanted[suffix]
    )
    if value.dtype.kind not in "iuf" or not fits:
        raise ValueError(f"step {step}: {name} is {value.dtype} {value.shape}, and the load is {shape_LE}")
    if not np.isfinite(value).all() or (name != "sample_LME" and (value < 0).any()):
        raise ValueError(f"step {step}: {name} holds NaN, infinite or negative entries; the router is broken")


def checked_sizes(num_layers: int, num_experts: int, top_k: int) -> None:
    """Raise ValueError for sizes below 1, fewer than 2 experts, or top_k that is not below the experts."""
    if num_layers < 1 or num_experts < 2 or not 1 <= top_k < num_experts:
        raise ValueError(
            f"num_layers={num_layers}, num_experts={num_experts}, top_k={top_k}: a bias needs a layer, 2 "
            "experts, and top_k below their number, else every token selects all"
        )


def as_bias(bias_LE: ArrayLike, shape_LE: tuple[int, int]) -> Floats:
    """Return a bias as [L, E] float64, checked. Raises ValueError for another shape, NaN or infinity."""
    bias = np.asarray(bias_LE, dtype=np.float64)
    if bias.shape != shape_LE or not np.isfinite(bias).all():
        raise ValueError(f"the bias is {bias.shape} and must be {shape_LE}, every entry finite")
    return bias
