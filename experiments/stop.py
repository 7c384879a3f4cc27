"""Stop: the signal that ends a run after its step. Light to import, so that it is in place from the start."""

import os
import signal
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# A launcher and the terminal may both signal for one Ctrl-C (deepspeed: SIGINT, then SIGTERM at once). What
# comes
# within this time of the first is the same wish; what comes later ends the process.
SAME_WISH_S = 2.0


@dataclass(slots=True)
class StopSignal:
    """Set by Ctrl-C or SIGTERM: the run saves after this step. Another signal, 2 s later or more, ends it at
    once."""

    received: bool = False
    _at_s: float = 0.0
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._at_s = True, now
        elif now - self._at_s >= SAME_WISH_S:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
