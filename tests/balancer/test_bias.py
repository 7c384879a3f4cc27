"""The bias controller around its laws, the rivals' formulas, and the wrappers."""

import numpy as np
import pytest

from balancer.bias import (
    LAWS,
    clip,
    dead_band,
    init_bias,
    law,
    rate_limit,
    switch_law,
    update_bias,
)
from balancer.bias_quantile import margin_quantile
from balancer.bias_record import Actuated, Law, Measurement, read_measurement

E, K, T = 4, 1, 400


def measured(counts: list[float], step: int = 0, **fields) -> Measurement:
    """One layer of 4 experts, 400 tokens: the fair share is 100."""
    return Measurement(step=step, counts_LE=np.array([counts], float), num_tokens=T, top_k=K, **fields)


SKEWED = measured([160, 100, 90, 50])  # y = .6, 0, -.1, -.5


def constant(change: list[float], name: str = "constant") -> Law:
    """A law that always wants the same change."""
    return Law(name, lambda *_: (), lambda measurement, actuated, state: (np.array([change]), state))


# ---- laws by name


def test_unknown_names_and_settings_say_what_is_known() -> None:
    with pytest.raises(ValueError, match="did you mean 'smebu'"):
        law("smebo")
    with pytest.raises(ValueError, match="known: identified, laplacian, sign"):
        law("pid controller")
    with pytest.raises(ValueError, match="no setting 'gain'; its settings: step, decay"):
        law("sign-decay", gain=1.0)
    with pytest.raises(ValueError, match="delay_steps=-1"):
        law("sign", delay_steps=-1)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("sign", "step", 0.0),
        ("sign-decay", "decay", 1.5),
        ("longcat", "step", -1.0),
        ("linear", "gain", np.inf),
        ("smebu", "momentum", 1.0),
        ("smebu", "kappa", 0.0),
        ("quantile-damped", "step", 1.5),
        ("bip", "rounds", 0),
        ("laplacian", "gain", 2.5),
        ("laplacian", "ridge", 0.0),
    ],
)
def test_a_bad_setting_is_named(name: str, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting}={value}"):
        law(name, **{setting: value})


@pytest.mark.parametrize("name", LAWS)
def test_every_law_knows_its_name(name: str) -> None:
    assert law(name, delay_steps=2).name == name


# ---- the formulas of laws that read counts


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("sign", {"step": 1e-3}, [-1e-3, 0, 1e-3, 1e-3]),
        ("longcat", {"step": 0.1}, [-0.1 * 0.6 / 4, 0, 0.1 * 0.1 / 4, 0.1 * 0.5 / 4]),
        ("linear", {"gain": 0.01}, [-6e-3, 0, 1e-3, 5e-3]),
    ],
)
def test_changes_are_as_published(name: str, settings: dict, wanted: list[float]) -> None:
    law_ = law(name, **settings)
    actuated = Actuated(*np.zeros((3, 1, E)))
    change_LE, _ = law_.update(SKEWED, actuated, law_.init(1, E, K))
    np.testing.assert_allclose(change_LE, [wanted], rtol=1e-12, atol=1e-18)


def test_the_decay_takes_its_share_of_the_bias() -> None:
    law_ = law("sign-decay", step=1e-3, decay=0.1)
    newest = np.array([[0.5, -0.5, 0.0, 0.0]])
    change_LE, _ = law_.update(SKEWED, Actuated(newest * 0, newest, newest * 0), law_.init(1, E, K))
    np.testing.assert_allclose(change_LE, [[-1e-3 - 0.05, 0.05, 1e-3, 1e-3]], rtol=1e-12)


def test_smebu_clamps_softly_and_keeps_momentum() -> None:
    law_ = law("smebu", step=5e-4, kappa=2.0, momentum=0.5)
    state, actuated = law_.init(1, E, K), Actuated(*np.zeros((3, 1, E)))
    push = np.tanh(2.0 * np.array([-0.6, 0.0, 0.1, 0.5]))
    push = 5e-4 * (push - push.mean())
    first, state = law_.update(SKEWED, actuated, state)
    second, state = law_.update(SKEWED, actuated, state)
    np.testing.assert_allclose(first[0], 0.5 * push, rtol=1e-12)
    np.testing.assert_allclose(second[0], 0.75 * push, rtol=1e-12)


# ---- limit, mean, delay


def nearest_by_bisection(bias: np.ndarray, limit: float) -> np.ndarray:
    """The oracle of the projection: the shift with which what is left after the clip has mean 0."""
    low, high = bias.min() - limit, bias.max() + limit
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(bias - middle, -limit, limit).sum() > 0 else (low, middle)
    return np.clip(bias - low, -limit, limit)


@pytest.mark.parametrize("seed", range(8))
def test_a_bias_beyond_its_limit_goes_to_the_nearest_one_within(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.standard_t(2, (5, 9))
    wanted -= wanted.mean(axis=1, keepdims=True)
    many = Law("t", lambda *_: (), lambda measurement, actuated, state: (wanted, state))
    state = init_bias(many, 5, 9, 3, limit=0.5)
    counts = Measurement(step=0, counts_LE=np.full((5, 9), 30.0), num_tokens=90, top_k=3)
    bias_LE, state = update_bias(many, counts, state)
    for row, bias in zip(wanted, bias_LE):
        np.testing.assert_allclose(bias, nearest_by_bisection(row, 0.5), rtol=0, atol=1e-12)
    assert np.abs(bias_LE).max() <= 0.5 and np.abs(bias_LE.mean(axis=1)).max() < 1e-15
    np.testing.assert_allclose(state.lost_LE, bias_LE - wanted, rtol=0, atol=1e-15)


def test_a_layer_within_its_limit_is_not_touched_by_another_beyond() -> None:
    wanted = np.array([[0.1, -0.1, 0.0], [2.0, -1.0, -1.0]])
    law_ = Law("t", lambda *_: (), lambda measurement, actuated, state: (wanted, state))
    counts = Measurement(step=0, counts_LE=np.full((2, 3), 10.0), num_tokens=30, top_k=1)
    bias_LE, state = update_bias(law_, counts, init_bias(law_, 2, 3, 1, limit=0.5))
    assert np.array_equal(bias_LE[0], wanted[0]) and not state.lost_LE[0].any()
    np.testing.assert_allclose(bias_LE[1], [0.5, -0.25, -0.25], rtol=1e-14)


def test_the_limit_follows_the_range_of_the_scores() -> None:
    edges = np.linspace(0.0, 1.0, 101)
    histogram = np.zeros((1, E, 100))
    histogram[:, :, 30:50] = 1000  # scores 0.30 to 0.50, in all experts
    histogram[:, 0, 99] = 1  # one in 80,000 far out
    law_ = constant([5.0, -5.0, 0.0, 0.0])
    state = init_bias(law_, 1, E, K)
    assert state.limit_L == 1.0, "before any histogram: the range of a score"
    plain = measured([100] * 4)
    _, state = update_bias(law_, plain, state)
    assert np.abs(state.bias_LE).max() == 1.0
    with_scores = measured([100] * 4, score_histogram_LEB=histogram, score_edges_X=edges)
    _, state = update_bias(law_, with_scores, state)
    # 99.9th less 0.1th percentile of an even spread of 0.2
    np.testing.assert_allclose(state.limit_L, 0.998 * 0.2, rtol=1e-3)
    assert np.abs(state.bias_LE).max() <= state.limit_L[0]
    _, state = update_bias(law_, plain, state)
    np.testing.assert_allclose(state.limit_L, 0.998 * 0.2, rtol=1e-3, err_msg="the last one holds")
    fixed = init_bias(law_, 1, E, K, limit=0.7)
    _, fixed = update_bias(law_, with_scores, fixed)
    assert np.abs(fixed.bias_LE).max() == 0.7


def test_a_law_that_gives_nan_is_named_with_step_and_layer() -> None:
    law_ = constant([np.nan, 0, 0, 0], name="broken")
    with pytest.raises(ValueError, match="law 'broken' gave NaN or infinity at step 7, layer 0"):
        update_bias(law_, measured([100] * 4, step=7), init_bias(law_, 1, E, K))
    with pytest.raises(ValueError, match=r"law 'short' gave a change \(1, 3\)"):
        update_bias(constant([0, 0, 0], "short"), SKEWED, init_bias(law_, 1, E, K))


def test_the_common_part_of_a_change_changes_nothing() -> None:
    law_ = constant([1.25, 1.0, 1.0, 0.75])
    bias_LE, state = update_bias(law_, SKEWED, init_bias(law_, 1, E, K))
    assert np.array_equal(bias_LE, [[0.25, 0.0, 0.0, -0.25]]) and not state.lost_LE.any()


def test_float32_holds_the_bias_to_a_ten_millionth() -> None:
    law_ = constant([0.1, -0.3, 0.05, 0.15])
    bias_LE, _ = update_bias(law_, SKEWED, init_bias(law_, 1, E, K))
    np.testing.assert_allclose(bias_LE.astype(np.float32), bias_LE, rtol=6e-8)


def test_bad_sizes_and_limits_are_refused() -> None:
    for sizes in ((0, 4, 1), (1, 1, 1), (1, 4, 4)):
        with pytest.raises(ValueError, match="top_k"):
            init_bias(law("sign"), *sizes)
    for limit in (0.0, np.nan, -1.0):
        with pytest.raises(ValueError, match="limit="):
            init_bias(law("sign"), 1, E, K, limit=limit)
    with pytest.raises(ValueError, match="delay_steps=-1"):
        init_bias(law("sign"), 1, E, K, delay_steps=-1)


# ---- a change of law


def test_a_law_with_momentum_goes_on_from_the_last_change() -> None:
    sign, smebu = law("sign"), law("smebu", momentum=0.5)
    _, state = update_bias(sign, SKEWED, init_bias(sign, 1, E, K))
    last = state.change_LE.copy()
    state = switch_law(sign, smebu, SKEWED, state)
    assert np.array_equal(state.law.change_LE, last)
    _, after = update_bias(smebu, measured([100] * 4), state)
    np.testing.assert_allclose(after.change_LE, 0.5 * last, rtol=1e-12)


def test_the_old_law_must_be_the_one_of_the_state() -> None:
    state = init_bias(law("smebu"), 1, E, K)
    with pytest.raises(ValueError, match="not one of law 'sign'"):
        switch_law(law("sign"), law("linear"), SKEWED, state)


# ---- wrappers


def test_the_dead_band_rests_only_experts_within_counting_noise() -> None:
    # sd of y: sqrt((1 - r) / (r T)) = sqrt(3 / 400) = 0.0866; y = .6, 0, -.1, -.5
    wrapped = dead_band(law("linear", gain=1.0), sd=1.2)
    actuated = Actuated(*np.zeros((3, 1, E)))
    change_LE, _ = wrapped.update(SKEWED, actuated, wrapped.init(1, E, K))
    np.testing.assert_allclose(change_LE, [[-0.6, 0.0, 0.0, 0.5]], rtol=1e-12)
    wrapped = dead_band(law("linear", gain=1.0), sd=1.1)
    change_LE, _ = wrapped.update(SKEWED, actuated, wrapped.init(1, E, K))
    np.testing.assert_allclose(change_LE, [[-0.6, 0.0, 0.1, 0.5]], rtol=1e-12)


def test_the_rate_limit_bounds_the_change_of_the_change() -> None:
    wrapped = rate_limit(law("linear", gain=1.0), most=0.2)
    state, actuated, changes = wrapped.init(1, E, K), Actuated(*np.zeros((3, 1, E))), [np.zeros((1, E))]
    for measurement in (SKEWED, SKEWED, SKEWED, measured([100] * 4), measured([100] * 4)):
        change_LE, state = wrapped.update(measurement, actuated, state)
        changes.append(change_LE)
    assert np.abs(np.diff(changes, axis=0)).max() < 0.2 + 1e-12
    np.testing.assert_allclose(np.ravel(changes)[::E], [0, -0.2, -0.4, -0.6, -0.4, -0.2], atol=1e-12)


def test_the_rate_limit_goes_on_from_the_law_before() -> None:
    linear, limited = law("linear", gain=0.1), rate_limit(law("linear", gain=0.5), most=0.01)
    _, state = update_bias(linear, SKEWED, init_bias(linear, 1, E, K))
    last = state.change_LE.copy()
    _, state = update_bias(limited, SKEWED, switch_law(linear, limited, SKEWED, state))
    assert 0 < np.abs(state.change_LE - last).max() < 0.02


def test_the_clip_bounds_a_change_and_tells_the_law_what_it_lost() -> None:
    told: list[np.ndarray] = []

    def update(measurement, actuated, state):
        told.append(actuated.lost_LE)
        return np.array([[-0.6, 0.0, 0.1, 0.5]]), state

    wrapped = clip(Law("spy", lambda *_: (), update), most=0.2)
    state = init_bias(wrapped, 1, E, K)
    for _ in range(2):
        bias_LE, state = update_bias(wrapped, SKEWED, state)
    held = np.array([0.4, 0.0, 0.0, -0.3])
    assert not told[0].any()
    np.testing.assert_allclose(told[1][0], held - held.mean(), rtol=1e-12)
    made = np.array([-0.2, 0.0, 0.1, 0.2])
    np.testing.assert_allclose(bias_LE[0], 2 * (made - made.mean()), rtol=1e-12)


def test_wrappers_nest_and_pass_report_and_gain_on() -> None:
    nested = clip(rate_limit(dead_band(law("laplacian"), sd=0.5), most=0.1), most=0.1)
    state = nested.init(1, E, K)
    assert nested.report is not None and nested.raise_gain is not None and nested.needs == ("pairs",)
    np.testing.assert_allclose(nested.report(state)["gain"], [0.75])
    raised = nested.raise_gain(np.array([0.9]), state)
    np.testing.assert_allclose(nested.report(raised)["gain"], [0.9])
    lowered = nested.raise_gain(np.array([0.0]), raised)
    np.testing.assert_allclose(nested.report(lowered)["gain"], [0.75], err_msg="0 = the law's own")
    assert nested.asks is None
    asking = clip(dead_band(law("identified"), sd=0.5), most=0.1)
    state = asking.init(1, E, K)
    assert asking.asks is not None and asking.uses == ("margins",) and asking.asks(state) == ()
    far = np.full((1, E), 2.0)
    assert asking.asks(
        state._replace(inner=state.inner._replace(inner=state.inner.inner._replace(last_LE=far)))
    )
    for wrapper in (clip, rate_limit):
        with pytest.raises(ValueError, match="most=0"):
            wrapper(law("sign"), most=0)
    with pytest.raises(ValueError, match="sd=-1"):
        dead_band(law("sign"), sd=-1)


# ---- margins


def spread_evenly(counts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The oracle of a histogram: its counts as points, evenly within each bin."""
    return np.concatenate(
        [low + (high - low) * (np.arange(n) + 0.5) / n for low, high, n in zip(edges, edges[1:], counts) if n]
    )


@pytest.mark.parametrize("seed", range(5))
def test_after_the_shift_the_wanted_share_lies_above_zero(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.standard_normal(18))
    counts = rng.integers(0, 60, (3, 8, 17)) * rng.integers(0, 2, (3, 8, 17))
    counts[..., 0] += 1
    shift = margin_quantile(counts, edges, top_k=3)
    for layer, expert in np.ndindex(3, 8):
        points = spread_evenly(counts[layer, expert], edges) - shift[layer, expert]
        # one point more or less on either side
        assert (points > 1e-12).sum() <= points.size * 3 / 8 + 1 and (
            points > -1e-12
        ).sum() >= points.size * 3 / 8 - 1


def test_a_right_share_needs_no_shift_even_with_empty_bins_about_zero() -> None:
    edges = np.array([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    counts = np.array(
        [[[0, 30, 0, 0, 0, 10], [30, 0, 0, 10, 0, 0], [0, 0, 0, 40, 0, 0], [40, 0, 0, 0, 0, 0]]]
    )
    shift = margin_quantile(counts, edges, top_k=1)
    assert shift[0, 0] == 0 and shift[0, 1] == 0
    # 30 of 40 in 0..1 are to go below 0; 10 of 40 in -3..-2 are to come above
    np.testing.assert_allclose(shift[0, 2:], [0.75, -2.25])


def test_infinite_outer_edges_end_at_the_inner_ones() -> None:
    edges = np.array([-np.inf, -1.0, 0.0, 1.0, np.inf])
    counts = np.array([[[8, 0, 0, 0], [0, 0, 0, 8], [0, 0, 0, 0], [0, 8, 0, 0]]])
    np.testing.assert_allclose(margin_quantile(counts, edges, top_k=2), [[-1.0, 1.0, 0.0, -0.5]])
    with pytest.raises(ValueError, match="margin_edges_X"):
        margin_quantile(counts, edges[::-1], top_k=2)
    with pytest.raises(ValueError, match="margin_edges_X"):
        margin_quantile(counts, edges[1:], top_k=2)


def test_a_quantile_step_is_taken_from_the_newest_or_the_measured_bias() -> None:
    edges, counts = np.array([-1.0, 0.0, 1.0]), np.array([[[0, 40], [40, 0], [30, 10], [30, 10]]])
    measurement = measured([100] * 4, margin_histogram_LEB=counts, margin_edges_X=edges)
    newest, before = np.array([[0.2, 0.0, 0.0, -0.2]]), np.array([[0.1, 0.0, -0.1, 0.0]])
    actuated, shift = Actuated(before, newest, newest * 0), np.array([[-0.75, 0.25, 0.0, 0.0]])
    for name, settings, wanted in (
        ("quantile", {}, shift),
        ("quantile-damped", {"step": 0.3}, 0.3 * shift),
        ("quantile", {"absolute": True}, shift + before - newest),
    ):
        law_ = law(name, **settings)
        change_LE, _ = law_.update(measurement, actuated, law_.init(1, E, K))
        np.testing.assert_allclose(change_LE, wanted, atol=1e-15, err_msg=f"{name} {settings}")


@pytest.mark.parametrize("tokens", [60.0, np.float32(60), np.int64(60)])
def test_a_number_of_tokens_may_be_a_whole_float(tokens) -> None:
    sample = {"step": 1, "tokens_per_expert_LE": np.full((1, 4), 30), "num_tokens": tokens}
    assert read_measurement(sample, 2).num_tokens == 60


@pytest.mark.parametrize("tokens", [60.5, -1, float("nan"), "60", [60]])
def test_a_number_of_tokens_that_is_none_is_refused(tokens) -> None:
    sample = {"step": 1, "tokens_per_expert_LE": np.full((1, 4), 30), "num_tokens": tokens}
    with pytest.raises(ValueError, match=r"num_tokens=.* must be a whole number"):
        read_measurement(sample, 2)
