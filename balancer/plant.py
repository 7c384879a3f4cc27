"""A router plant: what a bias law acts on, as a model of seconds in place of a training run of hours.

After `balancer/bias_record.py`; the laws of `balancer/bias.py` are tested and compared on it.

    state = init_plant(PlantConfig(num_experts=32, top_k=2, reinforcement=0.1))
    measurement, state = step_plant(bias_LE, state)          once for each optimizer step

A fixed population of M tokens with scores s [M, E] routes with score + bias + drift,

    n(b + z) = mean over the population of 1{e in the top-k of s + b + z}        top_k / E at balance

and the drift z [E] is what the router learns by itself from the batches that it saw:

    z(t+1) = z(t) + (reinforcement / lam) y(t) + (drift / lam) normal            y = counts / (T r) - 1

lam: mean nonzero eigenvalue of dy/db at balance, so that without control an imbalance grows by the factor
1 + reinforcement a step, about: eigenvalues differ. Counts are drawn around n with over-dispersion phi. Each
step draws from a generator of its own, seeded by (seed, step): a step is a function of the state alone.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bias_record import Floats, Measurement, as_bias
from balancer.dispersion import draw_counts
from balancer.plant_config import REPORTS, PlantConfig, PlantConstants, population_size
from balancer.plant_tokens import balance, bin_edges, count_tokens, generator, measure_tokens, settled

__all__ = [
    "REPORTS", "PlantConfig", "PlantState", "expected_shares", "init_plant", "plant_scale", "population_size",
    "step_plant", "switch_plant",
]  # fmt: skip

_SAMPLE = 256  # tokens whose scores `sample` shows, others in every step
_BATCHES = 8  # of a step, for `spread`
_DRIFT, _COUNTS, _SWITCH = 1, 2, 3  # streams of random numbers of one step, beside the population's


class PlantState(NamedTuple):
    """base_LME: [L, M, E] float32, scores without drift; never written to. drift_LE: z, [L, E], in units of
    score. waiting_DLE: [d, L, E] biases that do not route yet, the oldest first. scale_L: lam, change of y
    per unit of bias. step: of the next measurement."""

    base_LME: NDArray[np.float32]
    drift_LE: Floats
    waiting_DLE: Floats
    scale_L: Floats
    step: int
    constants: PlantConstants


def init_plant(config: PlantConfig) -> PlantState:
    """Return the state before the first step.

    The bias before the first step is 0, and the drift starts where the population is balanced under it, plus
    an offset of y of sd `imbalance`. Every layer has a population of its own. lam is measured from swaps.
    """
    compiled = find_spec("numba") is not None if config.compiled is None else config.compiled
    delta = config.swap_delta or (0.25 if config.score == "sigmoid" else 0.0625) / config.num_experts
    constants = PlantConstants(
        top_k=config.top_k, num_tokens=config.num_tokens, sigmoid=int(config.score == "sigmoid"),
        expert_spread=config.expert_spread, token_spread=config.token_spread,
        width_spread=config.width_spread, reinforcement=config.reinforcement, drift=config.drift,
        phi=config.phi, noise=int(config.noise), imbalance=config.imbalance,
        reports=sum(1 << i for i, name in enumerate(REPORTS) if name in config.statistics),
        swaps_every=config.swaps_every, scores_every=config.scores_every,
        margins_every=config.margins_every, swap_delta=delta, seed=config.seed, compiled=int(compiled),
    )  # fmt: skip
    tokens = config.population or population_size(
        config.num_tokens, config.num_experts, config.top_k, config.phi
    )
    shape_LE = (config.num_layers, config.num_experts)
    base_LME, drift_LE, scale_L = settled(shape_LE, tokens, 0, constants)
    return PlantState(
        base_LME=base_LME, drift_LE=drift_LE, waiting_DLE=np.zeros((config.delay_steps, *shape_LE)),
        scale_L=scale_L, step=0, constants=constants,
    )  # fmt: skip


def step_plant(
    bias_LE: ArrayLike, state: PlantState, asked: Sequence[str] = ()
) -> tuple[Measurement, PlantState]:
    """Return what the router reports of one step, and the state after it.

    bias_LE: [L, E], set now: it routes now, or d steps later. The measurement's counts are float64, whole
    unless the plant is without noise; swap counts and histograms are those of the population, scaled to T
    tokens, scores with the drift in them (what a router computes); margins are weighted so that their share
    above 0 is that of the drawn counts, and the sample is of other tokens in every step. The given state
    stays as it is. asked: statistics of this step out of turn. Raises ValueError for a bias of another shape,
    NaN or infinite, or a statistic that there is none of.
    """
    known = state.constants
    if unknown := set(asked) - set(REPORTS):
        raise ValueError(f"asked={sorted(unknown)} must be among {', '.join(REPORTS)}")
    bias_LE = as_bias(bias_LE, (state.drift_LE.shape[0], state.drift_LE.shape[1]))
    waiting_DLE = np.concatenate([state.waiting_DLE, bias_LE[None]])
    found = _report(waiting_DLE[0], asked, state)
    share_LE = found.pop("counts_LE") / state.base_LME.shape[1]
    counts_LE, spread = _draw(share_LE, state)
    if "margin_histogram_LEB" in found:
        found["margin_histogram_LEB"] = _as_drawn(found["margin_histogram_LEB"], counts_LE, known.num_tokens)
    measurement = Measurement(
        step=state.step,
        counts_LE=counts_LE,
        num_tokens=known.num_tokens,
        top_k=known.top_k,
        **found,
        **spread,
    )
    push_LE = known.reinforcement * measurement.violation_LE
    if known.drift:
        push_LE = push_LE + known.drift * _normal(state.drift_LE.shape, state, _DRIFT)
    drift_LE = state.drift_LE + push_LE / state.scale_L[:, None]
    return measurement, state._replace(
        drift_LE=drift_LE - drift_LE.mean(axis=1, keepdims=True),
        waiting_DLE=waiting_DLE[1:],
        step=state.step + 1,
    )


def switch_plant(state: PlantState, sd: float, *, new_population: bool = False) -> PlantState:
    """Return the state after a switch of the data: the drift jumps by sd / lam times normal, mean 0.

    sd: of the jump of y, about (large jumps are no longer in proportion). new_population: other tokens too,
    balanced under the drift that compensated the old ones' imbalance plus the jump; lam is measured again.
    """
    if not 0 <= sd < math.inf:
        raise ValueError(f"sd={sd} must be 0 or more, and finite; 1 throws experts off by their fair share")
    jump_LE = sd * _normal(state.drift_LE.shape, state, _SWITCH)
    if not new_population:
        return state._replace(drift_LE=state.drift_LE + jump_LE / state.scale_L[:, None])
    shape_LE = (state.drift_LE.shape[0], state.drift_LE.shape[1])
    base_LME, drift_LE, scale_L = settled(
        shape_LE, state.base_LME.shape[1], state.step + 1, state.constants._replace(imbalance=0.0)
    )
    # what the bias in force does to the balance is part of the state that the new tokens meet
    offset_LE = state.drift_LE - balance(state.base_LME, state.constants)
    drift_LE = drift_LE + offset_LE + jump_LE / scale_L[:, None]
    return state._replace(base_LME=base_LME, drift_LE=drift_LE, scale_L=scale_L)


def expected_shares(bias_LE: ArrayLike, state: PlantState) -> Floats:
    """Return n(b + z): the share of the tokens that selects each expert, [L, E], exact for the population.

    bias_LE: [L, E], as if it routed now. A layer sums to K. Raises ValueError as `step_plant`.
    """
    bias_LE = as_bias(bias_LE, (state.drift_LE.shape[0], state.drift_LE.shape[1]))
    return count_tokens(state.base_LME, bias_LE + state.drift_LE, state.constants) / state.base_LME.shape[1]


def plant_scale(state: PlantState) -> Floats:
    """Return lam [L], the mean nonzero eigenvalue of dy/db at balance, in 1/score: y changes by lam * b."""
    return state.scale_L.copy()


# ---- what a router reports ---------------------------------------------------------------------------------


def _due(known: PlantConstants, step: int) -> set[str]:
    """The statistics of a step."""
    every = {
        "swaps": known.swaps_every, "pairs": known.swaps_every, "scores": known.scores_every,
        "margins": known.margins_every, "sample": known.margins_every,
    }  # fmt: skip
    asked = [name for i, name in enumerate(REPORTS) if known.reports >> i & 1]
    return {name for name in asked if step % every.get(name, 1) == 0}


def _report(bias_LE: Floats, asked: Sequence[str], state: PlantState) -> dict[str, Any]:
    """The fields of a measurement but the counts, which are those of the population still."""
    known, base_LME, drift_LE = state.constants, state.base_LME, state.drift_LE
    due = _due(known, state.step) | set(asked)
    shift_LE = bias_LE + drift_LE
    if not due & {"swaps", "pairs", "margins", "scores", "sample"}:
        return {"counts_LE": count_tokens(base_LME, shift_LE, known)}
    experts = drift_LE.shape[1]
    found = measure_tokens(
        base_LME, shift_LE, drift_LE, known, swap=2 * ("swaps" in due), pair=2 * ("pairs" in due),
        margin=experts * ("margins" in due), score=experts * ("scores" in due),
    )  # fmt: skip
    per_token = known.num_tokens / base_LME.shape[1]
    fields: dict[str, Any] = {"counts_LE": found["counts"]}
    if "swaps" in due:
        fields |= {
            "swaps_LE": per_token * found["swap"][:, 0],
            "wide_swaps_LE": per_token * found["swap"][:, 1],
        }
    if "pairs" in due:
        fields["swap_pairs_LEE"] = per_token * found["pair"][:, 0]
        fields["wide_swap_pairs_LEE"] = per_token * found["pair"][:, 1]
    if due & {"swaps", "pairs"}:
        fields["swap_delta"] = known.swap_delta
    for name, field_name in (("margin", "margin"), ("score", "score")):
        if name + "s" in due:
            fields[f"{field_name}_histogram_LEB"] = per_token * found[name]
            fields[f"{field_name}_edges_X"] = bin_edges()
    if "sample" in due:
        shown_M = (np.arange(_SAMPLE) + _SAMPLE * state.step) % base_LME.shape[1]
        fields["sample_LME"] = base_LME[:, shown_M] + drift_LE[:, None].astype(np.float32)
    return fields


def _as_drawn(margin_LEB: Floats, counts_LE: Floats, tokens: int) -> Floats:
    """Margins whose share above 0 is that of the counts: the batch's noise is in both, as in training."""
    middle = margin_LEB.shape[2] // 2
    above_LE = margin_LEB[..., middle:].sum(axis=2)
    margin_LEB = margin_LEB.copy()
    margin_LEB[..., middle:] *= (counts_LE / np.where(above_LE > 0, above_LE, np.inf))[..., None]
    below_LE = tokens - above_LE
    rest_LE = tokens - margin_LEB[..., middle:].sum(axis=2)
    margin_LEB[..., :middle] *= (rest_LE / np.where(below_LE > 0, below_LE, np.inf))[..., None]
    return margin_LEB


def _draw(share_LE: Floats, state: PlantState) -> tuple[Floats, dict[str, Any]]:
    """Counts [L, E] of a step around the shares of the population, and the sums of `spread` if asked for.

    An over-dispersed draw may give an expert more than T copies: what is over goes to the others, in
    proportion to the room that they have.
    """
    known = state.constants
    tokens, copies = known.num_tokens, known.num_tokens * known.top_k
    spread = known.reports >> REPORTS.index("spread") & 1
    if not known.noise:
        counts_LE = tokens * share_LE
        if not spread:
            return counts_LE, {}
        return counts_LE, {"squares_LE": counts_LE**2 / _BATCHES, "tokens_squared": tokens**2 / _BATCHES}
    rng = generator(known.seed, state.step, _COUNTS)
    part_LE = share_LE / known.top_k
    if not spread:
        return _within(draw_counts(rng, part_LE, copies, known.phi), tokens).astype(np.float64), {}
    sizes = [(tokens * (i + 1)) // _BATCHES - (tokens * i) // _BATCHES for i in range(_BATCHES)]
    drawn = [
        _within(draw_counts(rng, part_LE, size * known.top_k, known.phi), size).astype(np.float64)
        for size in sizes
    ]
    sums = {
        "squares_LE": np.sum(np.square(drawn), axis=0),
        "tokens_squared": float(sum(size * size for size in sizes)),
    }
    return np.sum(drawn, axis=0), sums


def _within(counts_LE: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Counts with none above the number of tokens; changed in place."""
    for layer in np.nonzero((counts_LE > tokens).any(axis=1))[0]:
        counts_E = counts_LE[layer]
        over = int(np.maximum(counts_E - tokens, 0).sum())
        np.minimum(counts_E, tokens, out=counts_E)
        room_E = tokens - counts_E
        exact_E = over * (room_E / room_E.sum())
        added_E = np.floor(exact_E).astype(np.int64)
        rest = over - int(added_E.sum())
        added_E[np.argsort(added_E - exact_E, kind="stable")[:rest]] += 1
        counts_E += added_E
    return counts_LE


def _normal(shape_LE: tuple[int, ...], state: PlantState, stream: int) -> Floats:
    """Standard normal numbers whose mean over the experts is 0."""
    number_LE = generator(state.constants.seed, state.step, stream).standard_normal(shape_LE)
    return number_LE - number_LE.mean(axis=1, keepdims=True)
