"""Zero rules: the settings of DeepSpeed that are refused, one rule each; `moe/zero_support.py` checks them.

A rule names a setting, which of its values are bad at which stages, and why, with the nearest that works. All
of it was seen or read in DeepSpeed 0.19. Plain data: no deepspeed here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZERS = {
    name.lower(): name
    for name in (
        "Adam", "AdamW", "SGD", "Lion", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Adadelta",
        "Rprop",
    )
}  # fmt: skip
"""Optimizers whose state is one value per weight and scalars, as torch spells them: they step on shards."""

ANY_CASE = ("adam", "adamw", "lion", "adagrad")
"""Of these, DeepSpeed's own: in any case, and tested by it under ZeRO."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a rule looks at: DeepSpeed's settings, and the run that they are for."""

    settings: Mapping[str, Any]
    world_size: int
    ep_size: int
    dtype: str

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path; the default where it, or a table on the way, is absent or null."""
        value: Any = self.settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def stage(self) -> Any:
        return self.get("zero_optimization.stage", 0)

    @property
    def optimizer(self) -> str:
        return str(self.get("optimizer.type", "AdamW"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One setting that is refused for some of its values, at some stages.

    setting: dotted path;  bad: is this value refused? Asked where the setting is there, or has a default
    here;  reason: why, and the nearest that works;  default: DeepSpeed's own, where that can be refused too;
    when: what else must hold.
    """

    setting: str
    bad: Callable[[Any], bool]
    reason: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    default: Any = None
    when: Callable[[Facts], bool] = lambda _: True

    def problem(self, facts: Facts) -> str | None:
        """What is wrong with these settings by this rule, in one sentence; None = nothing."""
        value = facts.get(self.setting, self.default)
        if value is None or facts.stage not in self.stages or not self.bad(value) or not self.when(facts):
            return None
        absent = "absent" if facts.get(self.setting) is None else json.dumps(value, default=str)
        return f"{self.setting} = {absent} at ZeRO stage {facts.stage}: {self.reason}"


def _zero(setting: str, bad: Callable[[Any], bool], reason: str, **more: Any) -> Rule:
    return Rule(setting=f"zero_optimization.{setting}", bad=bad, reason=reason, **more)


def _off(value: Any) -> bool:
    return value is False


def _on(value: Any) -> bool:
    """Also a table that is there: `zenflow`, `amp` have no other switch."""
    return value is not False


def _enabled(value: Any) -> bool:
    return bool(value.get("enabled")) if isinstance(value, Mapping) else bool(value)


def _more_than(bound: int) -> Callable[[Any], bool]:
    """What is no number is refused too."""
    return lambda value: not isinstance(value, (int, float)) or value > bound


def _not_1(value: Any) -> bool:
    return value != 1


GRADIENTS = (
    _zero(
        "contiguous_gradients",
        _off,
        "at stage 1 experts then get wrong gradients without a word (seen: 13 % off), and stage 2 asserts "
        "against it; take it out (true)",
        stages=(1, 2),
    ),
    _zero(
        "reduce_scatter",
        _off,
        "DeepSpeed asserts that it is true with experts; take it out (false works at stages 0 and 3)",
        stages=(1, 2),
    ),
    Rule(
        setting="gradient_allreduce_op",
        bad=lambda value: str(value).lower() == "sum",
        reason="the loss is made for a mean over ranks, and gradients would be too long by their number; "
        'take it out ("mean")',
    ),
    Rule(
        setting="managed_gradient_accumulation",
        bad=_off,
        reason="every micro-batch would be a step of its own (seen: gradients 0.59 to 0.89 of what they "
        "are); take it out (true)",
    ),
    Rule(
        setting="prescale_gradients",
        bad=_on,
        reason="DeepSpeed asserts against it with reduce_scatter; take it out, or use stage 0 or 1",
        stages=(2, 3),
    ),
    Rule(
        setting="gradient_predivide_factor",
        bad=_not_1,
        reason="DeepSpeed asserts that it is 1 with reduce_scatter; take it out, or use stage 0 or 1",
        stages=(2, 3),
    ),
    _zero(
        "compute_grad_norm",
        _off,
        "a run without a gradient norm cannot see that its gradients are NaN, and stages 0 and 3 have no "
        "such switch; take it out",
    ),
    _zero(
        "stage3_module_granularity_threshold",
        _more_than(0),
        'it makes leaves of modules whose gradients DeepSpeed then loses (seen: "Cannot reduce scatter '
        'gradients", "unknown parameter type"); take it out (0)',
        stages=(3,),
    ),
    _zero(
        "allgather_bucket_size",
        lambda value: not isinstance(value, (int, float)) or value % 2 == 1,
        "DeepSpeed asserts that it is even; add 1",
        stages=(1, 2),
    ),
    _zero(
        "legacy_stage1",
        _on,
        "DeepSpeed has taken it out, and raises; take it out",
        stages=(1, 2, 3),
    ),
)

PRECISION = (
    Rule(
        setting="communication_data_type",
        bad=lambda value: value in ("fp16", "float16", "half"),
        reason="gradients under- and overflow without a loss scale (seen: 0.08 % off); take it out",
    ),
    Rule(
        setting="communication_data_type",
        bad=lambda value: value in ("bf16", "bfloat16"),
        reason="float32 gradients would be rounded on the wire (seen: 0.8 % off); take it out",
        when=lambda facts: facts.dtype == "float32",
    ),
    Rule(
        setting="data_types.grad_accum_dtype",
        bad=lambda value: value in ("fp32", "float32", "float"),
        reason="DeepSpeed has no such sum at stage 0; use stage 1, 2 or 3, or take it out",
        stages=(0,),
        when=lambda facts: facts.dtype == "bfloat16",
    ),
    Rule(
        setting="data_types.grad_accum_dtype",
        bad=lambda value: value in ("bf16", "bfloat16"),
        reason="sums of float32 gradients would be rounded (stage 0 raises, stage 2 ignores it); take it "
        'out, or set model.dtype = "bfloat16"',
        when=lambda facts: facts.dtype == "float32",
    ),
    Rule(
        setting="data_types.grad_accum_dtype",
        bad=lambda value: value in ("fp16", "float16", "half"),
        reason='gradients overflow there without a loss scale; use "fp32", or take it out',
    ),
    *(
        Rule(
            setting=f"{table}.{name}",
            bad=_on,
            reason="checkpoints hold float32 weights and moments, and it wants DeepSpeed's compiled CPUAdam; "
            "take it out",
        )
        for table in ("bf16", "bfloat16")  # new and old spelling
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    Rule(
        setting="data_types.buffer_dtype",
        bad=lambda value: value not in ("fp32", "float32", "float"),
        reason="the router's bias is a buffer, and would be rounded; take it out",
    ),
    Rule(
        setting="torch_autocast",
        bad=_enabled,
        reason="in float16 DeepSpeed scales the loss, and reports a norm as many times too large (seen: "
        '65536); write "dtype": "bfloat16", or take it out and set model.dtype = "bfloat16"',
        when=lambda facts: facts.get("torch_autocast.dtype") not in ("bfloat16", "bf16", "torch.bfloat16"),
    ),
    Rule(
        setting="fp16",
        bad=_enabled,
        reason='this project trains in float32 or bfloat16; take it out and set model.dtype = "bfloat16"',
    ),
)

OFFLOAD = (
    _zero(
        "offload_optimizer.device",
        lambda value: value != "none",
        "DeepSpeed ignores it there; use stage 1, 2 or 3, or take it out",
        stages=(0,),
    ),
    _zero(
        "offload_param.device",
        lambda value: value != "none",
        "DeepSpeed ignores it there; use stage 3, or offload_optimizer, or take it out",
        stages=(0, 1, 2),
    ),
    *(
        _zero(
            f"{table}.device",
            lambda value: value not in ("none", "cpu"),
            'checkpoints cannot read what lies in files of DeepSpeed\'s own; use "cpu"',
        )
        for table in ("offload_optimizer", "offload_param")
    ),
    _zero(
        "offload_optimizer.ratio",
        _not_1,
        "it wants DeepSpeed's compiled CPUAdam, and two optimizers for one set of weights, which checkpoints "
        "do not know; take it out (1.0)",
    ),
    _zero(
        "offload_optimizer.super_offload",
        _on,
        "it wants DeepSpeed's compiled CPUAdam and keeps state in a process of its own, which checkpoints do "
        "not know; take it out",
    ),
    _zero(
        "cpu_offload",
        _on,
        'DeepSpeed has renamed it; write "offload_optimizer": {"device": "cpu"}, which works',
    ),
    _zero(
        "cpu_offload_param",
        _on,
        'DeepSpeed has renamed it; write "offload_param": {"device": "cpu"}, which works at stage 3',
    ),
)

LAYOUTS = (
    _zero(
        "zero_hpz_partition_size",
        _more_than(1),
        "stage 3 refuses a second partition of experts, the others ignore it; take it out (1)",
    ),
    *(
        _zero(
            name,
            _on,
            "weights that are rounded on their way have other gradients, and no test here holds them to any; "
            "take it out",
        )
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    _zero(
        "zero_quantized_gradients",
        _on,
        "stage 3 refuses it with experts, the others ignore it; take it out",
    ),
    _zero(
        "zenflow",
        _on,
        "it keeps gradients back for later steps, in buffers that checkpoints do not know; take it out",
    ),
    Rule(
        setting="use_data_before_expert_parallelism",
        bad=_on,
        reason="DeepSpeed's ranks with one set of experts would not be those of the layer, which are "
        "neighbours (seen: gradients of experts 0.2 to 0.4 of what they are); take it out",
        when=lambda facts: 1 < facts.ep_size < facts.world_size,
    ),
)

OPTIMIZER = (
    Rule(
        setting="optimizer.type",
        default="AdamW",
        bad=lambda value: str(value).lower() not in OPTIMIZERS,
        reason="its state is not one value per weight, so that no checkpoint of it fits other ranks, or its "
        "step needs more than a shard of the weights; use AdamW, Adam, SGD, Lion or RMSprop",
    ),
    Rule(
        setting="optimizer.type",
        bad=lambda value: str(value).lower() == "adagrad",
        reason="DeepSpeed raises an IndexError in its first step; use stage 0, or AdamW, RMSprop or SGD",
        stages=(1, 2, 3),
    ),
    Rule(
        setting="optimizer.type",
        bad=lambda value: (
            str(value).lower() in OPTIMIZERS
            and str(value).lower() not in ANY_CASE
            and str(value) not in OPTIMIZERS.values()
        ),
        reason="DeepSpeed takes torch's names as torch spells them; use " + ", ".join(OPTIMIZERS.values()),
    ),
    Rule(
        setting="zero_allow_untested_optimizer",
        default=False,
        bad=_off,
        reason="DeepSpeed asserts that it is true for all but Adam, AdamW, Lion and Adagrad; set it to true "
        "(experts have been tested here with SGD)",
        stages=(1, 2, 3),
        when=lambda facts: facts.optimizer.lower() in OPTIMIZERS and facts.optimizer.lower() not in ANY_CASE,
    ),
    Rule(
        setting="optimizer.params.max_grad_norm",
        bad=_on,
        reason="DeepSpeed does not clip by it and raises; set train.clip instead",
    ),
)

REMOVED = tuple(
    Rule(setting=name, bad=lambda _: True, reason="DeepSpeed 0.19 has no such thing and raises; take it out")
    for name in (
        "amp", "compression_training", "curriculum_learning", "elasticity", "eigenvalue", "graph_harvesting",
        "nebula", "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
        "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.zeropp_loco_param",
    )
)  # fmt: skip

OTHER_PARALLELISM = (
    Rule(
        setting="tensor_parallel.autotp_size",
        bad=_more_than(1),
        reason="the model's weights are not cut this way; take it out, and use train.ep_size",
    ),
    Rule(
        setting="sequence_parallel_size",
        bad=_more_than(1),
        reason="every rank has its own sequences; take it out",
    ),
    Rule(
        setting="expert_parallel",
        bad=_enabled,
        reason="the layers are expert-parallel already, with placements and replicas; take it out, and use "
        "train.ep_size",
    ),
    Rule(
        setting="pipeline",
        bad=_on,
        reason="the model is not a pipeline, and DeepSpeed ignores it; take it out",
    ),
)

NOT_OURS = (
    Rule(
        setting="data_efficiency",
        bad=_enabled,
        reason="it works on DeepSpeed's own data loader, and batches come from [data] here; take it out",
    ),
    Rule(
        setting="hybrid_engine",
        bad=_enabled,
        reason="it is for generation between steps of training, in layers that it knows; take it out",
    ),
    Rule(
        setting="compile.deepcompile",
        bad=_on,
        reason="the engine is not compiled here, and DeepSpeed would ignore it; take it out",
    ),
    Rule(
        setting="weight_quantization",
        bad=_on,
        reason="it is for inference, and DeepSpeed ignores it in training; take it out",
    ),
    Rule(
        setting="datastates_ckpt",
        bad=_enabled,
        reason="checkpoints are written by this project, not by another engine; take it out",
    ),
)

RULES = GRADIENTS + PRECISION + OFFLOAD + LAYOUTS + OPTIMIZER + REMOVED + OTHER_PARALLELISM + NOT_OURS
"""Everything that is refused; the setting is a rule's name."""
