"""Validation: the ranks share the windows, and the figure does not depend on how many there are."""

import math

import numpy as np
import pytest
import torch

from experiments.config import load_config
from experiments.evaluate import baselines, bits_per_token, validation_windows
from experiments.job import Job
from moe import Topology, make_groups
from moe.model import Transformer
from moe.testing import run_ranks

SETTINGS = ["model.seq_len=12", "model.d_model=16", "model.num_layers=2", "moe.expert_hidden=8"]
# windows that no number of ranks and micro-batches divides evenly, one domain with a single one
WINDOWS = {"many": 7, "one": 1}


def windows() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, 256, (count, 13)) for name, count in WINDOWS.items()}


def evaluate_on_rank(rank, world):
    torch.set_num_threads(1)
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    groups = make_groups(topology)
    model = Transformer(load_config("tiny.toml", SETTINGS).model, topology, groups=groups)
    model.init_weights(1)
    job = Job(topology=topology, groups=groups, device=torch.device("cpu"))
    bits = bits_per_token(model, job, windows(), micro_batch=2)
    return bits, model.training


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bits_are_the_mean_over_all_windows_on_any_number_of_ranks(world):
    """On 4 ranks most have no window of "one": they go on with empty batches."""
    model = Transformer(load_config("tiny.toml", SETTINGS).model)
    model.init_weights(1)
    results = run_ranks(evaluate_on_rank, world)
    for name, tokens in windows().items():
        batch = torch.from_numpy(tokens)
        nats = model(batch[:, :-1], batch[:, 1:])[0].item() / batch[:, 1:].numel()
        for bits, training in results:
            assert bits[name] == pytest.approx(nats / math.log(2), rel=1e-5)
            assert training, "the model is back in training mode"


def test_baselines_and_windows_cover_every_domain():
    from experiments.data import load_corpus

    config = load_config("tiny.toml", ["train.valid_sequences=3"])
    corpus = load_corpus(config.data, seq_len=config.model.seq_len)
    found = validation_windows(config, corpus)
    simple = baselines(corpus, found)
    names = {domain.name for domain in corpus.domains}
    assert set(found) == set(simple["bigram"]) == set(simple["lzma"]) == names
    assert all(tokens.shape == (3, config.model.seq_len + 1) for tokens in found.values())
    assert all(0 < bits < 8 for bits in simple["bigram"].values())
