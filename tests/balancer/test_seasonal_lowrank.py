"""Seasonal member: which periods it finds and how far it trusts them. Low-rank member: its fit and bounds."""

import numpy as np
import pytest

from balancer.forecast_build import Sample, shares
from balancer.lowrank import _fit, lowrank
from balancer.periodic import _autocorrelation, seasonal

LAGS = np.arange(1, 13)


def _sample(share_LE, *, jumped_L=None, interval=10.0):
    num_layers = len(share_LE)
    known = {
        "share_LE": share_LE,
        "total_L": np.full(num_layers, 1e12),  # no counting noise to speak of
        "loaded_L": np.ones(num_layers, dtype=bool),
        "jumped_L": np.zeros(num_layers, dtype=bool) if jumped_L is None else jumped_L,
        "interval": interval,
    }
    return Sample(**{**dict.fromkeys(Sample._fields), **known})  # what these members do not read is not there


def _fed(member, share_WLE, state=None, **options):
    if state is None:
        state = member.init(*share_WLE.shape[1:], LAGS)
    for share_LE in share_WLE:
        state = member.update(_sample(share_LE, **options), state)
    return state


def _waves(number, period, layers=1, size=0.1):
    """Shares [W, L, 3] that come round: a wave and what is left."""
    phase_WL = 2 * np.pi * (np.arange(number)[:, None] / period + np.arange(layers) / 7)
    one_WL, other_WL = size * np.sin(phase_WL), size * np.cos(phase_WL)
    return 1 / 3 + np.stack([one_WL, other_WL, -one_WL - other_WL], axis=-1)


def _noisy(share_WLE, noise, seed=0):
    return shares(share_WLE + noise * np.random.default_rng(seed).standard_normal(share_WLE.shape))


# ---- seasonal: the period -------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [4, 9, 12, 30])
def test_a_period_is_found_and_its_phases_forecast(period):
    share_WLE = _waves(112, period)
    member = seasonal(length=96)  # the ring has come round
    state = _fed(member, share_WLE[:100])
    # without noise a multiple of the period is as good as the period
    assert state.period_L[0] > 0 and state.period_L[0] % period == 0 and state.strength_L[0] > 0.95
    np.testing.assert_allclose(member.mean(LAGS, state), share_WLE[100:], atol=0.01)


def test_every_layer_is_looked_at_once_in_32_samples():
    share_WLE = _waves(132, 8, layers=70)
    member = seasonal()
    state = _fed(member, share_WLE[:100])
    state.period_L[:] = -1
    state = _fed(member, share_WLE[100:131], state)  # 31 samples: one turn of 32 is missing
    assert np.flatnonzero(state.period_L == -1).tolist() == [4, 36, 68]
    state = _fed(member, share_WLE[131:], state)
    assert (state.period_L != -1).all()


def test_a_slow_drift_is_not_taken_for_a_period():
    ramp_W = np.linspace(-0.1, 0.1, 128)
    share_WLE = 1 / 3 + np.stack([ramp_W, -ramp_W, 0 * ramp_W], axis=-1)[:, None].repeat(32, axis=1)
    noisy_WLE = _noisy(share_WLE, 0.02)
    # there are peaks enough to be mistaken
    correlation_NL = _autocorrelation(noisy_WLE.astype(np.float32))[:20]
    inner_NL = correlation_NL[1:-1]
    assert ((inner_NL > correlation_NL[:-2]) & (inner_NL > correlation_NL[2:]) & (inner_NL > 0.3)).any()
    state = _fed(seasonal(), noisy_WLE)
    assert not state.period_L.any() and not state.strength_L.any()


def test_noise_has_no_period():
    state = _fed(seasonal(), _noisy(np.full((128, 32, 8), 1 / 8), 0.02))
    assert not state.period_L.any()


def test_correlations_at_all_lags_are_means_over_the_pairs_there_are():
    series_NLE = np.random.default_rng(1).standard_normal((12, 2, 3)).astype(np.float32)
    found_NL = _autocorrelation(series_NLE)
    centred_NLE = (series_NLE - series_NLE.mean(axis=0)).astype(np.float64)
    for layer, lag in np.ndindex(2, 12):
        pairs = centred_NLE[: 12 - lag, layer] * centred_NLE[lag:, layer]
        expected = pairs.sum(axis=-1).mean() / (centred_NLE[:, layer] ** 2).sum(axis=-1).mean()
        np.testing.assert_allclose(found_NL[lag, layer], expected, atol=1e-6)  # float32


# ---- seasonal: the forecast -----------------------------------------------------------------------------


def test_a_weak_period_leans_on_the_mean_as_far_as_it_is_weak():
    share_WLE = _noisy(_waves(128, 8, size=0.05), 0.045)
    member = seasonal()
    state = _fed(member, share_WLE)
    strength = state.strength_L[0]
    period = int(state.period_L[0])
    assert period > 0 and period % 8 == 0 and 0.35 < strength < 0.75
    for lag, mean_LE in zip(LAGS, member.mean(LAGS, state)):
        phase_LE = share_WLE[(127 + lag) % period :: period].mean(axis=0)
        np.testing.assert_allclose(mean_LE, strength * phase_LE + (1 - strength) * state.level_LE, atol=1e-6)


@pytest.mark.parametrize(("interval", "period"), [(10.0, 12), (20.0, 6), (5.0, 24), (9.0, 13), (100.0, 2)])
def test_a_period_given_in_steps_counts_in_samples(interval, period):
    share_WLE = _waves(102, period)
    member = seasonal(period_steps=120, length=60)
    state = _fed(member, share_WLE[:90], interval=interval)
    assert state.period_L.tolist() == [period]
    np.testing.assert_allclose(member.mean(LAGS, state), share_WLE[90:], atol=1e-6)  # float32


def test_a_period_given_is_used_from_its_second_round_on():
    member = seasonal(period_steps=120)
    state = _fed(member, _waves(12, 12))
    assert state.period_L.tolist() == [0]
    state = _fed(member, _waves(13, 12)[12:], state)
    assert state.period_L.tolist() == [12]


# ---- low rank: the fit ----------------------------------------------------------------------------------


def _fitted(series_NE, rank=1, layers=1, layer=0, turned=0):
    """State after one fit to root shares less their mean, whose ring begins `turned` places later."""
    number, num_experts = series_NE.shape
    state = lowrank(rank=rank, length=number).init(layers, num_experts, LAGS)
    state.root_NLE[:, layer] = np.roll(series_NE, turned, axis=0)
    state = state._replace(number=np.array(number + turned))
    _fit(layer, number, state)
    return state


@pytest.mark.parametrize("rho", [0.9, -0.95, 0.3])
def test_dynamics_are_shrunk_by_a_tenth_of_the_variance(rho):
    series_NE = rho ** np.arange(20.0)[:, None] * np.array([0.6, -0.8, 0.0])
    state = _fitted(series_NE)
    np.testing.assert_allclose(state.dynamics_LRR[0], [[rho / 1.1]], rtol=1e-5)  # float32
    np.testing.assert_allclose(np.abs(state.direction_LER[0, :, 0]), [0.6, 0.8, 0.0], atol=1e-6)


def test_a_ring_that_has_come_round_is_read_in_order():
    rng = np.random.default_rng(0)
    series_NE = rng.standard_normal((20, 5)).cumsum(axis=0)
    one, other = _fitted(series_NE, rank=2), _fitted(series_NE, rank=2, turned=7)
    np.testing.assert_allclose(one.dynamics_LRR, other.dynamics_LRR, atol=1e-12)


def test_factors_that_turn_are_told_from_their_direction():
    angle_N = 2 * np.pi * np.arange(48) / 8
    series_NE = np.zeros((48, 4))
    series_NE[:, 1], series_NE[:, 3] = np.cos(angle_N), np.sin(angle_N)
    state = _fitted(series_NE, rank=2)
    direction_ER, dynamics_RR = state.direction_LER[0], state.dynamics_LRR[0]
    next_E = direction_ER @ dynamics_RR @ direction_ER.T @ series_NE[10]
    # the ridge takes a tenth of the mean variance: 1 / 1.1 is left
    np.testing.assert_allclose(next_E, series_NE[11] / 1.1, atol=0.02)


def _radius(state, layer=0):
    return np.abs(np.linalg.eigvals(state.dynamics_LRR[layer])).max()


def test_an_explosive_factor_dies_out_at_long_horizons():
    grown_W = 0.001 * 1.25 ** np.arange(24.0)  # to 0.17
    root_WE = np.array([0.5, 0.5, 0.5, 0.5]) + grown_W[:, None] * np.array([1.0, -1.0, 0.5, -0.5])
    member = lowrank(rank=1, length=20, every=1)
    state = _fed(member, shares(root_WE**2)[:, None])
    np.testing.assert_allclose(_radius(state), 0.99, rtol=1e-9)  # it would grow by 1.25 / 1.1 otherwise
    near_LE, far_LE = member.mean(np.array([1, 500]), state)
    level_LE = shares(state.level_LE**2)
    assert np.abs(near_LE - level_LE).max() > 0.02
    np.testing.assert_allclose(far_LE, level_LE, atol=0.005)  # 0.99^500 = 0.7 % of the factor


# ---- low rank: samples ----------------------------------------------------------------------------------


def test_every_layer_has_its_turn_to_be_fitted():
    share_WLE = _waves(20, 6, layers=3)
    member = lowrank(rank=2, length=16, every=2)
    state = _fed(member, share_WLE[:18])
    assert [_radius(state, layer) > 0.1 for layer in range(3)] == [True, True, True]
    before_LRR = state.dynamics_LRR.copy()
    state = _fed(member, share_WLE[18:19], state)  # the 19th: odd layers
    changed_L = (state.dynamics_LRR != before_LRR).any(axis=(1, 2))
    assert changed_L.tolist() == [False, True, False]
    state = _fed(member, share_WLE[19:], state)  # the 20th: even ones
    assert (state.dynamics_LRR != before_LRR).any(axis=(1, 2)).tolist() == [True, True, True]


def test_a_jump_takes_the_dynamics_of_its_layer_and_sets_its_level():
    share_WLE = _waves(40, 6, layers=3)
    member = lowrank(rank=2, length=16, every=16)
    state = _fed(member, share_WLE[:36])  # layers are fitted at samples 16 to 18 and 32 to 34
    before_LRR = state.dynamics_LRR.copy()
    assert (np.abs(before_LRR).max(axis=(1, 2)) > 0.1).all()
    jumped_LE = np.array([[0.1, 0.2, 0.7]]).repeat(3, axis=0)
    state = member.update(_sample(jumped_LE, jumped_L=np.array([False, True, False])), state)
    assert not state.dynamics_LRR[1].any()
    np.testing.assert_array_equal(state.dynamics_LRR[[0, 2]], before_LRR[[0, 2]])
    np.testing.assert_allclose(state.level_LE[1], np.sqrt(jumped_LE[1]), rtol=1e-12)
    assert np.abs(state.level_LE[0] - np.sqrt(jumped_LE[0])).max() > 0.05
    # what is left of the jump is no factor to go on
    np.testing.assert_allclose(member.mean(np.array([5]), state)[0, 1], jumped_LE[1], atol=1e-6)
