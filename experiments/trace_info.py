"""What `counterpoise trace info` says about a load trace: its figures (`trace_words.py` puts them in words).

Under `experiments/trace_command.py`; every figure is one of `balancer/metrics.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import (
    dead_experts,
    effective_experts,
    max_violation,
    mean_balancedness,
    normalized_entropy,
    rank_load,
    sum_balancedness,
    total_variation,
    violation_floor,
)
from balancer.trace import Trace

# samples looked at together: a mapped trace stays on disk
_PIECE_VALUES = 2**21
_NUM_CHANGES = 5
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Figures of a part of a trace, mean over its samples and layers; None where nothing defines them."""

    name: str
    first_step: int
    last_step: int
    samples: int
    entropy: float | None
    max_violation: float | None
    effective_experts: float | None
    dead_experts: float | None
    mean_balancedness: float | None
    sum_balancedness: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A large change of one layer's load shares from one sample to the next, in total variation."""

    layer: int
    from_step: int
    to_step: int
    total_variation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """What a trace is. interval: the most frequent distance of two samples in steps. gaps: (step before,
    missing samples) where more steps lie between. copies: (least, most) of a layer in a sample."""

    samples: int
    layers: int
    experts: int
    first_step: int | None
    last_step: int | None
    interval: int | None
    gaps: list[tuple[int, int]]
    irregular: int
    copies: tuple[int, int] | None
    ranks: int
    violation_floor: float | None
    entropy_W: list[float | None] = field(repr=False)
    phases: list[Phase]
    changes: list[Change]
    meta: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """As JSON writes it."""
        return asdict(self)


class Curves:
    """Figures of every sample, [W, L] float64, computed in pieces."""

    def __init__(self, trace: Trace, ranks: int, advance: Advance) -> None:
        num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
        self.entropy_WL = np.full((num_samples, num_layers), np.nan)
        self.violation_WL, self.effective_WL = self.entropy_WL.copy(), self.entropy_WL.copy()
        self.change_WL = self.entropy_WL.copy()
        self.copies_WL = np.zeros((num_samples, num_layers), dtype=np.int64)
        self.mean_balance_W, self.sum_balance_W = np.full(num_samples, np.nan), np.full(num_samples, np.nan)
        piece = max(1, _PIECE_VALUES // (num_layers * num_experts))
        for start in range(0, num_samples, piece):
            self._fill(trace.tokens_per_expert_WLE, start, min(start + piece, num_samples), ranks)
            advance(min(piece, num_samples - start))

    def _fill(self, counts_WLE: NDArray[np.int64], start: int, end: int, ranks: int) -> None:
        part = slice(start, end)
        loads = counts_WLE[part]
        self.entropy_WL[part] = normalized_entropy(loads)
        self.violation_WL[part] = max_violation(loads)
        self.effective_WL[part] = effective_experts(loads)
        self.copies_WL[part] = loads.sum(axis=-1)
        on_ranks = rank_load(loads, ranks)
        self.mean_balance_W[part], self.sum_balance_W[part] = (
            mean_balancedness(on_ranks),
            sum_balancedness(on_ranks),
        )
        first = max(start, 1)
        if end > first:
            self.change_WL[first:end] = total_variation(
                counts_WLE[first - 1 : end - 1], counts_WLE[first:end]
            )


def largest_ranks(num_experts: int, most: int = 8) -> int:
    """The largest number of ranks up to `most` that divides the experts."""
    return max(p for p in range(1, most + 1) if num_experts % p == 0)


def analyse(trace: Trace, ranks: int, curves: Curves) -> Info:
    """Everything that is said about a trace.   ranks: P, contiguous homes.   Raises ValueError where P does
    not divide E."""
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    steps = trace.steps_W
    interval, gaps, irregular = sampling(steps)
    copies = (int(curves.copies_WL.min()), int(curves.copies_WL.max())) if num_samples else None
    return Info(
        samples=num_samples,
        layers=num_layers,
        experts=num_experts,
        first_step=int(steps[0]) if num_samples else None,
        last_step=int(steps[-1]) if num_samples else None,
        interval=interval,
        gaps=gaps,
        irregular=irregular,
        copies=copies,
        ranks=ranks,
        violation_floor=_floor(copies, num_experts),
        entropy_W=[mean_known(row) for row in curves.entropy_WL],
        phases=_phases(trace, curves),
        changes=_changes(steps, curves.change_WL),
        meta=trace.meta,
    )


def sampling(steps_W: NDArray[np.int64]) -> tuple[int | None, list[tuple[int, int]], int]:
    """Return the usual interval, the gaps (step before, samples missing), and how many distances are neither.

    The usual interval is the most frequent distance; a gap is a whole multiple of it.
    """
    distances = np.diff(steps_W)
    if not distances.size:
        return None, [], 0
    values, times = np.unique(distances, return_counts=True)
    interval = int(values[np.argmax(times)])
    missing = np.flatnonzero((distances > interval) & (distances % interval == 0))
    gaps = [(int(steps_W[w]), int(distances[w]) // interval - 1) for w in missing]
    return interval, gaps, int(np.count_nonzero(distances != interval)) - len(gaps)


def _floor(copies: tuple[int, int] | None, num_experts: int) -> float | None:
    # copies of one token go to different experts, which the floor of single copies overstates by some percent
    return violation_floor(copies[0], num_experts, 1) if copies and copies[0] else None


def _phases(trace: Trace, curves: Curves) -> list[Phase]:
    num = trace.steps_W.shape[0]
    tenth = max(1, round(num / 10))
    parts = {
        "first": (0, 1),
        "first 10 %": (0, tenth),
        "middle": (tenth, num - tenth),
        "last 10 %": (num - tenth, num),
    }
    return [
        _phase(name, trace, curves, slice(*ends))
        for name, ends in parts.items()
        if 0 <= ends[0] < ends[1] <= num
    ]


def _phase(name: str, trace: Trace, curves: Curves, part: slice) -> Phase:
    window_LE = np.zeros(trace.tokens_per_expert_WLE.shape[1:])
    for w in range(part.start, part.stop):  # a sample at a time: in float64, where no sum passes int64
        window_LE += trace.tokens_per_expert_WLE[w]
    return Phase(
        name=name,
        first_step=int(trace.steps_W[part.start]),
        last_step=int(trace.steps_W[part.stop - 1]),
        samples=part.stop - part.start,
        entropy=mean_known(curves.entropy_WL[part]),
        max_violation=mean_known(curves.violation_WL[part]),
        effective_experts=mean_known(curves.effective_WL[part]),
        dead_experts=mean_known(dead_experts(window_LE)),
        mean_balancedness=mean_known(curves.mean_balance_W[part]),
        sum_balancedness=mean_known(curves.sum_balance_W[part]),
    )


def mean_known(values: NDArray[np.float64]) -> float | None:
    """The mean of what is known (not NaN); None where nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def _changes(steps_W: NDArray[np.int64], change_WL: NDArray[np.float64]) -> list[Change]:
    known = np.where(np.isnan(change_WL), -1.0, change_WL)
    order = np.argsort(-known, axis=None, kind="stable")[:_NUM_CHANGES]
    places = [(int(i) // known.shape[1], int(i) % known.shape[1]) for i in order]
    return [
        Change(
            layer=l,
            from_step=int(steps_W[w - 1]),
            to_step=int(steps_W[w]),
            total_variation=float(known[w, l]),
        )
        for w, l in places
        if known[w, l] > 0
    ]
