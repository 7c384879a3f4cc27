"""`counterpoise weights`: import from and export to transformers, and upcycle; all through safetensors.

    counterpoise weights import HF_DIR OUT_DIR                     to train from: --set train.init=OUT_DIR
    counterpoise weights upcycle SOURCE OUT_DIR --set router.num_experts=8
    counterpoise weights export RUN OUT_DIR --format mixtral       for AutoModelForCausalLM.from_pretrained

OUT_DIR is written aside and renamed when it is whole; one that has files in it is left alone.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.hf_names import FORMATS, QWEN3_MOE, check_names, entries
from experiments.weights import (
    CONFIG,
    Source,
    open_source,
    plan_export,
    plan_import,
    read_model,
    to_toml_text,
)
from experiments.weights_files import WEIGHTS, Planned, num_bytes, write_file, write_shards
from experiments.weights_upcycle import dense_twin, plan_upcycle
from moe.config import ModelConfig
from moe.model import count_parameters

MIB = 1 << 20


def main(argv: Sequence[str]) -> int:
    """`counterpoise weights import | export | upcycle`."""
    args = parser().parse_args(argv)
    return {"import": _import, "export": _export, "upcycle": _upcycle}[args.action](args)


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise weights`."""
    top = argparse.ArgumentParser(
        prog="counterpoise weights",
        description="Convert weights from and to transformers, or make experts of a dense model. Files are "
        "safetensors; pickles are never read.",
        allow_abbrev=False,
    )
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")

    def action(name: str, summary: str, source: str, source_help: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        made.add_argument("source", metavar=source, help=source_help)
        made.add_argument("out", metavar="OUT_DIR", help="folder to write; new, or empty")
        return made

    ours = "name of a run, its folder, or a folder with config.toml and model.safetensors"
    action(
        "import",
        "our weights and config.toml from a transformers folder (Mixtral, Qwen3-MoE, Llama, Mistral, Qwen3)",
        "HF_DIR",
        "folder with config.json and safetensors",
    )
    export = action("export", "a transformers folder from our weights", "RUN", ours)
    export.add_argument("--format", required=True, choices=FORMATS, help="architecture to write")
    export.add_argument(
        "--shard-mb", metavar="N", type=int, default=5000, help="size of a file (1e6 bytes); 5000"
    )
    upcycled = action(
        "upcycle",
        "a model with experts from a dense one, whose output it keeps",
        "SOURCE",
        f"dense model: a transformers folder (Llama, Mistral, Qwen3), or {ours}",
    )
    upcycled.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the new routers; 0")
    upcycled.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="setting of [model], [moe] or [router] of the new model, like router.num_experts=8; repeatable",
    )
    for made in (export, upcycled):
        made.add_argument("--runs-dir", metavar="DIR", default="runs", help="where runs are (default: runs)")
    return top


def _import(args: argparse.Namespace) -> int:
    if not (Path(args.source) / "config.json").is_file():
        raise ValueError(f"{args.source} has no config.json: it is no folder of a transformers model")
    with open_source(args.source, "") as source, new_folder(args.out) as folder:
        _tell(source)
        _write_ours(folder, plan_import(source), source.config)
    _tell_next(args.out, source.config)
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.shard_mb < 1:
        raise ValueError(f"--shard-mb {args.shard_mb} must be at least 1; 5000 is usual")
    with open_source(args.source, args.runs_dir) as source:
        if not source.ours:
            raise ValueError(f"{args.source} is a transformers folder already; import it first to change it")
        plan, fields = plan_export(source, args.format)
        with new_folder(args.out) as folder:
            _tell(source)
            files = write_shards(folder, plan, args.shard_mb * 1_000_000, _progress(plan))
            (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    print("left out: router.z_loss, router.balance_scope and the last step's counts, which only training has")
    print(f"wrote {args.out}: {files} file{'s' * (files > 1)} of weights, config.json ({args.format})")
    print(f'load it with: AutoModelForCausalLM.from_pretrained("{args.out}")')
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must be 0 or more")
    with open_source(args.source, args.runs_dir) as source:
        dense = source.config
        if dense.num_dense_layers < dense.num_layers:
            raise ValueError(
                f"{args.source} has experts already in {dense.num_layers - dense.num_dense_layers} of its "
                f"{dense.num_layers} blocks; only a dense model is upcycled"
            )
        config = wanted_config(dense, args.set)
        _check_dense(source, config)
        plan = plan_upcycle(source.read, config, args.seed)
        with new_folder(args.out) as folder:
            _tell(source)
            _write_ours(folder, plan, config)
    _tell_next(args.out, config)
    return 0


def wanted_config(dense: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    """The model to make of a dense one: experts in every block, of the dense width, where nothing is set."""
    keys = {override.partition("=")[0].strip(): override.partition("=")[2].strip() for override in overrides}
    defaults = {"model.num_dense_layers": "0"}
    shared = keys.get("moe.shared_hidden", "0")
    if shared.isdigit() and int(shared) < dense.dense_hidden:
        defaults["moe.expert_hidden"] = str(dense.dense_hidden - int(shared))
    filled = [f"{key}={value}" for key, value in defaults.items() if key not in keys]
    with tempfile.TemporaryDirectory() as aside:
        toml = Path(aside) / CONFIG
        toml.write_text(to_toml_text(dense), encoding="utf-8")
        try:
            return read_model(toml, (*overrides, *filled))
        except ValueError as error:
            raise ValueError(str(error).replace(str(toml), "the new model")) from error


def _check_dense(source: Source, config: ModelConfig) -> None:
    """Raise ValueError where --set changed what the dense weights are."""
    fixed = ("vocab_size", "num_layers", "d_model", "num_heads", "kv_heads", "head_width", "qk_norm")
    fixed += ("norm_eps", "rope_base", "dense_hidden")
    changed = [
        f"model.{name}={getattr(config, name)!r} (the dense model has {getattr(source.config, name)!r})"
        for name in fixed
        if getattr(config, name) != getattr(source.config, name)
    ]
    if changed:
        raise ValueError(f"--set cannot change what the dense weights are: {'; '.join(changed)}")
    if source.ours:
        expected = {entry.name: entry.shape for entry in entries(dense_twin(config), QWEN3_MOE)}
        check_names(expected, source.tensors.shapes, source.tensors.path)


# ---- files and words ------------------------------------------------------------------------------------


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """A folder aside, which becomes `out` when the block ends well.   Raises ValueError where `out` has
    files."""
    path = Path(out)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; name another OUT_DIR, or move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp's is for this user alone
        if path.exists():
            path.rmdir()
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_ours(folder: Path, plan: list[Planned], config: ModelConfig) -> None:
    toml = folder / CONFIG
    toml.write_text(to_toml_text(config), encoding="utf-8")
    if read_model(toml) != config:
        raise RuntimeError(f"{toml} does not read back to the model that was written")
    write_file(folder / WEIGHTS, plan, _progress(plan))


def _tell(source: Source) -> None:
    counts, tensors = count_parameters(source.config), source.tensors
    total = counts["dense"] + counts["experts"]
    size = f"{len(tensors.shapes)} tensors, {tensors.num_bytes / MIB:,.1f} MiB"
    print(f"{tensors.path}: {size}, {total:,} parameters in our model")
    for remark in source.remarks:
        print(f"note: {remark}")


def _tell_next(out: str, config: ModelConfig) -> None:
    counts = count_parameters(config)
    total = f"{counts['dense'] + counts['experts']:,} parameters, {counts['active']:,} active per token"
    print(f"wrote {out}: {WEIGHTS} ({total}, {config.dtype}) and {CONFIG}")
    if config.num_dense_layers == config.num_layers:
        print(f"it has no experts; make some with: counterpoise weights upcycle {out} NEW_DIR")
        return
    data = "" if config.vocab_size == 256 else " --set data.paths=TOKENS.npy"
    print(f"train it with: counterpoise train --config {out}/{CONFIG} --set train.init={out}{data}")


def _progress(plan: list[Planned], every: int = 10) -> Callable[[str, int], None]:
    """Says every tenth of the bytes, where it takes time (from 256 MiB on)."""
    total = sum(num_bytes(tensor.shape, tensor.dtype) for tensor in plan)
    done = [0]

    def said(name: str, size: int) -> None:
        before, done[0] = done[0] * every // max(total, 1), done[0] + size
        if total >= 256 * MIB and done[0] * every // total > before:
            print(f"{done[0] / MIB:,.0f} of {total / MIB:,.0f} MiB, at {name}", file=sys.stderr, flush=True)

    return said
