"""Selection: ties go to the lowest id, no expert twice, the bias selects and never weighs."""

import pytest
import torch

from routing.gate import scores
from routing.select import selected_weights, top_k

TOKENS, EXPERTS, TOP_K = 13, 7, 3
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def brute_force(scores_TE, bias_E, k):
    """Sort by (score + bias, lowest id) with Python's own stable sort."""
    biased = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in biased.tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, TOP_K, EXPERTS])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_selection_equals_a_sort_by_score_then_id(dtype, k, with_bias):
    """Scores of four values only, so that most rows hold ties."""
    generator = torch.Generator().manual_seed(5)
    scores_TE = (torch.randint(0, 4, (TOKENS, EXPERTS), generator=generator) / 4).to(dtype)
    bias_E = torch.tensor([0, 0.25, 0, -0.25, 0.5, 0, 0.25]) if with_bias else None
    expert_TK = top_k(scores_TE, bias_E, k)
    assert expert_TK.dtype == torch.int64
    assert expert_TK.tolist() == brute_force(scores_TE, bias_E, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_equal_scores_select_the_lowest_ids(dtype):
    expert_TK = top_k(torch.full((TOKENS, 64), 0.125, dtype=dtype), None, 8)
    assert expert_TK.tolist() == [list(range(8))] * TOKENS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_expert_is_selected_twice(dtype):
    """Underflowed scores are all 0: the mark of a selected expert must be below them."""
    for scores_TE in (torch.zeros(TOKENS, EXPERTS, dtype=dtype), torch.rand(TOKENS, EXPERTS).to(dtype)):
        for row in top_k(scores_TE, torch.full((EXPERTS,), -1e30), EXPERTS).tolist():
            assert sorted(row) == list(range(EXPERTS))


def test_selection_leaves_the_scores_alone():
    scores_TE = torch.rand(TOKENS, EXPERTS)
    before = scores_TE.clone()
    top_k(scores_TE, None, TOP_K)
    top_k(scores_TE, torch.zeros(EXPERTS), TOP_K)
    assert torch.equal(scores_TE, before)


def test_the_bias_is_added_to_the_score():
    scores_TE = torch.tensor([[0.5, 0.3, 0.2]])
    assert top_k(scores_TE, torch.tensor([0.0, 0.1, 0.35]), 2).tolist() == [[2, 0]]


@pytest.mark.parametrize("k", [0, EXPERTS + 1])
def test_k_out_of_bounds_is_refused(k):
    with pytest.raises(ValueError, match=rf"k={k} is out of 1\.\.7"):
        top_k(torch.zeros(TOKENS, EXPERTS), None, k)


def test_no_token_selects_nothing():
    assert top_k(torch.zeros(0, EXPERTS), None, TOP_K).shape == (0, TOP_K)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("lowest", [0.0, -30.0, -1e3, -1e4])
def test_normalised_weights_sum_to_one_where_every_selected_score_underflows(score, lowest):
    """The selected ones lie near `lowest`; another expert at 0 makes their softmax underflow too."""
    logits_TE = torch.full((TOKENS, EXPERTS), lowest) + torch.arange(EXPERTS) / 8
    logits_TE[:, 0] = 0.0
    chosen_TK = torch.tensor([[2, 6, 4]]).expand(TOKENS, -1)
    weight_TK = selected_weights(
        logits_TE, scores(logits_TE, score), chosen_TK, score=score, normalize=True
    ).double()
    torch.testing.assert_close(weight_TK.sum(1), torch.ones(TOKENS, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (weight_TK > 0.1).all(), "the ratios of the scores survive too"


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_and_their_gradient_equal_the_plain_quotient(score, normalize):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, generator=generator)
    chosen_TK = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    factor = torch.randn(TOKENS, TOP_K, dtype=torch.float64, generator=generator)
    outcomes = []
    for plain in (True, False):
        leaf = logits.clone().requires_grad_(True)
        scores_TE = scores(leaf, score)
        if plain:
            weight_TK = scores_TE.gather(1, chosen_TK)
            weight_TK = weight_TK / weight_TK.sum(1, keepdim=True) if normalize else weight_TK
        else:
            weight_TK = selected_weights(leaf, scores_TE, chosen_TK, score=score, normalize=normalize)
        (weight_TK * factor).sum().backward()
        outcomes.append((weight_TK.detach(), leaf.grad))
    # float64: rounding only
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-12, atol=1e-14)


def test_the_weights_pass_gradcheck():
    logits = torch.randn(3, EXPERTS, dtype=torch.float64, requires_grad=True)
    chosen_TK = torch.tensor([[0, 4, 2]]).expand(3, -1)

    def weights(leaf):
        return selected_weights(leaf, leaf.sigmoid(), chosen_TK, score="sigmoid", normalize=True)

    assert torch.autograd.gradcheck(weights, (logits,))
