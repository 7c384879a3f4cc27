"""PhaseTimer: where the time of a step goes, phase by phase, without slowing it."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class PhaseTimer:
    """Sums the time of named phases until `read`.

    On CPU by the clock; on CUDA by events, which are read (and waited for) in `read` only.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((phase, start, end))
            return
        begun = time.perf_counter()
        yield
        self._add(phase, time.perf_counter() - begun)

    def read(self) -> dict[str, float]:
        """Milliseconds of every phase since the last read; starts anew."""
        if self._on_gpu:
            torch.cuda.synchronize()
            for phase, start, end in self._events:
                self._add(phase, start.elapsed_time(end) / 1e3)
        milliseconds = {phase: seconds * 1e3 for phase, seconds in self._seconds.items()}
        self._seconds, self._events = {}, []
        return milliseconds

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


def no_timer(phase: str) -> AbstractContextManager[None]:
    """The timer of a layer that is not timed."""
    return nullcontext()
