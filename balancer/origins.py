"""Origins: a small store of past forecasts, each kept until the sample comes that it was about.

Under `balancer/forecast_build.py` and `balancer/bank.py`, which keep what they need at the same places of
arrays [H, slots, ...]. Every horizon has its own slots. A long horizon with frequent samples would fill them,
so origins are then kept further apart: at most one every horizon / (slots - 1) steps.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

FREE = -1
_MOST_SLOTS, _LEAST_SLOTS, _MOST_VALUES = 64, 8, 2**23


def num_slots(values_per_slot: int) -> int:
    """Slots that fit 2^23 values (32 MiB of float32): 8 to 64.

    values_per_slot: values that all horizons together keep for one origin.
    """
    return min(_MOST_SLOTS, max(_LEAST_SLOTS, _MOST_VALUES // max(1, values_per_slot)))


def take_due(step_Q: Integers, horizon: int, step: int, interval: float) -> list[int]:
    """Free the slots of one horizon whose time has come, and return those that can be scored, oldest first.

    step_Q: [slots] step of each origin, FREE where there is none; changed. horizon: in steps. step: of the
    sample that came. interval: steps between samples. An origin counts as met by the first sample at or
    after its target; one that is late by half its horizon and by more than a sample and a half (samples are
    missing) is dropped unscored.
    """
    late_Q = step - (step_Q + horizon)
    due_Q = (step_Q != FREE) & (late_Q >= 0)
    scored_Q = due_Q & (late_Q <= max(horizon / 2, 1.5 * interval))
    slots = np.flatnonzero(scored_Q)
    ordered = slots[np.argsort(step_Q[slots], kind="stable")]
    step_Q[due_Q] = FREE
    return [int(slot) for slot in ordered]


def place(step_Q: Integers, horizon: int, step: int) -> int:
    """Take a slot for the origin `step` and return it; FREE where none is to be had now.

    step_Q: [slots], changed.
    """
    if step_Q.max() != FREE and (step - step_Q.max()) * (step_Q.size - 1) < horizon:
        return FREE
    slot = int(step_Q.argmin())
    if step_Q[slot] != FREE:
        return FREE
    step_Q[slot] = step
    return slot
