"""Damaged load traces, thousands of each form: a valid trace or a ValueError that names the file."""

import io
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from balancer.trace import Trace, load_trace

WRITERS = [
    *("folder", "npz", "json", "json-list", "json-lines", "csv", "csv-long", "exp-counts", "vllm"),
    *("vllm-layers", "vllm-physical", "megatron", "sglang-json", "sglang-pt-stat", "sglang-pt-passes"),
]
# what reading one small damaged file may cost at most
MAX_PEAK_BYTES = 16 * 2**20
# what stands in a place of a damaged file: numbers beyond a type, nesting, text of other kinds, an opcode
TOKENS = [
    *(b"-1", b"0", b"1.5", b"1e300", b"1e-300", b"NaN", b"Infinity", b"true", b"null", b'"x"', b"{}", b"[]"),
    *(b"9" * 18, b"9" * 19, b"9" * 25, b"9" * 5000, b"65535", b"4294967296", b"\x00", b"\xff\xfe", b"\n"),
    *(b"[" * 3000, b'{"a":' * 3000, b"]" * 50, b",", b'"'),
    *(b"\\u0000", "\u0662\u2028".encode(), b"exp_counts"),
    *(b"step 1 layer 0 ", b'"step": 7, ', b'"top_indices": ', b"PK\x03\x04"),
    b"cos\nsystem\n(S'touch executed'\ntR.",
    *(b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x00" * 8, b"\x80\x02", b"(lp0\n", b"J\xff\xff\xff\x7f"),
]


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return data after one to four changes."""
    for _ in range(rng.integers(1, 5)):
        size = len(data)
        a, b = sorted(int(i) for i in rng.integers(0, size + 1, size=2))
        b = min(b, a + int(rng.integers(1, 200)))
        kind = rng.integers(8)
        if kind == 0 and size:
            a = min(a, size - 1)
            data = data[:a] + bytes([data[a] ^ (1 << int(rng.integers(8)))]) + data[a + 1 :]
        elif kind == 1:
            data = data[:a] if rng.integers(2) else data[a:]
        elif kind == 2:
            data = data[:a] + data[b:]
        elif kind == 3:
            data = data[:b] + data[a:b] * int(rng.integers(1, 4)) + data[b:]
        elif kind == 4:
            data = data[:a] + TOKENS[rng.integers(len(TOKENS))] + data[a:]
        elif kind == 5:
            data = _token_replaced(data, rng)
        elif kind == 6:
            data = _swapped(data, b"\n", rng)
        else:
            data = _swapped(data, b",", rng)
    return data


def _token_replaced(data: bytes, rng: np.random.Generator) -> bytes:
    """Put a token in place of a run of digits."""
    places = [
        i for i in range(len(data)) if data[i : i + 1].isdigit() and not data[max(i - 1, 0) : i].isdigit()
    ]
    if not places:
        return data
    start = end = places[rng.integers(len(places))]
    while data[end : end + 1].isdigit():
        end += 1
    return data[:start] + TOKENS[rng.integers(len(TOKENS))] + data[end:]


def _swapped(data: bytes, separator: bytes, rng: np.random.Generator) -> bytes:
    parts = data.split(separator)
    i, j = rng.integers(len(parts), size=2)
    parts[i], parts[j] = parts[j], parts[i]
    return separator.join(parts)


def _inside_zip(data: bytes, rng: np.random.Generator) -> bytes:
    """Change one part of a zip and pack it anew, so that its checksums hold."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        infos = old.infolist()
        # the pickle of a dump and the header of an array matter most
        hit = next((n for n, info in enumerate(infos) if info.filename.endswith(".pkl")), 0)
        hit = hit if rng.integers(4) else int(rng.integers(len(infos)))
        for n, info in enumerate(infos):
            content = old.read(info)
            new.writestr(info.filename, _mutated(content, rng) if n == hit else content, info.compress_type)
    return out.getvalue()


def _cases(path: Path, rng: np.random.Generator, count: int):
    """Damage a file (of a folder: one of its files) again and again."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    whole = {file: file.read_bytes() for file in files}
    for _ in range(count):
        file = files[rng.integers(len(files))]
        if path.suffix in (".npz", ".pt") and rng.integers(3):
            file.write_bytes(_inside_zip(whole[file], rng))
        else:
            file.write_bytes(_mutated(whole[file], rng))
        yield
        file.write_bytes(whole[file])


def _check_one(path: Path) -> bool:
    """Load a damaged file; whether it was a valid trace still."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trace = load_trace(path)
        except ValueError as error:
            trace, text = None, str(error)
    assert all(w.category is UserWarning for w in told), [str(w.message) for w in told]
    if trace is None:
        assert path.name in text
        assert len(text) < 20_000  # a header shows what it holds instead of its format
        return False
    # all that a Trace promises is checked as it is made
    Trace(tokens_per_expert_WLE=trace.tokens_per_expert_WLE, steps_W=trace.steps_W, meta=trace.meta)
    assert trace.tokens_per_expert_WLE.size < 2**22
    return True


def _run(name: str, count: int, trace_writers, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    counts = rng.integers(0, 60, size=(3, 2, 4))
    (tmp_path / "files").mkdir()
    path = trace_writers[name](tmp_path / "files", counts, [1, 11, 21])
    load_trace(path, num_experts=4)  # what is imported on use is no cost of a damaged file
    valid, peak = 0, 0
    tracemalloc.start()
    try:
        for n, _ in enumerate(_cases(path, rng, count)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                valid += _check_one(path)
            except BaseException as error:
                error.add_note(f"damaged file {n} of {name}")
                raise
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES
    assert 0 < valid < count / 2  # the damage is neither harmless nor always noticed at the first byte
    assert sorted(p.name for p in tmp_path.iterdir()) == ["files"], "something was executed"
    print(f"{name}: {count} files, {valid} valid still, peak {peak / 2**20:.1f} MiB")


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_files_are_told_or_harmless(name, trace_writers, tmp_path, monkeypatch):
    _run(name, 150, trace_writers, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_ten_thousand_damaged_files_are_told_or_harmless(name, trace_writers, tmp_path, monkeypatch):
    _run(name, 10_000, trace_writers, tmp_path, monkeypatch)
