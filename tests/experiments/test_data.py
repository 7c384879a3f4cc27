"""Settings, mixtures and batches: pure functions of the step and the sequence index."""

from dataclasses import fields

import numpy as np
import pytest

from experiments.corpus import Corpus, Domain
from experiments.data import (
    DataConfig,
    domain_weights,
    global_batch,
    global_batch_domains,
    mixture,
    validation_batch,
)


def make_corpus(sizes=(5000, 6000, 7000)):
    """Domains whose tokens name domain and position: 100000 * domain + position."""
    domains = [
        Domain(name=f"d{i}", train=100_000 * i + np.arange(n), valid=np.arange(n // 10), num_files=1)
        for i, n in enumerate(sizes)
    ]
    return Corpus(domains=tuple(domains), vocab_size=10**6, sha256="")


# --- settings
# ------------------------------------------------------------------------------------------------


def test_every_setting_has_a_help_text():
    for setting in fields(DataConfig):
        assert setting.metadata["help"], setting.name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "wobble"}, "data.schedule='wobble' is unknown; use one of constant, step"),
        ({"token_dtype": "float32"}, "data.token_dtype='float32' is unknown"),
        ({"vocab_size": 1, "paths": ("x",)}, "data.vocab_size=1"),
        ({"vocab_size": 1000}, "data.vocab_size=1000.*use 256"),
        ({"valid_frac": 0.0}, "data.valid_frac=0.0"),
        ({"valid_frac": 0.6}, "data.valid_frac=0.6"),
        ({"valid_frac": float("nan")}, "data.valid_frac=nan"),
        ({"max_mb_per_domain": -1.0}, "data.max_mb_per_domain=-1.0"),
        ({"max_mb_per_domain": float("inf")}, "data.max_mb_per_domain=inf"),
        ({"weights": (1.0, -1.0)}, "data.weights"),
        ({"weights": (0.0, 0.0)}, "data.weights"),
        ({"weights": (1.0, float("nan"))}, "data.weights"),
        ({"drift": 1.5}, "data.drift=1.5"),
        ({"period_steps": 0}, "data.period_steps=0"),
        ({"schedule": "bursts", "burst_steps": 101}, "data.burst_steps=101.*data.period_steps=100"),
        ({"seed": -1}, "data.seed=-1"),
        ({"seed": 2**63}, "data.seed"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


# --- the mix
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "step", "rotation", "bursts"])
def test_a_mix_is_a_distribution_and_leaves_domains_of_weight_zero_out(schedule):
    config = DataConfig(schedule=schedule, weights=(2, 0, 1, 1), period_steps=7, burst_steps=3)
    for step in range(60):
        mix = mixture(config, 4, step)
        assert mix.dtype == np.float64 and mix.shape == (4,)
        assert abs(mix.sum() - 1) < 1e-15 and (mix >= 0).all()  # a few roundings of numbers below 1
        assert mix[1] == 0


def test_constant_keeps_the_weights():
    config = DataConfig(schedule="constant", weights=(3, 1))
    assert (mixture(config, 2, 12345) == [0.75, 0.25]).all()
    assert (mixture(DataConfig(schedule="constant"), 4, 0) == 0.25).all()


def test_step_changes_at_every_period_and_only_there():
    config = DataConfig(schedule="step", period_steps=10, drift=0.8)
    mixes = np.array([mixture(config, 4, step) for step in range(60)])
    assert (np.flatnonzero(np.abs(np.diff(mixes, axis=0)).sum(axis=1)) + 1 == [10, 20, 30, 40, 50]).all()
    assert (mixes[9] == 0.25).all()
    assert [int(mix.argmax()) for mix in mixes[10::10]] == [0, 1, 2, 3, 0]
    np.testing.assert_allclose(mixes[10], [0.85, 0.05, 0.05, 0.05], rtol=1e-14)  # rounding only


def test_rotation_turns_once_a_period_without_jumps():
    config = DataConfig(schedule="rotation", period_steps=100, drift=0.8)
    mixes = np.array([mixture(config, 4, step) for step in range(201)])
    assert [int(mixes[step].argmax()) for step in (0, 25, 50, 75, 100)] == [0, 1, 2, 3, 0]
    np.testing.assert_allclose(mixes[25], [0.05, 0.85, 0.05, 0.05], rtol=1e-14)  # rounding only
    # a step moves a * A / P = 0.032 from one domain to the next
    np.testing.assert_allclose(np.abs(np.diff(mixes, axis=0)).sum(axis=1), 2 * 0.032, rtol=1e-12)
    assert (mixes[:100] == mixes[100:200]).all()


def test_bursts_are_short_and_of_drawn_domains():
    config = DataConfig(schedule="bursts", period_steps=20, burst_steps=4, drift=0.8)
    mixes = np.array([mixture(config, 4, step) for step in range(20 * 40)]).reshape(40, 20, 4)
    assert (mixes[:, :16] == 0.25).all()
    assert np.allclose(mixes[:, 16:].max(axis=-1), 0.85)
    dominant = mixes[:, 16:].argmax(axis=-1)
    assert (dominant == dominant[:, :1]).all()  # one domain a burst
    assert set(dominant[:, 0]) == {0, 1, 2, 3}
    other = DataConfig(schedule="bursts", period_steps=20, burst_steps=4, seed=1)
    assert any(mixture(other, 4, 20 * k + 18).argmax() != dominant[k, 0] for k in range(40))


def test_weights_must_match_the_domains():
    with pytest.raises(ValueError, match=r"data\.weights has 2 values, the corpus 3 domains"):
        domain_weights(DataConfig(weights=(1, 1)), 3)
    with pytest.raises(ValueError, match="step=-1"):
        mixture(DataConfig(), 3, -1)


# --- batches
# -------------------------------------------------------------------------------------------------


def test_a_global_batch_is_the_same_however_it_is_divided():
    corpus, config = make_corpus(), DataConfig(seed=3)
    whole = global_batch(corpus, config, 17, 0, 24, 32)
    assert whole.dtype == np.int64 and whole.shape == (24, 33)
    parts = [
        global_batch(corpus, config, 17, 4 * (2 * micro + rank), 4, 32)
        for micro in range(3)
        for rank in range(2)
    ]
    assert (np.concatenate(parts) == whole).all()
    assert (global_batch(corpus, config, 17, 5, 1, 32)[0] == whole[5]).all()
    assert global_batch(corpus, config, 17, 5, 0, 32).shape == (0, 33)


def test_sequences_are_contiguous_windows_of_their_domain():
    corpus, config = make_corpus(), DataConfig()
    tokens = global_batch(corpus, config, 4, 0, 50, 16)
    assert (np.diff(tokens, axis=1) == 1).all()
    assert (tokens[:, 0] // 100_000 == global_batch_domains(corpus, config, 4, 0, 50, 16)).all()


def test_seed_step_and_index_each_change_the_draw():
    corpus = make_corpus((10**6,))
    base = global_batch(corpus, DataConfig(), 1, 0, 2, 8)[:, 0]
    for other in (
        global_batch(corpus, DataConfig(seed=1), 1, 0, 2, 8),
        global_batch(corpus, DataConfig(), 2, 0, 2, 8),
        global_batch(corpus, DataConfig(), 1, 2, 2, 8),
    ):
        assert not set(base) & set(other[:, 0])


def test_the_draw_follows_the_mix_and_reaches_both_ends():
    corpus = make_corpus((40, 50, 60))
    config = DataConfig(schedule="step", period_steps=1, weights=(1, 1, 0))
    ids = global_batch_domains(corpus, config, 1, 0, 4000, 32)
    # the share has standard deviation sqrt(.9 * .1 / 4000) = 0.005: four of them
    np.testing.assert_allclose(np.bincount(ids, minlength=3) / 4000, mixture(config, 3, 1), atol=0.02)
    assert (ids < 2).all()
    starts = global_batch(corpus, config, 1, 0, 4000, 32)[ids == 0, 0]
    assert set(starts) == set(range(40 - 32))  # the last window ends with the text


def test_bad_batch_arguments_are_refused():
    corpus = make_corpus((40, 5000))
    with pytest.raises(ValueError, match=r"'d0'.*train part of 40 tokens.*seq_len=40"):
        global_batch(corpus, DataConfig(), 0, 0, 1, 40)
    for step, first, count, seq_len in ((-1, 0, 1, 8), (0, -1, 1, 8), (0, 0, -1, 8), (0, 0, 1, 0)):
        with pytest.raises(ValueError, match="must be 0 or more"):
            global_batch(corpus, DataConfig(), step, first, count, seq_len)


@pytest.mark.parametrize(
    ("size", "asked", "expected"), [(1000, 5, 5), (1000, 99, 58), (17, 3, 1), (33, 2, 1)]
)
def test_validation_windows_are_spread_and_do_not_overlap(size, asked, expected):
    domain = Domain(name="d", train=np.arange(9), valid=np.arange(size, dtype=np.uint16), num_files=1)
    windows = validation_batch(domain, 16, asked)
    assert windows.dtype == np.int64 and windows.shape == (expected, 17)
    assert (np.diff(windows, axis=1) == 1).all()
    gaps = np.diff(windows[:, 0])
    assert (gaps >= 17).all() and (np.ptp(gaps) <= 1 if len(gaps) else True)
    assert windows[0, 0] == 0 and (expected == 1 or windows[-1, -1] == size - 1)


def test_bad_validation_arguments_are_refused():
    domain = Domain(name="d", train=np.arange(9), valid=np.arange(16), num_files=1)
    with pytest.raises(ValueError, match=r"'d'.*validation part of 16 tokens.*seq_len=16"):
        validation_batch(domain, 16, 4)
    with pytest.raises(ValueError, match="max_sequences=0"):
        validation_batch(domain, 4, 0)
