"""Supervisor rollback: to which checkpoint a collapse goes back, and what changes so that it does not replay.

Under balancer/supervisor.py. The collapse may have begun before the alarm, so the checkpoint must be older
than that, and no checkpoint is taken from a stretch that was given up.
"""

from collections.abc import Sequence

import numpy as np

from balancer.control_config import ControlConfig
from balancer.supervisor_record import Action, Signals, SupervisorState

# answers to a collapse: refused ones hold until it is over, a rollback until the layer is seen to be better
REFUSED, ROLLED_BACK = 1, 2


def roll_back(
    config: ControlConfig, signals: Signals, state: SupervisorState
) -> tuple[list[Action], SupervisorState]:
    """Answer the collapses that have had no answer yet, all at once."""
    collapsed_L = np.array([name == "COLLAPSED" for name in signals.states]) & (state.answered_L == 0)
    layers = tuple(int(i) for i in np.flatnonzero(collapsed_L))
    if not layers or not config.rollback:
        return [], state
    onset = int(state.since_L[state.since_L >= 0].min())  # of any layer: weights are those of all
    state = state._replace(answered_L=np.where(collapsed_L, REFUSED, state.answered_L))
    why = f"layer {', '.join(map(str, layers))} COLLAPSED, the first alarm in step {onset}"
    done = int((state.rollbacks_R3[:, 0] >= 0).sum())
    target = _checkpoint_before(onset, signals.checkpoint_steps, state)
    if done >= config.most_rollbacks:
        return _refuse(layers, f"{why}: {done} rollbacks are all that control.most_rollbacks allows"), state
    if target < 0:
        listed = ", ".join(map(str, sorted(signals.checkpoint_steps))) or "none"
        text = f"{why}: no checkpoint from before it (there: {listed}); save more often, or keep more"
        return _refuse(layers, text), state
    factor = state.router_lr_factor * config.rollback_lr_factor
    text = (
        f"{why}: back to the weights of step {target}, learning rate of the routers times {factor:.3g} (was "
        f"{state.router_lr_factor:.3g}), else the collapse would replay; rollback {done + 1} of at most "
        f"{config.most_rollbacks}"
    )
    action = Action(kind="rollback", layers=layers, values=(factor,), reason=text, checkpoint_step=target)
    return [action], _after_rollback(config, signals.step, onset, target, factor, done, state)


def _refuse(layers: tuple[int, ...], text: str) -> list[Action]:
    return [Action(kind="no-rollback", layers=layers, values=(), reason=text)]


def _checkpoint_before(onset: int, steps: Sequence[int], state: SupervisorState) -> int:
    """The newest checkpoint older than a collapse; none of a stretch that was given up before; -1 for none.

    One that a rollback went to before comes last: the collapse came back, so it may have begun earlier than
    the alarm said.
    """
    known = state.rollbacks_R3[state.rollbacks_R3[:, 0] >= 0]
    good = [step for step in steps if step < onset and not any(low <= step <= high for low, high, _ in known)]
    new = [step for step in good if step not in known[:, 2]]
    return max(new or good, default=-1)


def _after_rollback(
    config: ControlConfig,
    step: int,
    onset: int,
    target: int,
    factor: float,
    done: int,
    state: SupervisorState,
) -> SupervisorState:
    """All layers are as they were before the collapse; overrides stay until their layers have been
    healthy."""
    rollbacks_R3 = state.rollbacks_R3.copy()
    rollbacks_R3[done] = onset, step - 1, target
    return state._replace(
        rollbacks_R3=rollbacks_R3,
        router_lr_factor=factor,
        since_L=np.full_like(state.since_L, -1),
        answered_L=np.where(state.answered_L > 0, ROLLED_BACK, 0),
        calm_L=np.zeros_like(state.calm_L),
        healthy_L=np.zeros_like(state.healthy_L),
        excess_L=np.full_like(state.excess_L, config.trim_reference),
    )


def needed_checkpoint(config: ControlConfig, steps: Sequence[int], state: SupervisorState) -> int:
    """Return which of the checkpoints must stay, for the rollback that may come: the newest from before the
    first alarm that is not over yet, else the newest of all that is good; -1 for none."""
    if not config.rollback or (state.rollbacks_R3[:, 0] >= 0).sum() >= config.most_rollbacks:
        return -1
    begun = state.since_L[state.since_L >= 0]
    return _checkpoint_before(int(begun.min()) if begun.size else 2**62, steps, state)
