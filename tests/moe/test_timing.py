"""PhaseTimer sums the phases by name until it is read."""

import time

import torch

from moe.timing import PhaseTimer, no_timer

SLEEP_S = 0.02


def test_phases_add_up_until_read_and_start_anew():
    timer = PhaseTimer(torch.device("cpu"))
    for _ in range(2):
        with timer("dispatch"):
            time.sleep(SLEEP_S)
    with timer("experts"):
        pass
    read = timer.read()
    assert set(read) == {"dispatch", "experts"}
    # sleep never ends early; 3 s more would be another unit, not a busy machine
    assert 2 * SLEEP_S * 1e3 <= read["dispatch"] < 3000
    assert 0 <= read["experts"] < read["dispatch"]
    assert timer.read() == {}


def test_phases_may_be_nested():
    timer = PhaseTimer(torch.device("cpu"))
    with timer("outer"):
        with timer("inner"):
            time.sleep(SLEEP_S)
    read = timer.read()
    assert SLEEP_S * 1e3 <= read["inner"] <= read["outer"]


def test_no_timer_times_nothing():
    with no_timer("dispatch") as nothing:
        assert nothing is None
