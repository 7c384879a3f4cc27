"""The router plant is the plant of the control theory: its slope, its noise, its growth, its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest

from balancer import plant_kernels
from balancer.forecast_record import copy_state
from balancer.plant import (
    REPORTS,
    PlantConfig,
    expected_shares,
    init_plant,
    plant_scale,
    population_size,
    step_plant,
    switch_plant,
)
from balancer.plant_tokens import bin_edges, measure_tokens

# experts all alike: one eigenvalue, (E - 1)-fold
ALIKE = {"expert_spread": 0.0, "width_spread": 0.0}


@pytest.fixture(scope="module")
def fine():
    return init_plant(
        PlantConfig(num_layers=2, num_experts=16, top_k=2, population=60000, statistics=REPORTS, seed=3)
    )


def zero(state):
    return np.zeros(state.drift_LE.shape)


def test_the_plant_starts_balanced_and_its_shares_sum_to_top_k(fine):
    share_LE = expected_shares(zero(fine), fine)
    np.testing.assert_allclose(share_LE.sum(axis=1), 2.0, atol=1e-12)
    # resolution of the population in y: 1 / (M r) = 1.3e-4; the search ends within a few tokens
    assert np.abs(share_LE / (2 / 16) - 1).max() < 0.005


def test_counts_sum_to_the_copies_and_none_exceeds_the_tokens():
    config = PlantConfig(num_layers=3, num_experts=4, top_k=3, num_tokens=50, phi=10.0, imbalance=1.5)
    state = init_plant(config)
    for _ in range(50):
        measurement, state = step_plant(zero(state), state)
        assert (measurement.counts_LE.sum(axis=1) == 150).all()
        assert measurement.counts_LE.max() <= 50 and measurement.counts_LE.min() >= 0
    assert measurement.counts_LE.max() == 50  # it did occur


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_compiled_pass_is_its_plain_twin(score):
    pytest.importorskip("numba")
    config = PlantConfig(num_layers=2, num_experts=12, top_k=3, population=70, score=score, imbalance=0.5)
    state = init_plant(config)
    bias_LE = np.random.default_rng(0).normal(0, 0.02, (2, 12))
    ask = {"swap": 2, "pair": 2, "margin": 12, "score": 12}
    found = [
        measure_tokens(
            state.base_LME, bias_LE + state.drift_LE, state.drift_LE,
            state.constants._replace(compiled=compiled), **ask,
        )
        for compiled in (0, 1)
    ]  # fmt: skip
    assert found[0]["pair"].sum() > 0
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    shares = [
        expected_shares(bias_LE, state._replace(constants=state.constants._replace(compiled=i)))
        for i in (0, 1)
    ]
    np.testing.assert_array_equal(*shares)
    np.testing.assert_array_equal(shares[0] * 70, found[0]["counts"])


def test_the_selection_is_a_stable_sort_and_margins_are_as_defined():
    rng = np.random.default_rng(1)
    score_ME = rng.integers(0, 6, (200, 7)).astype(np.float32) / 8  # many ties
    shift_E, top_k, delta = rng.integers(0, 4, 7).astype(np.float32) / 8, 3, np.float32(0.15)
    counts_E, swap_2E = np.zeros(7, np.int64), np.zeros((2, 7), np.int64)
    pair_2EE, margin_EB = np.zeros((2, 7, 7), np.int64), np.zeros((7, 2 * plant_kernels.SIDE), np.int64)
    plant_kernels.measure_layer(
        score_ME, shift_E, shift_E, top_k, delta, counts_E, swap_2E, pair_2EE, margin_EB, margin_EB[:0]
    )
    value_ME = score_ME + shift_E
    order_ME = np.argsort(-value_ME, axis=1, kind="stable")
    np.testing.assert_array_equal(counts_E, np.bincount(order_ME[:, :top_k].ravel(), minlength=7))
    row = np.arange(200)
    inner, outer = order_ME[:, top_k - 1], order_ME[:, top_k]
    near = value_ME[row, inner] - value_ME[row, outer] < delta
    wanted_EE = np.zeros((7, 7), np.int64)
    np.add.at(wanted_EE, (inner[near], outer[near]), 1)
    np.testing.assert_array_equal(pair_2EE[0], wanted_EE)
    np.testing.assert_array_equal(swap_2E[0], wanted_EE.sum(axis=0) + wanted_EE.sum(axis=1))
    for e in range(7):
        others = np.sort(np.delete(value_ME, e, axis=1), axis=1)[:, -top_k]
        margin = value_ME[:, e] - others
        margin_B = np.histogram(margin[margin != 0], bin_edges())[0]
        ties_B = margin_EB[e] - margin_B
        side = plant_kernels.SIDE
        assert ties_B[[side - 1, side]].sum() == (margin == 0).sum() and ties_B.sum() == (margin == 0).sum()
        assert margin_EB[e, side:].sum() == counts_E[e] or (margin == 0).any()


def test_the_jacobian_is_symmetric_within_chance(fine):
    measurement, _ = step_plant(zero(fine), fine)
    scale = fine.base_LME.shape[1] / measurement.num_tokens
    pair_EE = measurement.swap_pairs_LEE[0] * scale
    off = ~np.eye(16, dtype=bool)
    # of a small gap; a finite one adds the slope of the density, with the square of the gap.
    # C_ij - C_ji of two Poisson counts has variance C_ij + C_ji: the mean square of the ratio is 1,
    # over 120 pairs its sd is sqrt(2 / 120) = 0.13
    ratio = (pair_EE - pair_EE.T)[off] ** 2 / np.maximum(pair_EE + pair_EE.T, 1)[off]
    assert ratio.mean() == pytest.approx(1.0, abs=0.5)
    both = measurement.swap_pairs_LEE[0].sum(axis=0) + measurement.swap_pairs_LEE[0].sum(axis=1)
    np.testing.assert_allclose(both, measurement.swaps_LE[0])


def test_swaps_are_the_slope_of_the_expected_shares(fine):
    measurement, _ = step_plant(zero(fine), fine)
    tokens, delta = measurement.num_tokens, measurement.swap_delta
    slope_LE = (2 * measurement.swaps_LE - measurement.wide_swaps_LE / 2) / (2 * tokens * delta)
    for expert in (0, 7, 15):
        bias_LE = zero(fine)
        bias_LE[:, expert] = delta
        change_L = (expected_shares(bias_LE, fine) - expected_shares(-bias_LE, fine))[:, expert]
        # 1,000 swaps: 3 % of chance each
        np.testing.assert_allclose(change_L / (2 * delta), slope_LE[:, expert], rtol=0.1)


def test_the_scale_is_the_mean_eigenvalue(fine):
    delta, jacobian_EE = fine.constants.swap_delta, np.zeros((16, 16))
    for expert in range(16):
        bias_LE = zero(fine)
        bias_LE[:, expert] = delta
        jacobian_EE[:, expert] = (expected_shares(bias_LE, fine) - expected_shares(-bias_LE, fine))[0]
    wanted = np.trace(jacobian_EE / (2 * delta)) / 15 / (2 / 16)
    assert plant_scale(fine)[0] == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("phi", [1.0, 8.0])
def test_the_noise_of_the_counts_is_phi_times_that_of_counting(phi):
    config = PlantConfig(num_layers=4, num_experts=16, top_k=2, phi=phi, statistics=(), population=500)
    state = init_plant(config)
    expected_LE = expected_shares(zero(state), state) * config.num_tokens
    squares = []
    for _ in range(300):
        measurement, state = step_plant(zero(state), state)
        squares.append((measurement.counts_LE - expected_LE) ** 2)
    # copies are drawn one by one: T r (1 - 1/E); 18,000 free squares, 1 % of chance, more for phi > 1
    share = expected_LE / (2 * config.num_tokens)
    noise = phi * 2 * config.num_tokens * share * (1 - share)
    assert (np.mean(squares, axis=0) / noise).mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_an_imbalance_grows_by_its_reinforcement(score):
    config = PlantConfig(
        num_experts=16, population=60000, score=score, noise=False, reinforcement=0.1, imbalance=0.02,
        statistics=(), **ALIKE,
    )  # fmt: skip
    state = init_plant(config)
    size = []
    for _ in range(20):
        measurement, state = step_plant(zero(state), state)
        size.append(np.linalg.norm(measurement.violation_LE))
    growth = (size[-1] / size[4]) ** (1 / 15) - 1
    assert growth == pytest.approx(0.1, rel=0.1)


def limit_of(delay, gains=(0.5, 1.5), steps=120):
    """The gain between decay and growth, by bisection, of b -= g y / lam."""
    config = PlantConfig(
        num_experts=4, top_k=1, population=60000, noise=False, imbalance=0.05, delay_steps=delay,
        statistics=(), **ALIKE,
    )  # fmt: skip
    first = init_plant(config)
    theory = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    low, high = gains[0] * theory, gains[1] * theory
    for _ in range(5):
        middle, state, bias_LE, size = (low + high) / 2, first, zero(first), []
        for _ in range(steps):
            measurement, state = step_plant(bias_LE, state)
            bias_LE = bias_LE - middle * measurement.violation_LE / plant_scale(state)[:, None]
            size.append(np.linalg.norm(measurement.violation_LE))
        # above the limit it ends in a cycle, which a slope that falls off keeps small near the limit
        grows = max(size[-20:]) > 0.5 * size[0]
        low, high = (low, middle) if grows else (middle, high)
    return (low + high) / 2, theory


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_the_stability_limit_is_that_of_theory(delay):
    found, theory = limit_of(delay)
    assert found == pytest.approx(theory, rel=0.1)


def test_the_bias_waits_for_its_delay():
    state = init_plant(PlantConfig(num_experts=8, delay_steps=2, noise=False, statistics=()))
    bias_LE = np.linspace(-0.2, 0.2, 8)[None]
    seen = []
    for step in range(5):
        measurement, state = step_plant(bias_LE if step == 0 else zero(state), state)
        seen.append(np.abs(measurement.violation_LE).max() > 0.3)
    assert seen == [False, False, True, False, False]


def test_a_step_is_a_function_of_the_state_alone():
    config = PlantConfig(num_layers=2, reinforcement=0.1, drift=0.05, delay_steps=1, imbalance=0.3, seed=5)
    state = init_plant(config)
    bias_LE = np.random.default_rng(0).normal(0, 0.01, zero(state).shape)
    for _ in range(3):
        _, state = step_plant(bias_LE, state)
    kept = copy_state(state)
    again = [step_plant(bias_LE, one) for one in (state, state, kept)]
    other = step_plant(bias_LE, init_plant(replace(config, seed=6)))
    for measurement, after in again[1:]:
        np.testing.assert_array_equal(measurement.counts_LE, again[0][0].counts_LE)
        np.testing.assert_array_equal(after.drift_LE, again[0][1].drift_LE)
    assert (other[0].counts_LE != again[0][0].counts_LE).any()


def test_statistics_come_when_they_are_due_and_as_asked():
    config = PlantConfig(statistics=REPORTS, swaps_every=3, scores_every=2, num_experts=8, num_tokens=4096)
    state = init_plant(config)
    for step in range(4):
        found, state = step_plant(zero(state), state)
        assert (found.swaps_LE is not None) == (found.swap_pairs_LEE is not None) == (step % 3 == 0)
        assert (found.score_histogram_LEB is not None) == (step % 2 == 0)
        above_LE = found.margin_histogram_LEB[..., found.margin_histogram_LEB.shape[2] // 2 :].sum(axis=2)
        np.testing.assert_allclose(above_LE, found.counts_LE)
        np.testing.assert_allclose(found.margin_histogram_LEB.sum(axis=2), 4096)
        assert found.margin_edges_X.shape == (found.margin_histogram_LEB.shape[2] + 1,)
        assert found.sample_LME.shape == (1, 256, 8)
        # 8 batches of 512 tokens: the sum of squares is at least that of even parts
        assert found.tokens_squared == 8 * 512**2
        assert (found.squares_LE >= found.counts_LE**2 / 8).all()
    none, _ = step_plant(zero(state), init_plant(replace(config, statistics=())))
    assert none.swaps_LE is None and none.margin_histogram_LEB is None and none.squares_LE is None
    out_of_turn, _ = step_plant(zero(state), init_plant(replace(config, statistics=())), ("margins",))
    assert out_of_turn.margin_histogram_LEB is not None and out_of_turn.swaps_LE is None
    with pytest.raises(ValueError, match=r"asked=\['entropy'\] must be among swaps, "):
        step_plant(zero(state), state, ("entropy",))


@pytest.mark.parametrize("new_population", [False, True])
def test_a_switch_throws_the_balance_off_as_far_as_asked(new_population):
    state = init_plant(
        PlantConfig(num_layers=4, num_experts=64, top_k=4, population=4000, statistics=(), **ALIKE)
    )
    after = switch_plant(state, 0.2, new_population=new_population)
    y_LE = expected_shares(zero(state), after) / (4 / 64) - 1
    # 256 experts: 5 % of chance, and a slope is no constant over such a jump
    assert y_LE.std() == pytest.approx(0.2, rel=0.2)
    assert (after.base_LME is state.base_LME) != new_population
    held = switch_plant(state, 0.0, new_population=new_population)
    assert np.abs(expected_shares(zero(state), held) / (4 / 64) - 1).max() < 0.1


def test_the_population_is_fine_enough_for_the_batch():
    for tokens, experts, top_k in ((2**14, 32, 2), (2**20, 64, 8), (2**16, 256, 8)):
        size, r = population_size(tokens, experts, top_k), top_k / experts
        assert 1 / (size * r) <= 0.25 * math.sqrt((1 - r) / (r * tokens))
    assert population_size(16, 8, 1) == 2048 and population_size(2**30, 256, 1) == 65536


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 32}, "top_k"),
        ({"num_layers": 0}, "num_layers"),
        ({"score": "tanh"}, "score='tanh'"),
        ({"phi": float("nan")}, "phi"),
        ({"reinforcement": -0.1}, "reinforcement"),
        ({"delay_steps": -1}, "delay_steps"),
        ({"statistics": ("swap",)}, "statistics: 'swap'"),
        ({"swaps_every": 0}, "swaps_every"),
        ({"token_spread": 0.0}, "token_spread"),
    ],
)
def test_a_bad_config_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        PlantConfig(**change)


def test_a_bad_bias_is_refused():
    state = init_plant(PlantConfig(num_experts=8))
    bias_LE = zero(state)
    bias_LE[0, 3] = np.nan
    for call in (step_plant, expected_shares):
        with pytest.raises(ValueError, match="finite"):
            call(bias_LE, state)
        with pytest.raises(ValueError, match="must be"):
            call(np.zeros((1, 7)), state)
    with pytest.raises(ValueError, match="sd"):
        switch_plant(state, float("nan"))
