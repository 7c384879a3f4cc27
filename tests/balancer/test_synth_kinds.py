"""Synthetic traces by kind: each one's exact property, exact sums, the limit of top-k, and the noise."""

import numpy as np
import pytest

from balancer.metrics import load_shares, normalized_entropy, total_variation
from balancer.synth_kinds import KINDS, synth_trace, true_shares
from balancer.trace import check_conservation

SMALL = {"num_samples": 60, "num_layers": 2, "num_experts": 8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(3, 2), (8, 1), (16, 4), (9, 8)])
def test_sums_are_exact_and_no_expert_gets_a_token_twice(kind, num_experts, top_k):
    options = {"spread": 3.0} if "spread" in KINDS[kind].options else {}
    options |= {"num_groups": 2} if kind == "correlated" else {}
    copies = 1200 * top_k
    sizes = {"num_samples": 40, "num_layers": 3, "num_experts": num_experts, "top_k": top_k}
    trace = synth_trace(kind, copies=copies, dispersion=3.0, **sizes, **options)
    check_conservation(trace, copies)
    assert trace.tokens_per_expert_WLE.max() <= 1200
    shares = true_shares(kind, **sizes, **options)
    assert shares.shape == trace.tokens_per_expert_WLE.shape
    np.testing.assert_allclose(shares.sum(axis=-1), 1.0, rtol=1e-12)
    # one part in 1e12: the last normalisation of capped shares
    assert shares.max() <= (1 + 1e-12) / top_k and shares.min() >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_one_trace_and_the_truth_does_not_depend_on_the_noise(kind):
    counts = synth_trace(kind, seed=3, copies=8000, **SMALL).tokens_per_expert_WLE
    assert (counts == synth_trace(kind, seed=3, copies=8000, **SMALL).tokens_per_expert_WLE).all()
    assert (counts != synth_trace(kind, seed=4, copies=8000, **SMALL).tokens_per_expert_WLE).any()
    shares = true_shares(kind, seed=3, **SMALL)
    for copies, dispersion in ((8000, 1.0), (10**9, 2.0)):
        counts = synth_trace(
            kind, seed=3, copies=copies, dispersion=dispersion, **SMALL
        ).tokens_per_expert_WLE
        p = shares
        room = 1 - 2 * p  # near 1/K the limit takes from the counts: left out
        z = (counts - copies * p)[room > 0.02] / np.sqrt(dispersion * copies * p * (1 - p) + 1)[room > 0.02]
        # 900 draws: a normal one exceeds 5.5 deviations with probability 4e-5 in all; rare counts have tails
        assert np.abs(z).max() < 6.5


def test_kinds_differ():
    made = [synth_trace(kind, copies=8000, **SMALL).tokens_per_expert_WLE.tobytes() for kind in KINDS]
    assert len(set(made)) == len(KINDS)


@pytest.mark.parametrize("phi", [1.0, 2.3, 8.0, 20.0])
def test_constant_noise_has_phi_times_multinomial_variance(phi):
    sizes = {"num_samples": 600, "num_layers": 4, "num_experts": 16}
    counts = synth_trace("constant", copies=65536, dispersion=phi, **sizes).tokens_per_expert_WLE
    p = true_shares("constant", **sizes)[0]
    assert (true_shares("constant", **sizes) == p).all()
    chi2 = ((counts - 65536 * p) ** 2 / (65536 * p * phi)).sum(axis=-1).mean(axis=0) / 15
    # mean of 4 * 600 chi-squares of 15 degrees each: standard error sqrt(2 / 36000) = 0.75 %; four of them
    assert chi2.mean() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_zipf_has_its_slope(exponent):
    shares = true_shares("zipf", num_experts=64, exponent=exponent)[7]
    falling = np.sort(shares, axis=-1)[:, ::-1]
    slope = np.polyfit(np.log(np.arange(1, 65)), np.log(falling).T, 1)[0]
    np.testing.assert_allclose(slope, -exponent, rtol=1e-10)
    # an expert is heavy in one layer and not in all
    assert len(set(shares.argmax(axis=-1).tolist())) > 1


def test_drift_of_log_ratios_grows_in_proportion_to_time():
    shares = true_shares("drift", num_samples=400, num_layers=60, num_experts=32, sd=0.02)
    ratio = np.log(shares[..., ::2] / shares[..., 1::2])  # 16 independent walks a layer
    for span in (1, 20, 399):
        variance = ((ratio[span] - ratio[0]) ** 2).mean()
        # 960 walks: standard error sqrt(2 / 960) = 4.6 %; four of them
        assert variance / (2 * 0.02**2 * span) == pytest.approx(1.0, abs=0.18), span


def test_step_is_one_change_at_its_sample():
    shares = true_shares("step", at=17, **SMALL)
    assert (shares[:17] == shares[0]).all() and (shares[17:] == shares[-1]).all()
    assert total_variation(shares[16], shares[17]).min() > 0.1
    assert (true_shares("step", **SMALL)[29] != true_shares("step", **SMALL)[30]).any()


def test_rotation_repeats_exactly_after_its_period_and_not_before():
    shares = true_shares("rotation", period=25, num_samples=100)
    assert (shares[25:] == shares[:-25]).all()
    centred = shares - shares[:25].mean(axis=0)
    correlation = [float((centred[lag : lag + 50] * centred[:50]).sum()) for lag in range(26)]
    assert correlation[25] == pytest.approx(correlation[0])
    assert max(correlation[1:25]) < 0.98 * correlation[0]  # cos(2 pi / 25) = 0.969 at lags 1 and 24
    # three profiles whose weights sum to 1 at all times: shares move in a plane
    assert np.linalg.matrix_rank(centred[:, 0], tol=1e-10) == 2


def test_every_layer_has_exactly_its_bursts_and_their_odds():
    shares = true_shares("bursts", num_bursts=7, length=4, factor=5.0, num_samples=80)
    quiet = shares[0]
    raised = shares > quiet * (1 + 1e-9)
    assert (raised.sum(axis=-1) <= 1).all()
    on = raised.any(axis=-1)
    assert (np.diff(on.astype(int), axis=0) == 1).sum(axis=0).tolist() == [7] * 4
    assert on.sum(axis=0).tolist() == [28] * 4
    odds = shares / (1 - shares)
    np.testing.assert_allclose((odds / odds[0])[raised], 5.0)
    places = [set(np.flatnonzero(on[:, layer]).tolist()) for layer in range(4)]
    assert places[0] != places[1]


def _height(shares, top_k=2):
    lowest = np.log(top_k) / np.log(shares.shape[-1])
    return (normalized_entropy(shares) - lowest) / (1 - lowest)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_fast_collapse_takes_its_samples(length):
    height = _height(true_shares("collapse-fast", at=10, length=length, num_samples=30, num_experts=32))
    assert np.abs(height[:10] - 0.98).max() < 1e-4
    assert np.abs(height[9 + length :] - 0.05).max() < 1e-4
    if length > 1:
        assert np.abs(height[10] - (0.98 - 0.93 / length)).max() < 1e-4


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_slow_collapse_falls_in_a_straight_line(top_k):
    shares = true_shares("collapse-slow", num_samples=41, num_layers=3, num_experts=64, top_k=top_k, frac=0.5)
    height = _height(shares, top_k)
    # a quarter of 41 samples, then 20 samples (0.5 * 41, rounded to even) down; bisection to 1e-6 of ln gain
    expected = np.interp(np.arange(41), [9, 29], [0.98, 0.05])
    np.testing.assert_allclose(height, np.repeat(expected[:, None], 3, axis=1), atol=1e-4)


def test_correlated_log_shares_have_the_rank_of_their_groups():
    shares = true_shares("correlated", num_samples=200, num_groups=3, top_k=1)
    for layer in range(4):
        logs = np.log(shares[:, layer])
        centred = logs - logs.mean(axis=0)
        size = np.linalg.svd(centred, compute_uv=False)
        assert size[2] > 0.1 and size[3] < 1e-10
        # members of a group keep their ratio: three bundles of experts
        columns = centred / np.linalg.norm(centred, axis=0)
        bundles = {tuple(np.flatnonzero(row > 1 - 1e-12).tolist()) for row in columns.T @ columns}
        assert sorted(map(len, bundles)) == [5, 5, 6]


def test_a_disturbance_decays_to_even_load_at_the_gain():
    shares = true_shares("balanced-by-bias", gain=0.1, every=20, num_samples=50)
    off = shares - 1 / 16
    inside = np.arange(1, 50) % 20 != 0
    np.testing.assert_allclose(off[1:][inside], 0.9 * off[:-1][inside], atol=1e-15)
    assert np.abs(off[[0, 20, 40]]).max(axis=-1).min() > 0.03


def test_shares_above_one_in_k_go_to_the_others_in_proportion():
    free = true_shares("zipf", exponent=3.0, top_k=1)[0]
    capped = true_shares("zipf", exponent=3.0, top_k=2)[0]
    assert free.max(axis=-1).min() > 0.8
    np.testing.assert_allclose(capped.max(axis=-1), 0.5, rtol=1e-12)
    rest_free, rest_capped = (load_shares(np.sort(s, axis=-1)[:, :-1]) for s in (free, capped))
    np.testing.assert_allclose(rest_free, rest_capped, rtol=1e-9)


def test_meta_names_what_made_it():
    trace = synth_trace("rotation", seed=5, copies=8000, interval_steps=7, period=30, **SMALL)
    meta = trace.meta
    assert meta["source"] == "synthetic rotation" and meta["options"]["period"] == 30
    assert trace.steps_W[:3].tolist() == [1, 8, 15]
    again = true_shares("rotation", seed=meta["seed"], top_k=meta["top_k"], **SMALL, **meta["options"])
    assert (again == true_shares("rotation", seed=5, period=30, **SMALL)).all()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("wave", {}, "'wave' is unknown; use one of constant, zipf"),
        ("zipf", {"slope": 1.0}, "'zipf' has no option 'slope'; it has exponent"),
        ("zipf", {"exponent": float("nan")}, "exponent=nan must lie between"),
        ("rotation", {"period": 2.5}, "period=2.5 must be a whole number"),
        ("rotation", {"period": float("inf")}, "period=inf must be a whole number"),
        ("bursts", {"num_samples": 20, "num_bursts": 6}, "use at most 4 bursts"),
        ("step", {"at": 500}, "at=500 must lie between 0 and 499"),
        ("collapse-fast", {"length": 4}, "length=4 must lie between 1 and 3"),
        ("constant", {"num_experts": 2}, "num_experts=2 must be more than top_k=2"),
        ("constant", {"num_layers": 0}, "num_layers=0 must be at least 1"),
        ("constant", {"top_k": 0}, "top_k=0 must be at least 1"),
        ("constant", {"copies": 1001}, "use 1000 or 1002"),
        ("constant", {"copies": 0}, "use 2 or 4"),
        ("constant", {"dispersion": 0.5}, "dispersion=0.5 must be 1"),
        ("constant", {"interval_steps": 0}, "interval_steps=0"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        synth_trace(kind, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_sample_and_layer(kind):
    options = {"num_bursts": 0, "length": 1} if kind == "bursts" else {}
    options |= {"num_groups": 2} if kind == "correlated" else {}
    trace = synth_trace(kind, num_samples=1, num_layers=1, num_experts=3, copies=10, **options)
    assert trace.tokens_per_expert_WLE.sum() == 10
