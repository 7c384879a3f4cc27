"""Watching: the watch over a run's ranks, so that when one is lost the others end in time and say which.

    open_watch -> Watching -> groups (the layers' exchanges, watched), guard (everything else), step
    limit_waits: how long a rank waits for another one in a collective, whoever made the group

The records lie in the run's folder, watch/rank-N; moe/watch.py says what they are.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from experiments.job import Job, do_on_all
from moe.exchange import Exchange
from moe.groups import Groups
from moe.watch import RankLostError, Watch, WatchedExchange


class Watching:
    """One rank's watch over its run. In a world of one there is none, and nothing here does anything."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch

    def groups(self, groups: Groups) -> Groups:
        """The same groups; their exchanges are recorded, and raise RankLostError when a rank is lost."""
        return Groups(ep=self._watched(groups.ep), edp=self._watched(groups.edp))

    def _watched(self, exchange: Exchange) -> Exchange:
        if self._watch is None or exchange.size == 1:  # nothing travels
            return exchange
        return WatchedExchange(exchange, self._watch)

    def guard(self, operation: str) -> AbstractContextManager[None]:
        """Collectives in here, the engine's too, raise RankLostError; the record says `operation`."""
        return nullcontext() if self._watch is None else self._watch.guard(operation)

    def step(self, number: int) -> None:
        """The optimizer step that begins, for the records and the errors."""
        if self._watch is not None:
            self._watch.step(number)

    def raised(self, error: BaseException) -> None:
        """Record that this rank fails, before it closes anything that makes the others fail too."""
        if self._watch is not None:
            self._watch.raised(error)


@contextmanager
def open_watch(job: Job, folder: Path) -> Iterator[Watching]:
    """Watch over the ranks of the job as long as the context is open.

    Collective: inside, every rank's record is there.   folder: the same on all ranks.   Raises ValueError on
    all ranks where one cannot write its record, and RankLostError for a rank lost outside of any guard.
    """
    if job.world_size == 1:
        yield Watching(None)
        return
    with ExitStack() as stack:
        watch = do_on_all(job, lambda: stack.enter_context(Watch(folder, job.rank, job.world_size)))
        with watch.guard("start"):
            yield Watching(watch)


def limit_waits(seconds: float) -> None:
    """Let collectives fail that wait longer than this for a rank, in every group that this process is in.

    torch gives a group of gloo 30 minutes and does not ask the group that it is made from; the engine makes
    groups of its own. So this is to be called again after anything that makes groups.
    """
    if not dist.is_initialized():
        return
    for group in c10d._world.pg_map:
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def add_hint(error: BaseException, hint: str) -> None:
    """Append to what a RankLostError says; leaves any other error as it is."""
    if isinstance(error, RankLostError):
        error.args = (f"{error}\n  {hint}",)
