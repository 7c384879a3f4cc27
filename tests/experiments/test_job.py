"""What all ranks must agree on."""

import pytest
import torch

from experiments.job import Job, RankRaisedError, check_same, decide_on_main, do_on_all
from moe import Topology, make_groups
from moe.testing import run_ranks


def job_of(rank: int, world: int) -> Job:
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    return Job(topology=topology, groups=make_groups(topology), device=torch.device("cpu"))


def agree(rank, world):
    job = job_of(rank, world)
    outcomes = [decide_on_main(job, lambda: f"decided by {rank}")]

    def refuse():
        raise ValueError(f"refused by {rank}")

    for attempt in (
        lambda: decide_on_main(job, refuse),
        lambda: check_same(job, "the answer", str(rank // 2)),
    ):
        try:
            outcomes.append(attempt())
        except ValueError as error:
            outcomes.append(str(error))

    def do_mine():
        if rank == 1:
            raise OSError("the disk of this machine is gone")
        return rank

    try:
        outcomes.append(do_on_all(job, do_mine))
    except ValueError as error:
        outcomes.append(str(error))
    assert do_on_all(job, lambda: rank) == rank
    check_same(job, "the question", "same")
    return outcomes


@pytest.mark.dist
def test_rank_0_decides_and_errors_are_raised_on_every_rank():
    differs = "the answer differs between ranks: rank 0 has 0, rank 2 has 1"
    lost = "rank 1: the disk of this machine is gone"
    assert run_ranks(agree, 3) == [["decided by 0", "refused by 0", differs, lost]] * 3


def faults(rank, world):
    """What each rank gets where rank 1, or rank 0 deciding, has a fault of ours and no user's mistake."""
    job, said = job_of(rank, world), []

    def fault():
        if rank == 1 or world == 1:
            raise KeyError("a fault of ours")

    def decide():
        raise TypeError("another")

    for attempt in (lambda: do_on_all(job, fault), lambda: decide_on_main(job, decide)):
        with pytest.raises(RankRaisedError) as raised:
            attempt()
        said.append(str(raised.value))
    return said


@pytest.mark.dist
def test_a_fault_on_one_rank_is_raised_on_all():
    told = ["rank 1: KeyError: 'a fault of ours'", "TypeError: another"]
    assert run_ranks(faults, 2) == [told, told]
    assert run_ranks(faults, 1) == [["KeyError: 'a fault of ours'", "TypeError: another"]]
