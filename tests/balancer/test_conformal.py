"""Spread, intervals and the store of origins: what stands under every forecaster."""

import numpy as np
import pytest

from balancer.conformal import (
    NUM_BINS,
    NumpyBands,
    conformal_init,
    conformal_update,
    multiplier,
    multipliers,
)
from balancer.forecast import _kernels
from balancer.origins import FREE, num_slots, place, take_due
from balancer.spread import shares_of, spread_init, spread_std, spread_update

# ---- intervals --------------------------------------------------------------------------------------------


def _feed(state, score_LE, samples=1):
    """Scores as they come of forecasts with spread 1: root 0 forecast of an expert with many copies."""
    layers = score_LE.shape[0]
    for _ in range(samples):
        found = NumpyBands().tally(
            (0.5 + 1e-3 * score_LE) ** 2,
            np.full(score_LE.shape, 0.5),
            np.full(score_LE.shape, 1e-3),
            1.0,
            np.full(layers, 1e9),
            multiplier(state, 0),
        )
        state = conformal_update(state, 0, 1, *found)
    return state


def test_before_any_score_errors_are_taken_as_normal():
    for level, normal in ((0.9, 1.645), (0.5, 0.674), (0.99, 2.576)):
        # bins are 10 % wide, within which the quantile is interpolated
        assert multiplier(conformal_init(1, 1, 32, level), 0)[0] == pytest.approx(normal, rel=0.02)


@pytest.mark.parametrize("level", [0.05, 0.2, 0.5, 0.9, 0.99, 0.999])
def test_every_level_is_kept(level):
    rng, state, missed = np.random.default_rng(0), conformal_init(1, 1, 1000, level), []
    for _ in range(200):
        score_LE = np.abs(rng.standard_normal((1, 1000)))
        missed.append((score_LE > multiplier(state, 0)[:, None]).mean())
        state = _feed(state, score_LE)
    assert np.mean(missed[50:]) == pytest.approx(1 - level, abs=0.006, rel=0.1)


@pytest.mark.parametrize("scale", [0.3, 1.0, 20.0])
def test_the_multiplier_becomes_the_quantile_of_the_scores(scale):
    rng, state = np.random.default_rng(0), conformal_init(1, 2, 400, 0.9)
    for _ in range(60):
        state = _feed(state, scale * np.abs(rng.standard_normal((2, 400))))
    np.testing.assert_allclose(multiplier(state, 0), 1.645 * scale, rtol=0.08)


def test_a_miss_rate_off_its_promise_moves_the_aim_against_it():
    wide, narrow = conformal_init(1, 1, 50, 0.9), conformal_init(1, 1, 50, 0.9)
    _feed(wide, np.full((1, 50), 30.0))
    _feed(narrow, np.full((1, 50), 0.1))
    assert wide.alpha_HL[0, 0] < 0.1 < narrow.alpha_HL[0, 0]
    # one sample that was missed whole: gain 0.05 times (0.1 - 1)
    assert wide.alpha_HL[0, 0] == pytest.approx(0.1 - 0.05 * 0.9)


def test_a_horizon_without_scores_takes_the_shorter_one_grown_as_it_grew():
    lag_H = np.array([1, 10, 50, 50])
    state = conformal_init(4, 2, 200, 0.9)
    own = multiplier(state, 0)
    np.testing.assert_allclose(multipliers(state, lag_H), np.broadcast_to(own, (4, 2)))

    def feed(horizon, scale):
        for _ in range(40):
            score_LE = scale * np.abs(np.random.default_rng(0).standard_normal((2, 200)))
            root_LE = np.full((2, 200), 0.5)
            given = ((0.5 + 1e-3 * score_LE) ** 2, root_LE, np.full((2, 200), 1e-3), 1.0)
            found = NumpyBands().tally(*given, np.array([1e9, 0.0]), multiplier(state, horizon))
            conformal_update(state, horizon, 1, *found)

    feed(0, 1.0)
    first = multipliers(state, lag_H)[:, 0] / multiplier(state, 0)[0]
    np.testing.assert_allclose(first, [1, 10**0.15, 50**0.15, 50**0.15], rtol=1e-9)  # as a random walk
    feed(1, 2.0)
    second = multipliers(state, lag_H)[:, 0] / multiplier(state, 1)[0]
    grown = multiplier(state, 1)[0] / multiplier(state, 0)[0]
    np.testing.assert_allclose(second[2:], 5 ** np.log10(grown), rtol=1e-9)
    feed(2, 0.7)
    assert multipliers(state, lag_H)[2, 0] == multiplier(state, 2)[0]
    assert multipliers(state, lag_H)[3, 0] == multiplier(state, 2)[0]  # the same lag: no growth
    np.testing.assert_allclose(multipliers(state, lag_H)[:, 1], own[1])  # a layer without scores
    assert state.fed_HL.tolist() == [[40, 0], [40, 0], [40, 0], [0, 0]]


def test_long_lags_learn_more_slowly_since_their_forecasts_overlap():
    quick, slow = conformal_init(1, 1, 50, 0.9), conformal_init(1, 1, 50, 0.9)
    for state, lag in ((quick, 1), (slow, 51)):
        for _ in range(5):
            found = (np.eye(1, NUM_BINS + 2, 40) * 50, np.array([50.0]), np.array([50.0]))
            conformal_update(state, 0, lag, *found)
    assert slow.alpha_HL[0, 0] > quick.alpha_HL[0, 0]  # both were missed, the quick one answers more
    old = [state.score_HLB[0, 0].sum() - state.score_HLB[0, 0, 40] for state in (quick, slow)]
    assert old[0] == pytest.approx(50 * 0.8**5, rel=0.05) and old[1] == pytest.approx(
        50 * (14 / 15) ** 5, rel=0.05
    )


def test_a_layer_that_is_not_counted_learns_nothing():
    state = conformal_init(1, 2, 8, 0.9)
    before = state.score_HLB.copy()
    share_LE = np.full((2, 8), 1 / 8)
    found = NumpyBands().tally(
        share_LE, np.sqrt(share_LE), np.ones((2, 8)), 1.0, np.array([0.0, 800.0]), np.ones(2)
    )
    conformal_update(state, 0, 1, *found)
    np.testing.assert_array_equal(state.score_HLB[0, 0], before[0, 0])
    assert (state.score_HLB[0, 1] != before[0, 1]).any()
    assert found[1].tolist() == [0, 8]


def test_experts_that_should_get_nothing_are_not_counted():
    expected_LE = np.array([[0.5, 0.4999, 0.0001, 0.0]])
    found = NumpyBands().tally(
        expected_LE, np.sqrt(expected_LE), np.ones((1, 4)), 1.0, np.array([1000.0]), np.ones(1)
    )
    assert found[1].tolist() == [2]


def test_low_and_high_stay_shares_and_the_deviation_is_that_of_a_squared_normal():
    rng = np.random.default_rng(1)
    mean_HLE, std_LE = np.array([[[0.0, 0.04, 0.96]]]), np.array([[0.05, 0.05, 0.05]])
    low, high, std = NumpyBands().bands(mean_HLE, std_LE, np.ones(1), np.array([[1.645]]), 1.645)
    assert low[0, 0, 0] == 0 and (high <= 1).all() and (low <= mean_HLE).all()
    drawn = (np.sqrt(mean_HLE[0, 0, 1]) + 0.05 * rng.standard_normal(200000)) ** 2
    assert std[0, 0, 1] == pytest.approx(drawn.std(), rel=0.01)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64)])
def test_compiled_bands_count_and_draw_the_same(shape):
    rng, kernels = np.random.default_rng(2), _kernels()
    share_LE = rng.dirichlet(np.ones(shape[1]), size=shape[0])
    root_LE = np.sqrt(rng.dirichlet(np.ones(shape[1]), size=shape[0])).astype(np.float32)
    std_LE = rng.uniform(0, 0.1, shape).astype(np.float32)
    total_L = rng.choice([0.0, 3.0, 1e5], shape[0])
    given = (share_LE, root_LE, std_LE, 1.7, total_L, rng.uniform(0.5, 3, shape[0]))
    for one, other in zip(kernels.tally(*given), NumpyBands().tally(*given)):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == np.float64
    given = (share_LE[None], std_LE.astype(np.float64), np.array([2.0]), np.full((1, shape[0]), 1.3), 1.645)
    for one, other in zip(kernels.bands(*given), NumpyBands().bands(*given)):
        np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-16)


def test_scores_beyond_the_bins_fall_into_the_outer_ones():
    share_LE = np.array([[0.25, 0.25]])
    root_LE = np.array([[0.5, 1.0]])
    found = NumpyBands().tally(share_LE, root_LE, np.full((1, 2), 1e-9), 1.0, np.array([1e6]), np.ones(1))
    assert found[0][0, 0] == 1 and found[0][0, NUM_BINS + 1] == 1


def test_kernels_give_the_same_bits_wherever_their_arrays_lie():
    """Else a run that is resumed would differ from one that never stopped."""
    rng, kernels = np.random.default_rng(3), _kernels()
    level_KLE = rng.dirichlet(np.ones(6), size=(8, 3))
    theta_RLD, share_LE = 0.1 * rng.standard_normal((3, 3, 6)), rng.dirichlet(np.ones(6), size=3)
    weight_ML = rng.dirichlet(np.ones(11), size=3).T.copy()
    order = np.array([2, 0, 1, 3, 5, 6, 7])

    def at(array, offset):
        room = np.empty(array.nbytes + 128, dtype=np.uint8)
        start = -room.ctypes.data % 64 + offset
        placed = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[:] = array
        return placed

    found = []
    for offset in range(0, 64, 8):
        placed = [at(array, offset) for array in (level_KLE, theta_RLD, share_LE, weight_ML)]
        learnt = kernels.bank_learn(placed[0], placed[1], placed[2], order, -1.0)
        found.append([*learnt, kernels.bank_mix(placed[0], placed[1], placed[3], order, -1.0)])
    for other in found[1:]:
        for one, array in zip(found[0], other):
            np.testing.assert_array_equal(one, array)


# ---- spread -----------------------------------------------------------------------------------------------


def _spread_of(counts_WLE):
    spread, jumped = spread_init(*counts_WLE.shape[1:]), []
    for counts_LE in counts_WLE.astype(np.float64):
        share_LE, loaded_L = shares_of(counts_LE, spread)
        jumped_L, spread = spread_update(share_LE, counts_LE.sum(axis=-1), loaded_L, spread)
        jumped.append(jumped_L)
    return spread, np.array(jumped)


def test_spread_of_pure_noise_is_that_of_the_counts():
    rng = np.random.default_rng(4)
    share_E = np.array([0.5, 0.3, 0.15, 0.05])
    spreads = []
    for _ in range(40):  # each follows some ten samples only: their mean tells the bias
        counts_WLE = np.array([[rng.multinomial(4000, share_E)] for _ in range(40)])
        spreads.append(spread_std(_spread_of(counts_WLE)[0])[0])
    # a change is the difference of two samples: twice the variance of one, and once more the floor of noise
    expected_E = np.sqrt(3 * (1 - share_E) / (4 * 4000))
    np.testing.assert_allclose(np.mean(spreads, axis=0), expected_E, rtol=0.12)


def test_a_jump_is_told_from_noise_and_from_drift():
    rng = np.random.default_rng(5)
    share_3E = rng.dirichlet(np.ones(8), size=3)
    still = np.array([[rng.multinomial(8000, share_3E[0])] for _ in range(60)])
    assert not _spread_of(still)[1].any()
    jumping = np.array([[rng.multinomial(8000, share_3E[w // 20])] for w in range(60)])
    assert np.flatnonzero(_spread_of(jumping)[1]).tolist() == [20, 40]
    path_WE = np.linspace(share_3E[0], share_3E[1], 60)
    moving = np.array([[rng.multinomial(8000, share_E)] for share_E in path_WE])
    assert not _spread_of(moving)[1].any()


def test_a_large_first_change_is_a_jump():
    counts_WLE = np.array([[[50, 50]], [[90, 10]], [[90, 10]]])
    spread, jumped = _spread_of(counts_WLE)
    assert jumped[:, 0].tolist() == [False, True, False]
    assert spread.age_L[0] == 1 and spread.seen_L[0] == 3


def test_a_layer_without_load_keeps_its_shares():
    spread, _ = _spread_of(np.array([[[3, 1]], [[0, 0]]]))
    assert spread.last_LE.tolist() == [[0.75, 0.25]] and spread.seen_L.tolist() == [1]


# ---- origins ----------------------------------------------------------------------------------------------


def test_origins_come_due_at_the_first_sample_at_or_after_their_target():
    step_Q = np.full(8, FREE)
    for step in (0, 10, 20, 30):
        assert place(step_Q, 25, step) != FREE
    assert take_due(step_Q, 25, 20, 10.0) == []
    first = take_due(step_Q, 25, 30, 10.0)
    assert len(first) == 1 and step_Q[first[0]] == FREE
    assert len(take_due(step_Q, 25, 46, 10.0)) == 2  # those of 10 and 20, oldest first


def test_an_origin_that_its_target_missed_by_far_is_dropped_unscored():
    step_Q = np.full(8, FREE)
    place(step_Q, 100, 0)
    assert take_due(step_Q, 100, 151, 10.0) == [] and (step_Q == FREE).all()


def test_a_long_horizon_with_many_samples_keeps_origins_apart_and_never_runs_out_of_slots():
    step_Q, kept, scored = np.full(8, FREE), [], 0
    for step in range(2000):
        scored += len(take_due(step_Q, 500, step, 1.0))
        if place(step_Q, 500, step) != FREE:
            kept.append(step)
    assert min(np.diff(kept)) >= 500 / 7 and max(np.diff(kept)) <= 75
    assert scored >= len(kept) - 8


def test_slots_fit_a_bound_of_memory():
    assert num_slots(1000) == 64 and num_slots(2**30) == 8
    for values in (3 * 9 * 58 * 256, 2**18, 2**19 + 1):
        assert (
            8 < num_slots(values) < 64
            and (num_slots(values) + 1) * values > 2**23 >= num_slots(values) * values
        )
