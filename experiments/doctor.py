"""`counterpoise doctor`: what this machine has, whether it is right, and what to do where it is not.

It stands beside the flow: `collect_facts` looks at the machine, `check` judges the facts without looking at
anything, `table` prints. So every judgement can be tested on machines that are not there.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OK, WARN, BAD = "ok", "warn", "bad"
TESTED_TORCH, TESTED_DEEPSPEED = "2.13.0", "0.19.8"
GIB = 2**30
INSTALL = "install the tested versions: ./lab doctor, or pip install -r requirements.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: what was looked at, what was found, ok, warn or bad, and what to do."""

    name: str
    value: str
    state: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was found on the machine. Sizes in bytes; None = not there, or not to be found out."""

    python: tuple[int, int, int]
    versions: Mapping[str, str] = field(default_factory=dict)  # of the installed distributions
    torch_error: str = ""  # why torch does not import
    torch_cuda: str | None = None  # the CUDA version that torch was built for
    devices: tuple[str, ...] = ()  # names of the CUDA devices that torch sees
    backends: tuple[str, ...] = ()  # gloo, nccl
    nvidia_gpus: tuple[str, ...] = ()  # what nvidia-smi lists
    cores: int = 1
    memory: int | None = None
    memory_free: int | None = None
    disk_free: int | None = None
    disk_path: str = "."
    shm_hook: bool | None = None  # does DeepSpeed's private switch exist; None: DeepSpeed does not import
    shm_error: str = ""
    contract_problems: tuple[str, ...] = ()  # what the DeepSpeed here lacks of what moe/zero.py relies on
    has_compiler: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 when a row is bad, else 0. argv: none are known but --help."""
    argparse.ArgumentParser(
        prog="counterpoise doctor",
        description="Looks at this machine and its packages (memory and disk in GiB) and says what to do.",
        epilog="The exit code is 1 when anything is bad, else 0.",
    ).parse_args(argv)
    rows = check(collect_facts())
    print(table(rows))
    return 1 if any(row.state == BAD for row in rows) else 0


def check(facts: Facts) -> list[Row]:
    """The judgement on every fact, in the order in which to repair things."""
    judges: Sequence[Callable[[Facts], Row]] = (
        python_row,
        torch_row,
        deepspeed_row,
        contract_row,
        hook_row,
        accelerator_row,
        backend_row,
        cores_row,
        memory_row,
        disk_row,
        numba_row,
        tensorboard_row,
        transformers_row,
    )
    return [judge(facts) for judge in judges]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, what to do below each row that needs it, and a last line that sums up."""
    names = max(len(row.name) for row in rows)
    lines: list[str] = []
    for row in rows:
        lines += [f"{row.state:4}  {row.name:{names}}  {row.value}"]
        if row.remedy:
            lines += [f"{'':4}  {'':{names}}  -> {row.remedy}"]
    bad, warn = (sum(row.state == state for row in rows) for state in (BAD, WARN))
    return "\n".join([*lines, "", f"{bad} bad, {warn} to look at" if bad or warn else "all is well"])


# ---- the judgements -------------------------------------------------------------------------------------


def python_row(facts: Facts) -> Row:
    value = ".".join(str(part) for part in facts.python)
    if facts.python < (3, 11, 0):
        return Row(name="Python", value=value, state=BAD, remedy="install 3.11 or newer, then ./lab doctor")
    return Row(name="Python", value=value, state=OK)


def torch_row(facts: Facts) -> Row:
    found = facts.versions.get("torch")
    if found is None:
        return Row(name="torch", value="not installed", state=BAD, remedy=INSTALL)
    build = f"CUDA {facts.torch_cuda} build" if facts.torch_cuda else "CPU build"
    value = f"{found} ({build})"
    if facts.torch_error:
        return Row(name="torch", value=f"{found}: {facts.torch_error}", state=BAD, remedy=INSTALL)
    if release(found) < release(TESTED_TORCH)[:2]:
        return Row(name="torch", value=value, state=BAD, remedy=f"2.13 or newer is needed; {INSTALL}")
    if facts.nvidia_gpus and not facts.torch_cuda:
        remedy = "an NVIDIA GPU is here: ./lab --torch-index URL doctor (PyTorch's CUDA index)"
        return Row(name="torch", value=value, state=WARN, remedy=remedy)
    if release(found) != release(TESTED_TORCH):
        return Row(name="torch", value=value, state=WARN, remedy=f"tested: {TESTED_TORCH}; run ./lab test")
    return Row(name="torch", value=value, state=OK)


def deepspeed_row(facts: Facts) -> Row:
    found = facts.versions.get("deepspeed")
    if found is None:
        return Row(name="DeepSpeed", value="not installed", state=BAD, remedy=INSTALL)
    if facts.shm_hook is None:
        value = f"{found}: {facts.shm_error or 'does not import'}"
        return Row(name="DeepSpeed", value=value, state=BAD, remedy=INSTALL)
    if release(found) == release(TESTED_DEEPSPEED):
        return Row(name="DeepSpeed", value=f"{found} (the tested version)", state=OK)
    if release(TESTED_DEEPSPEED) < release(found) < (0, 20):
        remedy = f"tested with {TESTED_DEEPSPEED}: expert layers use its private parts; run ./lab test"
        return Row(name="DeepSpeed", value=found, state=WARN, remedy=remedy)
    remedy = f"expert layers use private parts of {TESTED_DEEPSPEED}; {INSTALL}"
    return Row(name="DeepSpeed", value=found, state=BAD, remedy=remedy)


def contract_row(facts: Facts) -> Row:
    """The private parts of DeepSpeed that layers with experts rely on (moe/zero.py says which and why)."""
    name = "DeepSpeed's parts"
    if facts.shm_hook is None:
        return Row(name=name, value="unknown: DeepSpeed does not import", state=BAD, remedy=INSTALL)
    if facts.contract_problems:
        remedy = f"expert layers need them; install DeepSpeed {TESTED_DEEPSPEED}"
        return Row(name=name, value="; ".join(facts.contract_problems), state=BAD, remedy=remedy)
    return Row(name=name, value="all that expert layers rely on is there", state=OK)


def hook_row(facts: Facts) -> Row:
    """The private switch that keeps DeepSpeed from compiling an op (73-120 s) at the first start on CPU."""
    name = "DeepSpeed's op"
    if facts.shm_hook:
        return Row(name=name, value="needs no compiler (switch found)", state=OK)
    if facts.shm_hook is None:
        return Row(name=name, value="unknown: DeepSpeed does not import", state=BAD, remedy=INSTALL)
    if facts.has_compiler:
        remedy = f"DeepSpeed {TESTED_DEEPSPEED} starts without compiling (on CPU, a minute or two)"
        return Row(name=name, value="will be compiled (switch not found)", state=WARN, remedy=remedy)
    remedy = f"install DeepSpeed {TESTED_DEEPSPEED}, or g++"
    return Row(name=name, value="must be compiled (switch not found), no compiler", state=BAD, remedy=remedy)


def accelerator_row(facts: Facts) -> Row:
    if facts.devices:
        value = f"{len(facts.devices)} x {facts.devices[0]}"
        return Row(name="accelerator", value=value, state=OK)
    if facts.nvidia_gpus and facts.torch_cuda:
        remedy = "torch sees none of the GPUs: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return Row(name="accelerator", value=f"none of {len(facts.nvidia_gpus)}", state=WARN, remedy=remedy)
    return Row(name="accelerator", value="none: the ranks run on the CPU", state=OK)


def backend_row(facts: Facts) -> Row:
    wanted = "nccl" if facts.devices else "gloo"
    if wanted in facts.backends:
        return Row(name="back end", value=wanted, state=OK)
    value = f"{wanted} is missing (this torch has: {', '.join(facts.backends) or 'none'})"
    return Row(name="back end", value=value, state=BAD, remedy=INSTALL)


def cores_row(facts: Facts) -> Row:
    if facts.cores >= 2:
        return Row(name="cores", value=str(facts.cores), state=OK)
    remedy = "two ranks share one core: expect twice the time, or use --ranks 1"
    return Row(name="cores", value=str(facts.cores), state=WARN, remedy=remedy)


def memory_row(facts: Facts) -> Row:
    if facts.memory is None or facts.memory_free is None:
        return Row(name="memory", value="unknown", state=WARN, remedy="pip install psutil")
    value = f"{facts.memory_free / GIB:.1f} of {facts.memory / GIB:.1f} GiB free"
    if facts.memory_free < GIB:
        return Row(name="memory", value=value, state=BAD, remedy="a rank takes about 1 GiB: free some")
    if facts.memory_free < 3 * GIB:
        remedy = "two ranks take about 2 GiB: end other programs, or use --ranks 1"
        return Row(name="memory", value=value, state=WARN, remedy=remedy)
    return Row(name="memory", value=value, state=OK)


def disk_row(facts: Facts) -> Row:
    if facts.disk_free is None:
        return Row(name="free disk", value="unknown", state=WARN, remedy="check the folder's permissions")
    value = f"{facts.disk_free / GIB:.1f} GiB in {facts.disk_path}"
    remedy = "runs are written to ./runs: free some space, or use --runs-dir on another disk"
    state = BAD if facts.disk_free < GIB // 2 else WARN if facts.disk_free < 3 * GIB else OK
    return Row(name="free disk", value=value, state=state, remedy="" if state == OK else remedy)


def numba_row(facts: Facts) -> Row:
    return _package_row(facts, "numba", "the fast kernels need it")


def tensorboard_row(facts: Facts) -> Row:
    return _package_row(facts, "tensorboard", "the curves and heat maps of a run need it")


def _package_row(facts: Facts, name: str, why: str) -> Row:
    found = facts.versions.get(name)
    if found is None:
        return Row(name=name, value="not installed", state=BAD, remedy=f"{why}; {INSTALL}")
    return Row(name=name, value=found, state=OK)


def transformers_row(facts: Facts) -> Row:
    found = facts.versions.get("transformers")
    if found is None:
        return Row(name="transformers", value="not installed (only DeepSpeed's AutoEP needs it)", state=OK)
    if (5, 0) <= release(found) < (5, 23):
        return Row(name="transformers", value=f"{found} (works with AutoEP)", state=OK)
    remedy = "for AutoEP: pip install 'transformers>=5.0,<5.23' (5.23 breaks it for Mixtral and Qwen3-MoE)"
    return Row(name="transformers", value=f"{found} (not compatible with AutoEP)", state=WARN, remedy=remedy)


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


# ---- looking at the machine -----------------------------------------------------------------------------


def collect_facts() -> Facts:
    """Looks at this machine: packages' metadata, torch and DeepSpeed (imported), nvidia-smi, the system."""
    memory, memory_free = _memory()
    torch_error, torch_cuda, devices, backends = _torch_facts()
    shm_hook, shm_error = _shm_hook()
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions=_versions(("torch", "deepspeed", "numba", "tensorboard", "transformers")),
        torch_error=torch_error,
        torch_cuda=torch_cuda,
        devices=devices,
        backends=backends,
        nvidia_gpus=_nvidia_gpus(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory,
        memory_free=memory_free,
        disk_free=_disk_free(),
        disk_path=os.getcwd(),
        shm_hook=shm_hook,
        shm_error=shm_error,
        contract_problems=() if shm_hook is None else _contract_problems(),
        has_compiler=shutil.which("c++") is not None or shutil.which("g++") is not None,
    )


def _versions(names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _torch_facts() -> tuple[str, str | None, tuple[str, ...], tuple[str, ...]]:
    """Error text, CUDA version, device names, back ends."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation fails in many ways; each of them is a row
        return _first_line(error), None, (), ()
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    return "", torch.version.cuda, devices, tuple(name for name, there in known.items() if there())


def _shm_hook() -> tuple[bool | None, str]:
    """Whether `deepspeed.ops.__compatible_ops__` has the shared-memory op; (None, why) without DeepSpeed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import deepspeed.ops
    except Exception as error:  # as above
        return None, _first_line(error)
    table = getattr(deepspeed.ops, "__compatible_ops__", None)
    return isinstance(table, dict) and "deepspeed_shm_comm" in table, ""


def _contract_problems() -> tuple[str, ...]:
    try:
        from moe.zero import contract_problems
    except Exception as error:  # the import itself needs private names: one that is gone is the finding
        return (_first_line(error),)
    return tuple(contract_problems())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _nvidia_gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line for line in listed.stdout.splitlines() if line.startswith("GPU"))


def _memory() -> tuple[int | None, int | None]:
    try:
        import psutil
    except ImportError:
        return None, None
    found = psutil.virtual_memory()
    return int(found.total), int(found.available)


def _disk_free() -> int | None:
    try:
        return shutil.disk_usage(Path.cwd()).free
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
