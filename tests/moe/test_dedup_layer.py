"""Deduplication in the layer: its bytes by tag, and what "auto" chooses on which link."""

import math

import numpy as np
import pytest
import torch

import moe.layer
from moe import Groups, MoEConfig, MoELayer, SoloExchange, Topology
from moe.dedup_rule import Link, plain_bytes, unique_bytes
from moe.ledger import CommLedger
from moe.placement import even_split
from moe.testing import run_loopback, run_ranks
from routing import RouterConfig

EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 3, 64, 12
SLOTS = np.array([0, 1, 2, 5, 3, 4, 5, 0])  # two ranks, a replica on each


def make_layer(exchange, dedup: str, split=even_split) -> MoELayer:
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
    config = MoEConfig(router=router, expert_hidden=HIDDEN, dedup=dedup)
    groups = Groups(ep=exchange, edp=SoloExchange())
    slots = SLOTS if exchange.size == 2 else None
    layer = MoELayer(config, topology, groups=groups, slot_to_expert_S=slots, split=split, layer_id=2)
    with torch.no_grad():
        layer.router.gate.weight.normal_(generator=torch.Generator().manual_seed(3))
    return layer


def rows_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn((40, 13)[rank], WIDTH, generator=generator).requires_grad_()


def booked_rank(rank: int, world: int, dedup: str):
    from moe.exchange import DistExchange

    seen = []

    def split(counts_PE, slot_to_expert_S):
        seen.append(even_split(counts_PE, slot_to_expert_S))
        return seen[0]

    layer, x = make_layer(DistExchange(None), dedup, split), rows_of(rank)
    experts = layer.router.route(x).expert_N.view(-1, TOP_K).tolist()
    with CommLedger() as ledger:
        y, aux = layer(x)
        (y.square().sum() + aux).backward()
        entries = ledger.take()
    parts = [
        (f"{e.phase} {e.tag}", e.sent_bytes, e.received_bytes) for e in entries if "replicas" not in e.tag
    ]
    return seen[0].tolist(), experts, parts


def pairs_of(rows_PS: np.ndarray, source: int, experts_TK: list[list[int]]) -> np.ndarray:
    """Distinct ranks of each token's copies, counted by hand: an expert's slots fill in the tokens' order."""
    left = {slot: rows_PS[source, slot] for slot in range(len(SLOTS))}
    pairs_P = np.zeros(2, dtype=np.int64)
    for experts in experts_TK:
        ranks = set()
        for expert in experts:
            slot = next(s for s in np.flatnonzero(expert == SLOTS) if left[s])
            left[slot] -= 1
            ranks.add(slot // 4)
        for rank in ranks:
            pairs_P[rank] += 1
    return pairs_P


@pytest.mark.dist
@pytest.mark.parametrize("dedup", ["on", "off"])
def test_a_layers_bytes_are_those_of_the_formula_by_tag(dedup):
    results = run_ranks(booked_rank, 2, dedup)
    rows_PS = np.array(results[0][0])
    pairs_PP = np.stack([pairs_of(rows_PS, rank, results[rank][1]) for rank in range(2)])
    for rank, (_, _, parts) in enumerate(results):
        if dedup == "on":
            volumes = unique_bytes(rows_PS, pairs_PP[rank], pairs_PP[:, rank], rank, WIDTH, 4)
        else:
            volumes = plain_bytes(rows_PS, rank, WIDTH, 4)
        wanted = [("forward layer 2 counts", 8 * (EXPERTS + 2), 8 * (EXPERTS + 2))]
        for name, volume in volumes.items():
            phase, part = name.split()
            name = "dispatch metadata" if part == "metadata" else part
            wanted.append((f"{phase} layer 2 {name}", volume.sent_bytes, volume.received_bytes))
        assert parts == wanted


def step(exchange, dedup: str):
    layer, x = make_layer(exchange, dedup), rows_of(exchange.rank)
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            for local, expert in enumerate(layer.home_experts.tolist()):
                parameter[local].normal_(generator=torch.Generator().manual_seed(10 * expert + len(name)))
    y, aux = layer(x)
    (y.square().sum() + aux).backward()
    return y.detach().numpy(), x.grad.numpy()


LINKS = {
    "slow": (Link(latency_s=1e-6, bytes_per_s=1e5), True),
    "far": (Link(latency_s=1.0, bytes_per_s=1e12), False),
}


@pytest.mark.parametrize("which", LINKS)
def test_auto_weighs_bytes_against_calls_alike_on_every_rank(monkeypatch, which):
    link, deduplicates = LINKS[which]
    calls, measured = [], []
    unique = moe.layer.dispatch_unique
    monkeypatch.setattr(moe.layer, "dispatch_unique", lambda *a: calls.append(1) or unique(*a))
    monkeypatch.setattr(moe.layer, "measure_link", lambda *a, **k: measured.append(1) or link)
    auto = run_loopback(step, 2, "auto")
    assert len(calls) == 2 * deduplicates and len(measured) == 2
    plain = run_loopback(step, 2, "off")
    for ours, theirs in zip(auto, plain):
        for got, wanted in zip(ours, theirs):  # float32 sums in another order
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_one_rank_alone_never_deduplicates_by_itself(monkeypatch):
    monkeypatch.setattr(moe.layer, "measure_link", lambda *a, **k: pytest.fail("nothing to measure"))
    monkeypatch.setattr(moe.layer, "dispatch_unique", lambda *a: pytest.fail("nothing travels"))
    make_layer(SoloExchange(), "auto")(rows_of(0))


def measured_rank(rank: int, world: int):
    from moe.exchange import DistExchange

    layer = make_layer(DistExchange(None), "auto")
    for _ in range(2):
        layer(rows_of(rank))
    return layer._link.latency_s, layer._link.bytes_per_s


@pytest.mark.dist
def test_the_link_is_measured_once_and_known_to_all_alike():
    first, second = run_ranks(measured_rank, 2)
    assert first == second
    assert 0 < first[0] < 1 and 1e6 < first[1] < math.inf


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"moe\.dedup='yes' is unknown; use one of off, on, auto"):
        MoEConfig(dedup="yes")
