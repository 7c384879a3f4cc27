"""The ledger beside the formulas of replicas: weights to every busy replica elsewhere, gradients back."""

import numpy as np
import pytest
import torch

from moe import MoEConfig, MoELayer, Topology
from moe.ledger import CommLedger
from moe.placement import even_split, make_placement
from moe.recompute import checkpoint
from moe.replicate import replica_bytes
from moe.testing import run_ranks
from routing import RouterConfig

EXPERTS, WIDTH, HIDDEN = 8, 12, 14
SLOTS = {  # homes first; 0 is on several ranks, beside its home too, and a slot is empty
    2: [0, 1, 2, 3, 5, 0, 4, 5, 6, 7, 0, 3],
    4: [0, 1, 4, 0, 2, 3, 0, -1, 4, 5, 0, 1, 6, 7, 2, 5],
}


def layer_rank(rank, world, dtype_name, recompute, prefetch, activation):
    dtype = getattr(torch, dtype_name)
    seen = []

    def split(counts_PE, slot_to_expert_S):
        seen.append(even_split(counts_PE, slot_to_expert_S))
        return seen[0]

    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=1)
    config = MoEConfig(router=router, expert_hidden=HIDDEN, activation=activation)
    torch.manual_seed(3)
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    slots = np.array(SLOTS[world])
    layer = MoELayer(config, topology, split=split, layer_id=3, slot_to_expert_S=slots).to(dtype)
    x = torch.randn((9, 0, 8, 2)[rank], WIDTH, generator=torch.Generator().manual_seed(rank))
    x = x.to(dtype).requires_grad_()

    def block(x):
        if prefetch:
            layer.prefetch()
        return layer(x)

    with CommLedger() as ledger:
        y, aux = checkpoint(block, x) if recompute else block(x)
        ((y.float() ** 2).sum() + aux.float()).backward()
        entries = ledger.take()
    fields = [(e.phase, e.op, e.sent_bytes, e.received_bytes) for e in entries if e.tag == "layer 3 replicas"]
    return seen[0].tolist(), fields, [e.tag for e in entries]


def experts_that_travel(world, rows_PS, rank, only_busy):
    """Experts that leave this rank for a replica elsewhere, and that come here."""
    local, home = len(SLOTS[world]) // world, EXPERTS // world
    out = into = 0
    for slot, expert in enumerate(SLOTS[world]):
        if expert < 0 or slot % local < home or (only_busy and not rows_PS[:, slot].any()):
            continue
        here, owner = slot // local, expert // home
        out += owner == rank and here != rank
        into += here == rank and owner != rank
    return out, into


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "dtype", "recompute", "prefetch", "activation"),
    [
        (2, "float64", False, False, "swiglu"),
        (4, "bfloat16", True, True, "swiglu"),
        (4, "float32", True, False, "gelu"),
    ],
)
def test_weights_and_gradients_of_replicas_are_booked_byte_for_byte(
    world, dtype, recompute, prefetch, activation
):
    results = run_ranks(layer_rank, world, dtype, recompute, prefetch, activation)
    matrices = 3 if activation == "swiglu" else 2
    size = matrices * WIDTH * HIDDEN * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    moved = 0
    for rank, (rows, fields, tags) in enumerate(results):
        rows_PS = np.array(rows)
        out, into = (size * n for n in experts_that_travel(world, rows_PS, rank, not prefetch))
        back_out, back_into = (size * n for n in experts_that_travel(world, rows_PS, rank, True))
        placement = make_placement(np.array(SLOTS[world]), EXPERTS, world)
        fetched = replica_bytes(placement, rank, size, None if prefetch else rows_PS.sum(axis=0))
        assert (fetched.sent_bytes, fetched.received_bytes) == (out, into)
        there = [("forward", "alltoall_base", out, into)]
        again = [("recompute", "alltoall_base", out, into)] if recompute else []
        assert fields == [*there, *again, ("backward", "alltoall_base", back_into, back_out)]
        # after counts and dispatch; or first of all, but for the comparison of placements
        assert tags.index("layer 3 replicas") == (1 if prefetch else 2)
        assert tags.count("layer 3 placement") == prefetch  # once a step
        moved += out
    idle = [s for s in range(len(SLOTS[world])) if SLOTS[world][s] >= 0 and not rows_PS[:, s].any()]
    assert moved, "some weights travel"
    assert idle, "some slot is idle: a fetch ahead and one on use differ"
