"""What all ranks must agree on, and the signal that ends a run after its step."""

import os
import signal

import pytest
import torch

from experiments.job import Job, StopSignal, check_same, decide_on_main
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
    check_same(job, "the question", "same")
    return outcomes


@pytest.mark.dist
def test_rank_0_decides_and_errors_are_raised_on_every_rank():
    differs = "the answer differs between ranks: rank 0 has 0, rank 2 has 1"
    assert run_ranks(agree, 3) == [["decided by 0", "refused by 0", differs]] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_noted_and_the_second_acts_as_before(number):
    before = signal.getsignal(number)
    caught = []
    signal.signal(number, lambda *_: caught.append(number))
    try:
        with StopSignal() as stop:
            assert not stop.received
            os.kill(os.getpid(), number)
            assert stop.received
            assert not caught
            os.kill(os.getpid(), number)
            assert caught == [number]
        os.kill(os.getpid(), number)
        assert caught == [number, number]
    finally:
        signal.signal(number, before)
