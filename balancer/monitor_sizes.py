"""Sizes of the samples of the collapse monitor: the same load looks more uneven in fewer copies.

Under `balancer/monitor_core.py`. Over N copies an even router lacks phi (E - 1) / (2 N) of entropy by chance,
phi the dispersion of its counts. Batches of changing length would make y = ln(D + d0) jump up and down by
that, so y is taken to the size that the baseline is of. Only a change of size that lasts starts the charts
anew: the correction is good to some 10 %, and the sensitivity of charts of large samples is worth having.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# copies per sample over the baseline's that are of another size, and samples in a row after which it lasts
OTHER_SIZE, LASTING = 1.5, 10


class SizeState(NamedTuple):
    """usual_L: [L] copies a sample that the baseline is of, 0 before the first. last_L: copies of the last
    sample. run_L: samples in a row of another size, below 0 for smaller ones. logs_L: sum of ln(copies /
    usual_L) over them."""

    usual_L: Floats
    last_L: Floats
    run_L: Floats
    logs_L: Floats


def init_sizes(num_layers: int) -> SizeState:
    """Return the state before the first sample."""
    return SizeState(*(np.zeros(num_layers) for _ in SizeState._fields))


def is_usual(copies_L: Floats, state: SizeState) -> bool:
    """Whether all layers' samples are, and have been lately, of the usual size: then all stays as it is."""
    usual_L = state.usual_L
    return bool((copies_L == usual_L).all() and (state.last_L == usual_L).all() and not state.run_L.any())


def update_sizes(
    copies_L: Floats, live_L: Flags, watched_L: Flags, state: SizeState
) -> tuple[Flags, SizeState]:
    """Return the layers whose baseline must start anew, and the state after a sample of so many copies.

    copies_L: [L]. live_L: layers that have any; the others stay as they are. watched_L: layers that may be
    growing: they do not start anew before that is over. The new size is the geometric mean of the samples
    that made it new.
    """
    first_L = live_L & (state.usual_L == 0)
    known_L = live_L & ~first_L
    log_L = np.log(np.where(known_L, copies_L, 1.0) / np.where(known_L, state.usual_L, 1.0))
    side_L = np.where(np.abs(log_L) > math.log(OTHER_SIZE), np.sign(log_L), 0.0)
    on_L = side_L * state.run_L > 0
    run_L = np.where(on_L, state.run_L, 0.0) + side_L
    logs_L = np.where(on_L, state.logs_L, 0.0) + np.where(side_L != 0, log_L, 0.0)
    lasting_L = (np.abs(run_L) >= LASTING) & ~watched_L
    mean_L = np.exp(logs_L / np.where(lasting_L, np.abs(run_L), 1.0))
    usual_L = np.where(lasting_L, state.usual_L * mean_L, state.usual_L)
    after = SizeState(
        usual_L=np.where(first_L, copies_L, usual_L),
        last_L=state.last_L,
        run_L=np.where(lasting_L, 0.0, run_L),
        logs_L=np.where(lasting_L, 0.0, logs_L),
    )
    return first_L | lasting_L, after


def at_usual_size(
    y_L: Floats, level_L: Floats, copies_L: Floats, noise: float, least_lack: float, dispersion_L: Floats,
    state: SizeState,
) -> Floats:  # fmt: skip
    """Return y as samples of the usual size would have it on average.

    level_L: [L] y lately, at the usual size: what it has above the noise there is no noise, and is in samples
    of any size. noise: E - 1. least_lack: d0. A factor on D + d0, not a difference: the noise of ln D is then
    the same at all sizes.
    """
    known_L = (state.usual_L > 0) & (copies_L > 0)
    unit_L = 0.5 * noise * np.maximum(dispersion_L, 1.0)
    usual_L = unit_L / np.where(known_L, state.usual_L, 1.0)
    here_L = unit_L / np.where(known_L, copies_L, 1.0)
    lack_L = np.maximum(np.exp(level_L) - usual_L, least_lack)
    return np.where(known_L, y_L - np.log((lack_L + here_L) / (lack_L + usual_L)), y_L)


def change_at_usual_size(change_L: Floats, copies_L: Floats, state: SizeState) -> Floats:
    """Return the total variation from the last sample, less where either of the two is a small one.

    Two samples of N and M copies differ by chance by sqrt(1 / N + 1 / M). More copies make it no larger: what
    is left then is no noise.
    """
    known_L = (state.usual_L > 0) & (copies_L > 0) & (state.last_L > 0)
    inverse_L = 1.0 / np.where(known_L, copies_L, 1.0) + 1.0 / np.where(known_L, state.last_L, 1.0)
    wider_L = np.sqrt(0.5 * inverse_L * np.where(known_L, state.usual_L, 1.0))
    return np.where(known_L, change_L / np.maximum(wider_L, 1.0), change_L)
