"""Checkpoints: complete or absent. Written aside, listed in a manifest with sizes and hashes, renamed.

    checkpoints/step-00000100/
      ...             what experiments/saving.py puts there
      manifest.json   step, ranks, size and sha256 of every file

A checkpoint is loaded only after every hash in its manifest was verified.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.rundir import RunDir, write_whole

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
FORMAT = 3
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there, with the sizes and hashes of its manifest."""

    path: Path
    step: int
    world_size: int


def folder_name(step: int) -> str:
    """step-00000100: zero-padded, so that names sort as numbers."""
    return f"step-{step:08d}"


def begin(run: RunDir, step: int) -> Path:
    """An empty folder aside, for the files of this step's checkpoint. Leftovers of broken saves are
    removed."""
    run.checkpoints.mkdir(exist_ok=True)
    for leftover in run.checkpoints.glob("*.partial"):
        shutil.rmtree(leftover)
    aside = run.checkpoints / f"{folder_name(step)}.partial"
    aside.mkdir()
    return aside


def finish(aside: Path, step: int, world_size: int, keep: int) -> Path:
    """Make the folder a checkpoint: manifest, fsync of every file and folder, rename; then drop old ones.

    keep: newest checkpoints that stay.   Returns the checkpoint's path.
    """
    files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    listed = {str(path.relative_to(aside)): _describe(path, sync=True) for path in files}
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": listed}
    write_whole(aside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for folder in {path.parent for path in files} | {aside}:
        _sync_folder(folder)
    final = aside.with_name(folder_name(step))
    if final.exists():  # a broken one of the same step, or a run that was resumed from an older one
        shutil.rmtree(final)
    os.rename(aside, final)
    _sync_folder(final.parent)
    # later ones belong to a branch that was given up: this run came back to an older checkpoint
    kept = [path for found, path in _folders(final.parent) if found <= step][-keep:]
    for _, old in _folders(final.parent):
        if old not in kept:
            shutil.rmtree(old)
    return final


def latest(run: RunDir, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is complete; None where the run has none at all.

    Every size and hash is verified. A broken one is named through `say`, with what is wrong, and passed over.
    Raises ValueError where there are checkpoints and all are broken: starting over would write over them.
    """
    folders = _folders(run.checkpoints)
    for step, path in reversed(folders):
        try:
            return verify(path)
        except ValueError as error:
            say(f"checkpoint of step {step} is not usable: {error}; looking for the one before")
    if folders:
        raise ValueError(
            f"none of the {len(folders)} checkpoints in {run.checkpoints} is usable; move that folder away "
            "to start the run over from step 0"
        )
    return None


def verify(path: Path) -> Checkpoint:
    """Check every file against the manifest.   Raises ValueError naming the file and what is wrong with
    it."""
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{file} has {size} bytes, expected {expected['bytes']}: truncated?")
        if _describe(file)["sha256"] != expected["sha256"]:
            raise ValueError(f"{file} differs from its sha256 in {MANIFEST}: damaged or replaced")
    return Checkpoint(path=path, step=manifest["step"], world_size=manifest["world_size"])


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from error
    fields = {"format": int, "step": int, "world_size": int, "files": dict}
    whole = isinstance(manifest, dict) and all(isinstance(manifest.get(k), t) for k, t in fields.items())
    if whole and manifest["format"] != FORMAT:
        raise ValueError(
            f"{file} is of format {manifest['format']}, and this version reads format {FORMAT}: resume with "
            "the version that wrote it"
        )
    if not whole or not all(map(_is_description, manifest["files"].values())):
        raise ValueError(f"{file} is no manifest of format {FORMAT}")
    return manifest


def _is_description(entry: Any) -> bool:
    return isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that is named like a checkpoint, oldest first."""
    if not checkpoints.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in checkpoints.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match)


def _describe(path: Path, sync: bool = False) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
