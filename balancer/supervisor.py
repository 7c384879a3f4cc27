"""Supervisor: the slowest loop of the control, and its fast override when a layer collapses.

Last in the flow of balancer/loop.py: it reads the verdicts of the monitor and sets what the bias law cannot:

    steady      the coefficient of each layer's balance loss drifts to where its violation stays small
    COLLAPSING  the coefficient jumps, and the bias gain rises as far as the loop stays stable
    HEALTHY     for long enough: both go back
    COLLAPSED   back to a checkpoint from before the collapse, and something changed, else it would replay

Functions over a state of arrays; the host carries the actions out (experiments/control.py).
"""

import math

import numpy as np
from numpy.typing import NDArray

from balancer.control_config import ControlConfig
from balancer.supervisor_record import Action, Floats, Signals, SupervisorState
from balancer.supervisor_rollback import ROLLED_BACK, needed_checkpoint, roll_back

__all__ = [
    "Action",
    "Signals",
    "SupervisorState",
    "init_supervisor",
    "needed_checkpoint",
    "update_supervisor",
]

# how often the trim is told: whenever a coefficient has changed by this factor
_TOLD_FACTOR = 2.0


def init_supervisor(
    config: ControlConfig,
    num_layers: int,
    balance_loss: float,
    *,
    beta2: float = 0.95,
    router_lr_factor: float = 1.0,
) -> SupervisorState:
    """Return the state at the start of a run.

    balance_loss: coefficient that all layers start with; where it is 0 the trim leaves it at 0, until an
    alarm has set it (start at 1e-3 for a trim from the beginning). beta2: decay of the optimizer's second
    moment; no coefficient is trimmed to double within less than its memory, 1 / (1 - beta2) steps.
    router_lr_factor: that the run starts with. Raises ValueError for a coefficient out of the trim's bounds,
    or another number out of range.
    """
    least, most = config.balance_loss_least, config.balance_loss_most
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    if not (balance_loss == 0 or least <= balance_loss <= most):
        raise ValueError(
            f"the balance loss starts with the coefficient {balance_loss}, out of {least} to {most}: widen "
            "control.balance_loss_least, control.balance_loss_most, or start within, or at 0"
        )
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2={beta2} must be 0 or more and below 1; AdamW's is 0.95 to 0.999")
    if not 0 < router_lr_factor < math.inf:
        raise ValueError(f"router_lr_factor={router_lr_factor} must be above 0 and finite; 1 is usual")
    start_L, none_L = np.full(num_layers, float(balance_loss)), np.zeros(num_layers, dtype=np.int64)
    return SupervisorState(
        base_L=start_L,
        coefficient_L=start_L.copy(),
        excess_L=np.full(num_layers, config.trim_reference),
        told_L=start_L.copy(),
        gain_L=np.zeros(num_layers),
        since_L=none_L - 1,
        calm_L=none_L.copy(),
        healthy_L=none_L.copy(),
        event_L=none_L.copy(),
        answered_L=none_L.copy(),
        rollbacks_R3=np.full((max(1, config.most_rollbacks), 3), -1, dtype=np.int64),
        router_lr_factor=float(router_lr_factor),
        memory=1.0 - beta2,
    )


def update_supervisor(
    config: ControlConfig, signals: Signals, state: SupervisorState
) -> tuple[tuple[Action, ...], SupervisorState]:
    """Return what is to be done after a step, and the state; takes the state over. Source: control.md 4.

    The state's coefficient_L, gain_L and router_lr_factor are in force from the next step on. Raises
    ValueError where the signals are not those of as many layers.
    """
    num_layers = state.base_L.shape[0]
    if len(signals.states) != num_layers or signals.excess_L.shape != (num_layers,):
        raise ValueError(
            f"{len(signals.states)} verdicts and {signals.excess_L.shape} figures for {num_layers} layers"
        )
    collapsing_L = np.array([name in ("COLLAPSING", "COLLAPSED") for name in signals.states])
    state = _note_health(config, signals, collapsing_L, state)
    trims, state = _trim(config, signals, state)
    ends, state = _release(config, state)
    starts, state = _override(config, signals, collapsing_L, state)
    backs, state = roll_back(config, signals, state)
    return (*trims, *ends, *starts, *backs), state


def _note_health(
    config: ControlConfig, signals: Signals, collapsing_L: NDArray[np.bool_], state: SupervisorState
) -> SupervisorState:
    """Since when a layer collapses, and for how long it has not: a verdict that flickers is one collapse.

    SKEWED is calm and not healthy, STALE is neither.
    """
    healthy_L = np.array([name == "HEALTHY" for name in signals.states])
    stale_L = np.array([name == "STALE" for name in signals.states])
    calm_L = np.where(collapsing_L, 0, state.calm_L + ~stale_L)
    over_L = calm_L >= config.release_steps
    begun_L = collapsing_L & (state.since_L < 0)
    collapsed_L = np.array([name == "COLLAPSED" for name in signals.states])
    better_L = over_L | ((state.answered_L == ROLLED_BACK) & ~collapsed_L & ~stale_L)
    return state._replace(
        since_L=np.where(over_L, -1, np.where(begun_L, signals.step, state.since_L)),
        calm_L=calm_L,
        healthy_L=np.where(collapsing_L, 0, state.healthy_L + healthy_L),
        answered_L=np.where(better_L, 0, state.answered_L),
    )


# ---- the slow trim --------------------------------------------------------------------------------------


def _trim(
    config: ControlConfig, signals: Signals, state: SupervisorState
) -> tuple[list[Action], SupervisorState]:
    """ln base += clip(rate (excess - reference), +-(1 - beta2) ln 2): no doubling within Adam's memory.

    Excess over noise: what no coefficient can level must not raise one.

    An overridden layer is not trimmed: what the override does would be taken for the trim's.
    """
    weight = 1.0 / config.trim_memory_steps
    seen_L = np.isfinite(signals.excess_L)
    news_L = np.where(seen_L, signals.excess_L - state.excess_L, 0.0)
    excess_L = state.excess_L + weight * news_L
    fastest = state.memory * math.log(2)
    growth_L = np.clip(config.trim_rate * (excess_L - config.trim_reference), -fastest, fastest)
    growth_L = np.where((state.event_L > 0) | ~seen_L, 0.0, growth_L)
    moved_L = np.clip(state.base_L * np.exp(growth_L), config.balance_loss_least, config.balance_loss_most)
    base_L = np.where((state.base_L > 0) & (growth_L != 0), moved_L, state.base_L)
    coefficient_L = _decayed(state, base_L, fastest)
    state = state._replace(base_L=base_L, coefficient_L=coefficient_L, excess_L=excess_L)
    return _tell_trim(config, state)


def _decayed(state: SupervisorState, base_L: Floats, fastest: float) -> Floats:
    """[L] coefficients in force: those of an override that has ended go down to the trim's, no faster than
    the trim could; 0 stays 0."""
    lower_L = np.maximum(base_L, state.coefficient_L * math.exp(-fastest))
    return np.where(state.event_L > 0, np.maximum(base_L, state.coefficient_L), lower_L)


def _tell_trim(config: ControlConfig, state: SupervisorState) -> tuple[list[Action], SupervisorState]:
    known_L = (state.base_L > 0) & (state.told_L > 0)
    change_L = np.log(np.where(known_L, state.base_L, 1.0) / np.where(known_L, state.told_L, 1.0))
    actions = [
        Action(
            kind="trim",
            layers=(layer,),
            values=(float(state.base_L[layer]),),
            reason=f"layer {layer}: violation {state.excess_L[layer]:.3f} over its noise against a reference "
            f"of {config.trim_reference:.3f}: balance loss {state.told_L[layer]:.2e} -> "
            f"{state.base_L[layer]:.2e}",
        )
        for layer in (int(i) for i in np.flatnonzero(np.abs(change_L) >= math.log(_TOLD_FACTOR) - 1e-9))
    ]
    told_L = state.told_L.copy()
    for action in actions:
        told_L[action.layers[0]] = action.values[0]
    return actions, state._replace(told_L=told_L)


# ---- the fast override ----------------------------------------------------------------------------------


def _override(
    config: ControlConfig, signals: Signals, collapsing_L: NDArray[np.bool_], state: SupervisorState
) -> tuple[list[Action], SupervisorState]:
    """Of layers that begin to collapse: the coefficient jumps, once an event, and the gain rises."""
    new_L = collapsing_L & (state.event_L == 0)
    actions: list[Action] = []
    coefficient_L, gain_L = state.coefficient_L.copy(), state.gain_L.copy()
    # the law may know the limits of its gain only later in the event
    for layer in (int(i) for i in np.flatnonzero(new_L | (collapsing_L & (gain_L == 0)))):
        why = f"layer {layer} {signals.states[layer]} since step {state.since_L[layer]}"
        before, after = float(coefficient_L[layer]), config.override_balance_loss
        if new_L[layer] and after > before:
            coefficient_L[layer] = after
            text = f"{why}: balance loss {before:.2e} -> {after:.2e}"
            actions.append(Action(kind="balance_loss", layers=(layer,), values=(after,), reason=text))
        gain, text = _higher_gain(config, signals, layer)
        if gain is not None:
            gain_L[layer] = gain
            actions.append(Action(kind="gain", layers=(layer,), values=(gain,), reason=f"{why}: {text}"))
        elif text and new_L[layer]:
            actions.append(Action(kind="no-gain", layers=(layer,), values=(), reason=f"{why}: {text}"))
    event_L = np.where(new_L, 1, state.event_L)
    return actions, state._replace(coefficient_L=coefficient_L, gain_L=gain_L, event_L=event_L)


def _higher_gain(config: ControlConfig, signals: Signals, layer: int) -> tuple[float | None, str]:
    """A gain inside (reinforcement, stability limit) above the present one, and the reason; or why not.

    Below the reinforcement no bias holds a collapse, beyond the limit the loop itself is unstable.
    """
    limits = signals.gain_L, signals.reinforcement_L, signals.most_gain_L
    if config.override_gain == 0 or any(figure_L is None for figure_L in limits):
        return None, ""
    now, low, high = (float(figure_L[layer]) for figure_L in limits if figure_L is not None)
    if not math.isfinite(now + low + high):
        return None, "the bias gain stays, for the law does not know its limits yet"
    between = f"reinforcement {low:.3f} and stability limit {high:.3f}"
    if low >= high:
        return None, f"the bias gain {now:.3f} stays, no gain lies between {between}"
    target = low + config.override_gain * (high - low)
    if target <= now:
        return None, f"the bias gain {now:.3f} stays, it is high enough between {between}"
    return target, f"bias gain {now:.3f} -> {target:.3f}, between {between}"


def _release(config: ControlConfig, state: SupervisorState) -> tuple[list[Action], SupervisorState]:
    """End the override of layers that have been healthy for long enough; the coefficient then decays."""
    over_L = (state.event_L > 0) & (state.healthy_L >= config.release_steps)
    layers = tuple(int(i) for i in np.flatnonzero(over_L))
    if not layers:
        return [], state
    woken_L = over_L & (state.base_L == 0) & (state.coefficient_L > 0)
    base_L = np.where(woken_L, config.balance_loss_start, state.base_L)
    coefficient_L = np.maximum(state.coefficient_L, base_L)
    state = state._replace(
        base_L=base_L,
        told_L=np.where(over_L, base_L, state.told_L),
        coefficient_L=coefficient_L,
        excess_L=np.where(over_L, config.trim_reference, state.excess_L),
        gain_L=np.where(over_L, 0.0, state.gain_L),
        event_L=np.where(over_L, 0, state.event_L),
    )
    values = tuple(float(base_L[layer]) for layer in layers)
    listed = ", ".join(f"{layer} (balance loss to {base_L[layer]:.2e})" for layer in layers)
    text = f"healthy for {config.release_steps} steps, override ends: layer {listed}"
    return [Action(kind="release", layers=layers, values=values, reason=text)], state
