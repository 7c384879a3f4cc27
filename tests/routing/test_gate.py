"""The gate computes in float32 or better, and its scores survive extreme logits."""

import pytest
import torch

from routing.gate import Gate, log_scores, score_dtype, scores

TOKENS, EXPERTS, WIDTH = 5, 7, 11
SCORES = ["softmax", "sigmoid"]


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_router_arithmetic_is_float32_or_better(given, computed):
    gate = Gate(WIDTH, EXPERTS).to(given)
    logits_TE = gate(torch.randn(TOKENS, WIDTH).to(given))
    assert score_dtype(given) == logits_TE.dtype == computed
    assert logits_TE.shape == (TOKENS, EXPERTS)


def test_bfloat16_rows_are_multiplied_without_rounding_to_bfloat16():
    """1 + 2^-7 needs bfloat16's last bit; its square 1 + 2^-6 + 2^-14 needs more bits than that."""
    gate = Gate(1, 1).bfloat16()
    value = 1 + 2.0**-7
    with torch.no_grad():
        gate.weight.fill_(value)
    logits_TE = gate(torch.full((1, 1), value, dtype=torch.bfloat16))
    assert logits_TE.tolist() == [[value * value]]


def test_float64_rows_meet_the_plain_product():
    gate = Gate(WIDTH, EXPERTS).double()
    x_TD = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(gate(x_TD), x_TD @ gate.weight.T, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("score", SCORES)
def test_log_scores_are_the_logarithms_of_the_scores(score):
    logits_TE = torch.randn(TOKENS, EXPERTS, dtype=torch.float64) * 5
    torch.testing.assert_close(log_scores(logits_TE, score).exp(), scores(logits_TE, score))


@pytest.mark.parametrize("score", SCORES)
def test_log_scores_are_finite_where_the_scores_underflow(score):
    logits_TE = torch.tensor([[0.0, -1e4, -5e3]])
    assert scores(logits_TE, score)[0, 1] == 0
    logarithms = log_scores(logits_TE, score)[0]
    # rounding of float32 near 1e4 is 1e-3
    torch.testing.assert_close(logarithms[1:] - logarithms[0], torch.tensor([-1e4, -5e3]), rtol=0, atol=1.0)


def test_softmax_scores_sum_to_one_over_the_experts_and_sigmoid_ones_do_not():
    logits_TE = torch.zeros(TOKENS, EXPERTS)
    torch.testing.assert_close(scores(logits_TE, "softmax").sum(1), torch.ones(TOKENS))
    torch.testing.assert_close(scores(logits_TE, "sigmoid").sum(1), torch.full((TOKENS,), EXPERTS / 2))


@pytest.mark.parametrize("function", [scores, log_scores])
def test_an_unknown_score_lists_the_known_ones(function):
    with pytest.raises(ValueError, match="score='relu' is unknown; use one of softmax, sigmoid"):
        function(torch.zeros(1, 2), "relu")
