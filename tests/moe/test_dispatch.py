"""Dispatch and combine, row by row: every row names the token that it came from."""

import numpy as np
import pytest
import torch

from moe.dispatch import combine, dispatch
from moe.exchange import DistExchange, SoloExchange, all_to_all_v
from moe.placement import even_split
from moe.testing import run_loopback, run_ranks, source_payload
from routing.record import Routing, count_experts

EXPERTS, TOP_K, WIDTH = 6, 2, 5
HOMES = np.arange(EXPERTS)
SHUFFLED = np.array([4, 1, 5, 0, 2, 3])
REPLICAS = np.array([0, 1, 5, 2, 3, 5, 4, 5, -1, 5, -1, 0])  # expert 5 four times, two empty slots
PLACEMENTS = {"homes": HOMES, "shuffled": SHUFFLED, "replicas": REPLICAS}
CHOICES = ("random", "one_hot", "one_rank", "zeros_at_ends", "some_unrouted")


def choose(rank: int, num_tokens: int, how: str) -> torch.Tensor:
    """expert_TK, distinct within a token; -1 where not routed."""
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    if how == "one_hot":
        expert_TK[:, 0], expert_TK[:, 1] = 5, 0
    if how == "one_rank":
        expert_TK[:, 0], expert_TK[:, 1] = 5, 4
    if how == "zeros_at_ends":
        expert_TK = torch.rand(num_tokens, EXPERTS - 2, generator=generator).argsort(1)[:, :TOP_K] + 1
    if how == "some_unrouted":
        expert_TK[::2, 1] = -1
        expert_TK[1::3] = -1
    return expert_TK


def make_routing(expert_TK: torch.Tensor, regular: bool = True) -> Routing:
    num_tokens = expert_TK.shape[0]
    counts_E = count_experts(expert_TK, EXPERTS)
    weight_N = torch.where(expert_TK.reshape(-1) < 0, 0.0, torch.linspace(0.1, 1.0, expert_TK.numel()))
    return Routing(
        token_N=torch.arange(num_tokens).repeat_interleave(TOP_K),
        expert_N=expert_TK.reshape(-1),
        weight_N=weight_N.double(),
        scores_TE=torch.zeros(num_tokens, EXPERTS),
        logits_TE=torch.zeros(num_tokens, EXPERTS),
        demand_E=counts_E,
        routed_E=counts_E,
        num_tokens=num_tokens,
        top_k=TOP_K if regular else None,
    )


def round_trip(exchange, tokens_P, how, slot_to_expert_S, regular=True):
    rank = exchange.rank
    routing = make_routing(choose(rank, tokens_P[rank], how), regular)
    counts_PE = exchange.all_gather(routing.routed_E).numpy()
    rows_PS = even_split(counts_PE, slot_to_expert_S)
    x_TD = source_payload(rank, tokens_P[rank], WIDTH).clone().requires_grad_(True)
    rows_RD, handle = dispatch(x_TD, routing, rows_PS, slot_to_expert_S, exchange)
    y_TD = combine(rows_RD * 2, handle)
    y_TD.sum().backward()
    weight_T = routing.weight_N.view(-1, TOP_K).sum(1)
    assert x_TD.grad is not None
    return {
        "rows": rows_RD.detach().numpy(),
        "per_slot": handle.rows_by_source_Ps.sum(dim=0).tolist(),
        "y_error": (y_TD - 2 * weight_T[:, None] * x_TD).detach().abs().max().item() if len(x_TD) else 0.0,
        "grad_error": (x_TD.grad - 2 * weight_T[:, None]).abs().max().item() if len(x_TD) else 0.0,
    }


def expected_rows(tokens_P, how, slot_to_expert_S, rank):
    """Source of every row that a rank must receive, in order (slot, source rank, token), by counting one by
    one."""
    world, local = len(tokens_P), len(slot_to_expert_S) // len(tokens_P)
    counts_PE = np.stack([count_experts(choose(p, t, how), EXPERTS).numpy() for p, t in enumerate(tokens_P)])
    rows_PS = even_split(counts_PE, slot_to_expert_S)
    rows, per_slot = [], []
    for slot in range(rank * local, (rank + 1) * local):
        begun = len(rows)
        for source in range(world):
            expert = slot_to_expert_S[slot]
            tokens = (choose(source, tokens_P[source], how) == expert).any(1).nonzero()[:, 0].tolist()
            earlier = sum(rows_PS[source, s] for s in range(slot) if slot_to_expert_S[s] == expert)
            if expert >= 0:
                mine = tokens[earlier : earlier + rows_PS[source, slot]]
                rows += [source * 1000 + token for token in mine]
        per_slot.append(len(rows) - begun)
    return rows, per_slot


def check(results, tokens_P, how, slot_to_expert_S):
    for rank, result in enumerate(results):
        rows, per_slot = expected_rows(tokens_P, how, slot_to_expert_S, rank)
        assert result["per_slot"] == per_slot
        np.testing.assert_array_equal(
            result["rows"], np.repeat(np.array(rows)[:, None], WIDTH, 1).reshape(-1, WIDTH)
        )
        assert result["y_error"] < 1e-9, "rows come back to their own token"
        assert result["grad_error"] < 1e-12


@pytest.mark.parametrize("regular", [True, False], ids=["regular", "copy_list"])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("tokens_P", [(9,), (0,), (7, 64), (0, 1, 7), (0, 0)], ids=str)
def test_every_row_reaches_its_slot_and_returns_to_its_token(tokens_P, how, placement, regular):
    slots = PLACEMENTS[placement]
    results = run_loopback(round_trip, len(tokens_P), tokens_P, how, slots, regular)
    check(results, tokens_P, how, slots)


def round_trip_on_ranks(rank, world, tokens_P, how, slots):
    return round_trip(DistExchange(None), tokens_P, how, np.array(slots))


@pytest.mark.dist
def test_rows_name_their_source_on_gloo_ranks():
    tokens_P = (0, 7, 64)
    results = run_ranks(round_trip_on_ranks, 3, tokens_P, "random", REPLICAS.tolist())
    check(results, tokens_P, "random", REPLICAS)


def test_splits_that_do_not_fit_the_rows_raise_before_the_call():
    with pytest.raises(ValueError, match=r"input_splits \[3\] do not sum to the 2 rows given"):
        all_to_all_v(torch.zeros(2, 3), SoloExchange(), [3], [3])
    with pytest.raises(ValueError, match="2 input and 1 output splits for 1 ranks"):
        all_to_all_v(torch.zeros(2, 3), SoloExchange(), [1, 1], [2])


def test_rows_for_an_empty_slot_are_refused():
    routing = make_routing(choose(0, 3, "random"))
    with pytest.raises(ValueError, match="empty slot"):
        dispatch(
            torch.zeros(3, WIDTH), routing, np.ones((1, 2), dtype=np.int64), np.array([0, -1]), SoloExchange()
        )


def test_an_expert_with_copies_and_no_slot_is_refused():
    with pytest.raises(ValueError, match="expert 1 has 4 copies and no slot"):
        even_split(np.array([[2, 4]]), np.array([0, 0]))
