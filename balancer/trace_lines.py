"""Load traces as JSON lines: loads recorded from vLLM, and Megatron's router traces.

Under `balancer/trace_formats.py`. vLLM keeps the load in memory only (`EplbModelState`: expert_load_pass
[L, S], of this rank until it is reduced, and physical_to_logical_map [L, S]) and logs a balancedness: it
writes no file of it. So what is read is what a hook beside it writes most plainly, one object a line:

    step                  under "step", "iteration" or "forward_pass"
    logical load          [L][E] under "expert_load", "logical_expert_load", "tokens_per_expert" or "load"; or
                          [E], one layer a line, with "layer", "layer_id" or "layer_idx"
    physical load         [L][S] under "physical_expert_load", all ranks summed, with the
                          "physical_to_logical_map" [L][S] of that step in the same record
    num_tokens, top_k     optional; checked against the sums

Megatron (one object for each step, layer and rank, all ranks of a step together):

    step, rank, num_tokens, topk     integers
    stage, block, layer              integers or words, which together name a layer
    top_indices                      [num_tokens][topk] ids of the experts that each token selects
"""

import warnings
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from balancer.trace_parts import Loads, StepRows, to_logical, with_copies
from balancer.trace_values import (
    as_record,
    count_row,
    count_table,
    parse_json,
    read_lines,
    shown,
    stated_copies,
    whole,
)

STEP_NAMES = ("step", "iteration", "forward_pass")
LOAD_NAMES = ("expert_load", "logical_expert_load", "tokens_per_expert", "load")
LAYER_NAMES = ("layer", "layer_id", "layer_idx")
_PHYSICAL, _MAP = "physical_expert_load", "physical_to_logical_map"
_KNOWN = {*STEP_NAMES, *LOAD_NAMES, *LAYER_NAMES, _PHYSICAL, _MAP, "num_tokens", "top_k", "topk"}
# Experts that a file may name without listing a count for each: far above any model.
MAX_EXPERTS = 2**16
# Megatron names only experts that were selected: so many counts are allowed beyond 16 for each byte.
_SPARE_VALUES = 2**20


def read_vllm(place: Path) -> Loads:
    """Read the form "vllm". Raises ValueError naming file, line and field. Other fields are listed in the
    meta as "fields_not_read"."""
    rows, unread = StepRows(place), set[str]()
    for where, line in read_lines(place):
        record = as_record(parse_json(line, where), where)
        step = whole(_only(record, STEP_NAMES, where)[1], "step", where)
        name, values = _only(record, (*LOAD_NAMES, _PHYSICAL), where)
        if any(layer in record for layer in LAYER_NAMES):
            layer = whole(_only(record, LAYER_NAMES, where)[1], "layer", where)
            rows.add_row(step, layer, _layer_row(record, name, values, where), where)
        else:
            rows.add_sample(step, _sample(record, name, values, where), where)
        rows.state_copies(stated_copies(record, where), where)
        unread |= record.keys() - _KNOWN
    meta: dict[str, Any] = {"source": "vllm"}
    return rows.finish({**meta, "fields_not_read": sorted(unread)} if unread else meta)


def _only(record: dict[str, Any], names: tuple[str, ...], where: str) -> tuple[str, Any]:
    """Return name and value of the one field of several names that is there."""
    found = [name for name in names if name in record]
    if len(found) != 1:
        raise ValueError(
            f"{where}: expected one of the fields {', '.join(names)}, found {', '.join(found) or 'none'}"
        )
    return found[0], record[found[0]]


def _sample(record: dict[str, Any], name: str, values: Any, where: str) -> NDArray[np.int64]:
    table = count_table(values, name, where)
    if name != _PHYSICAL:
        return table
    if _MAP not in record:
        raise ValueError(
            f"{where}: {_PHYSICAL} without the {_MAP} of that step: which expert a slot held then is "
            "unknown; record the map beside the counts, or logical counts"
        )
    return to_logical(table, _map_table(record[_MAP], where), where)


def _layer_row(record: dict[str, Any], name: str, values: Any, where: str) -> NDArray[np.int64]:
    if name != _PHYSICAL:
        return count_row(values, name, where)
    inner = {_MAP: [record[_MAP]]} if _MAP in record else {}
    return _sample(inner, name, [values], where)[0]


def _map_table(values: Any, where: str) -> NDArray[np.int64]:
    """Return a map [L][S] as int64; -1, an empty slot, is the one negative number in it."""
    if not isinstance(values, list):
        raise ValueError(f"{where}: {_MAP} is {shown(values)}, expected [L][S] lists of expert ids")
    shifted: list[Any] = [
        [v + 1 if type(v) is int and v >= -1 else v for v in cast("list[Any]", row)]
        if isinstance(row, list)
        else row
        for row in cast("list[Any]", values)
    ]
    return count_table(shifted, f"{_MAP} (+ 1)", where) - 1


class _Counted(NamedTuple):
    """The experts of one record that got copies, and how many."""

    ids: NDArray[np.int64]
    copies: NDArray[np.int64]


Layer = tuple[Any, ...]


class _MegatronSteps:
    """Gathers Megatron's records: for each step, layer and rank one, every rank of a layer in every step."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.steps: list[int] = []
        self.samples: list[dict[Layer, _Counted]] = []
        self.ranks: dict[Layer, set[int]] = {}
        self._open: dict[Layer, dict[int, _Counted]] = {}

    def add(self, step: int, layer: Layer, rank: int, counted: _Counted, where: str) -> None:
        if not self.steps or step != self.steps[-1]:
            self.close()
            if self.steps and step < self.steps[-1]:
                raise ValueError(
                    f"{where}: step {step} does not come after step {self.steps[-1]}; steps must increase "
                    "strictly: sort the lines of all ranks by step"
                )
            self.steps.append(step)
        ranks = self._open.setdefault(layer, {})
        if rank in ranks:
            raise ValueError(f"{where}: rank {rank} of {_named(layer)} of step {step} is there a second time")
        ranks[rank] = counted

    def close(self) -> None:
        """Sum the ranks of the step that ends here."""
        if not self._open:
            return
        found = {layer: set(ranks) for layer, ranks in self._open.items()}
        if not self.samples:
            most = max(found.values(), key=len)
            self.ranks = found
            for layer, ranks in found.items():  # pipeline stages have other ranks, but as many
                if len(ranks) < len(most):
                    self._tell_missing(layer, f"{len(ranks)} ranks, another layer {len(most)}")
        for layer in sorted(self.ranks.keys() | found.keys(), key=_order):
            expected, there = self.ranks.get(layer, set()), found.get(layer, set())
            if expected != there:
                self._tell_missing(
                    layer, f"ranks {sorted(there)[:8]}, step {self.steps[0]} {sorted(expected)[:8]}"
                )
        self.samples.append({layer: _summed(list(ranks.values())) for layer, ranks in self._open.items()})
        self._open = {}

    def _tell_missing(self, layer: Layer, what: str) -> None:
        raise ValueError(
            f"{self._place}: step {self.steps[-1]}, {_named(layer)}: a record is missing: it has {what}; "
            "put the files of all ranks together, without a step that was cut"
        )


def read_megatron(place: Path, num_experts: int | None) -> Loads:
    """Read the form "megatron".

    num_experts: E; None takes the largest id + 1, with a warning. Raises ValueError naming file, line, field.
    """
    steps = _MegatronSteps(place)
    most = MAX_EXPERTS if num_experts is None else num_experts
    for where, line in read_lines(place):
        record = as_record(parse_json(line, where), where)
        step, rank = (whole(record.get(name), name, where) for name in ("step", "rank"))
        layer = tuple(_word(record.get(name), name, where) for name in ("stage", "block", "layer"))
        steps.add(step, layer, rank, _counted(record, most, where), where)
    steps.close()
    if not steps.samples:
        raise ValueError(f"{place}: no record of a load in it")
    loads = _filled(steps, place, num_experts)
    if num_experts is None:
        warnings.warn(
            f"{place}: does not say how many experts there are; {loads.counts_WLE.shape[2]} taken, the "
            "largest id + 1: one that nobody selected may be missing; pass num_experts= (--num-experts)",
            stacklevel=4,
        )
    return loads


def _filled(steps: _MegatronSteps, place: Path, num_experts: int | None) -> Loads:
    layers = sorted(steps.ranks, key=_order)
    used = max((int(c.ids[-1]) + 1 for s in steps.samples for c in s.values() if c.ids.size), default=1)
    shape = (len(steps.samples), len(layers), num_experts or used)
    if shape[0] * shape[1] * shape[2] > _SPARE_VALUES + 16 * place.stat().st_size:
        raise ValueError(
            f"{place}: {shape[2]} experts in {shape[0]} steps and {shape[1]} layers are more than so small a "
            "file bears out: an expert's id is damaged, or num_experts is too large"
        )
    counts_WLE = np.zeros(shape, dtype=np.int64)
    for w, sample in enumerate(steps.samples):
        for position, layer in enumerate(layers):
            counts_WLE[w, position, sample[layer].ids] = sample[layer].copies
    ranks = max(len(ranks) for ranks in steps.ranks.values())
    meta = {"source": "megatron", "layers": [list(layer) for layer in layers], "ranks_summed": ranks}
    return Loads(counts_WLE, np.array(steps.steps, dtype=np.int64), with_copies(meta, counts_WLE))


def _counted(record: dict[str, Any], most: int, where: str) -> _Counted:
    """Count the ids of one record, after the checks of its sizes."""
    num_tokens, topk = whole(record.get("num_tokens"), "num_tokens", where), record.get("topk")
    topk = whole(topk, "topk", where, 1)
    value: Any = record.get("top_indices")
    tokens = cast("list[Any]", value) if isinstance(value, list) else None
    if tokens is None or len(tokens) != num_tokens:
        raise ValueError(
            f"{where}: top_indices is {shown(cast('object', value))}, expected num_tokens={num_tokens} lists"
        )
    for i, row in enumerate(tokens):
        if not isinstance(row, list) or len(cast("list[Any]", row)) != topk:
            raise ValueError(
                f"{where}: top_indices[{i}] is {shown(cast('object', row))}, expected topk={topk} experts"
            )
    flat: list[Any] = list(chain.from_iterable(tokens))
    if not flat:
        return _Counted(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    wrong = next((n for n, v in enumerate(flat) if type(v) is not int or not 0 <= v < most), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: top_indices[{wrong // topk}][{wrong % topk}] is {shown(flat[wrong])}, expected an "
            f"expert from 0 to {most - 1}"
        )
    ids_TK = np.sort(np.array(flat, dtype=np.int64).reshape(num_tokens, topk), axis=1)
    if (ids_TK[:, 1:] == ids_TK[:, :-1]).any():
        token = int(np.flatnonzero((ids_TK[:, 1:] == ids_TK[:, :-1]).any(axis=1))[0])
        raise ValueError(
            f"{where}: top_indices[{token}] names an expert twice; a token takes {topk} different ones"
        )
    ids, copies = np.unique(ids_TK, return_counts=True)
    return _Counted(ids, copies.astype(np.int64))


def _summed(parts: list[_Counted]) -> _Counted:
    if len(parts) == 1:
        return parts[0]
    ids, where = np.unique(np.concatenate([part.ids for part in parts]), return_inverse=True)
    copies = np.zeros(ids.shape, dtype=np.int64)
    np.add.at(copies, where, np.concatenate([part.copies for part in parts]))
    return _Counted(ids, copies)


def _word(value: Any, name: str, where: str) -> int | str:
    if isinstance(value, str) and len(value) <= 100:
        return value
    return whole(value, name, where)


def _named(layer: Layer) -> str:
    return "stage {}, block {}, layer {}".format(*layer)


def _order(layer: Layer) -> tuple[tuple[bool, Any], ...]:
    return tuple((isinstance(word, str), word) for word in layer)
