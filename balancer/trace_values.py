"""Strict values of the files that hold load traces: lines, JSON, counts, and how an error shows them.

Under the readers of `balancer/trace_formats.py`. Nothing of a file is executed, and sizes are bounded before
anything is read.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

# A line is one record: 64 MiB hold 5 million counts, more than any model has in one step.
MAX_LINE_BYTES = 2**26
# JSON is held whole in memory, some 20 bytes for one of the file: lines, CSV and npz have no such limit.
MAX_JSON_BYTES = 2**28
INT64_MAX = 2**63 - 1
# A float is a count only where all whole numbers up to it are floats: above, digits were lost on the way.
_EXACT_FLOAT = 2.0**53
_WHOLE = re.compile(r"-?[0-9]{1,19}")
_DECIMAL = re.compile(r"-?[0-9]{1,17}(\.[0-9]{0,17})?([eE][+-]?[0-9]{1,3})?")


def read_lines(place: Path) -> Iterator[tuple[str, str]]:
    """Yield (where, line) of every line that is not blank. Raises ValueError for a line too long, or not
    UTF-8."""
    with open(place, "rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{place}, line {number}"
            if len(data) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{where}: longer than {MAX_LINE_BYTES} bytes; one record stands on each line"
                )
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error})") from None
            if line:
                yield where, line


def parse_json(text: str, where: str) -> Any:
    """Return the JSON value of a text. Raises ValueError for what is not strict JSON: NaN, a field that is
    there twice, nesting beyond Python's depth, integers of thousands of digits."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"{where}: nested too deep for a load trace") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"field {shown(twice)} is there twice")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no count")


def read_json(place: Path) -> Any:
    """Return the JSON value of a whole file. Raises ValueError as `parse_json`, and for a file too large."""
    size = place.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"{place}: {size} bytes of JSON in one piece, at most {MAX_JSON_BYTES} are read; write one "
            "sample a line (JSON lines), CSV or npz"
        )
    try:
        text = place.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text ({error})") from None
    return parse_json(text, str(place))


def as_record(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {shown(cast('object', value))} is no record; expected a JSON object")
    return cast("dict[str, Any]", value)


def whole(value: Any, name: str, where: str, least: int = 0) -> int:
    """Return a field that must be an integer of at least `least`. Raises ValueError naming it."""
    if type(value) is not int or not least <= value <= INT64_MAX:
        raise ValueError(f"{where}: {name} is {shown(value)}, expected an integer of {least} or more")
    return value


def count_row(values: Any, name: str, where: str, *, floats: bool = False) -> NDArray[np.int64]:
    """Return a list of counts as [E] int64.

    floats: whether 3.0 is taken as 3. Raises ValueError naming the first entry that is no count.
    """
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}: {name} is {shown(cast('object', values))}, expected a list of counts")
    row = cast("list[Any]", values)
    if {type(value) for value in row} == {int}:
        try:
            row_E = np.array(row, dtype=np.int64)
        except OverflowError:
            row_E = np.full(1, -1)
        if row_E.min() >= 0:
            return row_E
    return np.array(
        [_count(value, f"{name}[{i}]", where, floats) for i, value in enumerate(row)], dtype=np.int64
    )


def _count(value: Any, name: str, where: str, floats: bool) -> int:
    if type(value) is float and floats and value.is_integer() and abs(value) <= _EXACT_FLOAT:
        value = int(value)
    if type(value) is not int:
        raise ValueError(f"{where}: {name} is {shown(value)}, expected an integer count")
    if value < 0:
        raise ValueError(f"{where}: {name} is {shown(value)}, a negative count")
    if value > INT64_MAX:
        raise ValueError(f"{where}: {name} is {shown(value)}, more than int64 can hold: the file is damaged")
    return value


def count_table(values: Any, name: str, where: str, *, floats: bool = False) -> NDArray[np.int64]:
    """Return a list of lists of counts as [L, E] int64. Raises ValueError naming what is ragged or no
    count."""
    if not isinstance(values, list) or not values:
        raise ValueError(
            f"{where}: {name} is {shown(cast('object', values))}, expected [L][E] lists of counts"
        )
    rows = [
        count_row(row, f"{name}[{i}]", where, floats=floats)
        for i, row in enumerate(cast("list[Any]", values))
    ]
    for i, row_E in enumerate(rows):
        if row_E.shape != rows[0].shape:
            raise ValueError(
                f"{where}: {name}[{i}] holds {row_E.shape[0]} experts, {name}[0] holds {rows[0].shape[0]}"
            )
    return np.stack(rows)


def count_of_text(text: str, name: str, where: str) -> int:
    """Return the count that a text of digits writes; 3.0 and 1e3 are whole numbers too. Raises ValueError."""
    if _WHOLE.fullmatch(text):
        return _count(int(text), name, where, False)
    if _DECIMAL.fullmatch(text):
        return _count(float(text), name, where, True)
    raise ValueError(f"{where}: {name} is {shown(text)}, expected an integer count")


def stated_copies(record: dict[str, Any], where: str) -> int | None:
    """Return num_tokens * top_k (or topk) where a record says both, else None."""
    top_k = record.get("top_k", record.get("topk"))
    if record.get("num_tokens") is None or top_k is None:
        return None
    copies = whole(record["num_tokens"], "num_tokens", where) * whole(top_k, "top_k", where, 1)
    return whole(copies, "num_tokens * top_k", where)


def as_int64(array: NDArray[Any], name: str) -> NDArray[np.int64]:
    """Return integers as int64. Raises ValueError naming another type, or a value beyond int64."""
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {array.dtype}; counts and steps are integers")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {array.max()}, more than int64 can: the file is damaged")
    return array.astype(np.int64, copy=False)


def shown(value: object) -> str:
    """Return a value as an error shows it: never longer than a line."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, int) and value.bit_length() > 100:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict):
        sized = cast("Sequence[Any]", value)
        return f"a {type(sized).__name__} of {len(sized)}"
    return repr(value)[:60]
