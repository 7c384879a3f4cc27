"""Files of weights: safetensors read tensor by tensor, over several files where sharded, and written so too.

Pickles are never read. What is written comes from an iterator, one tensor at a time, so that a model larger
than memory can be converted.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """The tensors of one or several open files.

    path: what a person calls them;  shapes: by name;  dtypes: code of safetensors ("F32"), by name.
    """

    path: Path
    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    files: dict[str, Any]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored."""
        return self.files[name].get_tensor(name)

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows first..end - 1 along dimension 0; nothing else is read."""
        return self.files[name].get_slice(name)[first:end]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes(self.shapes[name], _CODES[self.dtypes[name]]) for name in self.shapes)


def num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


@contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """Open a file of safetensors, or a folder with one or with the shards of an index.

    Raises ValueError, naming the file, where there is none, one is damaged, lacks what the index says, or has
    a type that is no plain number (quantized).
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    located = _locate(path)
    opened: list[Any] = []
    try:
        files: dict[str, Any] = {}
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, str] = {}
        for file, expected in located.items():
            handle = _open(file)
            opened.append(handle)
            names = list(handle.keys())
            if expected is not None and set(names) != expected:
                differ = sorted(set(names) ^ expected)[:5]
                raise ValueError(f"{file} and {INDEX} do not agree on {differ}; get both again")
            for name in names:
                view = handle.get_slice(name)
                files[name], shapes[name], dtypes[name] = handle, tuple(view.get_shape()), view.get_dtype()
                if dtypes[name] not in _CODES:
                    raise ValueError(
                        f"{file}: {name} has type {dtypes[name]} (quantized?); use a plain model"
                    )
        yield Tensors(path=path, shapes=shapes, dtypes=dtypes, files=files)
    finally:
        for handle in opened:
            handle.__exit__(None, None, None)


def _open(file: Path) -> Any:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
        return handle.__enter__()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is no whole file of safetensors ({error}); get it again") from error


def _locate(path: Path) -> dict[Path, set[str] | None]:
    """The files to open, with the names that an index says each has."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is no .safetensors file. {_REMEDY}")
        return {path: None}
    index = path / INDEX
    if not index.is_file():
        if (path / WEIGHTS).is_file():
            return {path / WEIGHTS: None}
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        raise ValueError(
            f"{path} has neither {WEIGHTS} nor {INDEX}"
            + (f", but {pickles[0]}, a pickle, which can run code when read. {_REMEDY}" if pickles else "")
        )
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for name, shard in listed.items():
            if Path(shard).name != shard:
                raise ValueError(f"shard {shard!r} is not a plain file name")
            names = shards.setdefault(path / shard, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards ({error!r})") from error
    return shards


_REMEDY = (
    "Write it as safetensors first: load it with transformers where you trust it, then "
    'model.save_pretrained("folder")'
)

# ---- writing --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A tensor to be written: what it will be, and how to get it when its turn comes."""

    name: str
    shape: Shape
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def write_file(path: Path, tensors: Sequence[Planned], said: Callable[[str, int], None]) -> None:
    """Write one safetensors file; one tensor at a time is in memory.

    said: called after each with its name and bytes.   Source: the format's own description (length of the
    header as 8 bytes, header in JSON, data without gaps). Raises ValueError where a tensor is not finite.
    """
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # stable; keeps each aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + num_bytes(tensor.shape, tensor.dtype)
        code = _NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = tensor.make()
            found = (tuple(value.shape), value.dtype)
            assert found == (tensor.shape, tensor.dtype), f"{tensor.name}: {found} was planned otherwise"
            if not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{tensor.name} has values that are NaN or infinite; use an earlier checkpoint"
                )
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
            said(tensor.name, num_bytes(tensor.shape, tensor.dtype))


def write_shards(
    folder: Path, tensors: Iterable[Planned], shard_bytes: int, said: Callable[[str, int], None]
) -> int:
    """Write model.safetensors, or shards of about shard_bytes each with their index; returns the files.

    A single tensor may be larger.
    """
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        size = num_bytes(tensor.shape, tensor.dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    if len(shards) == 1:
        write_file(folder / WEIGHTS, shards[0], said)
        return 1
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names |= {tensor.name: name for tensor in shard}
        write_file(folder / name, shard, said)
    total = sum(num_bytes(tensor.shape, tensor.dtype) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return len(shards)
