"""Words of the collapse monitor: what each reason says, with its figures.

Beside `balancer/monitor.py`; run only where somebody asks.
"""

import math
from collections.abc import Callable, Mapping

from balancer.monitor_core import BIT, REASONS

Figures = Mapping[str, float]


def _dead(f: Figures, experts: int) -> str:
    dead, steps = f["dead_experts"], f["dead_window_steps"]
    if math.isnan(dead):
        return f"experts were dead; {steps:.0f} steps hold too few copies to tell now"
    if dead == 0:
        return f"experts were dead, and have hardly more: none under the bound over {_steps(steps)}"
    return f"{dead:.0f} of {experts} experts dead over {_steps(steps)}"


def _growing(f: Figures, experts: int) -> str:
    del experts
    return f"entropy {f['entropy']:.3g} of 1, was {f['before_entropy']:.3g}, and falling"


def _concentrated(f: Figures, experts: int) -> str:
    return f"load of {f['effective_experts']:.1f} of {experts} experts, the largest has {f['max_share']:.1%}"


def _uneven(f: Figures, experts: int) -> str:
    del experts
    return (
        f"max violation {f['max_violation']:.2f} (floor {f['violation_floor']:.2f}); lately "
        f"{f['mean_excess']:+.2f} over the noise"
    )


def _returning(f: Figures, experts: int) -> str:
    del experts
    return f"ln D hardly returns to its baseline: autocorrelation {f['autocorrelation']:.2f}"


_WORDS: dict[str, Callable[[Figures, int], str]] = {
    "dead": _dead,
    "growing": _growing,
    "concentrated": _concentrated,
    "fading": lambda f, experts: f"{f['fading_experts']:.0f} of {experts} experts lose their load",
    "uneven": _uneven,
    "margin": lambda f, _: f"bias gain is {f['gain_margin']:.2g} of the reinforcement; 1 is needed to hold",
    "saturated": lambda f, _: f"{f['bias_saturation']:.0%} of the biases are at their limit",
    "ranks": lambda f, _: f"the fullest rank has {f['rank_skew']:.2f} of the mean rows",
    "bytes": lambda f, _: (
        f"bytes are {f['bytes_ratio']:.3f} of the formula, {f['pair_bytes_ratio']:.3f} for one pair of ranks"
    ),
    "balancer": lambda f, _: f"the balancer last acted {_steps(f['balancer_age_steps'])} ago",
    "gap": lambda f, _: f"no sample for {_steps(f['gap_steps'])}",
    "swaps": lambda f, _: f"tokens at the border of a choice are {f['swap_density']:.2f} of what they were",
    "logits": lambda f, _: f"router logits are {math.exp(f['logit_rise']):.2f} of what they were",
    "returning": _returning,
}


def reasons_in_words(bits: int, figures: Figures, num_experts: int) -> tuple[str, ...]:
    """Return one text a reason, the heaviest first."""
    return tuple(_WORDS[name](figures, num_experts) for name in REASONS if bits & BIT[name])


def _steps(count: float) -> str:
    return "1 step" if count == 1 else f"{count:.0f} steps"
