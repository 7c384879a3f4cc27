"""The tokens of a router plant: their scores, the drift that balances them, and how they choose.

Under `balancer/plant.py`, on the kernels of `balancer/plant_kernels.py`.
"""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer import plant_kernels as kernel_file
from balancer.bias_record import Floats
from balancer.compiled import compile_file
from balancer.plant_config import PlantConstants

_POPULATION = 0  # stream of random numbers
# of the search for balance: steps on a part of the tokens, then on all
_PART_TOKENS, _PART_STEPS, _STEPS = 4096, 40, 10


def generator(seed: int, step: int, stream: int) -> np.random.Generator:
    """Random numbers of one step, for one purpose."""
    return np.random.default_rng((seed, step, stream))


def settled(
    shape_LE: tuple[int, int], tokens: int, step: int, known: PlantConstants
) -> tuple[NDArray[np.float32], Floats, Floats]:
    """Scores, the drift that balances them (and the offset of the start), and lam there."""
    rng = generator(known.seed, step, _POPULATION)
    base_LME = np.stack([_scores(rng, shape_LE[1], tokens, known) for _ in range(shape_LE[0])])
    drift_LE = balance(base_LME, known)
    scale_L = _scale(base_LME, drift_LE, known)
    offset_LE = rng.standard_normal(shape_LE)
    offset_LE = known.imbalance * (offset_LE - offset_LE.mean(axis=1, keepdims=True))
    return base_LME, drift_LE + offset_LE / scale_L[:, None], scale_L


def _scores(
    rng: np.random.Generator, num_experts: int, tokens: int, known: PlantConstants
) -> NDArray[np.float32]:
    common_E = known.expert_spread * rng.standard_normal(num_experts)
    width_E = known.token_spread * np.exp(known.width_spread * rng.standard_normal(num_experts))
    logit_ME = rng.standard_normal((tokens, num_experts), dtype=np.float32)
    logit_ME = logit_ME * width_E.astype(np.float32) + common_E.astype(np.float32)
    if known.sigmoid:
        return (1.0 / (1.0 + np.exp(-logit_ME))).astype(np.float32, copy=False)
    power_ME = np.exp(logit_ME - logit_ME.max(axis=1, keepdims=True))
    return (power_ME / power_ME.sum(axis=1, keepdims=True)).astype(np.float32, copy=False)


def balance(base_LME: NDArray[np.float32], known: PlantConstants) -> Floats:
    """The drift that balances a population, mean 0: damped Newton steps on the diagonal of dn/db.

    From where the scores of every expert exceed a common threshold equally often; first on a part of the
    tokens, which is near enough.
    """
    tokens = base_LME.shape[1]
    above_LE = np.quantile(base_LME[:, :_PART_TOKENS], 1.0 - known.top_k / base_LME.shape[2], axis=1)
    shift_LE = -above_LE.astype(np.float64)
    hits_LE = np.zeros_like(shift_LE)
    for part, steps in ((min(tokens, _PART_TOKENS), _PART_STEPS), (tokens, _STEPS)):
        part_LME = np.ascontiguousarray(base_LME[:, :part])
        for i in range(steps):
            counts_LE, swap_L2E = _swaps(part_LME, shift_LE, known)
            hits_LE = 0.8 * hits_LE + swap_L2E[:, 1] * (tokens / part)  # of five steps
            step_LE = _newton(counts_LE / part, hits_LE / tokens, part_LME, known)
            shift_LE = shift_LE - step_LE * (0.8 / (1.0 + i / 8.0) if part < tokens else 0.4)
    return shift_LE - shift_LE.mean(axis=1, keepdims=True)


def _newton(
    share_LE: Floats, hits_LE: Floats, base_LME: NDArray[np.float32], known: PlantConstants
) -> Floats:
    """A full step; hits_LE: swaps within twice the gap a token, of five steps together."""
    r = known.top_k / share_LE.shape[1]
    slope_LE = hits_LE / (20.0 * known.swap_delta)
    slope_LE = np.maximum(slope_LE, 0.2 * np.maximum(slope_LE.mean(axis=1, keepdims=True), 1e-12))
    most_L1 = 0.5 * base_LME[:, :256].std(axis=(1, 2))[:, None]
    # from far away, where the slope says little: a part of the spread of the scores at most
    return np.clip((share_LE - r) / slope_LE, -most_L1, most_L1)


def _scale(base_LME: NDArray[np.float32], shift_LE: Floats, known: PlantConstants) -> Floats:
    """lam from swaps at a small gap: the trace of dn/db over its E - 1 nonzero eigenvalues, over r."""
    num_experts = shift_LE.shape[1]
    swap_L2E = _swaps(base_LME, shift_LE, known)[1]
    hits_L = (2.0 * swap_L2E[:, 0] - 0.5 * swap_L2E[:, 1]).sum(axis=1)
    if not (hits_L > 0).all():
        raise ValueError(
            f"swap_delta={known.swap_delta} finds no token whose choice is that near: the slope of the plant "
            "cannot be measured; give a larger swap_delta or population"
        )
    trace_L = hits_L / (2.0 * base_LME.shape[1] * known.swap_delta)
    return trace_L / (num_experts - 1) / (known.top_k / num_experts)


def count_tokens(base_LME: NDArray[np.float32], shift_LE: Floats, known: PlantConstants) -> NDArray[np.int64]:
    """How many tokens select each expert, [L, E], under scores + shift."""
    counts_LE = np.zeros(shift_LE.shape, np.int64)
    kernels = _kernels(known)
    for score_ME, shift_E, counts_E in zip(base_LME, shift_LE.astype(np.float32), counts_LE):
        kernels.count_layer(score_ME, shift_E, known.top_k, counts_E)
    return counts_LE


def _swaps(
    base_LME: NDArray[np.float32], shift_LE: Floats, known: PlantConstants
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Counts [L, E] and swaps [L, 2, E] of a population."""
    arrays = measure_tokens(base_LME, shift_LE, shift_LE, known, swap=2)
    return arrays["counts"], arrays["swap"]


def measure_tokens(
    base_LME: NDArray[np.float32], shift_LE: Floats, drift_LE: Floats, known: PlantConstants, **lengths: int
) -> dict[str, NDArray[np.int64]]:
    """All that `measure_layer` adds up, stacked over the layers; lengths: of the arrays that are wanted."""
    layers, experts = shift_LE.shape
    bins = 2 * kernel_file.SIDE
    swap, pair, margin, score = (lengths.get(name, 0) for name in ("swap", "pair", "margin", "score"))
    arrays = {
        "counts": np.zeros((layers, experts), np.int64),
        "swap": np.zeros((layers, swap, experts), np.int64),
        "pair": np.zeros((layers, pair, experts, experts), np.int64),
        "margin": np.zeros((layers, margin, bins), np.int64),
        "score": np.zeros((layers, score, bins), np.int64),
    }
    kernels, shift, drift = _kernels(known), shift_LE.astype(np.float32), drift_LE.astype(np.float32)
    for layer in range(layers):
        kernels.measure_layer(
            base_LME[layer], shift[layer], drift[layer], known.top_k, np.float32(known.swap_delta),
            *(array[layer] for array in arrays.values()),
        )  # fmt: skip
    return arrays


def bin_edges() -> Floats:
    """Edges [B + 1] of the bins of margins and scores: 8 equal parts of each octave of the absolute value
    from 2^-17 to 8, either sign, and one bin on each side of 0; what lies beyond is in the last bins."""
    octaves = 2.0 ** np.arange(kernel_file.LOWEST, kernel_file.HIGHEST)
    part_X = 1.0 + np.arange(kernel_file.BINS_PER_OCTAVE) / kernel_file.BINS_PER_OCTAVE
    size_X = np.append((octaves[:, None] * part_X).ravel(), 2.0**kernel_file.HIGHEST)
    return np.concatenate([-size_X[::-1], [0.0], size_X])


@lru_cache(maxsize=1)
def _compiled() -> SimpleNamespace:
    return SimpleNamespace(**compile_file(kernel_file, dict.fromkeys(kernel_file.ENTRIES)))


def _kernels(known: PlantConstants) -> Any:
    return _compiled() if known.compiled else kernel_file
