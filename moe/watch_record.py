"""Watch records: the file that one rank keeps about itself, and what a reader makes of it.

It stands below `moe.watch`: that one writes its own rank's record while it trains, and reads the others' when
an exchange has failed. A record has three areas of fixed size, each with its checksum and its one writer, so
no lock is needed and a torn area is seen as such:

    0     beat       by the heartbeat thread: rank, process, host, number and time of the last heartbeat
    512   operation  before every exchange: number, step, time, text (one pwrite; it survives a kill -9)
    768   state      running, raised (an error of its own), failed (an exchange broke under it) or done
"""

import json
import os
import socket
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT, OPERATION, STATE = 0, 512, 768  # where the areas start
MISSED_BEATS = 4  # that make a rank silent: one or two are late on a loaded machine
_END = {BEAT: OPERATION, OPERATION: STATE, STATE: 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one rank's file says. An area that was torn when read keeps its defaults.

    started: the kernel's start time of the process, which tells it from a later one with its pid;
    beat: heartbeats so far;  beat_s, begun_s: seconds since the epoch on its host, of the last heartbeat and
    of the start of the operation;  number: operations so far, this one included.
    """

    pid: int = 0
    started: str = ""
    host: str = ""
    namespace: str = ""
    interval_s: float = 0.5
    beat: int = -1
    beat_s: float = 0.0
    number: int = 0
    step: int = -1
    begun_s: float = 0.0
    operation: str = ""
    state: str = "running"
    message: str = ""

    @property
    def where(self) -> str:
        """Its last operation in words."""
        if not self.number:
            return "no exchange yet"
        step = f", step {self.step}" if self.step >= 0 else ""
        return f"{self.operation} (operation {self.number}{step})"


def write_area(file: int, start: int, text: str) -> None:
    """Write one area whole, in one call; what is too long for it is cut off.

    file: descriptor of a record open for writing;  start: BEAT, OPERATION or STATE.   Raises OSError.
    """
    size = _END[start] - start
    body = text.encode("utf-8", "replace")[: size - 10].ljust(size - 10)
    os.pwrite(file, b"%08x %b\n" % (zlib.crc32(body), body), start)


def own_place() -> dict[str, Any]:
    """The fields of a Record that say which process this is, and where: pid, started, host, namespace."""
    place = {"host": socket.gethostname(), "namespace": _pid_namespace()}
    return {"pid": os.getpid(), "started": process_stat("self")[1], **place}


def read_record(folder: Path, rank: int) -> Record | None:
    """The record of a rank; None where there is none, or its process stays unreadable over a few tries."""
    record = None
    for _ in range(5):
        try:
            raw = (folder / f"rank-{rank}").read_bytes()
        except OSError:
            return record
        areas = [_area(raw, offset) for offset in (BEAT, OPERATION, STATE)]
        record = _parse(*areas) or record
        if None not in areas:
            return record
        time.sleep(0.002)  # torn: its writer is at it
    return record


def _parse(beat: str | None, operation: str | None, state: str | None) -> Record | None:
    """The areas as a record; a torn operation or state keeps its defaults, a torn beat gives None."""
    if beat is None:
        return None
    number, step, begun_s, text = (operation or "0 -1 0 ").split(" ", 3)
    name, _, message = (state or "running ").partition(" ")
    try:
        fields: dict[str, Any] = json.loads(beat)
        fields |= {"number": int(number), "step": int(step), "begun_s": float(begun_s)}
        return Record(**fields, operation=text.rstrip(), state=name, message=message.rstrip())
    except (ValueError, TypeError):  # whole, and yet of another form: not one of ours
        return None


def _area(raw: bytes, offset: int) -> str | None:
    """The text of an area, None where its checksum says that it is torn."""
    area = raw[offset : _END[offset]]
    body = area[9:-1]
    return body.decode("utf-8", "replace") if area[:8] == b"%08x" % zlib.crc32(body) else None


def fate(now: Record, first: Record | None, own: Record, watched_s: float) -> tuple[str, str]:
    """What became of a rank, seen by one whose exchange failed: a kind ("" for no fault), and it in words.

    now, first: its record now and as we began to look;  own: the looker's, for what it is at;  watched_s:
    seconds from first to now.   The kinds are those of `moe.watch.RankLostError`.
    """
    if now.state == "raised":
        return "raised", f"raised {now.message}"
    if now.state == "done":
        return "left", "left the job without an error, while this rank still had exchanges to do"
    if now.state == "running":
        fault = _fault(now, first, watched_s)
        if fault is not None:
            return fault
    elsewhere = (now.operation, now.step, now.number) != (own.operation, own.step, own.number)
    place = "at another operation" if elsewhere else "at the same operation"
    kind = "elsewhere" if elsewhere else ""
    if now.state == "failed":
        return kind, f"was {place} when an exchange failed there too: {now.message}"
    return kind, f"is alive, {place}"


def _fault(now: Record, first: Record | None, watched_s: float) -> tuple[str, str] | None:
    """How a process that says it runs does not: gone, stopped or silent; None where it does run."""
    process = process_state(now)
    age = f"last heartbeat {max(0.0, time.time() - now.beat_s):.1f} s ago by its clock"
    if process == "gone":
        return "gone", f"its process is gone ({age})"
    if process == "stopped":
        return "stopped", f"its process is stopped by a signal ({age})"
    same = first is not None and now.beat == first.beat
    if same and watched_s >= MISSED_BEATS * now.interval_s:
        exists = " though its process exists" if process == "alive" else ""
        return "silent", f"its heartbeats stopped{exists} ({age})"
    return None


def process_state(record: Record) -> str:
    """gone, stopped or alive: the process of a record; "unknown" where it belongs to another host.

    A zombie is gone, its sockets closed.
    """
    if (record.host, record.namespace) != (socket.gethostname(), _pid_namespace()):
        return "unknown"
    state, started = process_stat(str(record.pid))
    if not state or state in "ZX" or started != record.started:
        return "gone"
    return "stopped" if state in "Tt" else "alive"


def process_stat(pid: str) -> tuple[str, str]:
    """State letter and start time of a process from /proc; ("", "") where it is gone.

    Where there is no /proc at all, every process that takes a signal counts as running: ("R", "").
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return "", ""
    with suppress(PermissionError):  # it exists and is somebody else's
        try:
            os.kill(os.getpid() if pid == "self" else int(pid), 0)
        except ProcessLookupError:
            return "", ""
    return "R", ""


def _pid_namespace() -> str:
    """What tells apart two containers with one host name: their pids mean different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
