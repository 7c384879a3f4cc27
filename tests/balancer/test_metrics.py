"""Figures of merit: values worked out by hand, ranges, undefined loads, the noise floor as simulated."""

import doctest
import importlib
import math

import numpy as np
import pytest

from balancer import metrics
from balancer.metrics import (
    balancedness,
    dead_experts,
    effective_experts,
    load_shares,
    max_violation,
    mean_balancedness,
    moved_slots,
    normalized_entropy,
    rank_load,
    sum_balancedness,
    total_variation,
    violation_floor,
)

# (function, value at balance, value when one of E = 4 has everything)
EXTREMES = [
    (balancedness, 1.0, 0.25),
    (max_violation, 0.0, 3.0),
    (normalized_entropy, 1.0, 0.0),
    (effective_experts, 4.0, 1.0),
]
ALL = [balancedness, max_violation, normalized_entropy, effective_experts, load_shares, mean_balancedness]
ALL += [sum_balancedness, dead_experts, lambda x: total_variation(x, np.ones(4))]


def _random_load(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).poisson(200, size=shape)


@pytest.mark.parametrize("name", ["metrics", "trace", "synth"])
def test_examples_in_docstrings_print_what_they_say(name):
    result = doctest.testmod(importlib.import_module(f"balancer.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(("figure", "even", "single"), EXTREMES)
def test_value_at_balance_and_at_full_collapse(figure, even, single):
    assert figure([7, 7, 7, 7]) == pytest.approx(even, abs=1e-12)
    assert figure([0, 0, 9, 0]) == pytest.approx(single, abs=1e-12)


@pytest.mark.parametrize("figure", [row[0] for row in EXTREMES])
def test_zero_load_is_undefined_and_not_perfect(figure):
    values = figure([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert np.isnan(values).tolist() == [True, False]


@pytest.mark.parametrize("figure", [row[0] for row in EXTREMES])
def test_leading_axes_are_kept_and_each_row_stands_alone(figure):
    load = _random_load((3, 2, 5, 7))
    whole = figure(load)
    assert whole.shape == (3, 2, 5)
    assert whole[2, 1, 3] == figure(load[2, 1, 3])


@pytest.mark.parametrize("figure", [row[0] for row in EXTREMES])
def test_scale_of_the_load_does_not_matter(figure):
    load = _random_load((5, 7))
    np.testing.assert_allclose(figure(load), figure(load * 1000), rtol=1e-12)  # rounding of one division


@pytest.mark.parametrize("figure", ALL)
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_negative_or_non_finite_load_is_refused_with_its_place(figure, bad):
    load = np.ones((3, 4))
    load[2, 1] = bad
    with pytest.raises(ValueError, match=r"\[2, 1\]=.*finite and 0 or more"):
        figure(load)


@pytest.mark.parametrize("bad", [["a", "b"], [True, False], [1j, 2], [object(), object()]])
def test_a_load_of_another_type_is_refused(bad):
    with pytest.raises(ValueError, match="integer counts or real shares"):
        balancedness(bad)


@pytest.mark.parametrize("bad", [5, [], [[], []]])
def test_a_load_without_experts_is_refused(bad):
    with pytest.raises(ValueError, match="at least one expert"):
        balancedness(np.array(bad, dtype=np.int64))


def test_mean_and_sum_form_differ_and_leave_idle_layers_out():
    load = [[8, 0], [1, 1], [0, 0]]
    assert float(mean_balancedness(load)) == pytest.approx((0.5 + 1.0) / 2)
    assert float(sum_balancedness(load)) == pytest.approx((4 + 1) / (8 + 1))
    assert np.isnan(mean_balancedness([[0, 0]]))
    assert np.isnan(sum_balancedness([[0, 0]]))


def test_balance_is_taken_within_each_layer_never_over_layers():
    opposite = [[8, 0], [0, 8]]  # summed over layers this would look even
    assert float(mean_balancedness(opposite)) == 0.5
    assert float(sum_balancedness(opposite)) == 0.5


@pytest.mark.parametrize("figure", [mean_balancedness, sum_balancedness])
def test_forms_over_layers_need_a_layer_axis_and_keep_samples(figure):
    with pytest.raises(ValueError, match="one row for each layer"):
        figure([1, 2])
    assert figure(_random_load((6, 3, 4))).shape == (6,)


@pytest.mark.parametrize(("sizes", "design"), [((512, 8, 2), 0.13), ((512, 32, 4), 0.27)])
def test_noise_floor_has_the_documented_values(sizes, design):
    assert round(violation_floor(*sizes), 2) == design


@pytest.mark.parametrize("sizes", [(512, 8, 2), (512, 32, 4), (64, 2, 1), (16, 64, 4), (50000, 256, 8)])
def test_noise_floor_agrees_with_simulated_counts(sizes):
    num_tokens, num_experts, top_k = sizes
    rng = np.random.default_rng(11)
    counts = rng.multinomial(num_tokens * top_k, np.full(num_experts, 1 / num_experts), size=4000)
    # the formula is good to 1.5 % here, the mean of 4000 draws to about 1 % (3 standard errors)
    assert violation_floor(*sizes) == pytest.approx(float(max_violation(counts).mean()), rel=0.03)


def test_noise_floor_falls_with_the_root_of_the_tokens_also_beyond_the_exact_range():
    # 1 % for the skew of the counts, which fades as the floor falls
    assert violation_floor(10**9, 64, 4) == pytest.approx(violation_floor(10**7, 64, 4) / 10, rel=0.01)
    assert violation_floor(5, 1, 1) == 0.0


@pytest.mark.parametrize(("sizes", "message"), [((0, 8, 2), "num_tokens=0"), ((9, 2, 3), "top_k=3 is more")])
def test_noise_floor_refuses_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        violation_floor(*sizes)


def test_entropy_of_k_even_experts_is_ln_k():
    load = np.zeros(32)
    load[[3, 17]] = 5
    assert float(normalized_entropy(load)) == pytest.approx(math.log(2) / math.log(32))
    assert float(effective_experts(load)) == pytest.approx(2.0)
    assert np.isnan(normalized_entropy([5]))


def test_dead_is_below_one_percent_of_the_fair_share_over_the_whole_window():
    window = np.full((4, 1, 5), 250)
    window[:, 0, 1] = 0  # 0 of about 1000: dead
    window[:, 0, 2] = [40, 0, 0, 0]  # alive in one sample only, 40 of about 1000: not dead
    window[:, 0, 3] = [5, 0, 0, 0]  # fair share about 409: 5 is above 1 %, 4 is below
    assert dead_experts(window).tolist() == [1.0]
    window[0, 0, 3] = 4
    assert dead_experts(window).tolist() == [2.0]
    assert dead_experts(window.sum(axis=0)).tolist() == [2.0]


def test_dead_is_undefined_in_a_window_too_short_to_tell():
    short = np.array([[99, 99, 99, 99], [100, 100, 100, 100], [0, 0, 0, 0]])
    assert np.isnan(dead_experts(short)).tolist() == [True, False, True]
    assert dead_experts(short, min_fair_share=10)[0] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dead_experts([1, 2]), r"expected \[W, L, E\]"),
        (lambda: dead_experts([[1, 2]], dead_frac=1.0), "dead_frac=1.0"),
        (lambda: dead_experts([[1, 2]], min_fair_share=0), "min_fair_share=0"),
    ],
)
def test_dead_refuses_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_total_variation_is_symmetric_bounded_and_of_shares():
    p, q = _random_load((6, 8)), _random_load((6, 8))[:, ::-1]
    np.testing.assert_allclose(total_variation(p, q), total_variation(q, 7 * p), rtol=1e-12)
    assert float(total_variation([1, 0], [0, 5])) == 1.0
    assert float(total_variation([2, 2], [9, 9])) == 0.0
    assert np.isnan(total_variation([0, 0], [1, 1]))
    assert total_variation(p, q[0]).shape == (6,)
    with pytest.raises(ValueError, match="p has 2 experts but q has 3"):
        total_variation([1, 2], [1, 2, 3])


def test_moved_slots_are_those_whose_rank_did_not_hold_their_expert():
    before_XS = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, -1, 1, -1]])
    after_XS = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 1, 0, 3], [0, 1, 1, -1]])
    assert moved_slots(before_XS, after_XS, 2).tolist() == [0, 0, 2, 1]
    rng = np.random.default_rng(0)
    for _ in range(50):
        before, after = rng.integers(-1, 5, (2, 12))
        held = [set(before[4 * g : 4 * g + 4]) for g in range(3)]
        slow = sum(e >= 0 and e not in held[s // 4] for s, e in enumerate(after))
        assert int(moved_slots(before, after, 3)) == slow


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (([0, 1], [0, 1, 2], 1), "2 slots before, 3 after"),
        (([0, 1, 2], [0, 1, 2], 2), "num_ranks=2"),
        (([0, -2], [0, 1], 1), "before is"),
        (([0, 1], [0.0, 1.0], 1), "after is float64"),
    ],
)
def test_moved_slots_refuses_what_is_no_placement(call, message):
    with pytest.raises(ValueError, match=message):
        moved_slots(*call)


def test_rank_load_sums_contiguous_homes_exactly():
    counts = np.arange(24, dtype=np.int32).reshape(2, 12)
    ranks = rank_load(counts, 3)
    assert ranks.dtype == np.int64
    assert ranks.tolist() == [[6, 22, 38], [54, 70, 86]]
    huge = np.full((1, 4), 2**60)  # would not survive float64 or int32
    assert rank_load(huge + 1, 2).tolist() == [[2**61 + 2, 2**61 + 2]]


@pytest.mark.parametrize(("num_ranks", "nearest"), [(5, "4 or 6"), (0, "1 or 2"), (13, "6 or 12")])
def test_rank_load_names_the_nearest_numbers_of_ranks(num_ranks, nearest):
    with pytest.raises(ValueError, match=f"use {nearest}"):
        rank_load(np.ones((2, 12), dtype=np.int64), num_ranks)


def test_rank_load_refuses_shares():
    with pytest.raises(ValueError, match="integer counts"):
        rank_load([[0.5, 0.5]], 2)


def test_every_public_figure_documents_its_range():
    for figure in (balancedness, mean_balancedness, sum_balancedness, max_violation, normalized_entropy):
        assert "in [" in (figure.__doc__ or ""), figure.__name__
    assert metrics.__doc__
