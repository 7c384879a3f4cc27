"""What the readers of load traces share: rows gathered by step and layer, and the arithmetic of counts.

Under the readers (trace_npz, trace_json, trace_lines, trace_text, adapters/sglang), which
`balancer/trace_formats.py` calls for `load_trace`. A reader returns `Loads`: arrays that `Trace` checks once
more.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.trace_values import INT64_MAX


class Loads(NamedTuple):
    """What a reader found: counts_WLE [W, L, E] and steps_W [W] int64, the meta, and copies_W: [W] int64,
    the copies that the file itself says every layer routed, None where it says nothing."""

    counts_WLE: NDArray[np.int64]
    steps_W: NDArray[np.int64]
    meta: dict[str, Any]
    copies_W: NDArray[np.int64] | None = None


class StepRows:
    """Gathers the rows [E] of (step, layer) into samples.

    The records of one step stand together, its layers in any order; steps increase strictly. The first step
    says which layers there are, the first row how many experts. Errors begin with `where` of the record.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._steps: list[int] = []
        self._samples: list[NDArray[np.int64]] = []
        self._layers: list[int] = []
        self._open: dict[int, NDArray[np.int64]] = {}
        self._num_experts = 0
        self._copies: list[int | None] = []

    def add_row(self, step: int, layer: int, row_E: NDArray[np.int64], where: str) -> None:
        """Add one layer of a step."""
        if not self._steps or step != self._steps[-1]:
            self._begin(step, where)
        if layer in self._open:
            raise ValueError(
                f"{where}: layer {layer} of step {step} is there a second time; keep one record of each "
                "(or add up the ranks first)"
            )
        self._check_width(row_E.shape[0], where)
        self._open[layer] = row_E

    def add_sample(self, step: int, counts_LE: NDArray[np.int64], where: str) -> None:
        """Add all layers of a step, numbered from 0."""
        if self._steps and step == self._steps[-1]:
            raise ValueError(
                f"{where}: step {step} is there a second time; keep one record of each step (or add up the "
                "ranks first)"
            )
        self._begin(step, where)
        self._check_width(counts_LE.shape[1], where)
        self._open = dict(enumerate(counts_LE))

    def state_copies(self, copies: int | None, where: str) -> None:
        """Note what the file says that every layer of the present step routes; None: it does not say."""
        if copies is not None and self._copies[-1] not in (None, copies):
            raise ValueError(
                f"{where}: num_tokens * top_k is {copies}, but {self._copies[-1]} in an earlier record of "
                f"step {self._steps[-1]}"
            )
        self._copies[-1] = self._copies[-1] if copies is None else copies

    def finish(self, meta: dict[str, Any]) -> Loads:
        """Close the last step and return everything. Raises ValueError where there is none."""
        if not self._steps:
            raise ValueError(f"{self._place}: no record of a load in it")
        self._close()
        counts_WLE = np.stack(self._samples)
        if self._layers != list(range(len(self._layers))):
            meta = {**meta, "layers": self._layers}
        stated = [copies for copies in self._copies if copies is not None]
        if stated and len(stated) != len(self._copies):
            step = self._steps[self._copies.index(None)]
            raise ValueError(
                f"{self._place}: step {step} says no num_tokens and top_k, which other steps say; it was cut"
            )
        copies_W = np.array(stated, dtype=np.int64) if stated else None
        return Loads(
            counts_WLE, np.array(self._steps, dtype=np.int64), with_copies(meta, counts_WLE), copies_W
        )

    def _begin(self, step: int, where: str) -> None:
        if self._steps:
            self._close()
            if step < self._steps[-1]:
                raise ValueError(
                    f"{where}: step {step} does not come after step {self._steps[-1]}; steps must increase "
                    "strictly: sort the records by step"
                )
        self._steps.append(step)
        self._copies.append(None)

    def _close(self) -> None:
        layers = sorted(self._open)
        if not self._samples:
            self._layers = layers
        elif layers != self._layers:
            missing = sorted(set(self._layers) - set(layers))
            what = (
                f"layer {missing[0]} is missing"
                if missing
                else f"layer {_extra(layers, self._layers)} is new"
            )
            raise ValueError(
                f"{self._place}: step {self._steps[-1]}: {what}; it has {len(layers)} layers, step "
                f"{self._steps[0]} has {len(self._layers)}"
            )
        self._samples.append(np.stack([self._open[layer] for layer in layers]))
        self._open = {}

    def _check_width(self, num_experts: int, where: str) -> None:
        self._num_experts = self._num_experts or num_experts
        if num_experts != self._num_experts:
            raise ValueError(
                f"{where}: counts of {num_experts} experts, earlier rows have {self._num_experts}"
            )


def _extra(layers: list[int], known: list[int]) -> int:
    return min(set(layers) - set(known))


def with_copies(meta: dict[str, Any], counts_WLE: NDArray[np.int64]) -> dict[str, Any]:
    """Return meta with "copies_per_step" where every layer of every sample holds the same number."""
    if not counts_WLE.size or counts_WLE.max() > INT64_MAX // counts_WLE.shape[-1]:
        return meta
    held_WL = counts_WLE.sum(axis=-1)
    same = bool((held_WL == held_WL[0, 0]).all())
    return {**meta, "copies_per_step": int(held_WL[0, 0])} if same else meta


def to_logical(physical_LS: NDArray[np.int64], map_LS: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Return the counts of logical experts from those of physical slots, with the map of that moment.

    physical_LS: [L, S] copies of each slot. map_LS: [L, S], logical expert of each slot, -1 for an empty one.
    Returns [L, E] int64; E is the number of experts that every layer of the map holds. Raises ValueError for
    different shapes, an expert without a slot, or copies in an empty slot.
    """
    if physical_LS.shape != map_LS.shape:
        raise ValueError(
            f"{where}: counts of {physical_LS.shape} slots but a physical_to_logical_map of {map_LS.shape}"
        )
    num_layers, num_slots = map_LS.shape
    num_experts = int(map_LS.max()) + 1
    if not 1 <= num_experts <= num_slots or map_LS.min() < -1:
        raise ValueError(
            f"{where}: physical_to_logical_map names experts {map_LS.min()} to {num_experts - 1}, expected 0 "
            f"to at most {num_slots - 1}, with {num_slots} slots (-1: empty)"
        )
    check_sums(physical_LS, num_slots, where)
    # one bin more takes the empty slots
    held = np.zeros((num_layers, num_experts + 1), dtype=np.int64)
    slots = held.copy()
    layer_L1: NDArray[np.int64] = np.arange(num_layers, dtype=np.int64).reshape(-1, 1)
    index = (layer_L1, np.where(map_LS < 0, num_experts, map_LS))
    np.add.at(held, index, physical_LS)
    np.add.at(slots, index, 1)
    if held[:, -1].any():
        layer = int(np.flatnonzero(held[:, -1])[0])
        raise ValueError(f"{where}: layer {layer}: {held[layer, -1]} copies in empty slots of the map")
    if (slots[:, :-1] == 0).any():
        layer, expert = (int(i) for i in np.argwhere(slots[:, :-1] == 0)[0])
        raise ValueError(f"{where}: layer {layer}: expert {expert} has no slot in physical_to_logical_map")
    return held[:, :-1]


def check_sums(counts: NDArray[np.int64], terms: int, where: str) -> None:
    """Raise ValueError where a sum of `terms` such counts might pass int64, or a count is negative."""
    if counts.size and (counts.min() < 0 or counts.max() > INT64_MAX // max(terms, 1)):
        bad = counts.min() if counts.min() < 0 else counts.max()
        raise ValueError(f"{where}: a count of {bad} is none that could be added up: the file is damaged")


def used_steps(counts_WLE: NDArray[np.int64]) -> int:
    """Return how many samples there are up to the last that holds a copy: a buffer's unused rows are zero."""
    used = np.flatnonzero(counts_WLE.reshape(counts_WLE.shape[0], -1).any(axis=1))
    return int(used[-1]) + 1 if used.size else 0
