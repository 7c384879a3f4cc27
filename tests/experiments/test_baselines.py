"""Bigram and lzma figures on text of known entropy, and on the built-in domains."""

import math

import numpy as np
import pytest

from experiments.baselines import bigram_bits_per_token, lzma_bits_per_byte
from experiments.data import DataConfig, load_corpus, validation_batch


def windows(tokens, num=50, width=65):
    return tokens[: num * width].reshape(num, width)


def test_uniform_random_bytes_take_eight_bits():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 1_000_000, dtype=np.uint8)
    # 8 bits, and what 65536 pairs fitted on 15 examples each cost on fresh text: below (1/2) / 15 / ln 2 =
    # 0.05
    bits = bigram_bits_per_token(tokens[:900_000], windows(tokens[900_000:], 500), 256)
    assert 8.0 <= bits < 8.06
    assert 8.0 <= lzma_bits_per_byte(tokens[:100_000]) < 8.2  # lzma adds a bit or so for each literal run


def test_constant_text_takes_no_bits():
    tokens = np.full(100_000, 65, dtype=np.uint8)
    assert 0 <= bigram_bits_per_token(tokens, windows(tokens), 256) < 1e-4  # one pseudo-count in 1e5
    assert lzma_bits_per_byte(tokens) < 0.02  # some 100 bytes of header


def test_a_bigram_source_is_matched():
    # a chain that stays with 0.9 and else moves on by one of 4 tokens: H = H(0.9) + 0.1 * log2(3)
    rng = np.random.default_rng(0)
    moves = np.where(rng.random(400_000) < 0.9, 0, rng.integers(1, 4, 400_000))
    tokens = np.cumsum(moves) % 4
    entropy = -0.9 * math.log2(0.9) - 0.1 * math.log2(0.1) + 0.1 * math.log2(3)
    bits = bigram_bits_per_token(tokens[:300_000], windows(tokens[300_000:], 1000), 4)
    # 64000 tokens whose information has standard deviation 1.4 bits: 0.0057; three of these
    assert abs(bits - entropy) < 0.017


def test_the_figure_is_that_of_the_formula():
    train, window = np.array([0, 1, 0, 1, 2]), np.array([[1, 0, 2], [2, 1, 1]])
    single = [(2 + 3 / 4) / 8, (2 + 3 / 4) / 8, (1 + 3 / 4) / 8, (3 / 4) / 8]
    expected = [
        (1 + 2 * single[0]) / (2 + 2),  # 0 after 1: one of two, two kinds of follower
        (0 + 1 * single[2]) / (2 + 1),  # 2 after 0: never seen
        single[1],  # nothing was seen after 2
        (0 + 2 * single[1]) / (2 + 2),  # 1 after 1
    ]
    bits = bigram_bits_per_token(train, window, 4)
    assert bits == pytest.approx(-np.log2(expected).mean(), rel=1e-12)  # the same float64 sums


def test_the_model_is_a_distribution_over_the_vocabulary():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 5, 200) ** 2 % 7
    for given in range(8):
        pairs = np.array([[given, token] for token in range(8)])
        total = sum(2 ** -bigram_bits_per_token(train, pair[None], 8) for pair in pairs)
        assert total == pytest.approx(1, rel=1e-12)  # rounding only


def test_domains_really_differ():
    domains = load_corpus(DataConfig()).domains
    for domain in domains:
        valid = validation_batch(domain, 256, 64)
        bits = {other.name: bigram_bits_per_token(other.train, valid, 256) for other in domains}
        own = bits.pop(domain.name)
        assert 1 < own < 5
        # prose and python share their English words; a bigram of the other is still 0.3 bits worse
        assert min(bits.values()) > own + 0.3, (domain.name, own, bits)
        assert 0.3 < lzma_bits_per_byte(domain.valid) < own


def test_long_texts_are_sampled_evenly():
    train = np.repeat(np.arange(2, dtype=np.uint8), 6_000_000)  # the second token only in the second half
    assert bigram_bits_per_token(train, np.ones((1, 9), dtype=np.uint8), 2) < 1e-4


def test_figures_that_have_no_meaning_are_nan():
    assert math.isnan(bigram_bits_per_token(np.arange(9), np.ones((1, 2), dtype=int), 4097))
    assert math.isnan(lzma_bits_per_byte(np.arange(9, dtype=np.uint16)))


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        (np.arange(9), np.arange(9), "valid_windows: expected"),
        (np.arange(9), np.ones((0, 5), dtype=int), "valid_windows: expected"),
        (np.arange(9), np.ones((5, 1), dtype=int), "valid_windows: expected"),
        (np.arange(1), np.ones((5, 2), dtype=int), "train: expected"),
        (np.arange(17), np.ones((5, 2), dtype=int), r"train: tokens span 0\.\.16, outside 0\.\.15"),
        (np.arange(9), np.full((5, 2), -1), "valid_windows: tokens span -1"),
    ],
)
def test_bad_input_is_refused_by_name(train, valid, message):
    with pytest.raises(ValueError, match=message):
        bigram_bits_per_token(train, valid, 16)


def test_no_bytes_cannot_be_compressed():
    with pytest.raises(ValueError, match="no bytes"):
        lzma_bits_per_byte(np.zeros(0, dtype=np.uint8))
