"""Collapse monitor: says of every layer, sample by sample, whether its experts are well, and why not.

Start here:

    monitor = CollapseMonitor(num_layers, num_experts, top_k)
    for verdict in monitor.update(step, tokens_per_expert_LE, num_tokens=T):      one a layer
        verdict.state, verdict.reasons, verdict.figures["entropy"]
    monitor.alarms()                                        the changes that are worth a line

    HEALTHY      even to within noise, or nearly so
    SKEWED       uneven beyond its floor but not growing, or a router, bias or rank that is about to be
    STALE        the balancer has not acted for long, or no sample came
    COLLAPSING   the unevenness grows, by more than noise or a change of domain can
    COLLAPSED    a tenth of the experts get nothing (under 1 % of their fair share), and not by chance

What it reckons with stands in monitor_core.py, monitor_charts.py (when is growth an alarm) and
monitor_figures.py; its settings in monitor_config.py. This class only holds the state and puts it in words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.monitor_config import MonitorConfig
from balancer.monitor_core import (
    COLLAPSED,
    COLLAPSING,
    STALE,
    STATES,
    MonitorState,
    init_monitor,
    update_monitor,
)
from balancer.monitor_figures import FIGURES, check_given
from balancer.monitor_words import reasons_in_words


class _Seen(NamedTuple):
    """What one update saw, shared by its verdicts: rows_FL [F, L] figures, reasons_L [L] bits."""

    rows_FL: NDArray[np.float64]
    reasons_L: NDArray[np.int64]
    num_experts: int


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The state of one layer. layer: its index. state: HEALTHY, SKEWED, STALE, COLLAPSING or COLLAPSED.
    since_step: training step of the sample since which it holds. was: the state at the sample before."""

    layer: int
    state: str
    since_step: int
    was: str
    _seen: _Seen = field(repr=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in words with figures, the heaviest first; empty for a layer without a reason."""
        return reasons_in_words(int(self._seen.reasons_L[self.layer]), self.figures, self._seen.num_experts)

    @property
    def figures(self) -> dict[str, float]:
        """Figures by name, as `monitor_figures.FIGURES` describes them; NaN for what is not known."""
        return dict(zip(FIGURES, self._seen.rows_FL[:, self.layer].tolist()))


class CollapseMonitor:
    """Watches the expert load of every layer of a run."""

    def __init__(
        self, num_layers: int, num_experts: int, top_k: int, config: MonitorConfig | None = None
    ) -> None:
        """num_layers: L. num_experts: E, 2 or more. top_k: K experts of a token, below E. config: settings.

        Raises ValueError for other sizes.
        """
        self._core, self._state = init_monitor(num_layers, num_experts, top_k, config)
        self._changed: list[Verdict] = []
        self._rows_FL = np.full((len(FIGURES), num_layers), np.nan)

    def update(
        self,
        step: SupportsIndex,
        tokens_per_expert_LE: ArrayLike,
        *,
        num_tokens: int | None = None,
        aux_loss_L: ArrayLike | None = None,
        rows_to_rank_LP: ArrayLike | None = None,
        bytes_PP: ArrayLike | None = None,
        expected_bytes_PP: ArrayLike | None = None,
        bias_LE: ArrayLike | None = None,
        bias_limit_L: ArrayLike | None = None,
        gain_L: ArrayLike | None = None,
        reinforcement_L: ArrayLike | None = None,
        most_gain_L: ArrayLike | None = None,
        logit_rms_L: ArrayLike | None = None,
        confidence_L: ArrayLike | None = None,
        swaps_LE: ArrayLike | None = None,
        swap_delta: float | None = None,
        squares_LE: ArrayLike | None = None,
        tokens_squared: float | None = None,
        balancer_step: int | None = None,
    ) -> list[Verdict]:
        """Take in one sample and return the verdicts, one a layer.

        step: of training, more than the last one's. tokens_per_expert_LE: [L, E] copies that the router
        wanted to send to each expert, over the whole global batch. num_tokens: tokens of that batch; copies
        / K by default. aux_loss_L: balance loss per token, 1 at balance. rows_to_rank_LP: [L, P] rows each
        rank computes. bytes_PP, expected_bytes_PP: [P, P] bytes from rank to rank, and by the formula.
        bias_LE, bias_limit_L: selection bias and its bound, in units of score. gain_L, reinforcement_L,
        most_gain_L: of the bias loop, shares of an error a step. logit_rms_L: rms of the router's logits.
        confidence_L: mean of the largest normalised score. swaps_LE, swap_delta: tokens that are within
        swap_delta (units of score) of choosing otherwise. squares_LE, tokens_squared: sums over the batches
        of the step of copies^2 and tokens^2. balancer_step: training step of the balancer's last action.

        A layer without load keeps its state; its figures are NaN. Raises ValueError for counts that are
        negative, NaN, of another shape, or more than num_tokens * K; for a step that does not increase; and
        for an optional field of another shape.
        """
        given = check_given(
            (self._core.num_layers, self._core.num_experts),
            {
                "aux_loss_L": aux_loss_L, "rows_to_rank_LP": rows_to_rank_LP, "bytes_PP": bytes_PP,
                "expected_bytes_PP": expected_bytes_PP, "bias_LE": bias_LE, "bias_limit_L": bias_limit_L,
                "gain_L": gain_L, "reinforcement_L": reinforcement_L, "most_gain_L": most_gain_L,
                "logit_rms_L": logit_rms_L, "confidence_L": confidence_L, "swaps_LE": swaps_LE,
                "swap_delta": swap_delta, "squares_LE": squares_LE, "tokens_squared": tokens_squared,
                "balancer_step": balancer_step,
            },
        )  # fmt: skip
        out, self._state = update_monitor(
            step, tokens_per_expert_LE, num_tokens, given, self._core, self._state
        )
        self._rows_FL = out.rows_FL
        seen = _Seen(out.rows_FL, out.reasons_L, self._core.num_experts)
        codes: list[int] = out.code_L.tolist()
        was: list[int] = out.was_L.tolist()
        since: list[int] = self._state.since_L.tolist()
        verdicts = [
            Verdict(layer, STATES[codes[layer]], since[layer], STATES[was[layer]], seen)
            for layer in range(len(codes))
        ]
        grave_L = (out.code_L != out.was_L) & (np.maximum(out.code_L, out.was_L) >= STALE)
        self._changed = [verdicts[layer] for layer in np.flatnonzero(grave_L)]
        return verdicts

    def figures(self) -> dict[str, NDArray[np.float64]]:
        """Return the figures of the last update by name, [L] float64 each; NaN for what is not known."""
        return dict(zip(FIGURES, self._rows_FL, strict=True))

    def alarms(self) -> list[Verdict]:
        """The verdicts of the last update that changed to or from STALE, COLLAPSING or COLLAPSED."""
        return list(self._changed)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the monitor remembers, as arrays by name; the settings are not in it."""
        return {name: array.copy() for name, array in _flat(self._state).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit by bit as if never stopped.

        Raises ValueError for one of other sizes or of another version: it names the entry.
        """
        own = _flat(self._state)
        if set(state) != set(own):
            odd = sorted(set(state) ^ set(own))
            raise ValueError(f"the monitor's state differs in {', '.join(odd)}; it is of another version")
        for name, array in own.items():
            given = np.asarray(state[name])
            if given.shape != array.shape:
                raise ValueError(
                    f"the monitor's state {name} is {given.shape}, expected {array.shape}: it has "
                    "other layers or experts"
                )
        parts = {name: np.array(state[name], dtype=array.dtype) for name, array in own.items()}
        self._state = _nested(self._state, parts, "")
        self._changed = []

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Take an earlier state at the present step: the host has gone back to the weights of then.

        What the state says of steps it says as of now: no time has passed since. Raises as load_state_dict.
        """
        now = int(self._state.step)
        self.load_state_dict(state)
        self._state = _moved(self._state, now - int(self._state.step))


# what a state says in steps of training
_STEPS = ("step", "since_L", "block_step_L", "onset_L")


def _moved(state: Any, steps: int) -> Any:
    """The state with everything in it that is a step of training so many steps later."""
    return type(state)(
        *(
            _moved(part, steps)
            if isinstance(part, tuple)
            else np.asarray(part + steps)  # a 0-d array stays one
            if name in _STEPS
            else part
            for name, part in state._asdict().items()
        )
    )


def _flat(state: Any, prefix: str = "") -> dict[str, NDArray[Any]]:
    flat: dict[str, NDArray[Any]] = {}
    for name, part in state._asdict().items():
        if isinstance(part, tuple):
            flat |= _flat(part, f"{prefix}{name}.")
        else:
            flat[prefix + name] = part
    return flat


def _nested(like: Any, parts: Mapping[str, NDArray[Any]], prefix: str) -> Any:
    return type(like)(
        *(
            _nested(part, parts, f"{prefix}{name}.") if isinstance(part, tuple) else parts[prefix + name]
            for name, part in like._asdict().items()
        )
    )


__all__ = ["COLLAPSED", "COLLAPSING", "STALE", "CollapseMonitor", "MonitorConfig", "MonitorState", "Verdict"]
