"""The reference of the device's split: rows conserved, own rows first, how near it comes to the optimum."""

import doctest

import numpy as np
import pytest

from balancer import split_device
from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit
from balancer.split_device import device_split, device_tables, overlaps, water_fill


def case(seed, experts, ranks, kind):
    rng = np.random.default_rng(seed)
    weight_E = rng.lognormal(0, 1, experts) if kind == "lognormal" else 1 / (1 + rng.permutation(experts))
    counts_PE = rng.multinomial(8192, weight_E / weight_E.sum(), size=ranks)
    homes = experts // ranks
    home_slot_E = np.arange(experts) // homes * (homes + 1) + np.arange(experts) % homes
    return counts_PE, fill_spare_slots(counts_PE.sum(axis=0), home_slot_E, homes + 1, ranks)


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(split_device)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("kind", ["lognormal", "zipf"])
@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (256, 32)])
def test_the_default_sweeps_come_within_one_percent_of_the_optimal_peak(experts, ranks, kind):
    """Measured: 0.55 % at most over these, most cases 0 to a row; 16 sweeps leave up to 1.9 %."""
    for seed in range(4):
        counts_PE, slots = case(seed, experts, ranks, kind)
        _, load_P = device_split(counts_PE, device_tables(slots, experts, ranks), slots.size)
        optimum = ExactSplit(locality=False).solve(counts_PE, slots).peak
        assert optimum <= load_P.max() <= 1.01 * optimum


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_conserved_and_own_rows_stay_first(seed):
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, 7)), int(rng.integers(1, 12))
    slots = np.concatenate([np.arange(experts), rng.integers(-1, experts, -experts % ranks + ranks)])
    rng.shuffle(slots)
    counts_PE = rng.integers(0, 50, (ranks, experts)) * (rng.random((ranks, experts)) < 0.7)
    rows_PS, load_P = device_split(counts_PE, device_tables(slots, experts, ranks), slots.size)
    for expert in range(experts):
        np.testing.assert_array_equal(rows_PS[:, slots == expert].sum(axis=1), counts_PE[:, expert])
    np.testing.assert_array_equal(rows_PS.reshape(ranks, ranks, -1).sum(axis=(0, 2)), load_P)
    assert rows_PS.min() >= 0
    assert not rows_PS[:, slots < 0].any()
    for slot, rank in enumerate(np.arange(slots.size) // (slots.size // ranks)):
        if slots[slot] >= 0 and rows_PS[:, slot].sum() > rows_PS[rank, slot]:  # takes others' rows:
            on_rank = (slots == slots[slot]) & (np.arange(slots.size) // (slots.size // ranks) == rank)
            assert rows_PS[rank, on_rank].sum() == counts_PE[rank, slots[slot]]  # its own are all here


def test_water_fill_levels_the_lowest():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        load_R, rows = rng.integers(0, 20, rng.integers(1, 9)), int(rng.integers(0, 60))
        added_R = water_fill(load_R, rows)
        assert added_R.min() >= 0
        assert added_R.sum() == rows
        lifted = (load_R + added_R)[added_R > 0]
        assert lifted.size == 0 or lifted.max() - (load_R + added_R).min() <= 1


def test_overlaps_are_the_north_west_corner():
    assert overlaps(np.array([3, 0, 4]), np.array([2, 5])).tolist() == [[2, 1], [0, 0], [0, 4]]
