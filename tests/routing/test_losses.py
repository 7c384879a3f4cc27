"""Balance losses and z-loss: value at balance, sums over any parts of a batch, padding, gradients."""

import math

import pytest
import torch

from routing import losses
from routing.record import count_experts
from routing.select import top_k

TOKENS, EXPERTS, TOP_K = 12, 7, 3


def batch(num_tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, EXPERTS, dtype=torch.float64, generator=generator) * 2
    return logits_TE, top_k(logits_TE, None, TOP_K)


def fractions(expert_TK):
    return losses.load_fraction(count_experts(expert_TK, EXPERTS), torch.float64)


def test_per_token_value_is_one_at_balance():
    probs_TE = torch.full((TOKENS, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    skewed_E = torch.softmax(torch.arange(EXPERTS, dtype=torch.float64), 0)
    even_E = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
    for fraction_E in (even_E, skewed_E):  # either of the two being even is enough
        assert float(losses.balance_loss(probs_TE, fraction_E)) == pytest.approx(TOKENS, rel=1e-12)


def test_one_is_not_a_lower_bound():
    loss = losses.balance_loss(torch.tensor([[0.385, 0.615]]), torch.tensor([0.75, 0.25]))
    assert float(loss) == pytest.approx(0.885, abs=1e-6)


def test_total_collapse_costs_the_number_of_experts():
    one_hot_E = torch.eye(EXPERTS)[2]
    assert float(losses.balance_loss(one_hot_E.expand(TOKENS, -1), one_hot_E)) == TOKENS * EXPERTS


def test_opposite_imbalances_of_two_layers_do_not_cancel():
    """Per layer the loss is E; on logits joined over layers, f and P would be even and the loss 1."""
    first, second = torch.eye(2)[0], torch.eye(2)[1]
    per_layer = [losses.balance_loss(f.expand(6, -1), f) / 6 for f in (first, second)]
    joined = losses.balance_loss(torch.eye(2).repeat(6, 1), torch.full((2,), 0.5)) / 12
    assert [float(v) for v in per_layer] == [2.0, 2.0]
    assert float(joined) == 1.0


def test_the_gradient_flows_through_the_probabilities_only():
    probs_TE = torch.rand(TOKENS, EXPERTS, requires_grad=True)
    fraction_E = torch.softmax(torch.randn(EXPERTS), 0).requires_grad_(True)
    losses.balance_loss(probs_TE, fraction_E).backward()
    assert fraction_E.grad is None
    torch.testing.assert_close(probs_TE.grad, (EXPERTS * fraction_E.detach()).expand(TOKENS, -1))


@pytest.mark.parametrize("parts", [(TOKENS,), (0, 1, 11), (5, 7), (4, 0, 8)], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_sum_and_gradient_do_not_depend_on_how_a_batch_is_divided(parts, score):
    """The fractions are those of the whole batch, as scopes global and previous give them."""
    logits_TE, expert_TK = batch()
    leaf = logits_TE.clone().requires_grad_(True)
    total = losses.balance_loss(losses.router_probs(leaf, score), fractions(expert_TK)) + losses.z_loss(leaf)
    total.backward()
    divided = logits_TE.clone().requires_grad_(True)
    for part in divided.split(parts):
        loss = losses.balance_loss(losses.router_probs(part, score), fractions(expert_TK))
        (loss + losses.z_loss(part)).backward(retain_graph=True)
    torch.testing.assert_close(divided.grad, leaf.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_tokens", [TOKENS, EXPERTS], ids=["T=12", "T=E"])
def test_padding_is_in_none_of_the_losses(num_tokens):
    """NaN rows as padding, also where tokens and experts are as many and a mask could meet the wrong axis."""
    logits_TE, expert_TK = batch(num_tokens)
    mask_T = torch.arange(num_tokens) % 3 != 1
    padded = torch.where(mask_T[:, None], logits_TE, torch.nan)
    masked_TK = torch.where(mask_T[:, None], expert_TK, -1)
    f_E, valid = fractions(expert_TK[mask_T]), losses.router_probs(logits_TE[mask_T], "softmax")
    probs_TE = losses.router_probs(padded, "softmax")
    same = {
        "balance": (losses.balance_loss(probs_TE, f_E, mask_T), losses.balance_loss(valid, f_E)),
        "z": (losses.z_loss(padded, mask_T), losses.z_loss(logits_TE[mask_T])),
        "sequence": (
            losses.sequence_balance_loss(probs_TE, masked_TK, 1, mask_T),
            losses.sequence_balance_loss(valid, expert_TK[mask_T], 1),
        ),
    }
    for name, (got, want) in same.items():
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0, msg=name)


def test_sequence_loss_is_the_balance_loss_of_each_sequence_by_itself():
    logits_TE, expert_TK = batch()
    probs_TE = losses.router_probs(logits_TE, "softmax")
    each = [
        losses.balance_loss(p, fractions(e))
        for p, e in zip(probs_TE.split(4), expert_TK.split(4), strict=True)
    ]
    got = losses.sequence_balance_loss(probs_TE, expert_TK, 3)
    torch.testing.assert_close(got, sum(each), rtol=1e-12, atol=0)
    assert abs(float(got - losses.balance_loss(probs_TE, fractions(expert_TK)))) > 0.1


def test_sequences_with_unequal_padding_keep_shares_of_their_own():
    """3, 1 and 0 valid tokens of 4: the shares of a sequence are divided by its own copies."""
    logits_TE, expert_TK = batch()
    mask_T = torch.tensor([1, 1, 0, 1] + [0, 0, 1, 0] + [0, 0, 0, 0], dtype=torch.bool)
    probs_TE = losses.router_probs(logits_TE, "softmax")
    each = []
    for part in torch.arange(TOKENS).split(4):
        valid = part[mask_T[part]]
        each.append(losses.balance_loss(probs_TE[valid], fractions(expert_TK[valid])))
    masked_TK = torch.where(mask_T[:, None], expert_TK, -1)
    got = losses.sequence_balance_loss(probs_TE, masked_TK, 3, mask_T)
    torch.testing.assert_close(got, sum(each), rtol=1e-12, atol=0)


def test_sequence_loss_is_one_per_token_where_each_sequence_is_balanced():
    expert_TK = torch.arange(2 * EXPERTS).view(-1, 1) % EXPERTS
    probs_TE = torch.softmax(torch.randn(2 * EXPERTS, EXPERTS, dtype=torch.float64), 1)
    loss = losses.sequence_balance_loss(probs_TE, expert_TK, 2)
    assert float(loss) == pytest.approx(2 * EXPERTS, rel=1e-12)


@pytest.mark.parametrize("num_sequences", [0, 5, 13])
def test_tokens_that_make_no_whole_sequences_are_refused(num_sequences):
    probs_TE, expert_TK = torch.zeros(TOKENS, EXPERTS), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"12 tokens are no multiple of num_sequences={num_sequences}"):
        losses.sequence_balance_loss(probs_TE, expert_TK, num_sequences)


def test_no_token_gives_zero_losses_with_a_gradient():
    logits = torch.zeros(0, EXPERTS, requires_grad=True)
    probs_TE, none = losses.router_probs(logits, "softmax"), torch.zeros(0, TOP_K, dtype=torch.int64)
    total = losses.balance_loss(probs_TE, torch.ones(EXPERTS)) + losses.z_loss(logits)
    total = total + losses.sequence_balance_loss(probs_TE, none, 0)
    total.backward()
    assert float(total.detach()) == 0 and logits.grad is not None


def test_z_loss_is_the_square_of_logsumexp():
    assert float(losses.z_loss(torch.zeros(5, EXPERTS))) == pytest.approx(
        5 * math.log(EXPERTS) ** 2, rel=1e-6
    )
    logits_TE, _ = batch()
    plain = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_TE.tolist())
    assert float(losses.z_loss(logits_TE)) == pytest.approx(plain, rel=1e-12)


def test_fractions_are_shares_and_uniform_where_nothing_was_counted():
    fraction_E = losses.load_fraction(torch.tensor([3, 0, 1]), torch.float64)
    assert fraction_E.tolist() == [0.75, 0.0, 0.25]
    assert losses.load_fraction(torch.zeros(4, dtype=torch.int64)).tolist() == [0.25] * 4
    large = losses.load_fraction(torch.tensor([2**40, 3 * 2**40]), torch.float64)
    assert large.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shift", [0.0, -1e2, -1e4])
def test_probabilities_sum_to_one_where_every_score_underflows(score, shift):
    probs_TE = losses.router_probs(torch.randn(TOKENS, EXPERTS) + shift, score)
    # float32: 7 terms of rounding 6e-8
    torch.testing.assert_close(probs_TE.sum(1), torch.ones(TOKENS), rtol=0, atol=1e-6)


def test_a_sigmoid_router_cannot_lower_its_loss_by_shrinking_its_scores():
    logits_TE, expert_TK = batch()
    f_E = fractions(expert_TK)
    small, smaller = (
        float(losses.balance_loss(losses.router_probs(logits_TE - c, "sigmoid"), f_E)) for c in (40.0, 80.0)
    )
    assert small == pytest.approx(smaller, rel=1e-9)
    assert small > TOKENS


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_losses_pass_gradcheck(score):
    logits_TE, expert_TK = batch(4)

    def loss(leaf):
        probs_TE = losses.router_probs(leaf, score)
        total = losses.balance_loss(probs_TE, fractions(expert_TK)) + losses.z_loss(leaf)
        return total + losses.sequence_balance_loss(probs_TE, expert_TK, 2)

    assert torch.autograd.gradcheck(loss, (logits_TE.requires_grad_(True),))
