"""Kalman members: the filters against the textbook recursion, and the noises that they learn."""

import numpy as np
import pytest

from balancer.forecast import _kernels
from balancer.forecast_build import Sample
from balancer.kalman import NumpyFilters, _noise_init, _noise_update, _variances, local_level, local_trend

LAYERS, EXPERTS = 2, 5
MANY = 1e12  # copies: counting noise far below every other


@pytest.fixture(params=["numpy", "numba"])
def filters(request):
    if request.param == "numpy":
        return NumpyFilters()
    pytest.importorskip("numba")
    return _kernels()


def _sample(share_LE, *, total=MANY, loaded=True, jumped=False):
    num_layers = len(share_LE)
    known = {
        "share_LE": np.asarray(share_LE, dtype=np.float64),
        "total_L": np.full(num_layers, total if loaded else 0.0),
        "loaded_L": np.full(num_layers, loaded),
        "jumped_L": np.full(num_layers, jumped),
    }
    return Sample(**{**dict.fromkeys(Sample._fields), **known})  # what a filter does not read is not there


def _fed(member, share_WLE, **options):
    state = member.init(*share_WLE.shape[1:], np.array([10]))
    for share_LE in share_WLE:
        state = member.update(_sample(share_LE, **options), state)
    return state


def _learn(root_WLE, noise=None):
    """Moments of root shares that come one after another, without a jump."""
    started_L = np.ones(root_WLE.shape[1], dtype=bool)
    if noise is None:
        noise = _noise_init(root_WLE[0])
    for root_LE in root_WLE:
        noise = _noise_update(_sample(root_LE**2), root_LE, noise, started_L)
    return noise


def _to_and_fro(number, size=0.01):
    """Shares [W, 1, 2] that alternate around (0.5, 0.5): noise, and no drift at all."""
    way_W1 = np.where(np.arange(number) % 2 == 0, size, -size)[:, None]
    return np.concatenate([0.5 + way_W1, 0.5 - way_W1], axis=1)[:, None]


# ---- filters --------------------------------------------------------------------------------------------


def _textbook(values_W, matrix, drift_W, noise_W, start, variance):
    """Predict and correct (Harvey, 1989) for y = x[0] + noise: states and covariances after each sample."""
    state, covariance = np.array(start, dtype=float), np.array(variance, dtype=float)
    observe = np.eye(1, len(state))
    for value, drift, noise in zip(values_W, drift_W, noise_W):
        state = matrix @ state
        covariance = matrix @ covariance @ matrix.T + drift
        total = observe @ covariance @ observe.T + noise
        gain = covariance @ observe.T / total
        state = state + gain @ (value - observe @ state)
        covariance = covariance - gain @ total @ gain.T
    return state, covariance


@pytest.fixture
def data():
    """Values, drifts and noises [W, L, E] of all sizes, and loads [W, L]."""
    rng = np.random.default_rng(0)
    shape = (30, LAYERS, EXPERTS)
    loaded_WL = rng.random(shape[:2]) < 0.7
    return rng.random(shape), rng.random(shape) * 1e-2, rng.random(shape) * 3e-2, loaded_WL


def test_the_level_filter_is_the_textbook_one(filters, data):
    value_WLE, drift_WLE, noise_WLE, loaded_WL = data
    level_LE, variance_LE = np.full((LAYERS, EXPERTS), 0.4), np.full((LAYERS, EXPERTS), 0.02)
    for value_LE, drift_LE, noise_LE, loaded_L in zip(*data):
        filters.level_filter(value_LE, level_LE, variance_LE, drift_LE, noise_LE, loaded_L)
    for layer, e in np.ndindex(LAYERS, EXPERTS):
        use_W = loaded_WL[:, layer]  # a sample without load neither moves nor loosens the level
        parts = [part[use_W, layer, e] for part in (value_WLE, drift_WLE, noise_WLE)]
        state, covariance = _textbook(parts[0], np.eye(1), *parts[1:], [0.4], [[0.02]])
        # double precision, other order of sums
        np.testing.assert_allclose(level_LE[layer, e], state[0], rtol=1e-12)
        np.testing.assert_allclose(variance_LE[layer, e], covariance[0, 0], rtol=1e-12)


@pytest.mark.parametrize("damping", [0.8, 1.0, 0.0])
def test_the_trend_filter_is_the_textbook_one(filters, data, damping):
    value_WLE, drift_WLE, noise_WLE, loaded_WL = data
    level_LE, slope_LE = np.full((LAYERS, EXPERTS), 0.4), np.full((LAYERS, EXPERTS), 0.03)
    variance_3LE = np.tile(np.array([0.02, 0.004, 0.01])[:, None, None], (1, LAYERS, EXPERTS))
    for value_LE, drift_LE, noise_LE, loaded_L in zip(*data):
        filters.trend_filter(
            value_LE,
            level_LE,
            slope_LE,
            variance_3LE,
            drift_LE,
            0.3 * drift_LE,
            noise_LE,
            loaded_L,
            damping,
        )
    matrix = np.array([[1.0, damping], [0.0, damping]])
    for layer, e in np.ndindex(LAYERS, EXPERTS):
        use_W = loaded_WL[:, layer]
        value_W, drift_W, noise_W = (part[use_W, layer, e] for part in (value_WLE, drift_WLE, noise_WLE))
        drifts = [np.diag([drift, 0.3 * drift]) for drift in drift_W]
        state, covariance = _textbook(
            value_W, matrix, drifts, noise_W, [0.4, 0.03], [[0.02, 0.004], [0.004, 0.01]]
        )
        np.testing.assert_allclose([level_LE[layer, e], slope_LE[layer, e]], state, rtol=1e-10, atol=1e-14)
        found = variance_3LE[:, layer, e]
        expected = [covariance[0, 0], covariance[0, 1], covariance[1, 1]]
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


# ---- noises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drift", "noise"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.2, 1.0)])
def test_drift_and_noise_are_told_apart(drift, noise):
    # moments over some 60 changes, of 4 x 100 experts: a standard error of 2 % of drift + noise
    rng, shape, unit = np.random.default_rng(1), (200, 4, 100), 1e-6
    walk_WLE = 0.5 + np.sqrt(drift * unit) * rng.standard_normal(shape).cumsum(axis=0)
    root_WLE = walk_WLE + np.sqrt(noise * unit) * rng.standard_normal(shape)
    drift_LE, noise_LE = _variances(_sample(root_WLE[-1] ** 2), _learn(root_WLE))
    size = drift + noise
    assert abs(drift_LE.mean() / unit - drift) < 0.15 * size
    # the noise of an expert is bounded from below, which lifts the mean where there is none
    assert abs(noise_LE.mean() / unit - noise) < 0.15 * size


def test_an_alternating_load_is_noise_and_the_level_stays_in_the_middle():
    state = _fed(local_level(NumpyFilters()), _to_and_fro(1000))
    drift_LE, noise_LE = _variances(_sample([[0.5, 0.5]]), state.noise)
    # changes of 2 a = 0.02 sqrt(0.5): E[d^2] / 2 = 2 a^2
    np.testing.assert_allclose(noise_LE, 0.5 * (0.02 * 0.5**0.5) ** 2, rtol=1e-3)
    np.testing.assert_allclose(state.level_LE**2, 0.5, atol=0.001)
    # and the filter never stops: a drift of 1e-4 of the noise is a gain of 1 %, the root of g^2 / (1 - g)
    np.testing.assert_allclose(drift_LE, 1e-4 * noise_LE, rtol=1e-9)
    np.testing.assert_allclose(state.variance_LE / noise_LE, 0.00995, rtol=0.01)


def test_noise_is_never_less_than_that_of_counting():
    share_LE = np.array([[0.75, 0.25, 0.0]])
    noise = _learn(np.repeat(np.sqrt(share_LE)[None], 9, axis=0))
    drift_LE, noise_LE = _variances(_sample(share_LE, total=1000), noise)
    np.testing.assert_allclose(noise_LE, [[0.25 / 4000, 0.75 / 4000, 1 / 4000]], rtol=1e-6)
    np.testing.assert_allclose(drift_LE, 1e-4 * noise_LE)


def test_moments_of_an_expert_lean_half_on_its_layer():
    noise = _noise_init(np.full((1, 2), 0.5))
    noise.square_LE[:] = [[4e-6, 0.0]]
    noise.product_LE[:] = [[-1e-6, 0.0]]
    drift_LE, noise_LE = _variances(_sample([[0.5, 0.5]]), noise)
    np.testing.assert_allclose(noise_LE, [[0.75e-6, 0.25e-6]], rtol=1e-6)
    np.testing.assert_allclose(drift_LE, [[1.5e-6, 0.5e-6]], rtol=1e-6)


def test_moments_are_plain_means_at_first_and_keep_97_percent_later():
    rng = np.random.default_rng(2)
    change_W = 0.01 * rng.standard_normal(20)
    root_W = 0.5 + np.concatenate([[0.0], change_W]).cumsum()
    noise = _learn(root_W[1:, None, None], _noise_init(np.full((1, 1), 0.5)))
    np.testing.assert_allclose(noise.square_LE, (change_W**2).mean())
    np.testing.assert_allclose(noise.product_LE, (change_W[1:] * change_W[:-1]).sum() / 20)
    root_W = 0.5 + 1e-3 * np.arange(200)
    later = _learn(np.append(root_W, root_W[-1])[1:, None, None], _noise_init(np.full((1, 1), 0.5)))
    np.testing.assert_allclose(later.square_LE, 0.97 * 1e-6, rtol=1e-9)
    np.testing.assert_allclose(later.product_LE, 0.97 * 1e-6, rtol=0.01)  # the first had no partner


def test_moments_do_not_learn_a_jump_and_start_anew_after_it():
    noise, started_L = _learn(_to_and_fro(50) ** 0.5), np.ones(1, dtype=bool)
    there_LE = np.array([[0.9, 0.4]])
    jumped = _noise_update(_sample(there_LE**2, jumped=True), there_LE, noise, started_L)
    np.testing.assert_array_equal(jumped.square_LE, noise.square_LE)
    np.testing.assert_array_equal(jumped.product_LE, noise.product_LE)
    np.testing.assert_array_equal(jumped.last_LE, there_LE)
    assert jumped.number_L.tolist() == [0] and not jumped.change_LE.any()
    after = _noise_update(_sample(there_LE**2), there_LE + 0.003, jumped, started_L)
    np.testing.assert_allclose(after.square_LE, 0.003**2)
    assert after.number_L.tolist() == [1] and not after.product_LE.any()


def test_a_layer_without_load_keeps_its_moments():
    noise = _learn(_to_and_fro(7) ** 0.5)
    idle = _sample([[0.9, 0.1]], loaded=False)
    for before, after in zip(noise, _noise_update(idle, np.sqrt(idle.share_LE), noise, np.ones(1, bool))):
        np.testing.assert_array_equal(before, after)


# ---- jumps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [local_level, local_trend])
def test_a_layer_that_jumps_forgets_its_level(make):
    member = make(NumpyFilters())
    state = _fed(member, _to_and_fro(60))
    there_LE = np.array([[0.9, 0.1]])
    followed = member.update(_sample(there_LE), _fed(member, _to_and_fro(60)))
    assert np.abs(followed.level_LE - np.sqrt(there_LE)).min() > 0.01  # else there is nothing to forget
    state = member.update(_sample(there_LE, jumped=True), state)
    np.testing.assert_allclose(state.level_LE, np.sqrt(there_LE), rtol=1e-12)
    # as sure of it as one sample makes it, and one step of the filter
    drift_LE, noise_LE = _variances(_sample(there_LE), state.noise)
    of_level = state.variance_LE if make is local_level else state.variance_3LE[0]
    before_LE = noise_LE + drift_LE
    np.testing.assert_allclose(of_level, before_LE * noise_LE / (before_LE + noise_LE))


def test_a_layer_that_jumps_forgets_its_slope():
    rising_W = 0.3 + 0.004 * np.arange(60)
    member = local_trend(NumpyFilters(), slope_ratio=0.05)
    state = _fed(member, np.stack([rising_W, 1 - rising_W], axis=1)[:, None])
    assert np.abs(state.slope_LE).min() > 5e-4 and state.variance_3LE[1].min() > 0
    state = member.update(_sample([[0.1, 0.9]], jumped=True), state)
    assert not state.slope_LE.any() and not state.variance_3LE[1].any()
    drift_LE, _ = _variances(_sample([[0.1, 0.9]]), state.noise)
    np.testing.assert_allclose(state.variance_3LE[2], 0.05 * drift_LE)
