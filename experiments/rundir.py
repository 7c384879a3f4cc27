"""RunDir: the folder of one run. Never overwritten, self-contained, and locked while somebody writes to it.

runs/tiny-1/
  config.toml       every setting as resolved (re-read at once to prove that it holds)
  deepspeed.json    DeepSpeed's settings as given to the engine
  versions.json     Python, packages, host, data hash, number of ranks
  metrics.jsonl     the truth: one record per logged step, validation and event
  loads/            the load trace: tokens per expert of every step and layer
  tb/               TensorBoard's view of the above
  checkpoints/      step-00000100/ ...: state/, model.safetensors, manifest.json
  watch/            what each rank did last (moe/watch.py); not with a single rank
"""

import fcntl
import json
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from experiments.config import Config, load_config, to_toml

_PENDING = "settings.pending"
PACKAGES = ("torch", "deepspeed", "numpy", "tensorboard", "safetensors", "counterpoise")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDir:
    """The paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def deepspeed(self) -> Path:
        return self.path / "deepspeed.json"

    @property
    def versions(self) -> Path:
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loads(self) -> Path:
        return self.path / "loads"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def check_new(runs_dir: str | Path, name: str | None) -> None:
    """Raise ValueError where a run of this name exists: a run is continued, never overwritten."""
    if name is not None and name != "" and (Path(runs_dir) / name).exists():
        raise ValueError(
            f"{Path(runs_dir) / name} exists already; continue it with --resume {name}, or choose another "
            "--name"
        )


def create(runs_dir: str | Path, name: str | None, stem: str) -> RunDir:
    """Make the folder of a new run.

    name: its name;  None takes stem-1, stem-2, ..., the first that is free.   Raises ValueError where `name`
    exists, or is no plain folder name.
    """
    parent = Path(runs_dir)
    if name is not None:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"--name {name!r} must be a plain name; its folder is made under {parent}")
        check_new(parent, name)
        (parent / name).mkdir(parents=True)
        return RunDir(path=parent / name)
    number = 1
    while True:
        path = parent / f"{stem}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return RunDir(path=path)


def find(runs_dir: str | Path, name: str) -> RunDir:
    """The folder of an existing run, by name or path.   Raises ValueError, with the runs there are, if
    none."""
    for path in (Path(runs_dir) / name, Path(name)):
        run = RunDir(path=path)
        _finish_settings(run)
        if run.config.is_file():
            return run
    there = sorted(p.parent.name for p in Path(runs_dir).glob("*/config.toml"))
    raise ValueError(
        f"no run {name!r} under {runs_dir}; there " + (f"are: {', '.join(there)}" if there else "are none")
    )


def write_settings(
    run: RunDir, config: Config, engine_settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Write config.toml, deepspeed.json and versions.json, and prove that config.toml reads back the same.

    All three or none: they are written down in one file first, which `find` finishes from after a kill.
    """
    texts = {
        run.config.name: to_toml(config),
        run.deepspeed.name: json.dumps(engine_settings, indent=2) + "\n",
        run.versions.name: json.dumps({**versions(), **facts}, indent=2) + "\n",
    }
    write_whole(run.path / _PENDING, json.dumps(texts))
    _finish_settings(run)
    if load_config(run.config) != config:
        raise RuntimeError(f"{run.config} does not read back to the configuration that was written")


def _finish_settings(run: RunDir) -> None:
    """Write the settings that are pending; nothing where none are."""
    pending = run.path / _PENDING
    try:
        texts = json.loads(pending.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for name, text in texts.items():
        write_whole(run.path / name, text)
    pending.unlink(missing_ok=True)  # another rank may have been as quick


def versions() -> dict[str, Any]:
    """Versions of Python and the packages that matter, and where the run was."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def read_facts(run: RunDir) -> dict[str, Any]:
    """What versions.json says.   Raises ValueError, naming the file, where it cannot be read."""
    try:
        return json.loads(run.versions.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{run.versions}: cannot be read ({error}); the run cannot be continued") from error


def check_ranks(run: RunDir, world_size: int) -> None:
    """Raise ValueError where a run is to be continued on another number of ranks than it has had."""
    had = read_facts(run).get("world_size")
    if had != world_size:
        raise ValueError(
            f"{run.path} was trained with world_size={had}, and this is {world_size}; resume it on the same "
            "number of ranks (--ranks), or add --reshape, which fits its checkpoint to another"
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and put it in place whole, on the disk."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def lock(run: RunDir) -> IO[str]:
    """Hold the run until the returned file is closed.   Raises ValueError where another process holds it."""
    file = open(run.path / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"{run.path}: another process is writing to this run; wait for it to end") from error
    return file
