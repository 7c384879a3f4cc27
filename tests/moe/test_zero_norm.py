"""The global gradient norm under DeepSpeed's engine: every expert once, at every stage, and clipped alike."""

import numpy as np
import pytest
import torch

from moe import ModelConfig, MoEConfig, Topology, make_groups
from moe.model import Transformer
from moe.testing import run_ranks
from routing import RouterConfig

VOCAB, SEQ, BATCH, LR = 19, 12, 2, 0.5


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
    """Norm as reported, norm of the update, and the dense weights after one step, for several engines."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    groups = make_groups(topology)
    found = []
    for stage, dtype, clip in cases:
        model = Transformer(config(), topology, groups=groups, layer_class=zero.ZeroMoELayer)
        fill(model)
        engine = zero.make_engine(model, settings(stage, world, dtype, clip))
        before = zero.gather_weights(model, topology)
        batch = micro_batch(rank)
        ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        engine.backward((ce_sum + aux_sum) / (world * BATCH * SEQ) * world)
        engine.step()
        after = zero.gather_weights(model, topology)
        update = None
        if before is not None and after is not None:
            changes = [(before[n].double() - after[n].double()) / LR for n, _ in model.named_parameters()]
            update = float(sum(change.square().sum() for change in changes)) ** 0.5
        dense = {
            n: p.detach().float().numpy().copy() for n, p in model.named_parameters() if "experts" not in n
        }
        found.append((float(engine.get_global_grad_norm()), update, dense))
    return found


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


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2)])
def test_the_norm_counts_every_expert_once_and_clips_all_ranks_alike(world, ep_size):
    wanted = reference_norm(world)
    clip = wanted / 2
    cases = [(stage, "float32", clip) for stage in (0, 1, 2, 3)] + [(0, "float32", 0.0)]
    cases += [(stage, "bfloat16", clip) for stage in (0, 1)]
    everybody = run_ranks(engines_rank, world, ep_size, cases, timeout_s=180)
    for number, (stage, dtype, limit) in enumerate(cases):
        norms = [outcomes[number][0] for outcomes in everybody]
        rel = 1e-5 if dtype == "float32" else 2e-2  # gradients of bfloat16 weights, rounded themselves
        assert norms == [pytest.approx(wanted, rel=rel)] * world, (stage, dtype)
        assert len(set(norms)) == 1, "the same number on every rank"
        update = everybody[0][number][1]
        assert update == pytest.approx(limit or wanted, rel=max(rel, 1e-4)), (stage, dtype)
        if stage < 3:
            for outcomes in everybody[1:]:
                for name, weight in everybody[0][number][2].items():
                    np.testing.assert_array_equal(outcomes[number][2][name], weight, err_msg=name)
