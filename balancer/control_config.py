"""Control settings: which parts of balancer/loop.py run, and how balancer/supervisor.py acts.

The bias law's own constants are settings of the law (balancer/bias.py); here stands which one, and its step.
"""

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

from balancer.bias import LAWS, dead_band, law, rate_limit
from balancer.bias_record import Law
from balancer.monitor_config import MonitorConfig

OFF = "off"
# what `bias_step` sets, by the first of these names that a law has
STEPS = ("step", "gain")
# a loop may be only so much faster than the next slower one, else they work against each other
LEAST_RATIO = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """What the control of the expert load does. Raises ValueError for a bad value, or one without effect."""

    bias: str = field(
        default=OFF,
        metadata={
            "help": "law that sets the routers' selection bias once an optimizer step; identified finds its "
            "gain itself, sign is the loss-free step of DeepSeek-V3",
            "choices": (OFF, *LAWS),
        },
    )
    bias_step: float = field(
        default=0.0,
        metadata={
            "help": "the law's step or gain, 0 = its own. Units of score: sign, sign-decay 1e-3, smebu 5e-4, "
            "longcat 0.1, linear 1e-3 to 1e-2; share of the way: identified, laplacian 0.1 to 0.7, "
            "quantile-damped 0.3"
        },
    )
    bias_limit: float = field(
        default=0.0,
        metadata={"help": "largest bias, in units of score; 0 = the range of the scores, as measured"},
    )
    delay_steps: int = field(
        default=0,
        metadata={"help": "optimizer steps from a change of the bias to the step that it acts in; 0"},
    )
    dead_band: float = field(
        default=0.0,
        metadata={"help": "errors below so many standard deviations of counting noise are left; 0 = off, 1"},
    )
    rate_limit: float = field(
        default=0.0,
        metadata={"help": "by how much the change of a bias may differ from the last, score; 0 = off"},
    )
    monitor: bool = field(
        default=True,
        metadata={
            "help": "watch every layer for a collapse of its load, and raise alarms; under 1 ms a step"
        },
    )
    stale_after_steps: int = field(
        default=1000,
        metadata={
            "help": "steps without a sample or an action of the balancer, after which it is stale; 1000"
        },
    )
    supervisor: bool = field(
        default=False,
        metadata={"help": "let the monitor's verdicts set balance loss, bias gain and router learning rate"},
    )
    trim_rate: float = field(
        default=0.01,
        metadata={
            "help": "growth of a layer's balance-loss coefficient, per step and unit of max violation over "
            "the reference; 0.01, 0 = no trim"
        },
    )
    trim_reference: float = field(
        default=0.2,
        metadata={
            "help": "max violation of the mean load lately, over its noise, at which the coefficient stays; "
            "0.1 to 0.5"
        },
    )
    trim_memory_steps: int = field(
        default=50,
        metadata={
            "help": "steps over which the trim averages the violation; 50, 5 (2 delay_steps + 1) or more"
        },
    )
    balance_loss_least: float = field(
        default=1e-4, metadata={"help": "smallest coefficient that the trim goes to; 1e-4"}
    )
    balance_loss_most: float = field(
        default=0.1, metadata={"help": "largest coefficient that the trim goes to; 0.1"}
    )
    balance_loss_start: float = field(
        default=1e-3,
        metadata={"help": "where a coefficient that was 0 is left once an alarm has passed; 1e-3"},
    )
    override_balance_loss: float = field(
        default=0.05,
        metadata={"help": "coefficient that a collapsing layer gets at once; 0.05, 0 = no override of it"},
    )
    override_gain: float = field(
        default=0.4,
        metadata={
            "help": "where between reinforcement (0) and stability limit (1) a collapsing layer's bias gain "
            "is raised to; 0.4, 0 = no override of it"
        },
    )
    release_steps: int = field(
        default=100, metadata={"help": "steps that a layer must be healthy before its override ends; 100"}
    )
    rollback: bool = field(
        default=True,
        metadata={
            "help": "on a collapse go back to the weights of the last checkpoint from before it, with a "
            "lower learning rate of the routers"
        },
    )
    rollback_lr_factor: float = field(
        default=0.5,
        metadata={"help": "factor on the routers' learning rate at each rollback, below 1; 0.3 to 0.5"},
    )
    most_rollbacks: int = field(default=3, metadata={"help": "rollbacks in a run; 3"})

    def __post_init__(self) -> None:
        self._check_law()
        self._check_bounds()
        self._check_step()
        if self.supervisor and not self.monitor:
            raise ValueError(
                "control.supervisor=true acts on the monitor's verdicts, and control.monitor=false: turn the "
                "monitor on too"
            )
        least = LEAST_RATIO * (2 * self.delay_steps + 1)
        if self.trim_memory_steps < least:
            raise ValueError(
                f"control.trim_memory_steps={self.trim_memory_steps} is too near to the bias loop, which "
                f"needs {2 * self.delay_steps + 1} steps at control.delay_steps={self.delay_steps}; use "
                f"{least} or more"
            )

    def _check_law(self) -> None:
        if self.bias == OFF:
            for name in ("bias_step", "bias_limit", "delay_steps", "dead_band", "rate_limit"):
                if getattr(self, name):
                    raise ValueError(
                        f"control.{name}={getattr(self, name)} has no effect with control.bias={OFF!r}: "
                        f"choose a law, one of {', '.join(LAWS)}"
                    )
        elif self.bias not in LAWS:
            raise ValueError(f"control.bias={self.bias!r} is unknown; use one of {', '.join((OFF, *LAWS))}")
        elif self.bias_step and step_name(self.bias) is None:
            raise ValueError(
                f"control.bias_step={self.bias_step} has no effect: the law {self.bias} has neither a step "
                "nor a gain to set; leave it at 0"
            )

    def _check_step(self) -> None:
        """The law has the last word on its step: one that is built here is built in the run too."""
        try:
            build_law(self)
        except ValueError as error:
            raise ValueError(f"control.bias_step={self.bias_step}: {error}") from error

    def _check_bounds(self) -> None:
        for name, low, high in _BOUNDS:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"control.{name}={getattr(self, name)} must be {low} to {high}")
        least, most = self.balance_loss_least, self.balance_loss_most
        for name in ("balance_loss_start", "override_balance_loss"):
            value = getattr(self, name)
            if not (least <= value <= most or (value == 0 and name == "override_balance_loss")):
                raise ValueError(
                    f"control.{name}={value} is out of control.balance_loss_least={least} to "
                    f"control.balance_loss_most={most}, between which coefficients are kept"
                )

    @property
    def acts(self) -> bool:
        """Whether anything but the log depends on it."""
        return self.bias != OFF or self.supervisor

    @property
    def on(self) -> bool:
        """Whether there is a loop at all."""
        return self.acts or self.monitor


_STEPS_MOST = 10**9
_BOUNDS: tuple[tuple[str, float, float], ...] = (
    *((name, 0, 1e6) for name in ("bias_step", "bias_limit", "dead_band", "rate_limit")),
    ("delay_steps", 0, 100),
    *((name, 1, _STEPS_MOST) for name in ("stale_after_steps", "trim_memory_steps", "release_steps")),
    ("trim_rate", 0, 1),
    ("trim_reference", 0, math.inf),
    *((name, 1e-12, 1e6) for name in ("balance_loss_least", "balance_loss_most", "balance_loss_start")),
    ("override_balance_loss", 0, 1e6),
    ("override_gain", 0, 1),
    ("rollback_lr_factor", 0.01, 0.99),
    ("most_rollbacks", 0, 100),
)


def step_name(name: str) -> str | None:
    """Return which setting of a law `bias_step` stands for: "step", "gain", or None where it has none."""
    settings = inspect.signature(LAWS[name]).parameters
    return next((known for known in STEPS if known in settings), None)


def build_law(config: ControlConfig) -> Law | None:
    """Return the bias law with its wrappers; None where the bias is off."""
    if config.bias == OFF:
        return None
    settings: dict[str, Any] = {}
    name = step_name(config.bias)
    if config.bias_step and name is not None:
        settings[name] = config.bias_step
    built = law(config.bias, delay_steps=config.delay_steps, **settings)
    if config.dead_band:
        built = dead_band(built, config.dead_band)
    return rate_limit(built, config.rate_limit) if config.rate_limit else built


def monitor_config(config: ControlConfig) -> MonitorConfig:
    """Return the settings of the monitor that follow from those of the control."""
    return MonitorConfig(stale_after_steps=config.stale_after_steps)
