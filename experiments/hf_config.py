"""config.json of transformers <-> our ModelConfig, both ways; what one side cannot express is refused.

It stands beside `hf_names.py`: that has the tensors, this what they mean. No field of a config.json is passed
over: one is used, or has no part in what the model computes (`_NO_PART`), or must have the one value under
which it changes nothing (`_MUST_BE`), or is an error. A value of another type is one too; null is accepted
where transformers takes it for its default.
"""

import sys
from typing import Any

from experiments.hf_names import DENSE, FORMATS, MIXTRAL, QWEN3_MOE
from moe.config import DTYPES, ModelConfig, MoEConfig
from routing.config import RouterConfig

_ARCHITECTURES = {
    MIXTRAL: "MixtralForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "router_jitter_noise": (0, None),
    "pretraining_tp": (1, None),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}
_NO_PART = frozenset(
    (
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "max_window_layers",
        "output_router_logits",
        "transformers_version",
        "use_cache",
    )
)
_USED = frozenset(
    (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "tie_word_embeddings",
        "decoder_sparse_step",
        "mlp_only_layers",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "max_position_embeddings",
        "router_aux_loss_coef",
        "dtype",
        "torch_dtype",
    )
)
# where config.json leaves a field out, transformers has these
_KV_HEADS = {MIXTRAL: 8, QWEN3_MOE: 4, "mistral": 8, "qwen3": 32}
_NORM_EPS = {MIXTRAL: 1e-5}
_ROPE_THETA = {MIXTRAL: 1e6}
_WINDOW = {"mistral": 4096, QWEN3_MOE: 4096, "qwen3": 4096}
# far above any model; past these the lists of layers, heads and tensors would fill the memory
_MOST = 2**31 - 1
_MOST_OF = {
    "num_hidden_layers": 1000,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_local_experts": 4096,
    "num_experts": 4096,
}


def from_transformers(fields: Any) -> tuple[ModelConfig, list[str]]:
    """Our settings for the model of a config.json, and remarks for the person who imports it.

    fields: what the file holds.   Raises ValueError for a model, a field or a value that our model cannot
    express, or that is of the wrong type; it says which and why.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"config.json holds {fields!r:.60}; it must be an object of fields, {{...}}")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is not supported; use one of {', '.join(_ARCHITECTURES)}")
    _check_fields(fields)
    remarks: list[str] = []
    width, layers = _size(fields, "hidden_size"), _size(fields, "num_hidden_layers")
    heads = _size(fields, "num_attention_heads")
    dense = layers if kind in DENSE else _leading_dense(fields, layers)
    head = 128 if kind == "qwen3" else width // heads
    moe = _moe(fields, kind, width, layers - dense, remarks) if dense < layers else _no_moe(width)
    config = ModelConfig(
        moe=moe,
        vocab_size=_size(fields, "vocab_size"),
        num_layers=layers,
        num_dense_layers=dense,
        d_model=width,
        num_heads=heads,
        num_kv_heads=_size(fields, "num_key_value_heads", missing=_KV_HEADS.get(kind, heads), null=heads),
        head_dim=_size(fields, "head_dim", missing=head, null=head),
        qk_norm=kind in (QWEN3_MOE, "qwen3"),
        norm_eps=_number(fields, "rms_norm_eps", _NORM_EPS.get(kind, 1e-6)),
        dense_hidden=_size(fields, "intermediate_size"),
        seq_len=_length(fields, kind, remarks),
        rope_base=_rope_base(fields, kind),
        dtype=_dtype(fields, remarks),
    )
    if _flag(fields, "tie_word_embeddings"):
        remarks.append("the head is tied to the embedding: it is copied, and training parts the two")
    return config, remarks


def to_transformers(config: ModelConfig, layout: str) -> dict[str, Any]:
    """The fields of config.json for our model.

    layout: "mixtral" or "qwen3_moe".   Raises ValueError, with every reason, where it cannot express it.
    """
    if layout not in FORMATS:
        raise ValueError(f"--format {layout!r} is unknown; use one of {', '.join(FORMATS)}")
    problems = export_problems(config, layout)
    if problems:
        raise ValueError(f"this model cannot be written as {layout}: {'; '.join(problems)}")
    moe, router = config.moe, config.moe.router
    sparse = config.num_layers - config.num_dense_layers
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[layout]],
        "model_type": layout,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "max_position_embeddings": config.seq_len,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": _rescaled(router.balance_loss, sparse, router.top_k),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": config.dtype,
    }
    if layout == MIXTRAL:
        return fields | {"intermediate_size": moe.expert_hidden, "num_local_experts": router.num_experts}
    return fields | {
        "num_experts": router.num_experts,
        "moe_intermediate_size": moe.expert_hidden,
        "intermediate_size": config.dense_hidden,
        "norm_topk_prob": router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "attention_bias": False,
        "use_sliding_window": False,
    }


def export_problems(config: ModelConfig, layout: str) -> list[str]:
    """What of our model a layout cannot express, each with the reason; empty = all can be."""
    moe, router = config.moe, config.moe.router
    found: list[str] = []
    if config.num_dense_layers == config.num_layers:
        found.append(
            f"it has no experts (model.num_dense_layers={config.num_dense_layers}); upcycle it first"
        )
    if router.score != "softmax":
        found.append(f"router.score={router.score}: its router takes the softmax over the experts")
    if router.scale != 1.0:
        found.append(f"router.scale={router.scale}: its router weights have no factor")
    if router.forced:
        found.append(f"router.forced={router.forced!r}: its router always selects by score")
    if moe.shared_hidden:
        found.append(f"moe.shared_hidden={moe.shared_hidden}: it has no shared expert")
    if moe.activation != "swiglu":
        found.append(f"moe.activation={moe.activation}: its experts have three matrices (swiglu)")
    if layout == MIXTRAL:
        if not router.normalize:
            found.append(
                "router.normalize=false: it divides the weights by their sum; use --format qwen3_moe"
            )
        if config.num_dense_layers:
            found.append(f"model.num_dense_layers={config.num_dense_layers}: every block has experts")
        if config.qk_norm:
            found.append("model.qk_norm=true: it does not norm queries and keys; use --format qwen3_moe")
    elif not config.qk_norm:
        found.append("model.qk_norm=false: it always norms queries and keys; use --format mixtral")
    return found


def _check_fields(fields: dict[str, Any]) -> None:
    unknown = sorted(fields.keys() - _USED - _NO_PART - _MUST_BE.keys())
    # null and false switch something off that is not there either; 0 may mean anything
    unknown = [name for name in unknown if fields[name] is not None and fields[name] is not False]
    problems = [f"unknown field {name}={fields[name]!r}" for name in unknown]
    for name, values in _MUST_BE.items():
        if name in fields and fields[name] not in values:
            problems.append(
                f"{name}={fields[name]!r}, which our model does not have; only {values[0]!r} works"
            )
    if any(kind != "full_attention" for kind in _list(fields, "layer_types", str)):
        problems.append("layer_types has others than full_attention, which our model does not have")
    if problems:
        raise ValueError(f"config.json cannot be expressed: {'; '.join(problems)}")


def _size(fields: dict[str, Any], name: str, missing: int | None = None, null: int | None = None) -> int:
    """An integer from 1.   missing, null: what a field that is not there, or null, stands for, if any."""
    if name not in fields and missing is not None:
        return missing
    value = fields.get(name)
    if name in fields and value is None and null is not None:
        return null
    most = _MOST_OF.get(name, _MOST)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {name}={value!r} must be an integer of at least 1")
    if value > most:
        raise ValueError(f"config.json: {name}={value!r} must be at most {most}")
    return value


def _number(fields: dict[str, Any], name: str, missing: float) -> float:
    value = fields.get(name, missing)
    # an integer may be too large for a float, and NaN is in no interval
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"config.json: {name}={value!r} must be a finite number of at least 0")
    return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"config.json: {name}={value!r} must be true or false")
    return value


def _list(fields: dict[str, Any], name: str, of: type) -> list[Any]:
    """A list whose items are of a type; where it is not there, or null, an empty one."""
    value = [] if fields.get(name) is None else fields[name]
    if type(value) is not list or any(type(item) is not of for item in value):
        raise ValueError(
            f"config.json: {name}={value!r} must be a list in which each is of type {of.__name__}"
        )
    return value


def _leading_dense(fields: dict[str, Any], layers: int) -> int:
    """How many leading blocks are dense; ValueError where a dense one stands behind one with experts."""
    step, only = _size(fields, "decoder_sparse_step", missing=1), set(_list(fields, "mlp_only_layers", int))
    dense = [n for n in range(layers) if n in only or (n + 1) % step]
    if dense != list(range(len(dense))):
        raise ValueError(
            f"config.json: blocks {dense} are dense (mlp_only_layers, decoder_sparse_step={step}); "
            "in our model only leading blocks can be (model.num_dense_layers)"
        )
    return len(dense)


def _moe(fields: dict[str, Any], kind: str, width: int, sparse: int, remarks: list[str]) -> MoEConfig:
    top_k = _size(fields, "num_experts_per_tok")
    names = ("num_local_experts", "num_experts")
    counts = {_size(fields, name) for name in names if fields.get(name) is not None}
    if len(counts) != 1:
        raise ValueError(f"config.json: {' and '.join(names)} give {sorted(counts)}; one number is needed")
    router = RouterConfig(
        d_model=width,
        num_experts=counts.pop(),
        top_k=top_k,
        normalize=True if kind == MIXTRAL else _flag(fields, "norm_topk_prob"),
        balance_loss=_rescaled(_number(fields, "router_aux_loss_coef", 0.001), top_k, sparse),
        z_loss=0.0,
    )
    remarks.append(
        f"router_aux_loss_coef became router.balance_loss={router.balance_loss:g}: transformers' loss is "
        "top_k at balance for the whole model, ours 1 for every layer; router.z_loss is 0, as there"
    )
    hidden = "intermediate_size" if kind == MIXTRAL else "moe_intermediate_size"
    return MoEConfig(router=router, expert_hidden=_size(fields, hidden))


def _no_moe(width: int) -> MoEConfig:
    return MoEConfig(router=RouterConfig(d_model=width))


def _rescaled(value: float, times: int, over: int) -> float:
    """value * times / over, without the last digits, so that the way back gives the value itself."""
    return float(f"{value * times / over:.12g}")


def _length(fields: dict[str, Any], kind: str, remarks: list[str]) -> int:
    """The longest sequence: no longer than a sliding window, which then masks nothing."""
    length = _size(fields, "max_position_embeddings")
    if kind in (QWEN3_MOE, "qwen3") and not _flag(fields, "use_sliding_window"):
        return length
    window = _size(fields, "sliding_window", missing=_WINDOW.get(kind, length), null=length)
    if window < length:
        remarks.append(
            f"model.seq_len={window}, not {length}: attention has a sliding_window of {window}, which our "
            "model does not have, and which masks nothing in sequences that short"
        )
        return window
    return length


def _rope_base(fields: dict[str, Any], kind: str) -> float:
    rope = {} if fields.get("rope_parameters") is None else fields["rope_parameters"]
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters={rope!r} must be an object with rope_theta, or null")
    rest = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    if rope.get("rope_type", "default") != "default" or rest:
        raise ValueError(
            f"config.json: rope_parameters={rope} rescale the positions; only the default type works"
        )
    return _number(rope if "rope_theta" in rope else fields, "rope_theta", _ROPE_THETA.get(kind, 10000.0))


def _dtype(fields: dict[str, Any], remarks: list[str]) -> str:
    names = [name for name in ("dtype", "torch_dtype") if fields.get(name) is not None]
    dtype = fields[names[0]] if names else "float32"
    if dtype == "float16":
        remarks.append("float16 weights became float32, exactly; bfloat16 would round them")
        return "float32"
    if dtype not in DTYPES:
        raise ValueError(f"config.json: {names[0]}={dtype!r} must be one of float16, {', '.join(DTYPES)}")
    return dtype
