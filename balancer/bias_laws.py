"""Bias laws that read counts alone: the rivals of the default law; settings as published, where they are.

Under `balancer/bias.py`, which runs them. Each builder returns a `Law`; its keyword arguments are the
settings. All of them are integral laws: the bias b adds their changes up, so a bias that is too large is
taken back at the same pace. None of them knows how far the load moves with the bias, so one setting fits
one router: `step` and `gain` are in units of score.

The delay is declared to every law alike; these, as published, make no use of it.
"""

from typing import NamedTuple

import numpy as np

from balancer.bias_record import Actuated, Floats, Law, Measurement


class Nothing(NamedTuple):
    """The state of a law that remembers nothing."""


class Momentum(NamedTuple):
    """change_LE: [L, E] float64, running mean of the changes, in units of score."""

    change_LE: Floats


def sign_law(delay_steps: int = 0, step: float = 1e-3) -> Law:
    """u = step * sign(r - n): every expert moves by the same step, whatever its error.

    step: units of score a step, 1e-3 in both sources (sigmoid scores, 64 and 256 experts). An error lasts
    (distance in score) / step steps, and at balance the bias rattles by step. It holds a reinforcement only
    where |y| < step / reinforcement. Source: Wang et al. 2024, Auxiliary-loss-free load balancing, algorithm
    1 (arXiv 2408.15664); DeepSeek-V3, section 2.1.2 (arXiv 2412.19437). Raises ValueError for step <= 0.
    """
    del delay_steps
    _check_positive("sign", step=step)

    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        return step * np.sign(_missing_LE(measurement)), state

    return Law("sign", _no_state, update)


def sign_decay_law(delay_steps: int = 0, step: float = 1e-3, decay: float = 1e-3) -> Law:
    """u = step * sign(r - n) - decay * b: the sign step with a leak, so that |b| stays under step / decay.

    step: as in `sign_law`. decay: share of the bias that goes each step, 0 to 1; 1e-3 lets a bias reach the
    whole range of scores, 1. A larger one leaves a lasting error where a bias is needed: the leak pulls to 0
    also at exact balance. Weight decay of the bias, as some trainers apply by accident; no published value.
    Raises ValueError for step <= 0 or a decay outside 0..1.
    """
    del delay_steps
    _check_positive("sign-decay", step=step)
    if not 0 <= decay <= 1:
        raise ValueError(f"law 'sign-decay': decay={decay} must be 0 to 1, the share that goes each step")

    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        return step * np.sign(_missing_LE(measurement)) - decay * actuated.newest_LE, state

    return Law("sign-decay", _no_state, update)


def longcat_law(delay_steps: int = 0, step: float = 0.1) -> Law:
    """u = step * (1 / E - share of all copies): LongCat-Flash's linear ("PID") update.

    There u_i = mu (K_e / K / N - T_i / (K T)) for each of the N experts that compute; without experts of zero
    computation K_e = K and N = E, which this is. In violations: u = -(step / E) y, so that one step means
    another gain for each number of experts. step: mu, units of score; the report gives no value (it is
    lowered in training); 0.1 moves a bias by 4e-4 a step at a violation of 1 and 256 experts. Source:
    LongCat-Flash technical report, section 2.1 (arXiv 2509.01322). Raises ValueError for step <= 0.
    """
    del delay_steps
    _check_positive("longcat", step=step)

    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        copies = measurement.num_tokens * measurement.top_k
        return (step / (measurement.counts_LE.shape[1] * copies)) * _missing_LE(measurement), state

    return Law("longcat", _no_state, update)


def linear_law(delay_steps: int = 0, gain: float = 0.01) -> Law:
    """u = -gain * y, y = n / r - 1: a fixed gain, tuned by hand.

    gain: units of score for a violation of 1. The loop takes away gain * dy/db of an error each step, and
    dy/db is about E (softmax) to 10 (sigmoid) per unit of score: tune it to some 0.3 / (dy/db). Raises
    ValueError for gain <= 0.
    """
    del delay_steps
    _check_positive("linear", gain=gain)

    def update(measurement: Measurement, actuated: Actuated, state: Nothing) -> tuple[Floats, Nothing]:
        return (gain / (measurement.num_tokens * measurement.top_k)) * _missing_LE(measurement), state

    return Law("linear", _no_state, update)


def smebu_law(delay_steps: int = 0, step: float = 5e-4, kappa: float = 2.0, momentum: float = 0.5) -> Law:
    """u = momentum * u_before + (1 - momentum) * step * (tanh(kappa v) - its mean), v = -y = (r - n) / r.

    Soft-clamped momentum expert bias updates: the sign step for large errors, linear for small ones. step:
    lambda, units of score; kappa: slope of the clamp, errors beyond 1 / kappa count as large; momentum: share
    of the last change that goes on, 0 to under 1. Source: Arcee Trinity Large technical report (arXiv
    2602.17004); the values here are believed to be its own and have not been checked against it. Raises
    ValueError for step or kappa <= 0, or a momentum outside 0..1.
    """
    del delay_steps
    _check_positive("smebu", step=step, kappa=kappa)
    if not 0 <= momentum < 1:
        raise ValueError(f"law 'smebu': momentum={momentum} must be 0 to under 1")

    def init(num_layers: int, num_experts: int, top_k: int) -> Momentum:
        return Momentum(np.zeros((num_layers, num_experts)))

    def update(measurement: Measurement, actuated: Actuated, state: Momentum) -> tuple[Floats, Momentum]:
        copies = measurement.num_tokens * measurement.top_k
        push_LE = np.tanh((kappa / copies) * _missing_LE(measurement))
        push_LE -= push_LE.mean(axis=1, keepdims=True)
        change_LE = momentum * state.change_LE + ((1 - momentum) * step) * push_LE
        return change_LE, Momentum(change_LE.copy())

    def take_over(
        change_LE: Floats, measurement: Measurement, actuated: Actuated, state: Momentum
    ) -> Momentum:
        return Momentum(change_LE.copy())

    return Law("smebu", init, update, take_over=take_over)


def _no_state(num_layers: int, num_experts: int, top_k: int) -> Nothing:
    return Nothing()


def _missing_LE(measurement: Measurement) -> Floats:
    """[L, E] copies that each expert is short of the fair share, times E: whole numbers, 0 at balance.

    Divided by T K it is (r - n) / r = -y.
    """
    counts_LE = measurement.counts_LE
    return measurement.num_tokens * measurement.top_k - counts_LE * counts_LE.shape[1]


def _check_positive(law: str, **settings: float) -> None:
    for name, value in settings.items():
        if not 0 < value < np.inf:
            raise ValueError(f"law {law!r}: {name}={value} must be above 0 and finite")
