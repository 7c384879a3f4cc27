"""Saving: what a checkpoint of a training run holds, written by all ranks, and read back at any shape.

    step-00000100/
      state/rank-0.safetensors    master weights and moments that rank 0 keeps, and so on (moe/shards.py)
      random/rank-0.safetensors   random state of each rank
      buffers.safetensors         router bias and other buffers of the model
      loops.safetensors           arrays of the registered loops' states
      run.json                    steps, learning rates, scheduler, data position, rest of the loops' states
      model.safetensors           the whole model, all experts in logical order (train.export)
      manifest.json               written last (experiments/checkpoint.py)

No file is a pickle. States are stored by intervals of whole parameters, so that another number of ranks,
EP size or ZeRO stage reads the same files.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from experiments import checkpoint, state_tree
from experiments.checkpoint import Checkpoint
from experiments.job import RankRaisedError, decide_on_main, do_on_all
from experiments.reshape import sequences
from experiments.rundir import RunDir, write_whole
from moe import shards, zero, zero_state

if TYPE_CHECKING:
    from experiments.session import Trainer

RUN = "run.json"
BUFFERS = "buffers.safetensors"
LOOPS = "loops.safetensors"


class Stateful(Protocol):
    """A loop around the training whose state belongs into a checkpoint, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, arrays and tensors, in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what state_dict gave."""
        ...


# ---- writing --------------------------------------------------------------------------------------------


def save(trainer: "Trainer", step: int) -> tuple[Path, tuple[int, ...]]:
    """Write the checkpoint of a step: all ranks into a folder aside, which rank 0 lists, syncs and
    renames. Returns its path, and the steps of all checkpoints that the run has now."""
    job = trainer.job
    check_finite(trainer, step)
    aside = trainer.run.checkpoints / f"{checkpoint.folder_name(step)}.partial"
    try:
        decide_on_main(job, lambda: _begin(trainer, step))
        do_on_all(job, lambda: _write_rank(trainer, aside))
        if trainer.config.train.export:
            weights = zero.gather_weights(trainer.model, job.topology)
            decide_on_main(job, lambda: write_tensors(weights or {}, aside / checkpoint.WEIGHTS))
        return decide_on_main(job, lambda: _finish(trainer, aside, step))
    except (ValueError, RankRaisedError) as error:  # the same on every rank; a full disk needs the room
        if job.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        error.args = (f"the checkpoint of step {step} was not saved: {error}; {trainer.last_good()}",)
        raise


def _finish(trainer: "Trainer", aside: Path, step: int) -> tuple[Path, tuple[int, ...]]:
    """Check that every rank has written, and make the folder a checkpoint; rank 0 only."""
    for rank in range(trainer.job.world_size):
        for folder in ("state", "random"):
            if not (aside / folder / f"rank-{rank}.safetensors").is_file():
                raise ValueError(
                    f"{aside / folder} has no file of rank {rank}: the runs folder must be on a disk that "
                    "all ranks share"
                )
    assert trainer.records is not None, "rank 0 opens the records before the first step"
    trainer.records.sync()  # first what the checkpoint's step has in the records, then the checkpoint
    keep, needed = trainer.config.train.keep_checkpoints, -1
    if trainer.control is not None:
        needed = trainer.control.needed_checkpoint((*trainer.checkpoint_steps, step))
    before = [old for old in trainer.checkpoint_steps if needed <= old < step] if needed >= 0 else []
    path = checkpoint.finish(aside, step, trainer.job.world_size, max(keep, len(before) + 1))
    for old in before[: -keep + 1 or None]:  # what lies between the needed one and the newest
        if old != needed:
            shutil.rmtree(path.with_name(checkpoint.folder_name(old)), ignore_errors=True)
    trainer.records.event(step, "checkpoint", path=path.name)
    return path, checkpoint_steps(trainer.run)


def checkpoint_steps(run: RunDir) -> tuple[int, ...]:
    """The steps of a run's checkpoints, the oldest first; nothing in them is verified."""
    return tuple(sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*[0-9]")))


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """save_file, whose own errors are no OSError and do not name the file."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _begin(trainer: "Trainer", step: int) -> None:
    """Make the folder, and write what is the same on all ranks."""
    aside = checkpoint.begin(trainer.run, step)
    (aside / "state").mkdir()
    (aside / "random").mkdir()
    write_tensors(_buffers(trainer), aside / BUFFERS)
    arrays: dict[str, torch.Tensor] = {}
    loops = {name: state_tree.pack(loop.state_dict(), name, arrays) for name, loop in trainer.loops.items()}
    write_tensors(arrays, aside / LOOPS)
    facts = {
        "step": step,
        "engine": zero_state.counters(trainer.engine),
        "data": {
            "next_step": step + 1,
            "sequences_per_step": sequences(trainer.config, trainer.job.world_size),
        },
        "loops": loops,
    }
    write_whole(aside / RUN, json.dumps(facts, indent=1) + "\n")


def _write_rank(trainer: "Trainer", aside: Path) -> None:
    rank = trainer.job.rank
    shards.save(trainer.engine, aside / "state" / f"rank-{rank}.safetensors")
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    write_tensors(state, aside / "random" / f"rank-{rank}.safetensors")


def _buffers(trainer: "Trainer") -> dict[str, torch.Tensor]:
    """Buffers that the model saves, as they are."""
    saved = trainer.model.state_dict().keys()
    found = trainer.model.named_buffers()
    return {name: value.detach().to("cpu", copy=True) for name, value in found if name in saved}


@torch.no_grad()
def check_finite(trainer: "Trainer", step: int) -> None:
    """Raise FloatingPointError on all ranks where any weight is NaN or infinite: that is nothing to save."""
    bad = torch.zeros((), dtype=torch.int64, device=trainer.job.device)
    for parameter in trainer.model.parameters():  # ds_tensor: this rank's part under ZeRO-3
        bad += (~torch.isfinite(getattr(parameter, "ds_tensor", parameter))).sum().to(bad.device)
    dist.all_reduce(bad)
    if int(bad):
        raise FloatingPointError(
            f"step {step}: {int(bad)} weights are NaN or infinite, not saved; {trainer.last_good()}"
        )


# ---- reading --------------------------------------------------------------------------------------------


def load(trainer: "Trainer", found: Checkpoint) -> None:
    """Bring the trainer to where the checkpoint was saved, whatever shape it had. Collective.

    Raises ValueError on every rank where the checkpoint is of another model, batch or set of loops.
    """
    facts = do_on_all(trainer.job, lambda: _read_facts(trainer, found))
    files = [found.path / "state" / f"rank-{rank}.safetensors" for rank in range(found.world_size)]
    zero_state.set_counters(trainer.engine, facts["engine"])  # refuses before anything changes
    shards.load(trainer.engine, files)
    _load_buffers(trainer, found)
    states = _loop_states(found, facts)
    for name, loop in trainer.loops.items():
        if name in states:
            loop.load_state_dict(states[name])
    _load_random(trainer, found)


def roll_back(trainer: "Trainer", step: int) -> dict[str, Any]:
    """Take weights, moments and buffers of an older checkpoint into a run that goes on. Collective.

    Step number, data and random state go on, so that nothing is trained on twice and records are only
    appended to; the optimizer's own count of steps goes with its moments. Returns the states of the loops in
    that checkpoint. Raises ValueError on every rank where it is broken or gone.
    """
    path = trainer.run.checkpoints / checkpoint.folder_name(step)
    found = decide_on_main(trainer.job, lambda: checkpoint.verify(path))
    facts = do_on_all(trainer.job, lambda: _read_facts(trainer, found))
    files = [found.path / "state" / f"rank-{rank}.safetensors" for rank in range(found.world_size)]
    now = zero_state.counters(trainer.engine)
    going_on = {name: now[name] for name in (*zero_state.COUNTERS, "scheduler")}
    zero_state.set_counters(trainer.engine, facts["engine"] | going_on)
    shards.load(trainer.engine, files)
    _load_buffers(trainer, found)
    return _loop_states(found, facts)


def _load_buffers(trainer: "Trainer", found: Checkpoint) -> None:
    buffers = dict(trainer.model.named_buffers())
    for name, value in load_file(found.path / BUFFERS).items():
        buffers[name].copy_(value)


def _loop_states(found: Checkpoint, facts: dict[str, Any]) -> dict[str, Any]:
    arrays = load_file(found.path / LOOPS)
    return {name: state_tree.unpack(packed, arrays) for name, packed in facts["loops"].items()}


def _read_facts(trainer: "Trainer", found: Checkpoint) -> dict[str, Any]:
    """run.json, checked against the run as it is now."""
    facts = json.loads((found.path / RUN).read_text(encoding="utf-8"))
    had = facts["data"]["sequences_per_step"]
    have = sequences(trainer.config, trainer.job.world_size)
    if had != have:
        raise ValueError(f"{found.path} was trained with {had} sequences a step, and this run takes {have}")
    # a control that only watches changes nothing: it may come and go
    free = set() if trainer.config.control.acts else {"control"}
    for what, now, saved in (
        ("loops", trainer.loops.keys() - free, facts["loops"].keys() - free),
        ("buffers", _buffers(trainer).keys(), load_file(found.path / BUFFERS).keys()),
    ):
        if now != saved:
            raise ValueError(
                f"{found.path} has the state of the {what} {sorted(saved)}, and this run has {sorted(now)}; "
                "resume it with the same ones"
            )
    return facts


def _load_random(trainer: "Trainer", found: Checkpoint) -> None:
    """Each rank's own random state; on another number of ranks a new one for each, by step and rank."""
    job = trainer.job
    if job.world_size != found.world_size:
        torch.manual_seed((found.step << 20) + job.rank)
        return
    state = load_file(found.path / "random" / f"rank-{job.rank}.safetensors")
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
