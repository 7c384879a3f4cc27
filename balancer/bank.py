"""Bank: many simple forecasts of one load, and the weights with which they are mixed: the regime switch.

The default forecaster (`forecaster("regime")`) is this member; `forecaster("ar")` is its regression alone.
All is per layer, on shares, and rests on a *basis* of exponential means with gains from 1 (the last sample)
to 0.05:

    mean k        x_k <- x_k + g_k (s - x_k)
    regression r  f = x_ref + sum_d theta_d (x_d - x_ref)     theta by recursive least squares with memory
                  lambda_r, for each horizon by itself, over all experts of the layer at once. The means stand
                  for the lags of an autoregression: few, and spread over all time scales
    decay         f = (1 - q) x + q / E, q = 1 - (1 - rate)^lag: for runs whose bias loop levels the load
    slow members  any other (seasonal by default), taken in as they are

Weights come from the error of each forecast once its time has come (total variation, over its running size):

    fixed share   w_m <- (1 - s) w_m exp(-eta (TV_m - min TV) / scale) / norm + s prior_m     (Herbster and
                  Warmuth, 1998): no forecast is ever lost, so that another may take over after a change
    evidence      of shorter horizons counts at longer ones, by `borrow` for each step: it is there earlier
    after a jump  of a layer its weights return to the prior, its regressions keep a tenth of what they knew;
                  if it had been settled, its means start anew from the last sample, as plain means at first:
                  until the load comes back (bank_jumps.py)

Three passes over the data, each here in numpy and in `balancer/forecast_kernels.py` for numba: `learn`
(errors of past forecasts), `solve` (regressions), `mix` (the forecast).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from balancer.bank_config import BankConfig
from balancer.bank_jumps import Aside, Learnt, answer_jumps, aside_init
from balancer.forecast_build import Member, Sample, is_evidence, shares
from balancer.origins import FREE, num_slots, place, take_due

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Small = NDArray[np.float32]

_LEAST_SHARE = 1e-4  # of the root weights of the regression
_SCALE_MEMORY = 0.9
_LEAST_SCALE = 1e-9
_MANY_EXPERTS = 12
_OLD = 2**40  # samples: the means have long left their plain beginning


class BankState(NamedTuple):
    """level_KLE [K, L, E]: the means;  started_L [L]: layers that had load;  age_L [L]: samples since the
    means of a layer started anew, very many before;  gram_HRLDD, moment_HRLD: the regressions' normal
    equations;  theta_HRLD: their solution;  evidence_HML [H, M + X, L]: log of weight over prior;  scale_HL:
    running size of the errors;  slow: states of the slow members, slow_HXLE [H, X, L, E] their forecasts now;
    aside: see bank_jumps.py;  origin_HQ [H, slots]: steps of the origins kept, with their levels level_HQKLE,
    theta_HQRLD and slow_HQXLE (float32)."""

    level_KLE: Floats
    started_L: NDArray[np.bool_]
    age_L: Integers
    gram_HRLDD: Floats
    moment_HRLD: Floats
    theta_HRLD: Floats
    evidence_HML: Floats
    scale_HL: Floats
    slow: tuple[Any, ...]
    slow_HXLE: Floats
    aside: Aside
    origin_HQ: Integers
    level_HQKLE: Small
    theta_HQRLD: Small
    slow_HQXLE: Small


class Passes(Protocol):
    """The three passes: numpy's below, or numba's."""

    def learn(
        self, config: BankConfig, level_KLE: Any, theta_RLD: Any, share_LE: Floats, fade: float
    ) -> tuple[Floats, Floats, Floats]: ...

    def solve(self, config: BankConfig, gram_RLDD: Floats, moment_RLD: Floats) -> Floats: ...

    def mix(
        self, config: BankConfig, level_KLE: Floats, theta_RLD: Floats, weight_ML: Floats, fade: float
    ) -> Floats: ...


def bank(config: BankConfig, passes: Passes, slow: Sequence[Member] = ()) -> Member:
    """Return the bank as a member of a forecaster.

    passes: `NumpyPasses()` or the compiled ones. slow: further members to mix in.
    """

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> tuple[Integers, BankState]:
        states = tuple(member.init(num_layers, num_experts, horizons_H) for member in slow)
        return horizons_H, _init(config, num_layers, num_experts, horizons_H.size, states)

    def update(sample: Sample, state: tuple[Integers, BankState]) -> tuple[Integers, BankState]:
        horizons_H, inner = state
        states = tuple(member.update(sample, one) for member, one in zip(slow, inner.slow))
        means = [member.mean(sample.lag_H, one) for member, one in zip(slow, states)]
        if means:
            inner = inner._replace(slow=states, slow_HXLE=np.stack(means, axis=1))
        return horizons_H, _update(config, passes, sample, horizons_H, inner)

    def mean(lag_H: Integers, state: tuple[Integers, BankState]) -> Floats:
        weight_HML = weights(config, lag_H, state[1].evidence_HML)
        return np.stack(
            [_mix(config, passes, h, lag, weight_HML[h], state[1]) for h, lag in enumerate(lag_H)]
        )

    return Member(init, update, mean)


def _mix(config: BankConfig, passes: Passes, h: int, lag: int, weight_ML: Floats, state: BankState) -> Floats:
    """Weighted mean of all members at one horizon, [L, E]."""
    M = config.num_members
    fast_ML, slow_XL = weight_ML[:M], weight_ML[M:]
    mean_LE = passes.mix(config, state.level_KLE, state.theta_HRLD[h], fast_ML, _fade(config, lag))
    if slow_XL.shape[0] == 0:
        return mean_LE
    slow_LE = np.einsum("xl,xle->le", slow_XL, state.slow_HXLE[h])
    return shares(fast_ML.sum(axis=0)[:, None] * mean_LE + slow_LE)


def _init(
    config: BankConfig, num_layers: int, num_experts: int, num_horizons: int, slow: tuple[Any, ...]
) -> BankState:
    K, R, D, X = len(config.gains), len(config.memories), len(config.regressors), len(slow)
    slots = num_slots(num_horizons * (K + X) * num_layers * num_experts)
    shape_LE, start = (num_layers, num_experts), 1.0 / num_experts
    learnt = Learnt(
        level_KLE=np.full((K, *shape_LE), start),
        age_L=np.full(num_layers, _OLD),
        evidence_HML=np.zeros((num_horizons, config.num_members + X, num_layers)),
        gram_HRLDD=np.zeros((num_horizons, R, num_layers, D, D)),
        moment_HRLD=np.zeros((num_horizons, R, num_layers, D)),
    )
    return BankState(
        **learnt._asdict(),
        started_L=np.zeros(num_layers, dtype=np.bool_),
        theta_HRLD=np.zeros((num_horizons, R, num_layers, D)),
        scale_HL=np.zeros((num_horizons, num_layers)),
        slow=slow,
        slow_HXLE=np.full((num_horizons, X, *shape_LE), start),
        aside=aside_init(learnt),
        origin_HQ=np.full((num_horizons, slots), FREE),
        level_HQKLE=np.zeros((num_horizons, slots, K, *shape_LE), dtype=np.float32),
        theta_HQRLD=np.zeros((num_horizons, slots, R, num_layers, D), dtype=np.float32),
        slow_HQXLE=np.zeros((num_horizons, slots, X, *shape_LE), dtype=np.float32),
    )


def _update(
    config: BankConfig, passes: Passes, sample: Sample, horizons_H: Integers, state: BankState
) -> BankState:
    learnt = Learnt(state.level_KLE, state.age_L, state.evidence_HML, state.gram_HRLDD, state.moment_HRLD)
    answer_jumps(sample, state.level_KLE[_usual(config)], learnt, state.aside)
    _raise_levels(config, sample, state)
    prior_HM = priors(config, sample.lag_H, len(state.slow))
    for h, horizon in enumerate(horizons_H):
        made_Q = state.origin_HQ[h].copy()
        slots = take_due(state.origin_HQ[h], int(horizon), sample.step, sample.interval)
        for slot in slots:
            counted_L = is_evidence(sample, h, int(made_Q[slot]))
            _learn(config, passes, sample, h, slot, counted_L, prior_HM[h], state)
        if slots:
            state.theta_HRLD[h] = passes.solve(config, state.gram_HRLDD[h], state.moment_HRLD[h])
        slot = place(state.origin_HQ[h], int(horizon), sample.step)
        if slot != FREE:
            state.level_HQKLE[h, slot] = state.level_KLE
            state.theta_HQRLD[h, slot] = state.theta_HRLD[h]
            state.slow_HQXLE[h, slot] = state.slow_HXLE[h]
    return state._replace(started_L=state.started_L | sample.loaded_L)


def _raise_levels(config: BankConfig, sample: Sample, state: BankState) -> None:
    age_L = state.age_L + sample.loaded_L
    gain_KL = np.maximum(np.array(config.gains)[:, None], 1.0 / (age_L + 1.0))
    gain_KL = np.where(state.started_L, gain_KL, 1.0) * sample.loaded_L
    for level_LE, gain_L in zip(state.level_KLE, gain_KL):
        level_LE += gain_L[:, None] * (sample.share_LE - level_LE)
    state.age_L[:] = age_L


def _speed(config: BankConfig, sample: Sample) -> float:
    """eta, slower for fewer than 12 experts: the total variation of a few experts says little at a time."""
    return config.eta * min(1.0, sample.share_LE.shape[1] / _MANY_EXPERTS)


def _usual(config: BankConfig) -> int:
    """Index of the mean that stands for what a load was lately: the one with a gain nearest 0.2."""
    return int(np.abs(np.array(config.gains) - 0.2).argmin())


def _learn(
    config: BankConfig,
    passes: Passes,
    sample: Sample,
    h: int,
    slot: int,
    counted_L: NDArray[np.bool_],
    prior_M: Floats,
    state: BankState,
) -> None:
    """Take in one origin whose time has come, for the layers counted."""
    fade = _fade(config, sample.lag_H[h])
    level_KLE, theta_RLD = state.level_HQKLE[h, slot], state.theta_HQRLD[h, slot]
    loss_ML, gram_LDD, moment_LD = passes.learn(config, level_KLE, theta_RLD, sample.share_LE, fade)
    slow_XL = 0.5 * np.abs(state.slow_HQXLE[h, slot] - sample.share_LE).sum(axis=-1)
    loss_ML = np.concatenate([loss_ML, slow_XL])
    memory_RL = np.where(counted_L, np.array(config.memories)[:, None], 1.0)
    state.gram_HRLDD[h] *= memory_RL[:, :, None, None]
    state.gram_HRLDD[h] += gram_LDD * counted_L[:, None, None]
    state.moment_HRLD[h] *= memory_RL[:, :, None]
    state.moment_HRLD[h] += moment_LD * counted_L[:, None]
    now_L: Floats = loss_ML.mean(axis=0)
    old_L: Floats = state.scale_HL[h]
    moved_L: Floats = _SCALE_MEMORY * old_L + (1 - _SCALE_MEMORY) * now_L
    scale_L = np.where(old_L > 0, moved_L, now_L)
    state.scale_HL[h] = np.where(counted_L, scale_L, old_L)
    worse_ML = (loss_ML - loss_ML.min(axis=0)) / np.maximum(scale_L, _LEAST_SCALE)
    evidence_ML = share_evidence(config, state.evidence_HML[h] - _speed(config, sample) * worse_ML, prior_M)
    state.evidence_HML[h] = np.where(counted_L, evidence_ML, state.evidence_HML[h])


# ---- weights --------------------------------------------------------------------------------------------


def priors(config: BankConfig, lag_H: Integers, num_slow: int) -> Floats:
    """Weight [H, M + X] of each member before any error is known; sums to 1 over the members."""
    means, others = len(config.gains), config.num_members - len(config.gains) + num_slow
    weight_M = np.array([config.mean_weight] * means + [config.regression_weight] * others)
    weight_HM = np.broadcast_to(weight_M, (lag_H.size, weight_M.size)).copy()
    weight_HM[:, 0] *= np.maximum(1.0, config.bonus / lag_H.astype(np.float64) ** config.bonus_power)
    if config.decay_rate > 0:  # who says that the load is being levelled is believed
        weight_HM[:, means] = weight_HM[:, :means].sum(axis=1)
    return weight_HM / weight_HM.sum(axis=1, keepdims=True)


def share_evidence(config: BankConfig, evidence_ML: Floats, prior_M: Floats) -> Floats:
    """Mix a share of the prior into the weights, and return them as evidence: log of weight over prior."""
    most_L = np.where(prior_M[:, None] > 0, evidence_ML, -np.inf).max(axis=0)
    weight_ML = prior_M[:, None] * np.exp(np.minimum(evidence_ML - most_L, 0.0))
    weight_ML = (1 - config.switch) * weight_ML / weight_ML.sum(axis=0) + config.switch * prior_M[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        found_ML = np.log(weight_ML / prior_M[:, None])
    return np.where(prior_M[:, None] > 0, np.maximum(found_ML, -700.0), 0.0)


def weights(config: BankConfig, lag_H: Integers, evidence_HML: Floats) -> Floats:
    """Weights [H, M, L] that sum to 1 over M: prior times evidence, that of shorter horizons included."""
    prior_HM = priors(config, lag_H, evidence_HML.shape[1] - config.num_members)
    total_HML = np.empty_like(evidence_HML)
    borrowed_ML = np.zeros_like(evidence_HML[0])
    for h in range(lag_H.size):
        total_HML[h] = evidence_HML[h] + borrowed_ML
        borrowed_ML = config.borrow * total_HML[h]
    total_HML = np.where(prior_HM[:, :, None] > 0, total_HML, -np.inf)
    weight_HML = prior_HM[:, :, None] * np.exp(total_HML - total_HML.max(axis=1, keepdims=True))
    return weight_HML / weight_HML.sum(axis=1, keepdims=True)


def _fade(config: BankConfig, lag: Any) -> float:
    """Part q of the decay forecast that is uniform, after `lag` samples."""
    return 1.0 - (1.0 - config.decay_rate) ** float(lag)


# ---- the passes in numpy ----------------------------------------------------------------------------------


class NumpyPasses:
    """The passes as array expressions: what the compiled ones are compared with."""

    def learn(
        self, config: BankConfig, level_KLE: Any, theta_RLD: Any, share_LE: Floats, fade: float
    ) -> tuple[Floats, Floats, Floats]:
        """Errors and normal equations of one origin.

        level_KLE [K, L, E], theta_RLD [R, L, D]: at the origin;  share_LE [L, E]: what came;  fade: of the
        decay. Returns loss_ML [M, L] total variation of each member; gram_LDD, moment_LD: the regression's
        normal equations, weighted by one over the root of the share (between absolute and squared errors)
        and divided by the size of the residual, so that a burst weighs no more than a quiet sample.
        """
        level_KLE = np.asarray(level_KLE, dtype=np.float64)
        forecast_MLE = self._members(config, level_KLE, np.asarray(theta_RLD, dtype=np.float64), fade)
        loss_ML = 0.5 * np.abs(forecast_MLE - share_LE).sum(axis=-1)
        reference_LE = level_KLE[config.reference]
        z_DLE = level_KLE[list(config.regressors)] - reference_LE
        residual_LE = share_LE - reference_LE
        weight_LE = 1.0 / np.sqrt(np.maximum(reference_LE, _LEAST_SHARE))
        size_L = (weight_LE * residual_LE**2).sum(axis=-1) + 1e-12
        gram_LDD = np.einsum("dle,cle,le->ldc", z_DLE, z_DLE, weight_LE) / size_L[:, None, None]
        moment_LD = np.einsum("dle,le,le->ld", z_DLE, residual_LE, weight_LE) / size_L[:, None]
        return loss_ML, gram_LDD, moment_LD

    def solve(self, config: BankConfig, gram_RLDD: Floats, moment_RLD: Floats) -> Floats:
        """theta_RLD [R, L, D] of the ridge regression on the Gram matrix scaled to a unit diagonal."""
        scale_RLD = 1.0 / np.sqrt(np.einsum("rldd->rld", gram_RLDD) + 1e-9)
        scaled_RLDD = gram_RLDD * scale_RLD[..., :, None] * scale_RLD[..., None, :]
        scaled_RLDD = scaled_RLDD + config.ridge * np.eye(gram_RLDD.shape[-1])
        solve: Any = np.linalg.solve
        solution_RLD1 = solve(scaled_RLDD, (moment_RLD * scale_RLD)[..., None])
        return solution_RLD1[..., 0] * scale_RLD

    def mix(
        self, config: BankConfig, level_KLE: Floats, theta_RLD: Floats, weight_ML: Floats, fade: float
    ) -> Floats:
        """Weighted mean of the members, [L, E] shares."""
        forecast_MLE = self._members(config, level_KLE, theta_RLD, fade)
        return shares((weight_ML[:, :, None] * forecast_MLE).sum(axis=0))

    def _members(self, config: BankConfig, level_KLE: Floats, theta_RLD: Floats, fade: float) -> Floats:
        """Forecast of each member, [M, L, E]."""
        reference_LE = level_KLE[config.reference]
        z_DLE = level_KLE[list(config.regressors)] - reference_LE
        regression_RLE = shares(reference_LE + np.einsum("rld,dle->rle", theta_RLD, z_DLE))
        parts = [level_KLE, regression_RLE]
        if config.decay_rate > 0:
            faded_LE = (1.0 - fade) * reference_LE + fade / level_KLE.shape[-1]
            parts.insert(1, faded_LE[None])
        return np.concatenate(parts)
