"""Router: what it says about a batch, over types, padding, ties, extremes and bad input."""

import pytest
import torch
from torch.nn import functional as F

from routing import Router, RouterConfig

TOKENS, EXPERTS, TOP_K, WIDTH = 13, 7, 3, 5


def make_router(**changes):
    torch.manual_seed(2)
    router = Router(
        RouterConfig(**({"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K} | changes))
    ).double()
    with torch.no_grad():
        router.gate.weight.mul_(50)
    return router


def rows(num_tokens=TOKENS, seed=3):
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_token_has_its_copies_in_a_row_and_all_are_counted():
    routing = make_router()(rows())
    assert routing.token_N.tolist() == [t for t in range(TOKENS) for _ in range(TOP_K)]
    assert routing.logits_TE.shape == routing.scores_TE.shape == (TOKENS, EXPERTS)
    assert routing.expert_N.shape == routing.weight_N.shape == (TOKENS * TOP_K,)
    assert routing.demand_E.tolist() == [int((routing.expert_N == e).sum()) for e in range(EXPERTS)]
    assert torch.equal(routing.demand_E, routing.routed_E)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_and_gate_gradient_equal_the_formula(score, normalize, scale):
    """The gradient of the gate through the weights: the selection itself has none, nothing is detached."""
    router, x_TD = make_router(score=score, normalize=normalize, scale=scale), rows()
    factor_N = torch.linspace(-1, 1, TOKENS * TOP_K, dtype=torch.float64)
    routing = router(x_TD)
    (routing.weight_N * factor_N).sum().backward()
    leaf = router.gate.weight.detach().clone().requires_grad_(True)
    logits_TE = F.linear(x_TD, leaf)
    scores_TE = logits_TE.softmax(1) if score == "softmax" else 1 / (1 + (-logits_TE).exp())
    weight_TK = scores_TE.gather(1, scores_TE.topk(TOP_K).indices)
    weight_TK = weight_TK / weight_TK.sum(1, keepdim=True) if normalize else weight_TK
    (weight_TK.reshape(-1) * scale * factor_N).sum().backward()
    torch.testing.assert_close(routing.weight_N, (weight_TK * scale).reshape(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(router.gate.weight.grad, leaf.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_tokens", [1, EXPERTS, TOKENS], ids=["T=1", "T=E", "T=13"])
def test_padding_gets_no_expert_no_weight_and_no_count(num_tokens):
    router, x_TD = make_router(), rows(num_tokens)
    mask_T = torch.arange(num_tokens) % 2 == 0
    routing, alone = router(x_TD, mask_T), router(x_TD[mask_T])
    expert_TK, weight_TK = routing.expert_N.view(-1, TOP_K), routing.weight_N.view(-1, TOP_K)
    assert (expert_TK[~mask_T] == -1).all() and (weight_TK[~mask_T] == 0).all()
    assert torch.equal(expert_TK[mask_T].reshape(-1), alone.expert_N)
    assert torch.equal(routing.demand_E, alone.demand_E)
    torch.testing.assert_close(weight_TK[mask_T].reshape(-1), alone.weight_N, rtol=1e-12, atol=1e-14)
    assert torch.equal(routing.token_mask_T, mask_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_go_to_the_lowest_ids(dtype, score):
    """Experts 1 = 3 = 5 are best, 0 = 2 = 4 = 6 next: the same integers, exact in every type."""
    router = make_router(score=score, top_k=5).to(dtype)
    with torch.no_grad():
        router.gate.weight.copy_((torch.arange(EXPERTS) % 2)[:, None].expand(-1, WIDTH))
    routing = router(torch.ones(TOKENS, WIDTH, dtype=dtype))
    assert routing.expert_N.view(-1, 5).tolist() == [[1, 3, 5, 0, 2]] * TOKENS


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowest", [-1e2, -1e3, -1e4])
def test_weights_sum_to_one_for_logits_far_below_zero(score, dtype, lowest):
    router = make_router(score=score).to(dtype)
    with torch.no_grad():
        router.gate.weight.fill_(lowest / WIDTH)
    routing = router(torch.ones(TOKENS, WIDTH, dtype=dtype))
    assert (routing.logits_TE < lowest * 0.99).all()
    sums_T = routing.weight_N.view(-1, TOP_K).sum(1)
    torch.testing.assert_close(sums_T, torch.ones(TOKENS), rtol=0, atol=1e-6)
    routing.weight_N.square().sum().backward()
    assert torch.isfinite(router.gate.weight.grad).all()


def test_the_bias_selects_and_never_weighs():
    router, x_TD = make_router(top_k=EXPERTS - 1), rows()
    free = router(x_TD)
    router.bias.set(torch.tensor([-9.0] + [0.0] * (EXPERTS - 1)))  # everybody but expert 0
    biased = router(x_TD)
    assert int(free.demand_E[0]) > 0 and int(biased.demand_E[0]) == 0
    expert_TK = biased.expert_N.view(TOKENS, -1)
    chosen_TK = free.scores_TE.gather(1, expert_TK)
    want = chosen_TK / chosen_TK.sum(1, keepdim=True)
    torch.testing.assert_close(biased.weight_N.view(TOKENS, -1), want, rtol=1e-12, atol=1e-14)
    assert torch.equal(free.scores_TE, biased.scores_TE)


def test_a_small_bias_decides_in_bfloat16_too():
    """1e-3 is below bfloat16's resolution at 0.14, but scores and bias meet in float32."""
    router = make_router(top_k=1).bfloat16()
    with torch.no_grad():
        router.gate.weight.zero_()
    router.bias.set(torch.tensor([0.0, 0, 0, 0, 1e-5, 0, 0]))
    assert router(torch.ones(TOKENS, WIDTH).bfloat16()).demand_E[4] == TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_and_scores_are_float32_or_better(dtype):
    routing = make_router().to(dtype)(rows().to(dtype))
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.weight_N.dtype == routing.scores_TE.dtype == routing.logits_TE.dtype == want


def test_no_token_is_a_routing_of_no_copies():
    routing = make_router()(rows(0))
    assert routing.num_tokens == 0 and routing.expert_N.shape == (0,)
    assert routing.demand_E.tolist() == [0] * EXPERTS
    assert make_router()(rows(3), torch.zeros(3, dtype=torch.bool)).demand_E.tolist() == [0] * EXPERTS


@pytest.mark.parametrize("shape", [(TOKENS, WIDTH + 1), (TOKENS,), (2, 3, WIDTH)], ids=str)
def test_rows_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"x has shape \(.*\), expected \(T, 5\)"):
        make_router()(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(TOKENS + 1, dtype=torch.bool),
        torch.ones(TOKENS, 1, dtype=torch.bool),
        torch.ones(TOKENS, dtype=torch.int64),
    ],
    ids=["longer", "two_dims", "int64"],
)
def test_masks_that_are_not_one_bool_per_token_are_refused(mask):
    with pytest.raises(ValueError, match=r"token_mask has shape .* expected \(13,\) of torch\.bool"):
        make_router()(rows(), mask)
