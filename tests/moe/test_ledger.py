"""The ledger: no collective escapes it, its bytes are the formulas', and it leaves nothing behind."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe import MoEConfig, MoELayer, Topology
from moe.ledger import CommLedger
from moe.naming import forward_phase, phase, tag
from moe.placement import even_split
from moe.recompute import checkpoint
from moe.testing import CountOperators, RankFailedError, run_ranks
from moe.traffic import FORMULAS
from routing import RouterConfig

EXPERTS, WIDTH = 8, 10


def summary(entries):
    return [(e.op, e.sent_bytes, e.received_bytes, e.ranks) for e in entries]


def every_collective(rank, world, group, me, size):
    """Calls with (op, sent, received) as worked out by hand; float32, 12 elements = 48 bytes unless said."""
    first = dist.get_process_group_ranks(group)[0]
    last = dist.get_process_group_ranks(group)[-1]
    n = size
    x = torch.ones(12)
    others = (n - 1) * 48
    root = me == 0
    splits_in = [(me + p) % 3 for p in range(n)]  # zero rows among them; symmetric: rows out = rows in
    rows_away = sum(splits_in) - splits_in[me]
    yield dist.all_reduce, (x.clone(),), ("allreduce", 2 * (n - 1) * 48 / n, 2 * (n - 1) * 48 / n)
    gathered = [torch.empty(12) for _ in range(n)]
    yield dist.all_gather, (gathered, x), ("allgather", others, others)
    yield dist.all_gather_single, (torch.empty(12 * n), x), ("allgather_base", others, others)
    blocks = [torch.ones(12) for _ in range(n)]
    yield dist.reduce_scatter, (torch.empty(12), blocks), ("reduce_scatter", others, others)
    full = torch.ones(12 * n)
    yield dist.reduce_scatter_single, (torch.empty(12), full), ("reduce_scatter_base", others, others)
    yield (
        dist.all_to_all_single,
        (torch.empty(n, 3), torch.ones(n, 3)),
        ("alltoall_base", *[(n - 1) * 12] * 2),
    )
    uneven = (torch.empty(sum(splits_in), 5), torch.ones(sum(splits_in), 5), splits_in, splits_in)
    yield dist.all_to_all_single, uneven, ("alltoall_base", rows_away * 20, rows_away * 20)
    empty = (torch.empty(0, 5), torch.ones(0, 5), [0] * n, [0] * n)
    yield dist.all_to_all_single, empty, ("alltoall_base", 0, 0)
    yield dist.broadcast, (x.clone(), first), ("broadcast", others if root else 0, 0 if root else 48)
    scattered = (torch.empty(12), blocks if root else None, first)
    yield dist.scatter, scattered, ("scatter", others if root else 0, 0 if root else 48)
    yield dist.gather, (x, gathered if root else None, first), ("gather", 0 if root else 48, others * root)
    yield dist.reduce, (x.clone(), first), ("reduce", 0 if root else 48, others * root)
    if me == 0:
        yield dist.send, (x, last), ("send", 48, 0)
        yield dist.send, (x, last), ("send", 48, 0)
    if me == n - 1:
        yield dist.recv, (x.clone(), first), ("recv", 0, 48)
        yield dist.recv, (x.clone(), None), ("recv_any_source", 0, 48)
    yield dist.barrier, (), ("barrier", 0, 0)


def collectives_rank(rank, world):
    members = [1, 2] if world == 3 else [0, 1]
    sub = dist.new_group(members)
    results = []
    for group in (dist.group.WORLD, sub):
        if rank not in dist.get_process_group_ranks(group):
            continue
        me, size = dist.get_rank(group), dist.get_world_size(group)
        backend = group._get_backend(torch.device("cpu"))
        calls = list(every_collective(rank, world, group, me, size))
        with CommLedger() as ledger, CountOperators() as operators:
            before = backend._get_sequence_number_for_group()
            for call, args, _ in calls:
                call(*args, group=group)
            issued = backend._get_sequence_number_for_group() - before
            with torch.no_grad():
                dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()
            with torch.inference_mode():
                dist.all_reduce(torch.ones(4), group=group)
            entries = ledger.take()
        expected = [want for _, _, want in calls] + [("allreduce", *[2 * (size - 1) * 16 / size] * 2)] * 2
        ranks = tuple(dist.get_process_group_ranks(group))
        assert summary(entries) == [(*want, ranks) for want in expected]
        assert [e.op for e in entries] == operators.names
        # gloo counts what reaches it; its reduce-scatter of a list is one operation a block
        assert issued == len(calls) + size - 1
        results.append((ranks, sum(e.sent_bytes for e in entries), sum(e.received_bytes for e in entries)))
    return results


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_is_recorded_with_the_bytes_of_its_formula(world):
    everybody = [row for rows in run_ranks(collectives_rank, world) for row in rows]
    for ranks in {row[0] for row in everybody}:
        sent = sum(row[1] for row in everybody if row[0] == ranks)
        received = sum(row[2] for row in everybody if row[0] == ranks)
        assert sent == pytest.approx(received, rel=1e-12)  # thirds of an all-reduce are no exact floats
        assert sent > 0


def objects_rank(rank, world):
    thing = {"rank": rank}
    with CommLedger() as ledger, CountOperators() as operators:
        dist.all_gather_object([None] * world, thing)
        dist.broadcast_object_list([thing], 0)
        dist.gather_object(thing, [None] * world if rank == 0 else None, 0)
        dist.scatter_object_list([None], [thing] * world if rank == 0 else None, 0)
        options = dist.AllreduceCoalescedOptions()
        dist.group.WORLD.allreduce_coalesced([torch.ones(4), torch.ones(2)], options).wait()
        entries = ledger.take()
    assert [e.op for e in entries] == operators.names
    assert entries[-1].op == "allreduce_coalesced" and entries[-1].sent_bytes == 2 * (world - 1) * 24 / world
    return sum(e.sent_bytes for e in entries), sum(e.received_bytes for e in entries)


@pytest.mark.dist
def test_object_collectives_and_coalesced_ones_are_recorded_through_their_tensors():
    sums = np.array(run_ranks(objects_rank, 2))
    assert sums[:, 0].sum() == sums[:, 1].sum() > 0


def layer_rank(rank, world, dtype_name, recompute):
    dtype = getattr(torch, dtype_name)
    seen = []

    def split(counts_PE, slot_to_expert_S):
        seen.append(counts_PE)
        return even_split(counts_PE, slot_to_expert_S)

    config = MoEConfig(router=RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=2), expert_hidden=14)
    torch.manual_seed(3)
    layer = MoELayer(
        config, Topology(world_size=world, ep_size=world, rank=rank), split=split, layer_id=3
    ).to(dtype)
    tokens = (7, 0, 19, 5)[rank]
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()

    with CommLedger() as ledger:
        y, aux = checkpoint(layer, x, keep=recompute) if recompute else layer(x)
        ((y.float() ** 2).sum() + aux.float()).backward()
        matrix = ledger.matrix(world)
        entries = ledger.take()
    assert not ledger.entries  # the matrix does not record itself
    rows_PP = seen[0].reshape(world, world, -1).sum(axis=2)
    fields = [(e.phase, e.op, e.sent_bytes, e.received_bytes, e.input_splits, e.tag) for e in entries]
    return rows_PP.tolist(), fields, matrix.tolist()


def expected_layer(rows_PP, rank, element, recompute):
    world = len(rows_PP)
    out, into = rows_PP[rank].copy(), rows_PP[:, rank].copy()
    away, home = out.sum() - out[rank], into.sum() - into[rank]
    row = WIDTH * element
    counts = (EXPERTS + 2) * 8 * (world - 1)

    def exchanges(name):
        return [
            (name, "alltoall_base", away * row, home * row, tuple(out), "layer 3 dispatch"),
            (name, "alltoall_base", home * row, away * row, tuple(into), "layer 3 combine"),
        ]

    gather = [("forward", "allgather_base", counts, counts, (), "layer 3 counts")]
    backward = [  # of combine, then of dispatch
        ("backward", "alltoall_base", away * row, home * row, tuple(out), "layer 3 combine"),
        ("backward", "alltoall_base", home * row, away * row, tuple(into), "layer 3 dispatch"),
    ]
    # the second forward stops once it has what the backward wants: it never asks for counts
    if recompute == "rows":  # combine's backward has what it wants: the experts' brings the dispatch again
        return gather + exchanges("forward") + backward[:1] + exchanges("recompute")[:1] + backward[1:]
    recomputed = exchanges("recompute") if recompute else []
    return gather + exchanges("forward") + recomputed + backward


@pytest.mark.dist
@pytest.mark.parametrize(("world", "dtype", "element"), [(2, "float64", 8), (4, "bfloat16", 2)])
def test_a_layers_bytes_equal_the_routing_matrix(world, dtype, element):
    results = run_ranks(layer_rank, world, dtype, "")
    total = np.zeros((world, world))
    for rank, (rows, fields, matrix) in enumerate(results):
        rows_PP = np.array(rows)
        assert len(set(rows_PP.reshape(-1).tolist())) > 2, "the routing is uneven"
        assert fields == expected_layer(rows_PP, rank, element, "")
        assert matrix == results[0][2]
        total[rank, (rank + 1) % world] += (EXPERTS + 2) * 8 * (world - 1)
        # dispatch and its backward, combine and its backward: each way twice
        total[rank] += 2 * (rows_PP[rank] + rows_PP[:, rank]) * WIDTH * element
        total[rank, rank] = 0
    np.testing.assert_array_equal(np.array(results[0][2]), total)


@pytest.mark.dist
@pytest.mark.parametrize("keep", ["routes", "rows"])
def test_a_recomputed_forward_has_its_own_phase_and_no_second_gather_of_counts(keep):
    for rank, (rows, fields, _) in enumerate(run_ranks(layer_rank, 2, "float32", keep)):
        assert fields == expected_layer(np.array(rows), rank, 4, keep)


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def phases_rank(rank, world):
    with CommLedger() as ledger:
        dist.all_reduce(torch.ones(1))
        with phase("optimizer"), tag("norm"):
            dist.all_reduce(torch.ones(1))
            Reduced.apply(torch.ones(2, requires_grad=True)).sum().backward()
        with forward_phase(), tag("outer"), tag("inner"):
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        totals = ledger.totals(("phase", "tag"))
        assert len(ledger.take()) == 5 and ledger.totals() == {}
        with pytest.raises(ValueError, match="color"):
            ledger.totals(("color",))
        dist.all_reduce(torch.ones(1))
        with pytest.raises(ValueError, match="world_size=1 is too small"):
            ledger.bytes_to_rank(1)
        with pytest.raises(ValueError, match="world_size=9"):
            ledger.matrix(9)
    assert totals == {
        ("other", ""): {"count": 2, "sent_bytes": 8, "received_bytes": 8},
        ("optimizer", "norm"): {"count": 1, "sent_bytes": 4, "received_bytes": 4},
        ("backward", "norm"): {"count": 1, "sent_bytes": 8, "received_bytes": 8},
        ("forward", "inner"): {"count": 1, "sent_bytes": 4, "received_bytes": 4},
    }


@pytest.mark.dist
def test_phases_tags_and_totals():
    run_ranks(phases_rank, 2)


def open_close_rank(rank, world):
    names = [f"c10d::{name}" for name in FORMULAS]
    before = [torch._C._dispatch_dump(name) for name in names]
    ledger = CommLedger()
    with pytest.raises(KeyError, match="within"), ledger:  # noqa: PT012 (what is open is the matter)
        assert [torch._C._dispatch_dump(name) for name in names] != before
        with pytest.raises(RuntimeError, match="overridden already"), CommLedger():
            pass
        dist.all_reduce(torch.ones(1))  # the refused one has taken nothing away
        raise KeyError("within")
    assert [torch._C._dispatch_dump(name) for name in names] == before
    dist.all_reduce(torch.ones(1))
    assert len(ledger.entries) == 1
    with ledger:
        dist.all_reduce(torch.ones(1))
    assert len(ledger.entries) == 2


@pytest.mark.dist
def test_closing_restores_the_operators_and_two_at_once_are_refused():
    run_ranks(open_close_rank, 1)


def group_rank(rank, world):
    alive = []
    with CommLedger() as ledger:
        for members in ([0, 1], [1, 2], [0, 2], [1, 2], [0, 1, 2]) * 2:
            group = dist.new_group(members)
            if rank in members:
                for _ in range(2):  # the second is answered out of the ledger's memory
                    dist.all_reduce(torch.ones(1), group=group)
                seen = [(e.ranks, e.rank) for e in ledger.take() if e.op == "allreduce"]
                assert seen == [(tuple(members), members.index(rank))] * 2
                alive.append(weakref.ref(group))
                dist.destroy_process_group(group)
            del group
        gc.collect()
        assert not any(reference() for reference in alive), "the ledger holds groups that were taken down"
        # what is left of a dead group at the address where another stands now
        ledger._groups[id(dist.group.WORLD)] = (alive[0], ((7,), 0))
        dist.all_reduce(torch.ones(1))
        assert ledger.take()[-1].ranks == (0, 1, 2)


@pytest.mark.dist
def test_groups_are_told_apart_when_they_come_and_go():
    run_ranks(group_rank, 3)


def unknown_rank(rank, world):
    with torch.library._scoped_library("c10d", "FRAGMENT") as library:
        kind = "__torch__.torch.classes.c10d.ProcessGroup"
        library.define(f"novel_(Tensor tensor, {kind} process_group) -> ()")
        library.impl("novel_", lambda tensor, group: None, "CPU")
        with CommLedger():
            dist.all_reduce(torch.ones(1))
            torch.ops.c10d.novel_(torch.ones(1), dist.group.WORLD.boxed())


@pytest.mark.dist
def test_a_collective_without_formula_raises_instead_of_being_missed():
    with pytest.raises(RankFailedError, match="c10d::novel_ of torch"):
        run_ranks(unknown_rank, 1)


def threads_rank(rank, world):
    calls, workers = 60, 4
    taken = []
    with CommLedger() as ledger:

        def work():
            for _ in range(calls):
                dist.all_reduce(torch.ones(1))

        threads = [threading.Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken.extend(ledger.take())
        taken.extend(ledger.take())
    assert len(taken) == calls * workers


@pytest.mark.dist
def test_threads_record_side_by_side_with_take():
    run_ranks(threads_rank, 1)


def test_the_formulas_read_shapes_only():
    """On meta tensors, which hold no values: whatever read one would raise, or wait for a device."""
    x = torch.empty(6, 2, device="meta")
    uneven = [torch.empty(k, device="meta") for k in (1, 2, 3)]
    traffic = FORMULAS["allgather_"](([uneven], [uneven[1]]), 3, 1)
    assert (sum(traffic.sent_to), traffic.received) == (12, 16)  # all but the next one's, all but its own
    traffic = FORMULAS["reduce_scatter_"](([uneven[1]], [uneven]), 3, 1)
    assert (sum(traffic.sent_to), traffic.received) == (16, 20)
    outputs = [torch.empty(k, device="meta") for k in (4, 5, 6)]
    traffic = FORMULAS["alltoall_"]((outputs, uneven), 3, 1)
    assert (traffic.sent_to, traffic.received) == ((4, 0, 12), 40)
    for name in ("allgather_into_tensor_coalesced_", "allgather_coalesced_"):
        assert FORMULAS[name](([x], [x]), 3, 1).received == 32
    assert FORMULAS["reduce_scatter_tensor_coalesced_"](([x], [x]), 3, 1).sent_to == (0, 0, 32)
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError, match="sparse"):
        FORMULAS["allreduce_"](([sparse],), 2, 0)
    with pytest.raises(ValueError, match="empty"):
        phase("")
