"""Every bias law by name holds to the same contract, on a population that is routed in plain numpy.

`route` is the oracle: it sorts score + bias of every token and counts whatever a law may ask for.
"""

import json
from typing import Any

import numpy as np
import pytest

from balancer.bias import (
    LAWS,
    BiasState,
    clip,
    dead_band,
    init_bias,
    law,
    rate_limit,
    switch_law,
    update_bias,
)
from balancer.bias_record import STATISTICS, Law, Measurement
from balancer.forecast_record import copy_state
from experiments.state_tree import pack, unpack

NAMES = tuple(LAWS)
L, E, K, M = 2, 6, 2, 120
DELTA = 0.02
SCORE_EDGES = np.linspace(0.0, 1.0, 201)
STEPS = np.geomspace(2.0**-12, 2.0, 105)
MARGIN_EDGES = np.concatenate((-STEPS[::-1], [0.0], STEPS))


def route(
    scores_LME: np.ndarray, bias_LE: np.ndarray, step: int = 0, without: tuple[str, ...] = ()
) -> Measurement:
    """The measurement of a population under a bias, with every statistic but some."""
    layers, tokens, experts = scores_LME.shape
    total = scores_LME + bias_LE[:, None, :]
    order = np.argsort(-total, axis=2, kind="stable")
    ranked = np.take_along_axis(total, order, axis=2)
    chosen = np.zeros(total.shape, dtype=bool)
    np.put_along_axis(chosen, order[:, :, :K], True, axis=2)
    # the K-th largest among the others: for a chosen expert the (K+1)-th of all, else the K-th
    margin = total - np.where(chosen, ranked[:, :, K, None], ranked[:, :, K - 1, None])
    gap = ranked[:, :, K - 1] - ranked[:, :, K]
    pairs = {wide: np.zeros((layers, experts, experts)) for wide in (1, 2)}
    for wide, count in pairs.items():
        layer, token = np.nonzero(gap < wide * DELTA)
        np.add.at(count, (layer, order[layer, token, K - 1], order[layer, token, K]), 1)
    fields: dict[str, Any] = {
        "swap_delta": DELTA,
        "swap_pairs_LEE": pairs[1],
        "wide_swap_pairs_LEE": pairs[2],
        "swaps_LE": pairs[1].sum(axis=1) + pairs[1].sum(axis=2),
        "wide_swaps_LE": pairs[2].sum(axis=1) + pairs[2].sum(axis=2),
        "score_histogram_LEB": histogram(scores_LME, SCORE_EDGES),
        "score_edges_X": SCORE_EDGES,
        "margin_histogram_LEB": histogram(margin, MARGIN_EDGES),
        "margin_edges_X": MARGIN_EDGES,
        "sample_LME": scores_LME.copy(),
        "squares_LE": chosen.sum(axis=1).astype(float) ** 2,
        "tokens_squared": float(tokens**2),
    }
    for name in without:
        fields = {key: value for key, value in fields.items() if key not in STATISTICS[name]}
    counts_LE = chosen.sum(axis=1).astype(float)
    return Measurement(step=step, counts_LE=counts_LE, num_tokens=tokens, top_k=K, **fields)


def histogram(values_LME: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[L, E, B] counts; what lies outside goes to the outer bins. A margin of 0 counts as below it."""
    index = np.clip(np.searchsorted(edges, values_LME, side="left") - 1, 0, len(edges) - 2)
    layers, _, experts = values_LME.shape
    counts = np.zeros((layers, experts, len(edges) - 1), dtype=np.int64)
    np.add.at(counts, (np.arange(layers)[:, None, None], np.arange(experts)[None, None, :], index), 1)
    return counts


def population(seed: int = 0, spread: float = 0.05) -> np.ndarray:
    """[L, M, E] scores in 0..1 with experts of different standing."""
    rng = np.random.default_rng(seed)
    return 0.5 + spread * rng.standard_normal((L, 1, E)) + 0.1 * rng.uniform(-1, 1, (L, M, E))


def even_population() -> np.ndarray:
    """Every token also in all its rotations over the experts: all experts are alike."""
    tokens = population(1, spread=0.0)[:, : M // E]
    return np.concatenate([np.roll(tokens, shift, axis=2) for shift in range(E)], axis=1)


def run(law_: Law, state: BiasState, scores: np.ndarray, steps: int, first: int = 0) -> BiasState:
    """The closed loop on a population."""
    for step in range(first, first + steps):
        measurement = route(scores, state.history_DLE[-1], step)
        _, state = update_bias(law_, measurement, state)
    return state


def same(first: Any, second: Any) -> bool:
    """Two states, bit by bit."""
    if isinstance(first, tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second))
    return np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_exact_balance_calls_for_no_action(name: str) -> None:
    law_ = law(name)
    state = init_bias(law_, L, E, K)
    for step in range(5):
        measurement = route(even_population(), state.bias_LE, step)
        assert (measurement.counts_LE == M * K / E).all(), "the oracle's population is not even"
        bias_LE, state = update_bias(law_, measurement, state)
        # rounding of a mean over E equal numbers is all that may be left
        assert np.abs(bias_LE).max() < 1e-15, f"step {step}: {bias_LE}"


@pytest.mark.parametrize("name", NAMES)
def test_an_imbalance_calls_for_action_in_the_right_direction(name: str) -> None:
    scores = even_population()
    scores[:, :, 0] += 0.03
    scores[:, :, 1] -= 0.03
    law_ = law(name)
    bias_LE, _ = update_bias(law_, route(scores, np.zeros((L, E))), init_bias(law_, L, E, K))
    assert (bias_LE[:, 0] < 0).all() and (bias_LE[:, 1] > 0).all()
    if "sign" not in name:  # which treats large and small errors alike
        assert (bias_LE.argmin(axis=1) == 0).all() and (bias_LE.argmax(axis=1) == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_ends_nearer_to_balance(name: str) -> None:
    scores = population(2)
    start = np.abs(route(scores, np.zeros((L, E))).violation_LE).mean()
    state = run(law(name), init_bias(law(name), L, E, K), scores, 150)
    end = np.abs(route(scores, state.bias_LE).violation_LE).mean()
    # 150 steps of the slowest published setting (sign, 1e-3) cover 0.15 of score, three times the spread
    assert end < start / 3, f"mean |y| {start:.3f} -> {end:.3f}"


@pytest.mark.parametrize("name", NAMES)
def test_renaming_the_experts_and_layers_renames_the_bias(name: str) -> None:
    law_, order, layers = law(name), np.array([3, 0, 5, 1, 4, 2]), np.array([1, 0])
    scores = population(3)
    plain = run(law_, init_bias(law_, L, E, K), scores, 6)
    renamed = run(law_, init_bias(law_, L, E, K), scores[layers][:, :, order], 6)
    # sums are taken in another order: rounding only (no score ties another)
    np.testing.assert_allclose(renamed.bias_LE, plain.bias_LE[layers][:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_stays_within_its_limit_with_mean_zero(name: str) -> None:
    law_, limit = law(name), 2e-3
    state = init_bias(law_, L, E, K, limit=limit)
    scores, saturated = population(4, spread=0.2), False
    for step in range(30):
        bias_LE, state = update_bias(law_, route(scores, state.bias_LE, step), state)
        assert np.abs(bias_LE).max() <= limit
        assert np.abs(bias_LE.mean(axis=1)).max() < 1e-12
        saturated |= bool(np.abs(bias_LE).max() == limit)
    assert saturated, "the limit was never reached: the test says nothing"
    assert np.abs(state.lost_LE).max() > 0, "what the limit has taken must be told to the law"
    assert np.abs(state.lost_LE.mean(axis=1)).max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_state_copied_or_saved_goes_on_bit_by_bit(name: str) -> None:
    law_, scores = law(name, delay_steps=1), population(5)
    start = run(law_, init_bias(law_, L, E, K, delay_steps=1), scores, 7)
    saved = unpacked(start)
    assert same(saved, start)
    whole = run(law_, copy_state(start), scores, 7, first=7)
    again = run(law_, copy_state(start), scores, 7, first=7)
    loaded = run(law_, saved, scores, 7, first=7)
    assert same(whole, again), "not a function of the state"
    assert same(whole, loaded)


def unpacked(state: Any) -> Any:
    """The state through JSON text and tensors, as in a checkpoint."""
    tensors: dict[str, Any] = {}
    text = json.dumps(pack(plain_tree(state), "control", tensors))
    return rebuilt(state, unpack(json.loads(text), tensors))


def plain_tree(state: Any) -> Any:
    if isinstance(state, tuple):
        fields = getattr(state, "_fields", range(len(state)))
        return {str(name): plain_tree(part) for name, part in zip(fields, state)}
    return state


def rebuilt(like: Any, tree: Any) -> Any:
    if not isinstance(like, tuple):
        return tree
    parts = [rebuilt(part, value) for part, value in zip(like, tree.values())]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_leaves_measurement_and_copies_alone(name: str) -> None:
    law_, scores = law(name), population(6)
    state = run(law_, init_bias(law_, L, E, K), scores, 3)
    measurement, kept = route(scores, state.bias_LE), copy_state(state)
    counts = measurement.counts_LE.copy()
    bias_LE, after = update_bias(law_, measurement, copy_state(state))
    bias_LE += 1.0  # what a caller does to the returned bias is no business of the state
    assert np.array_equal(measurement.counts_LE, counts)
    assert same(state, kept)
    assert np.abs(after.bias_LE.mean(axis=1)).max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_nan_negative_and_other_shapes_are_refused(name: str) -> None:
    law_ = law(name)
    state = init_bias(law_, L, E, K)
    good = route(population(7), state.bias_LE)
    for bad in (np.nan, np.inf, -1.0, good.counts_LE[0, 0] + 1):
        counts = good.counts_LE.copy()
        counts[0, 0] = bad
        with pytest.raises(ValueError, match="counts are negative, NaN, or not"):
            update_bias(law_, replaced(good, counts_LE=counts), state)
    counts = good.counts_LE.copy()
    counts[0, 0], counts[0, 1] = -1.0, counts[0, :2].sum() + 1.0  # the sum is right
    with pytest.raises(ValueError, match="counts are negative"):
        update_bias(law_, replaced(good, counts_LE=counts), state)
    with pytest.raises(ValueError, match="the bias loop was made for"):
        update_bias(law_, replaced(good, counts_LE=good.counts_LE[:, :-1]), state)
    with pytest.raises(ValueError, match="swaps_LE"):
        update_bias(law_, replaced(good, swaps_LE=np.full((L, E), np.nan)), state)
    with pytest.raises(ValueError, match="margin_histogram_LEB"):
        update_bias(law_, replaced(good, margin_histogram_LEB=good.margin_histogram_LEB[:1]), state)
    with pytest.raises(ValueError, match="sample_LME"):
        update_bias(law_, replaced(good, sample_LME=np.full((L, M, E), np.nan)), state)
    assert same(state, init_bias(law_, L, E, K)), "a refused measurement has changed the state"


def replaced(measurement: Measurement, **fields: Any) -> Measurement:
    names = Measurement.__dataclass_fields__
    return Measurement(**({name: getattr(measurement, name) for name in names} | fields))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_tokens_changes_nothing(name: str) -> None:
    law_, scores = law(name), population(8)
    state = run(law_, init_bias(law_, L, E, K, delay_steps=1), scores, 5)
    empty = Measurement(step=9, counts_LE=np.zeros((L, E)), num_tokens=0, top_k=K)
    bias_LE, after = update_bias(law_, empty, copy_state(state))
    assert np.array_equal(bias_LE, state.bias_LE) and same(after.law, state.law)
    assert np.array_equal(after.history_DLE[0], after.history_DLE[1])


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_without_a_single_token_is_lifted(name: str) -> None:
    scores = even_population()
    scores[:, :, 2] -= 0.25  # the scores of all experts span 0.2: never chosen
    law_ = law(name)
    state = init_bias(law_, L, E, K)
    assert (route(scores, state.bias_LE).counts_LE[:, 2] == 0).all()
    state = run(law_, state, scores, 5)
    assert (state.bias_LE.argmax(axis=1) == 2).all() and np.isfinite(state.bias_LE).all()


@pytest.mark.parametrize("name", NAMES)
def test_statistics_that_do_not_come_stop_nothing(name: str) -> None:
    law_, scores = law(name), population(9)
    state = init_bias(law_, L, E, K)
    bare = route(scores, state.bias_LE, without=tuple(STATISTICS))
    bias_LE, state = update_bias(law_, bare, state)
    assert bias_LE.any() != bool(law_.needs), f"a law that needs {law_.needs} cannot act without"
    state = run(law_, state, scores, 3, first=1)
    assert state.bias_LE.any()


@pytest.mark.parametrize("old", NAMES)
def test_a_change_of_law_leaves_the_bias_where_it_is(old: str) -> None:
    scores = population(10)
    before = run(law(old), init_bias(law(old), L, E, K), scores, 12)
    measurement = route(scores, before.bias_LE, 12)
    for new in NAMES:
        state = switch_law(law(old), law(new), measurement, copy_state(before))
        assert np.array_equal(state.bias_LE, before.bias_LE), "b jumps at the switch"
        assert np.array_equal(state.history_DLE, before.history_DLE)
        bias_LE, state = update_bias(law(new), measurement, state)
        assert np.isfinite(bias_LE).all() and (old == new or type(state.law) is type(law(new).init(1, E, K)))


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_law_is_told_the_bias_of_its_measurement(name: str, delay: int) -> None:
    told: list[tuple[np.ndarray, np.ndarray]] = []
    inner = law(name, delay_steps=delay)

    def spy(measurement: Measurement, actuated: Any, state: Any) -> Any:
        told.append((actuated.measured_LE.copy(), actuated.newest_LE.copy()))
        return inner.update(measurement, actuated, state)

    law_ = inner._replace(update=spy)
    state, made = init_bias(law_, L, E, K, delay_steps=delay), [np.zeros((L, E))]
    for step in range(8):
        routed_under = made[max(0, len(made) - 1 - delay)]
        bias_LE, state = update_bias(law_, route(population(11), routed_under, step), state)
        assert np.array_equal(told[-1][0], routed_under), f"step {step}"
        assert np.array_equal(told[-1][1], made[-1]), f"step {step}"
        made.append(bias_LE)


WRAPPERS = {
    "dead_band": lambda law_: dead_band(law_, 1.0),
    "rate_limit": lambda law_: rate_limit(law_, 1e-3),
    "clip": lambda law_: clip(law_, 1e-3),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_law_keeps_the_contract(name: str, wrap: Any) -> None:
    law_, scores = wrap(law(name)), population(12)
    state = run(law_, init_bias(law_, L, E, K), scores, 6)
    assert same(run(law_, copy_state(state), scores, 4), run(law_, copy_state(state), scores, 4))
    assert np.abs(state.bias_LE.mean(axis=1)).max() < 1e-12 and law_.needs == law(name).needs
    assert (law_.report is None) == (law(name).report is None)
    quiet = init_bias(law_, L, E, K)
    bias_LE, _ = update_bias(law_, route(even_population(), quiet.bias_LE), quiet)
    assert np.abs(bias_LE).max() < 1e-15
