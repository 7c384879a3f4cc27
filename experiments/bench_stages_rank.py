"""Bench stages, on one rank: engines of several ZeRO stages over one model, measured step by step.

Setting -> an engine for each stage -> warm-up -> bytes sent, bytes held, peak -> rounds of times, in turn

The engines live side by side, so that a slow moment of the machine hits all alike; what an engine holds is
told apart by what was there before it was made.
"""

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from experiments.allocator import keep_memory
from experiments.bench_contenders import peak_bytes
from experiments.bench_inputs import Run
from experiments.bench_stages_forms import KINDS, Parameter, kind_of
from experiments.config import Config
from experiments.engine_config import merge_deepspeed
from moe import Groups, Topology, make_groups, zero_state
from moe.ledger import CommLedger
from moe.model import Transformer
from moe.naming import phase
from moe.placement import even_split

# stage 3 sends its trace of modules around in its first two steps
WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One engine to be measured.

    name: of its line in the table;  json: DeepSpeed's settings, the stage among them
    """

    name: str
    json: dict[str, Any]

    @property
    def stage(self) -> int:
        return self.json["zero_optimization"]["stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """An engine, and what is needed to tell what is its own.

    parameters: as they were before the engine took them apart;  before: storages that were there before it;
    routed: rows from rank to rank [P, P] of every forward since it was last emptied
    """

    engine: Any
    batches: list[torch.Tensor]
    parameters: list[Parameter]
    before: frozenset[int]
    routed: list[np.ndarray]


def measure(
    rank: int, world: int, config: Config, ep_size: int, settings: list[Setting], rounds: int
) -> list[dict[str, Any]]:
    """Of each setting: parameters, sent bytes, held bytes, peak bytes and the times of all rounds."""
    from moe import zero  # here: deepspeed, imported too early, does not know yet that this is a CPU's job

    keep_memory()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    groups, contenders, results = make_groups(topology), [], []
    for setting in settings:
        contender = make_contender(config, topology, groups, setting.json)
        for _ in range(WARM_UP_STEPS):
            step(contender)
        contenders.append(contender)
        results.append(
            {
                "parameters": contender.parameters,
                "sent": sent(contender),
                "rows": np.sum(contender.routed, axis=0).tolist(),
                "held": held(contender),
                "peak": peak(contender),
                "times_s": [],
            }
        )
    for _ in range(rounds):
        for contender, result in zip(contenders, results, strict=True):
            result["times_s"].append(timed(contender))
    return results


def make_contender(config: Config, topology: Topology, groups: Groups, json: dict[str, Any]) -> Contender:
    """Model and engine, and batches of random tokens, others on every rank."""
    from moe import zero

    before = frozenset(storages(living()))
    model = Transformer(config.model, topology, groups=groups, layer_class=zero.ZeroMoELayer)
    model.init_weights(config.train.seed)
    parameters = [
        Parameter(
            numel=parameter.numel(),
            ndim=parameter.ndim,
            expert=".experts." in name,
            router=".router.gate." in name,
        )
        for name, parameter in model.named_parameters()
    ]
    settings = merge_deepspeed(json, config, topology.world_size, json_name="bench stages")
    engine = zero.make_engine(model, settings, config.train.weight_decay)
    routed: list[np.ndarray] = []

    def split(counts_PE: np.ndarray, slot_to_expert_S: np.ndarray) -> np.ndarray:
        routed.append(counts_PE.reshape(topology.ep_size, topology.ep_size, -1).sum(axis=2))
        return even_split(counts_PE, slot_to_expert_S)

    for module in model.modules():
        if isinstance(module, zero.ZeroMoELayer):
            module.split = split
    generator = torch.Generator().manual_seed(topology.rank)
    shape = (config.train.accumulation, config.train.micro_batch, config.model.seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    return Contender(engine=engine, batches=list(tokens), parameters=parameters, before=before, routed=routed)


# ---- a step ---------------------------------------------------------------------------------------------


def step(contender: Contender, before_update: Callable[[], None] = lambda: None) -> None:
    """All micro-batches and the update.   before_update: called when the last gradient is there."""
    engine, batches = contender.engine, contender.batches
    for number, batch_BS in enumerate(batches, 1):
        with phase("forward"):
            ce_sum, aux_sum = engine(batch_BS[:, :-1], batch_BS[:, 1:])
        with phase("backward"):
            engine.backward((ce_sum + aux_sum) / batch_BS[:, 1:].numel())
        del ce_sum, aux_sum
        if number == len(batches):
            before_update()
        with phase("optimizer"):
            engine.step()


def timed(contender: Contender) -> float:
    """Seconds of one step, begun by all ranks together."""
    dist.barrier()
    begun = time.perf_counter()
    step(contender)
    return time.perf_counter() - begun


def sent(contender: Contender) -> dict[str, float]:
    """Bytes of one step from this rank to others, by kind."""
    contender.routed.clear()
    with CommLedger() as ledger:
        step(contender)
        entries = ledger.take()
    sums = dict.fromkeys(KINDS, 0.0)
    for entry in entries:
        sums[kind_of(entry)] += entry.sent_bytes
    return sums


# ---- memory ---------------------------------------------------------------------------------------------


def living() -> list[torch.Tensor]:
    """All tensors that Python knows, and their gradients."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of what the tensors lie in, each once; views share one."""
    cells = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
    return {cell.data_ptr(): cell.nbytes() for cell in cells if cell.nbytes()}


def held(contender: Contender) -> dict[str, int]:
    """Bytes that the engine's states take when the last gradient is there, the moment with the most."""
    found: list[dict[str, int]] = []
    step(contender, lambda: found.append(states(contender)))
    return found[0]


def states(contender: Contender) -> dict[str, int]:
    """Bytes by part; "rest" is everything else that came with the engine: buckets, flat copies, batches."""
    gc.collect()
    engine = contender.engine
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    holders = [piece.holder for piece in zero_state.pieces(engine)]
    moments = [value for state in zero_state.optimizer_state(engine).values() for value in state.values()]
    parts = {
        "weights": [p.data for p in parameters] + [getattr(p, "ds_tensor", None) for p in parameters],
        "masters": holders,
        "moments": [moment for moment in moments if isinstance(moment, torch.Tensor) and moment.ndim],
        "gradients": [thing.grad for thing in (*parameters, *holders)] + _kept_gradients(optimizer),
        "rest": living(),
    }
    seen, found = set(contender.before), {}
    for part, tensors in parts.items():
        cells = storages(tensors)
        found[part] = sum(num_bytes for place, num_bytes in cells.items() if place not in seen)
        seen |= cells.keys()
    return found


def _kept_gradients(optimizer: Any) -> list[Any]:
    """Reduced gradients that ZeRO 1 and 2 keep in lists by group, and ZeRO 3 in one flat buffer."""
    lists = getattr(optimizer, "averaged_gradients", None) or {}
    kept = [tensor for group in lists.values() if group for tensor in group]
    return [*kept, getattr(optimizer, "grad_partitions_flat_buffer", None)]


def peak(contender: Contender) -> int:
    """Bytes of the process at the peak of a step that are not of other engines."""
    resting = sum(states(contender).values())
    run = Run(step=lambda: step(contender))
    return resting + min(peak_bytes(run) for _ in range(2))
