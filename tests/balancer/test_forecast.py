"""One conformance suite over every forecaster, the twins, and what each of them is for."""

import doctest
import itertools

import numpy as np
import pytest

import balancer.forecast
from balancer import forecast_stats
from balancer.forecast import FORECASTERS, _kernels, forecaster, warm_forecast
from balancer.forecast_kernels import ENTRIES
from balancer.forecast_record import JUMPED, REGIMES, SETTLED, UNKNOWN, copy_state
from balancer.metrics import load_shares, total_variation

HORIZONS = (10, 30, 200)
NAMES = list(FORECASTERS)
# decay fades to uniform: with rate 0 it keeps a constant load, as the others do
OPTIONS = {"decay": {"rate": 0.0}}
# their gains depend on how noisy counts are, hence on how many there are: scale is not for them
READ_THE_NOISE = ("level", "trend")


def _make(name, **options):
    return forecaster(name, **{**OPTIONS.get(name, {}), **options})


def _run(name, counts_WLE, *, steps=None, horizons=HORIZONS, state=None, **options):
    """Forecasts after every sample, and the last state."""
    init, update, forecast = _make(name, **options)
    steps = 1 + 10 * np.arange(len(counts_WLE)) if steps is None else steps
    if state is None:
        state = init(*counts_WLE.shape[1:], horizons)
    found = []
    for step, counts_LE in zip(steps, counts_WLE):
        state = update(int(step), counts_LE, state)
        found.append(forecast(state))
    return found, state


def _drifting(seed=0, samples=50, layers=3, experts=6, copies=4096):
    """Counts of a load that drifts, with noise, a burst, an expert without load and a layer without load."""
    rng = np.random.default_rng(seed)
    score_LE = rng.standard_normal((layers, experts))
    counts = []
    for w in range(samples):
        score_LE = score_LE + 0.05 * rng.standard_normal((layers, experts))
        share_LE = np.exp(score_LE) * (np.arange(experts) != 1)
        share_LE[0, 2] *= 30 if w == 30 else 1
        share_LE /= share_LE.sum(axis=-1, keepdims=True)
        counts.append([rng.multinomial(copies, share_E) for share_E in share_LE])
    counts_WLE = np.array(counts)
    counts_WLE[20:23, 1] = 0
    return counts_WLE


def _flat(state):
    """All arrays of a state, in order."""
    if isinstance(state, np.ndarray):
        return [state]
    return [array for part in state for array in _flat(part)]


def _same(one, other, tolerance=0.0):
    for name in ("mean_HLE", "std_HLE", "low_HLE", "high_HLE"):
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), rtol=0, atol=tolerance, err_msg=name
        )
    np.testing.assert_array_equal(one.regime_L, other.regime_L)


# ---- what every forecaster keeps ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_forecasts_are_shares_with_an_interval_around_them(name):
    for forecast in _run(name, _drifting())[0]:
        assert forecast.mean_HLE.shape == (3, 3, 6)
        assert (forecast.mean_HLE >= 0).all()
        np.testing.assert_allclose(forecast.mean_HLE.sum(axis=-1), 1.0, atol=1e-12)
        assert np.isfinite(forecast.std_HLE).all() and (forecast.std_HLE >= 0).all()
        assert (forecast.low_HLE >= 0).all() and (forecast.high_HLE <= 1).all()
        assert (forecast.low_HLE <= forecast.mean_HLE + 1e-12).all()
        assert (forecast.mean_HLE <= forecast.high_HLE + 1e-12).all()
        assert forecast.horizons_H.tolist() == list(HORIZONS) and forecast.level == 0.9


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_load_is_forecast_exactly(name):
    counts_LE = np.array([[700, 100, 0, 200], [1, 1, 1, 1]])
    last = _run(name, np.repeat(counts_LE[None], 45, axis=0))[0][-1]
    np.testing.assert_allclose(last.mean_HLE, np.broadcast_to(load_shares(counts_LE), (3, 2, 4)), atol=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in READ_THE_NOISE])
def test_only_shares_matter_for_the_mean(name):
    counts_WLE = _drifting(samples=40)
    for one, other in zip(_run(name, counts_WLE)[0], _run(name, 1000 * counts_WLE)[0]):
        np.testing.assert_allclose(one.mean_HLE, other.mean_HLE, atol=1e-12)


@pytest.mark.parametrize("name", READ_THE_NOISE)
def test_a_filter_that_knows_how_noisy_its_counts_are_follows_many_of_them_faster(name):
    few_WLE = np.repeat(np.array([[[60, 40]], [[58, 42]]]), [30, 1], axis=0)
    trust = [_run(name, factor * few_WLE)[0][-1].mean_HLE[0, 0, 1] for factor in (1, 100000)]
    assert 0.4 < trust[0] < 0.405 and 0.415 < trust[1] <= 0.42 + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_experts_and_forecasts_are_permuted_alike(name):
    counts_WLE, order = _drifting(), np.array([3, 0, 5, 1, 4, 2])
    for one, other in zip(_run(name, counts_WLE)[0], _run(name, counts_WLE[:, :, order])[0]):
        # sums over experts in another order differ in the last digits, which a regression may enlarge
        np.testing.assert_allclose(one.mean_HLE[:, :, order], other.mean_HLE, atol=1e-9)
        np.testing.assert_allclose(one.high_HLE[:, :, order], other.high_HLE, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_layers_do_not_know_each_other(name):
    counts_WLE = _drifting()
    alone_WLE = counts_WLE.copy()
    alone_WLE[:, 1:] = np.random.default_rng(5).integers(0, 99, alone_WLE[:, 1:].shape)
    for one, other in zip(_run(name, counts_WLE)[0], _run(name, alone_WLE)[0]):
        np.testing.assert_array_equal(one.mean_HLE[:, 0], other.mean_HLE[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_or_a_sample_without_load_changes_nothing_and_is_no_evidence(name):
    idle_WLE = _drifting(samples=12)
    idle_WLE[:, 2] = 0
    for forecast in _run(name, idle_WLE)[0]:
        np.testing.assert_allclose(forecast.mean_HLE[:, 2], 1 / 6, atol=1e-12)
        assert (forecast.regime_L[2]) == UNKNOWN
    before, state = _run(name, _drifting(samples=15))
    after, _ = _run(name, np.zeros((1, 3, 6), dtype=np.int64), steps=[1000], state=state)
    assert np.isfinite(after[0].mean_HLE).all()
    if name not in ("seasonal", "var", "regime"):  # their factors and phases go on in time
        np.testing.assert_allclose(after[0].mean_HLE[0], before[-1].mean_HLE[0], atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_past_alone_decides(name):
    counts_WLE = _drifting()
    poisoned_WLE = counts_WLE.copy()
    poisoned_WLE[25:] = np.random.default_rng(1).integers(0, 10**6, poisoned_WLE[25:].shape)
    for one, other in zip(_run(name, counts_WLE)[0][:25], _run(name, poisoned_WLE)[0][:25]):
        _same(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_saved_and_read_goes_on_as_if_nothing_had_been(name, tmp_path):
    counts_WLE = _drifting()
    whole, _ = _run(name, counts_WLE)
    _, state = _run(name, counts_WLE[:28])
    np.savez(tmp_path / "state.npz", *_flat(state))
    kept = copy_state(state)
    _run(name, counts_WLE[28:], steps=281 + 10 * np.arange(22), state=state)  # spoils the state given away
    with np.load(tmp_path / "state.npz") as archive:
        saved = iter(list(archive.values()))
    for array in _flat(kept):
        array[...] = 0  # nothing but what was saved goes on
        array[...] = next(saved)
    again, _ = _run(name, counts_WLE[28:], steps=281 + 10 * np.arange(22), state=kept)
    for one, other in zip(whole[28:], again):
        _same(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 1)])
def test_the_smallest_sizes_and_the_shortest_windows(name, shape):
    for samples in (1, 2, 3):
        counts_WLE = np.random.default_rng(0).integers(1, 50, (samples, *shape))
        last = _run(name, counts_WLE, horizons=(1,))[0][-1]
        np.testing.assert_allclose(last.mean_HLE.sum(axis=-1), 1.0, atol=1e-12)
        assert np.isfinite(last.std_HLE).all()
        assert last.step == 10 * samples - 9


@pytest.mark.parametrize("name", NAMES)
def test_missing_samples_and_uneven_steps_are_taken(name):
    steps = np.cumsum([1, 10, 10, 35, 10, 3, 10, 500, 10, 10, 10])
    for forecast in _run(name, _drifting(samples=11), steps=steps)[0]:
        np.testing.assert_allclose(forecast.mean_HLE.sum(axis=-1), 1.0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("step", "counts", "message"),
    [
        (1, [[1, 2]], r"step=1 must be more than that of the last sample, 1"),
        (5, [[1, 2, 3]], r"\(1, 3\), expected counts \[L, E\] = \(1, 2\)"),
        (5, [[1, -2]], r"step 5, layer 0, expert 1: -2.0 is no count"),
        (5, [[np.nan, 2]], r"step 5, layer 0, expert 0: nan is no count"),
        (5, [["1", "2"]], r"expected counts \[L, E\]"),
        (5, [[1e300, 2]], r"step 5, layer 0, expert 0: 1e\+300 is no count; it must be 0 to 2\^63"),
        (5.0, [[1, 2]], r"step=5.0 must be an integer"),
        (True, [[1, 2]], r"step=True must be an integer"),
        (2**63, [[1, 2]], r"at most 2\^62"),
    ],
)
def test_a_bad_sample_is_refused_and_named(name, step, counts, message):
    init, update, _ = _make(name)
    state = update(1, np.array([[1, 2]]), init(1, 2, (10,)))
    with pytest.raises(ValueError, match=message):
        update(step, np.array(counts), state)


@pytest.mark.parametrize("name", NAMES)
def test_intervals_of_noise_cover_what_they_promise(name):
    rng = np.random.default_rng(3)
    share_LE = rng.dirichlet(np.ones(16), size=2)
    counts_WLE = np.array([[rng.multinomial(8192, share_E) for share_E in share_LE] for _ in range(240)])
    found, _ = _run(name, counts_WLE, horizons=(10, 40))
    for h, lag in enumerate((1, 4)):
        covered = []
        for w in range(60, 240 - lag):
            real_LE, live_LE = load_shares(counts_WLE[w + lag]), found[w].mean_HLE[h] * 8192 >= 5
            inside_LE = (found[w].low_HLE[h] <= real_LE) & (real_LE <= found[w].high_HLE[h])
            covered.append(inside_LE[live_LE])
        # 5,700 to 5,800 independent-ish draws: a standard error of 0.4 %, and bins of 10 % width
        assert abs(np.concatenate(covered).mean() - 0.9) < 0.02


@pytest.mark.parametrize("level", [0.5, 0.99])
def test_other_levels_are_kept_too(level):
    rng = np.random.default_rng(4)
    counts_WLE = np.array([[rng.multinomial(4096, np.full(32, 1 / 32))] for _ in range(200)])
    found, _ = _run("ema", counts_WLE, horizons=(10,), level=level, gain=0.1)
    inside = []
    for w in range(60, 199):
        real_LE = load_shares(counts_WLE[w + 1])
        inside.append((found[w].low_HLE[0] <= real_LE) & (real_LE <= found[w].high_HLE[0]))
    assert abs(np.mean(inside) - level) < 0.025


@pytest.mark.slow
@pytest.mark.parametrize("make", [forecast_stats.ets, forecast_stats.arima, forecast_stats.unobserved])
def test_the_statistical_forecasters_keep_the_same_rules(make):
    """They cost seconds a fit and calibrate no intervals: short runs, and the mean and its spread only."""
    init, update, forecast = make(window=40, refit_every=15)

    def means(counts_WLE):
        state, found = init(*counts_WLE.shape[1:], HORIZONS), []
        for w, counts_LE in enumerate(counts_WLE):
            state = update(1 + 10 * w, counts_LE, state)
            found.append(forecast(state))
        return found

    counts_WLE = _drifting(samples=32, layers=2, experts=4)
    whole = means(counts_WLE)
    for found in whole:
        assert (found.mean_HLE >= 0).all() and np.isfinite(found.std_HLE).all()
        np.testing.assert_allclose(found.mean_HLE.sum(axis=-1), 1.0, atol=1e-12)
    for one, other in zip(whole, means(counts_WLE[:, :, [2, 0, 3, 1]])):
        np.testing.assert_allclose(one.mean_HLE[:, :, [2, 0, 3, 1]], other.mean_HLE, atol=1e-9)
    poisoned_WLE = counts_WLE.copy()
    poisoned_WLE[25:] = 7
    for one, other in zip(whole[:25], means(poisoned_WLE)):
        np.testing.assert_array_equal(one.mean_HLE, other.mean_HLE)
    still_LE = np.array([[700, 100, 0, 200]])
    last = means(np.repeat(still_LE[None], 32, axis=0))[-1]
    np.testing.assert_allclose(last.mean_HLE, np.broadcast_to(load_shares(still_LE), (3, 1, 4)), atol=1e-9)


# ---- names and options ----------------------------------------------------------------------------------


def test_examples_print_what_they_say():
    assert doctest.testmod(balancer.forecast).failed == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("emma", {}, r"forecaster 'emma' is unknown; use one of regime, persistence"),
        ("ema", {"gian": 0.5}, r"forecaster 'ema' has no option gian; it has gain"),
        ("persistence", {"gain": 1}, r"has no option gain; it has none"),
        ("ema", {"gain": 0.0}, r"gain=0.0 must lie between 0.0 and 1; 0.5"),
        ("ema", {"gain": float("nan")}, r"gain=nan must lie"),
        ("window", {"length": 0}, r"length=0 must be a whole number of at least 1; 10 samples"),
        ("window", {"length": 2.5}, r"length=2.5 must be a whole number"),
        ("holt", {"damping": 1.5}, r"damping=1.5 must lie"),
        ("decay", {"rate": -0.1}, r"rate=-0.1 must lie"),
        ("seasonal", {"period_steps": 1}, r"period_steps=1 must be a whole number of at least 2; or None"),
        ("seasonal", {"length": 2}, r"length=2 must be a whole number of at least 8"),
        ("seasonal", {"length": 8.5}, r"length=8.5 must be a whole number"),
        ("var", {"rank": 0}, r"rank=0 must be a whole number of at least 1"),
        ("var", {"rank": 3, "length": 8}, r"length=8 must be a whole number of at least 9"),
        ("var", {"every": 0}, r"every=0 must be"),
        ("ar", {"eta": 1.0}, r"'ar' has no option eta; it has memory, ridge"),
        ("trend", {"slope_ratio": 2.0}, r"slope_ratio=2.0"),
        ("regime", {"gains": (0.5,)}, r"gains=\(0.5,\) must lie in \(0, 1\], the first 1"),
        ("regime", {"regressors": (2, 3)}, r"must be different indices of gains"),
        ("regime", {"switch": 2.0}, r"switch=2.0 must lie between 0.0 and 1.0"),
        ("regime", {"memories": (0.0,)}, r"memories=\(0.0,\) must lie"),
        ("regime", {"gains": 1.0}, r"gains=1.0 must be a tuple of numbers"),
        ("regime", {"ridge": 0.0}, r"ridge=0.0 must lie between 1e-06 and"),
        ("regime", {"mean_weight": float("nan")}, r"mean_weight=nan must lie between 0.0 and"),
        ("regime", {"bonus_power": -1.0}, r"bonus_power=-1.0 must lie between 0.0 and"),
        ("regime", {"mean_weight": 0.0, "regression_weight": 0.0}, r"leave nothing to forecast with"),
        ("regime", {"slow": ("seasonal", "seasonal")}, r"must be different names"),
        ("regime", {"slow": "var"}, r"must be different names"),
        ("regime", {"slow": ("regime",)}, r"slow member 'regime' is unknown; use some of persistence"),
        ("regime", {"level": 1.0}, r"level=1.0 must lie between 0 and 1; 0.9"),
    ],
)
def test_a_bad_name_option_or_constant_is_named_with_its_bound(name, options, message):
    with pytest.raises(ValueError, match=message):
        forecaster(name, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, (10,)), "num_layers=0"),
        ((1, 0, (10,)), "num_experts=0"),
        ((1, 4, ()), "one or more integers"),
        ((1, 4, (0, 10)), r"must be 1 to 2\^62 and increase"),
        ((1, 4, (10, 10)), r"must be 1 to 2\^62 and increase"),
        ((1, 4, (10, 2**62 + 1)), r"must be 1 to 2\^62 and increase"),
        ((1, 4, (1.5,)), "one or more integers"),
    ],
)
def test_bad_sizes_and_horizons_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        forecaster("ema").init(*sizes)


# ---- twins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("regime", {}),
        ("regime", {"decay_rate": 0.05, "slow": ()}),
        ("regime", {"slow": ("level", "var", "trend")}),
        ("ar", {}),
        ("level", {}),
        ("trend", {}),
        ("ema", {}),
    ],
)
def test_compiled_and_numpy_loops_give_the_same(name, options):
    counts_WLE = _drifting(samples=60, layers=4, experts=9)
    fast, _ = _run(name, counts_WLE, compiled=True, **options)
    slow, _ = _run(name, counts_WLE, compiled=False, **options)
    for one, other in zip(fast, slow):
        # origins are kept in float32: a last digit of theirs may round the other way
        _same(one, other, tolerance=1e-7)


def test_kernels_compile_ahead():
    warm_forecast()
    kernels = vars(_kernels())
    assert set(kernels) == set(ENTRIES)
    assert [name for name, kernel in kernels.items() if not kernel.signatures] == []


# ---- what each is for -----------------------------------------------------------------------------------


def _error(name, counts_WLE, lag, start, stop=None, **options):
    """Mean total variation `lag` samples ahead, over origins start to stop."""
    found, _ = _run(name, counts_WLE, horizons=(10 * lag,), **options)
    stop = len(counts_WLE) - lag if stop is None else stop
    return np.mean(
        [total_variation(found[w].mean_HLE[0], counts_WLE[w + lag]).mean() for w in range(start, stop)]
    )


@pytest.mark.parametrize(
    ("experts", "copies", "layers"),
    [(2, 2000, 16), (4, 2000, 16), (8, 4096, 4), (32, 65536, 4), (64, 512, 4)],
)
@pytest.mark.parametrize("lag", [1, 10])
def test_noise_around_a_constant_is_forecast_as_its_mean(experts, copies, layers, lag):
    rng = np.random.default_rng(experts)
    share_LE = rng.dirichlet(np.ones(experts), size=layers)
    counts_WLE = np.array([[rng.multinomial(copies, share_E) for share_E in share_LE] for _ in range(200)])
    best = np.mean([total_variation(share_LE, counts_WLE[w + lag]).mean() for w in range(60, 200 - lag)])
    assert _error("regime", counts_WLE, lag, 60) < 1.05 * best


def test_a_period_is_found_and_used_by_seasonal_and_by_regime():
    rng = np.random.default_rng(0)
    mix_LDE = rng.dirichlet(np.ones(12), size=(2, 2))
    weight_W = 0.5 + 0.5 * np.sin(2 * np.pi * np.arange(160) / 20)
    share_WLE = weight_W[:, None, None] * mix_LDE[:, 0] + (1 - weight_W)[:, None, None] * mix_LDE[:, 1]
    counts_WLE = np.array(
        [[rng.multinomial(65536, share_E) for share_E in share_LE] for share_LE in share_WLE]
    )
    error = {name: _error(name, counts_WLE, 7, 100) for name in ("ema", "seasonal", "regime")}
    assert error["seasonal"] < 0.1 * error["ema"] and error["regime"] < 0.1 * error["ema"]
    given = _error("seasonal", counts_WLE, 7, 100, period_steps=200)
    assert given < 1.1 * error["seasonal"]


def test_a_load_that_a_bias_loop_levels_is_forecast_as_fading():
    start_LE = np.random.default_rng(1).dirichlet(np.ones(8), size=2)
    fade_W = 0.95 ** np.arange(60)[:, None, None]
    counts_WLE = np.rint(1e6 * (fade_W * start_LE + (1 - fade_W) / 8)).astype(np.int64)
    plain = _error("ema", counts_WLE, 10, 5, gain=0.6)
    assert _error("decay", counts_WLE, 10, 5, rate=0.05, gain=1.0) < 0.01 * plain
    with_rate = _error("regime", counts_WLE, 10, 30, decay_rate=0.05, slow=())
    assert with_rate < 0.3 * _error(
        "regime", counts_WLE, 10, 30, gains=(1.0, 0.6), reference=1, regressors=(), slow=()
    )


def test_after_a_jump_the_memory_is_short():
    rng = np.random.default_rng(2)
    share_2LE = rng.dirichlet(np.ones(16), size=(2, 3))
    counts_WLE = np.array(
        [[rng.multinomial(65536, share_E) for share_E in share_2LE[int(w >= 60)]] for w in range(90)]
    )
    found, _ = _run("regime", counts_WLE)
    assert (found[59].regime_L == SETTLED).all() and (found[62].regime_L == JUMPED).all()
    floor = np.mean([total_variation(share_2LE[1], counts_WLE[w]).mean() for w in range(65, 90)])
    assert _error("regime", counts_WLE, 5, 62, 70) < 1.5 * floor
    assert _error("window", counts_WLE, 5, 62, 70) > 10 * floor  # what a memory of ten samples would cost


def test_a_layer_that_jumps_now_and_then_learns_about_long_horizons_all_the_same():
    rng = np.random.default_rng(8)
    share_NE = rng.dirichlet(np.ones(8), size=20)
    counts_WLE = np.array([[rng.multinomial(8000, share_NE[w // 25])] for w in range(300)])
    found, state = _run("regime", counts_WLE, horizons=(10, 300))
    assert state.conformal.fed_HL[1, 0] > 100
    # intervals 30 samples ahead, always across a jump, are as wide as a jump needs
    inside = []
    for w in range(100, 270):
        real_E = load_shares(counts_WLE[w + 30, 0])
        inside.append((found[w].low_HLE[1, 0] <= real_E) & (real_E <= found[w].high_HLE[1, 0]))
    assert np.mean(inside) > 0.7


def test_a_trend_is_followed_by_what_has_one():
    share_WE = np.linspace([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 80)
    counts_WLE = np.rint(1e6 * share_WE).astype(np.int64)[:, None]
    still = _error("persistence", counts_WLE, 2, 30)
    assert _error("holt", counts_WLE, 2, 30, damping=0.95, trend_gain=0.5) < 0.5 * still
    assert _error("ar", counts_WLE, 2, 30) < 0.5 * still


def test_factors_that_turn_are_followed_by_the_vector_autoregression():
    rng = np.random.default_rng(6)
    turn = 0.95 * np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    direction_E2, factor, shares_W = 0.3 * rng.standard_normal((24, 2)), np.ones(2), []
    for _ in range(200):
        factor = turn @ factor + 0.2 * rng.standard_normal(2)
        share_E = np.exp(direction_E2 @ factor)
        shares_W.append(share_E / share_E.sum())
    counts_WLE = np.array([[rng.multinomial(16384, share_E)] for share_E in shares_W])
    others = [_error("ema", counts_WLE, 3, 100, gain=gain) for gain in (1.0, 0.3, 0.05)]
    assert _error("var", counts_WLE, 3, 100, rank=2, gain=0.05) < 0.8 * min(others)


def test_regimes_are_told_by_name():
    found, _ = _run("regime", _drifting())
    named = {REGIMES[r] for r in itertools.chain.from_iterable(f.regime_L.tolist() for f in found)}
    assert {"unknown", "settled", "jumped"} <= named  # the burst is a jump


@pytest.mark.parametrize(
    ("interval", "horizon", "lag"), [(7, 10, 2), (10, 14, 2), (10, 10, 1), (7, 700, 100)]
)
def test_a_horizon_between_samples_is_that_of_the_first_sample_at_or_after_it(interval, horizon, lag):
    """As it is scored, in the backtest and by the forecaster itself."""
    rng = np.random.default_rng(0)
    mix_2E = rng.dirichlet(np.ones(12), size=2)
    counts_WLE = np.array(
        [[rng.multinomial(65536, mix_2E[int(w % 8 < 4)])] for w in range(140 + lag)]  # a period of 8 samples
    )
    steps = 1 + interval * np.arange(140)
    found, _ = _run("seasonal", counts_WLE[:140], steps=steps, horizons=(horizon,))
    error = [total_variation(found[w].mean_HLE[0], counts_WLE[w + lag])[0] for w in range(100, 140)]
    assert np.mean(error) < 0.01


def test_a_period_longer_than_what_is_kept_is_refused_when_it_shows():
    with pytest.raises(
        ValueError, match=r"period_steps=2000 are 200 samples, and only length=128 are kept; use"
    ):
        _run("seasonal", _drifting(samples=3), period_steps=2000)


@pytest.mark.parametrize(("name", "options"), [("level", {}), ("trend", {}), ("ema", {"gain": 0.05})])
def test_experts_of_a_few_copies_are_not_forecast_low(name, options):
    rng, share_E = np.random.default_rng(3), np.array([0.001, 0.004, 0.195, 0.8])
    counts_WLE = np.array([[rng.multinomial(1000, share_E) for _ in range(12)] for _ in range(150)])
    mean_E = np.mean([f.mean_HLE[0].mean(axis=0) for f in _run(name, counts_WLE, **options)[0][60:]], axis=0)
    # one copy a sample: of a square root nothing better than 15 % can be asked
    np.testing.assert_allclose(mean_E / share_E, 1, atol=0.15)


def test_long_horizons_take_no_longer():
    holt = _make("holt", damping=1.0)
    state = holt.update(1, np.array([[3, 1]]), holt.init(1, 2, (1, 2**62)))
    np.testing.assert_allclose(holt.forecast(state).mean_HLE, 0.25 * np.array([[[3, 1]]] * 2))


def test_a_burst_is_taken_back():
    """After it, the bank knows what it knew before: a mean of many samples, not of the last few."""
    rng, share_E = np.random.default_rng(4), np.full(16, 1 / 16)
    burst_E = np.r_[6 / 16, np.full(15, 10 / 16 / 15)]
    counts_WLE = np.array([[rng.multinomial(8192, burst_E if 60 <= w < 63 else share_E)] for w in range(90)])
    found, _ = _run("regime", counts_WLE, slow=())
    assert total_variation(found[61].mean_HLE[0, 0], burst_E) < 0.02  # believed at once
    noise = np.mean([total_variation(counts_WLE[w, 0], share_E) for w in range(60)])
    for w in (63, 64, 65):
        assert total_variation(found[w].mean_HLE[0, 0], share_E) < 0.5 * noise


def test_a_layer_that_starts_late_has_no_forecasts_from_before_it_started():
    rng = np.random.default_rng(1)
    counts_WLE = np.array([[rng.multinomial(8000, np.full(8, 1 / 8))] for _ in range(140)])
    counts_WLE[:60] = 0
    late, state = _run("ema", counts_WLE, horizons=(10, 200))
    begun, _ = _run("ema", counts_WLE[60:], horizons=(10, 200))
    assert state.first_L.tolist() == [601]
    for one, other in zip(late[70:], begun[10:]):
        width, usual = (f.high_HLE[1].mean() - f.low_HLE[1].mean() for f in (one, other))
        assert 0.5 < width / usual < 2
