"""Bench stages: what each ZeRO stage sends, holds and takes, beside the formulas.

    counterpoise bench stages --ranks 4 --ep-size 2 --dtype both --json OUT --markdown OUT

Engines of all stages around the same model live in one job and step in turn, so that a slow moment of the
machine hits everybody; a round's time is that of its slowest rank, the figure is the median over rounds, a
ratio the median of the rounds' ratios. Bytes are the ledger's, memory that of tensors. The formulas are in
bench_stages_forms.py, the measuring in bench_stages_rank.py.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench_layer import DTYPES, where
from experiments.bench_stages_forms import Shape, moe_bytes, paper_bytes, sent_bytes, state_bytes
from experiments.config import Config, check_world, load_config
from experiments.engine_config import load_deepspeed_config
from experiments.estimate import estimate_memory
from moe import Topology
from moe.model import count_parameters

# over the packaged tiny.toml: 11.5 million parameters, a step of some 0.2 s on two cores
SIZES = (
    "model.d_model=256",
    "router.num_experts=16",
    "moe.expert_hidden=256",
    "moe.shared_hidden=512",
    "train.micro_batch=4",
)
# elements; DeepSpeed's own default of 5e8 would be 2 GB, most of them never touched
BUCKET = 1_000_000
KEEP_NOTHING = {
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
_MIB = 2**20


def stage_settings() -> dict[str, dict[str, Any]]:
    """Name of each line -> DeepSpeed's JSON.

    Stages 0 to 3, the last as a model meets it that is larger than its limits; and "3 kept": as packaged,
    where a model this small is gathered once for forward and backward.
    """
    found = {str(stage): load_deepspeed_config(f"zero{stage}.json") for stage in range(4)}
    for settings in found.values():
        settings["zero_optimization"]["reduce_bucket_size"] = BUCKET
    found["3 kept"] = copy.deepcopy(found["3"])
    found["3"]["zero_optimization"] |= KEEP_NOTHING
    return found


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench stages`."""
    top = argparse.ArgumentParser(prog="counterpoise bench stages", allow_abbrev=False)
    add = top.add_argument
    add("--json", metavar="OUT", help="file for the figures")
    add("--markdown", metavar="OUT", help="file for the tables, in Markdown")
    add("--ranks", metavar="P", type=int, default=2, help="ranks; 2")
    add(
        "--ep-size",
        metavar="N",
        type=int,
        default=0,
        help="ranks that share one set of experts; 0 = all ranks",
    )
    add("--dtype", choices=(*DTYPES, "both"), default="both", help="type of the weights; both")
    add("--accumulation", metavar="G", type=int, default=1, help="micro-batches a step; 1")
    add("--rounds", metavar="N", type=int, default=5, help="timed steps of every stage; 5")
    add("--model", metavar="PATH", help="TOML of another model, as of `train` (default: 11.5 M parameters)")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="one setting; repeatable")
    return top


def main(argv: Sequence[str]) -> int:
    """Measure each type, print its table, write the files."""
    args = parser().parse_args(argv)
    if args.ranks < 1 or args.rounds < 1:
        raise ValueError(f"--ranks {args.ranks} and --rounds {args.rounds} must be 1 or more")
    dtypes = DTYPES if args.dtype == "both" else (args.dtype,)
    blocks = []
    for number, dtype in enumerate(dtypes, 1):
        config = read_config(args, dtype)
        print(f"[{number}/{len(dtypes)}] {dtype}", flush=True)
        blocks.append(run_block(config, args.ranks, args.rounds))
        print(markdown(blocks[-1]), flush=True)
        if args.json:  # after every block: a run that is cut short leaves what it has
            Path(args.json).write_text(json.dumps({**where(), "blocks": blocks}, indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text("\n".join(map(markdown, blocks)))
    return 0


def read_config(args: argparse.Namespace, dtype: str) -> Config:
    """The model and how it trains.   Raises ValueError where it does not fit the ranks."""
    own = {"model.dtype": dtype, "train.ep_size": args.ep_size, "train.accumulation": args.accumulation}
    given = [override.partition("=")[0].strip() for override in args.set]
    for key in own:
        if key in given:
            raise ValueError(f"--set {key}: the benchmark sets it; use --dtype, --ep-size or --accumulation")
    sizes = [size for size in SIZES if not args.model and size.partition("=")[0] not in given]
    overrides = [*sizes, *args.set, *(f"{key}={value}" for key, value in own.items())]
    config = load_config(args.model or "tiny.toml", overrides)
    check_world(config, args.ranks)
    return config


def run_block(config: Config, ranks: int, rounds: int) -> dict[str, Any]:
    """Figures of all stages on this number of ranks: {"model": ..., "rows": [one a stage]}."""
    from experiments.bench_stages_rank import Setting, measure
    from moe.testing import run_ranks

    ep_size = config.train.ep_size or ranks
    settings = [Setting(name=name, json=settings) for name, settings in stage_settings().items()]
    quiet = {"DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "99"}  # the profiler would tell of every start
    by_rank = run_ranks(measure, ranks, config, ep_size, settings, rounds, timeout_s=1800.0, env=quiet)
    topology = Topology(world_size=ranks, ep_size=ep_size)
    tokens = ranks * config.train.accumulation * config.train.micro_batch * config.model.seq_len
    rows, first_s = [], None
    for setting, *seen_P in zip(settings, *by_rank, strict=True):
        times_s = np.max([seen["times_s"] for seen in seen_P], axis=0)
        first_s = times_s if first_s is None else first_s
        rows.append({**row(config, topology, setting, seen_P), **times(times_s, first_s, tokens)})
    model = {
        "dtype": config.model.dtype,
        "ranks": ranks,
        "ep_size": ep_size,
        "accumulation": config.train.accumulation,
        "tokens_a_rank": tokens // ranks,
        **count_parameters(config.model),
    }
    return {"model": model, "rows": rows}


def times(times_s: np.ndarray, first_s: np.ndarray, tokens: int) -> dict[str, Any]:
    """Figures of one stage's rounds.   first_s: those of stage 0;  tokens: of all ranks in a step."""
    median = float(np.median(times_s))
    return {
        "step_ms": median * 1e3,
        "spread_ms": [float(times_s.min()) * 1e3, float(times_s.max()) * 1e3],
        "ratio_to_stage_0": float(np.median(times_s / first_s)),
        "tokens_per_s": tokens / median,
    }


def row(config: Config, topology: Topology, setting: Any, seen_P: list[dict[str, Any]]) -> dict[str, Any]:
    """One stage: what the ranks sent (their mean) and hold (the one with the most), beside the formulas.

    sent, sent_form, paper: bytes a step from one rank;  states, states_form, estimate, peak: bytes of one
    rank;  *_exact: whether it is the formula's on every rank, to the byte
    """
    shapes = [_shape(config, topology, rank, setting, seen) for rank, seen in enumerate(seen_P)]
    sent = [{k: v for k, v in seen["sent"].items() if k != "other"} for seen in seen_P]
    forms = [_sent_form(config, shape, seen) for shape, seen in zip(shapes, seen_P, strict=True)]
    held = [{k: v for k, v in seen["held"].items() if k != "rest"} for seen in seen_P]
    held_forms = [state_bytes(shape) for shape in shapes]
    most = max(range(len(held)), key=lambda rank: sum(held[rank].values()))
    estimate = estimate_memory(config, topology, setting.stage)
    return {
        "stage": setting.name,
        "sent": {kind: float(np.mean([part[kind] for part in sent])) for kind in sent[0]},
        "sent_form": {kind: float(np.mean([part[kind] for part in forms])) for kind in forms[0]},
        "sent_exact": all(
            abs(part[kind] - form[kind]) < 0.5  # an all-reduce over three ranks sends thirds of bytes
            for part, form in zip(sent, forms, strict=True)
            for kind in form
        ),
        "other": max(seen["sent"]["other"] for seen in seen_P),
        "paper": paper_bytes(shapes[0]),
        "states": held[most],
        "states_form": held_forms[most],
        "states_exact": held == held_forms,
        "rest": seen_P[most]["held"]["rest"],
        "estimate": estimate.weights_bytes + estimate.gradients_bytes + estimate.optimizer_bytes,
        "peak": max(seen["peak"] for seen in seen_P),
    }


def _shape(config: Config, topology: Topology, rank: int, setting: Any, seen: dict[str, Any]) -> Shape:
    return Shape(
        parameters=seen["parameters"],
        topology=Topology(world_size=topology.world_size, ep_size=topology.ep_size, rank=rank),
        stage=setting.stage,
        element=2 if config.model.dtype == "bfloat16" else 4,
        accumulation=config.train.accumulation,
        kept=setting.name == "3 kept",
    )


def _sent_form(config: Config, shape: Shape, seen: dict[str, Any]) -> dict[str, float]:
    width, num_experts = config.model.d_model, config.router.num_experts
    layers = config.model.num_layers - config.model.num_dense_layers
    forwards = layers * shape.accumulation
    moe = moe_bytes(shape.topology, seen["rows"], forwards, num_experts, width * shape.element)
    return {"moe": moe, **sent_bytes(shape)}


# ---- the table ------------------------------------------------------------------------------------------


HEAD = (
    "stage",
    "sent: tokens",
    "gradients + parameters",
    "by the paper",
    "by DeepSpeed's form (measured / form)",
    "held: states",
    "({e} + {e} + 12) over the shards",
    "by DeepSpeed's form (measured / form)",
    "peak",
    "step, ms",
    "over stage 0",
    "tokens/s",
)


def markdown(block: dict[str, Any]) -> str:
    """A heading and the table of one block; MiB of one rank."""
    model = block["model"]
    title = (
        f"{model['dtype']}, {model['ranks']} ranks = EP {model['ep_size']} x EDP "
        f"{model['ranks'] // model['ep_size']}, {model['dense'] / 1e6:.1f} M dense parameters and "
        f"{model['experts'] / 1e6:.1f} M of experts, {model['tokens_a_rank']} tokens a rank, "
        f"micro-batches: {model['accumulation']}"
    )
    head = " | ".join(HEAD).format(e=2 if model["dtype"] == "bfloat16" else 4)
    lines = [f"| {head} |", "|---" * len(HEAD) + "|", *map(_line, block["rows"])]
    inexact = [
        f"stage {found['stage']}: {part}"
        for found in block["rows"]
        for part in ("sent", "states")
        if not found[f"{part}_exact"]
    ]
    note = (
        f"Not to the byte: {', '.join(inexact)}." if inexact else "Sent and held: to the byte, on every rank."
    )
    return "\n".join([title, "", *lines, "", note]) + "\n"


def _line(found: dict[str, Any]) -> str:
    mib = {key: _total(found[key]) / _MIB for key in ("sent_form", "states", "states_form", "estimate")}
    moe, all_sent = found["sent"]["moe"] / _MIB, _total(found["sent"]) / _MIB
    low, high = found["spread_ms"]
    cells = [
        found["stage"],
        f"{moe:.2f}",
        f"{all_sent - moe:.2f}",
        f"{found['paper'] / _MIB:.2f}",
        f"{mib['sent_form'] - found['sent_form']['moe'] / _MIB:.2f} ({_over(all_sent, mib['sent_form'])})",
        f"{mib['states']:.1f}",
        f"{mib['estimate']:.1f}",
        f"{mib['states_form']:.1f} ({_over(mib['states'], mib['states_form'])})",
        f"{found['peak'] / _MIB:.0f}",
        f"{found['step_ms']:.0f} ({low:.0f}-{high:.0f})",
        f"{found['ratio_to_stage_0']:.2f}",
        f"{found['tokens_per_s']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _total(amount: Any) -> float:
    return sum(amount.values()) if isinstance(amount, dict) else amount


def _over(measured: float, form: float) -> str:
    """Their ratio; 1 where both are 0, on one rank."""
    return f"{measured / form if form else 1 + measured:.3f}"
