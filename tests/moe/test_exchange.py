"""Exchange: rows go where the splits say, over threads as over processes, forward and backward."""

import threading
import time
import weakref

import numpy as np
import pytest
import torch

from moe.exchange import DistExchange, LoopbackWorld, SoloExchange, all_to_all_v, start_all_to_all_v
from moe.testing import RankFailedError, run_loopback, run_ranks

WIDTH = 3
# rows from rank (row) to rank (column): rank 1 sends nothing, rank 2 receives nothing
SENT_PP = np.array([[2, 1, 0], [0, 0, 0], [4, 5, 0]])
WEIGHT = 10.0


def payload(source: int) -> torch.Tensor:
    """Row i of rank r is 100 r + i, the elements of a row apart by tenths."""
    rows = 100.0 * source + torch.arange(int(SENT_PP[source].sum()), dtype=torch.float64)
    return rows[:, None] + torch.arange(WIDTH) / 10


def exchange_rows(exchange):
    """One call forward and backward; the receiver weighs every row, so the gradient names the receiver."""
    rank = exchange.rank
    leaf = payload(rank).requires_grad_(rank != 0)  # rank 0 wants no gradient and takes part all the same
    received = all_to_all_v(leaf, exchange, SENT_PP[rank].tolist(), SENT_PP[:, rank].tolist())
    (received * (WEIGHT + rank)).sum().backward()
    gathered = exchange.all_gather(torch.tensor([rank, rank * 2**40]))
    grad = None if leaf.grad is None else leaf.grad.numpy()
    return {"rows": received.detach().numpy(), "grad": grad, "gathered": gathered.tolist()}


def exchange_on_ranks(rank, world):
    return exchange_rows(DistExchange(None))


def check(results):
    for rank, result in enumerate(results):
        blocks = [
            payload(source).split(SENT_PP[source].tolist())[rank].numpy() for source in range(len(SENT_PP))
        ]
        np.testing.assert_array_equal(result["rows"], np.concatenate(blocks))
        assert result["gathered"] == [[0, 0], [1, 2**40], [2, 2**41]]
        if rank:
            want = np.repeat(WEIGHT + np.arange(3), SENT_PP[rank])[:, None].repeat(WIDTH, 1)
            np.testing.assert_array_equal(result["grad"], want)
    assert results[0]["grad"] is None


def test_loopback_moves_rows_and_gradients_by_the_splits():
    check(run_loopback(exchange_rows, 3, timeout_s=20))


@pytest.mark.dist
def test_gloo_ranks_do_bit_for_bit_what_loopback_does():
    results = run_ranks(exchange_on_ranks, 3)
    check(results)
    for over_processes, over_threads in zip(results, run_loopback(exchange_rows, 3), strict=True):
        np.testing.assert_array_equal(over_processes["rows"], over_threads["rows"])
        np.testing.assert_array_equal(over_processes["grad"], over_threads["grad"])


def test_solo_returns_what_it_was_given():
    solo, rows = SoloExchange(), torch.randn(4, WIDTH, requires_grad=True)
    assert (solo.size, solo.rank) == (1, 0)
    assert solo.send_rows(rows, [4], [4]) is rows
    assert solo.all_gather(torch.tensor([5, 6])).tolist() == [[5, 6]]
    all_to_all_v(rows, solo, [4], [4]).sum().backward()
    torch.testing.assert_close(rows.grad, torch.ones(4, WIDTH))


def test_what_a_rank_posted_is_a_copy(monkeypatch):
    """A rank may write into its rows right after the call, while a slow one still reads what it received."""
    slow_threads = set()

    def slowly(real):
        def call(*args):
            time.sleep(0.05 if threading.get_ident() in slow_threads else 0)
            return real(*args)

        return call

    monkeypatch.setattr(torch, "cat", slowly(torch.cat))
    monkeypatch.setattr(torch, "stack", slowly(torch.stack))

    def overwrite(exchange):
        if exchange.rank == 1:
            slow_threads.add(threading.get_ident())
        sent, posted = (torch.full((2, WIDTH), float(exchange.rank)) for _ in range(2))
        received = exchange.send_rows(sent, [1, 1], [1, 1])
        sent.fill_(-1)
        gathered = exchange.all_gather(posted[0])
        posted.fill_(-1)
        return received[:, 0].tolist(), gathered[:, 0].tolist()

    assert run_loopback(overwrite, 2) == [([0.0, 1.0], [0.0, 1.0])] * 2


def test_many_rounds_do_not_mix():
    def rounds(exchange):
        return [exchange.all_gather(torch.tensor([exchange.rank + 10 * i]))[:, 0].tolist() for i in range(50)]

    assert run_loopback(rounds, 3) == [[[10 * i + p for p in range(3)] for i in range(50)]] * 3


def test_splits_that_disagree_between_ranks_are_named():
    def disagree(exchange):
        return exchange.send_rows(torch.zeros(2, WIDTH), [1, 1], [1, 1 + exchange.rank])

    with pytest.raises(RankFailedError, match=r"rank 1 expected rows \[1, 2\] by source, got \[1, 1\]"):
        run_loopback(disagree, 2, timeout_s=20)


def test_an_aborted_world_raises_instead_of_waiting():
    world = LoopbackWorld(2, timeout_s=60)
    world.abort()
    with pytest.raises(threading.BrokenBarrierError):
        world.exchange(0).all_gather(torch.zeros(1))


def test_no_gradient_is_recorded_where_none_is_wanted():
    def quiet(exchange):
        with torch.no_grad():
            return all_to_all_v(torch.ones(2, WIDTH), exchange, [1, 1], [1, 1]).requires_grad

    assert run_loopback(quiet, 2) == [False, False]


def in_flight_rank(exchange):
    rows = torch.ones(4, 3, requires_grad=True) * 2
    sent = weakref.ref(rows)
    in_flight = start_all_to_all_v(rows, exchange, [2, 2], [2, 2])
    del rows
    held_in_flight = sent() is not None
    raw = in_flight.wait()
    arrived = weakref.ref(raw)
    product = raw * 3.0  # whose backward wants the number alone
    del raw
    gone = sent() is None, arrived() is None
    product.sum().backward()
    return held_in_flight, *gone


def test_rows_are_let_go_once_they_have_arrived():
    """Else the rows that were sent, and those that came, would stay until the end of the backward."""
    assert run_loopback(in_flight_rank, 2) == [(True, True, True)] * 2
