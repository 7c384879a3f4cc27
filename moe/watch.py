"""Watch: a heartbeat and a last-operation record per rank, so that a lost rank is named with what it did.

Every rank keeps one small file, folder/rank-N (its form: moe/watch_record.py), and reads the others' only
when an exchange of its own has failed:

    with Watch(run_folder / "watch", rank, world_size) as watch:
        exchange = WatchedExchange(DistExchange(group), watch)
        with tag("layer 3 dispatch"):
            exchange.send_rows(...)    a dead peer: RankLostError "rank 1 (pid 7 on a): its process is gone"

Who is silent is judged by heartbeats that do not advance while we look, never by comparing two hosts' clocks.
A backend that ends the process itself (NCCL's watchdog) leaves no rank to explain: the records remain.
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe.exchange import Exchange, Transfer
from moe.naming import current_tag, in_backward
from moe.watch_record import (
    BEAT,
    OPERATION,
    STATE,
    Record,
    fate,
    own_place,
    process_state,
    read_record,
    write_area,
)

# what the messages of gloo, NCCL and the stores have in common; gloo raises a plain RuntimeError
_EXCHANGE_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")


class RankLostError(RuntimeError):
    """An exchange failed. The message says on whose account, and what every rank was at.

    rank: the rank at fault, None where none is visibly;  kind: raised, gone, stopped, silent, left, absent,
    elsewhere, or "" for none;  operation: the last one of that rank;  own_operation: that of this rank.
    """

    def __init__(self, message: str, *, rank: int | None, kind: str, operation: str, own_operation: str):
        super().__init__(message)
        self.rank, self.kind, self.operation, self.own_operation = rank, kind, operation, own_operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of a rank: a kind of SURE or LIKELY, or "" for no fault, and the same in words."""

    rank: int
    kind: str
    text: str
    record: Record


SURE = ("raised", "gone", "stopped", "silent", "left")
LIKELY = ("absent", "elsewhere")


def is_exchange_error(error: BaseException) -> bool:
    """Whether a collective failed because of others, as against an error of this rank's own making."""
    if isinstance(error, (RankLostError, dist.DistError, threading.BrokenBarrierError)):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in _EXCHANGE_WORDS)


class Watch:
    """One rank's record, kept while the context is open, and its view of the others'.

    folder: shared by the ranks of the job, made by whoever comes first;  interval_s: seconds between two
    heartbeats; 0.5 is good, 5 on a shared file system with hundreds of ranks.
    Raises ValueError where rank, world_size or interval_s make no sense.
    """

    def __init__(self, folder: str | Path, rank: int, world_size: int, *, interval_s: float = 0.5) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is out of 0..{world_size - 1}; use the rank in the whole job")
        if not 0 < interval_s <= 60:
            raise ValueError(f"interval_s={interval_s} must be in (0, 60] seconds; 0.5 is good")
        self.folder, self.rank, self.world_size, self.interval_s = Path(folder), rank, world_size, interval_s
        self._file = -1
        self._number, self._step, self._text, self._begun_s = 0, -1, "", 0.0
        self._beat, self._state = 0, "running"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_start: dict[int, Record | None] = {}

    def __enter__(self) -> "Watch":
        if self._file >= 0:
            raise RuntimeError(f"the watch of rank {self.rank} is open already; one `with` a rank")
        self.folder.mkdir(parents=True, exist_ok=True)
        # What lies there now may be an earlier run's: it counts once it has changed.
        self._at_start = {r: read_record(self.folder, r) for r in self._others()}
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC  # an old pid beside a new state would lie
        self._file = os.open(self.folder / f"rank-{self.rank}", flags, 0o644)
        self._number, self._step, self._text, self._begun_s, self._beat = 0, -1, "", time.time(), 0
        self._write_state("running")
        self._write_operation()
        self._write_beat()
        self._stop.clear()
        self._thread = threading.Thread(target=self._heartbeats, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._write_state("done")
        else:
            self.raised(error)
        self._stop.set()
        assert self._thread is not None, "entered"
        self._thread.join()
        os.close(self._file)
        self._file = -1

    def operation(self, text: str) -> None:
        """Record that an exchange begins; its first 200 characters are kept. 2 to 5 microseconds."""
        self._number += 1
        self._text, self._begun_s = text, time.time()
        self._write_operation()
        if self._state == "failed":  # somebody caught the error and goes on
            self._write_state("running")

    def step(self, number: int) -> None:
        """Record the optimizer step that begins."""
        self._step = number
        self._write_operation()

    def raised(self, error: BaseException) -> None:
        """Record that this rank fails: by an error of its own, or because an exchange broke under it.

        An error of its own stands: what it leads to, and what it is wrapped in later, do not replace it.
        """
        if self._state == "raised":
            return
        if not is_exchange_error(error):
            self._write_state("raised", f"{type(error).__name__}: {error}")
        elif self._state != "failed":
            self._write_state("failed", str(error))

    @contextmanager
    def guard(self, text: str) -> Iterator[None]:
        """Record the operation, and raise RankLostError where an exchange inside fails on others' account."""
        self.operation(text)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankLostError) or not is_exchange_error(error):
                self.raised(error)
                raise
            raise self.explain(error) from error

    def explain(self, error: BaseException, *, patience_s: float | None = None) -> RankLostError:
        """Find out on whose account this rank's exchange failed with `error`.

        patience_s: seconds to look at most, None for 8 heartbeats; silence shows after 4, everything else as
        soon as it is there.   Returns the error to raise. Raises ValueError for a patience below 0.
        """
        patience_s = 8 * self.interval_s if patience_s is None else patience_s
        if not patience_s >= 0:
            raise ValueError(f"patience_s={patience_s} must be 0 or more seconds; None means 8 heartbeats")
        self._write_state("failed", str(error))  # first of all: nobody shall take this rank for the cause
        begun, first = time.monotonic(), {r: read_record(self.folder, r) for r in self._others()}
        while True:
            watched_s = time.monotonic() - begun
            findings = [self._judge(r, first[r], watched_s) for r in self._others()]
            if watched_s >= patience_s or any(f.kind in SURE for f in findings):
                break
            time.sleep(min(0.05, self.interval_s / 4, patience_s - watched_s))
        lost = self._conclude(error, findings)
        if lost.rank is not None:
            self._write_state("failed", f"it blames rank {lost.rank} ({lost.kind}) for: {error}")
        return lost

    def _others(self) -> Iterator[int]:
        return (r for r in range(self.world_size) if r != self.rank)

    def _own(self) -> Record:
        return Record(number=self._number, step=self._step, operation=self._text, begun_s=self._begun_s)

    def _judge(self, rank: int, first: Record | None, watched_s: float) -> Finding:
        """What the record of a rank says now, given what it said when we began to look."""
        now = read_record(self.folder, rank) or first
        if now is None:
            return Finding(rank=rank, kind="absent", text="left no readable record", record=Record())
        alive = now.state == "running" and process_state(now) in ("alive", "stopped")
        if now == self._at_start.get(rank) and not alive:
            before = f" (before that: {now.state} {now.message}".rstrip() + ")"
            text = "gave no sign of life since this rank started" + before
            return Finding(rank=rank, kind="absent", text=text, record=Record())
        kind, text = fate(now, first, self._own(), watched_s)
        return Finding(rank=rank, kind=kind, text=text, record=now)

    def _conclude(self, error: BaseException, findings: Sequence[Finding]) -> RankLostError:
        """Name the surest of the findings; of ranks elsewhere, one that still runs, the furthest behind."""
        order = {kind: place for place, kind in enumerate((*SURE, *LIKELY))}
        suspects = sorted(
            (f for f in findings if f.kind),
            key=lambda f: (order[f.kind], f.record.state == "failed", f.record.number),
        )
        own = self._own().where
        worst = suspects[0] if suspects else None
        if worst is not None:
            process = f" (pid {worst.record.pid} on {worst.record.host})" if worst.record.pid else ""
            head = f"rank {worst.rank}{process}: {worst.text}. Its last operation: {worst.record.where}."
            rank, kind, operation = worst.rank, worst.kind, worst.record.operation
        else:
            head, rank, kind, operation = "no rank is visibly at fault.", None, "", ""
        lines = [f"rank {f.rank}: {f.text}; last at {f.record.where}" for f in findings if f is not worst]
        step = f"step {self._step}: " if self._step >= 0 else ""
        message = "\n  ".join(
            [f"{step}{head} This is rank {self.rank}, at {own}.", *lines, f"what this rank saw: {error}"]
        )
        return RankLostError(message, rank=rank, kind=kind, operation=operation, own_operation=self._text)

    def _heartbeats(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._write_beat()
            except OSError as error:  # training goes on; the others see these heartbeats stop
                warnings.warn(f"rank {self.rank} cannot write its heartbeat: {error}", stacklevel=1)

    def _write_beat(self) -> None:
        self._beat += 1
        beat = {"interval_s": self.interval_s, "beat": self._beat, "beat_s": time.time()}
        self._write(BEAT, json.dumps({**own_place(), **beat}))

    def _write_operation(self) -> None:
        self._write(OPERATION, f"{self._number} {self._step} {self._begun_s:.3f} {self._text}")

    def _write_state(self, state: str, message: str = "") -> None:
        self._state = state
        self._write(STATE, f"{state} {message}")

    def _write(self, start: int, text: str) -> None:
        if self._file < 0:
            raise RuntimeError(f"the watch of rank {self.rank} is not open; use it inside `with Watch(...)`")
        write_area(self._file, start, text)


class WatchedExchange:
    """An exchange whose calls are recorded, and whose failures say which rank is at fault.

    The name of a call comes from `moe.naming.tag`, else it is the method's; " forward" or " backward" follows
    (a forward that is recomputed inside a backward counts as backward). Other attributes are the wrapped
    one's: a further collective among them belongs under `watch.guard`, both its start and its wait.
    """

    def __init__(self, exchange: Exchange, watch: Watch) -> None:
        self.exchange, self.watch = exchange, watch
        self.size, self.rank = exchange.size, exchange.rank

    def __getattr__(self, name: str) -> Any:
        if name == "exchange":  # not set yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.exchange, name)

    def all_gather(self, row_X: torch.Tensor) -> torch.Tensor:
        """[X] on every rank -> [P, X] on every rank. Raises RankLostError."""
        with self.watch.guard(_called("all_gather")):
            return self.exchange.all_gather(row_X)

    def send_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """All-to-all-v of rows, without gradient. Raises RankLostError."""
        with self.watch.guard(_called("send_rows")):
            return self.exchange.send_rows(rows_RD, input_splits, output_splits)

    def start_rows(
        self, rows_RD: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> Transfer:
        """Start an all-to-all-v of rows, without gradient. It and the wait raise RankLostError."""
        text = _called("start_rows")
        with self.watch.guard(text):
            transfer = self.exchange.start_rows(rows_RD, input_splits, output_splits)
        return _WatchedTransfer(transfer, self.watch, text + ", wait")


class _WatchedTransfer(Transfer):
    """Rows in flight whose wait is an operation of its own: it is the wait that fails when a peer is lost."""

    def __init__(self, transfer: Transfer, watch: Watch, text: str) -> None:
        self._transfer, self._watch, self._text = transfer, watch, text

    def wait(self) -> torch.Tensor:
        """The rows that have arrived."""
        with self._watch.guard(self._text):
            return self._transfer.wait()


def _called(method: str) -> str:
    return f"{current_tag() or method} {'backward' if in_backward() else 'forward'}"
