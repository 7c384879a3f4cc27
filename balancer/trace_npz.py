"""The npz form of a load trace: counts [W, L, E], steps or iters [W], meta (text, a JSON object; optional).

Under `balancer/trace.py`. The header of each array is checked against its compressed size before anything is
allocated, and pickles are refused.
"""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from balancer.trace_parts import Loads
from balancer.trace_values import as_int64, shown

# Largest array: 2^31 int64 take 16 GiB; a longer trace belongs into a folder, which is memory-mapped.
MAX_VALUES = 2**31
# Deflate reaches 1032:1, load traces 5:1 to 50:1: beyond 100:1 an array is taken for a bomb once it is large.
_MAX_RATIO, _LARGE_BYTES = 100, 2**28
_FIELDS = ("counts", "steps", "iters", "meta")


def read_npz(place: Path) -> Loads:
    """Read an npz. Raises ValueError naming file and field for another kind of file, damage, a pickle, a
    missing field, a wrong type, or an array whose header claims more than the file can hold."""
    try:
        names, arrays = _read_arrays(place)
    except Exception as error:  # damage can raise anything in zipfile, zlib and numpy's parser
        raise ValueError(f"{place}: cannot be read as a load trace: {error}") from None
    step_names = [name for name in ("steps", "iters") if name in arrays]
    if "counts" not in arrays or len(step_names) != 1:
        raise ValueError(
            f"{place}: expected the fields counts [W, L, E] and steps or iters [W], found {names[:8]}"
        )
    unread = [name for name in names if name not in _FIELDS]
    if unread:
        warnings.warn(
            f"{place}: field {', '.join(unread[:8])} is no part of a load trace, not read", stacklevel=4
        )
    counts_WLE = as_int64(arrays["counts"], f"{place}: field counts")
    steps_W = as_int64(arrays[step_names[0]], f"{place}: field {step_names[0]}")
    return Loads(counts_WLE, steps_W, _parse_meta(place, arrays.get("meta")))


def _read_arrays(place: Path) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """Return the names of all fields, and the arrays of those that a trace has."""
    if not zipfile.is_zipfile(place):
        with open(place, "rb") as file:
            single = file.read(6) == b"\x93NUMPY"
        raise ValueError(
            "a single array, not an npz archive" if single else "not an npz archive (a zip of .npy files)"
        )
    arrays: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(place) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the header's parser, over damage that is told below
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(infos) != len(archive.infolist()):
            raise ValueError("a field is there twice")
        for name in _FIELDS:
            if name in infos:
                arrays[name] = _read_field(archive, infos[name], name, place.stat().st_size)
    return sorted(infos), arrays


def _read_field(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, file_bytes: int) -> NDArray[Any]:
    """Read one array of an npz; ValueError naming it for an object array, damage or a claim too large."""
    try:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("compressed in a way that numpy does not write")
        with archive.open(info) as file:
            _check_claim(cast("BinaryIO", file), info, file_bytes)
        with archive.open(info) as file:
            array = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
            if file.read(1):
                raise ValueError("more bytes than its header says")
            return array
    except Exception as error:
        raise ValueError(f"field {name}: {str(error)[:200] or type(error).__name__}") from None


def _check_claim(file: BinaryIO, info: zipfile.ZipInfo, file_bytes: int) -> None:
    """Raise ValueError where the header of an array claims more than its part of the archive can hold."""
    version = np.lib.format.read_magic(file)
    # an attribute of the module, by name: its types are not public
    parse: Any = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = parse(file)
    if dtype.hasobject:
        return  # read_array refuses it, in numpy's words
    num_values = 1
    for size in shape:
        num_values *= size
    if min(shape, default=0) < 0 or num_values > MAX_VALUES:
        raise ValueError(f"its header claims {shown(num_values)} values, at most {MAX_VALUES} are read")
    claimed = num_values * dtype.itemsize
    held = info.file_size - file.tell()
    if claimed != held:
        raise ValueError(f"its header claims {claimed} bytes, the archive holds {held}")
    packed = min(info.compress_size, file_bytes)
    if info.compress_type == zipfile.ZIP_STORED and claimed > packed:
        raise ValueError(f"its header claims {claimed} bytes, {packed} are there")
    if claimed > 1100 * (packed + 64) or (claimed > _LARGE_BYTES and claimed > _MAX_RATIO * packed):
        raise ValueError(
            f"its header claims {claimed} bytes in {packed} compressed ones: taken for a zip bomb; keep a "
            "long trace that is so regular as a folder (counterpoise trace convert IN OUT)"
        )


def _parse_meta(place: Path, text: NDArray[Any] | None) -> dict[str, Any]:
    if text is None:
        return {}
    if text.dtype.kind != "U" or text.size != 1:
        raise ValueError(f"{place}: field meta is {text.dtype} {text.shape}, expected one text of JSON")
    try:
        meta = json.loads(str(text.reshape(-1)[0]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: field meta is not JSON ({error})") from None
    if not isinstance(meta, dict):
        raise ValueError(f"{place}: field meta is {shown(cast('object', meta))}, expected a JSON object")
    return cast("dict[str, Any]", meta)
