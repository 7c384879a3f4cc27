"""Scenarios: exact sums, the forecast's mean and spread, the noise on top, and the fixed ones by hand."""

import numpy as np
import pytest

from balancer.dispersion import sampling_std
from balancer.forecast_record import Forecast
from balancer.scenarios import Scenarios, draw_scenarios

MEAN = np.array([[0.05, 0.15, 0.3, 0.5], [0.25, 0.25, 0.25, 0.25]])
LAST = np.array([[60, 140, 300, 500], [100, 200, 300, 400]])
BEFORE = np.array([[160, 240, 100, 500], [400, 300, 200, 100]])


def _forecast(mean_LE=MEAN, std_LE=0.0) -> Forecast:
    mean_HLE = np.stack([mean_LE[:, ::-1], mean_LE])
    std_HLE = np.broadcast_to(std_LE, mean_HLE.shape).copy()
    regime_L = np.zeros(len(mean_LE), dtype=np.int64)
    return Forecast(
        step=50, horizons_H=np.array([10, 100]), mean_HLE=mean_HLE, std_HLE=std_HLE, regime_L=regime_L
    )


def _shares(scenarios: Scenarios, copies: int) -> np.ndarray:
    return scenarios.counts_KLE / copies


@pytest.mark.parametrize("phi", [1.0, 6.0])
@pytest.mark.parametrize("excess", [0.0, 0.002, 0.05])
def test_draws_have_the_mean_and_the_spread_of_the_forecast(phi, excess):
    copies, num = 4000, 20000
    # spread of the form that a Dirichlet has: x p (1 - p), and the noise of counting around it
    noise = phi / copies
    std = np.sqrt((excess + noise * (1 - excess)) * MEAN * (1 - MEAN))
    made = draw_scenarios(
        _forecast(std_LE=std), 100, copies=copies, seed=1, num_scenarios=num, phi=phi, forecast_copies=copies
    )
    shares = _shares(made, copies)
    assert (np.abs(shares.mean(axis=0) - MEAN) < 4.5 * std / np.sqrt(num)).all()
    # 1 % for the variance of 20,000 bell-shaped draws, up to 2 % for skewed ones; four of them
    np.testing.assert_allclose(shares.var(axis=0), std**2, rtol=0.07)


@pytest.mark.parametrize(("excess", "copies"), [(0.01, 500), (0.2, 20)])
def test_smaller_micro_batches_add_their_noise_to_the_same_spread(excess, copies):
    num = 20000
    std = np.sqrt((excess + 3 / 10**5 * (1 - excess)) * MEAN * (1 - MEAN))
    made = draw_scenarios(
        _forecast(std_LE=std), 100, copies=copies, seed=2, num_scenarios=num, phi=3.0, forecast_copies=10**5
    )
    expected = excess * MEAN * (1 - MEAN) + (1 - excess) * sampling_std(MEAN, copies, 3.0) ** 2
    # 2 % for the variance of skewed draws, and up to 1/4 of a squared copy for the rounding
    above = _shares(made, copies).var(axis=0) - expected
    assert (above > -0.07 * expected).all()
    assert (above < 0.07 * expected + 0.25 / copies**2).all()


def test_spread_of_another_form_keeps_the_sum_of_its_variances():
    std = np.array([[0.01, 0.02, 0.04, 0.03], [0.0, 0.0, 0.02, 0.02]])
    made = draw_scenarios(
        _forecast(std_LE=std), 100, copies=10**6, seed=3, num_scenarios=20000, forecast_copies=10**6
    )
    variance = _shares(made, 10**6).var(axis=0)
    np.testing.assert_allclose(variance.sum(axis=-1), (std**2).sum(axis=-1), rtol=0.04)
    np.testing.assert_allclose(variance[1], variance[1].mean(), rtol=0.06)  # uniform: all alike


def test_a_spread_below_the_noise_and_one_beyond_reason():
    calm = draw_scenarios(_forecast(std_LE=1e-9), 100, copies=1000, seed=4, num_scenarios=8000, phi=2.0)
    np.testing.assert_allclose(_shares(calm, 1000).std(axis=0), sampling_std(MEAN, 1000, 2.0), rtol=0.05)
    wild = draw_scenarios(_forecast(std_LE=5.0), 100, copies=10**5, seed=4, num_scenarios=8000)
    np.testing.assert_allclose(_shares(wild, 10**5).var(axis=0), 0.5 * MEAN * (1 - MEAN), rtol=0.08)


def test_phi_is_that_of_the_layer_and_one_where_it_is_not_known():
    mean = np.tile(MEAN[:1], (4, 1))
    phi = np.array([9.0, 1.0, 0.2, np.nan])
    made = draw_scenarios(
        _forecast(mean), 100, copies=2000, seed=5, num_scenarios=8000, phi=phi, forecast_copies=10**9
    )
    factor = (_shares(made, 2000).var(axis=0) / sampling_std(mean, 2000) ** 2).mean(axis=-1)
    np.testing.assert_allclose(factor, [9, 1, 0.2, 1], rtol=0.07)


def test_copies_of_the_forecast_are_those_of_the_last_load_by_default():
    std = sampling_std(MEAN, 1000)  # the noise of a last load of 1000, and nothing more
    arguments = {"copies": 10**6, "seed": 6, "num_scenarios": 500}
    known = draw_scenarios(_forecast(std_LE=std), 100, last_LE=LAST, **arguments)
    named = draw_scenarios(_forecast(std_LE=std), 100, forecast_copies=1000, **arguments)
    taken = draw_scenarios(_forecast(std_LE=std), 100, **arguments)
    assert known.labels[:2] == ("last", "last and mean")
    assert (known.counts_KLE[2:] == named.counts_KLE).all()
    assert _shares(named, 10**6).std(axis=0).max() < 0.001
    assert _shares(taken, 10**6).std(axis=0).max() > 0.01


def test_the_fixed_scenarios_by_hand():
    made = draw_scenarios(
        _forecast(), 100, copies=1000, seed=7, num_scenarios=1, last_LE=LAST, previous_LE=BEFORE
    )
    assert made.labels == (
        "last",
        "last and mean",
        "trend",
        "trend and mean",
        "mean of last two",
        "previous",
        "draw 0",
    )
    by_label = dict(zip(made.labels, made.counts_KLE.tolist()))
    assert by_label["last"] == LAST.tolist()
    assert by_label["previous"] == BEFORE.tolist()
    assert by_label["mean of last two"] == ((LAST + BEFORE) // 2).tolist()
    assert by_label["last and mean"] == ((LAST + 1000 * MEAN) / 2).tolist()
    # layer 0: (60, 140, 300, 500) + 0.7 (-100, -100, 200, 0) = (-10, 70, 440, 500), clipped, over 1010
    np.testing.assert_allclose(by_label["trend"][0], np.array([0, 70, 440, 500]) / 1.010, atol=1)
    # layer 1: (100, 200, 300, 400) + 0.7 (-300, -100, 100, 300) = (-110, 130, 370, 610), over 1110
    np.testing.assert_allclose(by_label["trend"][1], np.array([0, 130, 370, 610]) / 1.110, atol=1)
    half = (np.array(by_label["trend"]) + 1000 * MEAN) / 2
    np.testing.assert_allclose(by_label["trend and mean"], half, atol=1.5)
    np.testing.assert_allclose(made.weight_K, 1 / 7)


@pytest.mark.parametrize("copies", [0, 1, 7, 4096, 2**33, 2**53 - 1, 2**53])
def test_every_layer_of_every_scenario_holds_its_copies(copies):
    rng = np.random.default_rng(8)
    mean = rng.dirichlet(np.full(33, 0.3), 5)
    last, previous = (rng.multinomial(12345, rng.dirichlet(np.full(33, 0.3)), size=5) for _ in range(2))
    made = draw_scenarios(
        _forecast(mean, 0.01), 100, copies=copies, seed=9, phi=4.0, last_LE=last, previous_LE=previous
    )
    assert made.counts_KLE.shape == (14, 5, 33) and made.counts_KLE.min() >= 0
    assert (made.counts_KLE.sum(axis=-1) == copies).all()
    each = draw_scenarios(_forecast(mean, 0.01), 100, copies=[3, 0, 5, 10**6, 1], seed=9, last_LE=last)
    assert (each.counts_KLE.sum(axis=-1) == [3, 0, 5, 10**6, 1]).all()


def test_draws_of_few_copies_are_whole_and_keep_their_mean():
    mean = np.array([[0.001, 0.009, 0.09, 0.9]])
    made = draw_scenarios(_forecast(mean), 100, copies=20, seed=13, num_scenarios=40000)
    # variance at most 20 p (1 - p) + 1/4 of the rounding
    error = 4.5 * np.sqrt((20 * mean * (1 - mean) + 0.25) / 40000)
    assert (np.abs(made.counts_KLE.mean(axis=0) - 20 * mean) < error).all()
    assert (np.diff(np.unique(made.counts_KLE[:, 0, 1])) == 1).all()


def test_rounding_moves_less_than_a_copy():
    mean = np.random.default_rng(10).dirichlet(np.ones(64), 3)
    made = draw_scenarios(_forecast(mean), 100, copies=999, seed=0, num_scenarios=0, last_LE=mean)
    assert np.abs(made.counts_KLE[0] - 999 * mean).max() < 1


def test_a_layer_without_load_takes_the_forecast():
    last, previous = LAST.copy(), BEFORE.copy()
    last[0], previous[1] = 0, 0
    made = draw_scenarios(
        _forecast(), 100, copies=1000, seed=11, num_scenarios=0, last_LE=last, previous_LE=previous
    )
    by_label = dict(zip(made.labels, made.counts_KLE))
    assert by_label["last"][0].tolist() == (1000 * MEAN[0]).tolist()
    assert by_label["trend"][1].tolist() == LAST[1].tolist()  # no load before: no change known
    assert by_label["previous"][1].tolist() == LAST[1].tolist()


def test_one_expert_holds_everything():
    made = draw_scenarios(_forecast(np.ones((2, 1)), 0.1), 100, copies=50, seed=12, last_LE=[[3], [0]])
    assert (made.counts_KLE == 50).all()


def test_one_seed_one_set_and_a_generator_goes_on():
    def draw(seed):
        return draw_scenarios(_forecast(std_LE=0.02), 10, copies=500, seed=seed).counts_KLE

    assert (draw(3) == draw(3)).all() and (draw(3) != draw(4)).any()
    rng = np.random.default_rng(3)
    assert (draw(rng) == draw(3)).all() and (draw(rng) != draw(3)).any()


def test_the_horizon_is_the_one_that_was_asked_for():
    near, far = (
        draw_scenarios(_forecast(), h, copies=10**6, seed=0, num_scenarios=2).counts_KLE for h in (10, 100)
    )
    np.testing.assert_allclose(near[0] / 10**6, MEAN[:, ::-1], atol=0.005)
    np.testing.assert_allclose(far[0] / 10**6, MEAN, atol=0.005)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 50}, r"horizon=50 is not forecast; use one of \[10, 100\]"),
        ({"copies": -1}, "copies=-1 must be finite and at least 0"),
        ({"copies": 1.5}, "copies is float64"),
        ({"copies": 2**53 + 1}, "copies=9007199254740993 must be at most 2.53"),
        ({"copies": [5, 2**60]}, "must be at most 2.53"),
        ({"copies": [1, 2, 3]}, r"expected an integer, or \[L\] = \[2\]"),
        ({"phi": -1.0}, "phi=-1.0"),
        ({"phi": float("inf")}, "phi=inf"),
        ({"num_scenarios": 0}, "num_scenarios=0 must be at least 1"),
        ({"num_scenarios": -1, "last_LE": LAST}, "num_scenarios=-1 must be at least 0"),
        ({"previous_LE": LAST}, "previous_LE without last_LE"),
        ({"last_LE": [[1, 2]]}, r"last_LE has shape \(1, 2\)"),
        ({"last_LE": -LAST}, "last_LE.*is not a load"),
        ({"last_LE": LAST, "part": -1.0}, "part=-1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    given = {"horizon": 100, "copies": 100, "seed": 0} | arguments
    with pytest.raises(ValueError, match=message):
        draw_scenarios(_forecast(), **given)


def test_bad_forecasts_and_sets_are_refused():
    for mean, std in (
        (MEAN * 1000, 0.0),
        (MEAN * 0, 0.0),
        (MEAN * np.nan, 0.0),
        (MEAN, -1.0),
        (MEAN, np.nan),
    ):
        with pytest.raises(ValueError, match=r"mean_HLE|std_HLE"):
            draw_scenarios(_forecast(mean, std), 100, copies=100, seed=0)
    counts = np.ones((2, 1, 3), dtype=np.int64)
    for weight, labels in (([1.0], ("a", "b")), ([0.5, 0.5], ("a",)), ([0.9, 0.9], ("a", "b"))):
        with pytest.raises(ValueError, match="weight_K"):
            Scenarios(counts_KLE=counts, weight_K=np.array(weight), labels=labels)
    with pytest.raises(ValueError, match="expected int64"):
        Scenarios(counts_KLE=-counts, weight_K=np.array([0.5, 0.5]), labels=("a", "b"))
