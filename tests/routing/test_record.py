"""Routing checks its shapes and types; count_experts is exact."""

import pytest
import torch

from routing.record import Routing, count_experts

TOKENS, EXPERTS, TOP_K = 5, 7, 3


def fields(**changes):
    copies = TOKENS * TOP_K
    counts_E = torch.zeros(EXPERTS, dtype=torch.int64)
    given = {
        "token_N": torch.arange(TOKENS).repeat_interleave(TOP_K),
        "expert_N": torch.zeros(copies, dtype=torch.int64),
        "weight_N": torch.ones(copies),
        "scores_TE": torch.zeros(TOKENS, EXPERTS),
        "logits_TE": torch.zeros(TOKENS, EXPERTS),
        "demand_E": counts_E,
        "routed_E": counts_E,
        "num_tokens": TOKENS,
        "top_k": TOP_K,
    }
    return given | changes


def test_number_of_experts_is_the_width_of_the_scores():
    assert Routing(**fields()).num_experts == EXPERTS


@pytest.mark.parametrize("name", ["expert_N", "weight_N"])
def test_copy_lists_of_different_length_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(14,\), expected \(15,\) like token_N"):
        Routing(**fields(**{name: torch.zeros(14, dtype=torch.int64)}))


def test_a_copy_list_in_two_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"weight_N has shape \(5, 3\), expected \(15,\)"):
        Routing(**fields(weight_N=torch.ones(TOKENS, TOP_K)))


def test_regular_routing_needs_top_k_copies_of_every_token():
    with pytest.raises(ValueError, match=r"15 copies do not make 5 tokens of top_k=2; give top_k=None"):
        Routing(**fields(top_k=2))
    assert Routing(**fields(top_k=None)).top_k is None


@pytest.mark.parametrize("name", ["demand_E", "routed_E"])
def test_counts_that_are_not_int64_are_refused(name):
    with pytest.raises(ValueError, match=r"torch\.int32.*expected torch\.int64"):
        Routing(**fields(**{name: torch.zeros(EXPERTS, dtype=torch.int32)}))


@pytest.mark.parametrize("shape", [(0,), (1,), (11, TOP_K), (4, 2, 3)], ids=str)
def test_counts_equal_counting_one_by_one(shape):
    ids = torch.randint(-1, EXPERTS, shape, generator=torch.Generator().manual_seed(3))
    expected = [sum(e == expert for e in ids.reshape(-1).tolist()) for expert in range(EXPERTS)]
    counts_E = count_experts(ids, EXPERTS)
    assert counts_E.dtype == torch.int64
    assert counts_E.tolist() == expected


def test_copies_that_are_not_routed_are_not_counted():
    assert count_experts(torch.tensor([-1, -1, 2, -1]), 3).tolist() == [0, 0, 1]


def test_counts_beyond_float32_integers_stay_exact():
    """2^24 + 1 is the first integer that float32 cannot hold."""
    many = 2**24 + 1
    assert count_experts(torch.ones(1, dtype=torch.int64).expand(many), 2).tolist() == [0, many]
