"""Starts the ranks of a run on this machine and sees them to their end.

It stands between the command line and the training: `counterpoise train` comes here when no other launcher
has set RANK, and each rank then runs the training module as if torchrun had started it. Several machines
are the deepspeed launcher's business: `exec_hostfile` hands over to it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TypeAlias

Process: TypeAlias = "subprocess.Popen[bytes]"
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def launch(
    argv: Sequence[str],
    num_ranks: int,
    *,
    module: str = "experiments.train",
    grace_s: float = 25.0,
    poll_s: float = 0.05,
) -> int:
    """Runs `python -m module *argv` once per rank and returns the exit code of the whole.

    num_ranks: processes, rank 0 .. num_ranks - 1, all on this machine. grace_s: seconds between SIGTERM and
    SIGKILL for ranks that must end because another died. poll_s: seconds between two looks at the ranks.

    The result is 0 when every rank returned 0; the code of the first rank that failed (128 + the signal's
    number when a signal ended it); 130 when the run was interrupted and every rank then returned 0.

    The first Ctrl-C (or SIGTERM, SIGHUP) reaches every rank once, as SIGINT, and the ranks are waited for:
    they finish the step and save. A second one sends SIGTERM (which the ranks take as the same wish when it
    comes
    within two seconds), a third SIGKILL. No process of the run is left behind, unless this one is killed by
    SIGKILL itself, which leaves it no chance. Rank 0 writes to this process's own stdout and stderr; the
    lines of the others carry "[rank N] ".
    Raises ValueError for num_ranks < 1.
    """
    if num_ranks < 1:
        raise ValueError(
            f"--ranks {num_ranks} must be at least 1; 2 is a good number for a machine without GPU"
        )
    ranks: list[Process] = []
    readers: list[threading.Thread] = []
    with _signals() as received:
        try:
            shared = _environment(num_ranks)
            for rank in range(num_ranks):
                ranks.append(_start_rank(module, argv, rank, shared))
                readers += _pass_on(rank, ranks[-1])
            return _watch(ranks, received, grace_s, poll_s)
        finally:
            _sweep(ranks, readers)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(num_ranks: int) -> dict[str, str]:
    """What all ranks share; settings of the user's own are kept."""
    environment = dict(os.environ)
    environment.update(
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if "DS_ACCELERATOR" not in environment and not _has_cuda():
        environment["DS_ACCELERATOR"] = "cpu"
    root = Path(__file__).resolve().parent.parent
    if not {"site-packages", "dist-packages"} & set(root.parts):  # a checkout, perhaps not installed
        previous = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(root) + (os.pathsep + previous if previous else "")
    return environment


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _start_rank(module: str, argv: Sequence[str], rank: int, shared: dict[str, str]) -> Process:
    environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    piped = subprocess.PIPE if rank else None
    if piped:
        environment.setdefault("PYTHONUNBUFFERED", "1")
    # -P: a folder called `moe` or `experiments` where the user stands must not shadow ours.
    # Its own session: the terminal's Ctrl-C reaches this process only, which then forwards it once.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=piped,
        stderr=piped,
        start_new_session=True,
    )


def _pass_on(rank: int, process: Process) -> list[threading.Thread]:
    """Threads that copy a rank's lines to our own stdout and stderr; none for rank 0, which has them."""
    threads: list[threading.Thread] = []
    for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if pipe is not None:
            threads.append(threading.Thread(target=_copy_lines, args=(rank, pipe, sink), daemon=True))
            threads[-1].start()
    return threads


def _copy_lines(rank: int, pipe: IO[bytes], sink: IO[str]) -> None:
    with pipe:
        for line in pipe:
            text = line.decode("utf-8", errors="replace")
            try:
                sink.write(f"[rank {rank}] {text}" if text.endswith("\n") else f"[rank {rank}] {text}\n")
                sink.flush()
            except (OSError, ValueError):
                pass  # our reader went away; go on reading, or the rank would block on a full pipe


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them; the old handlers come back afterwards."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the user wants it ignored
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _watch(ranks: Sequence[Process], received: list[int], grace_s: float, poll_s: float) -> int:
    """Waits for all ranks, forwards what is received, ends the others when one fails; the exit code."""
    forwarded, failure, kill_at = 0, 0, float("inf")
    while True:
        codes = [_exit_code(process) for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and not failure:
            failure = codes[failed[0]] or 0
            _say(
                f"rank {failed[0]} {_death(failure)}"
                + ("" if None not in codes else "; ending the other ranks")
            )
            _signal_ranks(ranks, codes, signal.SIGTERM)
            kill_at = time.monotonic() + grace_s
        if None not in codes:
            break
        if len(received) > forwarded:
            forwarded += 1
            _forward(forwarded, ranks, codes)
        elif time.monotonic() > kill_at:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            _say(f"ranks {alive} did not end within {grace_s:g} s of SIGTERM: killing them")
            kill_at = float("inf")
            _signal_ranks(ranks, codes, signal.SIGKILL)
        time.sleep(poll_s)
    if failure:
        return 128 - failure if failure < 0 else failure
    return INTERRUPTED if received else 0


def _forward(count: int, ranks: Sequence[Process], codes: Sequence[int | None]) -> None:
    if count == 1:
        _say("interrupted: the ranks finish this step and save (again: end them now; once more: kill)")
        _signal_ranks(ranks, codes, signal.SIGINT)
    elif count == 2:
        _say("interrupted twice: ending the ranks")
        _signal_ranks(ranks, codes, signal.SIGTERM)
    else:
        _say("interrupted again: killing the ranks")
        _signal_ranks(ranks, codes, signal.SIGKILL)


def _exit_code(process: Process) -> int | None:
    """The exit code (minus the signal's number for a death by signal) without reaping; None while it runs.

    A rank that is not reaped keeps its process id, so that `_sweep` cannot hit a stranger's process group.
    """
    if process.returncode is not None:
        return process.returncode
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _signal_ranks(ranks: Sequence[Process], codes: Sequence[int | None], number: signal.Signals) -> None:
    for process, code in zip(ranks, codes):
        if code is None:
            os.kill(process.pid, number)  # not reaped yet, so the id is still its own


def _sweep(ranks: Sequence[Process], readers: Sequence[threading.Thread]) -> None:
    """Kills whatever is left of the ranks' sessions, their children included, and reaps the ranks."""
    for process in ranks:
        with suppress(ProcessLookupError, PermissionError):  # the latter: macOS, when only a zombie is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for reader in readers:
        reader.join(timeout=5)


def _death(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _say(text: str) -> None:
    print(f"counterpoise: {text}", file=sys.stderr, flush=True)


# ---- several machines -----------------------------------------------------------------------------------


def hostfile_command(argv: Sequence[str], hostfile: str) -> list[str]:
    """The deepspeed launcher's command line for these arguments of `train`.

    argv: the arguments as given, --hostfile among them; hostfile: its value, passed on unchanged. Raises
    ValueError when --ranks is given too (the hostfile's slots say how many) or the launcher is not installed.
    """
    rest, skip = [], False
    for argument in argv:
        if argument == "--ranks" or argument.startswith("--ranks="):
            raise ValueError("--ranks and --hostfile exclude each other: the hostfile's slots are the ranks")
        if not (skip or argument == "--hostfile" or argument.startswith("--hostfile=")):
            rest.append(argument)
        skip = argument == "--hostfile"
    beside = Path(sys.executable).with_name("deepspeed")
    program = str(beside) if beside.is_file() else shutil.which("deepspeed")
    if program is None:
        raise ValueError("the deepspeed launcher is not installed: run ./lab doctor, which installs it")
    return [program, "--hostfile", hostfile, str(Path(__file__).with_name("train.py")), *rest]


def exec_hostfile(argv: Sequence[str], hostfile: str) -> NoReturn:
    """Becomes the deepspeed launcher (see `hostfile_command`); ValueError when the hostfile is missing."""
    if not Path(hostfile).is_file():
        raise ValueError(f"--hostfile {hostfile}: no such file; it holds lines like `worker-1 slots=8`")
    command = hostfile_command(argv, hostfile)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)
