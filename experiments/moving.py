"""Moving: whether a run's first steps have changed every trainable parameter, on some rank at least."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe import zero_state
from moe.updates import UpdateCheck

if TYPE_CHECKING:
    from experiments.session import Trainer

STEPS = 10
LEAST_LR = 1e-6  # Adam moves a weight by about the learning rate; below it, weights of 1 stay by rounding


class FrozenParameterError(RuntimeError):
    """A parameter that is to be trained stays as it was."""


class Moving:
    """Compares the weights with those at the start, once, after STEPS steps that could move them.

    say: where a warning goes, for weights that may stand still by rounding: bfloat16 ones, whose masters
    move, and those of optimizers whose step is as short as the gradient.
    """

    def __init__(self, trainer: "Trainer", say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._steps = 0
        self._check: UpdateCheck | None = UpdateCheck(trainer.model)

    def after(self, step: int, lr: float) -> None:
        """Call after every step, with its learning rate. Collective in the step in which it compares.

        Raises FrozenParameterError on every rank where a float32 parameter under an Adam is bit for bit as it
        was.
        """
        self._steps += lr >= LEAST_LR
        if self._steps < STEPS or lr < LEAST_LR or self._check is None:
            return
        check, self._check = self._check, None
        moved_N = check.changed(self._trainer.model).to(self._trainer.job.device).int()
        dist.all_reduce(moved_N, op=dist.ReduceOp.MAX)
        frozen = [name for name, moved in zip(check.names, moved_N.tolist(), strict=True) if not moved]
        if frozen:
            self._tell(step, frozen)

    def _tell(self, step: int, frozen: list[str]) -> None:
        text = f"step {step}: {len(frozen)} trainable parameters are as they were {STEPS} steps ago: "
        text += ", ".join(frozen[:5]) + (", ..." if len(frozen) > 5 else "")
        adam = "adam" in zero_state.optimizer_name(self._trainer.engine).lower()
        if adam and self._trainer.config.model.dtype == "float32":
            raise FrozenParameterError(
                f"{text}. Either no gradient reaches them (a gate of top-1 without balance loss, say), or "
                "the optimizer does not have them; what is not to be trained gets requires_grad = False"
            )
        self._say(f"{text}; their updates round away, or nothing reaches them")
        if self._trainer.records is not None:
            self._trainer.records.event(step, "warning", message=text)
