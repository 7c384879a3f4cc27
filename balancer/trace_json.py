"""Load traces as JSON: our own plain form, and what SGLang's --init-expert-location takes.

Under `balancer/trace_formats.py`.

    json         {"steps": [W], "tokens_per_expert": [W][L][E]}, a list of {"step", "tokens_per_expert":
                 [L][E]}, or such objects one a line; "num_tokens" and "top_k" (one number, or [W] beside
                 "steps") are checked against the sums; "meta" (an object, beside "steps") is kept
    sglang-json  {"logical_count": [L][E] or [W][L][E]}: it has no steps, they are counted from 0
"""

import re
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from balancer.trace_parts import Loads, StepRows, used_steps, with_copies
from balancer.trace_values import (
    as_record,
    count_table,
    parse_json,
    read_json,
    read_lines,
    shown,
    stated_copies,
    whole,
)

_WHOLE_FIELDS = {"steps", "tokens_per_expert", "num_tokens", "top_k", "meta"}
_STEP_FIELDS = {"step", "tokens_per_expert", "num_tokens", "top_k"}
# enough for the names of the fields, which stand before or between the counts of one sample
_HEAD_BYTES = 2**20
# what only a trace in one piece has at its beginning: a list around all, the steps, or tables [W][L][E]
_ONE_PIECE = re.compile(rb'\[|\{[^\n]*("steps"\s*:|"tokens_per_expert"\s*:\s*\[\s*\[\s*\[)')


def read_plain_json(place: Path) -> Loads:
    """Read the form "json". Raises ValueError naming file, record and field for anything else."""
    if not _begins_in_one_piece(place):
        lines = read_lines(place)
        where, first = next(lines, (str(place), ""))
        if first and _is_step_line(first, where) and next(lines, None) is not None:
            return _read_step_lines(place)
    value = read_json(place)
    if isinstance(value, list):
        return _read_list(place, cast("list[Any]", value))
    record = as_record(value, str(place))
    if "step" in record:
        return _read_list(place, [record])
    return _read_whole(place, record)


def _begins_in_one_piece(place: Path) -> bool:
    """Whether the first bytes tell that lines are no records: such a file may have lines of any length."""
    with open(place, "rb") as file:
        head = file.read(_HEAD_BYTES)
    return _ONE_PIECE.match(head.removeprefix(b"\xef\xbb\xbf").lstrip()) is not None


def _is_step_line(line: str, where: str) -> bool:
    """Whether a first line is a record of its own, and not the start of one spread over lines."""
    try:
        value = parse_json(line, where)
    except ValueError:
        return line.startswith("{") and '"step"' in line and line.endswith("}")
    return isinstance(value, dict)


def _read_step_lines(place: Path) -> Loads:
    rows, unread = StepRows(place), set[str]()
    for where, line in read_lines(place):
        _add_step(rows, as_record(parse_json(line, where), where), where, unread)
    _warn_unread(place, unread)
    return rows.finish({"source": "json"})


def _read_list(place: Path, records: list[Any]) -> Loads:
    rows, unread = StepRows(place), set[str]()
    for i, value in enumerate(records):
        where = f"{place}, record {i}"
        _add_step(rows, as_record(value, where), where, unread)
    _warn_unread(place, unread)
    return rows.finish({"source": "json"})


def _add_step(rows: StepRows, record: dict[str, Any], where: str, unread: set[str]) -> None:
    step = whole(record.get("step"), "step", where)
    table = count_table(record.get("tokens_per_expert"), "tokens_per_expert", where, floats=True)
    rows.add_sample(step, table, where)
    rows.state_copies(stated_copies(record, where), where)
    unread |= record.keys() - _STEP_FIELDS


def _read_whole(place: Path, record: dict[str, Any]) -> Loads:
    if "logical_count" in record or "physical_to_logical_map" in record:
        raise ValueError(f'{place}: fields of SGLang; read it with format="sglang-json"')
    steps, tables = record.get("steps"), record.get("tokens_per_expert")
    for name, value in (("steps", steps), ("tokens_per_expert", tables)):
        if not isinstance(value, list):
            raise ValueError(
                f"{place}: {name} is {shown(value)}, expected a list with an entry for each sample"
            )
    if len(steps or ()) != len(tables or ()):
        raise ValueError(
            f"{place}: {len(steps or ())} steps but {len(tables or ())} samples in tokens_per_expert"
        )
    num_samples = len(steps or ())
    tokens, top_k = (_each(record.get(name), num_samples, name, place) for name in ("num_tokens", "top_k"))
    rows = StepRows(place)
    for w in range(num_samples):
        where = f"{place}, record {w}"
        table = count_table(cast("Any", tables)[w], f"tokens_per_expert[{w}]", where, floats=True)
        rows.add_sample(whole(cast("Any", steps)[w], f"steps[{w}]", where), table, where)
        rows.state_copies(stated_copies({"num_tokens": tokens[w], "top_k": top_k[w]}, where), where)
    _warn_unread(place, record.keys() - _WHOLE_FIELDS)
    meta = as_record(record.get("meta", {}), f"{place}: meta")
    return rows.finish({"source": "json", **meta})


def _each(value: Any, num: int, name: str, place: Path) -> list[Any]:
    """Return one value for each sample: those of a list, or the same one."""
    if not isinstance(value, list):
        return [value] * num
    values = cast("list[Any]", value)
    if len(values) != num:
        raise ValueError(f"{place}: {name} holds {len(values)} numbers for {num} steps")
    return values


def _warn_unread(place: Path, unread: set[str]) -> None:
    if unread:
        names = ", ".join(shown(name) for name in sorted(unread)[:8])
        warnings.warn(f"{place}: field {names} is no part of a load trace, not read", stacklevel=5)


def read_sglang_json(place: Path) -> Loads:
    """Read the form "sglang-json". Raises ValueError naming file and field; also for a placement alone."""
    record = as_record(read_json(place), str(place))
    if "logical_count" not in record:
        if "physical_to_logical_map" in record:
            raise ValueError(
                f"{place}: physical_to_logical_map is a placement, not a load; record logical_count"
            )
        raise ValueError(
            f"{place}: logical_count is missing, found {[shown(name) for name in list(record)[:8]]}"
        )
    values = record["logical_count"]
    _warn_unread(place, record.keys() - {"logical_count", "rank", "average_utilization_rate_over_window"})
    return counted_steps(_tables(values, place), place, "sglang-json")


def _tables(values: Any, place: Path) -> NDArray[np.int64]:
    where = str(place)
    first = cast("list[Any]", values)[0] if isinstance(values, list) and values else None
    if not isinstance(first, list) or not first or not isinstance(cast("list[Any]", first)[0], list):
        return count_table(values, "logical_count", where)[None]
    samples = [
        count_table(table, f"logical_count[{w}]", where) for w, table in enumerate(cast("list[Any]", values))
    ]
    for w, counts_LE in enumerate(samples):
        if counts_LE.shape != samples[0].shape:
            raise ValueError(
                f"{where}: logical_count[{w}] has shape {counts_LE.shape}, the first {samples[0].shape}"
            )
    return np.stack(samples)


def counted_steps(counts_WLE: NDArray[np.int64], place: Path, source: str) -> Loads:
    """Return SGLang's logical_count as loads: steps from 0, unused rows at the end of its buffer dropped.

    counts_WLE: [W, L, E]. A dropped row is told in a warning. Raises ValueError where every row is zero.
    """
    used, num = used_steps(counts_WLE), counts_WLE.shape[0]
    if not used:
        raise ValueError(f"{place}: logical_count holds no copy in {num} steps: nothing was recorded")
    if used < num:
        warnings.warn(
            f"{place}: the last {num - used} of {num} steps are zero everywhere, taken for unused rows of "
            "the recorder's buffer and dropped",
            stacklevel=5,
        )
    kept_WLE = counts_WLE[:used]
    meta = with_copies({"source": source, "steps_counted": True}, kept_WLE)
    return Loads(kept_WLE, np.arange(used, dtype=np.int64), meta)
