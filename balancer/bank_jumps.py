"""Jumps: the bank believes one at once, and takes that back if the load jumps back.

Under `balancer/bank.py`. A jump of a layer that had been settled may be a new regime (then all that was
known is worthless) or a burst (then it is all that counts). Nobody can tell at the first sample, so:

    at the jump         weights return to the prior, regressions keep a tenth, means start anew; what they
                        were is put aside
    within 20 samples   in one sample the load comes most of the way back: so does all of that

A jump of a layer that was not settled only resets weights and regressions: its means still hold what came
before, to which it may return. A load that glides back, as under a bias loop, is none that jumps back.
"""

from typing import NamedTuple

import numpy as np

from balancer.forecast_build import Flags, Floats, Integers, Sample
from balancer.forecast_record import copy_state

_KEPT_AFTER_JUMP = 0.1
_MOST_WAITED = 20
# a way back: parts of the jump that one sample must go, and that the load may be away after it
_LEAST_STEP_FRAC, _MOST_AWAY_FRAC = 0.5, 0.35


class Learnt(NamedTuple):
    """What the bank knows of each layer, see `BankState`; the first of its means is the last sample."""

    level_KLE: Floats
    age_L: Integers
    evidence_HML: Floats
    gram_HRLDD: Floats
    moment_HRLD: Floats


class Aside(NamedTuple):
    """waited_L [L]: samples since a jump that may be taken back, 0 = none;  before_LE [L, E]: usual shares
    before it;  size_L [L]: total variation of the jump;  learnt: what was known before it."""

    waited_L: Integers
    before_LE: Floats
    size_L: Floats
    learnt: Learnt


def aside_init(learnt: Learnt) -> Aside:
    """Nothing put aside yet; learnt: for the shapes."""
    num_layers = learnt.age_L.size
    return Aside(
        waited_L=np.zeros(num_layers, dtype=np.int64),
        before_LE=np.zeros(learnt.level_KLE.shape[1:]),
        size_L=np.zeros(num_layers),
        learnt=copy_state(learnt),
    )


def answer_jumps(sample: Sample, usual_LE: Floats, learnt: Learnt, aside: Aside) -> None:
    """Before a sample is taken in: forget what it makes worthless, or bring it back; changes both states.

    usual_LE: [L, E] a mean that a single sample moves little, for what the load was before a jump.
    """
    aside.waited_L[:] = np.where(aside.waited_L > 0, aside.waited_L + sample.loaded_L, 0)
    aside.waited_L[aside.waited_L > _MOST_WAITED] = 0
    away_L = 0.5 * np.abs(sample.share_LE - aside.before_LE).sum(axis=-1)
    step_L = 0.5 * np.abs(sample.share_LE - learnt.level_KLE[0]).sum(axis=-1)
    back_L = sample.loaded_L & (aside.waited_L > 0) & (away_L < _MOST_AWAY_FRAC * aside.size_L)
    back_L &= step_L > _LEAST_STEP_FRAC * aside.size_L
    if back_L.any():
        _copy_layers(aside.learnt, learnt, back_L)
        aside.waited_L[back_L] = 0
    jumped_L = sample.jumped_L & ~back_L
    if jumped_L.any():
        settled_L = jumped_L & sample.restart_L
        aside.waited_L[settled_L] = 1
        aside.before_LE[settled_L] = usual_LE[settled_L]
        size_L = 0.5 * np.abs(sample.share_LE - usual_LE).sum(axis=-1)
        aside.size_L[settled_L] = size_L[settled_L]
        _copy_layers(learnt, aside.learnt, settled_L)
        learnt.evidence_HML[:, :, jumped_L] = 0.0
        learnt.gram_HRLDD[:, :, jumped_L] *= _KEPT_AFTER_JUMP
        learnt.moment_HRLD[:, :, jumped_L] *= _KEPT_AFTER_JUMP
        learnt.age_L[settled_L] = 0
        learnt.level_KLE[:, settled_L] = sample.share_LE[settled_L]


def _copy_layers(source: Learnt, target: Learnt, layers_L: Flags) -> None:
    target.level_KLE[:, layers_L] = source.level_KLE[:, layers_L]
    target.age_L[layers_L] = source.age_L[layers_L]
    target.evidence_HML[:, :, layers_L] = source.evidence_HML[:, :, layers_L]
    target.gram_HRLDD[:, :, layers_L] = source.gram_HRLDD[:, :, layers_L]
    target.moment_HRLD[:, :, layers_L] = source.moment_HRLD[:, :, layers_L]
