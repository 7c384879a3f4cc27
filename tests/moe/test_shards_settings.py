"""Saved and resumed under DeepSpeed's settings: offload, sums, bucket orders, schedulers, optimizers, frozen
parameters; and what a single piece says of its state."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe import ModelConfig, MoEConfig, Topology, make_groups, shards, zero_state
from moe.model import Transformer
from moe.testing import run_ranks
from moe.zero_rules import OPTIMIZERS
from routing import RouterConfig

VOCAB, SEQ, BATCH, WORLD = 19, 12, 8, 2
COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps")

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PARAMS = {**OFFLOAD, "offload_param": {"device": "cpu"}}
ROUND_ROBIN = {"round_robin_gradients": True}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 1e-2,
            "warmup_num_steps": 9,
            "warmup_type": "linear",
        },
    }
}
FROZEN = ("head.weight", "blocks.1.feed_forward.experts.w2", "norm.weight")


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """more: DeepSpeed's settings but zero_optimization's;  frozen: parameters that are not trained;  skipped:
    the step with an infinite loss;  used: the engine that loads has been stepped."""

    stage: int
    dtype: str = "float32"
    ep_size: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    frozen: tuple[str, ...] = ()
    skipped: int | None = None
    used: bool = False
    steps: int = 3


CASES = {
    **{f"float32 {stage}": Case(stage=stage) for stage in (0, 1, 2, 3)},
    **{f"bfloat16 {stage}": Case(stage=stage, dtype="bfloat16") for stage in (0, 1, 2, 3)},
    "offload 2": Case(stage=2, zero=OFFLOAD),
    "offload 3": Case(stage=3, dtype="bfloat16", zero=OFFLOAD),
    "offload all 3": Case(stage=3, zero=PARAMS),
    "sums 1": Case(stage=1, dtype="bfloat16", more=SUMS, accumulation=2),
    "sums 1 ep 1": Case(stage=1, dtype="bfloat16", more=SUMS, ep_size=1),
    "sums 2": Case(stage=2, dtype="bfloat16", more=SUMS),
    "sums 3": Case(stage=3, dtype="bfloat16", more=SUMS),
    "round robin 1": Case(stage=1, zero=ROUND_ROBIN),
    "round robin 2": Case(stage=2, zero=ROUND_ROBIN, ep_size=1),
    "sub-groups 3": Case(stage=3, zero={"sub_group_size": 100}),
    "whole copies 3": Case(stage=3, zero={"stage3_param_persistence_threshold": 10**6}, used=True),
    "frozen 0": Case(stage=0, frozen=FROZEN),
    "frozen 1": Case(stage=1, frozen=FROZEN),
    "frozen 3": Case(stage=3, frozen=FROZEN, used=True),
    "frozen bfloat16 2": Case(stage=2, dtype="bfloat16", frozen=FROZEN),
    "scheduler 0": Case(stage=0, more=WARMUP, skipped=1),
    "scheduler 2": Case(stage=2, dtype="bfloat16", more=WARMUP, skipped=0),
    "scheduler 3": Case(stage=3, more=WARMUP),
}
QUICK = (
    "bfloat16 0", "bfloat16 1", "bfloat16 2", "bfloat16 3", "float32 0", "offload 3", "sums 1",
    "round robin 2", "whole copies 3", "frozen 1", "frozen 3", "scheduler 2",
)  # fmt: skip
CROSSINGS = (
    ("sums 1", "bfloat16 3"),
    ("bfloat16 3", "sums 1"),
    ("round robin 2", "float32 1"),
    ("offload 3", "bfloat16 2"),
    ("bfloat16 2", "offload 3"),
    ("frozen 1", "frozen 3"),
    ("frozen 3", "frozen 1"),
)
OTHER_CROSSINGS = (
    ("sums 1 ep 1", "sums 2"),
    ("sums 2", "bfloat16 0"),
    ("sums 3", "sums 1 ep 1"),
    ("round robin 1", "float32 3"),
    ("round robin 1", "round robin 2"),
    ("float32 1", "round robin 2"),
    ("float32 3", "round robin 1"),
    ("offload 2", "float32 2"),
    ("float32 2", "offload 2"),
    ("offload all 3", "float32 3"),
    ("float32 3", "offload all 3"),
    ("sub-groups 3", "round robin 2"),
    ("float32 0", "sub-groups 3"),
    ("whole copies 3", "float32 3"),
    ("float32 3", "whole copies 3"),
    ("frozen 0", "frozen 3"),
    ("frozen 3", "frozen 0"),
    ("frozen bfloat16 2", "frozen 0"),
    ("scheduler 0", "scheduler 3"),
    ("scheduler 3", "scheduler 0"),
)

TYPES = {
    "Adam": optimizer("Adam", torch_adam=True, adam_w_mode=False),
    "AdamW": optimizer("AdamW", torch_adam=True),
    "amsgrad": optimizer("AdamW", torch_adam=True, amsgrad=True),
    "momentum": optimizer("SGD", momentum=0.9),
    **{
        name: optimizer(name)
        for name in ("SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Adadelta", "Rprop")
    },
}
FOR_TYPES = {"zero_allow_untested_optimizer": True}
CASES |= {
    f"{name} {stage}": Case(stage=stage, more={**settings, **FOR_TYPES}, steps=2)
    for name, settings in TYPES.items()
    for stage in (0, 1)
}
CASES["Adagrad 0"] = Case(stage=0, more={**optimizer("Adagrad"), **FOR_TYPES}, steps=2)


def make_engine(rank, case, seed):
    """Odd sizes, so that every flat partition ends in padding; the clip acts in every step."""
    from moe import zero

    router = RouterConfig(d_model=18, num_experts=8, top_k=2, balance_loss=0.05)
    config = ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=7, shared_hidden=5), vocab_size=VOCAB, num_layers=2,
        num_dense_layers=1, d_model=18, num_heads=3, dense_hidden=11, seq_len=SEQ,
    )  # fmt: skip
    topology = Topology(world_size=WORLD, ep_size=case.ep_size, rank=rank)
    model = Transformer(config, topology, groups=make_groups(topology), layer_class=zero.ZeroMoELayer)
    model.init_weights(seed)
    parameters = dict(model.named_parameters())
    for name in case.frozen:
        parameters[name].requires_grad_(False)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // WORLD // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "train_batch_size": BATCH,
        "gradient_clipping": 0.3,
        "zero_optimization": {
            "stage": case.stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500,
            "stage3_param_persistence_threshold": 100, **case.zero,
        },
        "bf16": {"enabled": case.dtype == "bfloat16"},
        **TYPES["AdamW"],
        **case.more,
    }  # fmt: skip
    return zero.make_engine(model, settings, weight_decay=0.1)


def step(engine, rank, case, number):
    """Returns the rates that the step leaves behind."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    scale = float("inf") if number == case.skipped else WORLD * case.accumulation / (BATCH * SEQ)
    for part in batch.chunk(WORLD)[rank].chunk(case.accumulation):
        ce_sum, aux_sum = engine(part[:, :-1], part[:, 1:])
        engine.backward((ce_sum + aux_sum) * scale)
        engine.step()
    return [group["lr"] for group in engine.optimizer.param_groups]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def save(engine, folder: Path, rank: int) -> dict[str, np.ndarray]:
    """Save, and return all that is on disk, with the model's own weights beside."""
    from moe import zero

    folder.mkdir(parents=True, exist_ok=True)
    shards.save(engine, folder / f"rank-{rank}.safetensors")
    weights = zero.gather_weights(engine.module, engine.module.topology)
    torch.distributed.barrier()
    if weights is None:
        return {}
    stored = shards.StoredState(files(folder))
    whole = {f"weight/{name}": value.float().numpy().ravel() for name, value in weights.items()}
    for name in stored.names():
        for kind in stored.kinds(name):
            size = int(np.prod(stored.shape(name)))
            whole[f"{kind}/{name}"] = stored.read(kind, name, 0, size).numpy()
    return whole


def counted(engine) -> list[int]:
    return [getattr(engine, name) for name in COUNTED]


def differences(want: dict[str, np.ndarray], found: dict[str, np.ndarray], atol: float = 0.0) -> list[str]:
    apart = [k for k in want if k in found and not np.allclose(found[k], want[k], rtol=0, atol=atol)]
    return apart + sorted(want.keys() ^ found.keys())


def misnamed(whole: dict[str, np.ndarray], dtype: str) -> list[str]:
    """Parameters whose saved master weight is not, in the model's type, the weight in the model."""
    masters = [key.removeprefix("master/") for key in whole if key.startswith("master/")]
    return [
        name
        for name in masters
        if not torch.equal(
            torch.from_numpy(whole[f"master/{name}"]).to(getattr(torch, dtype)).float(),
            torch.from_numpy(whole[f"weight/{name}"]),
        )
    ]


def train(rank, case, folder):
    """Two steps, a save, more steps, a save: states, counters and rates of both."""
    engine = make_engine(rank, case, seed=5)
    for number in range(2):
        step(engine, rank, case, number)
    half = save(engine, folder / "half", rank)
    counters = json.loads(json.dumps(zero_state.counters(engine)))
    rates = [step(engine, rank, case, number) for number in range(2, 2 + case.steps)]
    return SimpleNamespace(
        half=half, counters=counters, rates=rates, end=save(engine, folder / "end", rank),
        counted=counted(engine), last=zero_state.counters(engine),
    )  # fmt: skip


def resume(rank, case, folder, counters):
    """The same in an engine at other weights, which takes over after two steps; `used` has stepped before."""
    engine = make_engine(rank, case, seed=99)
    if case.used:
        step(engine, rank, case, 50)
    shards.load(engine, files(folder / "half"))
    zero_state.set_counters(engine, counters)
    half = save(engine, folder / "half again", rank)
    rates = [step(engine, rank, case, number) for number in range(2, 2 + case.steps)]
    return SimpleNamespace(
        half=half, rates=rates, end=save(engine, folder / "end again", rank), counted=counted(engine),
        last=zero_state.counters(engine),
    )  # fmt: skip


def resume_problems(rank, case, folder, before) -> list[str]:
    """What is not as it was without the interruption; empty = nothing."""
    after = resume(rank, case, folder, before.counters)
    trained = [key for key in before.end if key.startswith("master/")]
    found = {
        "misnamed": misnamed(before.half, case.dtype),
        "loaded": differences(before.half, after.half),
        "at the end": differences(before.end, after.end),
        "rates": [] if before.rates == after.rates else [before.rates, after.rates],
        "counted": [] if before.counted == after.counted else [before.counted, after.counted],
        "counters": [] if before.last == after.last else [before.last, after.last],
        "stood still or moved": [
            key
            for key in trained
            if np.array_equal(before.end[key], before.half[key])
            != (key.removeprefix("master/") in case.frozen)
        ],
    }
    return [f"{what}: {bad}" for what, bad in found.items() if bad]


def crossing_problems(rank, source, target, folder, before) -> list[str]:
    """What the target, which took over from the source, does not have as the source had it."""
    case = CASES[target]
    engine = make_engine(rank, case, seed=99)
    if case.used:
        step(engine, rank, case, 50)
    shards.load(engine, files(folder / source / "half"))
    zero_state.set_counters(engine, before.counters)
    half = save(engine, folder / f"{source} to {target}", rank)
    want, got = (
        {key: value for key, value in whole.items() if not key.startswith("weight/")}  # other types round
        for whole in (before.half, half)
    )
    bad = differences(want, got) + misnamed(half, case.dtype)
    if "float32" == case.dtype == CASES[source].dtype:
        for number in range(2, 5):
            step(engine, rank, case, number)
        # sums in another order; Adam lifts the rounding of tiny gradients, by whose size it divides
        bad += differences(before.end, save(engine, folder / f"{source} to {target} end", rank), atol=2e-5)
    return bad


def run_cases(rank, world, names, crossings, folder):
    """Name of a case or pair -> what went wrong. A refusal is one too: all ranks say it alike."""
    from moe import zero

    zero.init_distributed("gloo")
    trained, problems = {}, {}
    for name in names:
        trained[name] = train(rank, CASES[name], folder / name)
        try:
            problems[name] = resume_problems(rank, CASES[name], folder / name, trained[name])
        except ValueError as error:
            problems[name] = [str(error)]
    for source, target in crossings:
        try:
            found = crossing_problems(rank, source, target, folder, trained[source])
        except ValueError as error:
            found = [str(error)]
        problems[f"{source} to {target}"] = found
    return problems


def check_cases(names, crossings, folder):
    problems = run_ranks(run_cases, WORLD, names, crossings, folder)[0]
    assert len(problems) == len(names) + len(crossings)
    assert {name: bad for name, bad in problems.items() if bad} == {}


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit_and_loads_under_other_settings(tmp_path):
    check_cases(QUICK, CROSSINGS, tmp_path)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("half", [0, 1])
def test_every_other_setting_resumes_to_the_bit_and_loads_under_others(tmp_path, half):
    crossings = OTHER_CROSSINGS[half::2]
    names = {name for pair in crossings for name in pair}
    rest = [n for n in CASES if n not in names and n.split()[0] not in (*TYPES, "Adagrad") and n not in QUICK]
    check_cases(sorted(names) + rest[half::2], crossings, tmp_path)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_every_optimizer_resumes_to_the_bit_at_stage_1(tmp_path):
    check_cases([f"{name} 1" for name in TYPES if name != "AdamW"], (), tmp_path)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_every_optimizer_resumes_to_the_bit_at_stage_0(tmp_path):
    check_cases([f"{name} 0" for name in (*TYPES, "Adagrad")], (), tmp_path)


def test_every_optimizer_that_is_let_through_is_among_these():
    tried = {CASES[f"{name} 0"].more["optimizer"]["type"] for name in (*TYPES, "Adagrad")}
    assert tried == set(OPTIMIZERS.values()) - {"Lion"}, "Lion wants a GPU or a compiler"


# ---- one piece, one engine's counters -------------------------------------------------------------------


def piece(holder: torch.Tensor, at: int = 0, numel: int = 6) -> zero_state.Piece:
    master = holder.view(-1)[at : at + numel]
    return zero_state.Piece(name="head.weight", shape=(3, 4), start=2, master=master, holder=holder, at=at)


def test_moments_of_a_piece_are_views_and_scalars_say_what_they_were():
    holder = torch.zeros(3, 4)
    average = torch.arange(12.0).view(3, 4)
    state = {
        holder: {
            "exp_avg": average, "step": torch.tensor(3.0), "count": torch.tensor(2, dtype=torch.int64),
            "mu_product": 0.5, "steps": 7, "max_exp_avg": None,
        }
    }  # fmt: skip
    part = piece(holder, at=2)
    assert part.scalars(state) == {
        "step": ["float32", 3.0], "count": ["int64", 2], "mu_product": ["number", 0.5],
        "steps": ["number", 7],
    }  # fmt: skip
    assert part.moments(state).keys() == {"exp_avg"}
    part.moments(state)["exp_avg"].zero_()
    assert average.view(-1).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 8, 9, 10, 11]
    assert part.scalars({}) == part.moments({}) == {}


def test_state_that_is_not_one_value_per_weight_is_refused_by_name():
    holder = torch.zeros(3, 4)
    for shape in ((3,), (4, 3), (12,)):
        message = rf"'row' of head.weight has shape \({shape[0]}.*for weights of shape \(3, 4\).*use Adam"
        with pytest.raises(ValueError, match=message):
            piece(holder).moments({holder: {"row": torch.zeros(shape)}})


def fake_engine(scheduler=None, **changed):
    """An engine as far as counters look at it: torch's AdamW, two groups."""
    groups = [{"params": [torch.zeros(2)], "weight_decay": 0.1}, {"params": [torch.zeros(3)]}]
    hyper = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0} | changed
    return SimpleNamespace(
        optimizer=torch.optim.AdamW(groups, **hyper), lr_scheduler=scheduler,
        global_steps=0, global_samples=0, skipped_steps=0, micro_steps=0,
        gradient_accumulation_steps=lambda: 4,
    )  # fmt: skip


def fake_scheduler():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_counters_come_back_and_what_schedules_move_with_them():
    engine = fake_engine(fake_scheduler())
    engine.global_steps, engine.global_samples, engine.skipped_steps = 5, 40, 2
    engine.lr_scheduler.last_epoch = 3
    engine.optimizer.param_groups[1]["lr"] = 0.25
    saved = json.loads(json.dumps(zero_state.counters(engine)))
    other = fake_engine(fake_scheduler(), lr=7.0, betas=(0.5, 0.5))
    zero_state.set_counters(other, saved)
    assert counted(other) == [5, 40, 2, 20]
    assert [group["lr"] for group in other.optimizer.param_groups] == [1e-3, 0.25]
    assert [group["betas"] for group in other.optimizer.param_groups] == [(0.9, 0.99)] * 2
    assert other.lr_scheduler.last_epoch == 3
    assert json.loads(json.dumps(zero_state.counters(other))) == saved


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eps": 1e-6}, r"eps was 1e-08 and is now 1e-06"),
        ({"weight_decay": 0.2}, r"weight_decay was 0.0 and is now 0.2"),
        ({"amsgrad": True}, r"amsgrad was False and is now True"),
        ({"scheduler": fake_scheduler()}, r"differ in whether DeepSpeed has a scheduler"),
    ],
)
def test_counters_of_other_hyperparameters_are_refused_and_nothing_is_set(changed, message):
    saved = zero_state.counters(fake_engine(lr=0.5)) | {"global_steps": 5}
    engine = fake_engine(**changed)
    with pytest.raises(ValueError, match=message):
        zero_state.set_counters(engine, saved)
    assert counted(engine) == [0, 0, 0, 0]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-3, 1e-3]


def test_counters_of_another_optimizer_or_number_of_groups_are_refused():
    saved = zero_state.counters(fake_engine())
    for change in ({"optimizer": "SGD"}, {"groups": saved["groups"][:1]}):
        with pytest.raises(ValueError, match=r"and the engine has AdamW with 2: moments do not carry over"):
            zero_state.set_counters(fake_engine(), {**saved, **change})
