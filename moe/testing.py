"""Testing: run a function on several ranks, in processes or threads, and payloads that name their source.

    run_ranks(fn, world)      P processes, gloo, a file rendezvous: the real collectives
    run_loopback(fn, world)   P threads of this process: quick, and a debugger works

Both return the ranks' results in order, and raise what the first failing rank raised, naming it.
"""

import datetime
import importlib
import importlib.util
import multiprocessing as mp
import os
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe.exchange import LoopbackExchange, LoopbackWorld

# the compiler's modules because an engine imports them, compiled or not, and that takes each rank two seconds
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "numpy"]


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time; the message has its number and its own traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call fn(rank, world, *args) on `world` ranks of gloo and return the results in rank order.

    fn: a function of a module or test file (found again by file and name);  args, results: picklable, tensors
    by value as numpy or lists;  env: variables of the ranks. Ranks start by forkserver with PRELOADED modules
    and have one thread each. The default process group is up when fn runs. Raises RankFailedError where a
    rank raises, dies or is not done after timeout_s seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.SimpleQueue()
        where = (fn.__code__.co_filename, fn.__module__, fn.__qualname__)
        common = (world, f"file://{folder}/rendezvous", timeout_s, where, args, env or {}, results)
        ranks = [context.Process(target=_rank_main, args=(rank, *common)) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(ranks: list[Any], results: Any, timeout_s: float) -> list[Any]:
    """Wait for every rank's (rank, ok, value); the first failure ends the wait."""
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(values) < len(ranks):
        died = [r for r, p in enumerate(ranks) if r not in values and p.exitcode is not None]
        if not results.empty():
            rank, ok, value = results.get()
            if not ok:
                _raise_if_died(ranks, values, rank)
                raise RankFailedError(f"rank {rank} of {len(ranks)} raised:\n{value}")
            values[rank] = value
        elif died:
            raise RankFailedError(f"rank {died[0]} died with exit code {ranks[died[0]].exitcode}")
        elif time.monotonic() > deadline:
            late = [r for r in range(len(ranks)) if r not in values]
            raise RankFailedError(f"ranks {late} of {len(ranks)} were not done after {timeout_s} s")
        else:
            time.sleep(0.005)
    return [values[rank] for rank in range(len(ranks))]


def _raise_if_died(ranks: list[Any], values: dict[int, Any], reporter: int) -> None:
    """A rank that died without a word is the cause of what the others report: give it a moment to show."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        for r, process in enumerate(ranks):
            if r != reporter and r not in values and process.exitcode not in (None, 0, 1):
                raise RankFailedError(f"rank {r} died with exit code {process.exitcode}")
        time.sleep(0.01)


def _rank_main(
    rank: int,
    world: int,
    rendezvous: str,
    timeout_s: float,
    where: tuple,
    args: tuple,
    env: dict,
    results: Any,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1", **env)
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
        value = _find(*where)(rank, world, *args)
        results.put((rank, True, value))
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        os._exit(1)


def _find(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """The function again, by its file: test files are not importable by name."""
    if module.split(".")[0] in ("moe", "routing", "experiments"):
        found: Any = importlib.import_module(module)
    else:
        name = "_ranks_" + Path(file).stem
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None, file
            assert spec.loader is not None, file
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        found = sys.modules[name]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def run_loopback(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call fn(exchange, *args) on `world` threads joined by a LoopbackWorld; results in rank order."""
    loopback = LoopbackWorld(world, timeout_s)
    done: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def rank_main(exchange: LoopbackExchange) -> None:
        try:
            done.put((exchange.rank, fn(exchange, *args), None))
        except BaseException as error:
            done.put((exchange.rank, None, error))
            loopback.abort()

    threads = [threading.Thread(target=rank_main, args=(loopback.exchange(r),)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = sorted((done.get() for _ in range(world)), key=lambda outcome: outcome[0])
    failed = [(r, e) for r, _, e in outcomes if e is not None]
    if failed:  # a broken barrier is the echo of another rank's error
        first = next((f for f in failed if not isinstance(f[1], threading.BrokenBarrierError)), failed[0])
        raise RankFailedError(f"rank {first[0]} of {world} raised {first[1]!r}") from first[1]
    return [value for _, value, _ in outcomes]


def source_payload(source_rank: int, num_tokens: int, width: int) -> torch.Tensor:
    """Rows that name their source: [T, D] float64, row t of rank r is r * 1000 + t in every element."""
    return (source_rank * 1000.0 + torch.arange(num_tokens, dtype=torch.float64))[:, None].expand(-1, width)


class CountOperators(TorchDispatchMode):
    """Names of the c10d operators that torch dispatches in this thread while the context is open.

    An independent count for the ledger to agree with; slow, for it sees every tensor operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname.strip("_"))
        return func(*args, **(kwargs or {}))
