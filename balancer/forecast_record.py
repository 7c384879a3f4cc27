"""What a forecaster is and what it says: the records of the forecasting half of the balancer.

First in the flow of forecasts: forecasters (`balancer/forecast.py`) make a `Forecast`, scenarios and plans
are drawn from it, `balancer/backtest.py` scores it. A forecaster is three functions over a state of arrays:

    state = init(num_layers, num_experts, horizons)          horizons in training steps, say (10, 100, 500)
    state = update(step, tokens_per_expert_LE, state)        once a sample, steps strictly increasing
    forecast(state) -> Forecast                              any time after the first sample

`update` takes the state over: it may reuse its arrays, so only what it returns is to be used (`copy_state`
keeps one). The state is a NamedTuple of arrays and such tuples, so it can be saved anywhere.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

# what the time of a layer is like: nothing known yet, quiet, changing steadily, shortly after a jump
REGIMES = ("unknown", "settled", "moving", "jumped")
UNKNOWN, SETTLED, MOVING, JUMPED = range(4)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """The load shares that are expected some training steps ahead, with their spread.

    step: of the last sample that it knows. horizons_H: [H] int64, training steps ahead of `step`, increasing.
    mean_HLE: [H, L, E] float64, expected shares: 0 or more, sum 1 over the experts. std_HLE: [H, L, E]
    float64, standard deviation of the share that will be *counted* then, sampling noise included. regime_L:
    [L] int64, index into REGIMES. low_HLE, high_HLE: [H, L, E] float64, the interval that should hold the
    counted share with probability `level`; None where the forecaster calibrates none.
    """

    step: int
    horizons_H: NDArray[np.int64]
    mean_HLE: NDArray[np.float64]
    std_HLE: NDArray[np.float64]
    regime_L: NDArray[np.int64]
    low_HLE: NDArray[np.float64] | None = None
    high_HLE: NDArray[np.float64] | None = None
    level: float = 0.9


class Forecaster(NamedTuple):
    """init(num_layers, num_experts, horizons) -> state; update(step, tokens_per_expert_LE, state) -> state;
    forecast(state) -> Forecast."""

    init: Callable[[int, int, Sequence[int]], Any]
    update: Callable[[int, ArrayLike, Any], Any]
    forecast: Callable[[Any], Forecast]


State = TypeVar("State")

MOST_STEPS = 2**62  # so that a step and a horizon add up
MOST_COPIES = 2.0**63


def copy_state(state: State) -> State:
    """Return a copy of a state that no `update` of the original touches.

    state: arrays and numbers in (nested) tuples and NamedTuples.
    """
    if isinstance(state, np.ndarray):
        return cast("State", state.copy())
    if isinstance(state, int | float):
        return state
    kind: Any = type(state)
    parts: list[Any] = [copy_state(part) for part in cast("tuple[Any, ...]", state)]
    return cast("State", kind(*parts) if hasattr(kind, "_fields") else kind(parts))


def checked_horizons(num_layers: int, num_experts: int, horizons: Sequence[int]) -> NDArray[np.int64]:
    """Return horizons as [H] int64, checked with the sizes.

    Raises ValueError for a size below 1, no horizon, a horizon below 1, or horizons that do not increase.
    """
    for name, size in (("num_layers", num_layers), ("num_experts", num_experts)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    horizons_H = np.asarray(horizons)
    if horizons_H.dtype.kind not in "iu" or horizons_H.ndim != 1 or horizons_H.size == 0:
        raise ValueError(
            f"horizons={horizons!r} must be training steps ahead, one or more integers: (10, 100)"
        )
    if (
        horizons_H.min() < 1
        or horizons_H.max() > MOST_STEPS
        or (np.diff(horizons_H.astype(np.int64)) <= 0).any()
    ):
        raise ValueError(f"horizons={horizons!r} must be 1 to 2^62 and increase: (10, 100)")
    return horizons_H.astype(np.int64)


def checked_sample(
    step: SupportsIndex, tokens_per_expert_LE: ArrayLike, last_step: int, shape_LE: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the counts of one sample as [L, E] float64, checked.

    last_step: of the sample before, -1 for none. Raises ValueError for a step that is no integer, does not
    increase or is beyond 2^62, another shape, a type that is no number, or an entry that is negative, not
    finite or beyond 2^63.
    """
    if isinstance(step, bool | np.bool_) or not hasattr(step, "__index__"):
        raise ValueError(f"step={step!r} must be an integer, the training step of the sample")
    if not last_step < operator.index(step) <= MOST_STEPS:
        raise ValueError(
            f"step={step} must be more than that of the last sample, {last_step}, and at most 2^62"
        )
    counts = np.asarray(tokens_per_expert_LE)
    if counts.dtype.kind not in "iuf" or counts.shape != shape_LE:
        raise ValueError(
            f"tokens_per_expert_LE is {counts.dtype} {counts.shape}, expected counts [L, E] = {shape_LE}"
        )
    counts = counts.astype(np.float64)
    bad = ~((counts >= 0) & (counts <= MOST_COPIES))
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"step {step}, layer {layer}, expert {expert}: {counts[layer, expert]} is no count; "
            "it must be 0 to 2^63"
        )
    return counts
