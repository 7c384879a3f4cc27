"""Sizes: what the commands that place experts are asked alike: a trace, ranks, spare slots.

In front of `experiments/plan_command.py` and `experiments/replay_command.py`.
"""

import argparse


def add_sizes(top: argparse.ArgumentParser) -> None:
    """Add TRACE, --format, --ranks and --spare."""
    add = top.add_argument
    add("trace", metavar="TRACE", help="load trace: folder, run directory or file")
    add("--format", metavar="F", help="format of the trace, where its name does not tell")
    add("--ranks", metavar="G", type=int, required=True, help="ranks that hold experts")
    add("--spare", metavar="R", type=int, help="slots beyond the experts, over all ranks (default: 2 a rank)")


def chosen_slots(num_experts: int, num_ranks: int, spare: int | None) -> int:
    """Slots over all ranks: the experts and the spare ones, as many on every rank.

    spare: slots beyond the experts, None = the fewest that leave two a rank or more. Raises ValueError for
    sizes that do not fit, with the nearest that do.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks} must be at least 1")
    if spare is None:
        return (-(-num_experts // num_ranks) + 2) * num_ranks
    if spare < 0:
        raise ValueError(f"--spare {spare} must be 0 or more: slots beyond the {num_experts} experts")
    num_slots = num_experts + spare
    if num_slots % num_ranks:
        low = num_slots // num_ranks * num_ranks - num_experts
        fitting = " or ".join(str(n) for n in (low, low + num_ranks) if n >= 0)
        raise ValueError(
            f"--spare {spare}: {num_experts} experts and {spare} spare slots are {num_slots} "
            f"slots, not as many on each of {num_ranks} ranks; use {fitting}"
        )
    return num_slots
