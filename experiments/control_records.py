"""Control records: what a person and the run's files are told of the control: few figures, and every alarm.

Many layers go into means and the worst layer: a scalar for each would swamp the page.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from balancer.control_config import ControlConfig
from balancer.loop import Report
from balancer.monitor import Verdict
from experiments.records import Recorder

# how bad a verdict is, for the chart
STATES = ("HEALTHY", "SKEWED", "STALE", "COLLAPSING", "COLLAPSED")
# tag -> figure and how the layers' values become one
_FIGURES: dict[str, tuple[str, Callable[[np.ndarray], float]]] = {
    "collapse/entropy_least": ("entropy", np.nanmin),
    "collapse/effective_experts_least": ("effective_experts", np.nanmin),
    "collapse/dead_experts_most": ("dead_experts", np.nanmax),
    "collapse/max_share_most": ("max_share", np.nanmax),
    "collapse/excess_mean": ("excess", np.nanmean),
    "collapse/excess_most": ("excess", np.nanmax),
    "collapse/slow_chart_most": ("slow_chart", np.nanmax),
    "collapse/growth_most": ("growth", np.nanmax),
    "collapse/autocorrelation_most": ("autocorrelation", np.nanmax),
    "collapse/dispersion_mean": ("dispersion", np.nanmean),
    "collapse/switches_mean": ("switches", np.nanmean),
    "collapse/swap_density_least": ("swap_density", np.nanmin),
    "collapse/logit_rise_most": ("logit_rise", np.nanmax),
    "collapse/confidence_mean": ("confidence", np.nanmean),
    "control/gain_mean": ("gain", np.nanmean),
    "control/reinforcement_most": ("reinforcement", np.nanmax),
    "control/gain_margin_least": ("gain_margin", np.nanmin),
    "control/bias_saturation_most": ("bias_saturation", np.nanmax),
}


def described(control: ControlConfig) -> str:
    """Return what acts in a run, in one line."""
    parts = [] if control.bias == "off" else [f"bias {control.bias}"]
    parts += ["monitor"] if control.monitor else []
    parts += ["supervisor" + (" with rollback" if control.rollback else "")] if control.supervisor else []
    return f"control: {', '.join(parts)}"


def scalars(report: Report) -> dict[str, float]:
    """Return the figures of a step by tag; those that are not known in it are left out."""
    found: dict[str, float] = {}
    for tag, (name, reduce) in _FIGURES.items():
        values_L = report.figures.get(name)
        if values_L is not None and np.isfinite(values_L).any():
            found[tag] = float(reduce(np.where(np.isfinite(values_L), values_L, np.nan)))
    if report.verdicts:
        codes = [STATES.index(verdict.state) for verdict in report.verdicts]
        found["collapse/state_worst"] = max(codes)
        found["collapse/layers_collapsing"] = sum(code >= STATES.index("COLLAPSING") for code in codes)
    if report.bias_LE is not None:
        found["control/bias_largest"] = float(np.abs(report.bias_LE).max())
    if report.balance_loss_L is not None:
        found["control/balance_loss_mean"] = float(report.balance_loss_L.mean())
        found["control/balance_loss_most"] = float(report.balance_loss_L.max())
        found["control/router_lr_factor"] = report.router_lr_factor
    return found


def tell(report: Report, records: Recorder, say: Callable[[str], None]) -> None:
    """Tell the alarms and actions of a step: a line on the console, a text in TensorBoard, events."""
    lines = alarm_lines(report.alarms)
    for verdict in report.alarms:
        facts: dict[str, Any] = {"layer": verdict.layer, "state": verdict.state, "was": verdict.was}
        records.event(report.step, "alarm", **facts, reasons=list(verdict.reasons))
    for action in report.actions:
        facts = {"action": action.kind, "layers": action.layers, "values": action.values}
        records.event(report.step, "control", **facts, message=action.reason)
        lines.append(f"CONTROL {action.kind}: {action.reason}")
    for line in lines:
        say(f"step {report.step}: {line}")
    if lines:
        records.alarms(report.step, lines)


def alarm_lines(alarms: Sequence[Verdict]) -> list[str]:
    """Return one line a state: the layers that are now in it, with the reasons of the least even of them."""
    lines: list[str] = []
    for state in reversed(STATES):
        there = [verdict for verdict in alarms if verdict.state == state]
        if not there:
            continue
        worst = min(there, key=_entropy)
        layers = ", ".join(str(verdict.layer) for verdict in there)
        if state in STATES[STATES.index("STALE") :]:
            line = f"ALARM layer {layers} {state}: {'; '.join(worst.reasons)}"
        else:
            line = f"layer {layers} {state}, was {'; '.join((worst.was, *worst.reasons))}"
        lines.append(line + (f" (layer {worst.layer})" if len(there) > 1 else ""))
    return lines


def _entropy(verdict: Verdict) -> float:
    entropy = verdict.figures["entropy"]
    return math.inf if math.isnan(entropy) else entropy
