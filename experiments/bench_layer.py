"""Bench layer: this layer beside those that people use today, on the same weights, routing and ranks.

    counterpoise bench layer --json OUT

Contenders: this layer; DeepSpeed's native MoE (dropless); DeepSpeed AutoEP's layer, made from a small Mixtral
of transformers. Floor: the same rows, already sorted, through the same local experts by the fastest of the
ways to compute them, forward and backward, plus raw all-to-alls of the same bytes: no routing, no
permutation.

All run in one job, in turn, so that a slow moment of the machine hits everybody; a round's time is that of
its slowest rank, the figure is the median over rounds, a ratio the median of the rounds' ratios.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe import MoEConfig, MoELayer, Topology
from moe.exchange import DistExchange
from moe.experts import METHODS, feed_forward
from moe.testing import run_ranks
from routing import RouterConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: E experts, K per token, T tokens of a rank, D width, F hidden width of an expert."""

    experts: int
    top_k: int
    tokens: int
    width: int = 256
    hidden: int = 512
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"E{self.experts} K{self.top_k} T{self.tokens} D{self.width} F{self.hidden} {self.dtype}"


SIZES = [(16, 2, 2048), (64, 6, 1024), (64, 2, 4096), (16, 2, 8192), (128, 8, 2048)]


def default_cases() -> list[Case]:
    """The sizes of the table, each in float32 and bfloat16."""
    cases = [Case(experts=e, top_k=k, tokens=t, dtype=d) for d in DTYPES for e, k, t in SIZES]
    return cases + [Case(experts=16, top_k=2, tokens=2048, width=1024, dtype=d) for d in DTYPES]


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise bench layer`."""
    top = argparse.ArgumentParser(prog="counterpoise bench layer", allow_abbrev=False)
    add = top.add_argument
    add("--json", metavar="OUT", help="file for the rows")
    add("--ranks", metavar="P", type=int, default=2, help="ranks; 2")
    add("--rounds", metavar="N", type=int, default=7, help="rounds of every contender; 7")
    add("--cases", metavar="TEXT", default="", help='only cases whose name has this text, say "E16 K2 T2048"')
    add("--contenders", metavar="NAMES", default=",".join(CONTENDERS), help="comma-separated; default all")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the cases one after the other and print a table."""
    args = parser().parse_args(argv)
    chosen = [case for case in default_cases() if args.cases in case.name]
    if not chosen:
        names = "; ".join(case.name for case in default_cases())
        raise ValueError(f"--cases {args.cases!r} matches none of: {names}")
    names = args.contenders.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"--contenders {name!r} is unknown; use some of {', '.join(CONTENDERS)}")
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows += run_case(case, names, args.ranks, args.rounds)
        print_case(case, rows)
    if args.json:
        Path(args.json).write_text(json.dumps({**where(), "rows": rows}, indent=1) + "\n")
    return 0


def where() -> dict[str, str]:
    """Machine and commit that the figures belong to."""
    from experiments.rundir import versions

    found = versions()
    return {
        "machine": str(found["platform"]),
        "commit": found.get("counterpoise") or "",
        "torch": found["torch"],
    }


def run_case(case: Case, names: list[str], ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one case: times of every contender, ratios to the floor, peak memory."""
    settings = [(n, case) for n in names]
    outcomes = run_ranks(measure, ranks, settings, rounds, timeout_s=900.0, env={"DS_ACCELERATOR": "cpu"})
    times = {
        n: np.max([outcome[n]["times_s"] for outcome in outcomes], axis=0)
        for n in names
        if "times_s" in outcomes[0][n]
    }
    rows = []
    for name in names:
        row: dict[str, Any] = {"case": case.name, "contender": name, "metric": "step_ms"}
        if name not in times:
            rows.append({**row, "value": None, "why": outcomes[0][name]["why"]})
            continue
        peers = [n for n in times if n not in (name, "floor")]
        best = np.min([times[n] for n in peers], axis=0) if peers else None
        rows.append(
            {
                **row,
                "value": statistics.median(times[name]) * 1e3,
                "ratio_to_floor": float(np.median(times[name] / times["floor"]))
                if "floor" in times
                else None,
                "ratio_to_best_peer": None if best is None else float(np.median(times[name] / best)),
                "peak_mib": max(outcome[name]["peak_mib"] for outcome in outcomes),
            }
        )
    return rows


def print_case(case: Case, rows: list[dict[str, Any]]) -> None:
    """One block of the table."""
    print(case.name)
    for row in (r for r in rows if r["case"] == case.name):
        if row["value"] is None:
            print(f"  {row['contender']:<14} {row['why']}")
            continue
        floor = f"{row['ratio_to_floor']:.2f} of floor" if row["ratio_to_floor"] else ""
        print(
            f"  {row['contender']:<14} {row['value']:8.1f} ms   {floor}   peak {row['peak_mib']:.0f} MiB",
            flush=True,
        )


# ---- on a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What every contender gets, drawn alike: rows [T, D], gate [E, D], experts [E, F, D] and [E, D, F]."""

    x_TD: torch.Tensor
    grad_TD: torch.Tensor
    gate_ED: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor


def make_inputs(case: Case, rank: int) -> Inputs:
    """Rows whose routing is balanced by construction, under a gate with orthonormal rows.

    A token's row is noise outside the gate's span plus the gate's rows of its K experts, so that each
    contender's own gate selects just these. Experts take turns, so every expert gets the same number of
    copies.
    """
    generator = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(99)
    experts, width = case.experts, case.width
    gate_ED = torch.linalg.qr(torch.randn(width, experts, generator=shared))[0].T
    turns = (torch.arange(case.tokens)[:, None] * case.top_k + torch.arange(case.top_k)) % experts
    chosen_TK = turns[torch.randperm(case.tokens, generator=generator)]
    noise = torch.randn(case.tokens, width, generator=generator)
    noise -= noise @ gate_ED.T @ gate_ED
    strength = 3 + torch.arange(case.top_k) * 0.25
    x_TD = noise + (gate_ED[chosen_TK] * strength[None, :, None]).sum(dim=1)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=shared) * shape[-1] ** -0.5).to(dtype)

    return Inputs(
        x_TD=x_TD.to(dtype),
        grad_TD=torch.randn(case.tokens, width, generator=generator).to(dtype),
        gate_ED=gate_ED.to(dtype),
        w1=normal(experts, case.hidden, width),
        w2=normal(experts, width, case.hidden),
        w3=normal(experts, case.hidden, width),
    )


Step = Callable[[], None]


def measure(
    rank: int, world: int, settings: list[tuple[str, Case]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Times of every contender in every round, on this rank; why not, where one cannot run."""
    results: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, case in settings:
        try:
            steps[name] = CONTENDERS[name](
                case, make_inputs(case, rank), Topology(world_size=world, ep_size=world, rank=rank)
            )
            steps[name]()
            results[name] = {"times_s": [], "peak_mib": peak_mib(steps[name])}
        except (ImportError, RuntimeError, AttributeError, TypeError, AssertionError, ValueError) as error:
            results[name] = {"why": f"{type(error).__name__}: {error}"[:200]}
            steps.pop(name, None)
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            results[name]["times_s"].append(time.perf_counter() - begun)
    return results


def peak_mib(step: Step) -> float:
    """Growth of this process's largest resident size during one step (Linux; 0 elsewhere)."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0.0
    before = _status("VmRSS")
    step()
    return max(0.0, (_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def _stepper(forward: Callable[[torch.Tensor], Any], inputs: Inputs, parameters: list[torch.Tensor]) -> Step:
    """Forward and backward with gradients of rows and parameters, which are then dropped."""
    x_TD = inputs.x_TD.clone().requires_grad_(True)

    def step() -> None:
        y, aux = forward(x_TD)
        roots, grads = [y.view_as(inputs.grad_TD)], [inputs.grad_TD]
        if aux is not None:
            roots, grads = [*roots, aux], [*grads, torch.ones_like(aux)]
        torch.autograd.backward(roots, grads)
        for tensor in (x_TD, *parameters):
            tensor.grad = None

    return step


def counterpoise(case: Case, inputs: Inputs, topology: Topology) -> Step:
    """This layer, with balance loss and z-loss."""
    router = RouterConfig(d_model=case.width, num_experts=case.experts, top_k=case.top_k)
    layer = MoELayer(MoEConfig(router=router, expert_hidden=case.hidden), topology).to(DTYPES[case.dtype])
    home = topology.home_experts(case.experts)
    with torch.no_grad():
        layer.router.gate.weight.copy_(inputs.gate_ED)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(inputs, name)[home])
    return _stepper(layer, inputs, list(layer.parameters()))


def floor(case: Case, inputs: Inputs, topology: Topology) -> Step:
    """Sorted rows through the local experts by the fastest way, and four raw all-to-alls of the same
    bytes."""
    home = topology.home_experts(case.experts)
    w1, w2, w3 = (w[home].clone().requires_grad_(True) for w in (inputs.w1, inputs.w2, inputs.w3))
    rows = case.tokens * case.top_k
    rows_per_slot = torch.full((len(home),), rows // len(home), dtype=torch.int64)
    rows_RD = torch.randn(rows, case.width).to(DTYPES[case.dtype]).requires_grad_(True)
    grad_RD = torch.randn_like(rows_RD)
    exchange, splits = DistExchange(None), [rows // topology.ep_size] * topology.ep_size

    def compute(method: str) -> None:
        out = feed_forward(rows_RD, w1, w2, w3, rows_per_slot, method=method)
        out.backward(grad_RD)
        for tensor in (rows_RD, w1, w2, w3):
            tensor.grad = None

    best = _fastest(compute)

    def step() -> None:
        for _ in range(4):
            exchange.send_rows(grad_RD, splits, splits)
        compute(best)

    return step


def _fastest(compute: Callable[[str], None]) -> str:
    times: dict[str, float] = {}
    for method in METHODS[1:]:
        try:
            compute(method)
        except (ValueError, RuntimeError):
            continue
        begun = time.perf_counter()
        for _ in range(2):
            compute(method)
        times[method] = time.perf_counter() - begun
    return min(times, key=lambda method: times[method])


class _NativeExpert(torch.nn.Module):
    """The expert that DeepSpeed's native layer copies."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(width, hidden, bias=False)
        self.w2 = torch.nn.Linear(hidden, width, bias=False)
        self.w3 = torch.nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


def deepspeed_native(case: Case, inputs: Inputs, topology: Topology) -> Step:
    """DeepSpeed's own MoE, dropless, its random choices off."""
    from deepspeed.moe.layer import MoE

    from moe import zero

    zero.init_distributed("gloo")
    layer = MoE(
        case.width, _NativeExpert(case.width, case.hidden), case.experts, topology.ep_size, case.top_k,
        drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    layer = layer.to(DTYPES[case.dtype])
    moe: Any = layer.deepspeed_moe
    with torch.no_grad():
        moe.gate.wg.weight.copy_(inputs.gate_ED)
        for local, expert in enumerate(topology.home_experts(case.experts)):
            for name in ("w1", "w2", "w3"):
                getattr(moe.experts.deepspeed_experts[local], name).weight.copy_(
                    getattr(inputs, name)[expert]
                )

    def forward(x: torch.Tensor) -> Any:
        y, aux, _ = layer(x[None])
        return y, aux

    return _stepper(forward, inputs, list(layer.parameters()))


def deepspeed_autoep(case: Case, inputs: Inputs, topology: Topology) -> Step:
    """The layer that AutoEP makes of a Mixtral block."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from transformers import MixtralConfig, MixtralForCausalLM  # pyright: ignore[reportMissingImports]

    from moe import zero

    zero.init_distributed("gloo")
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=8, hidden_size=case.width, intermediate_size=case.hidden, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=case.experts,
            num_experts_per_tok=case.top_k,
        )
    )  # fmt: skip
    settings = parse_autoep_config(
        {"enabled": True, "autoep_size": topology.ep_size, "preset_model": "mixtral"}
    )
    auto = AutoEP(model, settings)
    for spec in auto.ep_parser():
        auto.replace_moe_layer(spec, topology.ep_size, topology.ep_rank)
    layer: Any = model.model.layers[0].mlp
    layer.set_deepspeed_parallelism()
    layer = layer.to(DTYPES[case.dtype])
    home = topology.home_experts(case.experts)
    with torch.no_grad():
        layer.router.gate.weight.copy_(inputs.gate_ED)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(inputs, name)[home])

    def forward(x: torch.Tensor) -> Any:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out), None

    return _stepper(forward, inputs, list(layer.parameters()))


CONTENDERS: dict[str, Callable[[Case, Inputs, Topology], Step]] = {
    "floor": floor,
    "counterpoise": counterpoise,
    "ds_native": deepspeed_native,
    "ds_autoep": deepspeed_autoep,
}
