"""Reads the dumps of SGLang's expert distribution recorder (form "sglang-pt"): files of torch.save.

Under `balancer/trace_formats.py`; torch is imported on use. What the recorder writes, by its mode:

    stat         {"rank", "logical_count": int [steps, L, E], ...}, of all ranks together. SGLang made the
                 counts logical itself, with the map of the moment of the dump. A buffer that ran full
                 goes round: its first row is then not its oldest
    per_pass,    {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count": [L, S],
    per_token    ...}, ...], "last_physical_to_logical_map": [L, S]}, a file for each rank

Every rank counts the tokens of its own, so the records of one forward pass are summed, over files too (a
folder of expert_distribution_recorder_*.pt). Physical counts say nothing without the map that stood when they
were taken: a record's own "physical_to_logical_map" is used, the dump's last one only by the caller's word
(`assume_map_constant`), because a rebalance in between has made it wrong for what came before.

A file is read as data: the names in its pickle are checked against a list before torch sees it, which reads
it with weights_only, mapped, so that no claim in it allocates memory.
"""

import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from balancer.trace_json import counted_steps
from balancer.trace_parts import Loads, check_sums, to_logical, with_copies
from balancer.trace_values import as_int64, as_record, shown, whole

PATTERN = "expert_distribution_recorder_*.pt"
# all that a dump of plain tensors, numbers, text, lists and dicts names
_PLAIN = re.compile(
    r"torch\._utils _rebuild_tensor_v2|collections OrderedDict|torch Size|"
    r"torch (Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double)Storage"
)
# opcodes that take a name from somewhere else than their own argument
_INDIRECT = frozenset(
    {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}
)
_MAX_PICKLE_BYTES = 2**28
_CHUNK_BYTES = 2**20


class _Record(NamedTuple):
    """Physical counts of one rank in one forward pass, and the map that its record carries or None."""

    key: tuple[int, int, str]
    physical_LS: NDArray[np.int64]
    map_LS: NDArray[np.int64] | None
    where: str


def read_sglang_pt(place: Path, assume_map_constant: bool) -> Loads:
    """Read a dump, or a folder of dumps.

    assume_map_constant: whether a dump's last map may stand for all its records. Raises ValueError naming
    file, record and field, also for counts whose map is unknown.
    """
    files = dump_files(place)
    dumps = [_load(file) for file in files]
    kinds = {"logical_count" in dump for dump in dumps}
    if kinds == {True}:
        if len(dumps) > 1:
            raise ValueError(
                f"{place}: {len(dumps)} dumps of logical counts, which do not say their order; name one"
            )
        counts = _array(dumps[0]["logical_count"], 3, "logical_count", files[0])
        return counted_steps(counts, files[0], "sglang-pt")
    if kinds != {False}:
        raise ValueError(f"{place}: dumps of logical_count and of records side by side; read them apart")
    return _sum_records(place, _records(files, dumps, assume_map_constant))


def dump_files(place: Path) -> list[Path]:
    """Return the dumps that a path names: itself, or those in a folder. Raises ValueError for none."""
    if not place.is_dir():
        return [place]
    files = sorted(place.glob(PATTERN)) or sorted(place.glob("*.pt"))
    if not files:
        raise ValueError(f"{place}: no {PATTERN} in it")
    return files


def _records(files: list[Path], dumps: list[dict[str, Any]], assume_map_constant: bool) -> Iterator[_Record]:
    left = sum(file.stat().st_size for file in files)
    for file, dump in zip(files, dumps):
        records = dump.get("records")
        if not isinstance(records, list):
            raise ValueError(f"{file}: neither logical_count nor records in it: no dump of the recorder")
        last_LS = None
        if assume_map_constant and dump.get("last_physical_to_logical_map") is not None:
            last_LS = _array(dump["last_physical_to_logical_map"], 2, "last_physical_to_logical_map", file)
        for i, value in enumerate(cast("list[Any]", records)):
            where = f"{file}, record {i}"
            record = as_record(value, where)
            counts = record.get("global_physical_count")
            left -= _claimed_bytes(counts)
            if left < 0:
                raise ValueError(f"{where}: the records claim more counts than the file holds")
            yield _Record(_key(record, where), _array(counts, 2, "global_physical_count", where), *(
                _map(record, last_LS, where), where
            ))  # fmt: skip


def _key(record: dict[str, Any], where: str) -> tuple[int, int, str]:
    gatherer = record.get("gatherer_key", "")
    step, rank = (whole(record.get(name), name, where) for name in ("forward_pass_id", "rank"))
    return step, rank, gatherer if isinstance(gatherer, str) else shown(gatherer)


def _map(record: dict[str, Any], last_LS: NDArray[np.int64] | None, where: str) -> NDArray[np.int64] | None:
    if record.get("physical_to_logical_map") is not None:
        return _array(record["physical_to_logical_map"], 2, "physical_to_logical_map", where)
    return last_LS


def _sum_records(place: Path, records: Iterator[_Record]) -> Loads:
    """Turn each record into logical counts, and sum those of one forward pass."""
    samples: dict[int, NDArray[np.int64]] = {}
    seen: set[tuple[int, int, str]] = set()
    for record in records:
        step, rank, _ = record.key
        if record.key in seen:
            raise ValueError(
                f"{record.where}: forward_pass_id {step} of rank {rank} is there a second time: a file was "
                "given twice, or two recordings are mixed"
            )
        seen.add(record.key)
        if record.map_LS is None:
            raise ValueError(
                f"{record.where}: physical counts without the placement of that pass: the dump holds only "
                "its last_physical_to_logical_map, which a rebalance in between would have made wrong for "
                "this record. Record with mode stat, or, where no rebalance happened (--enable-eplb was "
                "off), pass assume_map_constant=True (--assume-map-constant)"
            )
        logical_LE = to_logical(record.physical_LS, record.map_LS, record.where)
        first = next(iter(samples.values()), logical_LE)
        if logical_LE.shape != first.shape:
            raise ValueError(
                f"{record.where}: [L, E] = {logical_LE.shape}, earlier records have {first.shape}"
            )
        if step in samples:
            for part in (samples[step], logical_LE):
                check_sums(part, 2, record.where)
            samples[step] += logical_LE
        else:
            samples[step] = logical_LE
    return _in_order(place, samples, seen)


def _in_order(place: Path, samples: dict[int, NDArray[np.int64]], seen: set[tuple[int, int, str]]) -> Loads:
    if not samples:
        raise ValueError(f"{place}: no record of a load in it")
    ranks: dict[int, set[int]] = {}
    for step, rank, _ in seen:
        ranks.setdefault(step, set()).add(rank)
    most = set[int]().union(*ranks.values())
    for step in sorted(ranks):
        if ranks[step] != most:
            missing = min(most - ranks[step])
            raise ValueError(
                f"{place}: forward_pass_id {step}: the record of rank {missing} is missing (there are ranks "
                f"{sorted(most)[:8]}): that pass was not counted whole; dump all ranks after the last pass"
            )
    steps = sorted(samples)
    counts_WLE = np.stack([samples[step] for step in steps])
    meta = with_copies({"source": "sglang-pt", "ranks_summed": len(most)}, counts_WLE)
    return Loads(counts_WLE, np.array(steps, dtype=np.int64), meta)


def _load(file: Path) -> dict[str, Any]:
    """Return the dict of a dump. Raises ValueError naming the file for anything that is no plain one."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's parser, over damage that is told below
            _check_archive(file)
            loaded = torch.load(str(file), weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # a damaged file can raise anything in zipfile, pickletools and torch
        text = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{file}: cannot be read as a dump of SGLang's recorder: {text}") from None
    return as_record(loaded, str(file))


def _check_archive(file: Path) -> None:
    """Raise ValueError unless a file is a whole zip of torch.save, with plain names in its pickle."""
    if not zipfile.is_zipfile(file):
        raise ValueError("not a file of torch.save (a zip; torch before 1.6 wrote another)")
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if len({info.filename for info in infos}) != len(infos):
            raise ValueError("a part is there twice")
        pickles = [info for info in infos if info.filename.endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].filename.count("/") != 1:
            raise ValueError(
                f"expected one data.pkl in it, found {[info.filename[:40] for info in pickles[:4]]}"
            )
        if pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise ValueError(
                f"its data.pkl has {pickles[0].file_size} bytes, at most {_MAX_PICKLE_BYTES} are read"
            )
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > file.stat().st_size:
                raise ValueError(
                    f"part {shown(info.filename)} is compressed or claims more than the file holds"
                )
            with archive.open(info) as part:  # to its end: zipfile then checks the sum
                while part.read(_CHUNK_BYTES):
                    pass
        _check_names(archive.read(pickles[0]))


def _check_names(pickled: bytes) -> None:
    """Raise ValueError where a pickle names anything but tensors and containers; nothing is executed."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _INDIRECT or (opcode.name == "GLOBAL" and not _PLAIN.fullmatch(str(argument))):
            raise ValueError(f"its pickle names {shown(argument or opcode.name)}: no plain tensor; not read")


def _claimed_bytes(tensor: Any) -> int:
    import torch

    return int(tensor.numel()) * int(tensor.element_size()) if isinstance(tensor, torch.Tensor) else 0


def _array(value: Any, axes: int, name: str, where: Path | str) -> NDArray[np.int64]:
    """Return an integer tensor as int64. Raises ValueError for anything else, or for more values than its
    storage holds (a tensor of stride 0 claims any size)."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{where}: {name} is {shown(value)}, expected an integer tensor with {axes} axes")
    kind = f"{value.dtype} {tuple(value.shape)}"
    if value.ndim != axes or 0 in value.shape or value.dtype not in (
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
    ):  # fmt: skip
        raise ValueError(
            f"{where}: {name} is {kind}, expected an integer tensor with {axes} axes, none empty"
        )
    if _claimed_bytes(value) > value.untyped_storage().nbytes():
        raise ValueError(f"{where}: {name} is {kind}, more than the file holds of it")
    return as_int64(value.detach().numpy(), f"{where}: {name}")
