"""Work spread over processes: one function over many items, with progress, ended by Ctrl-C.

At the bottom of the balancer, for what takes seconds an item (fits of statsmodels). The processes are started
afresh, so a script that calls this needs the `if __name__ == "__main__":` guard.
"""

import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

Progress = Callable[[int, int], object]
Item = TypeVar("Item")
Result = TypeVar("Result")


def check_workers(workers: int) -> None:
    """Raise ValueError for less than one process."""
    if workers < 1:
        raise ValueError(f"workers={workers} processes must be at least 1")


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, progress: Progress | None
) -> list[Result]:
    """Return function(item) of every item, in order; the same for any number of processes.

    function: of a module, or a functools.partial of one. workers: 1 works in this process. progress(done,
    total) is called after each item. Ctrl-C, or an item that raises, drops what has not begun; the workers
    end with the item in hand.
    """
    if workers == 1 or len(items) < 2:
        results: list[Result] = []
        for item in items:
            results.append(function(item))
            if progress is not None:
                progress(len(results), len(items))
        return results
    pool = ProcessPoolExecutor(min(workers, len(items)), get_context("spawn"), _ignore_interrupt)
    try:
        with _one_thread_each():
            futures = [pool.submit(function, item) for item in items]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()  # raises what the item raised
            if progress is not None:
                progress(done, len(items))
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread_each() -> Generator[None]:
    """Let processes started inside use one thread each for linear algebra: the matrices are 3 by 3."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
