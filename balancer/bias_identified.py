"""The default bias law: the gain of every expert is measured, that of the loop follows from the noise.

A law of `balancer/bias.py`, with nothing to tune. A step of it:

    violation y -> error in units of the bias, v_e = -tau_e f(y_e)            tau_e = r / J_ee, measured
    or, where the margins of the tokens are known, v_e = -Q_e(r)              Q_e(p): p of them lie above it
    u = g v + push                                                            g: noise, drift, delay

Margins say where the bias should be, however far that is and however unlike the scores of the experts are;
they cost a pass over all scores, so they come every so many steps, and in every step in which the law asks
for them: while an expert is far from its share. In between tau serves (`balancer/bias_slopes.py`): J = dn/db
is the Laplacian of the swap graph (tokens whose K-th and (K+1)-th expert lie close), of which the diagonal is
enough. f(y) = y below balance and y / (1 + y / 8) above it: a share falls about exponentially with the bias,
so a straight step would overshoot where one expert has much too much; its logarithm would lose against a
router that reinforces in proportion.

    g = min(cap, max(tracking, surprise, 2 rho))        cap = 0.75, or 1/(2d+1) at a delay of d steps

(`balancer/bias_noise.py`), so that at rest the law moves as little as the drift demands, and after a switch
as much as the delay allows. The stability limit is g < 2 sin(pi / (2 (2d + 1))): the cap keeps near a third.
2 rho is the least-variance gain of a router that reinforces its own imbalance by rho a step. An expert whose
violation changes its sign without getting small takes half its step from then on, one that does not yield
takes more: slopes differ, and not every one is what it was when it was measured.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bias_kernels import MEAN_SQUARE, NUM_SUMS
from balancer.bias_noise import (
    NoiseState,
    init_noise,
    reinforcement,
    surprise_gain,
    tracking_gain,
    update_noise,
)
from balancer.bias_record import Actuated, Floats, Law, Measurement
from balancer.bias_slopes import LEAST_SLOPE, SlopeState, init_slopes, read_slopes
from balancer.histogram import histogram_quantile
from balancer.kernels import bias_kernels

_CAP = 0.75  # without delay: 1 would answer noise as if it were signal
_MOST_RAISED = 0.9  # of the stability limit: a gain that is asked for against a strong reinforcement
_MOST_STEP = 12.0  # tau: the most that one step may change a bias by
_BEND = 8.0  # violation at which an error counts half
_FAR = 4.0  # standard deviations of the noise beyond which a change of sign is one that went too far
_MOST_TRUST = 8.0  # factor of the step of an expert that does not yield
_MOST_TRUST_DELAYED = 1.5  # under a delay an answer is late, which looks like no answer: keep to the margin
_ASK = 0.5  # violation beyond which the law asks for margins, if it is beyond the noise too
_DEAD_SHARE = 0.1  # of r: an expert below it with no slope of its own is revived by a jump
_REVIVED_SHARE = 0.25  # of r: where the jump aims
_RAMP_RATE = 0.05  # of the running mean of y that a drift shows in


class IdentifiedState(NamedTuple):
    """What the law remembers; float64 arrays [L, E] or [L], a count of none is 0.

    slopes: see bias_slopes; tau_LE is in it. noise: see bias_noise. last_LE, earlier_LE: violations one
    and two measurements ago. change_LE: their last change less the effect of the bias. measured_LE: bias
    of the last measurement. push_LE: (g / Ti) I of the integral. mean_LE: running mean of y,
    mean_square_L: the mean of its squares. ramp_L: 1 where a steady drift has been found. owed_LE: error
    of the step before a change of law or gain, whose part in the next step the push makes up for, 0 else.
    hold_LE: steps that a revived expert is left alone. least_gain_L: asked for by `raise_gain`. gain_L:
    used last. trust_LE: factor of an expert's own step, less than 1 after one that went too far, more
    after one that did too little. sd_L: standard deviation of y that is taken for noise.
    """

    slopes: SlopeState
    noise: NoiseState
    last_LE: Floats
    earlier_LE: Floats
    change_LE: Floats
    measured_LE: Floats
    push_LE: Floats
    mean_LE: Floats
    mean_square_L: Floats
    ramp_L: Floats
    owed_LE: Floats
    hold_LE: Floats
    least_gain_L: Floats
    gain_L: Floats
    trust_LE: Floats
    sd_L: Floats


def stability_limit(delay_steps: int) -> float:
    """Return the gain at which an integral loop of d steps of delay swings for ever.

    2 sin(pi / (2 (2 d + 1))): 2, 1, 0.618, 0.445 for d = 0..3. From z^(d+1) - z^d + g = 0 on the unit circle.

    >>> [round(stability_limit(d), 3) for d in range(4)]
    [2.0, 1.0, 0.618, 0.445]
    """
    return 2.0 * math.sin(math.pi / (2 * (2 * delay_steps + 1)))


def identified_law(
    *, delay_steps: int = 0, gain: float | None = None, integral_steps: float | None = None
) -> Law:
    """Return the law.

    delay_steps: whole steps from a measurement to the bias made of it, beyond the unavoidable one. gain: a
    constant g instead of the law's own, in (0, the stability limit). integral_steps: Ti of an added integral,
    1 or more, inf = none; None: 8 (d + 1) while a steady drift shows, else none.
    Raises ValueError for a value out of range.
    """
    if delay_steps < 0:
        raise ValueError(f"delay_steps={delay_steps} must be 0 or more")
    limit = stability_limit(delay_steps)
    if gain is not None and not 0 < gain < limit:
        raise ValueError(
            f"gain={gain} must lie in (0, {limit:.3f}), the stability limit at delay_steps={delay_steps}; "
            "leave it out and the law finds its own"
        )
    if integral_steps is not None and not integral_steps >= 1:
        raise ValueError(f"integral_steps={integral_steps} must be 1 or more; inf switches it off")
    cap = _CAP if delay_steps == 0 else 1.0 / (2 * delay_steps + 1)
    most_trust = _MOST_TRUST if delay_steps == 0 else _MOST_TRUST_DELAYED
    ti = 8.0 * (delay_steps + 1) if integral_steps is None else integral_steps
    steady = integral_steps is not None and math.isfinite(integral_steps)  # an integral that is always on

    def ramps(state: IdentifiedState) -> Floats:
        """1 for layers whose integral is on."""
        if not math.isfinite(ti):
            return np.zeros_like(state.ramp_L)
        return _ramp(state) if integral_steps is None else np.ones_like(state.ramp_L)

    def update(
        measurement: Measurement, actuated: Actuated, state: IdentifiedState
    ) -> tuple[Floats, IdentifiedState]:
        aim_LE, slopes = read_slopes(measurement, state.slopes)
        state = state._replace(slopes=slopes)
        if measurement.num_tokens == 0:
            return np.zeros_like(measurement.counts_LE), state
        if not state.slopes.tau_LE.any():  # nothing to steer by, unless it is that most experts are dead
            return _revive(measurement, actuated, np.zeros_like(measurement.counts_LE), delay_steps, state)
        y_LE, noise, state = _measure(measurement, actuated, state)
        gain_L = _gain(y_LE.shape[1], noise, cap) if gain is None else np.full(len(y_LE), gain)
        gain_L = np.maximum(gain_L, np.minimum(state.least_gain_L, _MOST_RAISED * limit))
        state = state._replace(gain_L=gain_L, ramp_L=ramps(state))
        if aim_LE is not None:
            state.hold_LE[:] = 0.0
        held_LE = state.hold_LE > 0
        kept = (held_LE, state.push_LE[held_LE])
        change_LE = np.empty_like(y_LE)
        bias_kernels().act_layers(
            y_LE, state.earlier_LE, _FAR * state.sd_L, state.slopes.tau_LE, gain_L, state.ramp_L, ti,
            actuated.lost_LE, state.push_LE, state.trust_LE, most_trust, _BEND, _MOST_STEP,
            y_LE if aim_LE is None else aim_LE, float(aim_LE is not None), change_LE,
        )  # fmt: skip
        if state.owed_LE.any():
            owed_LE = gain_L[:, None] * state.trust_LE * state.owed_LE * (1.0 + 1.0 / ti)
            change_LE -= owed_LE
            state = state._replace(push_LE=state.push_LE - owed_LE, owed_LE=np.zeros_like(owed_LE))
        if kept[1].size:  # revived ones are left alone until the jump shows
            change_LE[held_LE], state.push_LE[held_LE] = 0.0, kept[1]
            state.hold_LE[held_LE] -= 1.0
        if aim_LE is not None:  # which says how far a dead expert is, too
            return change_LE, state
        return _revive(measurement, actuated, change_LE, delay_steps, state)

    def asks(state: IdentifiedState) -> tuple[str, ...]:
        most_L = np.maximum(state.last_LE.max(axis=1), -state.last_LE.min(axis=1))
        return ("margins",) if (most_L > np.maximum(_ASK, _FAR * state.sd_L)).any() else ()

    def report(state: IdentifiedState) -> dict[str, Floats]:
        return {
            "gain": state.gain_L,
            "reinforcement": reinforcement(state.slopes.tau_LE.shape[1], state.noise),
            "most_gain": np.full_like(state.gain_L, limit),
        }

    def raise_gain(least_gain_L: Floats, state: IdentifiedState) -> IdentifiedState:
        state = state._replace(least_gain_L=np.asarray(least_gain_L, dtype=np.float64).copy())
        if not steady:
            return state
        error_LE = _error(state.last_LE, state.slopes.tau_LE)
        push_LE = state.push_LE + state.gain_L[:, None] * state.trust_LE * error_LE
        return state._replace(push_LE=push_LE, owed_LE=error_LE)

    def take_over(
        change_LE: Floats, measurement: Measurement, actuated: Actuated, state: IdentifiedState
    ) -> IdentifiedState:
        """With a finite Ti, the push with which the next change is the last one of the law before."""
        if not steady:
            return state
        aim_LE, slopes = read_slopes(measurement, state.slopes)
        known = state._replace(slopes=slopes)
        error_LE = _error(measurement.violation_LE, known.slopes.tau_LE) if aim_LE is None else aim_LE
        return known._replace(push_LE=change_LE.copy(), owed_LE=error_LE)

    return Law(
        name="identified", init=_init, update=update, needs=("swaps",), uses=("margins",), asks=asks,
        report=report, raise_gain=raise_gain, take_over=take_over,
    )  # fmt: skip


def _init(num_layers: int, num_experts: int, top_k: int) -> IdentifiedState:
    def experts() -> Floats:
        return np.zeros((num_layers, num_experts))

    def layers() -> Floats:
        return np.zeros(num_layers)

    return IdentifiedState(
        slopes=init_slopes(num_layers, num_experts),
        noise=init_noise(num_layers),
        last_LE=experts(),
        earlier_LE=experts(),
        change_LE=experts(),
        measured_LE=experts(),
        push_LE=experts(),
        mean_LE=experts(),
        mean_square_L=layers(),
        ramp_L=layers(),
        owed_LE=experts(),
        hold_LE=experts(),
        least_gain_L=layers(),
        gain_L=layers(),
        trust_LE=np.ones((num_layers, num_experts)),
        sd_L=layers(),
    )


def _counting_var(measurement: Measurement) -> float:
    r = measurement.top_k / measurement.counts_LE.shape[1]
    return (1.0 - r) / (r * measurement.num_tokens)


def _error(y_LE: Floats, tau_LE: Floats) -> Floats:
    """The change of the bias that would bring each expert to its share, as far as it is safe to say."""
    return -tau_LE * (y_LE / (1.0 + np.maximum(y_LE, 0.0) / _BEND))


def _gain(num_experts: int, noise: NoiseState, cap: float) -> Floats:
    wanted_L = np.maximum(tracking_gain(noise), surprise_gain(num_experts, noise))
    return np.minimum(np.maximum(wanted_L, 2.0 * reinforcement(num_experts, noise)), cap)


def _measure(
    measurement: Measurement, actuated: Actuated, state: IdentifiedState
) -> tuple[Floats, NoiseState, IdentifiedState]:
    """Violations [L, E], and what they say about the noise."""
    num_layers, num_experts = measurement.counts_LE.shape
    y_LE, change_LE = np.empty((2, num_layers, num_experts))
    sums_LX = np.empty((num_layers, NUM_SUMS))
    scale = num_experts / (measurement.num_tokens * measurement.top_k)
    bias_kernels().measure_layers(
        measurement.counts_LE, scale, actuated.measured_LE, state.measured_LE, state.slopes.tau_LE,
        state.last_LE, state.earlier_LE, state.change_LE, num_experts / measurement.top_k - 1.0,
        float(state.noise.steps), _RAMP_RATE, state.mean_LE, y_LE,
        change_LE, sums_LX,
    )  # fmt: skip
    noise = update_noise(sums_LX, num_experts, _counting_var(measurement), state.noise)
    # a loop that swings looks noisy: no more than four times the variance of counting is taken for noise
    sd_L = np.sqrt(np.minimum(noise.noise_L, 4.0 * _counting_var(measurement)))
    surprised_L = surprise_gain(num_experts, noise) > 0
    if surprised_L.any():  # a jump is no drift: what it leaves in the mean is not to start the integral
        state.mean_LE[surprised_L] = 0.0
        sums_LX[surprised_L, MEAN_SQUARE] = 0.0
    return y_LE, noise, state._replace(
        noise=noise, last_LE=y_LE, earlier_LE=state.last_LE, change_LE=change_LE,
        measured_LE=actuated.measured_LE.copy(), sd_L=sd_L,
        mean_square_L=sums_LX[:, MEAN_SQUARE] / num_experts,
    )  # fmt: skip


# ---- a steady drift, a dead expert ----------------------------------------------------------------------


def _ramp(state: IdentifiedState) -> Floats:
    """1 where the running mean of y is too large for noise: above 1 + 4 sd of its mean square, until 1 sd."""
    noise_L = np.maximum(state.noise.noise_L + state.noise.drift_L, 1e-300) * _RAMP_RATE / (2 - _RAMP_RATE)
    ratio_L = state.mean_square_L / noise_L
    sd = math.sqrt(2.0 / (state.mean_LE.shape[1] - 1))
    return np.where(ratio_L > 1.0 + np.where(state.ramp_L > 0, 1.0, 4.0) * sd, 1.0, 0.0)


def _revive(
    measurement: Measurement,
    actuated: Actuated,
    change_LE: Floats,
    delay_steps: int,
    state: IdentifiedState,
) -> tuple[Floats, IdentifiedState]:
    """Lift an expert that has lost its slope, once, to a share from which it can be steered; then hold it."""
    if measurement.swaps_LE is None or measurement.score_histogram_LEB is None:
        return change_LE, state
    # its own hits of this step: the smoothed ones remember a better time
    swaps_LE = np.asarray(measurement.swaps_LE, dtype=np.float64)
    poor_LE = measurement.violation_LE < _DEAD_SHARE - 1.0
    live_LE = np.where(poor_LE, np.nan, swaps_LE)  # some expert always has its share
    few_LE = swaps_LE <= LEAST_SLOPE * np.nanmedian(live_LE, axis=1, keepdims=True)
    dead_LE = few_LE & poor_LE & (state.hold_LE == 0)
    if not dead_LE.any():
        return change_LE, state
    change_LE, hold_LE = change_LE.copy(), state.hold_LE.copy()
    for layer in np.nonzero(dead_LE.any(axis=1))[0]:
        dead_E = dead_LE[layer]
        jump_E = _jump(measurement, actuated.measured_LE[layer], int(layer), dead_E)
        change_LE[layer, dead_E] = np.maximum(jump_E[dead_E], change_LE[layer, dead_E])
        hold_LE[layer, dead_E] = delay_steps + math.ceil(1.0 / max(float(state.gain_L[layer]), 0.05))
    return change_LE, state._replace(hold_LE=hold_LE)


def _jump(measurement: Measurement, bias_E: Floats, layer: int, dead_E: NDArray[np.bool_]) -> Floats:
    """The change of the bias [E] that takes each expert to a quarter of its fair share.

    By inversion of the scores' quantiles: a live expert is chosen about where its score + bias exceeds a
    threshold, of which its own share says where it lies; the median of the live ones holds for all.
    """
    counts_EB = measurement.score_histogram_LEB
    edges_X = measurement.score_edges_X
    if counts_EB is None or edges_X is None or dead_E.all():
        return np.zeros_like(bias_E)
    share_E = measurement.counts_LE[layer] / measurement.num_tokens
    r = measurement.top_k / len(share_E)
    at_share_E = histogram_quantile(counts_EB[layer], edges_X, 1.0 - share_E)
    threshold = float(np.median((at_share_E + bias_E)[~dead_E]))
    wanted_E = histogram_quantile(counts_EB[layer], edges_X, np.full_like(share_E, 1.0 - _REVIVED_SHARE * r))
    return np.nan_to_num(threshold - wanted_E - bias_E, nan=0.0)
