"""Two ways to write a file that a crash cannot spoil: append whole, and replace whole.

Under the writers of traces and of JSONL records.
"""

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path


def append_whole(file: FileIO, data: bytes) -> None:
    """Append data to an unbuffered file, or nothing: a part of it would shift or spoil what comes after.

    file: opened with "ab" and buffering=0. Raises OSError when the system refuses (disk full); the file then
    ends where it ended before.
    """
    start = os.fstat(file.fileno()).st_size
    written = 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except BaseException:
        os.ftruncate(file.fileno(), start)
        raise


def replace_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file aside, bring it to the disk, and put it in place of the old one in one move.

    path: of the file, there or not. parts: its contents, which may be read from the old file on the way.
    Raises OSError when the system refuses; the old file is then untouched.
    """
    aside = path.with_name(path.name + ".new")
    try:
        with open(aside, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
