"""Communication: what the job sends in a step, by phase and from rank to rank, out of the ledger's entries.

    collectives of a step -> CommLedger -> end_step -> figures, on the meter's own reduction -> Traffic, the
    same on every rank

It adds no collective: what a rank has sent rides on the sum that the load meter makes anyway.
"""

from dataclasses import dataclass

import numpy as np
import torch

from experiments.train_config import TrainConfig
from moe.ledger import CommLedger

# in the order of a step; a phase of any other name counts as "other"
PHASES: tuple[str, ...] = (
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "sample",
    "eval",
    "checkpoint",
    "other",
)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What the whole job has sent, the mean over the steps since the last report.

    phase_bytes: phase -> bytes a step, the sum over the ranks;  bytes_PP: [P, P] float64 bytes a step from
    rank (row) to rank (column). Logical bytes, as in moe/traffic.py.
    """

    phase_bytes: dict[str, float]
    bytes_PP: np.ndarray

    def scalars(self) -> dict[str, float]:
        """comm/PHASE_mib and comm/total_mib: MiB a step."""
        mib = {f"comm/{phase}_mib": amount / _MIB for phase, amount in self.phase_bytes.items()}
        return {**mib, "comm/total_mib": sum(mib.values())}


class Communication:
    """The ledger of one rank's run; use it as a context manager around the steps.

    world_size, rank: of the job;  on: False records nothing, overrides no operator and gives no figures.
    """

    def __init__(self, world_size: int, rank: int, *, on: bool = True) -> None:
        self._world_size, self._rank = world_size, rank
        self._ledger = CommLedger() if on else None
        self._sums_X = np.zeros(len(PHASES) + world_size)
        self._steps = 0

    def __enter__(self) -> "Communication":
        if self._ledger is not None:
            self._ledger.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ledger is not None:
            self._ledger.__exit__()

    def end_step(self) -> None:
        """Take in what this rank has sent since the last step's end; every step, so that nothing piles up."""
        if self._ledger is None:
            return
        entries = self._ledger.take()
        for entry in entries:
            phase = entry.phase if entry.phase in PHASES else "other"
            self._sums_X[PHASES.index(phase)] += entry.sent_bytes
        self._sums_X[len(PHASES) :] += self._ledger.bytes_to_rank(self._world_size, entries)
        self._steps += 1

    def figures(self, report: bool) -> torch.Tensor:
        """This rank's part of a report, [X] float64, to be summed over the ranks; [0] where there is none.

        report: whether this step reports, the same on every rank; the next report then starts anew.
        """
        if self._ledger is None or not report:
            return torch.zeros(0, dtype=torch.float64)
        world = self._world_size
        figures_X = np.zeros(len(PHASES) + world * world)
        figures_X[: len(PHASES)] = self._sums_X[: len(PHASES)]
        figures_X[len(PHASES) :].reshape(world, world)[self._rank] = self._sums_X[len(PHASES) :]
        figures_X /= max(1, self._steps)
        self._sums_X[:], self._steps = 0, 0
        return torch.from_numpy(figures_X)

    def traffic(self, summed_X: np.ndarray) -> Traffic | None:
        """The report out of the summed figures; None where the step made none."""
        if not summed_X.size:
            return None
        phases, rest = np.split(summed_X, [len(PHASES)])
        by_phase = dict(zip(PHASES, phases.tolist()))
        return Traffic(phase_bytes=by_phase, bytes_PP=rest.reshape(self._world_size, self._world_size))


def reports(train: TrainConfig, step: int) -> bool:
    """Whether this step's lines or images show the traffic; every rank says the same."""
    logged = step % train.log_every == 0 or step == train.steps
    return logged or (train.heatmap_every > 0 and (step % train.heatmap_every == 0 or step == 1))
