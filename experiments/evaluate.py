"""Evaluate: bits per byte on every domain's validation text, beside what simple models reach on it."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from experiments.baselines import bigram_bits_per_token, lzma_bits_per_byte
from experiments.config import Config
from experiments.corpus import Corpus
from experiments.data import validation_batch
from experiments.job import Job


def validation_windows(config: Config, corpus: Corpus) -> dict[str, np.ndarray]:
    """Domain -> windows [n, S + 1] int64, the same on every rank."""
    length, count = config.model.seq_len, config.train.valid_sequences
    return {d.name: validation_batch(d, length, count) for d in corpus.domains}


def baselines(corpus: Corpus, windows: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Bits per byte of a byte-bigram model fitted on each domain's training text, and of lzma."""
    bigram = {
        d.name: bigram_bits_per_token(d.train, windows[d.name], corpus.vocab_size) for d in corpus.domains
    }
    return {"bigram": bigram, "lzma": {d.name: lzma_bits_per_byte(d.valid) for d in corpus.domains}}


@torch.no_grad()
def bits_per_token(
    engine: Any, job: Job, windows: dict[str, np.ndarray], micro_batch: int
) -> dict[str, float]:
    """Mean negative log2 likelihood of every domain's windows (bits per byte where tokens are bytes).

    Collective: the ranks share the windows, and a rank that has none left goes on with empty batches, since
    the layers' exchanges need everybody.   windows: domain -> [n, S + 1] int64.
    """
    engine.eval()
    sums_D2 = torch.zeros(len(windows), 2, dtype=torch.float64, device=job.device)
    for row, tokens in enumerate(windows.values()):
        for first in range(0, len(tokens), micro_batch * job.world_size):
            share = tokens[first + job.rank * micro_batch :][:micro_batch]
            last = min(len(share), max(0, len(tokens) - first - job.rank * micro_batch))
            batch = torch.from_numpy(share[:last]).to(job.device)
            ce_sum, _ = engine(batch[:, :-1], batch[:, 1:])
            sums_D2[row, 0] += ce_sum
            sums_D2[row, 1] += batch[:, 1:].numel()
    dist.all_reduce(sums_D2)
    engine.train()
    nats_D = sums_D2[:, 0] / sums_D2[:, 1]
    return dict(zip(windows, (nats_D / math.log(2)).tolist()))
