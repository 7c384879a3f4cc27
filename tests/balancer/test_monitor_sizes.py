"""Samples of changing size: a collapse is seen as soon as in equal ones, and the change itself is none."""

import numpy as np
import pytest

from balancer.dispersion import draw_counts
from balancer.monitor import CollapseMonitor
from balancer.monitor_sizes import LASTING, at_usual_size, init_sizes, update_sizes

L, E, K, T = 8, 16, 2, 2048
GRAVE = ("COLLAPSING", "COLLAPSED")
ONSET = 150
SIZES = {
    "equal": lambda t, rng: T,
    "alternating": lambda t, rng: T * (1 + t % 2),
    "alternating by 4": lambda t, rng: T * (1 + 3 * (t % 2)),
    "at random": lambda t, rng: T * np.exp(rng.uniform(-0.7, 0.7)),
    "now and then small": lambda t, rng: T if t % 30 else T / 8,
}


def alarms(size, phi, steps, spread=0.0, seed=0, growth=0.0):
    """[L] steps from the onset of a growing spread to the first alarm, -1 = none; alarms before; switches."""
    rng = np.random.default_rng(seed)
    monitor, first_L, early = CollapseMonitor(L, E, K), np.full(L, -1), 0
    profile_LE = spread * rng.standard_normal((L, E))
    for t in range(steps):
        tokens = int(size(t, rng))
        weight_LE = np.exp(profile_LE + growth * max(0, t - ONSET) * np.linspace(-1.0, 1.0, E))
        share_LE = weight_LE / weight_LE.sum(axis=1, keepdims=True)
        monitor.update(t, draw_counts(rng, share_LE, tokens * K, phi), num_tokens=tokens)
        for verdict in monitor.alarms():
            if verdict.state in GRAVE and t < ONSET:
                early += 1
            elif verdict.state in GRAVE and first_L[verdict.layer] < 0:
                first_L[verdict.layer] = t - ONSET
    return first_L, early, monitor.figures()["switches"].sum()


@pytest.mark.parametrize("phi", [1.0, 8.0])
def test_a_growing_collapse_is_seen_as_soon_in_samples_of_changing_size(phi):
    found = {name: alarms(size, phi, ONSET + 160, growth=0.01) for name, size in SIZES.items()}
    usual = np.median(found["equal"][0])
    for name, (first_L, early, switches) in found.items():
        assert early == 0 and switches == 0, name
        assert (first_L > 0).all(), name
        assert np.median(first_L) <= 1.2 * usual + 3, name


@pytest.mark.parametrize("factor", [1 / 8, 1 / 2, 2.0, 8.0])
@pytest.mark.parametrize(("phi", "spread"), [(1.0, 0.0), (8.0, 0.0), (8.0, 0.3)])
def test_a_lasting_change_of_size_is_no_alarm(factor, phi, spread):
    first_L, early, _ = alarms(lambda t, rng: T if t < 170 else T * factor, phi, 350, spread)
    assert early == 0 and (first_L == -1).all()


def test_charts_start_anew_where_the_size_has_changed_for_good():
    monitor = CollapseMonitor(1, E, K)
    for t in range(100):
        monitor.update(t, np.full((1, E), 256))
    for t in range(100, 100 + LASTING):
        assert monitor.state_dict()["sizes.usual_L"] == 256 * E
        monitor.update(t, np.full((1, E), 1024))
    assert monitor.state_dict()["sizes.usual_L"] == pytest.approx(1024 * E)
    assert monitor.state_dict()["charts.age_L"] <= 8.0 and monitor.state_dict()["charts.seen_L"] == 0


def test_a_watch_is_not_ended_by_another_size():
    live_L, copies_L = np.array([True, True]), np.full(2, 1000.0)
    fresh_L, sizes = update_sizes(copies_L, live_L, ~live_L, init_sizes(2))
    assert fresh_L.all()
    for _ in range(3 * LASTING):
        fresh_L, sizes = update_sizes(4 * copies_L, live_L, np.array([True, False]), sizes)
        assert not fresh_L[0]
    assert sizes.usual_L.tolist() == pytest.approx([1000.0, 4000.0])
    assert update_sizes(4 * copies_L, live_L, ~live_L, sizes)[0].tolist() == [True, False]


def test_y_of_an_even_router_is_the_same_at_all_sizes():
    rng, experts, lack = np.random.default_rng(1), 64, 1e-6
    _, sizes = update_sizes(np.full(1, 4096.0), np.ones(1, bool), np.zeros(1, bool), init_sizes(1))

    def mean_y(copies, phi, level=None):
        counts_NE = draw_counts(rng, np.full((2000, experts), 1 / experts), copies, phi)
        share_NE = np.maximum(counts_NE / copies, 1e-300)
        y = np.log(np.log(experts) + (share_NE * np.log(share_NE)).sum(axis=1) + lack).mean(keepdims=True)
        level = y if level is None else level
        copies_L, phi_L = np.array([float(copies)]), np.array([phi])
        return y, at_usual_size(y, level, copies_L, experts - 1.0, lack, phi_L, sizes)

    for phi in (1.0, 4.0):
        level, _ = mean_y(4096, phi)
        for copies in (2048, 16384, 65536):
            raw, same = mean_y(copies, phi, level)
            assert abs(raw - level) > 0.6
            assert same == pytest.approx(level, abs=0.1)


def test_dispersion_is_that_of_the_counts_whatever_their_size():
    rng, monitor = np.random.default_rng(2), CollapseMonitor(40, E, K)
    found = []
    for t in range(120):
        counts_LE = draw_counts(rng, np.full((40, E), 1 / E), T * K * (1 + 7 * (t % 2)), 3.0)
        monitor.update(t, counts_LE)
        found.append(monitor.figures()["dispersion"].mean())
    # 40 layers of 15 degrees of freedom over 40 samples
    assert np.mean(found[40:]) == pytest.approx(3.0, rel=0.05)
