"""Load traces as text: CSV, and the exp_counts that DeepSpeed users print into their logs.

Under `balancer/trace_formats.py`.

    csv         step,layer,expert_0,expert_1,...       one layer a row, the layers of a step together
                step,layer,expert,count                one count a row, all experts of a layer there
    exp-counts  a line that holds all of these, other words between them as you like:
                    step | iter | iteration | global_step      then = or : or nothing, then a number
                    layer | moe_layer | layer_id | layer_idx   the same
                    exp_counts                                 then "tensor([" or "[", numbers, "]"
                a tensor that torch broke over several lines is put together again

Lines of a log without "exp_counts" are skipped, and counted in the meta as "lines_skipped".
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balancer.trace_parts import Loads, StepRows
from balancer.trace_values import MAX_LINE_BYTES, count_of_text, read_lines, shown

_STEP = re.compile(r"\b(?:global_)?(?:step|iteration|iter)\s{0,4}[=:]?\s{0,4}([0-9]{1,30})\b", re.ASCII)
_LAYER = re.compile(r"\b(?:moe_)?layers?(?:_id|_idx|_index)?\s{0,4}[=:.]?\s{0,4}([0-9]{1,30})\b", re.ASCII)
_COUNTS = re.compile(r"exp_counts['\"]?\s{0,4}[=:]?\s{0,4}(?:tensor\()?\[([^\[\]]*)\]", re.ASCII)


def read_csv(place: Path) -> Loads:
    """Read the form "csv"; 12, 12.0 and 1.2e1 are the same count. Raises ValueError naming file, line and
    column."""
    lines = read_lines(place)
    where, header = next(lines, (str(place), ""))
    names = [name.strip().strip('"') for name in header.split(",")]
    num_experts = len(names) - 2
    if names[:2] == ["step", "layer"]:
        _warn_torn(place)
    if names == ["step", "layer", "expert", "count"]:
        return _read_long(place, lines)
    if num_experts >= 1 and names == ["step", "layer", *(f"expert_{e}" for e in range(num_experts))]:
        return _read_wide(place, lines, names)
    raise ValueError(
        f"{where}: the header is {shown(header)}, expected step,layer,expert_0,expert_1,... or "
        "step,layer,expert,count"
    )


def _warn_torn(place: Path) -> None:
    """Warn where a file ends without a newline: a number that was cut is a number still."""
    with open(place, "rb") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) not in (b"\n", b"\r"):
                warnings.warn(
                    f"{place}: does not end with a newline: its last count may have been cut", stacklevel=5
                )


def _read_wide(place: Path, lines: Iterator[tuple[str, str]], names: list[str]) -> Loads:
    rows = StepRows(place)
    for where, line in lines:
        values = _values(line, names, where)
        rows.add_row(values[0], values[1], np.array(values[2:], dtype=np.int64), where)
    return rows.finish({"source": "csv"})


def _read_long(place: Path, lines: Iterator[tuple[str, str]]) -> Loads:
    rows, names = StepRows(place), ["step", "layer", "expert", "count"]
    layers: dict[int, dict[int, int]] = {}
    last: int | None = None
    for where, line in lines:
        step, layer, expert, count = _values(line, names, where)
        if step != last and last is not None:
            _add_long(rows, last, layers, str(place))
            layers = {}
        last = step
        counts = layers.setdefault(layer, {})
        if expert in counts:
            raise ValueError(
                f"{where}: expert {expert} of layer {layer} of step {step} is there a second time"
            )
        counts[expert] = count
    if last is not None:
        _add_long(rows, last, layers, str(place))
    return rows.finish({"source": "csv"})


def _add_long(rows: StepRows, step: int, layers: dict[int, dict[int, int]], where: str) -> None:
    for layer, counts in layers.items():
        missing = next((e for e in range(len(counts)) if e not in counts), None)
        if missing is not None:
            raise ValueError(
                f"{where}: step {step}, layer {layer}: expert {missing} is missing; write a count for each, "
                "0 too"
            )
        row_E = np.array([counts[e] for e in range(len(counts))], dtype=np.int64)
        rows.add_row(step, layer, row_E, where)


def _values(line: str, names: list[str], where: str) -> list[int]:
    texts = [text.strip() for text in line.split(",")]
    if len(texts) != len(names):
        raise ValueError(f"{where}: {len(texts)} columns, the header has {len(names)}")
    return [count_of_text(text, f"column {name}", where) for name, text in zip(names, texts)]


def read_exp_counts(place: Path) -> Loads:
    """Read the form "exp-counts". Raises ValueError naming file and line where a line that holds exp_counts
    does not follow the grammar."""
    rows, skipped = StepRows(place), 0
    lines = read_lines(place)
    for where, line in lines:
        if "exp_counts" not in line:
            skipped += 1
            continue
        record = _joined(line, lines, where)
        counts = _COUNTS.search(record)
        if counts is None:
            raise ValueError(
                f"{where}: exp_counts without its numbers in {shown(record)}; expected exp_counts: [3, 1] or "
                "exp_counts: tensor([3, 1])"
            )
        words = record[: counts.start()] + " " + record[counts.end() :]
        step, layer = _number(_STEP, words, "step", where), _number(_LAYER, words, "layer", where)
        rows.add_row(step, layer, _row(counts.group(1), where), where)
    return rows.finish({"source": "exp-counts", "lines_skipped": skipped})


def _joined(line: str, lines: Iterator[tuple[str, str]], where: str) -> str:
    """Return a line with those behind it, up to the bracket that closes its tensor."""
    parts, size = [line], len(line)
    start = line.find("[", line.find("exp_counts"))
    while start >= 0 and "]" not in (parts[0][start:] if len(parts) == 1 else parts[-1]):
        _, more = next(lines, ("", "]exp_counts"))
        if "exp_counts" in more or size > MAX_LINE_BYTES:
            raise ValueError(f"{where}: the bracket of exp_counts is never closed")
        parts.append(more)
        size += len(more)
    return " ".join(parts)


def _row(text: str, where: str) -> NDArray[np.int64]:
    if "..." in text:
        raise ValueError(
            f"{where}: torch left counts out (...); print exp_counts.tolist(), or "
            'torch.set_printoptions(profile="full")'
        )
    texts = [part.strip() for part in text.split(",")]
    return np.array(
        [count_of_text(part, f"exp_counts[{e}]", where) for e, part in enumerate(texts)], dtype=np.int64
    )


def _number(pattern: re.Pattern[str], words: str, name: str, where: str) -> int:
    found = set(pattern.findall(words))
    if len(found) != 1:
        raise ValueError(
            f"{where}: {len(found) or 'no'} {name} numbers in the line; expected words like: step 12 layer 3 "
            "exp_counts: [3, 1]"
        )
    return count_of_text(found.pop(), name, where)
