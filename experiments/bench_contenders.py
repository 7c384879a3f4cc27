"""Bench contenders: what `bench layer` measures, and how one is measured on a rank.

floor            the same rows, sorted already, through the same local experts by the fastest way, forward
                 and backward, and four raw all-to-alls of the same bytes: no routing, no permutation
counterpoise     this layer, with balance loss and z-loss
ds_native        DeepSpeed's own MoE, dropless
ds_autoep        the layer that DeepSpeed's AutoEP makes of a Mixtral block of transformers
hf_eager, hf_grouped     transformers' own block on one rank, by its loop and by its grouped products
observed         counterpoise with the load meter, its sample of every step, and the ledger
recompute        counterpoise under activation checkpointing;  floor_recompute: the floor's forward twice
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from experiments.allocator import keep_memory
from experiments.bench_layer import Case
from moe import LoadMeter, MoEConfig, MoELayer, SoloExchange, Topology
from moe.exchange import DistExchange, Exchange
from moe.feed_forward import fastest_method, feed_forward
from moe.ledger import CommLedger
from moe.recompute import checkpoint
from routing import RouterConfig

_SLOW_S = 3.0  # a contender whose step takes longer gets two rounds only

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A contender, ready.

    step: one forward and backward;  outputs: [T, D] of its forward alone, to compare contenders by; None for
    the floor, which has none;  inside: entered around the timed step.
    """

    step: Callable[[], None]
    outputs: Callable[[], torch.Tensor] | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def measure(
    rank: int, world: int, settings: list[tuple[str, Case]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Times of every contender in every round, on this rank; why not, where one cannot run."""
    keep_memory()  # for all alike: else who takes blocks over 32 MiB pays for the system's zeroing of pages
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name, case in settings:
        try:
            run = CONTENDERS[name](case, make_inputs(case, rank), topology)
            timed(run)
            again_s = timed(run)
            results[name] = {"times_s": [], "peak_mib": min(peak_bytes(run) for _ in range(3)) / 2**20}
        except (ImportError, RuntimeError, AttributeError, TypeError, AssertionError, ValueError) as error:
            short = "out of memory" if "allocate" in str(error) else type(error).__name__
            results[name] = {"why": f"{short}: {error}"[:200]}
            continue
        slowest = torch.tensor([again_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        runs[name] = run
        results[name]["rounds"] = 2 if slowest > _SLOW_S else rounds
    for number in range(rounds):
        for name, run in runs.items():
            if number < results[name]["rounds"]:
                results[name]["times_s"].append(timed(run))
    return results


def timed(run: Run) -> float:
    """Seconds of one step, begun by all ranks together."""
    with run.inside():
        dist.barrier()
        begun = time.perf_counter()
        run.step()
        return time.perf_counter() - begun


def peak_bytes(run: Run) -> int:
    """Bytes that a step's tensors take at their peak, above what was there before it (CPU).

    Take the least of a few steps: a thread of the backend may hold a buffer for longer than the step does.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with run.inside(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step()
    inner: Any = profiler.profiler
    events = inner.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def layer_run(
    forward: Callable[[torch.Tensor], Any], inputs: Inputs, parameters: Iterable[nn.Parameter]
) -> Run:
    """Forward and backward with gradients of rows and parameters, which are then dropped.

    forward: rows -> (y, auxiliary loss or None)
    """
    x_TD, weights = inputs.x_TD.clone().requires_grad_(True), list(parameters)

    def step() -> None:
        y, aux = forward(x_TD)
        roots, grads = [y.view_as(inputs.grad_TD)], [inputs.grad_TD]
        if aux is not None:
            roots, grads = [*roots, aux], [*grads, torch.ones_like(aux)]
        torch.autograd.backward(roots, grads)
        del y, aux, roots
        for tensor in (x_TD, *weights):
            tensor.grad = None

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return forward(x_TD)[0].view_as(inputs.grad_TD)

    return Run(step=step, outputs=outputs)


# ---- this layer -----------------------------------------------------------------------------------------


def our_layer(case: Case, inputs: Inputs, topology: Topology, meter: LoadMeter | None = None) -> MoELayer:
    """The layer with the weights that every contender gets."""
    router = RouterConfig(d_model=case.width, num_experts=case.experts, top_k=case.top_k)
    config = MoEConfig(router=router, expert_hidden=case.hidden)
    layer = MoELayer(config, topology, meter=meter).to(inputs.x_TD.dtype)
    home = topology.home_experts(case.experts)
    with torch.no_grad():
        layer.router.gate.weight.copy_(inputs.gate_ED)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(inputs, name)[home])
    return layer


def counterpoise(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """This layer, with balance loss and z-loss."""
    layer = our_layer(case, inputs, topology)
    return layer_run(layer, inputs, layer.parameters())


def observed(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The same, with everything that watches it."""
    meter, ledger = LoadMeter(topology.world_size, topology.rank), CommLedger()
    layer = our_layer(case, inputs, topology, meter)
    bare, numbers = layer_run(layer, inputs, layer.parameters()), itertools.count(1)

    def step() -> None:
        bare.step()
        meter.sample(next(numbers))
        ledger.take()

    return Run(step=step, outputs=bare.outputs, inside=lambda: ledger)


def recompute(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The same under activation checkpointing that keeps the least."""
    layer = our_layer(case, inputs, topology)
    return layer_run(lambda x: checkpoint(layer, x), inputs, layer.parameters())


def recompute_rows(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The same under activation checkpointing that keeps the rows that came back."""
    layer = our_layer(case, inputs, topology)
    return layer_run(lambda x: checkpoint(layer, x, keep="rows"), inputs, layer.parameters())


# ---- the floor ------------------------------------------------------------------------------------------


def floor(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """Sorted rows through the local experts, and an all-to-all each way, forward and backward."""
    return _floor(case, inputs, topology, forwards=1)


def floor_recompute(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The floor with its forward, exchanges included, done twice."""
    return _floor(case, inputs, topology, forwards=2)


def _floor(case: Case, inputs: Inputs, topology: Topology, forwards: int) -> Run:
    home = topology.home_experts(case.experts)
    w1, w2, w3 = (w[home].clone().requires_grad_(True) for w in (inputs.w1, inputs.w2, inputs.w3))
    rows = case.tokens * case.top_k
    rows_s = torch.full((len(home),), rows // len(home), dtype=torch.int64)
    rows_RD = torch.randn(rows, case.width).to(inputs.x_TD.dtype).requires_grad_(True)
    grad_RD = torch.randn_like(rows_RD)
    exchange: Exchange = DistExchange(None) if topology.ep_size > 1 else SoloExchange()
    splits = [rows // topology.ep_size] * topology.ep_size

    def compute(method: str) -> None:
        with torch.no_grad():
            for _ in range(forwards - 1):
                feed_forward(rows_RD, w1, w2, w3, rows_s, method=method)
        feed_forward(rows_RD, w1, w2, w3, rows_s, method=method).backward(grad_RD)
        for tensor in (rows_RD, w1, w2, w3):
            tensor.grad = None

    best = fastest_method(rows_RD, w1, w2, w3, rows_s)

    def step() -> None:
        for _ in range(2 * forwards + 2):
            exchange.send_rows(grad_RD, splits, splits)
        compute(best)

    return Run(step=step)


# ---- other people's -------------------------------------------------------------------------------------


class _NativeExpert(nn.Module):
    """The expert that DeepSpeed's native layer copies."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def deepspeed_native(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """DeepSpeed's own MoE, dropless, its random choices off."""
    from deepspeed.moe.layer import MoE

    from moe import zero

    zero.init_distributed("gloo")
    layer = MoE(
        case.width, _NativeExpert(case.width, case.hidden), case.experts, topology.ep_size, case.top_k,
        drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    layer = layer.to(inputs.x_TD.dtype)
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

    return layer_run(forward, inputs, layer.parameters())


def deepspeed_autoep(case: Case, inputs: Inputs, topology: Topology) -> Run:
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
    layer = layer.to(inputs.x_TD.dtype)
    home = topology.home_experts(case.experts)
    with torch.no_grad():
        layer.router.gate.weight.copy_(inputs.gate_ED)
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(inputs, name)[home])

    def forward(x: torch.Tensor) -> Any:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out), None

    return layer_run(forward, inputs, layer.parameters())


def hf_eager(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The block of transformers with its loop over experts."""
    return _transformers(case, inputs, "eager")


def hf_grouped(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The block of transformers with grouped products."""
    return _transformers(case, inputs, "grouped_mm")


def _transformers(case: Case, inputs: Inputs, implementation: str) -> Run:
    """A Mixtral block with all experts on this rank. Its router says no balance loss."""
    from transformers import MixtralConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.mixtral.modeling_mixtral import (  # pyright: ignore[reportMissingImports]
        MixtralSparseMoeBlock,
    )

    settings: dict[str, Any] = {
        "hidden_size": case.width,
        "intermediate_size": case.hidden,
        "num_local_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "experts_implementation": implementation,
    }
    config = MixtralConfig(**settings)
    if config._experts_implementation != implementation:
        raise ValueError(f"transformers took {config._experts_implementation!r} for {implementation!r}")
    block: Any = MixtralSparseMoeBlock(config).to(inputs.x_TD.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(inputs.gate_ED)
        block.experts.gate_up_proj.copy_(torch.cat([inputs.w1, inputs.w3], dim=1))
        block.experts.down_proj.copy_(inputs.w2)

    def forward(x: torch.Tensor) -> Any:
        return block(x[None]), None

    return layer_run(forward, inputs, block.parameters())


CONTENDERS: dict[str, Callable[[Case, Inputs, Topology], Run]] = {
    "floor": floor,
    "counterpoise": counterpoise,
    "ds_native": deepspeed_native,
    "ds_autoep": deepspeed_autoep,
    "hf_eager": hf_eager,
    "hf_grouped": hf_grouped,
    "observed": observed,
    "recompute": recompute,
    "recompute_rows": recompute_rows,
    "floor_recompute": floor_recompute,
}
