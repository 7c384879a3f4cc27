"""Supervisor record: what the supervisor reads, what it remembers, and what it wants done.

Under balancer/supervisor.py and balancer/supervisor_rollback.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Layers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Something that the supervisor has decided, for the host and for the log.

    kind: "balance_loss" (override), "gain", "no-gain" (why it is not raised), "release", "trim" (a notice of
    what it did over many steps), "rollback", or "no-rollback" (why a collapse has none). layers: that it is
    about. values: the new coefficient or gain of each of the layers; of a rollback the factor on the routers'
    learning rate.
    checkpoint_step: that a rollback goes back to, -1 else. reason: with the figures.
    """

    kind: str
    layers: tuple[int, ...]
    values: tuple[float, ...]
    reason: str
    checkpoint_step: int = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Signals:
    """What the supervisor reads in a step.

    states: of each layer, "HEALTHY", "SKEWED", "COLLAPSING", "COLLAPSED" or "STALE". excess_L: [L] float64,
    max violation of the mean load lately, over what noise of the measured dispersion gives, as the monitor's
    mean_excess is: over the floor of a multinomial an even router with other noise would be trimmed for ever;
    NaN where the layer had no load. gain_L, reinforcement_L, most_gain_L:
    [L], as the law reports them (shares of an error a step); None: unknown. checkpoint_steps: steps of the
    checkpoints that one can go back to.
    """

    step: int
    states: Sequence[str]
    excess_L: Floats
    gain_L: Floats | None = None
    reinforcement_L: Floats | None = None
    most_gain_L: Floats | None = None
    checkpoint_steps: Sequence[int] = ()


class SupervisorState(NamedTuple):
    """What it remembers. coefficient_L is what the host sets now, base_L that of the trim alone.

    base_L, coefficient_L, excess_L: [L] float64, excess smoothed. told_L: [L] float64, base as last told.
    gain_L: [L] float64, least gain asked of the law, 0 = its own. since_L: [L] int64, step in which the layer
    began to collapse, -1 = it does not. calm_L, healthy_L: [L] int64, steps without an alarm, and steps of
    health, since the last alarm. event_L: [L] int64, 1 = overridden. answered_L: [L] int64, the answer that
    its collapse has had, 0 = none. rollbacks_R3: [R, 3] int64, first and last step of each stretch that was
    given up, and the checkpoint's; -1 = none yet.
    router_lr_factor: on the routers' learning rate. memory: 1 - beta2 of the optimizer.
    """

    base_L: Floats
    coefficient_L: Floats
    excess_L: Floats
    told_L: Floats
    gain_L: Floats
    since_L: Layers
    calm_L: Layers
    healthy_L: Layers
    event_L: Layers
    answered_L: Layers
    rollbacks_R3: Layers
    router_lr_factor: float
    memory: float
