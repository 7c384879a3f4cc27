"""Load traces: how many copies every expert of every layer got, over training steps.

Second in the flow of the balancer: training writes a trace through `TraceWriter`, everything offline
(forecasts, replay, plots) starts from `load_trace`. On disk a trace is a folder (`balancer/trace_folder.py`:
header and append-only raw rows, memory-mapped, so that a long trace costs no memory) or an npz:

    counts [W, L, E] of any integer dtype, steps (or iters) [W] integer, meta (text, JSON object; optional)

What other tools record is read too: `balancer/trace_formats.py` lists the forms.
"""

import operator
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.files import append_whole
from balancer.trace_folder import (
    HEADER_NAME,
    ROW_DTYPE,
    ROWS_NAME,
    STEP_LIMIT,
    check_steps,
    cut_folder,
    make_folder,
    map_rows,
    read_header,
    to_json,
)
from balancer.trace_formats import find_format, read_loads
from balancer.trace_values import INT64_MAX, as_int64, shown

# values looked at together when a trace is checked: 16 MiB keep a memory-mapped trace out of memory
_CHECK_VALUES = 2**21
# A row holds the counts of one step: 1 GiB of them is more than any model has.
MAX_ROW_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The load of every expert over time, checked once.

    tokens_per_expert_WLE: [W, L, E] int64, routed copies of each logical expert, at most (2^63 - 1) / E, so
    that a layer's sum is int64 too. steps_W: [W] int64, training step of each sample, 0 or more and below
    2^62, strictly increasing. meta: facts about the run ("copies_per_step": the copies that every layer
    routes in a step, where constant). Take the arrays as read-only. Raises ValueError for a wrong type or
    shape, a count or step out of range, or steps that do not increase, naming record and field.
    """

    tokens_per_expert_WLE: NDArray[np.int64]
    steps_W: NDArray[np.int64]
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        counts, steps = self.tokens_per_expert_WLE, self.steps_W
        for name, array, axes in (("tokens_per_expert_WLE", counts, 3), ("steps_W", steps, 1)):
            if array.dtype != np.int64 or array.ndim != axes:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, expected int64 with {axes} axes")
        if counts.shape[0] != steps.shape[0] or 0 in counts.shape[1:]:
            raise ValueError(
                f"tokens_per_expert_WLE has shape {counts.shape} and steps_W {steps.shape}; expected one "
                "[L, E] of at least one layer and one expert for each step"
            )
        check_steps(steps)
        _check_counts(counts, steps)


def load_trace(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    num_experts: int | None = None,
    assume_map_constant: bool = False,
) -> Trace:
    """Read a load trace of any form that `balancer/trace_formats.py` lists.

    path: a folder that a `TraceWriter` wrote (memory-mapped; a run's folder means its loads/), an npz, or
    what another tool recorded. format: its form; None tells it from the ending and the first bytes.
    num_experts: E, for router traces that do not say it; checked where they do. assume_map_constant: SGLang's
    physical counts are read with the dump's last map, because no rebalance happened while they were taken.
    Returns the Trace; the meta of what another tool recorded has "source", its form, and "copies_per_step"
    where constant. What is left out (a torn last row, unused buffer rows) is told in a warning. Raises
    ValueError naming file, record and field for anything that is wrong, and for sums that are not what the
    file itself says.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TraceWriter(folder + "/loads", 1, 2) as writer:
    ...         writer.append(10, [[3, 1]])
    ...     load_trace(folder + "/loads").tokens_per_expert_WLE
    array([[[3, 1]]])
    """
    if num_experts is not None and num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    place, form = find_format(Path(path), format)
    if assume_map_constant and form != "sglang-pt":
        raise ValueError(f"{place}: assume_map_constant is for sglang-pt dumps; the form here is {form}")
    if form == "folder":
        trace = _load_folder(place)
    else:
        loads = read_loads(place, form, num_experts, assume_map_constant)
        trace = _named(place, loads.counts_WLE, loads.steps_W, loads.meta)
        if loads.copies_W is not None:
            _check_stated(place, trace, loads.copies_W)
    found = trace.tokens_per_expert_WLE.shape[2]
    if num_experts is not None and found != num_experts:
        raise ValueError(f"{place}: holds {found} experts, num_experts={num_experts} was given")
    return trace


def save_npz(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace as one compressed npz that `load_trace` reads.

    path: a new file whose name ends in .npz. Raises ValueError for an existing file, another ending, or a
    meta that is not JSON.
    """
    place = Path(path)
    if place.suffix != ".npz":
        raise ValueError(f"{place}: the name of an npz trace must end in .npz")
    if place.exists():
        raise ValueError(f"{place}: something is there already; choose another name")
    meta = np.array(to_json(trace.meta, place))
    np.savez_compressed(place, counts=trace.tokens_per_expert_WLE, steps=trace.steps_W, meta=meta)


def check_conservation(trace: Trace, copies: ArrayLike | None = None) -> None:
    """Check that every layer of every sample routed exactly the copies that it was given.

    copies: integer, the same for all samples, or [W] one for each; None takes trace.meta["copies_per_step"].
    Raises ValueError with the first step and layer that are off, by how much, and how many are off in all;
    also where there is nothing to check against.
    """
    given = trace.meta.get("copies_per_step") if copies is None else copies
    if given is None:
        raise ValueError('no copies to check against; pass copies=, or record meta["copies_per_step"]')
    expected_W = np.asarray(given)
    num_samples = trace.steps_W.shape[0]
    if expected_W.dtype.kind not in "iu" or expected_W.shape not in ((), (num_samples,)):
        raise ValueError(
            f"copies={given!r} must be an integer, or one integer for each of {num_samples} samples"
        )
    held_WL = trace.tokens_per_expert_WLE.sum(axis=-1)
    off_WL = held_WL - expected_W.astype(np.int64).reshape(-1, 1)
    wrong = np.argwhere(off_WL)
    if wrong.size:
        w, layer = (int(i) for i in wrong[0])
        held, off = int(held_WL[w, layer]), int(off_WL[w, layer])
        raise ValueError(
            f"step {trace.steps_W[w]}, layer {layer}: the experts hold {held} copies, {abs(off)} too "
            f"{'many' if off > 0 else 'few'} (expected {held - off}); {len(wrong)} of {off_WL.size} records "
            "are off: counts were lost, taken twice, or belong to another step"
        )


class TraceWriter:
    """Appends the loads of a training run to a trace folder.

    path: folder to make. num_layers: L. num_experts: E. meta: JSON-like facts, kept in the header.
    resume_after_step: None makes the folder and refuses an existing one; a step continues the existing one of
    the same sizes and meta (None: as it is), without its rows of later steps and its torn last row. Use it as
    a context manager, or call `close`. Raises ValueError for anything in the way or different. An append that
    the disk refuses raises OSError and leaves the file at its last whole row.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_layers: int,
        num_experts: int,
        meta: Mapping[str, Any] | None = None,
        resume_after_step: int | None = None,
    ) -> None:
        for name, size in (("num_layers", num_layers), ("num_experts", num_experts)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self._folder = Path(path)
        self._shape_LE = (num_layers, num_experts)
        self._last_step = -1
        if resume_after_step is None:
            make_folder(self._folder, self._shape_LE, meta or {})
        else:
            self._last_step = cut_folder(self._folder, self._shape_LE, meta, resume_after_step)
        # unbuffered: a row reaches the system whole, and an error meets the append that caused it
        self._file = open(self._folder / ROWS_NAME, "ab", buffering=0)  # noqa: SIM115

    @property
    def last_step(self) -> int:
        """Step of the last row, -1 for none."""
        return self._last_step

    def append(self, step: SupportsIndex, tokens_per_expert_LE: ArrayLike) -> None:
        """Append the loads of one step.

        step: training step, more than that of the last row and below 2^62. tokens_per_expert_LE: [L, E]
        integer copies, 0 or more, at most (2^63 - 1) / E. Raises ValueError for anything else, or after
        `close`; then nothing is written.
        """
        if self._file.closed:
            raise ValueError(f"{self._folder}: the trace is closed; append before close()")
        number = operator.index(step)
        if number <= self._last_step:
            last = self._last_step
            raise ValueError(
                f"{self._folder}: step {number} must be {last + 1} or more; steps increase strictly"
            )
        if number >= STEP_LIMIT:
            raise ValueError(f"{self._folder}: step {shown(number)} must be below 2^62 = {STEP_LIMIT}")
        where = f"{self._folder}: step {number}: "
        counts_LE = as_int64(np.asarray(tokens_per_expert_LE), where + "tokens_per_expert_LE")
        if counts_LE.shape != self._shape_LE:
            raise ValueError(
                f"{where}tokens_per_expert_LE has shape {counts_LE.shape}, expected [L, E] = {self._shape_LE}"
            )
        try:
            _check_counts(counts_LE[None], np.array([number], dtype=np.int64))
        except ValueError as error:
            raise ValueError(f"{self._folder}: {error}") from None
        row = np.concatenate([np.array([number], dtype=ROW_DTYPE), counts_LE.ravel()])
        append_whole(self._file, row.astype(ROW_DTYPE, copy=False).tobytes())
        self._last_step = number

    def flush(self) -> None:
        """Bring all rows to the disk (fsync): call it before a checkpoint counts as complete."""
        if self._file.closed:
            raise ValueError(f"{self._folder}: the trace is closed; flush before close()")
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


def _load_folder(folder: Path) -> Trace:
    header = read_header(folder)
    if header.row_bytes > MAX_ROW_BYTES:
        raise ValueError(
            f"{folder / HEADER_NAME}: a row of {shown(header.row_bytes)} bytes, at most {MAX_ROW_BYTES} are "
            "read: num_layers or num_experts is damaged"
        )
    rows = map_rows(folder, header)
    if rows.torn_bytes:
        warnings.warn(
            f"{folder / ROWS_NAME}: the last row is torn: {rows.torn_bytes} of its {header.row_bytes} bytes "
            f"dropped, {len(rows.steps_W)} whole rows kept (the run was killed in a write, or writes now)",
            stacklevel=3,
        )
    return _named(folder / ROWS_NAME, rows.counts_WLE, rows.steps_W, header.meta)


def _check_stated(place: Path, trace: Trace, copies_W: NDArray[np.int64]) -> None:
    try:
        check_conservation(trace, copies_W)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _named(place: Path, counts: NDArray[np.int64], steps: NDArray[np.int64], meta: dict[str, Any]) -> Trace:
    """Make a Trace whose errors begin with the file."""
    try:
        return Trace(tokens_per_expert_WLE=counts, steps_W=steps, meta=meta)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _check_counts(counts_WLE: NDArray[np.int64], steps_W: NDArray[np.int64]) -> None:
    """Raise ValueError naming the first count out of range; in pieces: a mapped trace stays on disk."""
    num_samples, num_layers, num_experts = counts_WLE.shape
    most = INT64_MAX // num_experts
    piece = max(1, _CHECK_VALUES // (num_layers * num_experts))
    for start in range(0, num_samples, piece):
        block = counts_WLE[start : start + piece]
        if block.min() < 0 or block.max() > most:
            w, layer, expert = (int(i) for i in np.argwhere((block < 0) | (block > most))[0])
            count = int(block[w, layer, expert])
            raise ValueError(
                f"record {start + w} (step {steps_W[start + w]}), layer {layer}, expert {expert}: "
                + (
                    f"negative count {count}"
                    if count < 0
                    else f"count {count} must be at most {most}, or the sum of {num_experts} experts may "
                    "exceed int64: the counts are damaged"
                )
            )
