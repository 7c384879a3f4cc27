"""Dead experts: how soon a collapse is called one, and that a load near the bound is none many times over."""

import numpy as np
import pytest

from balancer.dispersion import draw_counts
from balancer.metrics import dead_experts
from balancer.monitor import CollapseMonitor

L, E = 6, 16


def shares_with_dead(dead, share=0.0005):
    """[L, E]: so many of E experts have that share of what the others have."""
    weight_LE = np.tile(np.where(np.arange(E) < E - dead, 1.0, share), (L, 1))
    return weight_LE / weight_LE.sum(axis=1, keepdims=True)


def first_collapsed(loads, top_k, experts=E):
    """[L] sample of the first COLLAPSED, -1 = never, and entries into it in all."""
    monitor, first_L, entries = CollapseMonitor(L, experts, top_k), np.full(L, -1), 0
    for t, counts_LE in enumerate(loads):
        for verdict in monitor.update(t, counts_LE):
            if verdict.state == "COLLAPSED" and verdict.was != "COLLAPSED":
                entries += 1
                first_L[verdict.layer] = t if first_L[verdict.layer] < 0 else first_L[verdict.layer]
    return first_L, entries


@pytest.mark.parametrize(
    ("dead", "phi", "within"), [(2, 1.0, 12), (4, 2.3, 10), (12, 1.0, 10), (12, 8.0, 10), (2, 8.0, 20)]
)
def test_a_sudden_lasting_collapse_of_few_tokens_is_collapsed_within_steps(dead, phi, within):
    rng, even_LE = np.random.default_rng(5), np.full((L, E), 1 / E)
    loads = [
        draw_counts(rng, even_LE if t < 60 else shares_with_dead(dead), 512, phi) for t in range(60 + within)
    ]
    first_L, entries = first_collapsed(loads, 1)
    assert (first_L >= 60).all() and entries == L


def test_noise_that_the_collapse_itself_makes_does_not_hide_the_dead():
    rng, base_E = np.random.default_rng(6), np.zeros(E)
    loads = [draw_counts(rng, np.full((L, E), 1 / E), 512, 2.0) for _ in range(60)]
    for _ in range(60):  # one of 4 experts has nearly all, and it is another one in every step
        base_E[:4] = 0.02
        base_E[rng.integers(4)] = 0.94
        loads.append(draw_counts(rng, np.tile(base_E, (L, 1)), 512, 2.0))
    monitor, states = CollapseMonitor(L, E, 1), []
    for t, counts_LE in enumerate(loads):
        states.append({verdict.state for verdict in monitor.update(t, counts_LE)})
    assert all(now == {"COLLAPSED"} for now in states[70:])
    assert monitor.figures()["dispersion"].max() < 8.0


def test_a_collapse_from_the_first_step_on_is_collapsed_within_steps():
    rng = np.random.default_rng(7)
    first_L, entries = first_collapsed(
        [draw_counts(rng, shares_with_dead(12), 512, 8.0) for _ in range(12)], 1
    )
    assert (first_L >= 3).all() and entries == L


def test_the_window_is_the_shortest_that_holds_enough_copies():
    rng, monitor, loads = np.random.default_rng(8), CollapseMonitor(L, E, 1), []
    for t in range(40):
        loads.append(draw_counts(rng, np.full((L, E), 1 / E) if t < 20 else shares_with_dead(9), 512, 1.0))
        monitor.update(t, loads[-1])
        figures = monitor.figures()
        if t >= 3:  # 4 steps hold 128 copies of fair share, 3 hold 96
            assert (figures["dead_window_steps"] == 4).all()
            np.testing.assert_array_equal(figures["dead_experts"], dead_experts(np.array(loads[-4:])))
        else:
            assert np.isnan(figures["dead_experts"]).all()


def test_an_uneven_window_of_samples_of_many_sizes_holds_what_it_says():
    rng, monitor, loads = np.random.default_rng(9), CollapseMonitor(L, E, 1), []
    for t in range(80):
        tokens = int(rng.choice([64, 512, 3000]))
        loads.append(draw_counts(rng, shares_with_dead(5), tokens, 1.0))
        monitor.update(3 * t, loads[-1])
        steps, dead_L = monitor.figures()["dead_window_steps"], monitor.figures()["dead_experts"]
        if np.isfinite(dead_L).all():
            samples = -(-int(steps[0]) // 3)
            window_WLE = np.array(loads[-samples:])
            assert window_WLE[:, 0].sum() >= 100 * E
            np.testing.assert_array_equal(dead_L, dead_experts(window_WLE))


@pytest.mark.parametrize(
    ("tokens", "share"), [(16384, 0.010), (16384, 0.015), (16384, 0.02), (1024, 0.01), (1024, 0.02)]
)
def test_an_expert_near_the_bound_makes_one_collapse_at_the_most(tokens, share):
    """1 of 8 experts has 1 to 2 % of its fair share, phi 8, its log share AR(.9) of sd .1."""
    rng, weight_LE, jitter_L = np.random.default_rng(10), np.ones((L, 8)), np.zeros(L)
    loads = []
    for _ in range(700):
        jitter_L = 0.9 * jitter_L + 0.1 * (1 - 0.9**2) ** 0.5 * rng.standard_normal(L)
        weight_LE[:, 0] = share * np.exp(jitter_L)
        loads.append(draw_counts(rng, weight_LE / weight_LE.sum(axis=1, keepdims=True), tokens, 8.0))
    _, entries = first_collapsed(loads, 2, experts=8)
    assert entries <= L


@pytest.mark.parametrize(("tokens", "spread"), [(512, 0.6), (512, 0.8), (4096, 0.8)])
def test_a_skewed_load_that_changes_its_domain_is_not_collapsed(tokens, spread):
    rng, jitter_LE, loads = np.random.default_rng(11), np.zeros((L, E)), []
    for t in range(900):
        if t % 150 == 0:
            profile_LE = spread * rng.standard_normal((L, E))
        jitter_LE = 0.9 * jitter_LE + 0.1 * (1 - 0.9**2) ** 0.5 * rng.standard_normal((L, E))
        weight_LE = np.exp(profile_LE + jitter_LE)
        loads.append(draw_counts(rng, weight_LE / weight_LE.sum(axis=1, keepdims=True), tokens, 8.0))
    first_L, entries = first_collapsed(loads, 1)
    assert entries == 0 and (first_L == -1).all()


def test_experts_that_stay_with_little_but_enough_end_it():
    monitor, each = CollapseMonitor(1, E, 1), np.full((1, E), 32)
    gone, little = each * (np.arange(E) > 1), each.copy()
    little[0, :2] = 2  # 6 % of fair share, in windows in which noise may make that of 1 %
    for t in range(40):
        verdict = monitor.update(t, gone)[0]
    assert verdict.state == "COLLAPSED"
    states = [monitor.update(40 + t, little)[0].state for t in range(30)]
    assert states[4] == "COLLAPSED" and states[-1] != "COLLAPSED"


def test_a_revived_expert_ends_it_and_its_words_stay_true():
    monitor, each = CollapseMonitor(1, 8, 2), np.full((1, 8), 2048)
    gone, faint = each * (np.arange(8) > 0), each * np.where(np.arange(8) > 0, 1.0, 0.02)
    for t in range(10):
        verdict = monitor.update(t, gone)[0]
    assert verdict.state == "COLLAPSED" and verdict.reasons[0] == "1 of 8 experts dead over 1 step"
    verdict = monitor.update(10, faint)[0]
    assert verdict.state == "COLLAPSED" and "hardly more" in verdict.reasons[0]
    for t in range(11, 14):
        verdict = monitor.update(t, each)[0]
    assert verdict.state != "COLLAPSED"
