"""DeepSpeed's settings with experts: what is refused, and the gradients of unusual ones that are not."""

import numpy as np
import pytest
import torch

from moe import ModelConfig, MoEConfig, Topology, make_groups
from moe.model import Transformer
from moe.testing import run_ranks
from moe.zero_rules import RULES
from moe.zero_support import check_settings
from routing import RouterConfig

# One case a rule at least: setting, value, stage, what the message must say, what else the run is.
REFUSED = [
    ("zero_optimization.contiguous_gradients", False, 1, "wrong gradients without a word"),
    ("zero_optimization.contiguous_gradients", False, 2, "asserts"),
    ("zero_optimization.reduce_scatter", False, 1, "take it out"),
    ("zero_optimization.reduce_scatter", False, 2, "stages 0 and 3"),
    ("gradient_allreduce_op", "sum", 0, '"mean"'),
    ("managed_gradient_accumulation", False, 1, "every micro-batch would be a step"),
    ("prescale_gradients", True, 2, "use stage 0 or 1"),
    ("gradient_predivide_factor", 2.0, 3, "use stage 0 or 1"),
    ("zero_optimization.compute_grad_norm", False, 1, "NaN"),
    ("zero_optimization.stage3_module_granularity_threshold", 100, 3, "take it out (0)"),
    ("zero_optimization.allgather_bucket_size", 501, 1, "add 1"),
    ("zero_optimization.allgather_bucket_size", "5e8", 1, "even"),
    ("zero_optimization.zero_hpz_partition_size", "2", 3, "take it out (1)"),
    ("zero_optimization.legacy_stage1", True, 1, "take it out"),
    ("communication_data_type", "fp16", 1, "loss scale"),
    ("communication_data_type", "bf16", 0, "rounded on the wire"),
    ("data_types.grad_accum_dtype", "fp32", 0, "use stage 1, 2 or 3", {"dtype": "bfloat16"}),
    ("data_types.grad_accum_dtype", "bf16", 1, 'model.dtype = "bfloat16"'),
    ("data_types.grad_accum_dtype", "fp16", 1, 'use "fp32"', {"dtype": "bfloat16"}),
    ("data_types.buffer_dtype", "bf16", 1, "router's bias"),
    ("bf16.bf16_master_weights_and_grads", True, 1, "float32 weights"),
    ("bf16.bf16_optimizer_states", True, 1, "float32 weights"),
    ("bfloat16.bf16_master_weights_and_grads", True, 1, "float32 weights"),
    ("bfloat16.bf16_optimizer_states", True, 1, "float32 weights"),
    ("torch_autocast", {"enabled": True}, 1, '"dtype": "bfloat16"'),
    ("fp16", {"enabled": True}, 1, 'model.dtype = "bfloat16"'),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, 0, "use stage 1, 2 or 3"),
    ("zero_optimization.offload_param", {"device": "cpu"}, 2, "use stage 3"),
    ("zero_optimization.offload_optimizer", {"device": "nvme"}, 3, 'use "cpu"'),
    ("zero_optimization.offload_param", {"device": "nvme"}, 3, 'use "cpu"'),
    ("zero_optimization.offload_optimizer", {"device": "cpu", "ratio": 0.5}, 3, "take it out (1.0)"),
    ("zero_optimization.offload_optimizer", {"device": "cpu", "super_offload": True}, 3, "compiled CPUAdam"),
    ("zero_optimization.cpu_offload", True, 2, '"offload_optimizer": {"device": "cpu"}'),
    ("zero_optimization.cpu_offload_param", True, 3, '"offload_param": {"device": "cpu"}'),
    ("zero_optimization.zero_hpz_partition_size", 2, 3, "take it out (1)"),
    ("zero_optimization.zero_quantized_weights", True, 3, "rounded"),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, 3, "rounded"),
    ("zero_optimization.zero_quantized_gradients", True, 3, "refuses it with experts"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, 2, "checkpoints do not know"),
    ("use_data_before_expert_parallelism", True, 1, "neighbours"),
    ("optimizer.type", "Muon", 1, "one value per weight"),
    ("optimizer.type", "OneBitAdam", 1, "use AdamW"),
    ("optimizer.type", "ZeroOneAdam", 0, "use AdamW"),
    ("optimizer.type", "Lamb", 0, "use AdamW"),
    ("optimizer.type", "Adafactor", 3, "use AdamW"),
    ("optimizer.type", "Adagrad", 2, "use stage 0"),
    ("optimizer.type", "LBFGS", 0, "use AdamW"),
    ("optimizer.type", "sgd", 0, "as torch spells them"),
    ("zero_allow_untested_optimizer", False, 1, "set it to true", {"optimizer": "SGD"}),
    ("optimizer.params.max_grad_norm", 1.0, 1, "train.clip"),
    ("tensor_parallel.autotp_size", 2, 1, "train.ep_size"),
    ("sequence_parallel_size", 2, 1, "take it out"),
    ("expert_parallel", {"enabled": True}, 1, "train.ep_size"),
    ("pipeline", {"stages": 2}, 1, "ignores it"),
    ("data_efficiency", {"enabled": True}, 1, "[data]"),
    ("hybrid_engine", {"enabled": True}, 1, "take it out"),
    ("compile.deepcompile", True, 1, "ignore it"),
    ("weight_quantization", {"num_bits": 8}, 1, "inference"),
    ("datastates_ckpt", {"enabled": True}, 1, "take it out"),
    *(
        (name, {"enabled": True}, 1, "take it out")
        for name in (
            "amp", "compression_training", "curriculum_learning", "elasticity", "eigenvalue",
            "graph_harvesting", "nebula", "progressive_layer_drop", "quantize_training", "sparse_attention",
            "sparse_gradients", "zero_optimization.mics_shard_size",
            "zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param",
        )
    ),
]  # fmt: skip


def with_setting(path: str, value, stage: int, optimizer: str = "AdamW") -> dict:
    settings: dict = {"zero_optimization": {"stage": stage}, "optimizer": {"type": optimizer}}
    table = settings
    *outer, last = path.split(".")
    for key in outer:
        table = table.setdefault(key, {})
    table[last] = value
    return settings


def check(settings: dict, *, world_size: int = 4, ep_size: int = 2, dtype: str = "float32") -> None:
    check_settings(settings, world_size=world_size, ep_size=ep_size, dtype=dtype)


def problem(settings: dict, **run) -> str:
    with pytest.raises(ValueError) as caught:
        check(settings, **run)
    return str(caught.value)


def refusal(path: str, value, stage: int, run: dict | None = None) -> str:
    run = dict(run or {})
    return problem(with_setting(path, value, stage, run.pop("optimizer", "AdamW")), **run)


@pytest.mark.parametrize(
    "case", REFUSED, ids=[f"{path}-{value}-{stage}" for path, value, stage, *_ in REFUSED]
)
def test_a_setting_that_does_not_work_is_refused_with_reason_and_remedy(case):
    path, value, stage, says, *run = case
    message = refusal(path, value, stage, *run)
    assert path.split(".")[-1] in message
    assert f"at ZeRO stage {stage}" in message
    assert says in message
    assert message.isascii()
    assert len(message.splitlines()) == 1, "one mistake, one problem"


def test_every_rule_has_a_case():
    messages = [refusal(path, value, stage, *run) for path, value, stage, _, *run in REFUSED]
    untold = [
        rule.setting
        for rule in RULES
        if not any(m.startswith(f"{rule.setting} = ") and m.endswith(rule.reason) for m in messages)
    ]
    assert untold == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_settings_pass_at_every_stage(stage, dtype):
    check({"zero_optimization": {"stage": stage}}, dtype=dtype)
    check(settings_of(stage, dtype, {}, {}), dtype=dtype)
    check({"zero_optimization": None} if stage == 0 else {}, dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "run"),
    [
        (with_setting("zero_optimization.contiguous_gradients", False, 3), {}),
        (with_setting("zero_optimization.reduce_scatter", False, 0), {}),
        (with_setting("prescale_gradients", True, 1), {}),
        (with_setting("gradient_predivide_factor", 1.0, 3), {}),
        (with_setting("zero_optimization.allgather_bucket_size", 5e8, 1), {}),
        (with_setting("zero_optimization.zero_hpz_partition_size", 1, 3), {}),
        (with_setting("zero_optimization.offload_optimizer", {"device": "none"}, 0), {}),
        (with_setting("zero_optimization.offload_optimizer", {}, 0), {}),
        (with_setting("data_types.grad_accum_dtype", "fp32", 0), {}),
        (with_setting("data_types.grad_accum_dtype", "bf16", 0), {"dtype": "bfloat16"}),
        (with_setting("torch_autocast", {"enabled": True, "dtype": "bfloat16"}, 1), {}),
        (with_setting("torch_autocast", {"enabled": False}, 1), {}),
        (with_setting("use_data_before_expert_parallelism", True, 1), {"ep_size": 4}),
        (with_setting("use_data_before_expert_parallelism", True, 1), {"ep_size": 1}),
        (with_setting("zero_allow_untested_optimizer", False, 0, "SGD"), {}),
        (with_setting("optimizer.type", "adamw", 2), {}),
        (with_setting("optimizer.type", "Adagrad", 0), {}),
        (with_setting("communication_data_type", "fp32", 2), {"dtype": "bfloat16"}),
        (with_setting("fp16", {"enabled": False}, 1), {}),
        (with_setting("zero_optimization.zenflow", None, 1), {}),
    ],
)
def test_a_rule_stops_at_its_stage_its_value_and_its_run(settings, run):
    check(settings, **run)


def test_several_problems_are_all_told_a_line_each():
    settings = {
        "zero_optimization": {"stage": 2, "reduce_scatter": False, "zenflow": {}},
        "optimizer": {"type": "Adamax"},
    }
    lines = problem(settings).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "zero_optimization.reduce_scatter",
        "zero_optimization.zenflow",
        "zero_allow_untested_optimizer",
    ]
    assert lines[0].startswith("zero_optimization.reduce_scatter = false at ZeRO stage 2: ")
    assert lines[2].startswith("zero_allow_untested_optimizer = absent at ZeRO stage 2: ")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"zero_optimization": True}, "zero_optimization = true must be an object"),
        ({"zero_optimization": {"stage": 4}}, "stage = 4 must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "1"}}, 'stage = "1" must be 0, 1, 2 or 3'),
        ({"zero_optimization": {"stage": True}}, "stage = true must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}, '"cpu" must be an object'),
    ],
)
def test_a_form_that_the_rules_cannot_read_is_refused(settings, says):
    assert says in problem(settings)


def test_a_type_that_is_not_trained_in_is_refused():
    with pytest.raises(ValueError, match="'float16' is not trained in"):
        check({}, dtype="float16")


# ---- on ranks -------------------------------------------------------------------------------------------


VOCAB, SEQ, BATCH, ACCUMULATION = 19, 12, 2, 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

# stage, dtype, added to zero_optimization, added to the settings
CASES = [
    *((stage, dtype, OFFLOAD, {}) for dtype in ("float32", "bfloat16") for stage in (1, 2, 3)),
    (1, "float32", {"overlap_comm": True}, {}),
    (2, "float32", {"overlap_comm": True, "round_robin_gradients": True}, {}),
    (1, "float32", {"round_robin_gradients": True, "parameter_alignment": True, **OFFLOAD}, {}),
    (3, "float32", {"sub_group_size": 100, "reduce_scatter": False, "contiguous_gradients": False}, {}),
    (3, "float32", {"stage3_param_persistence_threshold": 600, "offload_param": {"device": "cpu"}}, {}),
    *((stage, "bfloat16", {}, SUMS) for stage in (1, 2, 3)),
    (1, "float32", {}, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
]
WRONG = (1, "float32", {"contiguous_gradients": False}, {})


def settings_of(stage: int, dtype: str, zero: dict, more: dict, world: int = 4) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "train_batch_size": BATCH * ACCUMULATION * world,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 500,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "SGD", "params": {"lr": step_size(dtype)}},
        **more,
    }


def step_size(dtype: str) -> float:
    """bfloat16 rounds the new weight: only a step much longer than the weight shows the gradient."""
    return 64.0 if dtype == "bfloat16" else 0.5


def micro_batch(rank: int, micro: int) -> torch.Tensor:
    return torch.randint(
        0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(100 * rank + micro)
    )


def config() -> ModelConfig:
    router = RouterConfig(d_model=24, num_experts=4, top_k=2, balance_loss=0.05)
    return ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=28, shared_hidden=20), vocab_size=VOCAB, num_layers=2,
        num_dense_layers=1, d_model=24, num_heads=3, dense_hidden=36, seq_len=SEQ,
    )  # fmt: skip


def engines_rank(rank, world, ep_size, cases):
    """One step of SGD for each case; the update of every parameter divided by -lr, on rank 0."""
    from moe import zero

    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    groups, found = make_groups(topology), []
    for case in cases:
        model = Transformer(config(), topology, groups=groups, layer_class=zero.ZeroMoELayer)
        model.init_weights(seed=5)
        stage, dtype, zero_settings, more = case
        engine = zero.make_engine(model, settings_of(stage, dtype, zero_settings, more, world))
        before = zero.gather_weights(model, topology)
        for micro in range(ACCUMULATION):
            batch = micro_batch(rank, micro)
            ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
            engine.backward((ce_sum + aux_sum) / (BATCH * SEQ))
            engine.step()
        after = zero.gather_weights(model, topology)
        if before is not None and after is not None:
            names = [name for name, _ in model.named_parameters()]
            changes = {name: before[name].float() - after[name].float() for name in names}
            found.append({name: (value / step_size(dtype)).numpy() for name, value in changes.items()})
    return found


def reference_gradients(world: int) -> dict[str, np.ndarray]:
    """The same global batch in one process, all experts at home."""
    model = Transformer(config())
    model.init_weights(seed=5)
    for micro in range(ACCUMULATION):
        batch = torch.cat([micro_batch(rank, micro) for rank in range(world)])
        ce_sum, aux_sum = model(batch[:, :-1], batch[:, 1:])
        ((ce_sum + aux_sum) / (ACCUMULATION * world * BATCH * SEQ)).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def test_the_cases_that_run_are_accepted_and_the_wrong_one_is_not():
    for case in CASES:
        check(settings_of(*case), dtype=case[1])
    assert "contiguous_gradients" in problem(settings_of(*WRONG))


@pytest.mark.dist
@pytest.mark.deepspeed
def test_unusual_settings_that_are_accepted_have_the_gradients_of_the_reference():
    """And one that is refused has not: with it the refusal may go."""
    *accepted, wrong = run_ranks(engines_rank, 4, 2, [*CASES, WRONG])[0]
    want = reference_gradients(4)
    assert all(got.keys() == want.keys() for got in accepted)
    for case, got in zip(CASES, accepted, strict=True):
        # float32: (w - (w - lr g)) / lr loses 1e-7; bfloat16: weights and activations round by 2^-9
        ratio_off, off = (1e-4, 2e-6) if case[1] == "float32" else (0.05, 2e-2)
        for name, gradient in want.items():
            ratio = float((got[name] * gradient).sum() / (gradient**2).sum())
            assert ratio == pytest.approx(1.0, abs=ratio_off), (case, name)
            np.testing.assert_allclose(got[name], gradient, atol=off, err_msg=f"{case} {name}")
    experts = [name for name in want if "experts" in name]
    assert max(float(np.abs(wrong[name] - want[name]).max()) for name in experts) > 1e-3
