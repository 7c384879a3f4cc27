"""Bench contenders: what `bench layer` measures, and how one is measured on a rank.

floor            the same rows, sorted already, through the same local experts by the fastest way, forward
                 and backward, and four raw all-to-alls of the same bytes: no routing, no permutation
counterpoise     this layer, with balance loss and z-loss
observed         counterpoise with the load meter, its sample of every step, and the ledger
recompute        counterpoise under activation checkpointing;  floor_recompute: the floor's forward twice
balanced         counterpoise on rows that all experts share alike, beside skewed ones
replicas         counterpoise with replicas by a simple rule and the exact split of every batch
resident         the same, the replicas' weights there for nothing: no fetch, no gradient back
dedup            counterpoise with deduplicated dispatch
and other people's: bench_others.py
"""

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit, balanced_peak
from experiments import bench_others
from experiments.allocator import keep_memory
from experiments.bench_inputs import Inputs, Run, layer_run, make_inputs
from experiments.bench_layer import Case
from moe import LoadMeter, MoEConfig, MoELayer, SoloExchange, Topology
from moe.exchange import DistExchange, Exchange
from moe.feed_forward import fastest_method, feed_forward
from moe.ledger import CommLedger
from moe.placement import Placement
from moe.recompute import checkpoint
from moe.replicate import Replicas
from routing import RouterConfig

_SLOW_S = 3.0  # a contender whose step takes longer gets two rounds only


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
            results[name]["sent_mib"] = sent_bytes(run) / 2**20
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


def sent_bytes(run: Run) -> float:
    """Bytes that a step sends from this rank to others."""
    with CommLedger() as ledger:
        run.step()
        return sum(entry.sent_bytes for entry in ledger.take())


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


# ---- this layer -----------------------------------------------------------------------------------------


def our_layer(
    case: Case, inputs: Inputs, topology: Topology, meter: LoadMeter | None = None, dedup: str = "off"
) -> MoELayer:
    """The layer with the weights that every contender gets."""
    router = RouterConfig(d_model=case.width, num_experts=case.experts, top_k=case.top_k)
    config = MoEConfig(router=router, expert_hidden=case.hidden, dedup=dedup)
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


# ---- this layer under skew ------------------------------------------------------------------------------


def balanced(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """This layer on rows that all experts share alike."""
    even = replace(case, skew="")
    return counterpoise(even, make_inputs(even, topology.rank), topology)


def replicas(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """This layer with replicas and the exact split."""
    layer = replicated_layer(case, inputs, topology)
    return layer_run(layer, inputs, layer.parameters())


def resident(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """The same without the replicas' traffic."""
    layer = replicated_layer(case, inputs, topology)
    without_traffic(layer)
    return layer_run(layer, inputs, layer.parameters())


def without_traffic(layer: MoELayer) -> None:
    """Let the layer's replicas fetch in the first forward only, and send nothing back."""
    fetched: list[torch.Tensor] = []

    def resident_replicas(placement: Placement) -> Any:
        return _Resident(Replicas(placement, layer.groups.ep, "resident"), fetched)

    layer._replicas = resident_replicas


def replicated_layer(case: Case, inputs: Inputs, topology: Topology) -> MoELayer:
    """This layer, placed for the very load of its inputs."""
    layer = our_layer(case, inputs, topology)
    with torch.no_grad():
        counts_PE, _ = layer.gather_counts(layer.router.route(inputs.x_TD))
    slots = enough_replicas(counts_PE.sum(axis=0), topology.ep_size)
    placement = layer.place(slots)
    layer.split = ExactSplit(home_slot_E=tuple(placement.home_slot_E.tolist()), min_rows=REPLICA_ROWS)
    layer.end_step()
    return layer


# about what one is worth on gloo, by `bench skew`
REPLICA_ROWS = 64


def enough_replicas(load_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """Homes in expert order and as many spare slots a rank as bring the peak within 1 % of the even load."""
    num_local = load_E.shape[0] // num_ranks
    slots = np.arange(load_E.shape[0])
    for local in range(num_local, 2 * num_local + 1):
        home_slot_E = (np.arange(num_ranks)[:, None] * local + np.arange(num_local)).reshape(-1)
        slots = fill_spare_slots(load_E, home_slot_E, local, num_ranks)
        if balanced_peak(load_E, slots, num_ranks).peak <= 1.01 * load_E.sum() / num_ranks:
            break
    return slots


class _Resident:
    """Replicas that fetch in the first forward only, and send nothing back."""

    def __init__(self, replicas: Replicas, fetched: list[torch.Tensor]) -> None:
        self.replicas, self.fetched, self.started = replicas, fetched, bool(fetched)
        self.home_slots, self.placement = replicas.home_slots, replicas.placement
        self.dtype = fetched[0].dtype if fetched else None

    @property
    def slot_r(self) -> tuple[int, ...]:
        return self.replicas.slot_r

    def use(self, rows_S: np.ndarray, *, fetch_all: bool = False) -> None:
        self.replicas.use(rows_S, fetch_all=fetch_all)

    def start(self, weights: Any) -> None:
        self.replicas.start(weights)

    def wait(self) -> list[torch.Tensor]:
        if not self.fetched:
            self.fetched += self.replicas.wait()
        return self.fetched

    def send_back(self, packed_uX: torch.Tensor) -> None:
        """Nothing travels: that is what is measured."""

    def add_returned(self, gradients: Any) -> None:
        """Nothing has come back."""


def dedup(case: Case, inputs: Inputs, topology: Topology) -> Run:
    """This layer, a token's row sent to a rank once."""
    layer = our_layer(case, inputs, topology, dedup="on")
    return layer_run(layer, inputs, layer.parameters())


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


CONTENDERS: dict[str, Callable[[Case, Inputs, Topology], Run]] = {
    "floor": floor,
    "counterpoise": counterpoise,
    "ds_native": bench_others.deepspeed_native,
    "ds_autoep": bench_others.deepspeed_autoep,
    "hf_eager": bench_others.hf_eager,
    "hf_grouped": bench_others.hf_grouped,
    "observed": observed,
    "recompute": recompute,
    "recompute_rows": recompute_rows,
    "floor_recompute": floor_recompute,
    "balanced": balanced,
    "replicas": replicas,
    "resident": resident,
    "dedup": dedup,
}
