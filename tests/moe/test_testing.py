"""run_ranks and run_loopback: results in rank order, failures that name the rank, nothing left running."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.testing import RankFailedError, run_loopback, run_ranks, source_payload

WORLD = 2


def note_pid(folder: str, rank: int) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))


def still_running(folder: Path) -> list[int]:
    """Ranks of a run whose process is there. Their parent has reaped those that ended."""
    alive = []
    noted = sorted(folder.iterdir())
    assert [path.name for path in noted] == [str(r) for r in range(WORLD)], "every rank wrote its number"
    for path in noted:
        try:
            os.kill(int(path.read_text()), 0)
            alive.append(int(path.name))
        except ProcessLookupError:
            pass
    return alive


def sum_of_ranks(rank, world, folder, factor):
    note_pid(folder, rank)
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    threads, launcher = torch.get_num_threads(), (os.environ["RANK"], os.environ["WORLD_SIZE"])
    return rank, int(total), threads, launcher, os.environ["PHASE_OF_MOON"]


@pytest.mark.dist
def test_results_come_in_rank_order_from_ranks_of_one_thread(tmp_path):
    results = run_ranks(sum_of_ranks, WORLD, str(tmp_path), 10, env={"PHASE_OF_MOON": "full"})
    assert results == [(r, 10, 1, (str(r), "2"), "full") for r in range(WORLD)]
    assert "PHASE_OF_MOON" not in os.environ
    assert still_running(tmp_path) == []


def fail(rank, world, folder, how):
    """Rank 1 fails once both have said that they are there; rank 0 ends, is busy, or waits for rank 1."""
    note_pid(folder, rank)
    dist.barrier()
    if rank == 1 and how == "raises":
        raise KeyError("the lost key")
    if rank == 1 and how == "dies":
        os._exit(3)
    if (rank, how) in ((1, "hangs"), (0, "dies")):
        time.sleep(60)
    if rank == 0 and how == "raises":
        dist.barrier()


def do_nothing(rank, world):
    return None


def failure(folder: Path, how: str, timeout_s: float) -> str:
    begun = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(fail, WORLD, str(folder), how, timeout_s=timeout_s)
    assert time.monotonic() - begun < 30
    assert still_running(folder) == []
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path):
    message = failure(tmp_path, "raises", timeout_s=60)
    assert message.startswith("rank 1 of 2 raised:")
    assert "KeyError: 'the lost key'" in message and "in fail" in message


@pytest.mark.dist
def test_a_rank_that_dies_is_named_with_its_exit_code(tmp_path):
    assert failure(tmp_path, "dies", timeout_s=60) == "rank 1 died with exit code 3"


@pytest.mark.dist
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path):
    run_ranks(do_nothing, 1)  # the server that forks the ranks has loaded torch before the clock runs
    assert failure(tmp_path, "hangs", timeout_s=4.0) == "ranks [1] of 2 were not done after 4.0 s"


def test_loopback_results_come_in_rank_order():
    assert run_loopback(lambda exchange, base: base + exchange.rank, 3, 10) == [10, 11, 12]


def test_loopback_names_the_rank_that_raised_and_not_its_echoes():
    def last_raises(exchange):
        if exchange.rank == 2:
            raise KeyError("lost")
        exchange.all_gather(torch.zeros(1))

    with pytest.raises(RankFailedError, match="rank 2 of 3 raised KeyError") as caught:
        run_loopback(last_raises, 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_loopback_ranks_that_miss_a_collective_end_in_time():
    with pytest.raises(RankFailedError, match="rank 0 of 2 raised BrokenBarrierError"):
        run_loopback(lambda e: e.all_gather(torch.zeros(1)) if e.rank == 0 else None, 2, timeout_s=0.2)


def test_a_payload_names_rank_and_token_in_every_element():
    assert source_payload(3, 2, 4).tolist() == [[3000.0] * 4, [3001.0] * 4]


def die_while_the_other_waits(rank, world):
    dist.barrier()
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.dist
def test_a_rank_that_dies_is_named_and_not_the_one_that_waited_for_it():
    for _ in range(4):  # which report comes first is a matter of chance
        with pytest.raises(RankFailedError, match=r"^rank 1 died with exit code 3"):
            run_ranks(die_while_the_other_waits, 2, timeout_s=30)
