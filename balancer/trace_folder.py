"""The folder form of a load trace: a header and one append-only file of raw rows.

Under `balancer/trace.py`, which turns these arrays into a `Trace`. Nothing here is executed from a file.

    header.json   {"format", "version", "num_layers": L, "num_experts": E, "meta": {...}}
    rows.i64      little-endian int64, one row a sample:  step | layer 0: E counts | ... | layer L-1: E counts

Rows are appended whole, so a crash leaves at most one torn row at the end.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from balancer.files import replace_whole

FORMAT = "counterpoise-load-trace"
VERSION = 1
HEADER_NAME = "header.json"
ROWS_NAME = "rows.i64"
ROW_DTYPE = np.dtype("<i8")
# steps lie below this: a step and a horizon of up to as much can be added in int64
STEP_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What header.json says: shape_LE = (L, E), and the meta of the run."""

    shape_LE: tuple[int, int]
    meta: dict[str, Any]

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return (1 + self.shape_LE[0] * self.shape_LE[1]) * ROW_DTYPE.itemsize


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """The whole rows of a folder, read-only views of the mapped file, and what is torn behind them.

    steps_W: [W] int64. counts_WLE: [W, L, E] int64. torn_bytes: bytes of a last row that is not whole, 0 for
    none.
    """

    steps_W: NDArray[np.int64]
    counts_WLE: NDArray[np.int64]
    torn_bytes: int


def make_folder(folder: Path, shape_LE: tuple[int, int], meta: Mapping[str, Any]) -> None:
    """Make an empty trace. Raises ValueError where something is in the way, or for a meta that is no JSON."""
    record = {"format": FORMAT, "version": VERSION, "num_layers": shape_LE[0], "num_experts": shape_LE[1]}
    text = to_json({**record, "meta": dict(meta)}, folder / HEADER_NAME)
    try:
        folder.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{folder}: something is there already; choose another path, or continue the trace that it holds "
            "with resume_after_step=STEP"
        ) from None
    # the rows first: a folder with a header is complete
    (folder / ROWS_NAME).touch()
    replace_whole(folder / HEADER_NAME, [text.encode("ascii"), b"\n"])


def cut_folder(
    folder: Path, shape_LE: tuple[int, int], meta: Mapping[str, Any] | None, after_step: int
) -> int:
    """Cut off the rows of steps beyond `after_step`, and a torn last row; return the last step, -1 for none.

    Raises ValueError for a missing or broken trace, other sizes, or another meta (None: as it is).
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no trace to continue after step {after_step}; leave resume_after_step out to make one"
        )
    header = read_header(folder)
    if header.shape_LE != shape_LE:
        raise ValueError(
            f"{folder}: holds [L, E] = {header.shape_LE}, not {shape_LE}; resume with the same model"
        )
    if meta is not None:
        _check_same_meta(folder, header.meta, json.loads(to_json(dict(meta), folder)))
    steps_W = map_rows(folder, header).steps_W
    check_steps(steps_W, f"{folder / ROWS_NAME}: ")
    keep = int(np.searchsorted(steps_W, after_step, side="right"))
    with open(folder / ROWS_NAME, "r+b") as file:
        file.truncate(keep * header.row_bytes)
        os.fsync(file.fileno())
    return int(steps_W[keep - 1]) if keep else -1


def read_header(folder: Path) -> Header:
    """Read and check header.json. Raises ValueError naming the file and the field that is wrong."""
    place = folder / HEADER_NAME
    try:
        record = json.loads(place.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no load trace there, {HEADER_NAME} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not the JSON header of a load trace ({error})") from None
    fields = cast("dict[str, Any]", record) if isinstance(record, dict) else {}
    if fields.get("format") != FORMAT:
        raise ValueError(f"{place}: format is {fields.get('format')!r}, not {FORMAT!r}: no load trace")
    if fields.get("version") != VERSION:
        raise ValueError(
            f"{place}: version is {fields.get('version')!r}, this program reads {VERSION}; "
            "read it with the program that wrote it"
        )
    for name in ("num_layers", "num_experts"):
        size = fields.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{place}: {name} is {size!r}, expected an integer of at least 1")
    meta = fields.get("meta")
    if not isinstance(meta, dict):
        raise ValueError(f"{place}: meta is {meta!r}, expected a JSON object")
    shape_LE = (int(fields["num_layers"]), int(fields["num_experts"]))
    return Header(shape_LE=shape_LE, meta=cast("dict[str, Any]", meta))


def map_rows(folder: Path, header: Header) -> Rows:
    """Map the whole rows of a folder. Raises ValueError for a missing file; contents are not checked."""
    place = folder / ROWS_NAME
    if not place.is_file():
        raise ValueError(f"{folder}: {ROWS_NAME} is missing; the trace was copied without its rows")
    num_rows, torn_bytes = divmod(place.stat().st_size, header.row_bytes)
    num_values = header.row_bytes // ROW_DTYPE.itemsize
    if num_rows:  # an empty file cannot be mapped
        rows = np.asarray(np.memmap(place, dtype=ROW_DTYPE, mode="r", shape=(num_rows, num_values)))
    else:
        rows = np.zeros((0, num_values), dtype=ROW_DTYPE)
    # no copy on a little-endian machine: the counts stay a view of the file
    native = rows.astype(np.int64, copy=False)
    counts_WLE = native[:, 1:].reshape(num_rows, *header.shape_LE)
    return Rows(steps_W=native[:, 0].copy(), counts_WLE=counts_WLE, torn_bytes=torn_bytes)


def check_steps(steps_W: NDArray[np.int64], where: str = "") -> None:
    """Raise ValueError unless the steps are 0 or more, strictly increasing and below STEP_LIMIT.

    where: begins the message.
    """
    if steps_W.size and steps_W[0] < 0:
        raise ValueError(f"{where}record 0: step {steps_W[0]} is negative")
    falls = np.flatnonzero(steps_W[1:] <= steps_W[:-1])
    if falls.size:
        w = int(falls[0]) + 1
        raise ValueError(
            f"{where}record {w}: step {steps_W[w]} does not come after step {steps_W[w - 1]}; "
            "steps must increase strictly"
        )
    if steps_W.size and steps_W[-1] >= STEP_LIMIT:
        w = int(np.searchsorted(steps_W, STEP_LIMIT))
        raise ValueError(
            f"{where}record {w}: step {steps_W[w]} must be below 2^62 = {STEP_LIMIT}; no run is that long: "
            "the steps are damaged"
        )


def to_json(record: Mapping[str, Any], place: Path) -> str:
    """Return a record as one line of strict JSON. Raises ValueError for what JSON cannot hold."""
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place}: meta must hold JSON only (text, finite numbers, lists, dicts): {error}"
        ) from None


def _check_same_meta(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if different:
        key = different[0]
        raise ValueError(
            f"{folder}: meta differs in {', '.join(different)} ({key}: {old.get(key)!r} there, "
            f"{new.get(key)!r} given); resume with the same meta, or with meta=None"
        )
