"""Placement: homes, and the even split's conservation, evenness and order."""

import numpy as np
import pytest

from moe.placement import even_split, home_slots

SLOTS = np.array([3, 0, 2, -1, 1, 2, 2, 0, -1])  # expert 2 three times, 0 twice, two empty slots
EXPERTS, RANKS = 4, 5


def counts(seed):
    return np.random.default_rng(seed).integers(0, 12, (RANKS, EXPERTS))


@pytest.mark.parametrize("seed", range(4))
def test_slots_of_an_expert_share_its_copies_evenly_and_lose_none(seed):
    counts_PE = counts(seed)
    rows_PS = even_split(counts_PE, SLOTS)
    assert rows_PS.dtype == np.int64
    for expert in range(EXPERTS):
        shares = rows_PS[:, expert == SLOTS]
        np.testing.assert_array_equal(shares.sum(axis=1), counts_PE[:, expert])
        assert (shares.max(axis=1) - shares.min(axis=1) <= 1).all()
        assert (np.diff(shares, axis=1) <= 0).all(), "earlier slots take the rest"
    assert not rows_PS[:, SLOTS < 0].any()


def test_without_replicas_the_split_is_the_counts():
    np.testing.assert_array_equal(even_split(counts(1), home_slots(EXPERTS, 2)), counts(1))


def test_homes_stand_in_expert_order():
    assert home_slots(6, 3).tolist() == [0, 1, 2, 3, 4, 5]


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_experts=6 is not divisible by ep_size=4; use 4 or 8"):
        home_slots(6, 4)


def test_an_expert_without_a_slot_is_refused_only_where_it_has_copies():
    slots = np.array([0, 2, 3, 0])
    assert even_split(np.array([[1, 0, 2, 3]]), slots).tolist() == [[1, 2, 3, 0]]
    with pytest.raises(ValueError, match="expert 1 has 7 copies and no slot; give every expert a slot"):
        even_split(np.array([[1, 3, 2, 3], [0, 4, 0, 0]]), slots)
