"""Shards: master weights and moments on disk, one safetensors file a rank, read back at any cut.

A file has, for each piece that its rank keeps, the tensors "master/NAME", "exp_avg/NAME", ...: [n] float32,
elements start .. start + n of the flattened logical parameter NAME. Its header says the start, the whole
shape, and the optimizer's scalars (step). All files together hold every element once. A reader takes the
interval that it needs out of whatever files have it, so the number of ranks, the EP size and the ZeRO stage
may all be others than those that wrote.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moe import zero_state
from moe.zero_state import MASTER, Piece

_HEADER = "pieces"


def save(engine: Any, path: Path) -> None:
    """Write this rank's pieces. Every rank writes its own file.

    Raises ValueError as `pieces` and `Piece.moments` do, OSError where the file cannot be written.
    """
    state = zero_state.optimizer_state(engine)
    tensors: dict[str, np.ndarray] = {}
    header: dict[str, Any] = {}
    for piece in zero_state.pieces(engine):
        if piece.written:
            for kind, value in {MASTER: piece.master, **piece.moments(state)}.items():
                tensors[f"{kind}/{piece.name}"] = value.detach().to("cpu", torch.float32).numpy()
            scalars = piece.scalars(state)
            header[piece.name] = {"shape": piece.shape, "start": piece.start, "scalars": scalars}
    try:
        save_file(tensors, path, metadata={_HEADER: json.dumps(header)})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def load(engine: Any, files: Sequence[Path]) -> None:
    """Fill the engine with what the files hold, and the model's weights with its masters. Collective.

    Raises ValueError, before anything is written to, where names or shapes of the parameters are others,
    where elements are missing or there twice, and where a flat partition would mix parameters of different
    step.
    """
    stored = StoredState(files)
    found = zero_state.pieces(engine)
    _check({name for name, _ in engine.module.named_parameters()}, found, stored)
    zero_state.before_load(engine)
    for piece in found:
        keys = dict.fromkeys(stored.kinds(piece.name) - {MASTER}) | stored.scalars(piece.name)
        if keys:
            zero_state.make_state(engine, piece.holder, keys)
    state = zero_state.optimizer_state(engine)
    for piece in found:
        for kind, value in {MASTER: piece.master, **piece.moments(state)}.items():
            value.copy_(stored.read(kind, piece.name, piece.start, value.numel()))
    zero_state.refresh(engine)


def _check(names: set[str], found: Sequence[Piece], stored: "StoredState") -> None:
    """Raise ValueError unless the files have what the model and its pieces want."""
    if names != stored.names():
        raise ValueError(
            f"{stored.folder} has no {sorted(names - stored.names())} and the model no "
            f"{sorted(stored.names() - names)}: the checkpoint is of another model"
        )
    first: dict[int, Piece] = {}
    for piece in found:
        if stored.shape(piece.name) != piece.shape:
            raise ValueError(
                f"{piece.name} is {list(stored.shape(piece.name) or [])} in {stored.folder} and "
                f"{list(piece.shape)} in the model: the checkpoint is of another model"
            )
        other = first.setdefault(id(piece.holder), piece)
        if stored.scalars(piece.name) != stored.scalars(other.name):
            raise ValueError(
                f"{other.name} and {piece.name} have been stepped {stored.scalars(other.name)} and "
                f"{stored.scalars(piece.name)}, and this stage keeps them in one piece: load at the stage "
                "that they were saved at"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    start: int
    stop: int
    file: int


@dataclass(slots=True)
class StoredState:
    """The files of one checkpoint, open: what they hold, and reading it by intervals.

    files: all of them, in any order.   Raises ValueError, with the file or the tensor, where one cannot be
    read, or where they do not hold every element of each tensor exactly once.
    """

    files: Sequence[Path]
    _open: list[Any] = field(default_factory=list)
    _spans: dict[tuple[str, str], list[_Span]] = field(default_factory=dict)
    _headers: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a checkpoint needs at least one file of states")
        for number, path in enumerate(self.files):
            self._add(number, path)
        for (kind, name), spans in self._spans.items():
            self._check_whole(kind, name, sorted(spans, key=lambda span: span.start))

    @property
    def folder(self) -> Path:
        return self.files[0].parent

    def _add(self, number: int, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            header = json.loads((file.metadata() or {})[_HEADER])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a file of states: {error}") from error
        self._open.append(file)
        for key in file.keys():  # noqa: SIM118  a file is no mapping
            kind, _, name = key.partition("/")
            start, (length,) = header[name]["start"], file.get_slice(key).get_shape()
            self._spans.setdefault((kind, name), []).append(
                _Span(start=start, stop=start + length, file=number)
            )
        for name, entry in header.items():
            before = self._headers.setdefault(name, entry)
            if (before["shape"], before["scalars"]) != (entry["shape"], entry["scalars"]):
                raise ValueError(f"{path} says {entry} of {name}, and another file {before}")

    def _check_whole(self, kind: str, name: str, spans: list[_Span]) -> None:
        end = 0
        for span in [*spans, _Span(start=math.prod(self._headers[name]["shape"]), stop=0, file=0)]:
            if span.start != end:
                fault = "missing" if span.start > end else "there twice"
                low, high = sorted((span.start, end))
                raise ValueError(
                    f"{self.folder}: elements {low}..{high - 1} of {kind} of {name} are {fault}; the files "
                    "do not belong together"
                )
            end = span.stop

    def names(self) -> set[str]:
        """The logical parameters."""
        return set(self._headers)

    def kinds(self, name: str) -> set[str]:
        """What is stored of a parameter: master, exp_avg, ..."""
        return {kind for kind, other in self._spans if other == name}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the whole parameter; None where it is not stored."""
        return tuple(self._headers[name]["shape"]) if name in self._headers else None

    def scalars(self, name: str) -> dict[str, list[Any]]:
        """The optimizer's scalars of a parameter, as [type, number]."""
        return dict(self._headers[name]["scalars"])

    def read(self, kind: str, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements start .. start + numel of a flattened parameter, [numel] float32."""
        out = torch.empty(numel, dtype=torch.float32)
        for span in self._spans[kind, name]:
            left, right = max(start, span.start), min(start + numel, span.stop)
            if left < right:
                stored = self._open[span.file].get_slice(f"{kind}/{name}")
                out[left - start : right - start] = stored[left - span.start : right - span.start]
        return out
