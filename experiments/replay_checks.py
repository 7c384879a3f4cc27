"""What a replay refuses: placements that cannot be run, and policies that know what they were not told.

Under `replay_run.py`, which lets a policy take its steps through `Stepper.step`. Every placement is checked
as it comes. Looking ahead is found by asking again: with the samples that were still to come replaced in the
trace itself, a policy must decide as before; so must it from a state saved half-way. That finds whoever reads
the trace, or anything that grew while it ran, through a global, a closure or a file of its own. A policy that
was handed its own copy of the future before it ever ran cannot be told from a lucky one.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.placement_checks import check_placement
from balancer.policies import Policy, Setup
from balancer.trace import Trace

Integers = NDArray[np.int64]

# Samples from the first on after which a policy is asked again, each with another future.
_FIRST = 12
# Samples behind that which are spread over the rest of the trace.
_SPREAD = 6
# Samples ahead that are replaced: whoever looks further ahead looks at these as well.
_AHEAD = 64


class Step(NamedTuple):
    """What an update gave: slots_LS in force from the next sample on, why, the state, and its seconds."""

    slots_LS: Integers
    reason: str
    state: Any
    seconds: float


class Asked(NamedTuple):
    """A step to be asked for again: sample w, state and placement before it, and the placement after it."""

    w: int
    state: Any
    slots_LS: Integers
    decided_LS: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepper:
    """Lets a policy take steps along a trace, and refuses what it must not do (ValueError)."""

    policy: Policy
    trace: Trace
    setup: Setup

    def init(self, start_LS: Integers) -> Any:
        """Its first state."""
        start_LS = _own_copy(start_LS)
        return self.policy.init(self.setup, start_LS)

    def step(self, w: int, slots_LS: Integers, state: Any) -> Step:
        """Tell it sample w under the placement in force, and take its decision."""
        step, truth_LE = int(self.trace.steps_W[w]), self.trace.tokens_per_expert_WLE[w]
        where = f"policy {self.policy.name!r}, step {step}"
        counts_LE, given_LS = _own_copy(truth_LE), _own_copy(slots_LS)
        began = time.perf_counter()
        answer = self.policy.update(step, counts_LE, given_LS, state)
        seconds = time.perf_counter() - began
        if not np.array_equal(counts_LE, truth_LE) or not np.array_equal(given_LS, slots_LS):
            raise ValueError(f"{where}: it changed the arrays that it was given; they are to be read only")
        try:
            (decided_LS, reason), state = answer
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: update gave {type(answer).__name__}; expected Decision, state"
            ) from None
        if decided_LS is given_LS:
            return Step(slots_LS, reason, state, seconds)
        return Step(self._checked(decided_LS, slots_LS, where), reason, state, seconds)

    def _checked(self, decided_LS: Any, slots_LS: Integers, where: str) -> Integers:
        """Its placement as an array of our own."""
        given = (
            f"{decided_LS.dtype} {decided_LS.shape}"
            if isinstance(decided_LS, np.ndarray)
            else type(decided_LS).__name__
        )
        if not isinstance(decided_LS, np.ndarray) or decided_LS.dtype != np.int64:
            raise ValueError(f"{where}: slots_LS is {given}; expected int64 {slots_LS.shape}")
        if decided_LS.shape != slots_LS.shape:
            raise ValueError(f"{where}: slots_LS is {given}; expected int64 {slots_LS.shape}")
        setup = self.setup
        homes = setup.home_slot_LE if setup.fixed_homes and not self.policy.free_slots else None
        try:
            check_placement(
                decided_LS,
                num_experts=setup.num_experts,
                num_ranks=setup.num_ranks,
                home_slot_LE=homes,
                distinct=self.policy.distinct,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return _own_copy(decided_LS)


def check_causality(
    policy: Policy, trace: Trace, setup: Setup, start_LS: Integers, asked: Sequence[Asked] | None = None
) -> None:
    """Raise ValueError for a policy that decides otherwise when what is still to come is otherwise.

    trace: its array is altered in place and put back, where it can be written to; nobody else may use it
    meanwhile. start_LS: [L, S], where the policy starts;  asked: steps that it took before (`asked_samples`);
    None = it runs along the trace first. Decisions must also be the same when it is asked again at all: a
    policy that draws keeps its generator in its state.
    """
    stepper = Stepper(policy=policy, trace=trace, setup=setup)
    if asked is None:
        asked = _run(stepper, start_LS)
    state, slots_LS = None, start_LS
    for one in asked:
        with _other_future(trace, one.w):
            if one.w == 0:
                state, slots_LS = stepper.init(start_LS), start_LS
            elif one.w >= _FIRST:
                state, slots_LS = copy.deepcopy(one.state), one.slots_LS
            found = stepper.step(one.w, slots_LS, state)
        if not np.array_equal(found.slots_LS, one.decided_LS):
            layer = int((found.slots_LS != one.decided_LS).any(axis=1).argmax())
            raise ValueError(
                f"policy {policy.name!r} sees the future: after step {trace.steps_W[one.w]} it placed layer "
                f"{layer} otherwise when the samples after it were others (or it does not give the same "
                "answer twice: what it knows belongs into its state)"
            )
        state, slots_LS = found.state, found.slots_LS


def asked_samples(num_samples: int) -> frozenset[int]:
    """The samples after which a policy is asked again: the first ones, and a few over the rest."""
    last = num_samples - 2  # what is decided on the last sample is never in force
    rest = np.linspace(_FIRST, last, _SPREAD).astype(int).tolist() if last >= _FIRST else []
    return frozenset([*range(min(_FIRST, last + 1)), *rest])


def saved(stepper: Stepper, w: int, state: Any) -> Any:
    """A copy of a state that is safe from later updates."""
    try:
        return copy.deepcopy(state)
    except Exception as error:  # whatever an object without a copy raises
        raise ValueError(
            f"policy {stepper.policy.name!r}, sample {w}: its state cannot be copied ({error}); use a "
            "NamedTuple of arrays and numbers"
        ) from error


def _run(stepper: Stepper, start_LS: Integers) -> list[Asked]:
    """Run along the trace, and keep the steps to be asked for again."""
    num_samples, asked = len(stepper.trace.steps_W), list[Asked]()
    wanted = asked_samples(num_samples)
    state, slots_LS = stepper.init(start_LS), start_LS
    for w in range(num_samples - 1):
        before = saved(stepper, w, state) if w in wanted else None
        found = stepper.step(w, slots_LS, state)
        if w in wanted:
            asked.append(Asked(w, before, slots_LS, found.slots_LS))
        state, slots_LS = found.state, found.slots_LS
    return asked


@contextmanager
def _other_future(trace: Trace, w: int) -> Iterator[None]:
    """The trace with other counts after sample w: all copies of a layer on its least loaded expert."""
    future_WLE = trace.tokens_per_expert_WLE[w + 1 : w + 1 + _AHEAD]
    if not future_WLE.flags.writeable:
        yield
        return
    truth_WLE = future_WLE.copy()
    least_WL1 = truth_WLE.argmin(axis=2, keepdims=True)
    total_WL1 = truth_WLE.sum(axis=2, keepdims=True)
    try:
        future_WLE[:] = 0
        np.put_along_axis(future_WLE, least_WL1, total_WL1, axis=2)
        yield
    finally:
        future_WLE[:] = truth_WLE


def _own_copy(array: Integers) -> Integers:
    """A read-only copy that owns its values: no base leads back to what it was made from."""
    made = np.array(array, np.int64, copy=True, order="C", subok=False)
    made.setflags(write=False)
    return made
