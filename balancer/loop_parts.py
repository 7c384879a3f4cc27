"""Loop parts: bias, monitor and supervisor as the parts that balancer/loop.py runs, each with its state.

Thin: the mathematics stand in balancer/bias.py, balancer/monitor.py and balancer/supervisor.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from balancer.bias import BiasState, init_bias, update_bias
from balancer.bias_record import STATISTICS, Floats, Law, Measurement
from balancer.control_config import ControlConfig
from balancer.loop_state import from_tree, to_tree
from balancer.monitor import CollapseMonitor, Verdict
from balancer.monitor_config import MonitorConfig
from balancer.supervisor import (
    Action,
    Signals,
    SupervisorState,
    init_supervisor,
    needed_checkpoint,
    update_supervisor,
)

_PATIENCE = 100  # samples in a row without a statistic that the law cannot do without
_ROUNDING = 1e-12  # of the limit of a bias: a smaller change is one of rounding, when its mean is taken out


class BiasPart:
    """A bias law at work. law: with its wrappers; sizes: L, E, K; limit: 0 = the range of the scores."""

    def __init__(self, law: Law, sizes: tuple[int, int, int], delay_steps: int, limit: float) -> None:
        self._law = law
        self._state = init_bias(law, *sizes, delay_steps=delay_steps, limit=limit or None)
        self._missed, self._step, self._acted_step = dict.fromkeys(law.needs, 0), -1, -1
        self._least_gain_L = np.zeros(sizes[0])

    @property
    def state(self) -> BiasState:
        """To read, until the next update."""
        return self._state

    @property
    def acted_step(self) -> int | None:
        """Step of the last sample that changed the bias, the first one until then; None before any."""
        return None if self._acted_step < 0 else self._acted_step

    def check(self, measurement: Measurement) -> None:
        """Raise ValueError for a sample that `update` could not take, before any part takes it in: of other
        sizes, of a step that does not increase, without a statistic that the law needs and that never comes.
        """
        if measurement.step <= self._step:
            raise ValueError(
                f"step {measurement.step} does not come after the last one, {self._step}: read() must "
                "give the sample of every step once"
            )
        _check_statistics(measurement, self._state.bias_LE.shape)
        for name, missed in self._misses(measurement).items():
            if missed >= _PATIENCE:
                raise ValueError(
                    f"the bias law {self._law.name} needs {name} ({', '.join(STATISTICS[name])}), and "
                    f"{_PATIENCE} samples came without: measure them (moe.LoadMeter({name}_every=20)), or "
                    "take a law that reads counts alone: sign, smebu, linear"
                )

    def update(self, measurement: Measurement) -> Floats:
        """Return the bias [L, E] after a sample that `check` has let pass."""
        bias_LE, self._state = update_bias(self._law, measurement, self._state)
        self._step, self._missed = measurement.step, self._misses(measurement)
        acted_L = np.abs(self._state.change_LE).max(axis=1) > _ROUNDING * self._state.limit_L
        if self._acted_step < 0 or acted_L.any():
            self._acted_step = measurement.step
        return bias_LE

    def _misses(self, measurement: Measurement) -> dict[str, int]:
        """Samples in a row, this one included, without each statistic that the law needs."""
        return {
            name: 0
            if all(getattr(measurement, part) is not None for part in STATISTICS[name])
            else missed + 1
            for name, missed in self._missed.items()
        }

    def asks(self) -> tuple[str, ...]:
        """Return the statistics that the law would like to have of the next step, out of turn."""
        return () if self._law.asks is None else self._law.asks(self._state.law)

    def figures(self) -> dict[str, Floats]:
        """gain, reinforcement, most_gain [L], as far as the law knows them."""
        return {} if self._law.report is None else dict(self._law.report(self._state.law))

    def raise_gain(self, least_gain_L: Floats) -> None:
        """From now on at least this gain [L], where the law has one; 0 = its own."""
        if self._law.raise_gain is not None and (least_gain_L != self._least_gain_L).any():
            self._state = self._state._replace(law=self._law.raise_gain(least_gain_L, self._state.law))
            self._least_gain_L = least_gain_L.copy()

    def go_back(self, state: dict[str, Any]) -> None:
        """Take the biases of an earlier state; what the law knows of the router stays."""
        old: BiasState = from_tree(self._state, state["bias"], "bias")
        zeros_LE = np.zeros_like(old.bias_LE)
        self._state = old._replace(law=self._state.law, lost_LE=zeros_LE, change_LE=zeros_LE.copy())

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the biases under "bias"."""
        numbers = {"step": self._step, "acted_step": self._acted_step, "missed": dict(self._missed)}
        return {"bias": to_tree(self._state), "least_gain_L": self._least_gain_L.copy(), **numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what state_dict gave. Raises ValueError where it is of another law or of other sizes."""
        self._state = from_tree(self._state, state["bias"], "bias")
        self._step, self._acted_step = int(state["step"]), int(state["acted_step"])
        self._missed = {name: int(state["missed"][name]) for name in self._missed}
        self._least_gain_L = from_tree(self._least_gain_L, state["least_gain_L"], "least gain")


def _check_statistics(measurement: Measurement, shape_LE: tuple[int, ...]) -> None:
    """Raise ValueError for counts that are not [L, E], bins without their edges, and swaps of no width."""
    step, found = measurement.step, measurement.counts_LE.shape
    if found != shape_LE:
        raise ValueError(f"step {step}: the counts are {found}, and the loop was made for {shape_LE}")
    for name in ("score", "margin"):
        counts_LEB = getattr(measurement, f"{name}_histogram_LEB")
        edges = getattr(measurement, f"{name}_edges_X")
        if counts_LEB is None or edges is None:
            continue
        edges_X, bins = np.asarray(edges, dtype=np.float64), counts_LEB.shape[2]
        if edges_X.shape != (bins + 1,) or not (edges_X[1:] > edges_X[:-1]).all():
            raise ValueError(
                f"step {step}: {name}_edges_X is {edges_X.shape} and must be {bins + 1} increasing numbers, "
                f"the edges of the {bins} bins of {name}_histogram_LEB"
            )
    swaps, delta = (measurement.swaps_LE, measurement.swap_pairs_LEE), measurement.swap_delta
    if any(part is not None for part in swaps) and not (delta is not None and delta > 0):
        raise ValueError(f"step {step}: swap_delta={delta} must be above 0: swaps are tokens that near")


class MonitorPart:
    """A collapse monitor, fed from samples."""

    def __init__(self, sizes: tuple[int, int, int], config: MonitorConfig) -> None:
        self._monitor = CollapseMonitor(*sizes, config)

    def update(
        self, sample: Any, measurement: Measurement, bias: BiasPart | None, law: Mapping[str, Floats]
    ) -> Sequence[Verdict]:
        """Return a verdict a layer. bias: as the sample was routed with it; law: figures of the bias law."""
        get = _getter(sample)
        given = {name: get(name) for name in _PASSED}
        aux_loss_L = get("aux_loss_L")
        return self._monitor.update(
            measurement.step,
            measurement.counts_LE,
            num_tokens=measurement.num_tokens,
            aux_loss_L=get("balance_loss_L") if aux_loss_L is None else aux_loss_L,
            bias_LE=None if bias is None else bias.state.history_DLE[-1],
            bias_limit_L=None if bias is None else bias.state.limit_L,
            balancer_step=None if bias is None else bias.acted_step,
            **{f"{name}_L": law.get(name) for name in ("gain", "reinforcement", "most_gain")},
            **given,
        )

    def alarms(self) -> Sequence[Verdict]:
        """Verdicts of the last update that have changed."""
        return self._monitor.alarms()

    def figures(self) -> dict[str, Floats]:
        """The monitor's figures of the last update, [L] float64 by name; NaN for what is not known."""
        return self._monitor.figures()

    def go_back(self, state: dict[str, Any]) -> None:
        """Take an earlier state: its baseline is that of the weights gone back to. Its clock goes on."""
        self._monitor.go_back(state["monitor"])

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state."""
        return {"monitor": self._monitor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what state_dict gave. Raises ValueError where it is of other sizes."""
        self._monitor.load_state_dict(state["monitor"])


# fields of a sample that are arguments of CollapseMonitor.update by the same name
_PASSED = (
    "rows_to_rank_LP", "bytes_PP", "expected_bytes_PP", "logit_rms_L", "confidence_L", "swaps_LE",
    "swap_delta", "squares_LE", "tokens_squared",
)  # fmt: skip


def _getter(sample: Any) -> Callable[[str], Any]:
    if isinstance(sample, Mapping):
        return cast("Mapping[str, Any]", sample).get

    def get(name: str) -> Any:
        return getattr(sample, name, None)

    return get


class SupervisorPart:
    """A supervisor. balance_loss, beta2, router_lr_factor: what the run starts with."""

    def __init__(
        self,
        config: ControlConfig,
        num_layers: int,
        balance_loss: float,
        beta2: float,
        router_lr_factor: float,
    ) -> None:
        self._config = config
        self._state = init_supervisor(
            config, num_layers, balance_loss, beta2=beta2, router_lr_factor=router_lr_factor
        )

    @property
    def state(self) -> SupervisorState:
        """To read, until the next update."""
        return self._state

    def update(
        self,
        step: int,
        verdicts: Sequence[Verdict],
        figures: Mapping[str, Floats],
        checkpoint_steps: Sequence[int],
    ) -> tuple[Action, ...]:
        """Return what is to be done. figures: the monitor's and those of the bias law, [L] by name."""
        limits = {f"{name}_L": figures.get(name) for name in ("gain", "reinforcement", "most_gain")}
        states, excess_L = [str(verdict.state) for verdict in verdicts], figures["mean_excess"]
        signals = Signals(
            step=step, states=states, excess_L=excess_L, checkpoint_steps=checkpoint_steps, **limits
        )
        actions, self._state = update_supervisor(self._config, signals, self._state)
        return actions

    def needed_checkpoint(self, steps: Sequence[int]) -> int:
        """Return which checkpoint a rollback may need, -1 for none."""
        return needed_checkpoint(self._config, steps, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"supervisor": to_tree(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what state_dict gave. Raises ValueError where it is of other sizes."""
        self._state = from_tree(self._state, state["supervisor"], "supervisor")
