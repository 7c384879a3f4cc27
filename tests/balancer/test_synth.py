"""The synthetic collapse: exact sums, its shape in every seed and size, and likeness to a real one."""

import numpy as np
import pytest

from balancer.metrics import dead_experts, load_shares, normalized_entropy, total_variation
from balancer.synth import collapse_trace
from balancer.trace import check_conservation, load_trace


@pytest.fixture(scope="module")
def trace():
    return collapse_trace()


def _entropy_W(counts_WLE) -> np.ndarray:
    return normalized_entropy(counts_WLE).mean(axis=-1)


def _dispersion(counts_WLE, shares_LE) -> float:
    """Variance over that of a multinomial, of samples drawn from the same shares."""
    copies = int(counts_WLE[0, 0].sum())
    expected = copies * shares_LE
    variance = ((counts_WLE - expected) ** 2).mean(axis=0)
    wide = shares_LE > 0.005  # rare experts say little
    return float((variance / (expected * (1 - shares_LE)))[wide].mean())


def test_default_trace_has_the_documented_size_steps_and_sums(trace):
    assert trace.tokens_per_expert_WLE.shape == (501, 24, 32)
    assert trace.steps_W.tolist() == list(range(1, 5002, 10))
    assert trace.meta["copies_per_step"] == 262144
    check_conservation(trace)


def test_one_seed_one_trace_and_another_seed_another(trace):
    again = collapse_trace(num_samples=6)
    other = collapse_trace(seed=1, num_samples=6)
    assert (again.tokens_per_expert_WLE == collapse_trace(num_samples=6).tokens_per_expert_WLE).all()
    # nearly uniform in both at first, then different experts win
    assert total_variation(again.tokens_per_expert_WLE[3], other.tokens_per_expert_WLE[3]).mean() > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_entropy_collapses_recovers_in_part_and_relapses(seed):
    h = _entropy_W(collapse_trace(seed=seed).tokens_per_expert_WLE)
    # clipping at the floor and the drawn counts move the mean over 24 layers by up to 0.03
    for sample, expected in [(0, 0.994), (1, 0.408), (2, 0.282), (3, 0.243), (50, 0.654), (500, 0.551)]:
        assert h[sample] == pytest.approx(expected, abs=0.03), sample
    assert h.argmin() == 3
    assert 40 <= h[4:].argmax() + 4 <= 60
    relapse = h[50::90]  # slow: no step back up by more than noise
    assert (np.diff(relapse) < 0.005).all()


@pytest.mark.parametrize("seed", range(3))
def test_about_27_of_32_experts_are_dead_at_the_bottom_and_none_at_the_start(seed):
    counts = collapse_trace(seed=seed, num_samples=60).tokens_per_expert_WLE
    assert dead_experts(counts[0]).max() == 0
    assert 25.5 <= dead_experts(counts[3]).mean() <= 29


def test_no_expert_gets_a_token_twice(trace):
    assert trace.tokens_per_expert_WLE.max() <= 262144 // 2
    assert trace.tokens_per_expert_WLE.max() > 0.95 * 262144 // 2


def test_layers_differ_and_expert_loads_drift_slowly_once_settled(trace):
    counts = trace.tokens_per_expert_WLE
    assert normalized_entropy(counts[3]).min() < 0.21
    assert normalized_entropy(counts[500]).std() == pytest.approx(0.12, abs=0.02)
    near = total_variation(counts[301:], counts[300:-1]).mean()
    far = total_variation(counts[350:], counts[300:-50]).mean()
    assert 0.01 < near < 0.03
    assert near < far < 3 * near  # 500 steps later it is still much the same load
    assert total_variation(counts[0], counts[1]).mean() > 0.6


def test_counts_are_over_dispersed_more_so_in_the_collapse():
    from balancer.synth import _draw

    rng = np.random.default_rng(5)
    shares = load_shares(rng.random((4, 16)))
    for dispersion in (2.3, 20.0):
        counts = np.stack([_draw(rng, shares, 100000, dispersion, 100000) for _ in range(400)])
        # 400 draws of 64 experts: standard error of the variance about 1 %, correlated within layers
        assert _dispersion(counts, shares) == pytest.approx(dispersion, rel=0.06)


@pytest.mark.parametrize(
    ("num_samples", "num_layers", "num_experts", "copies", "top_k"),
    [(1, 1, 2, 1, 1), (4, 1, 3, 10, 2), (40, 3, 8, 4096, 2), (30, 2, 64, 99999, 1), (12, 60, 256, 10**6, 8)],
)
def test_any_size_keeps_sums_limits_and_steps(num_samples, num_layers, num_experts, copies, top_k):
    trace = collapse_trace(2, num_samples, num_layers, num_experts, copies, top_k)
    assert trace.tokens_per_expert_WLE.shape == (num_samples, num_layers, num_experts)
    check_conservation(trace, copies)
    assert trace.tokens_per_expert_WLE.max() <= -(-copies // top_k)
    assert (np.diff(trace.steps_W) == 10).all()


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 4), (256, 8)])
def test_the_shape_is_the_same_on_the_scale_that_the_sizes_allow(num_experts, top_k):
    floor = np.log(top_k) / np.log(num_experts)
    trace = collapse_trace(0, 101, 12, num_experts, 1000 * num_experts, top_k)
    height = (_entropy_W(trace.tokens_per_expert_WLE) - floor) / (1 - floor)
    # the reference of E 32, K 2 in units of (h - 0.2) / 0.8; small E clip more
    for sample, expected in [(0, 0.99), (3, 0.055), (10, 0.57), (100, 0.44)]:
        assert height[sample] == pytest.approx(expected, abs=0.06), sample


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"copies": 0}, "copies=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 2}, "use 3 or more"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        collapse_trace(**sizes)


def test_it_looks_like_the_real_collapse(trace, traces_dir):
    real = load_trace(traces_dir / "smartmoe.npz").tokens_per_expert_WLE
    ours = trace.tokens_per_expert_WLE
    assert ours.shape == real.shape
    samples = [0, 1, 2, 3, 20, 30, 40, 50, 100, 200, 300, 400, 500]
    np.testing.assert_allclose(_entropy_W(ours)[samples], _entropy_W(real)[samples], atol=0.04)
    for sample in (3, 20, 50, 100, 500):
        assert dead_experts(ours[sample]).mean() == pytest.approx(dead_experts(real[sample]).mean(), abs=4)
        top = [float(load_shares(counts[sample]).max(axis=-1).mean()) for counts in (ours, real)]
        assert top[0] == pytest.approx(top[1], abs=0.06)
    for horizon in (1, 10, 50):
        pair = [total_variation(c[300 + horizon :], c[300:-horizon]).mean() for c in (ours, real)]
        assert 0.5 < pair[0] / pair[1] < 2


def test_no_row_of_the_real_trace_is_in_ours(trace, traces_dir):
    real = load_trace(traces_dir / "smartmoe.npz").tokens_per_expert_WLE.reshape(-1, 32)
    rows = {row.tobytes() for row in real}
    assert not any(row.tobytes() in rows for row in trace.tokens_per_expert_WLE.reshape(-1, 32))
