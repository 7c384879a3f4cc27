"""One JSON record a line: the truth of a run, of which every other view is derived.

Beside `balancer/dashboard.py`, which shows the same figures in TensorBoard. Every record has a "step". A line
is written whole and at once, so a crash leaves at most one torn line, at the end.
"""

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from balancer.files import append_whole, replace_whole


class JsonlSink:
    """Appends records to a JSONL file.

    path: the file. resume_after_step: None makes it and refuses an existing one; a step continues the
    existing one, without its lines of later steps and its torn last line (the new file is written aside and
    put in place whole). Use it as a context manager, or call `close`. Raises ValueError for a file in the
    way, a missing one on resume, or a line in it that is no record.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_after_step: int | None = None) -> None:
        self._path = Path(path)
        if resume_after_step is not None:
            _cut(self._path, resume_after_step)
        elif self._path.exists():
            raise ValueError(
                f"{self._path}: already there; choose another path, or continue it with "
                "resume_after_step=STEP"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record as one line, at once.

        record: JSON-like, numpy scalars and arrays included, with "step", an integer of 0 or more; NaN and
        infinity become null. Raises ValueError for a missing step or a value that JSON cannot hold; then
        nothing is written.
        """
        if self._file.closed:
            raise ValueError(f"{self._path}: closed; write before close()")
        if not _is_step(record.get("step")):
            raise ValueError(
                f"{self._path}: step={record.get('step')!r} of a record must be an integer of 0 or more"
            )
        line = json.dumps(_plain(dict(record), "record"), allow_nan=False) + "\n"
        append_whole(self._file, line.encode("ascii"))

    def flush(self) -> None:
        """Bring all lines to the disk (fsync): call it before a checkpoint counts as complete."""
        if self._file.closed:
            raise ValueError(f"{self._path}: closed; flush before close()")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a JSONL file, in order.

    path: what a `JsonlSink` wrote; null stays None. A torn last line is dropped with a warning that says how
    many bytes. Raises ValueError naming the file and the line for a missing file or a line that is no record.
    """
    place = Path(path)
    records = [record for _, record in _whole_lines(place)]
    data = place.read_bytes()
    torn = len(data) - (data.rfind(b"\n") + 1)
    if torn:
        warnings.warn(f"{place}: the last line is torn: {torn} bytes dropped", stacklevel=2)
    return records


def _whole_lines(place: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, record) of every line that ends in a newline."""
    if not place.is_file():
        raise ValueError(f"{place}: no such file")
    with open(place, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}, line {number}: not JSON ({error})") from None
            if not isinstance(record, dict) or not _is_step(cast("dict[str, Any]", record).get("step")):
                raise ValueError(f'{place}, line {number}: no record with an integer "step"')
            yield line, cast("dict[str, Any]", record)


def _cut(place: Path, after_step: int) -> None:
    if not place.is_file():
        raise ValueError(
            f"{place}: no file to continue after step {after_step}; leave resume_after_step out to start one"
        )
    replace_whole(place, (line for line, record in _whole_lines(place) if record["step"] <= after_step))


def _is_step(value: object) -> bool:
    if isinstance(value, np.integer):
        value = cast("np.integer[Any]", value).item()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _plain(value: Any, name: str) -> Any:
    """Return what JSON can hold: numpy becomes plain, NaN and infinity become None. name: for an error."""
    if isinstance(value, np.generic | np.ndarray):
        value = cast("NDArray[Any]", value).tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(part, f"{name}[{i}]") for i, part in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        wrong = [key for key, _ in items if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"{name}: key {wrong[0]!r} is {type(wrong[0]).__name__}; JSON keys are text")
        return {key: _plain(part, f"{name}[{key!r}]") for key, part in items}
    raise ValueError(
        f"{name} is {type(value).__name__}, which JSON cannot hold; pass numbers, text, lists, dicts"
    )
