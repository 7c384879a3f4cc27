"""Progress: a bar on a terminal, one line per interval elsewhere."""

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm


class Progress:
    """What a person sees while a run goes on.

    start, total: first and last step;  shown: False on ranks that say nothing.
    """

    def __init__(self, start: int, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._begun, self._start = time.perf_counter(), start
        self._bar: tqdm | None = None
        if shown and sys.stderr.isatty() and sys.stdout.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update(1)

    def show(self, step: int, figures: Mapping[str, str]) -> None:
        """The figures of a logged step."""
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(f"{name} {value}" for name, value in figures.items()))
        elif self._shown:
            text = "  ".join(f"{name} {value}" for name, value in figures.items())
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {text}  left {self._left(step)}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _left(self, step: int) -> str:
        per_step = (time.perf_counter() - self._begun) / max(1, step - self._start)
        seconds = int(per_step * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
