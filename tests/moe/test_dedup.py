"""Deduplicated dispatch against the plain one, against a loop over copies, and against counting by sets."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe.dedup import combine_unique, dispatch_unique
from moe.dedup_tables import (
    count_arrivals,
    count_arrivals_torch,
    count_pairs,
    count_pairs_torch,
    index_pairs,
    index_pairs_torch,
    place_copies,
    place_copies_torch,
)
from moe.dispatch import combine, dispatch, dispatch_weights
from moe.exchange import DistExchange, SoloExchange
from moe.permute import order_copies
from moe.placement import even_split
from moe.recompute import as_leaf, checkpoint, current_memory, kept
from moe.testing import run_loopback, run_ranks, source_payload
from routing.record import Routing, count_experts

EXPERTS, WIDTH = 6, 5
PLACEMENTS = {  # 12 slots: a multiple of 1, 2, 3 and 4 ranks
    "spread": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    "same_rank": [5, 5, 5, 0, 0, 1, 2, -1, 3, 4, -1, -1],  # several slots of one expert side by side
    "empty_anywhere": [-1, 0, 5, 1, -1, 2, 5, 3, 4, 5, -1, -1],
    "empty_rank": [-1, -1, -1, 4, 3, 2, 1, 0, 5, 5, 4, 4],  # of 4 ranks, the first has no expert
}
CHOICES = ("random", "one_hot", "one_rank", "unrouted", "repeated")
TOKENS = [(7,), (7, 64), (0, 0), (0, 1, 7), (64, 0, 1, 7)]


def choose(rank, num_tokens, top_k, how):
    """expert_TK; distinct within a token but for "repeated", -1 where not routed."""
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :top_k]
    if how == "one_hot":
        expert_TK[:] = torch.arange(EXPERTS - 1, EXPERTS - 1 - top_k, -1)
    if how == "one_rank":  # experts 3 and 4 stand side by side, others as drawn are not routed
        expert_TK = torch.where((expert_TK == 3) | (expert_TK == 4), expert_TK, -1)
    if how == "unrouted":
        expert_TK[::2, -1] = -1
        expert_TK[1::3] = -1
    if how == "repeated":
        expert_TK[:, -1] = expert_TK[:, 0]
    return expert_TK


def random_split(counts_PE, slot_to_expert_S):
    """Every expert's copies fall on its slots at random; the same on every rank."""
    draw = np.random.default_rng(5)
    rows_PS = np.zeros((counts_PE.shape[0], slot_to_expert_S.shape[0]), dtype=np.int64)
    for expert in range(counts_PE.shape[1]):
        slots = np.flatnonzero(slot_to_expert_S == expert)
        for rank, copies in enumerate(counts_PE[:, expert]):
            rows_PS[rank, slots] = draw.multinomial(copies, np.full(slots.size, 1 / slots.size))
    return rows_PS


def make_routing(expert_TK, weight_N):
    counts_E = count_experts(expert_TK, EXPERTS)
    num_tokens, top_k = expert_TK.shape
    scores_TE = torch.zeros(num_tokens, EXPERTS)
    return Routing(
        token_N=torch.arange(num_tokens).repeat_interleave(top_k),
        expert_N=expert_TK.reshape(-1),
        weight_N=weight_N,
        scores_TE=scores_TE,
        logits_TE=scores_TE,
        demand_E=counts_E,
        routed_E=counts_E,
        num_tokens=num_tokens,
        top_k=top_k,
    )


def make_case(exchange, tokens_P, top_k, how, placement, split=even_split, dtype=torch.float64):
    """One rank's inputs, all leaves: rows x, weights, and scale_ED, which makes an expert of a row."""
    rank = exchange.rank
    generator = torch.Generator().manual_seed(100 + rank)
    expert_TK = choose(rank, tokens_P[rank], top_k, how)
    x_TD = torch.randn(tokens_P[rank], WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    acc = torch.promote_types(dtype, torch.float32)
    weight_N = torch.rand(expert_TK.numel(), generator=generator, dtype=torch.float64).to(acc)
    weight_N = torch.where(expert_TK.reshape(-1) < 0, 0.0, weight_N)
    scale_ED = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slots = np.array(PLACEMENTS[placement])
    counts_PE = exchange.all_gather(count_experts(expert_TK, EXPERTS)).numpy()
    return SimpleNamespace(
        exchange=exchange,
        expert_TK=expert_TK,
        slots=slots,
        local_slots=slots.reshape(exchange.size, -1)[rank],
        rows_PS=split(counts_PE, slots),
        x=x_TD.requires_grad_(),
        weight=weight_N.requires_grad_(),
        scale=scale_ED.to(dtype).requires_grad_(),
        factor=torch.randn(x_TD.shape, generator=generator, dtype=torch.float64),
    )


def experts(rows_RD, scale_ED, expert_R):
    return torch.tanh(rows_RD) * scale_ED[expert_R]


def expert_of_rows(case, rows_Ps):
    return torch.from_numpy(case.local_slots).repeat_interleave(rows_Ps.sum(dim=0))


def run_unique(case, x, weight, scale, weighted=True):
    routing = make_routing(case.expert_TK, weight)
    rows_RD, handle = dispatch_unique(x, routing, case.rows_PS, case.slots, case.exchange)
    out_RD = experts(rows_RD, scale, expert_of_rows(case, handle.rows_Ps))
    if not weighted:
        out_RD = (out_RD * handle.weight_R[:, None]).to(out_RD.dtype)
    return combine_unique(out_RD, handle, weighted=weighted), rows_RD, handle.weight_R


def run_plain(case, x, weight, scale, weighted=True):
    routing = make_routing(case.expert_TK, weight)
    rows_RD, handle = dispatch(x, routing, case.rows_PS, case.slots, case.exchange)
    out_RD = experts(rows_RD, scale, expert_of_rows(case, handle.rows_by_source_Ps))
    weight_R = dispatch_weights(handle)
    if not weighted:
        out_RD = (out_RD * weight_R[:, None]).to(out_RD.dtype)
    return combine(out_RD, handle, weighted=weighted), rows_RD, weight_R


def run_dense(case, x, weight, scale):
    """One copy after the other, on the rank that it comes from."""
    weight_TK = weight.view(case.expert_TK.shape)
    rows = []
    for t, choices in enumerate(case.expert_TK.tolist()):
        copies = [weight_TK[t, k] * torch.tanh(x[t]) * scale[e] for k, e in enumerate(choices) if e >= 0]
        rows.append(sum(copies, 0 * x[t]))
    return torch.stack(rows) if rows else 0 * x


def gradients(case, y, leaves):
    (y.double() * case.factor).sum().backward()
    found = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def leaves_of(case):
    return case.x, case.weight, case.scale


def close(ours, theirs, dtype):
    """float64 element by element; else by the ratio of norms: sums of up to 12 terms, each rounded once."""
    if dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        return
    assert ours.dtype == theirs.dtype
    ours, theirs = ours.double(), theirs.double()
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert (ours - theirs).norm() <= limit * theirs.norm(), ((ours - theirs).norm(), theirs.norm())


def compare(exchange, tokens_P, top_k, how, placement, split, dtype, weighted):
    case = make_case(exchange, tokens_P, top_k, how, placement, split, dtype)
    leaves = leaves_of(case)
    y, rows, weight = run_unique(case, *leaves, weighted)
    grads = gradients(case, y, leaves)
    y_plain, rows_plain, weight_plain = run_plain(case, *leaves, weighted)
    grads_plain = gradients(case, y_plain, leaves)
    assert torch.equal(rows, rows_plain), "the rows, in their order"
    assert torch.equal(weight, weight_plain)
    for ours, theirs in zip([y, *grads], [y_plain, *grads_plain], strict=True):
        close(ours, theirs, dtype)
    if dtype == torch.float64:
        y_dense = run_dense(case, *leaves)
        close(y, y_dense, dtype)
        for ours, theirs in zip(grads[:2], gradients(case, y_dense, leaves)[:2], strict=True):
            close(ours, theirs, dtype)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("tokens_P", TOKENS, ids=str)
def test_values_and_gradients_are_those_of_plain_dispatch_and_of_a_loop(tokens_P, how, placement):
    for top_k in (1, 3, EXPERTS):
        args = (tokens_P, top_k, how, placement, random_split, torch.float64, top_k != 3)
        run_loopback(compare, len(tokens_P), *args)
    run_loopback(compare, len(tokens_P), tokens_P, 3, how, placement, even_split, torch.float64, True)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "weighted_by_the_experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_agrees_to_its_rounding(dtype, weighted):
    args = (4, "random", "empty_anywhere", random_split, dtype, weighted)
    for tokens_P in ((64, 0, 1, 7), (7, 64), (7,)):
        run_loopback(compare, len(tokens_P), tokens_P, *args)


@pytest.mark.parametrize("how", CHOICES)
def test_another_device_walks_through_the_twins(how, monkeypatch):
    monkeypatch.setattr("moe.dedup.count_pairs", count_pairs_torch)
    monkeypatch.setattr("moe.dedup.index_pairs", index_pairs_torch)
    monkeypatch.setattr("moe.dedup.count_arrivals", count_arrivals_torch)
    monkeypatch.setattr("moe.dedup.place_copies", place_copies_torch)
    monkeypatch.setattr("moe.permute.has_kernel", lambda tensor: False)
    for tokens_P in ((64, 0, 1, 7), (0, 0), (7,)):
        args = (tokens_P, 4, how, "same_rank", random_split, torch.float64, True)
        run_loopback(compare, len(tokens_P), *args)


def compare_on_ranks(rank, world, tokens_P, *args):
    compare(DistExchange(None), tokens_P, *args)


@pytest.mark.dist
@pytest.mark.parametrize(("tokens_P", "dtype"), [((0, 7, 64), torch.float64), ((64, 7), torch.bfloat16)])
def test_gloo_ranks_agree_too(tokens_P, dtype):
    run_ranks(
        compare_on_ranks, len(tokens_P), tokens_P, 4, "unrouted", "same_rank", random_split, dtype, True
    )


# ---- what travels ---


def pairs_rank(exchange, tokens_P, how):
    case = make_case(exchange, tokens_P, 4, how, "same_rank", random_split)
    routing = make_routing(case.expert_TK, case.weight)
    x_TD = source_payload(exchange.rank, len(case.x), WIDTH).clone()
    _, handle = dispatch_unique(x_TD, routing, case.rows_PS, case.slots, exchange)
    pairs = handle.sent_pairs_P.tolist(), handle.received_pairs_P.tolist()
    return pairs, case.rows_PS.tolist(), handle.rows_Ps.tolist()


@pytest.mark.parametrize("how", CHOICES)
def test_a_row_travels_once_for_each_token_and_rank(how):
    tokens_P = (64, 0, 1, 7)
    results = run_loopback(pairs_rank, 4, tokens_P, how)
    rows_PS, slots = np.array(results[0][1]), np.array(PLACEMENTS["same_rank"])
    expected_PP = np.zeros((4, 4), dtype=np.int64)
    for rank, num_tokens in enumerate(tokens_P):
        copies = choose(rank, num_tokens, 4, how).reshape(-1).tolist()
        pairs = set()
        for expert in set(copies) - {-1}:
            mine = [n // 4 for n, e in enumerate(copies) if e == expert]
            fill = [s for s in np.flatnonzero(slots == expert) for _ in range(rows_PS[rank, s])]
            pairs |= {(token, slot // 3) for token, slot in zip(mine, fill, strict=True)}
        for _, destination in pairs:
            expected_PP[rank, destination] += 1
    for rank, ((sent_P, received_P), _, rows_Ps) in enumerate(results):
        assert sent_P == expected_PP[rank].tolist()
        assert received_P == expected_PP[:, rank].tolist()
        assert rows_Ps == [rows_PS.sum(axis=0).reshape(4, 3)[rank].tolist()]
    assert expected_PP.sum() < rows_PS.sum() or how == "one_rank"


class Recorded:
    """An exchange that notes the rows of every call."""

    def __init__(self, exchange):
        self.inner, self.size, self.rank, self.calls = exchange, exchange.size, exchange.rank, []

    def send_rows(self, rows, *splits):
        self.calls.append((rows.shape[0], rows.shape[1], rows.dtype))
        return self.inner.send_rows(rows, *splits)

    def start_rows(self, rows, *splits):
        self.calls.append((rows.shape[0], rows.shape[1], rows.dtype))
        return self.inner.start_rows(rows, *splits)


def calls_rank(exchange, tokens_P, frozen_rank, weighted):
    case = make_case(exchange, tokens_P, 3, "random", "spread", random_split, torch.float32)
    case.exchange = recorded = Recorded(exchange)
    if exchange.rank == frozen_rank:
        leaves_ = case.x.detach(), case.weight.detach(), case.scale.detach()
    else:
        leaves_ = leaves_of(case)
    y, _, weight_R = run_unique(case, *leaves_, weighted)
    y.sum().backward()
    sent = case.rows_PS[exchange.rank].sum(), len(weight_R)
    grad = case.x.grad
    return recorded.calls, sent, None if grad is None else grad.numpy()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("frozen_rank", [None, 0, 1, 2])
def test_every_rank_makes_every_call_forward_and_backward(frozen_rank, weighted):
    """With no row to send or to compute, and where nothing of a rank's own needs a gradient."""
    tokens_P, (f32, i32) = (0, 1, 7), (torch.float32, torch.int32)
    with_gradients = run_loopback(calls_rank, 3, tokens_P, None, weighted)
    for rank, (calls, (copies, rows), grad) in enumerate(
        run_loopback(calls_rank, 3, tokens_P, frozen_rank, weighted)
    ):
        metadata, (pairs, *_), (received, *_), *backward = calls
        assert metadata == (copies, 2, i32)
        assert calls[1:3] == [(pairs, WIDTH, f32), (received, WIDTH, f32)]
        assert sorted(backward) == sorted([(pairs, WIDTH, f32), (received, WIDTH, f32), (rows, 1, f32)])
        if rank == frozen_rank:
            assert grad is None
        else:
            np.testing.assert_array_equal(grad, with_gradients[rank][2])


@pytest.mark.parametrize("world", [1, 2])
def test_work_is_done_while_rows_are_in_flight(world):
    def once(exchange):
        case = make_case(exchange, (3,) * world, 2, "random", "spread")
        done = []
        routing = make_routing(case.expert_TK, case.weight)
        dispatch_unique(
            case.x, routing, case.rows_PS, case.slots, exchange, lambda: done.append(exchange.rank)
        )
        return done

    assert run_loopback(once, world) == [[rank] for rank in range(world)]


# ---- precision, recomputation, refusals ---


def test_a_pairs_copies_and_their_gradients_are_summed_in_float32():
    """256 + 1 is no bfloat16 number: a running sum in bfloat16 would stay at 256."""
    routing = make_routing(torch.arange(EXPERTS)[None], torch.ones(EXPERTS))
    slots = np.arange(EXPERTS)
    x_TD = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    outputs = torch.tensor([[256.0], [1], [1], [1], [1], [0]]).bfloat16()
    for weighted in (True, False):
        rows_RD, handle = dispatch_unique(
            x_TD, routing, np.ones((1, 6), dtype=np.int64), slots, SoloExchange()
        )
        y_TD = combine_unique(rows_RD * outputs, handle, weighted=weighted)
        (grad,) = torch.autograd.grad(y_TD.sum(), x_TD)
        assert (y_TD.item(), grad.item()) == (260, 260)


def checkpoint_rank(exchange, how):
    case = make_case(exchange, (7, 0, 64), 3, "unrouted", "same_rank", random_split)
    leaves = leaves_of(case)

    def function(*inputs):
        return run_unique(case, *inputs)[0]

    y = function(*leaves)
    plain = [y.detach(), *gradients(case, y, leaves)]
    y = checkpoint(function, *leaves, use_reentrant=how == "reentrant", keep="routes")
    again = [y.detach(), *gradients(case, y, leaves)]
    for ours, theirs in zip(again, plain, strict=True):
        assert torch.equal(ours, theirs)
    assert len(case.x) == 0 or plain[1].any()


def keep_rows_rank(exchange):
    """As the layer does it: the second forward takes the sum from the first, and computes rows alone."""
    case = make_case(exchange, (7, 0, 64), 3, "unrouted", "same_rank", random_split)
    case.exchange = recorded = Recorded(exchange)
    leaves, kept_y = leaves_of(case), []

    def function(x, weight, scale):
        routing, memory = make_routing(case.expert_TK, weight), current_memory()
        rows_RD, handle = dispatch_unique(x, routing, case.rows_PS, case.slots, recorded)
        out_RD = experts(rows_RD, scale, expert_of_rows(case, handle.rows_Ps))
        if kept_y:
            return kept_y[0]
        with kept(memory):
            y_TD = combine_unique(out_RD, handle)
        if memory is not None:
            memory.routes.append(None)
            kept_y.append(as_leaf(y_TD))
        return y_TD

    y = function(*leaves)
    plain = [y.detach(), *gradients(case, y, leaves)]
    calls = len(recorded.calls)
    y = checkpoint(function, *leaves, keep="rows")
    again = [y.detach(), *gradients(case, y, leaves)]
    for ours, theirs in zip(again, plain, strict=True):
        assert torch.equal(ours, theirs)
    return len(recorded.calls) - 2 * calls


def test_a_second_forward_that_has_its_sum_dispatches_and_combines_no_more():
    assert run_loopback(keep_rows_rank, 3) == [2, 2, 2], "metadata and rows again"


def checkpoint_on_ranks(rank, world, how):
    checkpoint_rank(DistExchange(None), how)


@pytest.mark.parametrize("how", ["reentrant", "non_reentrant"])
def test_checkpointing_gives_the_same_bits(how):
    run_loopback(checkpoint_rank, 3, how)


@pytest.mark.dist
def test_checkpointing_gives_the_same_bits_on_gloo_ranks():
    run_ranks(checkpoint_on_ranks, 3, "non_reentrant")


def test_what_does_not_fit_is_refused():
    expert_TK = torch.tensor([[0, 1], [1, 2]])
    routing, x_TD = make_routing(expert_TK, torch.ones(4)), torch.zeros(2, WIDTH)
    slots, rows_PS = np.arange(EXPERTS), np.array([[1, 2, 1, 0, 0, 0]])
    solo = SoloExchange()
    with pytest.raises(ValueError, match=r"rows_PS has shape \(1, 6\); expected \(1, 3\)"):
        dispatch_unique(x_TD, routing, rows_PS, slots[:3], solo)
    with pytest.raises(ValueError, match="do not sum to the copies"):
        dispatch_unique(x_TD, routing, rows_PS + 1, slots, solo)
    with pytest.raises(ValueError, match=r"weights are torch.bfloat16; use float32"):
        dispatch_unique(x_TD, make_routing(expert_TK, torch.ones(4).bfloat16()), rows_PS, slots, solo)
    copy_list = Routing(
        **{name: getattr(routing, name) for name in routing.__slots__ if name != "top_k"}, top_k=None
    )
    with pytest.raises(ValueError, match="top_k=None"):
        dispatch_unique(x_TD, copy_list, rows_PS, slots, solo)


@pytest.mark.parametrize("position", [-1, 3])
def test_metadata_that_no_copy_can_have_is_refused_before_it_is_used(position):
    """Three copies of the first source have three pairs at most."""
    copies_P = np.array([3, 1])
    assert count_arrivals(torch.tensor([0, 2, 0, 0]), copies_P).tolist() == [3, 1, 2]
    with pytest.raises(RuntimeError, match=r"metadata of \[3, 1\] copies from the ranks do not fit"):
        count_arrivals(torch.tensor([0, position, 1, 0]), copies_P)


# ---- twins: numba kernels against torch ---


@pytest.mark.parametrize("tokens_P", [(13, 5), (0, 0), (0, 9, 1), (40, 1, 0, 17)], ids=str)
@pytest.mark.parametrize("how", CHOICES)
def test_the_tables_equal_their_torch_twins(tokens_P, how):
    world, slots, top_k = len(tokens_P), np.array(PLACEMENTS["same_rank"]), 4
    choices = [choose(p, t, top_k, how) for p, t in enumerate(tokens_P)]
    counts_PE = np.stack([count_experts(expert_TK, EXPERTS).numpy() for expert_TK in choices])
    rows_PPs = random_split(counts_PE, slots).reshape(world, world, -1)
    positions, pairs_PP = [], []
    for rank, expert_TK in enumerate(choices):
        copy_of_row, row_of_copy = order_copies(expert_TK.reshape(-1), rows_PPs[rank].reshape(-1), slots)
        row_TK = row_of_copy.view(-1, top_k)
        rank_R = torch.from_numpy(np.repeat(np.arange(world), rows_PPs[rank].sum(axis=1)))
        position_R, pairs_P = count_pairs(row_TK, copy_of_row, rank_R, world)
        twins = count_pairs_torch(row_TK, copy_of_row, rank_R, world)
        assert torch.equal(position_R, twins[0]) and torch.equal(pairs_P, twins[1])
        pairs_P = pairs_P.numpy()
        pair_R = torch.from_numpy(np.cumsum(pairs_P) - pairs_P)[rank_R] + position_R
        args = row_TK, copy_of_row, pair_R, int(pairs_P.sum()), min(top_k, world)
        sent, twin = index_pairs(*args), index_pairs_torch(*args)
        assert torch.equal(sent.token_of_pair, twin.token_of_pair)
        assert torch.equal(sent.pair_TQ, twin.pair_TQ)
        positions.append(position_R.split(rows_PPs[rank].sum(axis=1).tolist()))
        pairs_PP.append(pairs_P)
    for rank in range(world):
        position_A = torch.cat([blocks[rank] for blocks in positions]).to(torch.int32)
        rows_Ps = np.ascontiguousarray(rows_PPs[:, rank])
        counts_X = count_arrivals(position_A, rows_Ps.sum(axis=1))
        assert torch.equal(counts_X, count_arrivals_torch(position_A, rows_Ps.sum(axis=1)))
        assert counts_X[:-1].tolist() == np.stack(pairs_PP)[:, rank].tolist()
        args = rows_Ps, counts_X[:-1].numpy(), int(counts_X[-1])
        ours, twin = place_copies(position_A, *args), place_copies_torch(position_A, *args)
        for name in ours.__slots__:
            assert torch.equal(getattr(ours, name), getattr(twin, name)), name
