"""The gain of the default law: variances and reinforcement read from series whose truth is known."""

import numpy as np
import pytest

from balancer.bias_identified import _gain
from balancer.bias_kernels import NUM_SUMS
from balancer.bias_noise import (
    init_noise,
    kalman_gain,
    reinforcement,
    surprise_gain,
    tracking_gain,
    update_noise,
)
from balancer.bias_quantile import margin_quantile
from balancer.kernels import bias_kernels


def follow(y_WLE: np.ndarray, counting_var: float = 1e-3):
    """The noise state after a series of violations without any bias."""
    _, num_layers, num_experts = y_WLE.shape
    state = init_noise(num_layers)
    zeros = np.zeros((num_layers, num_experts))
    last, earlier, change, mean = zeros, zeros, zeros, zeros.copy()
    for y_LE in y_WLE:
        y, new_change, sums = np.empty_like(zeros), np.empty_like(zeros), np.empty((num_layers, NUM_SUMS))
        bias_kernels().measure_layers(
            y_LE + 1.0, 1.0, zeros, zeros, zeros, last, earlier, change, 1e9, float(state.steps), 0.05, mean,
            y, new_change, sums,
        )  # fmt: skip
        state = update_noise(sums, num_experts, counting_var, state)
        last, earlier, change = y, last, new_change
    return state


def series(rng, *, noise: float, drift: float, rho: float = 0.0, steps: int = 400, experts: int = 32):
    x, out = np.zeros((2, experts)), []
    for _ in range(steps):
        y = x + noise * rng.standard_normal(x.shape)
        out.append(y)
        x = x + rho * y + drift * rng.standard_normal(x.shape)
        x = x - x.mean(axis=1, keepdims=True)
    return np.stack(out)


def test_noise_and_drift_are_told_apart():
    state = follow(series(np.random.default_rng(1), noise=0.1, drift=0.05))
    # 100 steps of 32 experts: 3 to 5 % by chance, less certain for the difference that drift is
    np.testing.assert_allclose(state.noise_L, 0.01, rtol=0.2)
    np.testing.assert_allclose(state.drift_L, 0.0025, rtol=0.5)
    np.testing.assert_allclose(tracking_gain(state), float(kalman_gain(np.array([0.25]))[0]), rtol=0.35)


def test_without_drift_the_gain_is_small_whatever_the_over_dispersion():
    for noise in (0.05, 0.3):
        state = follow(series(np.random.default_rng(2), noise=noise, drift=0.0))
        assert (tracking_gain(state) < 0.25).all()
        np.testing.assert_allclose(state.noise_L, noise**2, rtol=0.15)


def test_the_kalman_gain_is_the_fixed_point_of_the_filter():
    for q in (1e-6, 1e-3, 0.1, 1.0, 50.0):
        variance = 1.0
        for _ in range(100_000):
            predicted = variance + q
            new = predicted / (predicted + 1.0)  # gain and, with noise 1, variance after the measurement
            if abs(new - variance) < 1e-14:
                break
            variance = new
        assert kalman_gain(np.array([q]))[0] == pytest.approx(new, rel=1e-4)
    assert kalman_gain(np.array([0.0]))[0] == 0.0


def test_one_jump_leaves_the_noise_alone():
    y = series(np.random.default_rng(3), noise=0.1, drift=0.0, steps=200)
    before = follow(y).noise_L
    jump = np.zeros((200, 1, 1))
    jump[180:] = 3.0
    jumped = follow(y + jump * np.random.default_rng(4).standard_normal((1, 2, 32)))
    np.testing.assert_allclose(jumped.noise_L, before, rtol=0.15)
    assert (tracking_gain(jumped) < 0.3).all()
    assert (surprise_gain(32, jumped) > 0.95).all()


def test_noise_alone_is_no_surprise():
    rng = np.random.default_rng(5)
    surprises = [
        surprise_gain(32, follow(series(rng, noise=0.1, drift=0.0, steps=60))).mean() for _ in range(20)
    ]
    assert np.mean(surprises) < 0.05


def test_reinforcement_is_seen_where_violations_grow_and_nowhere_else():
    grows = follow(series(np.random.default_rng(6), noise=0.05, drift=0.01, rho=0.05, steps=90))
    np.testing.assert_allclose(reinforcement(32, grows), 0.05, rtol=0.35)
    still = follow(series(np.random.default_rng(7), noise=0.1, drift=0.0))
    assert (reinforcement(32, still) < 0.02).all()


def test_the_gain_is_twice_the_reinforcement_where_that_is_most():
    grows = follow(series(np.random.default_rng(6), noise=0.05, drift=0.01, rho=0.05, steps=90))
    quiet = grows._replace(
        drift_L=np.zeros(2), square_L=np.zeros(2)
    )  # neither tracking nor surprise ask for any
    np.testing.assert_allclose(_gain(32, quiet, 0.75), 2 * reinforcement(32, quiet))
    assert (_gain(32, quiet, 0.01) == 0.01).all()


def test_trust_follows_what_the_last_step_did():
    #       flipped, flipped small, dead now by a small flip, held up, held up light, moved, within noise
    last = np.array([[1.0, 1.0, 3.0, 1.0, -0.9, 1.0, 0.05]])
    y = np.array([[-0.6, -0.3, -0.95, 0.9, -0.85, 0.5, 0.05]])
    flat, zeros = np.ones_like(y), np.zeros_like(y)
    for start, wanted in (
        (1.0, [0.5, 1.0, 1.0, 1.4, 1.4, 1.0, 1.0]),
        (0.5, [0.2625, 0.525, 0.525, 0.735, 0.735, 0.525, 0.525]),
        (7.0, [3.325, 6.65, 6.65, 8.0, 6.65, 6.65, 6.65]),
    ):
        trust, change = np.full_like(y, start), np.empty_like(y)
        bias_kernels().act_layers(
            y, last, np.array([0.1]), flat, np.array([0.5]), np.zeros(1), 8.0, zeros, zeros.copy(), trust,
            8.0, 1e9, 1e9, y, 0.0, change,
        )  # fmt: skip
        np.testing.assert_allclose(trust[0], wanted)
        np.testing.assert_allclose(change, -0.5 * trust * y, rtol=1e-6)


def test_compiled_kernels_equal_their_plain_twins():
    rng = np.random.default_rng(8)

    def arguments():
        rng = np.random.default_rng(9)
        tables = [rng.normal(size=(3, 7)) for _ in range(7)]
        tables[0] = np.abs(tables[0])
        return tables, rng.normal(size=(3, 7))

    found = []
    for compiled in (True, False):
        (counts, measured, before, tau, last, earlier, change), mean = arguments()
        y, new, sums = np.empty((3, 7)), np.empty((3, 7)), np.empty((3, NUM_SUMS))
        bias_kernels(compiled).measure_layers(
            counts, 0.7, measured, before, np.maximum(tau, 0), last, earlier, change, 2.5, 1.0, 0.05, mean, y,
            new, sums,
        )  # fmt: skip
        found.append((y, new, sums, mean))
    for fast, plain in zip(*found):
        np.testing.assert_allclose(fast, plain, rtol=1e-13, atol=1e-13)  # fused multiply-adds
    y, last, tau, lost, aim = rng.normal(size=(5, 3, 7))
    far, gain, ramp = np.full(3, 0.2), np.array([0.1, 0.5, 0.0]), np.array([0.0, 1.0, 1.0])
    for aimed in (0.0, 1.0):
        found = []
        for compiled in (True, False):
            push, change = np.ones((3, 7)) * 1e-3, np.empty((3, 7))
            trust = np.linspace(0.2, 1, 21).reshape(3, 7)
            bias_kernels(compiled).act_layers(
                y, last, far, np.abs(tau), gain, ramp, 8.0, lost, push, trust, 8.0, 8.0, 6.0, aim, aimed,
                change,
            )  # fmt: skip
            found.append((push, trust, change))
        for fast, plain in zip(*found):
            np.testing.assert_allclose(fast, plain, rtol=1e-13, atol=1e-13)
        assert (np.diff(found[0][1].ravel()) < 0).any()  # somebody lost trust


@pytest.mark.parametrize("whole", [True, False])
def test_margins_are_read_as_the_quantile_laws_read_them(whole):
    rng = np.random.default_rng(5)
    counts = rng.poisson(3.0, size=(2, 8, 20)) * (rng.random((2, 8, 20)) < 0.6)
    counts[..., 0] += 200 - counts.sum(axis=-1)
    counts[0, 0, 1:] = 0  # all but nothing
    counts[0, 0, 0], counts[0, 0, -1] = 150, 50  # and a share that is right: empty bins between
    edges = np.concatenate([-(2.0 ** -np.arange(10)), [0.0], 2.0 ** -np.arange(9, -1, -1)])
    counts = counts if whole else counts.astype(np.float64)
    found = []
    for compiled in (True, False):
        margins = np.empty((2, 8, 3))
        bias_kernels(compiled).read_margins(counts, edges, np.array([25.0, 50.0, 75.0]), margins)
        found.append(margins)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-14)
    np.testing.assert_allclose(found[0][..., 1], margin_quantile(counts, edges, 2), atol=1e-14)
    assert found[0][0, 0, 1] == 0.0
    for k, part in ((0, 0.5), (2, 1.5)):  # and the others by a plain inversion
        for layer, e in np.ndindex(2, 8):
            above = counts[layer, e][::-1].cumsum()
            wanted = part * 50
            i = int((above < wanted).sum())
            place = 19 - i
            over = (wanted - (above[i] - counts[layer, e, place])) / counts[layer, e, place]
            expected = edges[place + 1] - over * (edges[place + 1] - edges[place])
            assert found[0][layer, e, k] == pytest.approx(expected)
