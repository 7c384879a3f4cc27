"""The rule for spare slots: scenarios of placement and load (two replicas on a rank, odd loads and sizes)."""

import doctest

import numpy as np
import pytest

from balancer import spare
from balancer.spare import fill_spare_slots
from balancer.split import balanced_peak


def even_homes(experts, ranks, slots_per_rank):
    per_rank = -(-experts // ranks)
    expert_E = np.arange(experts)
    return expert_E // per_rank * slots_per_rank + expert_E % per_rank


def replicas_on_ranks(slots, experts, ranks):
    """[E, P] slots of each expert on each rank."""
    slot_PS = slots.reshape(ranks, -1)
    return np.stack([(slot_PS == expert).sum(axis=1) for expert in range(experts)])


def random_case(seed):
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, 9)), int(rng.integers(1, 33))
    slots_per_rank = -(-experts // ranks) + int(rng.integers(0, 4))
    load_E = rng.multinomial(4000, rng.dirichlet(np.full(experts, rng.choice([0.1, 1.0]))))
    return load_E, even_homes(experts, ranks, slots_per_rank), slots_per_rank, ranks


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(spare)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore:.*spare slots stay empty")
def test_homes_stay_no_rank_has_an_expert_twice_and_no_slot_is_wasted(seed):
    load_E, home_E, slots_per_rank, ranks = random_case(seed)
    slots = fill_spare_slots(load_E, home_E, slots_per_rank, ranks)
    np.testing.assert_array_equal(slots[home_E], np.arange(load_E.size))
    on_EP = replicas_on_ranks(slots, load_E.size, ranks)
    assert on_EP.max() == 1
    has_empty_P = (slots.reshape(ranks, -1) < 0).any(axis=1)
    assert on_EP[:, has_empty_P].all()  # empty only where the rank has every expert already


@pytest.mark.filterwarnings("ignore:.*spare slots stay empty")
@pytest.mark.parametrize("seed", range(30))
def test_the_peak_never_rises_and_falls_where_a_replica_can_help(seed):
    load_E, home_E, slots_per_rank, ranks = random_case(seed)
    slots = np.full(ranks * slots_per_rank, -1)
    slots[home_E] = np.arange(load_E.size)
    before = balanced_peak(load_E, slots, ranks).peak
    after = balanced_peak(load_E, fill_spare_slots(load_E, home_E, slots_per_rank, ranks), ranks).peak
    assert after <= before
    spare_ranks = (slots.reshape(ranks, -1) < 0).any(axis=1).sum()
    if ranks > 1 and spare_ranks == ranks and before > -(-load_E.sum() // ranks) + 1:
        assert after < before


def test_skewed_load_over_32_ranks_comes_close_to_even():
    """One spare slot a rank, lognormal load of sigma 1: the rule leaves under 3 % over the mean."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        load_E = (rng.lognormal(0, 1, 256) * 1000).astype(np.int64)
        slots = fill_spare_slots(load_E, even_homes(256, 32, 9), 9, 32)
        assert balanced_peak(load_E, slots, 32).peak < 1.03 * load_E.sum() / 32


def test_more_replicas_than_ranks_leave_slots_empty():
    with pytest.warns(UserWarning, match="4 spare slots stay empty: every expert has a slot on their ranks"):
        slots = fill_spare_slots(np.array([7]), np.array([0]), 3, 2)
    assert slots.tolist() == [0, -1, -1, 0, -1, -1]


def test_one_hot_load_reaches_an_even_load_first():
    load_E = np.zeros(8, np.int64)
    load_E[5] = 800
    slots = fill_spare_slots(load_E, even_homes(8, 4, 3), 3, 4)
    assert replicas_on_ranks(slots, 8, 4)[5].tolist() == [1, 1, 1, 1]
    assert balanced_peak(load_E, slots, 4).peak == 200


@pytest.mark.parametrize(
    ("experts", "ranks", "slots_per_rank"),
    [(6, 3, 4), (8, 4, 3), (32, 8, 6), (64, 8, 9), (7, 3, 4), (16, 2, 12)],
)
def test_zero_load_spreads_spare_slots_evenly_over_the_experts(experts, ranks, slots_per_rank):
    homes = even_homes(experts, ranks, slots_per_rank)
    slots = fill_spare_slots(np.zeros(experts, np.int64), homes, slots_per_rank, ranks)
    assert slots.min() >= 0
    assert np.ptp(np.bincount(slots, minlength=experts)) <= 1


def test_experts_that_ranks_do_not_divide_are_placed():
    load_E = np.array([5, 9, 1, 1, 1, 1, 50])
    slots = fill_spare_slots(load_E, even_homes(7, 3, 4), 4, 3)
    assert balanced_peak(load_E, slots, 3).peak == -(-load_E.sum() // 3)


@pytest.mark.parametrize(
    ("load", "homes", "slots_per_rank", "ranks", "message"),
    [
        ([1, -2], [0, 2], 2, 2, r"expert 1 are -2; copies must be 0 or more"),
        ([1.0, np.nan], [0, 2], 2, 2, "load_E has type float64; it must be integers"),
        ([1, 2, 3], [0, 1, 2], 1, 2, "3 experts need more than 2 slots; use slots_per_rank=2 or more"),
        ([1, 2], [0, 0], 2, 2, "slot 0 is the home of experts 0 and 1; give one each"),
        ([1, 2], [0, 4], 2, 2, r"home_slot_E goes from 0 to 4; use 0\.\.3"),
        ([1, 2], [0], 2, 2, r"home_slot_E is int64 \(1,\); expected a slot for each of 2 experts"),
        ([1, 2], [0, 1], 0, 2, "slots_per_rank=0 and num_ranks=2 must be at least 1"),
        ([], [], 2, 2, "load_E is empty"),
    ],
)
def test_what_is_no_load_and_no_home_is_refused(load, homes, slots_per_rank, ranks, message):
    with pytest.raises(ValueError, match=message):
        fill_spare_slots(np.array(load), np.array(homes, dtype=np.int64), slots_per_rank, ranks)
