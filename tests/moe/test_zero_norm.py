"""The global gradient norm under DeepSpeed's engine: every expert once, at every stage, and clipped alike.

A gradient that is not finite leads to the same decision on all ranks.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from moe import ModelConfig, MoEConfig, Topology, make_groups
from moe.model import Transformer
from moe.testing import run_ranks
from routing import RouterConfig

VOCAB, SEQ, BATCH, LR = 19, 12, 2, 0.5
SPOILED = "blocks.0.feed_forward.experts.w2"


class Case(NamedTuple):
    """One engine: gradient_clipping, and the rank and value of one expert element's gradient in step 1."""

    stage: int
    dtype: str
    clip: float = 0.0
    spoiled: tuple[int, float] | None = None


class Outcome(NamedTuple):
    """What one rank has seen: norms and skipped steps as reported, step by step; weights before and after."""

    norms: list
    skipped: list
    update: float | None
    weights: list


def config() -> ModelConfig:
    """All tokens on the experts of rank 0: a mean over ranks is far from the norm."""
    router = RouterConfig(d_model=24, num_experts=4, top_k=2, balance_loss=0.05, forced="only:0-1")
    return ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=28), vocab_size=VOCAB, num_layers=1, d_model=24,
        num_heads=3, seq_len=SEQ,
    )  # fmt: skip


def settings(stage: int, world: int, dtype: str, clip: float) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "train_batch_size": BATCH * world,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 500,
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }


def micro_batch(rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(rank))


def fill(model: Transformer) -> None:
    """Weights under which the experts have a good part of the norm."""
    model.init_weights(seed=5)
    with torch.no_grad():
        for name, factor in (("embedding", 200), ("experts", 2), ("head", 20)):
            for full_name, parameter in model.named_parameters():
                parameter.mul_(factor if name in full_name else 1)


def engines_rank(rank, world, ep_size, cases):
    """An Outcome for each of several engines; those with a spoiled gradient take a second step without."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    groups = make_groups(topology)
    return [tuple(engine_steps(rank, topology, groups, Case(*case))) for case in cases]


def engine_steps(rank, topology, groups, case) -> Outcome:
    from moe import zero

    world = topology.world_size
    model = Transformer(config(), topology, groups=groups, layer_class=zero.ZeroMoELayer)
    fill(model)
    hook = spoil(model, case.spoiled[1]) if case.spoiled and case.spoiled[0] == rank else None
    engine = zero.make_engine(model, settings(case.stage, world, case.dtype, case.clip))
    norms, skipped, weights, update = [], [], [held_weights(model)], None
    before = zero.gather_weights(model, topology)
    for step in range(2 if case.spoiled else 1):
        batch = micro_batch(rank)
        ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        engine.backward((ce_sum + aux_sum) / (world * BATCH * SEQ) * world)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        skipped.append(engine.skipped_steps)
        weights.append(held_weights(model))
        if step == 0 and hook is not None:
            hook.remove()
    after = zero.gather_weights(model, topology)
    if before is not None and after is not None:
        changes = [(before[n].double() - after[n].double()) / LR for n, _ in model.named_parameters()]
        update = float(sum(change.square().sum() for change in changes)) ** 0.5
    engine.destroy()
    return Outcome(norms, skipped, update, weights)


def spoil(model: Transformer, value: float):
    """Put the value into one element of an expert's gradient, from now on."""

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[-1, 0, 0] = value
        return gradient

    return dict(model.named_parameters())[SPOILED].register_hook(spoiled)


def held_weights(model: Transformer) -> dict[str, np.ndarray]:
    """The weights that this rank computes with, whole also under ZeRO-3."""
    import deepspeed

    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().float().numpy().copy()
    return weights


def reference_norm(world: int) -> float:
    """One process and the batches of all ranks; the forced routes do not look at the scores."""
    model = Transformer(config())
    fill(model)
    batch = torch.cat([micro_batch(rank) for rank in range(world)])
    ce_sum, aux_sum = model(batch[:, :-1], batch[:, 1:])
    ((ce_sum + aux_sum) / (world * BATCH * SEQ)).backward()
    squares = {n: float(p.grad.double().square().sum()) for n, p in model.named_parameters()}
    experts = sum(value for name, value in squares.items() if "experts" in name)
    assert 0.3 < experts / sum(squares.values()) < 0.7, "a mean over ranks would be 10 % off"
    return sum(squares.values()) ** 0.5


def clipped_cases(world: int) -> list[Case]:
    clip = reference_norm(world) / 2
    return [Case(stage, dtype, clip) for stage in range(4) for dtype in DTYPES] + [Case(0, "float32")]


def spoiled_cases() -> list[Case]:
    """NaN and inf, on a rank whose experts have rows and on one whose have none; with and without a clip."""
    values = [(0, math.nan), (1, math.nan), (0, math.inf), (1, math.inf)]
    return [
        Case(stage, dtype, 1.0 if (stage + number) % 2 else 0.0, values[(stage + number) % 4])
        for number, dtype in enumerate(DTYPES)
        for stage in range(4)
    ]


DTYPES = ("float32", "bfloat16")
SHAPES = pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2)])


@functools.cache
def outcomes(world: int, ep_size: int) -> dict[Case, list[Outcome]]:
    """Of every rank, for every case: run once, for the ranks' start costs as much as several engines."""
    cases = clipped_cases(world) + spoiled_cases()
    everybody = run_ranks(engines_rank, world, ep_size, [tuple(case) for case in cases], timeout_s=180)
    return {case: [Outcome(*rank[number]) for rank in everybody] for number, case in enumerate(cases)}


@pytest.mark.dist
@pytest.mark.deepspeed
@SHAPES
def test_the_norm_counts_every_expert_once_and_clips_all_ranks_alike(world, ep_size):
    wanted = reference_norm(world)
    for case in clipped_cases(world):
        found = outcomes(world, ep_size)[case]
        rel = 1e-5 if case.dtype == "float32" else 2e-2  # gradients of bfloat16 weights, rounded themselves
        norms = [outcome.norms[0] for outcome in found]
        assert norms == [pytest.approx(wanted, rel=rel)] * world, case
        assert len(set(norms)) == 1, "the same number on every rank"
        assert found[0].update == pytest.approx(case.clip or wanted, rel=max(rel, 1e-4)), case


@pytest.mark.dist
@pytest.mark.deepspeed
@SHAPES
def test_after_clip_and_step_dense_weights_are_equal_on_all_ranks_and_experts_in_their_copies(world, ep_size):
    for case in clipped_cases(world):
        found = outcomes(world, ep_size)[case]
        for rank in range(1, world):
            for name, weight in found[rank].weights[-1].items():
                other = rank % ep_size if "experts" in name else 0
                np.testing.assert_array_equal(weight, found[other].weights[-1][name], f"{case} {name}")


@pytest.mark.dist
@pytest.mark.deepspeed
@SHAPES
def test_one_gradient_that_is_not_finite_is_reported_and_its_step_left_out_on_all_ranks(world, ep_size):
    """DeepSpeed reports inf for NaN too at stages 1 to 3. The next step starts from the weights of before."""
    for case in spoiled_cases():
        found = outcomes(world, ep_size)[case]
        for outcome in found:
            assert not math.isfinite(outcome.norms[0]), case
            assert outcome.skipped == [1, 1], case
            for name, weight in outcome.weights[1].items():
                np.testing.assert_array_equal(weight, outcome.weights[0][name], f"{case} {name}")
        rel = 1e-5 if case.dtype == "float32" else 2e-2
        second = [outcome.norms[1] for outcome in found]
        assert second == [pytest.approx(reference_norm(world), rel=rel)] * world, case
        assert any((found[0].weights[2][n] != w).any() for n, w in found[0].weights[1].items()), case
