"""Balancer loop: all of the control in one object for any framework. The file to read first in this package.

    read() -> sample -> measurement -> monitor -> bias law -> supervisor -> actuate(bias, plan) -> version
                        checked        verdicts   b += u      actions

Once an optimizer step, alike on every rank: no chance and no clock, so that ranks with the same sample do the
same. Any part may be off (balancer/control_config.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from balancer.bias_record import Floats, checked_sizes, read_measurement
from balancer.control_config import ControlConfig, build_law, monitor_config
from balancer.loop_parts import BiasPart, MonitorPart, SupervisorPart
from balancer.monitor import Verdict
from balancer.supervisor import Action

_PARTS = ("bias", "monitor", "supervisor")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """What the loop saw and did in a step; of parts that are off empty or None.

    verdicts: one a layer. alarms: the changes that are worth a line. actions: the supervisor's, for the host
    to carry out and to log. bias_LE: [L, E] float64, as given to actuate. balance_loss_L: [L] float64,
    coefficients from now on. router_lr_factor: on the routers' learning rate. figures: [L] float64 by name:
    gain, reinforcement, most_gain of the law, and the monitor's. version: what actuate returned.
    """

    step: int
    verdicts: Sequence[Verdict]
    alarms: Sequence[Verdict]
    actions: tuple[Action, ...]
    bias_LE: Floats | None
    balance_loss_L: Floats | None
    router_lr_factor: float
    figures: dict[str, Floats]
    version: Any


class BalancerLoop:
    """The control of the expert load.

    read: () -> the sample of the step before, an object or mapping with step, tokens_per_expert_LE [L, E] of
    the whole global batch before any drops, and any other field of `Measurement` or argument of
    `CollapseMonitor.update`. actuate: (bias_LE or None, plan or None) -> version in force; float32 holds the
    bias well enough. balance_loss, beta2, router_lr_factor: what the run starts with, for the supervisor.
    Raises ValueError for sizes that do not fit, or a start that the supervisor refuses.

    >>> sample = {"step": 1, "tokens_per_expert_LE": [[30, 10, 10, 10]]}
    >>> config = ControlConfig(bias="sign", monitor=False)
    >>> loop = BalancerLoop(config, lambda: sample, lambda *_: 0, num_layers=1, num_experts=4, top_k=1)
    >>> (loop.step().bias_LE * 1e4).round(3).tolist()
    [[-15.0, 5.0, 5.0, 5.0]]
    """

    def __init__(
        self, config: ControlConfig, read: Callable[[], Any], actuate: Callable[[Floats | None, Any], Any], *,
        num_layers: int, num_experts: int, top_k: int, balance_loss: float = 0.0, beta2: float = 0.95,
        router_lr_factor: float = 1.0,
    ) -> None:  # fmt: skip
        checked_sizes(num_layers, num_experts, top_k)
        self.config, self._read, self._actuate, self._top_k = config, read, actuate, top_k
        self._router_lr_factor = router_lr_factor
        sizes, law = (num_layers, num_experts, top_k), build_law(config)
        self.bias = None if law is None else BiasPart(law, sizes, config.delay_steps, config.bias_limit)
        self.monitor = MonitorPart(sizes, monitor_config(config)) if config.monitor else None
        start = num_layers, balance_loss, beta2, router_lr_factor
        self.supervisor = SupervisorPart(config, *start) if config.supervisor else None

    def step(self, *, checkpoint_steps: Sequence[int] = ()) -> Report:
        """Read a sample, and act on it. checkpoint_steps: of the checkpoints that a rollback may go to.

        Raises ValueError for a sample that is none, or a statistic that the law needs and that never comes;
        no part has taken the sample in then.
        """
        sample = self._read()
        measurement = read_measurement(sample, self._top_k)
        if self.bias is not None:
            self.bias.check(measurement)
        figures = {} if self.bias is None else self.bias.figures()
        verdicts: Sequence[Verdict] = ()
        if self.monitor is not None:
            verdicts = self.monitor.update(sample, measurement, self.bias, figures)
            figures |= self.monitor.figures()
        bias_LE = None if self.bias is None else self.bias.update(measurement)
        actions: tuple[Action, ...] = ()
        if self.supervisor is not None:
            actions = self.supervisor.update(measurement.step, verdicts, figures, checkpoint_steps)
            if self.bias is not None:
                self.bias.raise_gain(self.supervisor.state.gain_L)
        return Report(
            step=measurement.step,
            verdicts=verdicts,
            alarms=() if self.monitor is None else self.monitor.alarms(),
            actions=actions,
            bias_LE=bias_LE,
            balance_loss_L=None if self.supervisor is None else self.supervisor.state.coefficient_L.copy(),
            router_lr_factor=self.router_lr_factor,
            figures=figures,
            version=self._actuate(bias_LE, None),
        )

    @property
    def router_lr_factor(self) -> float:
        """On the routers' learning rate in the next step."""
        return self._router_lr_factor if self.supervisor is None else self.supervisor.state.router_lr_factor

    @property
    def routed_LE(self) -> Floats | None:
        """[L, E] float64, the bias that the router must have in the next step: with a delay an older one."""
        return None if self.bias is None else self.bias.state.history_DLE[-1].copy()

    @property
    def asks(self) -> tuple[str, ...]:
        """Statistics that the bias law would like to have of the next step, beside those of every so many."""
        return () if self.bias is None else self.bias.asks()

    def rolled_back(self, state: dict[str, Any]) -> None:
        """The host is back at the weights of a checkpoint. state: this loop's state_dict in it.

        Bias and monitor are those of then, for they belong to the weights; steps go on. What the law knows of
        the router stays, and all that the supervisor knows: it must not forget what it has changed.
        """
        for part, name in ((self.bias, "bias"), (self.monitor, "monitor")):
            if part is not None:
                part.go_back(state[name])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that it remembers, as dicts, lists, arrays and numbers."""
        parts = {name: getattr(self, name) for name in _PARTS}
        return {name: None if part is None else part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, bit by bit; a monitor that the state has none of starts anew.

        Raises ValueError where the state is of another law, of other sizes, or of a loop with other parts.
        """
        for name in _PARTS:
            part, saved = getattr(self, name), state[name]
            if (part is None) != (saved is None) and name != "monitor":
                raise ValueError(f"saved control and this loop differ in having a {name}; set it as it was")
            if part is not None and saved is not None:
                part.load_state_dict(saved)
