"""Job: this process as one rank of the run, and the few things that all ranks must agree on."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from experiments.allocator import keep_memory
from moe import Groups, Topology, make_groups, zero


class RankRaisedError(RuntimeError):
    """A rank raised what is no mistake of the user's; its traceback stands on that rank's stderr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank: where it stands, its groups and its device."""

    topology: Topology
    groups: Groups
    device: torch.device

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the files and the lines that a person sees."""
        return self.topology.rank == 0


def start_job(ep_size: int) -> Job:
    """Join the job: gloo on CPU, NCCL on GPUs, one device a rank.   ep_size: ranks that share the experts."""
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_memory()
    zero.init_distributed("nccl" if on_gpu else "gloo")
    topology = Topology(world_size=dist.get_world_size(), ep_size=ep_size, rank=dist.get_rank())
    return Job(topology=topology, groups=make_groups(topology), device=device)


def leave_job() -> None:
    """Take the process groups down in order: threads of theirs that outlive the interpreter abort the
    process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def decide_on_main(job: Job, decide: Callable[[], Any]) -> Any:
    """Let rank 0 decide and tell the others; what it raises is raised everywhere.

    Collective.   decide: called on rank 0 only, returns something picklable.   Raises ValueError with its
    message where it raised ValueError or OSError, RankRaisedError where it raised anything else.
    """
    outcome: list[Any] = [None, None, False]
    if job.is_main:
        try:
            outcome = [decide(), None, False]
        except Exception as error:
            outcome = [None, *_told(error)]
    dist.broadcast_object_list(outcome, src=0, device=job.device)
    if outcome[1] is not None:
        raise (ValueError if outcome[2] else RankRaisedError)(outcome[1])
    return outcome[0]


def _told(error: Exception) -> tuple[str, bool]:
    """What the other ranks are told of an error, and whether it is one that the user can mend."""
    if isinstance(error, (ValueError, OSError)):
        return str(error) or type(error).__name__, True
    traceback.print_exc()  # a fault of ours: its place is known here only
    return f"{type(error).__name__}: {error}", False


def do_on_all(job: Job, do: Callable[[], Any]) -> Any:
    """Let every rank do its own part; where one fails, its message is raised everywhere, with its rank.

    Collective.   do: raises ValueError or OSError for what the user can mend.   Returns this rank's result;
    raises as `decide_on_main` does.
    """
    result, told = None, ("", True)
    try:
        result = do()
    except Exception as error:
        told = _told(error)
    all_told: list[Any] = [None] * job.world_size
    dist.all_gather_object(all_told, told)
    failed = [rank for rank, (text, _) in enumerate(all_told) if text]
    if failed:
        text, mendable = all_told[failed[0]]
        everywhere = len(failed) == job.world_size
        raise (ValueError if mendable else RankRaisedError)(
            text if everywhere else f"rank {failed[0]}: {text}"
        )
    return result


def check_same(job: Job, what: str, value: str) -> None:
    """Raise ValueError on every rank where the ranks do not agree on a value."""
    values: list[Any] = [None] * job.world_size
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        other = next(rank for rank, found in enumerate(values) if found != values[0])
        raise ValueError(
            f"{what} differs between ranks: rank 0 has {values[0]}, rank {other} has {values[other]}"
        )
