"""Reshape: what a run may change when it goes on at another number of ranks, EP size or ZeRO stage.

It stands beside engine_config.py at the start of the flow. The batch of a step stays the same set of
sequences, and the optimizer, the schedule and the types stay what they were.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import Config

BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# of DeepSpeed's settings: where states are, and how gradients travel there
RESHAPED = (
    *BATCH,
    "zero_optimization",
    "data_types",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "steps_per_print",
)


def sequences(config: Config, world_size: int) -> int:
    """Sequences in the batch of one optimizer step, over all ranks."""
    return config.train.micro_batch * config.train.accumulation * world_size


def check_batch(old: Config, old_world: int, new: Config, new_world: int) -> None:
    """Raises ValueError where a reshaped run would take another number of sequences per optimizer step."""
    before, after = sequences(old, old_world), sequences(new, new_world)
    if before == after:
        return
    micro, share = new.train.micro_batch, before // new_world
    fits = [m for m in range(1, share + 1) if share % m == 0] if before % new_world == 0 else []
    if fits:
        nearest = min(fits, key=lambda m: abs(m - micro))
        remedy = f"--set train.micro_batch={nearest} --set train.accumulation={share // nearest}"
    else:
        remedy = f"a number of ranks that divides {before}"
    raise ValueError(
        f"train.micro_batch={micro} * train.accumulation={new.train.accumulation} * {new_world} ranks = "
        f"{after} sequences a step, but the run has had {before}, and its data and learning rates count in "
        f"such steps; use {remedy}"
    )


def remarks(old: Config, old_world: int, new: Config, new_world: int) -> list[str]:
    """What a person should know of a run that goes on in another shape: where its mathematics changes."""
    found = []
    scope, weight = new.router.balance_scope, new.router.balance_loss
    micro_batches = {
        "local": (old.train.micro_batch, new.train.micro_batch),
        "global": (old.train.micro_batch * old_world, new.train.micro_batch * new_world),
        "running": (old.train.micro_batch * old_world, new.train.micro_batch * new_world),
    }
    before, after = micro_batches.get(scope, (0, 0))
    if weight and before != after:
        found.append(
            f"router.balance_scope={scope} counts in micro-batches, which were of {before} sequences and "
            f"are of {after}: the balance loss is another one now (previous and sequence do not depend on it)"
        )
    if new.router.forced and (old_world, old.train.micro_batch) != (new_world, new.train.micro_batch):
        found.append(f"router.forced={new.router.forced} draws rank by rank: its routes are others now")
    return found


def without_batch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's settings without the batch sizes, which a reshaped run divides anew."""
    return {key: value for key, value in settings.items() if key not in BATCH}


def check_kept(now: Mapping[str, Any], own: Mapping[str, Any], what: str, free: Sequence[str] = ()) -> None:
    """Raise ValueError where DeepSpeed's settings differ in more than `free`, naming the keys.

    what: begins the message, "zero1.json differs from ...".
    """
    changed = sorted(key for key in own.keys() | now.keys() if own.get(key) != now.get(key))
    if set(changed) <= set(free):
        return
    remedy = "take the change back, or start a new run"
    if set(changed) <= set(RESHAPED):
        remedy = "take the change back, or add --reshape, which fits the checkpoint to it"
    listed = ", ".join(key for key in changed if key not in free)
    raise ValueError(f"{what} in {listed}: a resumed run keeps its engine; {remedy}")
