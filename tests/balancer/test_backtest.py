"""The backtest scores forecasts as defined, sees nothing ahead, and agrees with what is known of a trace."""

import math
from typing import NamedTuple

import numpy as np
import pytest

from balancer.backtest import _targets, backtest, noise_floor
from balancer.backtest_regimes import AFTER, JUMP, MOVING, QUIET, find_jumps, sample_changes
from balancer.forecast import FORECASTERS, forecaster
from balancer.forecast_record import UNKNOWN, Forecast, Forecaster
from balancer.metrics import total_variation
from balancer.synth import collapse_trace
from balancer.trace import Trace, load_trace


class Last(NamedTuple):
    step: int
    horizons_H: np.ndarray
    share_LE: np.ndarray


def last_value(std=0.0, interval=None, log=None, gain=1.0):
    """A forecaster written here: the last (or smoothed) shares, a fixed spread or interval around them."""

    def init(num_layers, num_experts, horizons):
        share_LE = np.full((num_layers, num_experts), 1 / num_experts)
        return Last(-1, np.asarray(horizons), share_LE)

    def update(step, counts_LE, state):
        if log is not None:
            log.append((step, counts_LE))
        total = counts_LE.sum(-1, keepdims=True)
        share_LE = np.where(total, counts_LE / np.maximum(total, 1), state.share_LE)
        weight = 1.0 if state.step < 0 else gain
        return Last(step, state.horizons_H, state.share_LE + weight * (share_LE - state.share_LE))

    def forecast(state):
        mean = np.repeat(state.share_LE[None], len(state.horizons_H), axis=0)
        bounds = {} if interval is None else {"low_HLE": mean - interval[0], "high_HLE": mean + interval[1]}
        unknown_L = np.full(mean.shape[1], UNKNOWN)
        return Forecast(
            step=state.step,
            horizons_H=state.horizons_H,
            mean_HLE=mean,
            std_HLE=np.full_like(mean, std),
            regime_L=unknown_L,
            **bounds,
        )

    return Forecaster(init, update, forecast)


def trace_of(counts_WLE, steps_W=None):
    counts_WLE = np.asarray(counts_WLE, dtype=np.int64)
    steps_W = 10 * np.arange(len(counts_WLE)) if steps_W is None else np.asarray(steps_W)
    return Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W.astype(np.int64))


def changing_trace(seed=0, num_samples=30, num_layers=3, num_experts=5):
    rng = np.random.default_rng(seed)
    return trace_of(rng.integers(1, 1000, size=(num_samples, num_layers, num_experts)))


# ---- scores by definition ----------------------------------------------------------------------------------


def test_every_score_is_that_of_a_slow_loop():
    trace, interval = changing_trace(), (0.05, 0.1)
    found = backtest(trace, {"last": last_value(interval=interval)}, (10, 40))
    counts, number = trace.tokens_per_expert_WLE, 30
    for h, ahead in enumerate((1, 4)):
        for w in range(number):
            for layer in range(3):
                cell = (0, h, w, layer)
                if w + ahead >= number:
                    assert np.isnan(found.tv_FHWL[cell]) and found.regime_HWL[h, w, layer] == -1
                    continue
                mean = counts[w, layer] / counts[w, layer].sum()
                real = counts[w + ahead, layer] / counts[w + ahead, layer].sum()
                low, high = mean - 0.05, mean + 0.1
                inside = (low <= real) & (real <= high)
                live = mean * counts[w + ahead, layer].sum() > 5
                outside = np.where(real < low, low - real, np.where(real > high, real - high, 0))
                assert found.tv_FHWL[cell] == pytest.approx(total_variation(mean, real), abs=1e-14)
                assert found.coverage_FHWL[cell] == pytest.approx(inside.mean())
                assert found.live_coverage_FHWL[cell] == pytest.approx(inside[live].mean())
                assert found.width_FHWL[cell] == pytest.approx(0.15)
                # Winkler at 90 %: 2 / 0.1 for what lies outside
                assert found.interval_score_FHWL[cell] == pytest.approx(0.15 + 20 * outside.mean())


def test_without_an_interval_the_normal_one_stands_in_and_is_named():
    trace = changing_trace()
    pair = {"normal": last_value(std=0.1), "own": last_value(interval=(0.1, 0.1))}
    found = backtest(trace, pair, (10,))
    assert found.intervals == ("normal", "own")
    mean_WLE = trace.tokens_per_expert_WLE / trace.tokens_per_expert_WLE.sum(-1, keepdims=True)
    low, high = np.clip(mean_WLE - 1.645 * 0.1, 0, 1), np.clip(mean_WLE + 1.645 * 0.1, 0, 1)
    inside = (low[:-1] <= mean_WLE[1:]) & (mean_WLE[1:] <= high[:-1])
    np.testing.assert_allclose(found.coverage_FHWL[0, 0, :-1], inside.mean(-1))
    np.testing.assert_allclose(found.width_FHWL[0, 0, :-1], (high - low)[:-1].mean(-1), rtol=1e-3)


def test_experts_that_expect_few_copies_are_not_live():
    trace = trace_of([[[0, 4, 996]], [[50, 0, 950]]])
    found = backtest(trace, {"last": last_value()}, (10,))
    assert found.coverage_FHWL[0, 0, 0, 0] == 0
    assert np.isnan(found.live_coverage_FHWL[0, 0, 1, 0])
    wide = backtest(trace, {"last": last_value(interval=(0.0, 0.049), log=None)}, (10,))
    # the dead ones are missed (.050 > .049; 0 < .004), the live one too (.950 < .996)
    assert wide.live_coverage_FHWL[0, 0, 0, 0] == 0
    held = backtest(trace, {"last": last_value(interval=(0.046, 0.0))}, (10,))
    assert held.live_coverage_FHWL[0, 0, 0, 0] == 1 and held.coverage_FHWL[0, 0, 0, 0] == 2 / 3


def test_ranks_are_scored_with_experts_at_home():
    trace = changing_trace(num_experts=6)
    found = backtest(trace, {"last": last_value()}, (10,), num_ranks=3)
    rank_WLP = trace.tokens_per_expert_WLE.reshape(30, 3, 3, 2).sum(-1)
    np.testing.assert_allclose(found.rank_tv_FHWL[0, 0, :-1], total_variation(rank_WLP[:-1], rank_WLP[1:]))
    assert np.isnan(backtest(trace, {"last": last_value()}, (10,)).rank_tv_FHWL).all()


def test_a_target_is_the_first_sample_at_the_horizon_or_after():
    trace = trace_of(np.ones((6, 1, 2)), [0, 10, 13, 40, 50, 51])
    found = backtest(trace, {"last": last_value()}, (1, 10, 38))
    np.testing.assert_array_equal(found.target_HW[0], [1, 2, 3, 4, 5, -1])
    np.testing.assert_array_equal(found.target_HW[1], [1, 3, 3, 4, -1, -1])
    np.testing.assert_array_equal(found.target_HW[2], [3, 4, 5, -1, -1, -1])


def test_targets_of_the_latest_steps_and_the_longest_horizons_do_not_wrap():
    trace = trace_of(np.ones((3, 1, 2)), [0, 7, 2**62 - 1])
    found = backtest(trace, {"last": last_value()}, (7, 2**62 - 8, 2**62))
    np.testing.assert_array_equal(found.target_HW, [[1, 2, -1], [2, 2, -1], [-1, -1, -1]])
    for horizon in (2**62 + 1, 2**63 - 1):
        assert (_targets(trace.steps_W, np.array([horizon]), 0) == -1).all()


def test_start_leaves_earlier_origins_out_but_shows_them():
    trace, log = changing_trace(), []
    found = backtest(trace, {"last": last_value(log=log)}, (10,), start=12)
    assert len(log) == 30
    assert np.isnan(found.tv_FHWL[:, :, :12]).all() and not np.isnan(found.tv_FHWL[:, :, 12:29]).any()


def test_layers_without_load_are_left_out():
    counts = np.full((5, 3, 2), 7)
    counts[2, 0] = 0  # layer 0 is idle once, layer 1 starts late, layer 2 is never used
    counts[:3, 1] = 0
    counts[:, 2] = 0
    found = backtest(trace_of(counts), {"last": last_value()}, (10,))
    np.testing.assert_array_equal(np.isnan(found.tv_FHWL[0, 0, :, 0]), [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(np.isnan(found.tv_FHWL[0, 0, :, 1]), [1, 1, 1, 0, 1])
    assert np.isnan(found.tv_FHWL[0, 0, :, 2]).all()
    for array in (found.coverage_FHWL, found.width_FHWL, found.noise_floor_HWL[None]):
        np.testing.assert_array_equal(np.isnan(array[0]), np.isnan(found.tv_FHWL[0]))
    (row,) = found.table()
    assert row.num_scores == 4 and row.tv == 0


def test_one_expert_is_always_right():
    found = backtest(trace_of(np.full((4, 2, 1), 9)), {"ema": forecaster("ema")}, (10,))
    (row,) = found.table()
    assert row.tv == 0 and row.coverage == 1 and row.noise_floor == 0


def test_the_noise_floor_is_what_simulation_gives():
    rng = np.random.default_rng(0)
    share_E = np.array([0.4, 0.3, 0.2, 0.05, 0.05])
    counts_XE = rng.multinomial(2000, share_E, size=4000)
    simulated = total_variation(counts_XE, share_E).mean()
    # standard error of the simulation 0.5 %; counts of 100 and more are nearly normal
    assert noise_floor(np.round(2000 * share_E)[None].astype(int))[0] == pytest.approx(simulated, rel=0.02)
    assert np.isnan(noise_floor(np.zeros((1, 3), dtype=int)))[0]


# ---- no look-ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORECASTERS))
def test_a_poisoned_future_changes_no_forecast_made_before(name):
    trace, cut = changing_trace(), 17
    poisoned = trace.tokens_per_expert_WLE.copy()
    poisoned[cut + 1 :] = np.random.default_rng(9).integers(0, 10**6, poisoned[cut + 1 :].shape)
    runs = [
        backtest(t, {name: forecaster(name)}, (10, 50), keep=[(name, layer) for layer in range(3)])
        for t in (trace, trace_of(poisoned, trace.steps_W))
    ]
    for real, other in zip(runs[0].kept, runs[1].kept):
        for part in ("mean_HWE", "low_HWE", "high_HWE"):
            before, after = getattr(real, part)[:, : cut + 1], getattr(other, part)[:, : cut + 1]
            np.testing.assert_array_equal(before, after)
            assert not np.isnan(before).any()
    assert not np.array_equal(runs[0].tv_FHWL[:, :, cut], runs[1].tv_FHWL[:, :, cut])


def test_a_forecaster_gets_arrays_that_lead_nowhere():
    """One that keeps what it is given cannot find the trace behind it, nor spoil what others see."""
    trace, kept, others = changing_trace(), [], []
    before = trace.tokens_per_expert_WLE.copy()
    pair = {"thief": last_value(log=kept), "other": last_value(log=others)}
    backtest(trace, pair, (10,))
    for (step, row), (_, other) in zip(kept, others):
        assert type(step) is int and type(row) is np.ndarray
        assert row.base is None and row.flags.owndata and not row.flags.writeable
        assert not np.shares_memory(row, trace.tokens_per_expert_WLE) and not np.shares_memory(row, other)
        with pytest.raises(ValueError, match="read-only"):
            row[:] = 0
    np.testing.assert_array_equal(trace.tokens_per_expert_WLE, before)
    assert len(kept) == 30


def test_a_forecast_cannot_be_changed_once_the_target_is_known():
    """A cheat gives arrays away and fills the truth in when it comes: the score stands by then."""
    trace = changing_trace()
    given = []

    def update(step, counts_LE, state):
        for mean in given:
            mean[:] = counts_LE / counts_LE.sum(-1, keepdims=True)
        return honest.update(step, counts_LE, state)

    def forecast(state):
        said = honest.forecast(state)
        given[:] = [said.mean_HLE]
        return said

    honest = last_value()
    cheat = Forecaster(honest.init, update, forecast)
    found = backtest(trace, {"cheat": cheat, "honest": honest}, (10,))
    np.testing.assert_array_equal(found.tv_FHWL[0], found.tv_FHWL[1])
    assert np.nanmin(found.tv_FHWL) > 0


# ---- regimes -----------------------------------------------------------------------------------------------


def quiet_then_moving(num_samples=400, jump_at=150):
    """Shares that wobble a little, jump once, and wobble five times more in the last third."""
    rng = np.random.default_rng(1)
    counts = np.empty((num_samples, 1, 4))
    for w in range(num_samples):
        centre = np.array([0.4, 0.3, 0.2, 0.1]) if w < jump_at else np.array([0.1, 0.2, 0.3, 0.4])
        wobble = 0.001 if w < 2 * num_samples / 3 else 0.005
        share = np.abs(centre + wobble * rng.standard_normal(4))
        counts[w, 0] = np.round(1e6 * share / share.sum())
    return trace_of(counts)


def test_regimes_of_a_made_trace():
    trace = quiet_then_moving()
    found = backtest(trace, {"last": last_value()}, (10, 100))
    np.testing.assert_array_equal(np.flatnonzero(found.jump_WL[:, 0]), [1, 150])
    near, far = found.regime_HWL[0, :, 0], found.regime_HWL[1, :, 0]
    np.testing.assert_array_equal(np.flatnonzero(near == JUMP), [0, 149])
    np.testing.assert_array_equal(np.flatnonzero(far == JUMP), [0, *range(140, 150)])
    np.testing.assert_array_equal(np.flatnonzero(near == AFTER), [*range(1, 41), *range(150, 190)])
    # the running median of 40 changes follows the wobble about 20 samples late
    assert (near[300:399] == MOVING).all() and np.mean(near[200:266] == QUIET) > 0.3
    settled = near[np.isin(near, (QUIET, MOVING))]
    assert np.mean(settled == MOVING) == pytest.approx(0.5, abs=0.01)
    assert near[-1] == -1 and (far[-10:] == -1).all()


def test_the_collapse_of_a_synthetic_trace_is_jump_and_after():
    trace = collapse_trace(num_samples=120, num_layers=6, num_experts=16, copies=16000)
    found = backtest(trace, {"last": last_value()}, (10,))
    assert found.jump_WL[1].all() and (found.regime_HWL[0, 0] == JUMP).all()
    assert (found.regime_HWL[0, 1:41] == AFTER).mean() > 0.95
    assert (found.regime_HWL[0, 90:119] != AFTER).all()


def test_a_constant_trace_is_quiet_after_its_first_change():
    trace = trace_of(np.full((60, 2, 3), 10))
    found = backtest(trace, {"last": last_value()}, (10,))
    assert (found.regime_HWL[0, 41:59] == QUIET).all()
    assert (np.flatnonzero(found.jump_WL[:, 0]) == [1]).all()


def test_a_small_change_is_no_jump_however_quiet_it_was():
    counts = np.full((60, 1, 2), 10000)
    counts[50:, 0, 0] += 1500  # TV 0.035
    assert not find_jumps(sample_changes(trace_of(counts)))[2:].any()
    counts[50:, 0, 0] += 1500  # TV 0.065
    np.testing.assert_array_equal(np.flatnonzero(find_jumps(sample_changes(trace_of(counts)))[:, 0]), [1, 50])


def test_a_jump_is_told_by_the_changes_before_it_alone():
    # changes of .01, .08: with its own change in the median, .045, the second would be none
    counts = [[[500, 500]], [[510, 490]], [[590, 410]], [[600, 400]]]
    np.testing.assert_array_equal(
        find_jumps(sample_changes(trace_of(counts)))[:, 0], [False, True, True, False]
    )


def test_a_change_bridges_samples_without_load():
    change = sample_changes(trace_of([[[0, 0]], [[1, 1]], [[0, 0]], [[3, 1]]]))[:, 0]
    np.testing.assert_array_equal(change, [np.nan, np.nan, np.nan, 0.25])


# ---- tables ------------------------------------------------------------------------------------------------


def test_a_table_compares_with_the_best_single_and_persistence():
    """At 10 steps smoothing wins, in a noisy trace that stays where it is."""
    rng = np.random.default_rng(3)
    trace = trace_of(rng.multinomial(500, [0.4, 0.3, 0.2, 0.1], size=(80, 2)))
    names = {"persistence": {}, "ema": {"gain": 0.3}, "regime": {}}
    found = backtest(trace, {n: forecaster(n, **kw) for n, kw in names.items()}, (10, 100))
    rows = {(row.forecaster, row.horizon): row for row in found.table()}
    assert len(rows) == 6 and rows["regime", 10].best_single == "ema"
    for (name, horizon), row in rows.items():
        h = (10, 100).index(horizon)
        tv = {n: np.nanmean(found.tv_FHWL[f, h]) for f, n in enumerate(names)}
        best = min(("persistence", "ema"), key=lambda n: tv[n])
        assert row.best_single == row.best_overall == best and row.tv == pytest.approx(tv[name])
        assert row.ratio_to_best_single == pytest.approx(tv[name] / tv[best])
        assert row.difference == pytest.approx(tv[name] - tv[best], abs=1e-15)
        assert row.skill == pytest.approx(1 - tv[name] / tv["persistence"])
        assert (row.difference_se == 0) == (name == best)


def test_slices_go_by_origin_or_by_target():
    trace = changing_trace(num_samples=30)
    found = backtest(trace, {"last": last_value()}, (50,))
    tv_WL = found.tv_FHWL[0, 0]
    for kw, place in (
        ({"first": 4}, slice(0, 4)),
        ({"last": 10}, slice(20, 25)),
        ({"last": 10, "by": "target"}, slice(15, 25)),
        ({"first": 10, "by": "target"}, slice(0, 5)),
    ):
        (row,) = found.table(**kw)
        assert row.tv == pytest.approx(tv_WL[place].mean()), kw
    (row,) = found.table(last=5)
    assert row.num_scores == 0 and np.isnan(row.tv) and row.best_single == ""


def test_regimes_make_up_the_whole():
    found = backtest(quiet_then_moving(), {"last": last_value(std=0.01)}, (10,))
    parts = [found.table(regime=name)[0] for name in ("jump", "after", "quiet", "moving")]
    (whole,) = found.table()
    assert sum(p.num_scores for p in parts) == whole.num_scores
    assert sum(p.num_scores * p.tv for p in parts) / whole.num_scores == pytest.approx(whole.tv)


def test_the_block_error_is_honest_about_overlapping_targets():
    """Errors at 20 samples ahead are alike for 20 origins: the spread over seeds shows it, so must the error.

    A random walk per seed: the standard error of one run against the spread of the difference over runs.
    """
    gaps, errors, naive = [], [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        walk = np.cumsum(rng.standard_normal((400, 1, 6)), axis=0) * 0.05
        trace = trace_of(np.round(1e5 * np.exp(walk)))
        pair = {"persistence": last_value(), "ema": last_value(gain=0.2)}
        found = backtest(trace, pair, (200,))
        gap, error = found.difference("ema", "persistence", 200)
        gaps.append(gap)
        errors.append(error)
        each = (found.tv_FHWL[1] - found.tv_FHWL[0])[0, :380, 0]
        naive.append(each.std() / math.sqrt(380))
    # 12 runs know a spread to a fifth; blocks of 20 in 380 origins are known to come out low
    assert 0.5 < np.mean(errors) / np.std(gaps) < 1.6
    assert np.mean(naive) < 0.6 * np.mean(errors)


def test_the_error_of_a_difference_needs_three_blocks():
    found = backtest(
        changing_trace(num_samples=13), {"a": last_value(), "ema": forecaster("ema")}, (10, 50, 60)
    )
    assert found.difference("a", "ema", 10)[1] > 0
    assert math.isnan(found.difference("a", "ema", 60)[1])
    assert found.difference("a", "a", 10) == (0.0, 0.0)


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"forecasters": {}}, "forecasters is empty"),
        ({"horizons": (0,)}, "horizons"),
        ({"horizons": (300,)}, "spans 290 steps"),
        ({"start": 30}, "start=30 must be 0 to 29"),
        ({"num_ranks": 2}, "num_ranks=2 does not divide the 5 experts"),
        ({"keep": [("last", 3)]}, "layer 0 to 2"),
        ({"keep": [("nobody", 0)]}, "one of the forecasters"),
    ],
)
def test_bad_arguments_are_named(kw, text):
    given = {"forecasters": {"last": last_value()}, "horizons": (10,), **kw}
    with pytest.raises(ValueError, match=text):
        backtest(changing_trace(), **given)


@pytest.mark.parametrize(
    ("counts", "text"), [(np.ones((1, 1, 2)), "has 1 sample"), (np.zeros((2, 1, 2)), "nothing to score")]
)
def test_a_trace_that_cannot_be_scored_says_so(counts, text):
    with pytest.raises(ValueError, match=text):
        backtest(trace_of(counts), {"last": last_value()}, (10,))


def test_two_samples_are_one_origin():
    (row,) = backtest(trace_of([[[1, 1]], [[3, 1]]]), {"last": last_value()}, (10,)).table()
    assert row.num_scores == 1 and row.tv == 0.25


@pytest.mark.parametrize("wrong", ["sum", "nan", "negative", "shape", "step", "horizons", "bounds"])
def test_a_forecast_that_is_none_is_named(wrong):
    honest = last_value(interval=(0.1, 0.1))

    def forecast(state):
        said = honest.forecast(state)
        mean = said.mean_HLE.copy()
        low, high, step, horizons = said.low_HLE, said.high_HLE, said.step, said.horizons_H
        if wrong == "sum":
            mean *= 1.1
        elif wrong == "nan":
            mean[0, 0, 0] = np.nan
        elif wrong == "negative":
            mean[0, 0, :2] = [-0.1, mean[0, 0, :2].sum() + 0.1]
        elif wrong == "shape":
            mean = mean[:, :2]
        elif wrong == "step":
            step += 10
        elif wrong == "horizons":
            horizons = horizons + 1
        else:
            low, high = high, low
        return Forecast(
            step=step,
            horizons_H=horizons,
            mean_HLE=mean,
            std_HLE=said.std_HLE,
            regime_L=said.regime_L,
            low_HLE=low,
            high_HLE=high,
        )

    with pytest.raises(ValueError, match="forecaster 'liar', step 0"):
        backtest(changing_trace(), {"liar": Forecaster(honest.init, honest.update, forecast)}, (10,))


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"first": 31}, "first=31 samples must be 1 to 30"),
        ({"last": 0}, "last=0"),
        ({"first": 1, "last": 1}, "exclude each other"),
        ({"regime": "calm"}, "use one of jump, after, quiet, moving"),
        ({"by": "layer"}, "by='layer'"),
    ],
)
def test_bad_slices_are_named(kw, text):
    found = backtest(changing_trace(), {"last": last_value()}, (10,))
    with pytest.raises(ValueError, match=text):
        found.table(**kw)
    with pytest.raises(ValueError, match="horizon 11 is not in the backtest"):
        found.difference("last", "last", 11)


def test_progress_counts_the_samples():
    seen = []
    backtest(
        changing_trace(), {"last": last_value()}, (10,), progress=lambda done, of: seen.append((done, of))
    )
    assert seen == [(w + 1, 30) for w in range(30)]


# ---- the real trace ----------------------------------------------------------------------------------------


def test_the_known_errors_of_a_real_trace_are_met(traces_dir):
    """The figures of the traces' README, four digits as printed; by target, the last 200 snapshots."""
    trace = load_trace(traces_dir / "smartmoe.npz")
    gains = {"persistence": 1.0, "ema .6": 0.6, "ema .45": 0.45, "ema .3": 0.3}
    found = backtest(trace, {name: forecaster("ema", gain=gain) for name, gain in gains.items()})
    whole = {(row.forecaster, row.horizon): row.tv for row in found.table()}
    late = {(row.forecaster, row.horizon): row.tv for row in found.table(last=200, by="target")}
    known = {("persistence", 10): 0.0308, ("persistence", 100): 0.0481, ("persistence", 500): 0.0727}
    known |= {("ema .6", 10): 0.0296, ("ema .45", 100): 0.0456, ("ema .3", 500): 0.0701}
    known_late = {("ema .6", 10): 0.0176, ("ema .45", 100): 0.0182, ("ema .45", 500): 0.0243}
    for table, expected in ((whole, known), (late, known_late)):
        for key, tv in expected.items():
            assert table[key] == pytest.approx(tv, abs=0.0001), key
