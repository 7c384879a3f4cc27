"""Recomputation and replicas under DeepSpeed's engine: one SGD step's gradients against one process.

Stages, EP sizes, accumulation and dtypes by themselves: test_zero_matrix.py.
"""

from functools import partial

import numpy as np
import pytest
import torch

from balancer.split import exact_split
from moe import ModelConfig, MoEConfig, Topology, make_groups
from moe.model import Transformer
from moe.recompute import checkpoint
from moe.testing import run_ranks
from routing import RouterConfig

VOCAB, SEQ = 19, 12
LR = 0.5


def config(prefetch: bool = False, dedup: str = "off") -> ModelConfig:
    router = RouterConfig(d_model=24, num_experts=4, top_k=2, balance_loss=0.05)
    return ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=28, shared_hidden=20, prefetch=prefetch, dedup=dedup),
        vocab_size=VOCAB,
        num_layers=2,
        num_dense_layers=1,
        d_model=24,
        num_heads=3,
        dense_hidden=36,
        seq_len=SEQ,
    )


def placed(ep_size: int) -> np.ndarray:
    """Homes in expert order, then two spare slots a rank: replicas of experts 0 and 3, an empty one."""
    spare = {1: [[0, -1]], 2: [[3, 0], [0, -1]]}[ep_size]
    return np.concatenate([np.arange(4).reshape(ep_size, -1), np.array(spare)], axis=1).ravel()


def settings(stage: int, accumulation: int, world: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 2 * accumulation * world,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 500,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }


def micro_batch(rank: int, micro: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(100 * rank + micro))


def engine_step(rank, world, stage, ep_size, accumulation, keep="", replicas=""):
    """One optimizer step; returns the update of every parameter divided by -lr: its gradient as applied."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    shapes = config(prefetch="prefetch" in replicas, dedup="on" if "dedup" in replicas else "off")
    model = Transformer(shapes, topology, groups=make_groups(topology), layer_class=zero.ZeroMoELayer)
    model.init_weights(seed=5)
    if replicas:
        layer = model.blocks[1].feed_forward
        layer.place(placed(ep_size))
        layer.split = exact_split if "exact" in replicas else layer.split
    if keep:  # every block under activation checkpointing
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, keep=keep)
    engine = zero.make_engine(model, settings(stage, accumulation, world))
    before = zero.gather_weights(model, topology)
    tokens = accumulation * world * 2 * SEQ
    for micro in range(accumulation):
        batch = micro_batch(rank, micro)
        ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        engine.backward((ce_sum + aux_sum) / tokens * world * accumulation)
        engine.step()
    after = zero.gather_weights(model, topology)
    if before is None or after is None:
        return None
    names = [name for name, _ in model.named_parameters()]
    return {name: ((before[name] - after[name]) / LR).numpy() for name in names}


def reference_gradients(world, accumulation):
    """The same global batch in one process, all experts at home: micro-batches of all ranks side by side."""
    model = Transformer(config())
    model.init_weights(seed=5)
    for micro in range(accumulation):
        batch = torch.cat([micro_batch(rank, micro) for rank in range(world)])
        ce_sum, aux_sum = model(batch[:, :-1], batch[:, 1:])
        ((ce_sum + aux_sum) / (accumulation * world * 2 * SEQ)).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def assert_equal_by_ratio_and_difference(got: dict, want: dict) -> None:
    """A factor of P or of the world shows in the ratio; (w - (w - lr g)) / lr loses about 1e-7."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        ratio = float((got[name] * gradient).sum() / (gradient**2).sum())
        assert ratio == pytest.approx(1.0, abs=1e-4), name
        np.testing.assert_allclose(got[name], gradient, atol=2e-6, err_msg=name)


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("keep", ["routes", "rows"])
@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_blocks_have_the_gradients_of_the_reference(stage, keep):
    got = run_ranks(engine_step, 2, stage, 2, 1, keep)[0]
    assert_equal_by_ratio_and_difference(got, reference_gradients(2, 1))


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world", "ep_size", "accumulation", "keep", "replicas"),
    [
        (0, 2, 2, 2, "", "exact, dedup"),
        (1, 2, 2, 1, "rows", "prefetch"),
        (1, 4, 2, 1, "", "exact"),
        (2, 2, 2, 2, "routes", "prefetch, dedup"),
        (3, 2, 2, 1, "", "prefetch, exact, dedup"),  # a prefetch does nothing there
        (3, 4, 2, 2, "rows", "on use, dedup"),
        (3, 2, 1, 1, "", "on use"),  # replicas beside their homes
    ],
)
def test_with_replicas_the_gradients_are_those_of_the_reference_by_ratio(
    stage, world, ep_size, accumulation, keep, replicas
):
    got = run_ranks(engine_step, world, stage, ep_size, accumulation, keep, replicas)[0]
    assert_equal_by_ratio_and_difference(got, reference_gradients(world, accumulation))


def train_gates(rank, world, stage, *factors):
    return [_train_gates(rank, world, stage, factor) for factor in factors]


def _train_gates(rank, world, stage, factor, steps=3):
    """How far every parameter has moved after AdamW steps with routers at a factor of the learning rate."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    model = Transformer(config(), topology, groups=make_groups(topology), layer_class=zero.ZeroMoELayer)
    model.init_weights(seed=5)
    adam = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95], "torch_adam": True}}
    engine = zero.make_engine(model, {**settings(stage, 1, world), "optimizer": adam}, weight_decay=0.1)
    names = [group["name"] for group in engine.optimizer.param_groups]
    before, rates = zero.gather_weights(model, topology), []
    for number in range(steps):
        zero.set_learning_rates(engine, 0.01, factor)
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        ce_sum, aux_sum = engine(micro_batch(rank, number)[:, :-1], micro_batch(rank, number)[:, 1:])
        engine.backward((ce_sum + aux_sum) / (2 * SEQ))
        engine.step()
    after = zero.gather_weights(model, topology)
    moved = {} if before is None else {n: float((after[n] - w).float().norm()) for n, w in before.items()}
    return names, rates, moved


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_routers_learn_at_their_own_factor_and_all_else_as_before(stage):
    whole, slow = run_ranks(train_gates, 2, stage, 1.0, 1e-3)[0]
    assert whole[0] == slow[0] == ["matrices", "router", "vectors", "ep_size_2"]
    assert slow[1] == [[0.01, 0.01 * 1e-3, 0.01, 0.01]] * 3 and whole[1] == [[0.01] * 4] * 3
    gates = [name for name in whole[2] if name.endswith("router.gate.weight")]
    assert len(gates) == 1
    for name, length in whole[2].items():
        if name in gates:  # Adam's steps are lr times about 1 each; later ones see other gradients
            assert slow[2][name] == pytest.approx(1e-3 * length, rel=0.3)
        elif length:
            assert slow[2][name] == pytest.approx(length, rel=0.3), name
    assert whole[2][gates[0]] > 0.1


@pytest.mark.deepspeed
def test_gates_have_a_group_of_their_own_with_the_matrices_weight_decay():
    from moe import zero

    model = Transformer(config(), layer_class=zero.ZeroMoELayer)
    groups = {group["name"]: group for group in zero.parameter_groups(model, 0.1)}
    assert list(groups) == ["matrices", "router", "vectors", "ep_size_1"]
    assert [id(p) for p in groups["router"]["params"]] == [
        id(model.blocks[1].feed_forward.router.gate.weight)
    ]
    decays = {name: group["weight_decay"] for name, group in groups.items()}
    assert decays == {"matrices": 0.1, "router": 0.1, "vectors": 0.0, "ep_size_1": 0.1}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    layer = zero.ZeroMoELayer(config().moe, Topology())  # alone: nothing but experts, gate and shared
    assert "router" in [group["name"] for group in zero.parameter_groups(layer, 0.1)]


def test_homes_out_of_expert_order_are_refused_under_an_engine():
    from moe import zero

    slots = np.array([1, 0, 2, 3])
    with pytest.raises(ValueError, match=r"homes of rank 0 are experts \[1, 0, 2, 3\]; under a DeepSpeed"):
        zero.ZeroMoELayer(config().moe, Topology(), slot_to_expert_S=slots)


@pytest.mark.deepspeed
def test_the_number_of_optimizer_groups_does_not_depend_on_the_ep_size():
    """DeepSpeed's default cuts expert groups at 179 M elements of this rank, and checkpoints count groups."""
    from moe import zero

    numbers = set()
    for ep_size in (8, 4, 2, 1):
        model = torch.nn.Module()
        model.dense = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
        for name in ("w1", "w2", "w3", "v1", "v2", "v3"):
            weight = torch.nn.Parameter(torch.empty(8 // ep_size, 1024, 8192, device="meta"))
            weight.allreduce, weight.group_name = False, f"ep_size_{ep_size}"
            setattr(model, name, weight)
        groups = zero.parameter_groups(model, 0.1)
        assert sum(len(group["params"]) for group in groups) == 7
        numbers.add(len(groups))
    assert numbers == {2}


def test_the_private_api_is_all_there():
    from moe import zero

    assert zero.contract_problems() == []
