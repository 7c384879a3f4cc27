"""Real steps of a DeepSpeed engine, ZeRO 0 to 3: every byte of the ledger from shapes and routing alone.

The rules of DeepSpeed 0.19.8 for float32, as its collectives show them; n ranks a group, dense parameters
over all ranks, experts over their EDP group, all-reduce 2(n-1)/n of the bytes, the others (n-1)/n:

    stage 0    all-reduce of the gradients at the step's end (the last micro-batch), not padded
    stage 1    the same, then an all-gather of each optimizer group's flat weights, padded to a multiple of 2n
    stage 2    as stage 1, but the all-reduce at every micro-batch
    stage 3    at every micro-batch: all-gather of every parameter in the forward and again in the backward,
               reduce-scatter of every gradient; each tensor padded to a multiple of n by itself. (The limits
               here let it keep nothing from the forward to the backward.)
    norm       stage 0: moe/zero.py's own, an all-gather of 8 bytes a rank over EP. 1 and 2: one of 4 bytes
               over all ranks for each optimizer group, and the experts' once more over EDP. 3: 8 bytes for
               each group, experts over EDP, then over EP.

float32 has no overflow flag. Stage 3 broadcasts its trace of modules in its first two steps, so the third is
read.
"""

import math
from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist

from moe import ModelConfig, MoEConfig, Topology, make_groups
from moe.ledger import CommLedger
from moe.model import Transformer
from moe.naming import phase
from moe.placement import even_split
from moe.testing import CountOperators, run_ranks
from routing import RouterConfig

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]

EXPERTS, WIDTH, HIDDEN = 6, 26, 29  # widths that leave dense tensors and the vectors to be padded
VOCAB, SEQ = 19, 12
KEEP_NOTHING = {
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


def model_config() -> ModelConfig:
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=2, balance_loss=0.05)
    return ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=HIDDEN, shared_hidden=21),
        vocab_size=VOCAB,
        num_layers=3,
        num_dense_layers=1,
        d_model=WIDTH,
        num_heads=1,
        dense_hidden=35,
        seq_len=SEQ,
    )


def settings(stage, accumulation, world):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 2 * accumulation * world,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **KEEP_NOTHING},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def issued() -> int:
    """Collectives that have reached gloo, by its own count."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(g._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for g in groups)


def step(engine, rank, accumulation) -> None:
    for micro in range(accumulation):
        generator = torch.Generator().manual_seed(100 * rank + micro)
        batch = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
        with phase("forward"):
            ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        with phase("backward"):
            engine.backward((ce_sum + aux_sum) / 50)
        with phase("optimizer"):
            engine.step()


def stages_rank(rank, world, ep_size, accumulation, stages):
    """The third step of an engine at each stage: what the ledger has, and what routing and counters say."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    groups = make_groups(topology)
    results = []
    for stage in stages:
        model = Transformer(model_config(), topology, groups=groups, layer_class=zero.ZeroMoELayer)
        model.init_weights(seed=5)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        engine = zero.make_engine(model, settings(stage, accumulation, world))
        routed = []

        def split(counts_PE, slot_to_expert_S, routed=routed):
            routed.append(counts_PE.reshape(ep_size, ep_size, -1).sum(axis=2).tolist())
            return even_split(counts_PE, slot_to_expert_S)

        for block in model.blocks[1:]:
            block.feed_forward.split = split
        with CommLedger() as ledger:
            step(engine, rank, accumulation)
            step(engine, rank, accumulation)
            ledger.take()
            routed.clear()
            with CountOperators() as operators:
                before = issued()
                step(engine, rank, accumulation)
                reached = issued() - before
            row_P = ledger.bytes_to_rank(world)
            entries = ledger.take()
        sums = Counter()
        for entry in entries:
            sums[entry.phase, entry.op, entry.ranks] += entry.sent_bytes
        results.append(
            {
                "shapes": shapes,
                "routed": routed,
                "sums": +sums,  # without groups of one rank, which send nothing
                "received": sum(entry.received_bytes for entry in entries),
                "row": row_P.tolist(),
                "recorded": [entry.op for entry in entries],
                "dispatched": operators.names,
                "reached": reached,
            }
        )
        engine.destroy()
    return results


CASES = {2: (2, 1, (0, 1, 2, 3)), 4: (2, 2, (1, 2, 3))}  # world -> EP size, micro-batches a step, stages
STAGES = [(world, stage) for world, (_, _, stages) in CASES.items() for stage in stages]


@cache
def third_steps(world):
    """Stage -> what every rank has seen; one job for all stages."""
    by_rank = run_ranks(stages_rank, world, *CASES[world])
    return {stage: [seen[i] for seen in by_rank] for i, stage in enumerate(CASES[world][2])}


def reduced(size: int, num_bytes: int) -> int:
    assert 2 * (size - 1) * num_bytes % size == 0
    return 2 * (size - 1) * num_bytes // size


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def exchanged(topology: Topology, routed) -> Counter:
    """The layers' own bytes: counts, dispatch, combine; routed: a [P, P] of rows for each forward."""
    ep, edp = tuple(topology.ep_ranks().tolist()), tuple(topology.edp_ranks().tolist())
    sums = Counter()
    for rows_PP in routed:
        me = topology.ep_rank
        away = sum(rows_PP[me]) - rows_PP[me][me]
        home = sum(row[me] for row in rows_PP) - rows_PP[me][me]
        sums["forward", "allgather_base", ep] += (len(ep) - 1) * (EXPERTS + 2) * 8
        sums["forward", "allgather_base", edp] += (len(edp) - 1) * (EXPERTS + len(ep)) * 8
        for name in ("forward", "backward"):
            sums[name, "alltoall_base", ep] += (away + home) * WIDTH * 4
    return sums


def reduced_gradients(topology: Topology, shapes, stage, accumulation) -> Counter:
    """What the engine sends, by the rules above."""
    world, edp = tuple(range(topology.world_size)), tuple(topology.edp_ranks().tolist())
    ep = tuple(topology.ep_ranks().tolist())
    sums = Counter()
    flat = {"matrices": 0, "router": 0, "vectors": 0, "experts": 0}
    for name, shape in shapes.items():
        expert = ".experts." in name
        group, numel = edp if expert else world, math.prod(shape)
        dense = "router" if ".router.gate." in name else "matrices" if len(shape) > 1 else "vectors"
        flat["experts" if expert else dense] += numel
        part = (len(group) - 1) * up(numel, len(group)) // len(group) * 4
        if stage < 3:
            times = accumulation if stage == 2 else 1
            sums["backward", "allreduce", group] += times * reduced(len(group), numel * 4)
        else:
            sums["forward", "allgather_base", group] += accumulation * part
            sums["backward", "allgather_base", group] += accumulation * part
            sums["backward", "reduce_scatter_base", group] += accumulation * part
    if stage == 0:
        sums["optimizer", "allgather_base", ep] += (len(ep) - 1) * 8
    if stage in (1, 2):
        for name, numel in flat.items():
            group = edp if name == "experts" else world
            part = (len(group) - 1) * up(numel, 2 * len(group)) // len(group) * 4
            sums["optimizer", "allgather_base", group] += part
            sums["optimizer", "allreduce", world] += reduced(len(world), 4)
        sums["optimizer", "allreduce", edp] += reduced(len(edp), 4)
    if stage == 3:
        for group in (world, world, world, edp, ep):
            sums["optimizer", "allreduce", group] += reduced(len(group), 8)
    return sums


@pytest.mark.parametrize(("world", "stage"), STAGES)
def test_a_steps_bytes_are_those_of_shapes_and_routing(world, stage):
    ep_size, accumulation, _ = CASES[world]
    for rank, seen in enumerate(third_steps(world)[stage]):
        topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
        assert len(seen["routed"]) == 2 * accumulation, "two layers with experts"
        expected = exchanged(topology, seen["routed"])
        expected += reduced_gradients(topology, seen["shapes"], stage, accumulation)
        assert seen["sums"] == +expected
        assert sum(seen["row"]) == sum(expected.values())


@pytest.mark.parametrize(("world", "stage"), STAGES)
def test_no_collective_of_a_step_escapes(world, stage):
    ranks = third_steps(world)[stage]
    for seen in ranks:
        assert seen["recorded"] == seen["dispatched"]
        assert len(seen["recorded"]) == seen["reached"] > 10
    assert sum(sum(seen["row"]) for seen in ranks) == sum(seen["received"] for seen in ranks)


def test_the_padding_is_real():
    """Else the rules about it would hold by luck."""
    shapes = third_steps(4)[3][0]["shapes"]
    dense = {name: math.prod(shape) for name, shape in shapes.items() if ".experts." not in name}
    assert any(numel % 4 for numel in dense.values())
    assert sum(numel for name, numel in dense.items() if len(shapes[name]) == 1) % 8
