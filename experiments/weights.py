"""Weights: a model's weights from and to files, and into a model that is about to be trained.

    transformers folder --import--> our folder --upcycle--> our folder --train.init--> model, rank by rank
    our run or folder   --export--> transformers folder

"Our folder" holds model.safetensors, under the names of `Transformer.state_dict()` with all experts in
logical order, and config.toml. `hf_names.py` and `hf_config.py` know transformers; no code of it is needed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import checkpoint, rundir
from experiments.config import load_config, settable, to_toml_value
from experiments.hf_config import from_transformers, to_transformers
from experiments.hf_names import (
    BIAS,
    DENSE,
    QWEN3_MOE,
    Entry,
    check_names,
    entries,
    join,
    pieces,
)
from experiments.weights_files import WEIGHTS, Planned, Tensors, open_tensors
from moe import MoELayer
from moe.config import ModelConfig
from moe.model import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG = "config.toml"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# what a model computes depends on these, and no shape shows them
_MEANING = ("num_heads", "kv_heads", "head_width", "qk_norm", "norm_eps", "rope_base")
_ROUTER_MEANING = ("score", "normalize", "scale")
_UNCHECKED = (
    f"no {CONFIG} tells what these weights mean (none is beside them, or in the run whose checkpoint they "
    "are): their names and shapes fit; that they were trained with these model.num_heads, head_dim, qk_norm, "
    "norm_eps and rope_base, router.score, normalize and scale, and moe.activation was not checked"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An open model: its settings, its tensors in the files, and the way to read one under our name.

    ours: the files have our names;  remarks: what a person should know of the conversion.
    """

    config: ModelConfig
    tensors: Tensors
    read: Callable[[str], torch.Tensor]
    ours: bool = True
    remarks: tuple[str, ...] = ()


# ---- reading --------------------------------------------------------------------------------------------


@contextmanager
def open_source(name: str, runs_dir: str) -> Iterator[Source]:
    """Open a transformers folder (config.json), our folder (config.toml), or a run of ours by name.

    Raises ValueError for what it cannot find, express or make fit; all before a tensor is read.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        with _open_theirs(path) as source:
            yield source
    else:
        weights, toml = _find_ours(name, runs_dir)
        with open_tensors(weights) as tensors:
            yield Source(config=read_model(toml), tensors=tensors, read=tensors.read)


def _find_ours(name: str, runs_dir: str) -> tuple[Path, Path]:
    path = Path(name)
    if (path / WEIGHTS).is_file() and (path / CONFIG).is_file():
        return path / WEIGHTS, path / CONFIG
    run = rundir.find(runs_dir, name)
    found = checkpoint.latest(run, say=lambda text: print(text, flush=True))
    if found is None:
        raise ValueError(f"{run.path} has no complete checkpoint yet")
    if not (found.path / WEIGHTS).is_file():
        raise ValueError(f"{found.path} has no {WEIGHTS}: the run was made with train.export = false")
    return found.path / WEIGHTS, run.config


@contextmanager
def _open_theirs(folder: Path) -> Iterator[Source]:
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config, remarks = from_transformers(fields)
    except (ValueError, RecursionError) as error:  # the latter from lists in lists in lists
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    with open_tensors(folder) as tensors:
        listed = {entry.name: entry for entry in entries(config, layout_of(fields))}
        expected = {part: shape for entry in listed.values() for part, shape in entry.parts}
        # rotary frequencies, in some old files: no weights, rope_theta gives them
        found = {k: v for k, v in tensors.shapes.items() if not k.endswith("rotary_emb.inv_freq")}
        if tied := bool(fields.get("tie_word_embeddings")):
            found.setdefault(_HEAD, found.get(_EMBEDDING, ()))
        check_names(expected, found, folder)
        if tied and _HEAD in tensors.shapes and not _same(tensors, _HEAD, _EMBEDDING):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}; set it to "
                "false in config.json if the head is the right one"
            )
        dtype = DTYPES[config.dtype]

        def read_theirs(name: str) -> torch.Tensor:
            return tensors.read(_EMBEDDING if tied and name == _HEAD else name).to(dtype)

        def read(name: str) -> torch.Tensor:
            return join(listed[name], read_theirs)

        yield Source(config=config, tensors=tensors, read=read, ours=False, remarks=tuple(remarks))


def layout_of(fields: dict[str, Any]) -> str:
    """The layout of names of a config.json's model: dense ones have those of Qwen3-MoE's dense blocks."""
    return QWEN3_MOE if fields["model_type"] in DENSE else fields["model_type"]


def _same(tensors: Tensors, first: str, second: str) -> bool:
    return torch.equal(tensors.read(first), tensors.read(second))


def read_model(toml: Path, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """The model that a config.toml describes.   overrides: of [model], [moe] and [router] only.

    Raises ValueError as `load_config` does.
    """
    for override in overrides:
        if override.partition(".")[0].strip() not in ("model", "moe", "router"):
            raise ValueError(f"--set {override}: only model, moe and router belong to the weights")
    stand_in = "data.paths=none"  # a vocabulary of tokens wants data, which is for training alone
    try:
        return load_config(toml, [*overrides, stand_in]).model
    except ValueError as error:
        raise ValueError(str(error).replace(f" --set {stand_in}", "")) from error


def to_toml_text(config: ModelConfig) -> str:
    """config.toml of our folder: the sections that belong to the model; training has its defaults."""
    parts = {"model": config, "moe": config.moe, "router": config.moe.router}
    lines = [f"[data]\nvocab_size = {config.vocab_size}\n"]
    for section, part in parts.items():
        values = (f"{name} = {to_toml_value(getattr(part, name))}" for name in settable(section))
        lines.append("\n".join([f"[{section}]", *values, ""]))
    return "\n".join(lines)


# ---- what is to be written ------------------------------------------------------------------------------


def plan_import(source: Source) -> list[Planned]:
    """Every tensor of the model under our names, to be written as one file."""
    dtype = DTYPES[source.config.dtype]
    return [
        Planned(
            name=entry.name,
            shape=entry.shape,
            dtype=dtype if entry.parts else entry.dtype,
            make=partial(source.read, entry.name),
        )
        for entry in entries(source.config, QWEN3_MOE)
    ]


def plan_export(source: Source, layout: str) -> tuple[list[Planned], dict[str, Any]]:
    """Every tensor under the names of a transformers file, and config.json's fields.

    Raises ValueError where the layout cannot express our model: a setting, or a selection bias that is not 0.
    """
    fields, tensors = to_transformers(source.config, layout), source.tensors
    listed = list(entries(source.config, layout))
    check_names({entry.name: entry.shape for entry in listed}, tensors.shapes, tensors.path)
    biased = [e.name for e in listed if e.name.endswith(BIAS) and bool(tensors.read(e.name).any())]
    if biased:
        raise ValueError(
            f"this model cannot be written as {layout}: {', '.join(biased)} is not 0, and its router has no "
            "selection bias; train with router.balance_loss in its place"
        )
    dtype = tensors.read("norm.weight").dtype
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return [planned for entry in listed for planned in _pieces_of(entry, tensors, dtype)], fields


def _pieces_of(entry: Entry, tensors: Tensors, dtype: torch.dtype) -> Iterator[Planned]:
    for name, shape, first, end in pieces(entry):
        make = partial(_read_piece, tensors, entry.name, first, end, shape, dtype)
        yield Planned(name=name, shape=shape, dtype=dtype, make=make)


def _read_piece(
    tensors: Tensors, name: str, first: int, end: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return tensors.rows(name, first, end).reshape(shape).to(dtype)


# ---- into a model ---------------------------------------------------------------------------------------


@torch.no_grad()
def load_initial(model: Transformer, path: Path) -> None:
    """Fill a model, before its engine is made, with the weights of a file; no collective.

    path: our folder, or its model.safetensors, or a checkpoint of a run or its model.safetensors. Of the
    experts only this rank's are read. Raises ValueError, with all that is wrong, before anything is changed:
    names, shapes, settings that mean another model. Values that are NaN or infinite are found while the
    weights are copied: the model is then half filled, and must not be used. Where no config.toml says what
    the weights mean, rank 0 prints that this was not checked.
    """
    toml = _find_config(path)
    if toml is not None:
        check_meaning(read_model(toml), model.config, toml)
    homes = {
        f"{name}.experts.{leaf}": layer.home_experts.tolist()
        for name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for leaf, _ in layer.experts.named_parameters()
    }
    num_experts = model.config.moe.router.num_experts
    state = model.state_dict()
    expected = {
        name: (num_experts, *value.shape[1:]) if name in homes else tuple(value.shape)
        for name, value in state.items()
    }
    with open_tensors(path) as tensors:
        check_names(expected, tensors.shapes, path)
        if toml is None and model.topology.rank == 0:
            print(f"{path}: {_UNCHECKED}", flush=True)
        for name, value in state.items():
            if name in homes:
                for local, expert in enumerate(homes[name]):
                    value[local].copy_(tensors.rows(name, expert, expert + 1)[0])
            else:
                value.copy_(tensors.read(name))
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{path}: {name} has values that are NaN or infinite")


def _find_config(path: Path) -> Path | None:
    """The config.toml of weights: beside them, or, for those of a checkpoint, in the folder of the run."""
    folder = (path if path.is_dir() else path.parent).resolve()
    run = rundir.RunDir(path=folder.parent.parent)
    places = [folder / CONFIG] + ([run.config] if folder.parent == run.checkpoints else [])
    return next((place for place in places if place.is_file()), None)


def check_meaning(saved: ModelConfig, wanted: ModelConfig, where: Path) -> None:
    """Raise ValueError where weights were made for a model that computes something else.

    Only what no shape shows; sizes are compared with the tensors. top_k may differ: it may be changed.
    """
    pairs = [(f"model.{name}", getattr(saved, name), getattr(wanted, name)) for name in _MEANING]
    routers = (saved.moe.router, wanted.moe.router)
    if saved.num_dense_layers < saved.num_layers:
        pairs += [
            (f"router.{name}", *(getattr(router, name) for router in routers)) for name in _ROUTER_MEANING
        ]
        pairs.append(("moe.activation", saved.moe.activation, wanted.moe.activation))
    differ = [f"{name} is {old!r} there and {new!r} here" for name, old, new in pairs if old != new]
    if differ:
        raise ValueError(f"{where}: its weights are those of another model: {'; '.join(differ)}")
