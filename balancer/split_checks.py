"""Split checks: what a split refuses, and why; the arrays of a batch and of its options on their way in."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer import split_kernels
from balancer.split_kernels import MOST_WEIGHTED_ROWS

Counts = NDArray[np.int64]


def integers(name: str, given: Any, dimensions: int) -> Counts:
    """The array as contiguous int64, checked for its type and number of axes."""
    array = np.asarray(given)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {array.dtype}; it must be integers, best int64")
    if array.ndim != dimensions or array.shape[0] == 0:
        axes = "[P, E]" if dimensions == 2 else "[S]" if name.startswith("slot") else "[E]"
        raise ValueError(f"{name} has shape {array.shape}; expected {axes} with at least one entry")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has an entry {array.max()}, more than int64 holds; give counts")
    return np.ascontiguousarray(array, np.int64)


def speeds(speed_P: Sequence[float] | NDArray[np.float64] | None) -> NDArray[np.float64]:
    """[P] float64, empty where all ranks are alike."""
    if speed_P is None:
        return np.empty(0, np.float64)
    speed = np.array(speed_P, np.float64)
    for rank, value in enumerate(speed.tolist()):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"speed_P[{rank}]={value} must be finite and above 0; 1.0 is a good unit")
    return speed


def extra_load(extra_load_P: Sequence[int] | Counts | None) -> Counts:
    """[P] int64 rows, empty where there are none."""
    if extra_load_P is None:
        return np.empty(0, np.int64)
    extra = integers("extra_load_P", extra_load_P, 1)
    if extra.min() < 0:
        rank = int(extra.argmin())
        raise ValueError(f"extra_load_P[{rank}]={extra[rank]} must be 0 rows or more")
    return extra


def check_slots(num_slots: int, num_ranks: int) -> None:
    """Raise ValueError unless every rank has as many slots."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    if num_slots % num_ranks:
        low = num_slots - num_slots % num_ranks
        nearest = f"{low} or {low + num_ranks}" if low else str(num_ranks)
        raise ValueError(f"{num_slots} slots are not a multiple of {num_ranks} ranks; use {nearest}")


def check_ranks(speed_G: NDArray[np.float64], extra_G: Counts, num_ranks: int) -> None:
    """Raise ValueError unless options by rank are given for every rank, or not at all."""
    for name, array in (("speed_P", speed_G), ("extra_load_P", extra_G)):
        if array.shape[0] not in (0, num_ranks):
            raise ValueError(f"{name} has {array.shape[0]} entries for {num_ranks} ranks; give one each")


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to the one wanted."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))


def refuse(status: int, counts_PE: Counts, slot_to_expert_S: Counts, home_slot_E: Counts) -> None:
    """Raise the ValueError of a kernel's status, with the place that it is about."""
    num_experts = counts_PE.shape[1]
    if status == split_kernels.NEGATIVE:
        source, expert = np.unravel_index(int(counts_PE.argmin()), counts_PE.shape)
        least = counts_PE[source, expert]
        raise ValueError(f"counts of source {source}, expert {expert} are {least}; copies must be 0 or more")
    if status == split_kernels.TOO_MANY:
        raise ValueError(
            f"counts and extra load sum to {counts_PE.sum(dtype=np.float64):.3g} rows or more, which must "
            f"stay below 2^62 (with speeds {MOST_WEIGHTED_ROWS}); are these counts?"
        )
    if status == split_kernels.NO_SLOT:
        load_E = counts_PE.sum(axis=0)
        load_E[slot_to_expert_S[slot_to_expert_S >= 0]] = 0
        expert = int(load_E.argmax())
        raise ValueError(f"expert {expert} has {load_E[expert]} copies and no slot; give it a slot")
    if status == split_kernels.UNKNOWN_EXPERT:
        (bad,) = np.nonzero((slot_to_expert_S < -1) | (slot_to_expert_S >= num_experts))
        raise ValueError(
            f"slot {bad[0]} has expert {slot_to_expert_S[bad[0]]}, out of 0..{num_experts - 1} (-1 = empty)"
        )
    for expert, slot in enumerate(home_slot_E.tolist()):
        if not 0 <= slot < slot_to_expert_S.shape[0] or slot_to_expert_S[slot] != expert:
            raise ValueError(
                f"home_slot_E[{expert}]={slot} is no slot of expert {expert}; name one of its slots"
            )
