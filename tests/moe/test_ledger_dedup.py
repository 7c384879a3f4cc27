"""The ledger's bytes of a deduplicated forward and backward are the formula's, collective by collective."""

import numpy as np
import pytest
import torch

from moe.dedup import combine_unique, dispatch_unique
from moe.dedup_rule import plain_bytes, unique_bytes
from moe.dispatch import combine, dispatch
from moe.exchange import DistExchange
from moe.ledger import CommLedger
from moe.naming import forward_phase, tag
from moe.placement import even_split
from moe.testing import run_ranks
from routing.record import Routing, count_experts

EXPERTS, TOP_K, WIDTH, TOKENS = 8, 5, 12, (19, 0, 7, 64)
SLOTS = [0, 1, 2, 3, 7, 7, 4, 5, -1, 7, 6, -1]


def ledger_rank(rank, world, dtype_name, unique):
    dtype, exchange = getattr(torch, dtype_name), DistExchange(None)
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(TOKENS[rank], EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    weight_N = torch.rand(expert_TK.numel(), dtype=torch.promote_types(dtype, torch.float32))
    counts_E, slots = count_experts(expert_TK, EXPERTS), np.array(SLOTS)
    routing = Routing(
        token_N=torch.arange(TOKENS[rank]).repeat_interleave(TOP_K),
        expert_N=expert_TK.reshape(-1),
        weight_N=weight_N.requires_grad_(),
        scores_TE=torch.zeros(TOKENS[rank], EXPERTS),
        logits_TE=torch.zeros(TOKENS[rank], EXPERTS),
        demand_E=counts_E,
        routed_E=counts_E,
        num_tokens=TOKENS[rank],
        top_k=TOP_K,
    )
    rows_PS = even_split(exchange.all_gather(counts_E).numpy(), slots)
    x_TD = torch.randn(TOKENS[rank], WIDTH).to(dtype).requires_grad_()
    there, back = (dispatch_unique, combine_unique) if unique else (dispatch, combine)
    with CommLedger() as ledger:
        with forward_phase(), tag("layer 2 dispatch"):
            rows_RD, handle = there(x_TD, routing, rows_PS, slots, exchange)
        with forward_phase(), tag("layer 2 combine"):
            y_TD = back(torch.tanh(rows_RD), handle)
        y_TD.float().sum().backward()
        entries = [(e.phase, e.op, e.tag, e.sent_bytes, e.received_bytes) for e in ledger.take()]
    pairs = [handle.sent_pairs_P.tolist(), handle.received_pairs_P.tolist()] if unique else None
    return rows_PS.tolist(), pairs, entries


NAMES = {  # of the formula -> operator and tag of the ledger
    "metadata": ("alltoall_base", "layer 2 dispatch metadata"),
    "dispatch": ("alltoall_base", "layer 2 dispatch"),
    "combine": ("alltoall_base", "layer 2 combine"),
}


def expected(volumes):
    rows = []
    for name, volume in volumes.items():
        phase, part = name.split()
        rows.append((phase, *NAMES[part], volume.sent_bytes, volume.received_bytes))
    return rows


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "dtype", "element", "weight"), [(2, "float64", 8, 8), (4, "bfloat16", 2, 4)]
)
def test_bytes_equal_the_formula_in_number_and_order(world, dtype, element, weight):
    results = run_ranks(ledger_rank, world, dtype, True)
    sent = received = 0
    for rank, (rows_PS, pairs, entries) in enumerate(results):
        volumes = unique_bytes(np.array(rows_PS), *map(np.array, pairs), rank, WIDTH, element, weight)
        forward = sum(name.startswith("forward") for name in volumes)
        assert entries[:forward] == expected(volumes)[:forward]
        # in the backward the weights' gradients travel while the rows' do, or before
        assert sorted(entries[forward:]) == sorted(expected(volumes)[forward:])
        assert [e[2] for e in entries] == [e[2] for e in results[0][2]], "the same calls on every rank"
        sent, received = sent + sum(e[3] for e in entries), received + sum(e[4] for e in entries)
    assert sent == received > 0


@pytest.mark.dist
def test_fewer_bytes_of_rows_than_plain_dispatch_which_has_its_own_formula():
    plain, unique = (run_ranks(ledger_rank, 2, "float32", unique) for unique in (False, True))
    for rank in range(2):
        volumes = plain_bytes(np.array(plain[rank][0]), rank, WIDTH, 4)
        assert plain[rank][2] == expected(volumes)
        by_tag = [
            sum(e[3] + e[4] for e in run[rank][2] if e[2] in ("layer 2 dispatch", "layer 2 combine"))
            for run in (plain, unique)
        ]
        assert by_tag[1] < 0.7 * by_tag[0]
