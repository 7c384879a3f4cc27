"""Moving: whether the first steps of a run have changed every trainable parameter, on some rank at least."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe.updates import UpdateCheck

if TYPE_CHECKING:
    from experiments.session import Trainer

STEPS = 10


class FrozenParameterError(RuntimeError):
    """A parameter that is to be trained stays as it was."""


class Moving:
    """Compares the weights with those at the start, once, STEPS steps later or at the run's end.

    say: where a warning goes (bfloat16 weights may stand still while their masters move).
    """

    def __init__(self, trainer: "Trainer", start: int, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self.due = min(start + STEPS, trainer.config.train.steps)
        self._check = UpdateCheck(trainer.model)

    def after(self, step: int) -> None:
        """Call after every step. Collective in the step that is due.

        Raises FrozenParameterError on every rank where a float32 parameter is bit for bit as it was.
        """
        if step != self.due:
            return
        moved_N = self._check.changed(self._trainer.model).to(self._trainer.job.device).int()
        dist.all_reduce(moved_N, op=dist.ReduceOp.MAX)
        frozen = [name for name, moved in zip(self._check.names, moved_N.tolist(), strict=True) if not moved]
        if not frozen:
            return
        text = f"step {step}: {len(frozen)} trainable parameters are as they were at the start: "
        text += ", ".join(frozen[:5]) + (", ..." if len(frozen) > 5 else "")
        if self._trainer.config.model.dtype == "bfloat16":
            self._say(f"{text}; their bfloat16 weights round the updates away, or nothing reaches them")
            if self._trainer.records is not None:
                self._trainer.records.event(step, "warning", message=text)
            return
        raise FrozenParameterError(
            f"{text}. Either no gradient reaches them (a gate of top-1 without balance loss, say), or the "
            "optimizer does not have them; what is not to be trained gets requires_grad = False"
        )
