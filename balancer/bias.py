"""Bias controller: once an optimizer step, the load of the experts -> the selection bias of the router.

Start here:

    law_ = law("identified", delay_steps=0)
    state = init_bias(law_, num_layers, num_experts, top_k, delay_steps=0)
    measurement = read_measurement(sample, top_k)                        balancer/bias_record.py
    bias_LE, state = update_bias(law_, measurement, state)               the router gets bias_LE as float32

    identified                 the default: gains measured, noise and delay weighed     bias_identified.py
    laplacian                  its twin with the whole matrix of gains                  bias_laplacian.py
    sign, sign-decay, longcat, smebu, linear     fixed steps, from counts alone         bias_laws.py
    quantile, quantile-damped, bip               from margins and scores of tokens      bias_quantile.py

A law says by how much to change the bias (`Law` in bias_record.py); what is common stands here: delay, limit,
mean 0, checks, a change of law while running. dead_band, rate_limit and clip (bias_wrap.py) wrap any law.
All laws are integral ones, b adds up; nothing else does, so that an expert that gets nothing whatever its
bias drives b to its limit and no further. Alive again it is taken back at the law's pace: limit / step steps
for a fixed step, some ten for a law that answers the size of the error.
"""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.bias_identified import identified_law
from balancer.bias_laplacian import laplacian_law
from balancer.bias_laws import linear_law, longcat_law, sign_decay_law, sign_law, smebu_law
from balancer.bias_quantile import bip_law, quantile_damped_law, quantile_law
from balancer.bias_record import STATISTICS, Actuated, Floats, Law, Measurement, checked_sizes
from balancer.bias_wrap import clip, dead_band, rate_limit
from balancer.forecast_record import copy_state
from balancer.histogram import histogram_quantile

__all__ = [
    "LAWS",
    "BiasState",
    "clip",
    "copy_state",
    "dead_band",
    "init_bias",
    "law",
    "rate_limit",
    "switch_law",
    "update_bias",
]

LAWS: dict[str, Callable[..., Law]] = {
    "identified": identified_law,
    "laplacian": laplacian_law,
    "sign": sign_law,
    "sign-decay": sign_decay_law,
    "longcat": longcat_law,
    "smebu": smebu_law,
    "linear": linear_law,
    "quantile": quantile_law,
    "quantile-damped": quantile_damped_law,
    "bip": bip_law,
}

_FIRST_LIMIT = 1.0  # before any score histogram: softmax and sigmoid scores lie in 0..1
_FIELDS = tuple(
    name for names in STATISTICS.values() for name in names if name.endswith(("_LE", "_LEB", "_LEE", "_LME"))
)
_RANGE = (0.001, 0.999)  # score quantiles between which the limit reaches: outliers do not widen it


class BiasState(NamedTuple):
    """State of the bias loop; arrays float64, in units of score.

    bias_LE: [L, E] set last, mean 0 over the experts. history_DLE: [d + 1, L, E] biases set, the newest
    first: the last is the one under which the next measurement's tokens were routed. change_LE: [L, E] the
    last change as made; lost_LE: less what the law commanded, where the limit stood in the way. limit_L: [L]
    the largest |b|. fixed_limit: 1 where `init_bias` was given the limit, else it follows the scores. top_k:
    K. law: the law's own state.
    """

    bias_LE: Floats
    history_DLE: Floats
    change_LE: Floats
    lost_LE: Floats
    limit_L: Floats
    fixed_limit: int
    top_k: int
    law: Any


def law(name: str, *, delay_steps: int = 0, **settings: Any) -> Law:
    """Return a law by name.

    name: a key of LAWS. delay_steps: d, whole steps between a measurement and the step that is routed with
    the bias made of it, beyond the one that cannot be avoided. settings: keyword arguments of the law's
    builder. Raises ValueError for an unknown name or setting, a negative delay, or a value that the law
    refuses.

    >>> law("sign", step=1e-3).name
    'sign'
    """
    if name not in LAWS:
        near = get_close_matches(name, LAWS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(LAWS)}"
        raise ValueError(f"bias law {name!r} is unknown; {hint}")
    if delay_steps < 0:
        raise ValueError(f"delay_steps={delay_steps} must be 0 or more, whole steps")
    known = [key for key in signature(LAWS[name]).parameters if key != "delay_steps"]
    for setting in settings:
        if setting not in known:
            has = f"its settings: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"bias law {name!r} has no setting {setting!r}; {has}")
    return LAWS[name](delay_steps=delay_steps, **settings)


def init_bias(
    law: Law,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    delay_steps: int = 0,
    limit: float | None = None,
) -> BiasState:
    """Return the state before the first step: bias 0.

    delay_steps: as given to the law. limit: the largest |b|, units of score; None: the range of the layer's
    scores (99.9th less 0.1th percentile over all experts, from the score histogram that came last; 1 before
    one comes), since more can decide no choice that the scores leave open. Raises ValueError for sizes below
    1, top_k that is not below num_experts, a negative delay or a limit that is not above 0.
    """
    checked_sizes(num_layers, num_experts, top_k)
    if delay_steps < 0:
        raise ValueError(f"delay_steps={delay_steps} must be 0 or more, whole steps")
    if limit is not None and not 0 < limit < np.inf:
        raise ValueError(f"limit={limit} must be above 0 and finite, in units of score")
    zeros_LE = np.zeros((num_layers, num_experts))
    return BiasState(
        bias_LE=zeros_LE.copy(),
        history_DLE=np.zeros((delay_steps + 1, num_layers, num_experts)),
        change_LE=zeros_LE.copy(),
        lost_LE=zeros_LE.copy(),
        limit_L=np.full(num_layers, _FIRST_LIMIT if limit is None else limit),
        fixed_limit=int(limit is not None),
        top_k=top_k,
        law=law.init(num_layers, num_experts, top_k),
    )


def update_bias(law: Law, measurement: Measurement, state: BiasState) -> tuple[Floats, BiasState]:
    """Return the bias for the next step, and the state: b += u, mean 0 in every layer, |b| within the limit.

    law: that of the state. measurement: of the step before; one without tokens changes nothing. Takes the
    state over. Returns bias_LE [L, E] float64, a copy of the state's: the router gets it rounded to float32
    (an error of 1e-8 of the largest bias), while the state keeps steps that small. Raises ValueError for a
    measurement of other sizes, with counts that are negative, NaN or not T K a layer, or a law that gives
    NaN.
    """
    _check(measurement, state)
    if measurement.num_tokens == 0:
        history_DLE = _shifted(state.bias_LE, state.history_DLE)
        no_change_LE = np.zeros_like(state.bias_LE)
        return state.bias_LE.copy(), state._replace(history_DLE=history_DLE, change_LE=no_change_LE)
    limit_L = _limit(measurement, state)
    change_LE, law_state = law.update(measurement, _actuated(state), state.law)
    if change_LE.shape != state.bias_LE.shape:
        raise ValueError(f"law {law.name!r} gave a change {change_LE.shape} for a bias {state.bias_LE.shape}")
    wanted_LE = state.bias_LE + change_LE
    mean_L1 = wanted_LE.mean(axis=1, keepdims=True)
    if not np.isfinite(mean_L1).all():
        layer = int(np.argmin(np.isfinite(mean_L1[:, 0])))
        raise ValueError(
            f"law {law.name!r} gave NaN or infinity at step {measurement.step}, layer {layer}; look there "
            "for NaN in the router's statistics, or restart the law with `switch_law`"
        )
    wanted_LE -= mean_L1
    bias_LE = _limited(wanted_LE, limit_L)
    state = BiasState(
        bias_LE=bias_LE,
        history_DLE=_shifted(bias_LE, state.history_DLE),
        change_LE=bias_LE - state.bias_LE,
        lost_LE=bias_LE - wanted_LE,  # both have mean 0
        limit_L=limit_L,
        fixed_limit=state.fixed_limit,
        top_k=state.top_k,
        law=law_state,
    )
    return bias_LE.copy(), state


def switch_law(old_law: Law, new_law: Law, measurement: Measurement, state: BiasState) -> BiasState:
    """Return the state for another law (or another setting) from the next update on; the bias stays as it is.

    measurement: the last one, from which the new law may learn where it stands. A law that has a memory of
    changes goes on from the last one (`Law.take_over`). Raises ValueError where the state is not old_law's or
    the measurement does not fit.
    """
    _check(measurement, state)
    layers, experts = state.bias_LE.shape
    if type(state.law) is not type(old_law.init(1, experts, state.top_k)):
        raise ValueError(
            f"the state holds a {type(state.law).__name__}, which is not one of law {old_law.name!r}; give "
            "the law that the state was updated with"
        )
    law_state = new_law.init(layers, experts, state.top_k)
    if new_law.take_over is not None and measurement.num_tokens > 0:
        law_state = new_law.take_over(state.change_LE, measurement, _actuated(state), law_state)
    return state._replace(law=law_state)


def _actuated(state: BiasState) -> Actuated:
    return Actuated(state.history_DLE[-1], state.bias_LE, state.lost_LE)


def _shifted(bias_LE: Floats, history_DLE: Floats) -> Floats:
    """The history one step on: the newest bias first, the oldest dropped."""
    return np.concatenate((bias_LE[None], history_DLE[:-1]))


def _limit(measurement: Measurement, state: BiasState) -> Floats:
    """[L] the largest |b|: the range of each layer's scores, where this step tells it."""
    counts_LEB, edges_X = measurement.score_histogram_LEB, measurement.score_edges_X
    if state.fixed_limit or counts_LEB is None or edges_X is None:
        return state.limit_L
    pooled_LB = counts_LEB.sum(axis=1)
    low_L, high_L = (histogram_quantile(pooled_LB, edges_X, share) for share in _RANGE)
    return np.where(high_L > low_L, high_L - low_L, state.limit_L)


def _limited(bias_LE: Floats, limit_L: Floats) -> Floats:
    """The nearest bias of mean 0 with every |b| <= limit; the same array where that holds already."""
    if max(bias_LE.max(), -bias_LE.min()) <= limit_L.min():
        return bias_LE
    over_L = np.abs(bias_LE).max(axis=1) > limit_L
    result_LE = bias_LE.copy()
    result_LE[over_L] = _project(bias_LE[over_L], limit_L[over_L])
    return result_LE


def _project(bias_LE: Floats, limit_L: Floats) -> Floats:
    """clip(b - shift, -limit, limit) with the shift at which the sum is 0.

    As a function of the shift the sum falls in straight pieces, from E limit (where every b is clipped above)
    to -E limit; its slope is the number of experts in between. So the piece that crosses 0 is looked up.
    """
    limit_L1 = limit_L[:, None]
    num_experts = bias_LE.shape[1]
    corner_LX = np.concatenate((bias_LE - limit_L1, bias_LE + limit_L1), axis=1)
    order_LX = np.argsort(corner_LX, axis=1, kind="stable")
    corner_LX = np.take_along_axis(corner_LX, order_LX, axis=1)
    free_LX = np.cumsum(np.where(order_LX < num_experts, 1.0, -1.0), axis=1)[:, :-1]
    fall_LX = np.cumsum(free_LX * np.diff(corner_LX, axis=1), axis=1)
    wanted_L1 = num_experts * limit_L1
    piece_L1 = np.minimum((fall_LX < wanted_L1).sum(axis=1, keepdims=True), fall_LX.shape[1] - 1)
    over_L1 = np.take_along_axis(fall_LX, piece_L1, axis=1) - wanted_L1
    free_L1 = np.maximum(np.take_along_axis(free_LX, piece_L1, axis=1), 1.0)
    shift_L1 = np.take_along_axis(corner_LX, piece_L1 + 1, axis=1) - over_L1 / free_L1
    bias_LE = np.clip(bias_LE - shift_L1, -limit_L1, limit_L1)
    inside_LE = np.abs(bias_LE) < limit_L1  # what rounding has left of the mean goes to them
    rest_L1 = bias_LE.sum(axis=1, keepdims=True) / np.maximum(inside_LE.sum(axis=1, keepdims=True), 1)
    return np.clip(bias_LE - rest_L1 * inside_LE, -limit_L1, limit_L1)


def _check(measurement: Measurement, state: BiasState) -> None:
    shape_LE, step = state.bias_LE.shape, measurement.step
    counts_LE = measurement.counts_LE
    if counts_LE.shape != shape_LE or measurement.top_k != state.top_k:
        raise ValueError(
            f"step {step}: counts {counts_LE.shape} with top_k={measurement.top_k}, and the bias loop was "
            f"made for {shape_LE} with top_k={state.top_k}"
        )
    copies = measurement.num_tokens * measurement.top_k
    off_L = np.abs(counts_LE.sum(axis=1) - copies)
    if not (off_L.max() <= 1e-9 * max(1.0, copies) and counts_LE.min() >= 0):
        raise ValueError(
            f"step {step}: counts are negative, NaN, or not {copies} = num_tokens * top_k in every layer; "
            "read samples with `read_measurement`, which says where"
        )
    for name in _FIELDS:
        value = getattr(measurement, name)
        if value is not None:
            _check_statistic(name, np.asarray(value), measurement)


def _check_statistic(name: str, value: NDArray[Any], measurement: Measurement) -> None:
    """Shape, and for the small ones and reals the values: large counts that are whole cannot be NaN."""
    layers, experts = measurement.counts_LE.shape
    shape = {
        "LE": (layers, experts),
        "LEB": (layers, experts, value.shape[-1]),
        "LEE": (layers, experts, experts),
        "LME": (layers, value.shape[min(1, value.ndim - 1)], experts),
    }[name[name.rindex("_") + 1 :]]
    whole = value.dtype.kind in "iu"
    if value.shape != shape or not (whole or np.isfinite(value.sum())):
        raise ValueError(
            f"step {measurement.step}: {name} is {value.dtype} {value.shape}, NaN or infinite; it must be "
            f"{shape} and finite"
        )
    if value.ndim == 2 and value.min() < 0:
        raise ValueError(f"step {measurement.step}: {name} has negative entries; counts are 0 or more")
