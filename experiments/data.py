"""Training data: a corpus of several domains whose mix drifts over time.

Flow: `DataConfig` -> `load_corpus` -> `Corpus`; then for each step `mixture` -> `global_batch`, and per
domain `validation_batch`. Everything after the load is a pure function of (config, step, sequence index): a
batch is the same however it is divided over ranks and micro-batches, and a resumed run needs no state but
its step. The change of the mix is what moves the load of the experts.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from experiments.builtin import read_builtin
from experiments.corpus import Corpus, Domain, corpus_hash, read_paths

SCHEDULES = ("constant", "step", "rotation", "bursts")
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What to train on, and how its mix changes: the section [data].

    Raises ValueError for a value out of bounds; the message names one that works.
    """

    paths: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "files or folders, each a domain: text (any file, as bytes), or tokens (.npy, .bin); "
            "empty = the built-in corpus"
        },
    )
    vocab_size: int = field(
        default=256,
        metadata={"help": "size of the vocabulary (tokens); 256 for text, the tokenizer's for token files"},
    )
    token_dtype: str = field(
        default="uint16",
        metadata={"help": "integer type of .bin files, little-endian; uint16", "choices": TOKEN_DTYPES},
    )
    valid_frac: float = field(
        default=0.05, metadata={"help": "share of each domain kept for validation; 0.01 to 0.1"}
    )
    max_mb_per_domain: float = field(
        default=64.0,
        metadata={
            "help": "most text read for a domain (MB of 1e6 bytes), 0 = all; 64. Built-in domains end at "
            "5 MB, token files stay on disk and have no limit"
        },
    )
    schedule: str = field(
        default="rotation",
        metadata={
            "help": "how the mix of domains changes: constant, step (another dominant domain every "
            "period_steps), rotation (the dominant domain turns slowly, once round in period_steps), "
            "bursts (short, of one domain)",
            "choices": SCHEDULES,
        },
    )
    weights: tuple[float, ...] = field(
        default=(),
        metadata={"help": "weights of the domains before drift, in their order; empty = equal, e.g. 2,1,1"},
    )
    drift: float = field(
        default=0.8,
        metadata={"help": "share of a batch that follows the schedule, 0 = none; 0.5 to 0.9"},
    )
    period_steps: int = field(
        default=100, metadata={"help": "period of the schedule (optimizer steps); 20 to 2000"}
    )
    burst_steps: int = field(
        default=10, metadata={"help": "length of a burst (optimizer steps), at most period_steps; 5 to 50"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the draws (0 or more); any"})

    def __post_init__(self) -> None:
        _check_source(self)
        _check_drift(self)


def _check_source(config: DataConfig) -> None:
    if config.token_dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"data.token_dtype={config.token_dtype!r} is unknown; use one of {', '.join(TOKEN_DTYPES)}"
        )
    if config.vocab_size < 2:
        raise ValueError(f"data.vocab_size={config.vocab_size} must be at least 2; text has 256")
    if not config.paths and config.vocab_size != 256:
        raise ValueError(
            f"data.vocab_size={config.vocab_size} does not fit the built-in corpus of bytes; use 256"
        )
    if not 0 < config.valid_frac <= 0.5:
        raise ValueError(f"data.valid_frac={config.valid_frac} must be above 0 and at most 0.5; use 0.05")
    if not 0 <= config.max_mb_per_domain < math.inf:
        raise ValueError(f"data.max_mb_per_domain={config.max_mb_per_domain} must be 0 (all) or more; use 64")


def _check_drift(config: DataConfig) -> None:
    if config.schedule not in SCHEDULES:
        raise ValueError(f"data.schedule={config.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
    usable = all(0 <= weight < math.inf for weight in config.weights)
    if config.weights and not (usable and sum(config.weights) > 0):
        raise ValueError(f"data.weights={config.weights} must be 0 or more each, not all 0; use 1 for each")
    if not 0 <= config.drift <= 1:
        raise ValueError(f"data.drift={config.drift} is out of 0..1; use 0.8")
    if config.period_steps < 1:
        raise ValueError(f"data.period_steps={config.period_steps} must be at least 1; use 100")
    if config.schedule == "bursts" and not 1 <= config.burst_steps <= config.period_steps:
        raise ValueError(
            f"data.burst_steps={config.burst_steps} is out of 1..data.period_steps={config.period_steps}"
        )
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"data.seed={config.seed} is out of 0..2**63-1; use 0")


def load_corpus(config: DataConfig, *, seq_len: int = 1) -> Corpus:
    """Read the domains that config names, or the built-in ones, split into train and validation.

    seq_len: tokens of a sequence; ValueError where a domain's train or validation part holds no sequence of
    seq_len + 1 tokens. Also ValueError for paths that are missing, empty or unreadable and tokens out of
    range. `Corpus.notes` says what was left out.
    """
    max_bytes = math.ceil(config.max_mb_per_domain * 1e6)
    if config.paths:
        domains, notes = read_paths(
            config.paths,
            vocab_size=config.vocab_size,
            token_dtype=config.token_dtype,
            valid_frac=config.valid_frac,
            max_bytes=max_bytes,
        )
    else:
        domains, notes = read_builtin(valid_frac=config.valid_frac, max_bytes=max_bytes)
    for domain in domains:
        _check_holds(domain.name, "train", domain.train, seq_len)
        _check_holds(domain.name, "validation", domain.valid, seq_len)
    if config.weights:
        domain_weights(config, len(domains))
    return Corpus(
        domains=tuple(domains),
        vocab_size=config.vocab_size,
        sha256=corpus_hash(domains, config.vocab_size),
        notes=tuple(notes),
    )


def _check_holds(name: str, side: str, tokens: np.ndarray, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"domain {name!r}: its {side} part of {len(tokens)} tokens holds no sequence of "
            f"seq_len={seq_len} + 1; give more text, a shorter sequence, or another data.valid_frac"
        )


def domain_weights(config: DataConfig, num_domains: int) -> np.ndarray:
    """The weights before drift, [num_domains] float64, sum 1; ValueError if config gives not as many."""
    if not config.weights:
        return np.full(num_domains, 1.0 / num_domains)
    if len(config.weights) != num_domains:
        raise ValueError(
            f"data.weights has {len(config.weights)} values, the corpus {num_domains} domains; give as many"
        )
    weights = np.asarray(config.weights, dtype=np.float64)
    return weights / weights.sum()


def mixture(config: DataConfig, num_domains: int, step: int) -> np.ndarray:
    """The share of each domain in the batch of a step: [num_domains] float64, sums to 1.

    step: optimizer step, 0 or more. With the weights w before drift, a = config.drift, P = period_steps,
    the A domains of weight above 0 in their order, e_j = all on the j-th of these, and k = step // P:

        constant  w
        step      w for k = 0, then (1 - a) w + a e_((k - 1) mod A)
        rotation  (1 - a) w + a ((1 - f) e_i + f e_(i + 1 mod A)),  i + f = A step / P mod A,  0 <= f < 1
        bursts    (1 - a) w + a e_j in the last burst_steps of each period, j drawn from (seed, k); else w
    """
    if step < 0:
        raise ValueError(f"step={step} must be 0 or more")
    weights = domain_weights(config, num_domains)
    active = np.flatnonzero(weights)
    peak = _peak(config, len(active), step)
    if peak is None:
        return weights
    mixed = (1 - config.drift) * weights
    mixed[active] += config.drift * peak
    return mixed / mixed.sum()


def _peak(config: DataConfig, num_active: int, step: int) -> np.ndarray | None:
    """The part of the mix that drifts, [num_active] sum 1, or None where the schedule is at rest."""
    period, inside = divmod(step, config.period_steps)
    eye = np.eye(num_active)
    if config.schedule == "step" and period > 0:
        return eye[(period - 1) % num_active]
    if config.schedule == "rotation":
        # integers keep the turn exact however long a run is
        index, rest = divmod(num_active * inside, config.period_steps)
        frac = rest / config.period_steps
        return (1 - frac) * eye[index] + frac * eye[(index + 1) % num_active]
    if config.schedule == "bursts" and inside >= config.period_steps - config.burst_steps:
        # counter [.., 1]: a stream apart from that of the batches, which count from 0
        draw = np.random.Philox(key=[config.seed, period], counter=[0, 0, 0, 1]).random_raw()
        return eye[int(draw) % num_active]
    return None


def global_batch(
    corpus: Corpus, config: DataConfig, step: int, first: int, count: int, seq_len: int
) -> np.ndarray:
    """Sequences first .. first + count - 1 of the global batch of a step: [count, seq_len + 1] int64 tokens.

    Sequence i depends on (config, step, i) alone: domain by `mixture`, start uniform over the domain's
    train part. Inputs are [:, :-1], targets [:, 1:]. ValueError for a negative argument and a domain that
    is too short.
    """
    domain_ids, starts = _draw(corpus, config, step, first, count, seq_len)
    tokens = np.empty((count, seq_len + 1), dtype=np.int64)
    for row, (domain, start) in enumerate(zip(domain_ids, starts)):
        tokens[row] = corpus.domains[domain].train[start : start + seq_len + 1]
    return tokens


def global_batch_domains(
    corpus: Corpus, config: DataConfig, step: int, first: int, count: int, seq_len: int
) -> np.ndarray:
    """The domain (index into corpus.domains) of each sequence that `global_batch` gives: [count] int64."""
    return _draw(corpus, config, step, first, count, seq_len)[0]


def _draw(
    corpus: Corpus, config: DataConfig, step: int, first: int, count: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Domain and start of each sequence, [count] int64; sequence i has block i of the step's stream."""
    if min(step, first, count) < 0 or seq_len < 1:
        raise ValueError(
            f"step={step}, first={first}, count={count} must be 0 or more, seq_len={seq_len} 1 or more"
        )
    for domain in corpus.domains:
        _check_holds(domain.name, "train", domain.train, seq_len)
    bounds = np.cumsum(mixture(config, len(corpus.domains), step))
    # Philox makes four words a counter value: one value a sequence
    words = np.random.Philox(key=[config.seed, step], counter=first).random_raw(4 * count).reshape(count, 4)
    uniform = (words[:, 0] >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    domain_ids = np.searchsorted(bounds / bounds[-1], uniform, side="right")
    num_starts = np.array([len(domain.train) - seq_len for domain in corpus.domains], dtype=np.uint64)
    starts = words[:, 1] % num_starts[domain_ids]  # bias below 2**-30: a domain is far smaller than 2**64
    return domain_ids.astype(np.int64), starts.astype(np.int64)


def validation_batch(domain: Domain, seq_len: int, max_sequences: int) -> np.ndarray:
    """Evenly spaced windows of the validation part that do not overlap: [n, seq_len + 1] int64 tokens.

    n = min(max_sequences, what fits), at least 1; ValueError if not one window fits or max_sequences < 1.
    """
    if max_sequences < 1 or seq_len < 1:
        raise ValueError(f"max_sequences={max_sequences} and seq_len={seq_len} must be at least 1")
    _check_holds(domain.name, "validation", domain.valid, seq_len)
    width = seq_len + 1
    num = min(max_sequences, len(domain.valid) // width)
    # (len - width) / (num - 1) >= width, so neighbours never share a token
    starts = [index * (len(domain.valid) - width) // max(1, num - 1) for index in range(num)]
    return np.stack([domain.valid[start : start + width] for start in starts]).astype(np.int64)
