"""Domains of text or tokens, split into train and validation without leakage.

First stage of the data flow: `read_paths` (the user's own files, here) and `builtin.read_builtin` (the
corpus of every Python installation) give a `Corpus`; `experiments.data` draws batches from it.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TRAIN, VALID, CUT = "train", "valid", "cut"
TOKEN_SUFFIXES = (".npy", ".bin")
GAP = 1024  # bytes or tokens left out between a train and a validation block of one file
BLOCK = 8192  # bytes of a validation block where a file is cut
SAMPLED_FROM = 64 * 2**20  # token files above this many bytes are hashed by samples
PROBE = 8192  # leading bytes in which a zero byte says "not text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """One kind of text. train, valid: [n] integer tokens (uint8 for text, memory-mapped for token files)."""

    name: str
    train: np.ndarray
    valid: np.ndarray
    num_files: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """All domains, the hash of what they hold, and notes: what the user should know about the load."""

    domains: tuple[Domain, ...]
    vocab_size: int
    sha256: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file's text before the split. name: path below its folder; digest: sha256 of the content."""

    name: str
    data: bytes
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.data).digest())


def in_hash_order(names: Iterable[str]) -> list[str]:
    """Names in the order of their sha256: well mixed, and the same on every machine and locale."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())


# --- the split: by content, before anything is cut into domains ---------------------------------------------


def plan_split(groups: Mapping[str, Sequence[TextFile]], valid_frac: float) -> dict[bytes, str]:
    """Say for each content (by digest) whether it is train, valid, or cut into blocks of both.

    groups: files by domain; a content that several groups hold gets one answer for all of them, so that no
    copy of a validation text is trained on. A group gives whole files to validation where these come near
    its share, in the order of their digests; a group of few large files is cut. `split_file` carries the
    answer out.
    """
    plan: dict[bytes, str] = {}
    for files in groups.values():
        sizes = {file.digest: len(file.data) for file in files}
        for digest, side in _plan_group(sizes, valid_frac).items():
            if plan.get(digest) != CUT:
                plan[digest] = side
    return plan


def _plan_group(sizes: Mapping[bytes, int], valid_frac: float) -> dict[bytes, str]:
    """The sides that a group asks for; no entry means train (another group may ask for more)."""
    want = valid_frac * sum(sizes.values())
    taken = 0
    chosen: dict[bytes, str] = {}
    for digest in sorted(sizes):
        if taken + sizes[digest] <= 1.25 * want:
            chosen[digest] = VALID
            taken += sizes[digest]
    if taken < 0.5 * want or len(chosen) == len(sizes):
        return dict.fromkeys(sizes, CUT)
    return chosen


def split_file(file: TextFile, plan: Mapping[bytes, str], valid_frac: float) -> tuple[bytes, bytes]:
    """The (train, valid) text of one file. A cut file loses GAP bytes on both sides of a validation block."""
    side = plan.get(file.digest, TRAIN)
    if side != CUT:
        return (file.data, b"") if side == TRAIN else (b"", file.data)
    size = len(file.data)
    num_blocks = max(1, round(size * valid_frac / BLOCK))
    period, length = size // num_blocks, int(size * valid_frac) // num_blocks
    if length < 1 or period < length + 2 * GAP + 2:
        return file.data, b""  # too small to be cut: the caller sees an empty validation part
    # one period: train | gap | valid | gap | train
    train, valid, done = [], [], 0
    for start in range((period - length) // 2, num_blocks * period, period):
        train.append(file.data[done : start - GAP])
        valid.append(file.data[start : start + length])
        done = start + length + GAP
    return b"".join([*train, file.data[done:]]), b"".join(valid)


def text_domain(name: str, train: Sequence[bytes], valid: Sequence[bytes], num_files: int) -> Domain:
    """A domain of bytes from the parts of its files; newlines join them, empty ones are left out."""
    parts = [
        np.frombuffer(b"\n".join(part for part in side if part), dtype=np.uint8) for side in (train, valid)
    ]
    return Domain(name=name, train=parts[0], valid=parts[1], num_files=num_files)


# --- the user's own files -------------------------------------------------------------------------


def read_paths(
    paths: Sequence[str], *, vocab_size: int, token_dtype: str, valid_frac: float, max_bytes: int
) -> tuple[list[Domain], list[str]]:
    """Read files and folders, each a domain, in the order given; also returns notes on what was left out.

    max_bytes: most bytes of one text domain, 0 = no limit; token files stay on disk and know no limit.
    ValueError for a missing, repeated, empty or unreadable path and for tokens of vocab_size or more.
    """
    roots = [Path(path).expanduser() for path in paths]
    names = _domain_names(paths, roots)
    notes: list[str] = []
    texts: dict[str, list[TextFile]] = {}
    domains: dict[str, Domain] = {}
    for name, root in zip(names, roots):
        if root.is_file() and root.suffix in TOKEN_SUFFIXES:
            domains[name] = _token_domain(name, root, token_dtype, vocab_size, valid_frac)
        else:
            texts[name] = _read_text(name, root, max_bytes, notes)
    plan = plan_split(texts, valid_frac)
    for name, files in texts.items():
        sides = [split_file(file, plan, valid_frac) for file in files]
        domains[name] = text_domain(name, [t for t, _ in sides], [v for _, v in sides], len(files))
        if vocab_size < 256:
            _check_text_tokens(name, domains[name], vocab_size)
    return [domains[name] for name in names], notes


def _domain_names(paths: Sequence[str], roots: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole path as given where two paths end alike."""
    seen: set[Path] = set()
    for path, root in zip(paths, roots):
        if not root.exists():
            raise ValueError(f"data.paths: {path!r} does not exist; give files or folders that do")
        if root.resolve() in seen:
            raise ValueError(f"data.paths names {path!r} twice; data.weights gives a domain more weight")
        seen.add(root.resolve())
    last = [root.resolve().name or path for path, root in zip(paths, roots)]
    return [path if last.count(name) > 1 else name for path, name in zip(paths, last)]


def _read_text(name: str, root: Path, max_bytes: int, notes: list[str]) -> list[TextFile]:
    """The text files of one file or folder, in hash order, whole ones up to max_bytes (of one, its start)."""
    sizes = _file_sizes(root, notes)
    total, taken = sum(sizes.values()), 0
    files: list[TextFile] = []
    skipped: list[str] = []
    for part in in_hash_order(sizes):
        size = min(sizes[part], max_bytes) if max_bytes else sizes[part]
        if max_bytes and taken + size > max_bytes:
            continue
        data = _read_bytes(root / part if part else root, size)
        if b"\0" in data[:PROBE]:
            skipped.append(part or root.name)
        elif data:
            files.append(TextFile(name=part, data=data))
            taken += len(data)
    if skipped:
        notes.append(
            f"domain {name!r}: {len(skipped)} files are no text, left out; the first: {skipped[0]!r}"
        )
    if not files:
        raise ValueError(f"data.paths: {str(root)!r} holds no text; give a folder with text files, or a file")
    if max_bytes and total > max_bytes:
        notes.append(
            f"domain {name!r}: {taken / 1e6:.1f} of {total / 1e6:.1f} MB read; "
            "raise data.max_mb_per_domain for more (0 = all)"
        )
    return files


def _file_sizes(root: Path, notes: list[str]) -> dict[str, int]:
    """Bytes of each file below a folder by its relative path, hidden ones left out; a file is its own ''."""
    if root.is_file():
        return {"": root.stat().st_size}
    if not root.is_dir():
        raise ValueError(f"data.paths: {str(root)!r} is neither a file nor a folder")
    sizes: dict[str, int] = {}
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        linked = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        notes.extend(f"linked folder {str(Path(folder) / name)!r} is not followed" for name in sorted(linked))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(folder) / name for name in names if not name.startswith(".")):
            if path.is_file():  # no pipes, no broken links
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return sizes


def _refuse(error: OSError) -> None:
    raise ValueError(f"data.paths: {error.filename!r} cannot be read: {error.strerror}") from error


def _read_bytes(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(size)
    except OSError as error:
        raise ValueError(f"data.paths: {str(path)!r} cannot be read: {error.strerror}") from error


def _check_text_tokens(name: str, domain: Domain, vocab_size: int) -> None:
    top = max(int(part.max()) for part in (domain.train, domain.valid) if part.size)
    if top >= vocab_size:
        raise ValueError(
            f"domain {name!r} is text with byte {top}, data.vocab_size={vocab_size} ends before; use 256"
        )


# --- token files ----------------------------------------------------------------------------------


def _token_domain(name: str, path: Path, token_dtype: str, vocab_size: int, valid_frac: float) -> Domain:
    """A memory-mapped token file: the head is train, then GAP tokens are left out, the tail is validation."""
    tokens = _open_tokens(path, token_dtype)
    _check_tokens(path, tokens, vocab_size)
    num_valid = int(len(tokens) * valid_frac)
    return Domain(
        name=name,
        train=tokens[: max(0, len(tokens) - num_valid - GAP)],
        valid=tokens[len(tokens) - num_valid :],
        num_files=1,
    )


def _open_tokens(path: Path, token_dtype: str) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"token file {str(path)!r} is empty")
    if path.suffix == ".bin":
        dtype = np.dtype(token_dtype).newbyteorder("<")
        if size % dtype.itemsize:
            raise ValueError(
                f"token file {str(path)!r}: {size} bytes are no multiple of {dtype.itemsize} "
                f"(data.token_dtype={token_dtype!r}); give the type that it was written with"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"token file {str(path)!r} is no plain .npy array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"token file {str(path)!r}: expected integers of shape [n], found {tokens.dtype} {tokens.shape}"
        )
    return tokens


def _check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Every token is in 0..vocab_size-1; reads the whole file, in pieces, if its type allows others."""
    info = np.iinfo(tokens.dtype)
    if info.min >= 0 and info.max < vocab_size:
        return
    piece = 2**22
    for start in range(0, len(tokens), piece):
        part = tokens[start : start + piece]
        if int(part.max()) < vocab_size and int(part.min()) >= 0:
            continue
        position = int(np.flatnonzero((part >= vocab_size) | (part < 0))[0])
        raise ValueError(
            f"token file {str(path)!r}: token {int(part[position])} at position {start + position} is "
            f"outside 0..{vocab_size - 1}; set data.vocab_size to that of the tokenizer"
        )


# --- the hash -------------------------------------------------------------------------------------


def corpus_hash(domains: Sequence[Domain], vocab_size: int) -> str:
    """The sha256 (hex) over vocabulary, names, sizes, types and content of all domains.

    A part of more than 64 MiB that is memory-mapped enters by its size and 64 blocks of 64 KiB, evenly
    spaced and the end included: an edit between them goes unseen, and a large file costs milliseconds.
    """
    digest = hashlib.sha256(f"{vocab_size}".encode())
    for domain in domains:
        for side, part in ((TRAIN, domain.train), (VALID, domain.valid)):
            digest.update(f"\n{domain.name}\n{side} {part.dtype.str} {part.size}\n".encode())
            if isinstance(part, np.memmap) and part.nbytes > SAMPLED_FROM:
                block = 2**16 // part.dtype.itemsize
                for start in np.linspace(0, part.size - block, 64).astype(np.int64):
                    digest.update(np.ascontiguousarray(part[start : start + block]).data)
            else:
                digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
