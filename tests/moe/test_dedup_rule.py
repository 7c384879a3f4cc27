"""The rule: expected pairs against drawing, bytes against counting, and decisions at their edge."""

import doctest
import math

import numpy as np
import pytest
import torch

import moe.dedup_rule
from moe.dedup_rule import (
    Link,
    expected_pairs,
    measure_link,
    pays,
    pays_in_batch,
    plain_bytes,
    saved_frac,
    unique_bytes,
)
from moe.exchange import DistExchange, SoloExchange
from moe.testing import run_ranks

ROWS_PS = np.array([[5, 1, 2, 4], [0, 3, 7, 0]])
PAIRS = {0: (np.array([5, 4]), np.array([5, 3])), 1: (np.array([3, 7]), np.array([4, 7]))}  # sent, received


def test_the_examples_print_what_they_say():
    result = doctest.testmod(moe.dedup_rule)
    assert result.attempted > 3 and not result.failed


@pytest.mark.parametrize(("top_k", "experts", "ranks"), [(1, 8, 4), (2, 8, 4), (8, 64, 4), (6, 6, 3)])
def test_expected_pairs_are_the_mean_of_drawn_ones(top_k, experts, ranks):
    tokens, draw = 20_000, np.random.default_rng(0)
    chosen_TK = draw.random((tokens, experts)).argsort(axis=1)[:, :top_k]
    pairs = np.zeros((tokens, ranks), dtype=bool)
    np.put_along_axis(pairs, chosen_TK // (experts // ranks), True, axis=1)
    # a token's pairs are between 1 and P: five standard errors of their mean are below 5 P/2 / sqrt(T)
    assert expected_pairs(top_k, experts, ranks) == pytest.approx(
        pairs.sum() / tokens, abs=2.5 * ranks / math.sqrt(tokens)
    )
    assert saved_frac(top_k, experts, ranks) == 1 - expected_pairs(top_k, experts, ranks) / top_k


def test_one_copy_saves_nothing_and_one_rank_everything_but_one():
    assert expected_pairs(1, 8, 4) == pytest.approx(1, rel=1e-15)
    assert expected_pairs(8, 8, 1) == 1
    assert expected_pairs(8, 8, 8) == 8


def test_bytes_by_hand():
    """Rank 0 sends 6 copies in 4 pairs, and gets 3 in 3; D = 10, bfloat16, weights float32."""
    volumes = unique_bytes(ROWS_PS, *PAIRS[0], 0, 10, 2)
    assert {name: (v.sent_bytes, v.received_bytes) for name, v in volumes.items()} == {
        "forward metadata": (6 * 8, 3 * 8),
        "forward dispatch": (80, 60),
        "forward combine": (60, 80),
        "backward combine": (80, 60),
        "backward dispatch": (60, 80),
        "backward metadata": (3 * 4, 6 * 4),
    }
    volumes = unique_bytes(ROWS_PS, *PAIRS[1], 1, 10, 8, 8)
    assert volumes["forward metadata"].sent_bytes == 3 * 16
    assert volumes["backward dispatch"].sent_bytes == 4 * 80
    plain = plain_bytes(ROWS_PS, 0, 10, 2)
    assert [(v.sent_bytes, v.received_bytes) for v in plain.values()] == [(120, 60), (60, 120)] * 2


def test_the_rule_turns_where_the_bytes_do():
    """Saved 4 * 100 * D * 4 bytes; 3 * 4 * 300 bytes of metadata, 2 calls of 3,000 bytes: D = 6 is even."""
    link = Link(latency_s=3e-6, bytes_per_s=1e9)
    assert link.call_bytes == pytest.approx(3000)
    assert not pays(300, 200, width=5, element_bytes=4, link=link)
    assert pays(300, 200, width=7, element_bytes=4, link=link)
    assert not pays(300, 200, width=7, element_bytes=4, link=link, weight_bytes=8)
    assert not pays(300, 200, width=7, element_bytes=4, link=link, local_s=1e-5)
    assert pays(300, 200, width=17, element_bytes=4, link=link, local_s=1e-5)
    assert not pays(300, 300, width=10_000, element_bytes=4, link=link)
    nothing = Link(latency_s=0.0, bytes_per_s=math.inf)
    assert not pays(0, 0, width=10, element_bytes=4, link=nothing)


def link_rank(rank, world):
    link = measure_link(DistExchange(None), num_bytes=2**18, calls=3)
    return link.latency_s, link.bytes_per_s


@pytest.mark.dist
def test_every_rank_measures_the_same_link():
    links = run_ranks(link_rank, 2)
    assert links[0] == links[1]
    latency_s, bytes_per_s = links[0]
    assert 1e-6 < latency_s < 1, "a call between processes"
    assert 1e6 < bytes_per_s < 1e12


def test_the_rule_reads_skew_off_a_batch():
    """64 tokens of 8 copies on each of 4 ranks: spread evenly, or all of them on the last rank.

    384 copies leave a rank in about 3 * 64 * (1 - .75^8) = 173 pairs, or 512 copies in 64.
    """
    even_PS, skewed_PS = np.full((4, 8), 64), np.zeros((4, 8), dtype=np.int64)
    skewed_PS[:, 6:] = 256
    for rows_PS, saved_rows, copies in ((even_PS, 211, 384), (skewed_PS, 448, 512)):
        saved_bytes = 4 * saved_rows * 100 * 4 - 12 * copies
        for factor, answer in ((0.4, True), (0.6, False)):  # of two calls
            link = Link(latency_s=factor * saved_bytes / 1e6, bytes_per_s=1e6)
            sizes = {"width": 100, "element_bytes": 4, "weight_bytes": 4, "link": link}
            assert pays_in_batch(rows_PS, 8, **sizes) == answer
    assert not pays_in_batch(even_PS, 1, **sizes), "one copy a token saves nothing"


class Slow(SoloExchange):
    """Rank 0 of two, by a clock of its own: 1 ms a call and 1 ns a byte, but for calls that wait 5 ms more.

    The other rank takes twice as long.
    """

    size = 2

    def __init__(self):
        self.now_s, self.calls = 0.0, 0

    def all_gather(self, row_X):
        return torch.stack([row_X, 2 * row_X])

    def send_rows(self, rows_RD, input_splits, output_splits):
        self.calls += 1
        self.now_s += 1e-3 + 1e-9 * rows_RD[1].nbytes + 5e-3 * (self.calls in (10, 11, 12))
        return rows_RD


def test_the_slowest_rank_counts_and_calls_that_were_held_up_do_not(monkeypatch):
    exchange = Slow()
    monkeypatch.setattr("moe.dedup_rule.time.perf_counter", lambda: exchange.now_s)
    link = measure_link(exchange, num_bytes=2**20, calls=5)
    assert link.latency_s == pytest.approx(2e-3, rel=1e-4)
    assert link.bytes_per_s == pytest.approx(0.5e9, rel=1e-4)


def test_a_group_of_one_has_a_link_that_costs_nothing():
    link = measure_link(SoloExchange())
    assert (link.latency_s, link.bytes_per_s, link.call_bytes) == (0.0, math.inf, 0.0)


def refused():
    fine = {"width": 4, "element_bytes": 4, "link": Link(latency_s=0.0, bytes_per_s=1.0)}
    yield "top_k=9 is out of 1..8", lambda: expected_pairs(9, 8, 2)
    yield "8 experts do not spread evenly over 3 ranks", lambda: saved_frac(2, 8, 3)
    yield "make no link", lambda: Link(latency_s=-1.0, bytes_per_s=1.0)
    yield "make no link", lambda: Link(latency_s=0.0, bytes_per_s=0.0)
    yield "make no link", lambda: Link(latency_s=math.nan, bytes_per_s=1.0)
    yield "do not fit the copies", lambda: unique_bytes(ROWS_PS, PAIRS[0][0] + 3, PAIRS[0][1], 0, 4, 4)
    yield "do not fit the copies", lambda: unique_bytes(ROWS_PS, PAIRS[0][0], PAIRS[0][1][:1], 0, 4, 4)
    yield "rank=2 is out of 0..1", lambda: unique_bytes(ROWS_PS, *PAIRS[0], 2, 4, 4)
    yield "width=0", lambda: plain_bytes(ROWS_PS, 0, 0, 4)
    yield "weight_bytes=0", lambda: unique_bytes(ROWS_PS, *PAIRS[0], 0, 4, 4, 0)
    yield "S a multiple of P", lambda: plain_bytes(ROWS_PS[:, :3], 0, 4, 4)
    yield "pairs=5 is out of 0..copies=4", lambda: pays(4, 5, **fine)
    yield "local_s=-1", lambda: pays(4, 3, local_s=-1, **fine)
    yield "element_bytes=0", lambda: pays(4, 3, **{**fine, "element_bytes": 0})
    yield "num_bytes=1", lambda: measure_link(SoloExchange(), num_bytes=1)
    yield "calls=0", lambda: measure_link(SoloExchange(), calls=0)


@pytest.mark.parametrize(("message", "call"), list(refused()), ids=lambda v: v if isinstance(v, str) else "")
def test_what_makes_no_sense_is_refused(message, call):
    with pytest.raises(ValueError, match=message.replace("..", r"\.\.")):
        call()


def test_the_device_is_where_the_buffers_are():
    seen = []

    class Exchange(SoloExchange):
        size = 2

        def send_rows(self, rows_RD, input_splits, output_splits):
            seen.append(rows_RD.device.type)
            return rows_RD

        def all_gather(self, row_X):
            return torch.ones(2, 3)

    measure_link(Exchange(), calls=1, device=torch.device("meta"))
    assert seen == ["meta"] * 4
