"""The noise of counting: square-root shares, what is estimated of it with and without drift, and draws."""

import numpy as np
import pytest

from balancer.dispersion import (
    current_dispersion,
    draw_counts,
    estimate_dispersion,
    init_dispersion,
    sampling_std,
    shares_from_sqrt,
    sqrt_shares,
    update_dispersion,
)
from balancer.synth_kinds import synth_trace
from balancer.trace import load_trace

# relative standard error of phi from n expert-samples: sqrt(2 * 4.72 / n), with 4.72 the sum of the squared
# weights of the measurement's autocovariances (1 - 7/3 cos + 4/3 cos 2 + 1/3 cos 4 - 1/3 cos 5); walks add
PHIS = [1.0, 2.3, 8.0, 20.0]


def _online(counts_WLE, memory=50.0):
    state = init_dispersion(counts_WLE.shape[1], counts_WLE.shape[2], memory)
    for counts_LE in counts_WLE:
        state = update_dispersion(counts_LE, state)
    return current_dispersion(state)


def test_square_root_shares_have_the_same_noise_for_heavy_and_light_experts():
    p, copies = np.array([0.01, 0.04, 0.15, 0.3, 0.5]), 20000
    for phi in (1.0, 5.0):
        y = sqrt_shares(draw_counts(np.random.default_rng(1), np.tile(p, (20000, 1)), copies, phi))
        # standard error of a variance from 20,000 draws: 1 %; next term of the delta method: phi/(N p), 2.5 %
        np.testing.assert_allclose(y.var(axis=0), phi * (1 - p) / (4 * copies), rtol=0.06)


def test_the_way_back_is_exact_with_the_variance_and_biased_without():
    p, phi, copies = np.array([0.002, 0.048, 0.95]), 4.0, 4000
    counts = draw_counts(np.random.default_rng(2), np.tile(p, (50000, 1)), copies, phi)
    y = sqrt_shares(counts)
    with_var = shares_from_sqrt(y.mean(axis=0), y.var(axis=0))
    np.testing.assert_allclose(with_var, counts.mean(axis=0) / copies, rtol=1e-10)
    without = shares_from_sqrt(y.mean(axis=0))
    assert without[0] < 0.93 * p[0]  # 8 copies with 4 times the noise: 1/8 is missing


def test_the_way_back_of_nothing_is_uniform_and_nonsense_is_refused():
    assert shares_from_sqrt([[0.0, 0.0], [-0.3, 0.5]]).tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert np.isnan(sqrt_shares([0, 0])).all()
    for mean, var in (([np.nan], 0.0), ([0.1], -1.0), ([0.1], np.inf)):
        with pytest.raises(ValueError, match="finite"):
            shares_from_sqrt(mean, var)


def test_sampling_std_is_that_of_draws():
    p = np.array([0.1, 0.9])
    counts = draw_counts(np.random.default_rng(3), np.tile(p, (40000, 1)), 500, 3.0)
    # 40,000 draws: 0.35 % standard error; four of them
    np.testing.assert_allclose((counts / 500).std(axis=0), sampling_std(p, 500, 3.0), rtol=0.015)
    for bad in ((1.1, 10, 1), (0.5, 0, 1), (0.5, 10, -1), (np.nan, 10, 1)):
        with pytest.raises(ValueError, match=r"share must lie|copies must be"):
            sampling_std(*bad)


@pytest.mark.parametrize("phi", PHIS)
def test_phi_is_found_in_constant_load(phi):
    trace = synth_trace("constant", num_samples=400, num_layers=4, num_experts=32, dispersion=phi)
    found = estimate_dispersion(trace.tokens_per_expert_WLE)
    # 400 * 31: 2.8 % a layer; four standard errors
    np.testing.assert_allclose(found, phi, rtol=0.11)
    # the running one: 8.7 % a layer, measured over 40 layers and 10 times
    np.testing.assert_allclose(_online(trace.tokens_per_expert_WLE), phi, rtol=0.35)


@pytest.mark.parametrize("phi", PHIS)
def test_drift_does_not_inflate_phi_as_it_does_plain_differences(phi):
    sizes = {"num_samples": 400, "num_layers": 6, "num_experts": 16}
    counts = synth_trace("drift", sd=0.02, dispersion=phi, **sizes).tokens_per_expert_WLE
    # a walk of q = sd^2 p N / phi = 1.6 / phi times the noise variance raises the standard error to 7 % a
    # layer at most
    assert estimate_dispersion(counts).mean() == pytest.approx(phi, rel=0.12)
    shares = counts / 65536
    plain = (np.diff(shares, axis=0) ** 2).mean(axis=(0,)) * 65536 / 2
    spread = shares.mean(axis=0) * (1 - shares.mean(axis=0))
    # plain differences show phi + p N sd^2 / (2 (1 - p)) = phi + 0.9 and more
    assert (plain / spread).mean() > phi + 0.5


@pytest.mark.parametrize("kind", ["balanced-by-bias", "rotation", "step", "collapse-slow", "bursts"])
def test_trends_cycles_and_jumps_do_not_inflate_phi(kind):
    options = {
        "collapse-slow": {"end": 0.5},
        "bursts": {"length": 1, "num_bursts": 4},
        "rotation": {"period": 100},  # faster cycles are taken off the noise, as said in the docstring
    }.get(kind, {})
    trace = synth_trace(kind, num_samples=400, num_layers=6, dispersion=2.3, seed=1, **options)
    # 6 layers of 400 * 15: 1.6 %; curvature of the trends (2nd differences) and experts at 1/K add some
    assert estimate_dispersion(trace.tokens_per_expert_WLE).mean() == pytest.approx(2.3, rel=0.15)
    assert _online(trace.tokens_per_expert_WLE).mean() == pytest.approx(2.3, rel=0.3)


def test_distinct_experts_of_a_token_count_with_less_noise_than_a_multinomial():
    rng = np.random.default_rng(4)
    # 4 of 8 experts, all alike: variance of a count T * r (1 - r), r = 1/2, against N p (1 - p) = T / 2 * 7/8
    chosen = rng.random((300, 200, 8)).argsort(axis=-1)[..., :4]
    counts = np.stack([np.bincount(row.ravel(), minlength=8) for row in chosen])[:, None]
    expected = (1 / 4) / (4 / 8 * 7 / 8)
    assert estimate_dispersion(counts)[0] == pytest.approx(expected, rel=0.25)  # 2400: 6.3 %, four


def test_the_running_one_follows_a_change_of_noise_and_passes_a_jump():
    quiet = synth_trace("constant", num_samples=200, num_experts=32).tokens_per_expert_WLE
    loud = synth_trace("constant", num_samples=200, num_experts=32, dispersion=12.0).tokens_per_expert_WLE
    # memory of 10 samples for the level: 9 % a layer; four standard errors
    np.testing.assert_allclose(_online(np.concatenate([quiet, loud])), 12.0, rtol=0.36)
    # after 60 samples a loud time is forgotten: e^-6 of 12 / 1
    np.testing.assert_allclose(_online(np.concatenate([loud, quiet[:60]])), 1.0, rtol=0.4)
    other = synth_trace("constant", seed=9, num_samples=30, num_experts=32).tokens_per_expert_WLE
    np.testing.assert_allclose(_online(np.concatenate([quiet, other])), 1.0, rtol=0.35)


def test_a_load_that_stood_still_does_not_blind_the_running_one():
    still = np.tile(np.array([[100, 200, 300, 400]]), (60, 1, 1))
    assert _online(still).tolist() == [0.0]
    noisy = draw_counts(np.random.default_rng(5), np.tile(still[0] / 1000, (400, 1, 1)), 1000, 4.0)
    assert _online(np.concatenate([still, noisy]))[0] == pytest.approx(4.0, rel=0.6)


def test_nothing_to_tell_is_nan():
    rng = np.random.default_rng(6)
    window = rng.multinomial(1000, [0.25] * 4, size=(30, 3))
    window[:, 1] = 0
    window[:, 2] = rng.multinomial(12, [0.25] * 4, size=30)  # 3 copies each
    for phi in (estimate_dispersion(window), _online(window)):
        assert np.isnan(phi).tolist() == [False, True, True]
    assert np.isnan(estimate_dispersion(window[:5])).all() and np.isnan(_online(window[:5])).all()
    assert np.isnan(estimate_dispersion(np.full((20, 1, 1), 7))).all()
    assert np.isnan(current_dispersion(init_dispersion(2, 3))).all()


def test_samples_of_unlike_size_are_put_on_one_scale():
    rng = np.random.default_rng(7)
    copies = np.where(np.arange(400)[:, None] % 2, 20000, [60000, 25000])
    p = np.broadcast_to(rng.dirichlet(np.full(32, 2.0)), (400, 2, 32))
    counts = draw_counts(rng, p, copies, 3.0)
    np.testing.assert_allclose(estimate_dispersion(counts), 3.0, rtol=0.13)
    np.testing.assert_allclose(_online(counts), 3.0, rtol=0.35)


def test_an_update_leaves_the_state_before_as_it_is():
    state = init_dispersion(1, 4)
    for _ in range(8):
        state = update_dispersion([[10, 20, 30, 40]], state)
    copied = [part.copy() for part in state]
    update_dispersion([[40, 30, 20, 10]], state)
    assert all((a == b).all() for a, b in zip(copied, state))


def test_bad_input_of_the_estimators_is_refused():
    with pytest.raises(ValueError, match=r"expected \[W, L, E\]"):
        estimate_dispersion([[1, 2]])
    with pytest.raises(ValueError, match="memory=2"):
        init_dispersion(1, 4, memory=2)
    with pytest.raises(ValueError, match="num_layers=0"):
        init_dispersion(0, 4)
    with pytest.raises(ValueError, match=r"expected \[L, E\] = \(1, 4\)"):
        update_dispersion([[1, 2]], init_dispersion(1, 4))
    with pytest.raises(ValueError, match="not a load"):
        update_dispersion([[1, 2, -3, 4]], init_dispersion(1, 4))


@pytest.mark.parametrize("phi", [0.3, 1.0, 2.3, 20.0])
def test_draws_have_exact_sums_their_mean_and_phi_times_the_variance(phi):
    p, copies, num = np.array([0.02, 0.08, 0.3, 0.6]), 3000, 20000
    counts = draw_counts(np.random.default_rng(8), np.tile(p, (num, 1)), copies, phi)
    assert (counts.sum(axis=-1) == copies).all() and counts.dtype == np.int64 and counts.min() >= 0
    variance = max(phi, 1.0) * copies * p * (1 - p)
    assert (np.abs(counts.mean(axis=0) - copies * p) < 4.5 * np.sqrt(variance / num)).all()
    # 1 % standard error of a variance, 2 % for the skewed light ones; four of them
    np.testing.assert_allclose(counts.var(axis=0), variance, rtol=0.06)


def test_draws_of_one_expert_of_none_and_of_unlike_rows():
    rng = np.random.default_rng(9)
    assert draw_counts(rng, [[1.0]], 7, 5.0).tolist() == [[7]]
    rows = draw_counts(rng, [[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]], [5, 0, 1], [3.0, 3.0, 9.0])
    assert rows[:2].tolist() == [[5, 0], [0, 0]] and rows[2].sum() == 1
    phi = np.where(np.arange(8000) % 2, 1.0, 10.0)
    counts = draw_counts(rng, np.full((8000, 2), 0.5), 400, phi)
    # 4000 draws each: 2.2 %
    assert counts[1::2, 0].var() == pytest.approx(100, rel=0.1)
    assert counts[::2, 0].var() == pytest.approx(1000, rel=0.1)
    for arguments, message in [
        (([[0.0, 0.0]], 5), "row of zeros"),
        (([[0.5, 0.5]], -1), "copies=-1"),
        (([[0.5, 0.5]], 2.5), "copies=2.5"),
        (([[0.5, 0.5]], 5, np.nan), "phi must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            draw_counts(rng, *arguments)


def test_on_a_real_run_phi_falls_from_the_collapse_to_a_settled_part(traces_dir):
    counts = load_trace(traces_dir / "smartmoe.npz").tokens_per_expert_WLE
    recovery, settled = (estimate_dispersion(counts[a:b]) for a, b in ((8, 60), (250, 501)))
    # heavy experts show 40 to 80, light ones 2 to 3; the layers' median of means is what a forecast needs
    assert 10 < np.median(settled) < 35
    assert np.median(recovery) > np.median(settled)
    running = _online(counts)
    assert 0.5 < np.median(running) / np.median(settled) < 2
