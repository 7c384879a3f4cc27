"""DeepSpeed's JSON: passed through untouched; only what it leaves out is filled from the TOML.

It stands beside config.py at the start of the flow. What both give must agree: a difference is an error that
names the two places.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from experiments.config import Config, TrainConfig, find_file
from moe.zero_support import check_settings

# of these DeepSpeed has its own for offloaded state, to be compiled; of Adam unless it says torch_adam
OWN_CPU_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion")


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """DeepSpeed's JSON as a dict.

    path: a file, or the name of a packaged one ("zero1.json"). Raises ValueError with file, line and column
    for invalid JSON, and for a key given twice or a top level that is no object.
    """
    source = find_file(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{source}: {key!r} is given twice; keep one")
        return dict(pairs)

    try:
        value = json.loads(source.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not a text file in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: the top level must be an object {{...}}, not {type(value).__name__}")
    return cast(dict[str, Any], value)


def merge_deepspeed(
    json_dict: Mapping[str, Any],
    config: Config,
    world_size: int,
    *,
    json_name: str | None = None,
    toml_name: str = "the configuration",
) -> dict[str, Any]:
    """DeepSpeed's settings for this run: the JSON as it is, what it leaves out filled from the TOML.

    world_size: ranks that share the data. json_name, toml_name: the two places, for messages (json_name
    defaults to train.deepspeed). Filled where absent or "auto": batch sizes, gradient_clipping (DeepSpeed's
    own default would be 1.0), bf16.enabled, the optimizer and its lr, betas, weight_decay, steps_per_print.
    An "auto" inside zero_optimization is taken out, which leaves DeepSpeed's default. With an optimizer of
    torch's and offload_optimizer, zero_force_ds_cpu_optimizer = false is filled in. All else passes.
    Raises ValueError, naming both places, when both give a value and the values differ; and, naming the JSON,
    where DeepSpeed's settings do not go with experts or with checkpoints (`moe.zero_support`).
    """
    merged = copy.deepcopy(dict(json_dict))
    places = (json_name or config.train.deepspeed, toml_name)
    train = config.train
    _refuse_fp16(merged, places[0])
    _check_scheduler(merged, train, places)
    _fill_scheduler(merged, train, places[0])
    _fill(merged, "train_micro_batch_size_per_gpu", train.micro_batch, "train.micro_batch", places)
    _fill(merged, "gradient_accumulation_steps", train.accumulation, "train.accumulation", places)
    batch = train.micro_batch * train.accumulation * world_size
    product = f"train.micro_batch * train.accumulation * {world_size} ranks"
    _fill(merged, "train_batch_size", batch, product, places)
    _fill(merged, "gradient_clipping", train.clip, "train.clip", places)
    _fill_bf16(merged, config.model.dtype, places)
    _fill_optimizer(merged, train, places)
    _drop_auto(merged.get("zero_optimization"))
    _fill_offload(merged, places[0])
    if _absent(merged, "steps_per_print"):
        merged["steps_per_print"] = 1_000_000_000  # the training prints its own lines
    ep_size = train.ep_size or world_size
    try:
        check_settings(merged, world_size=world_size, ep_size=ep_size, dtype=config.model.dtype)
    except ValueError as error:
        lines = [f"{places[0]}: {line}" for line in str(error).splitlines()]
        raise ValueError("\n".join(lines)) from error
    return merged


def _absent(table: Mapping[str, Any], key: str) -> bool:
    return table.get(key, "auto") in ("auto", None)


def _fill(
    table: dict[str, Any], key: str, value: Any, toml_key: str, places: tuple[str, str], prefix: str = ""
) -> None:
    """Sets table[key] when it is absent; ValueError when it is there with another value."""
    if _absent(table, key):
        table[key] = value
    elif isinstance(table[key], bool) != isinstance(value, bool) or table[key] != value:
        raise ValueError(
            f"{places[0]}: {prefix}{key} = {json.dumps(table[key])} but {places[1]}: {toml_key} = {value!r}; "
            f'make them equal, or leave {prefix}{key} out of the JSON (or write "auto") to have it filled in'
        )


def _subtable(table: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    """The object under `key`, made when absent; ValueError when something else stands there."""
    if _absent(table, key):
        table[key] = {}
    if not isinstance(table[key], dict):
        raise ValueError(f"{place}: {key} = {json.dumps(table[key])} must be an object {{...}}")
    return cast(dict[str, Any], table[key])


def _drop_auto(table: Any) -> None:
    if isinstance(table, dict):
        for key in [key for key, value in cast(dict[str, Any], table).items() if value == "auto"]:
            del table[key]
        for value in cast(dict[str, Any], table).values():
            _drop_auto(value)


def _refuse_fp16(merged: dict[str, Any], place: str) -> None:
    if "fp16" not in merged:
        return
    enabled = _subtable(merged, "fp16", place).get("enabled", False)
    if enabled == "auto":
        merged["fp16"]["enabled"] = False
    elif enabled:
        raise ValueError(
            f'{place}: fp16.enabled = true, but this project trains in float32 or bfloat16; take "fp16" '
            'out and set model.dtype = "bfloat16"'
        )


def _fill_bf16(merged: dict[str, Any], dtype: str, places: tuple[str, str]) -> None:
    old_name = "bfloat16" in merged and "bf16" not in merged  # DeepSpeed still reads its older spelling
    name = "bfloat16" if old_name else "bf16"
    table = _subtable(merged, name, places[0])
    toml_key = f"model.dtype = {dtype!r}, so bf16"
    _fill(table, "enabled", dtype == "bfloat16", toml_key, places, prefix=f"{name}.")


def _check_scheduler(merged: dict[str, Any], train: TrainConfig, places: tuple[str, str]) -> None:
    if _absent(merged, "scheduler"):
        merged.pop("scheduler", None)
    if "scheduler" in merged and train.schedule != "deepspeed":
        raise ValueError(
            f"{places[0]}: has a scheduler but {places[1]}: train.schedule = {train.schedule!r}; take the "
            'scheduler out of the JSON, or set train.schedule = "deepspeed"'
        )
    if "scheduler" not in merged and train.schedule == "deepspeed":
        raise ValueError(
            f'{places[1]}: train.schedule = "deepspeed" but {places[0]}: has no scheduler; add one to the '
            'JSON, or set train.schedule to "cosine" or "constant"'
        )


def _fill_scheduler(merged: dict[str, Any], train: TrainConfig, place: str) -> None:
    """Replaces a scheduler's "auto" values; where TOML has no such setting, by DeepSpeed's default."""
    if "scheduler" not in merged:
        return
    params = _subtable(_subtable(merged, "scheduler", place), "params", place)
    known = {
        "total_num_steps": train.steps,
        "warmup_num_steps": train.warmup_steps,
        "warmup_max_lr": train.lr,
    }
    params.update({key: value for key, value in known.items() if params.get(key) == "auto"})
    _drop_auto(params)


def _fill_optimizer(merged: dict[str, Any], train: TrainConfig, places: tuple[str, str]) -> None:
    table = _subtable(merged, "optimizer", places[0])
    params = _subtable(table, "params", places[0])
    if _absent(table, "type"):
        table["type"] = "AdamW"
        params.setdefault("torch_adam", True)  # DeepSpeed's own Adam would have to be compiled first
    prefix = "optimizer.params."
    _fill(params, "lr", train.lr, "train.lr", places, prefix)
    _fill(params, "weight_decay", train.weight_decay, "train.weight_decay", places, prefix)
    if "adam" in str(merged["optimizer"].get("type", "")).lower() or "betas" in params:
        _fill(params, "betas", [train.beta1, train.beta2], "[train.beta1, train.beta2]", places, prefix)
    _drop_auto(params)


def _fill_offload(merged: dict[str, Any], place: str) -> None:
    """Say that torch's optimizer is meant where its state is offloaded: DeepSpeed prefers its own."""
    zero = merged.get("zero_optimization")
    table = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    optimizer = merged["optimizer"]
    name = str(optimizer.get("type", "AdamW"))
    own = name.lower() in OWN_CPU_OPTIMIZERS and not optimizer["params"].get("torch_adam", False)
    if own or not isinstance(table, dict) or table.get("device", "none") == "none":
        return
    key = "zero_force_ds_cpu_optimizer"
    if _absent(merged, key):
        merged[key] = False
    elif merged[key]:
        raise ValueError(
            f"{place}: {key} = {json.dumps(merged[key])} asks for DeepSpeed's compiled optimizer, but "
            f"optimizer.type = {json.dumps(name)} is torch's; take {key} out"
        )
