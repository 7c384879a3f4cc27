"""The bank's arithmetic: losses, normal equations, weights, evidence, jumps; figures of a real trace."""

import numpy as np
import pytest

from balancer.backtest import backtest
from balancer.bank import NumpyPasses, bank, priors, share_evidence, weights
from balancer.bank_config import BankConfig
from balancer.bank_jumps import Learnt, answer_jumps, aside_init
from balancer.forecast import CompiledPasses, forecaster
from balancer.forecast_build import NEVER, Member, Sample, is_evidence
from balancer.trace import load_trace

PASSES = [NumpyPasses(), CompiledPasses()]


def _sample(share_LE, *, step=10, jumped=False, restart=False, since=0, first=0, starved=False, lag=(1,)):
    share_LE = np.asarray(share_LE, dtype=np.float64)
    L, H = len(share_LE), len(lag)
    return Sample(
        step=step,
        share_LE=share_LE,
        total_L=np.full(L, 1000.0),
        loaded_L=np.ones(L, dtype=np.bool_),
        jumped_L=np.full(L, jumped),
        restart_L=np.full(L, restart),
        since_L=np.full(L, since),
        first_L=np.full(L, first),
        starved_HL=np.full((H, L), starved),
        lag_H=np.array(lag),
        interval=10.0,
    )


# ---- passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", PASSES, ids=["numpy", "numba"])
def test_losses_and_normal_equations_are_what_they_say(passes):
    config = BankConfig(
        gains=(1.0, 0.5, 0.25), reference=1, regressors=(0, 2), memories=(0.9,), decay_rate=0.1
    )
    level_KE = np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4]])
    share_E, theta_D, fade = np.array([0.1, 0.7, 0.2]), np.array([0.5, -0.25]), 0.3
    loss_ML, gram_LDD, moment_LD = passes.learn(
        config, level_KE[:, None].copy(), theta_D[None, None].copy(), share_E[None].copy(), fade
    )
    faded_E = 0.7 * level_KE[1] + 0.3 / 3
    f_E = level_KE[1] + 0.5 * (level_KE[0] - level_KE[1]) - 0.25 * (level_KE[2] - level_KE[1])
    expected = [*level_KE, faded_E, f_E / f_E.sum()]
    np.testing.assert_allclose(loss_ML[:, 0], [0.5 * np.abs(m - share_E).sum() for m in expected], rtol=1e-12)
    weight_E, residual_E = 1 / np.sqrt(level_KE[1]), share_E - level_KE[1]
    z_DE = np.array([level_KE[0] - level_KE[1], level_KE[2] - level_KE[1]])
    size = (weight_E * residual_E**2).sum()
    np.testing.assert_allclose(gram_LDD[0], (z_DE * weight_E) @ z_DE.T / size, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(moment_LD[0], z_DE @ (weight_E * residual_E) / size, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("passes", PASSES, ids=["numpy", "numba"])
def test_a_regression_that_leaves_nothing_is_uniform(passes):
    config = BankConfig(gains=(1.0, 0.5), reference=0, regressors=(1,), memories=(0.9,))
    level_KLE = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    weight_ML = np.array([[0.0], [0.0], [1.0]])
    theta_RLD = np.array([[[-1.0]]])  # 1 - (0 - 1) = 2 and 0 - (1 - 0) = -1: clipped to (1, 0)
    mean_LE = passes.mix(config, level_KLE, theta_RLD, weight_ML, 0.0)
    np.testing.assert_allclose(mean_LE, [[1.0, 0.0]])
    nothing_KLE = np.zeros((2, 1, 2))
    np.testing.assert_allclose(passes.mix(config, nothing_KLE, theta_RLD, weight_ML, 0.0), [[0.5, 0.5]])


def test_the_ridge_is_that_of_the_scaled_equations():
    rng, config = np.random.default_rng(0), BankConfig(ridge=0.2)
    root = rng.standard_normal((2, 3, 6, 9))
    gram_RLDD, moment_RLD = np.einsum("rldk,rlek->rlde", root, root), rng.standard_normal((2, 3, 6))
    theta_RLD = NumpyPasses().solve(config, gram_RLDD, moment_RLD)
    np.testing.assert_allclose(CompiledPasses().solve(config, gram_RLDD, moment_RLD), theta_RLD, rtol=1e-9)
    scaled = gram_RLDD + 0.2 * np.einsum("rldd,de->rlde", gram_RLDD, np.eye(6))
    np.testing.assert_allclose(
        np.einsum("rlde,rle->rld", scaled, theta_RLD), moment_RLD, rtol=1e-5, atol=1e-6
    )


# ---- weights ----------------------------------------------------------------------------------------------


def test_priors_favour_the_last_sample_at_short_lags_and_believe_in_a_decay():
    config = BankConfig(bonus=300.0, bonus_power=1.5, regression_weight=0.2)
    prior_HM = priors(config, np.array([1, 4, 100]), 1)
    means, others = len(config.gains), len(config.memories) + 1
    np.testing.assert_allclose(prior_HM.sum(axis=1), 1.0)
    np.testing.assert_allclose(prior_HM[:, 0] / prior_HM[:, 1], [300.0, 300.0 / 8, 1.0])
    np.testing.assert_allclose(prior_HM[:, means:] / prior_HM[:, 1:2], np.full((3, others), 0.2))
    told_HM = priors(BankConfig(decay_rate=0.1), np.array([10]), 0)
    assert told_HM[0, means] == pytest.approx(told_HM[0, :means].sum())


def test_a_fixed_share_of_the_prior_comes_back_at_every_step():
    config, prior_M = BankConfig(switch=0.1), np.array([0.5, 0.3, 0.2])
    evidence_ML = share_evidence(config, np.array([[0.0], [-1.0], [-900.0]]), prior_M)
    weight_M = prior_M * np.exp([0.0, -1.0, -900.0])
    expected_M = 0.9 * weight_M / weight_M.sum() + 0.1 * prior_M
    np.testing.assert_allclose(prior_M * np.exp(evidence_ML[:, 0]), expected_M, rtol=1e-12)


def test_longer_horizons_borrow_evidence_from_shorter_ones():
    config = BankConfig(gains=(1.0, 0.5), reference=1, regressors=(), memories=(), bonus=1.0, borrow=0.5)
    evidence_HML = np.array([[[2.0], [0.0]], [[0.0], [0.0]], [[0.0], [1.0]]])
    weight_HML = weights(config, np.array([1, 10, 50]), evidence_HML)
    odds_H = np.log(weight_HML[:, 0, 0] / weight_HML[:, 1, 0])
    np.testing.assert_allclose(odds_H, [2.0, 1.0, 0.5 - 1.0])


def test_weights_move_by_the_loss_over_its_running_size():
    config = BankConfig(gains=(1.0, 0.5), reference=1, regressors=(), memories=(), switch=0.0, eta=6.0)
    member = bank(config, NumpyPasses())
    state = member.init(1, 12, np.array([10]))
    losses, scale, odds = [], None, 0.0
    rng = np.random.default_rng(0)
    for w in range(5):
        levels = state[1].level_KLE[:, 0].copy()
        share_E = rng.dirichlet(np.ones(12))
        state = member.update(_sample([share_E], step=1 + 10 * w), state)
        if w:  # what was forecast one sample ago has come
            loss_M = 0.5 * np.abs(levels.astype(np.float32) - share_E).sum(axis=-1)
            scale = loss_M.mean() if scale is None else 0.9 * scale + 0.1 * loss_M.mean()
            odds -= 6.0 * (loss_M[0] - loss_M[1]) / scale
            losses.append(loss_M)
    evidence_M = state[1].evidence_HML[0, :, 0]
    assert evidence_M[0] - evidence_M[1] == pytest.approx(odds, rel=1e-6)
    slower = member.init(1, 3, np.array([10]))  # a quarter of 12 experts: a quarter of the speed
    for w in range(2):
        slower = member.update(_sample([[0.2, 0.3, 0.5][w:] + [0.2, 0.3, 0.5][:w]], step=1 + 10 * w), slower)
    loss = 0.5 * np.abs(np.array([0.3, 0.5, 0.2]) - np.array([0.2, 0.3, 0.5])).sum()
    assert loss > 0 and (slower[1].evidence_HML == 0).all()  # both means were the first sample: no difference


def test_a_slow_member_is_scored_and_mixed_as_the_others_are():
    right_E, wrong_E = np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.3, 0.6])

    def constant(share_E):
        mean = np.broadcast_to(share_E, (1, 1, 3))
        return Member(lambda L, E, H: (), lambda sample, state: state, lambda lag_H, state: mean)

    config = BankConfig(gains=(1.0,), reference=0, regressors=(), memories=(), eta=20.0)
    member = bank(config, NumpyPasses(), [constant(right_E), constant(wrong_E)])
    state, rng = member.init(1, 3, np.array([10])), np.random.default_rng(0)
    for w in range(60):
        noisy = right_E + rng.uniform(-0.09, 0.09, 3)
        state = member.update(_sample([noisy / noisy.sum()], step=1 + 10 * w), state)
    weight_M = weights(config, np.array([1]), state[1].evidence_HML)[0, :, 0]
    assert weight_M[1] > 0.9 and weight_M[2] < 0.05
    np.testing.assert_allclose(member.mean(np.array([1]), state)[0, 0], right_E, atol=0.03)


# ---- evidence and jumps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "starved", "expected"),
    [(49, False, False), (50, False, True), (49, True, True), (19, True, False)],
)
def test_forecasts_from_before_a_jump_count_only_where_there_is_nothing_else(made, starved, expected):
    sample = _sample([[0.5, 0.5]], step=90, since=50, first=20, starved=starved)
    assert is_evidence(sample, 0, made).tolist() == [expected]


def test_a_layer_that_was_never_loaded_has_no_evidence():
    sample = _sample([[0.5, 0.5]], since=NEVER, first=NEVER, starved=True)
    assert not is_evidence(sample, 0, 5).any()


@pytest.mark.parametrize("since", [0, 21])
def test_the_bank_learns_from_evidence_only(since):
    member = bank(BankConfig(), NumpyPasses())
    state, rng = member.init(1, 12, np.array([10])), np.random.default_rng(0)
    for w in range(3):
        state = member.update(_sample([rng.dirichlet(np.ones(12))], step=1 + 10 * w), state)
    before = state[1].gram_HRLDD.copy(), state[1].evidence_HML.copy()
    # the forecast made at step 21 is met; the one before it was already
    after = _sample([rng.dirichlet(np.ones(12))], step=31, since=since + 1)
    state = member.update(after, state)
    changed = (state[1].gram_HRLDD != before[0]).any(), (state[1].evidence_HML != before[1]).any()
    assert changed == ((True, True) if since == 0 else (False, False))


def _learnt(num_layers=2):
    rng = np.random.default_rng(0)
    return Learnt(
        level_KLE=rng.dirichlet(np.ones(4), size=(3, num_layers)),
        age_L=np.full(num_layers, 99),
        evidence_HML=rng.standard_normal((1, 3, num_layers)),
        gram_HRLDD=rng.standard_normal((1, 1, num_layers, 2, 2)),
        moment_HRLD=rng.standard_normal((1, 1, num_layers, 2)),
    )


def test_a_jump_of_a_settled_layer_restarts_its_means_and_any_jump_its_weights():
    for restart in (True, False):
        learnt = _learnt()
        before = Learnt(*(array.copy() for array in learnt))
        sample = _sample([[0.7, 0.1, 0.1, 0.1], [0.25] * 4], jumped=True, restart=restart)
        sample.jumped_L[1] = sample.restart_L[1] = False
        answer_jumps(sample, before.level_KLE[2], learnt, aside_init(learnt))
        assert (learnt.evidence_HML[:, :, 0] == 0).all()
        np.testing.assert_allclose(learnt.gram_HRLDD[:, :, 0], 0.1 * before.gram_HRLDD[:, :, 0])
        np.testing.assert_allclose(learnt.moment_HRLD[:, :, 0], 0.1 * before.moment_HRLD[:, :, 0])
        wanted = np.broadcast_to(sample.share_LE[0], (3, 4)) if restart else before.level_KLE[:, 0]
        np.testing.assert_array_equal(learnt.level_KLE[:, 0], wanted)
        assert learnt.age_L.tolist() == ([0, 99] if restart else [99, 99])
        for now, then in ((learnt.level_KLE[:, 1], before.level_KLE[:, 1]),):
            np.testing.assert_array_equal(now, then)  # a layer that did not jump


@pytest.mark.parametrize(
    ("path", "back"),
    [
        ([0.7, 0.25], True),  # at once back
        ([0.7, 0.7, 0.7, 0.25], True),
        ([0.7, 0.33], True),  # most of the way, in one sample
        ([0.7, 0.55, 0.4, 0.33, 0.28], False),  # gliding back
        ([0.7, 0.5], False),
        ([0.7] * 25 + [0.25], False),  # too late
    ],
)
def test_what_was_known_comes_back_with_a_load_that_jumps_back(path, back):
    learnt = _learnt(1)
    learnt.level_KLE[:] = 0.25
    before, aside = Learnt(*(array.copy() for array in learnt)), aside_init(learnt)
    for i, share in enumerate(path):
        sample = _sample([[share, *[(1 - share) / 3] * 3]], jumped=i == 0, restart=i == 0)
        answer_jumps(sample, before.level_KLE[2], learnt, aside)
        learnt.level_KLE[0] = sample.share_LE  # the first mean is the last sample
    np.testing.assert_array_equal(
        learnt.evidence_HML, before.evidence_HML if back else 0 * before.evidence_HML
    )
    assert (learnt.age_L[0] == 99) == back


# ---- a real trace -----------------------------------------------------------------------------------------


def test_the_default_beats_every_constant_gain_on_a_real_collapse(traces_dir):
    """Against the best exponential mean in hindsight, at 10, 100 and 500 steps: see experiments/LOG.md."""
    trace = load_trace(traces_dir / "smartmoe.npz")
    names = {"regime": forecaster("regime")}
    names |= {f"ema {gain}": forecaster("ema", gain=gain) for gain in (1.0, 0.7, 0.6, 0.45, 0.4)}
    found = backtest(trace, names, (10, 100, 500))

    def of_regime(**slice_):
        return [row for row in found.table(**slice_) if row.forecaster == "regime"]

    for row, least in zip(of_regime(), (0.07, 0.015, 0.007)):
        assert row.ratio_to_best_single < 1 - least
    for row in of_regime(last=200):
        assert row.ratio_to_best_single <= 1
    for row, most in zip(of_regime(first=40), (1.005, 1, 1)):  # persistence is hard to beat in a collapse
        assert row.ratio_to_best_single <= most
    for regime in ("quiet", "moving", "after"):
        assert all(0.86 < row.live_coverage < 0.93 for row in of_regime(regime=regime))
