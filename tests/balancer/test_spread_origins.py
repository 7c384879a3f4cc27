"""Spread, origins, and what the forecaster reads from them: the numbers of the text, computed by hand."""

import numpy as np
import pytest

from balancer.forecast_build import _next_interval, _regime, build
from balancer.forecast_members import ema
from balancer.forecast_record import JUMPED, MOVING, SETTLED, UNKNOWN
from balancer.origins import FREE, num_slots, place, take_due
from balancer.spread import shares_of, spread_init, spread_std, spread_update

LOADED = np.array([True])


def _known(*, change=0.02, slow=0.02, seen=30, age=29, share=(0.5, 0.5), copies=1000.0):
    """Spread of one layer that has been seen for a while."""
    return spread_init(1, len(share))._replace(
        last_LE=np.array([share]),
        change_L=np.array([change]),
        slow_change_L=np.array([slow]),
        copies_L=np.array([copies]),
        age_L=np.array([age]),
        seen_L=np.array([seen]),
    )


def _take(share, spread, total=1000.0, loaded=LOADED):
    return spread_update(np.array([share]), np.array([total]), loaded, spread)


def _stream(first_E, *stretches):
    """Spreads of two experts whose share goes to and fro: (number of samples, change of each) ..."""
    spread, at = _take(first_E, spread_init(1, 2))[1], first_E[0]
    found, way = [spread], 1
    for number, change in stretches:
        for _ in range(number):
            at, way = at + way * change, -way
            spread = _take((at, 1 - at), spread)[1]
            found.append(spread)
    return found


# ---- spread ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "least"),
    [
        (_known(change=0.02), 0.08),  # four times what it was lately
        (_known(change=0.1), 0.4),
        (_known(change=0.001), 0.05),  # and at least this much
        (_known(change=0.0), 0.05),
        (_known(change=0.0, seen=1, age=0), 0.1),  # the first change is compared with half the least jump
        (_known(change=9.0, seen=1, age=0), 0.1),
    ],
)
def test_a_layer_jumps_from_this_change_on_and_not_before(spread, least):
    for change, jumps in ((least - 1e-6, False), (least + 1e-6, True)):
        jumped_L, new = _take((0.5 + change, 0.5 - change), spread)
        assert jumped_L.tolist() == [jumps]
        assert new.age_L.tolist() == [0 if jumps else spread.age_L[0] + 1]


def test_the_first_sample_is_no_jump_nor_is_one_without_load():
    jumped_L, new = _take((1.0, 0.0), spread_init(1, 2))
    assert not jumped_L.any() and new.change_L[0] == 0 and new.age_L[0] == 0 and new.seen_L[0] == 1
    spread = _known()
    idle_LE, loaded_L = shares_of(np.zeros((1, 2)), spread)
    jumped_L, new = spread_update(idle_LE, np.zeros(1), loaded_L, spread)
    assert not jumped_L.any()
    for before, after in zip(spread, new):
        np.testing.assert_array_equal(before, after)


def test_usual_changes_are_learnt_at_their_own_rates():
    new = _take((0.54, 0.46), _known(change=0.02, slow=0.03), total=2000.0)[1]
    np.testing.assert_allclose(new.change_L, 0.02 + 0.1 * 0.02)
    np.testing.assert_allclose(new.slow_change_L, 0.03 + 0.02 * 0.01)
    np.testing.assert_allclose(new.copies_L, 1100.0)


def test_a_jump_raises_the_usual_change_by_a_part_and_the_slow_one_not_at_all():
    jumped_L, new = _take((0.8, 0.2), _known(change=0.02, slow=0.03))
    assert jumped_L.all()
    np.testing.assert_allclose(new.change_L, 0.02 + 0.3 * 0.28)
    np.testing.assert_array_equal(new.slow_change_L, [0.03])


def test_the_first_change_is_where_the_running_ones_begin():
    new = _take((0.54, 0.46), _known(change=0.0, slow=0.0, seen=1, age=0))[1]
    np.testing.assert_allclose([new.change_L[0], new.slow_change_L[0]], 0.04)
    new = _take((0.9, 0.1), spread_init(1, 2), total=700.0)[1]
    assert new.copies_L.tolist() == [700.0]


def test_deviations_start_anew_half_their_own_and_half_of_their_layer():
    # roots (0.5, 0.5, 0.5, 0.5) -> (0.9, 0.3, 0.3, 0.1): changes 0.4, 0.2, 0.2, 0.4, of mean 0.3
    share_E = np.array([0.81, 0.09, 0.09, 0.01])
    for spread in (_known(share=[0.25] * 4), _known(share=[0.25] * 4, seen=1, age=0)):
        spread.deviation_LE[:] = 7.0
        new = _take(share_E, spread)[1]
        np.testing.assert_allclose(new.deviation_LE, [[0.35, 0.25, 0.25, 0.35]])


@pytest.mark.parametrize(("age", "gain"), [(0, 1 / 2), (1, 1 / 3), (3, 1 / 5), (40, 1 / 5)])
def test_deviations_are_plain_means_at_first_and_fade_later(age, gain):
    spread = _known(share=(0.36, 0.64), age=age, change=1.0)
    spread.deviation_LE[:] = [[0.03, 0.01]]
    new = _take((0.49, 0.51), spread)[1]
    now_E = np.abs(np.sqrt([0.49, 0.51]) - [0.6, 0.8])
    np.testing.assert_allclose(new.deviation_LE[0], (1 - gain) * np.array([0.03, 0.01]) + gain * now_E)


def test_an_expert_that_stood_still_leans_on_its_layer():
    spread = _known(share=(0.5, 0.3, 0.2, 0.0), copies=1000.0)
    spread.deviation_LE[:] = [[0.04, 0.0, 0.02, 0.0]]
    square_E = (1.2533 * np.array([0.04, 0.0, 0.02, 0.0])) ** 2
    noise_E = np.array([0.5, 0.7, 0.8, 1.0]) / 4000.0
    np.testing.assert_allclose(spread_std(spread)[0] ** 2, 0.8 * square_E + 0.2 * square_E.mean() + noise_E)
    nothing = spread_std(spread_init(1, 2))  # no copies yet: those of one, not a division by 0
    np.testing.assert_allclose(nothing**2, 0.5 / 4)


# ---- regimes --------------------------------------------------------------------------------------------


def _one_regime(**options):
    return int(_regime(_known(**options))[0])


def test_a_layer_is_unknown_until_its_third_sample():
    assert [_one_regime(seen=seen, age=max(0, seen - 1)) for seen in (0, 1, 2, 3)] == [UNKNOWN] * 3 + [
        SETTLED
    ]
    assert _one_regime(seen=2, age=0, change=1.0) == UNKNOWN  # whatever else it does


def test_a_layer_counts_as_jumped_for_twenty_samples():
    assert [_one_regime(seen=99, age=age) for age in (0, 3, 19, 20)] == [JUMPED] * 3 + [SETTLED]
    assert _one_regime(seen=10, age=9) == SETTLED  # one that never jumped is young only
    found = [int(_regime(spread)[0]) for spread in _stream((0.3, 0.7), (40, 0.01), (1, 0.6), (60, 0.01))]
    assert set(found[3:41]) == {SETTLED}
    # the jump raises its usual change as well: when it is no longer new, that has nearly faded
    assert found[41:61] == [JUMPED] * 20 and JUMPED not in found[61:] and found[-1] == SETTLED


def test_a_layer_moves_while_it_changes_more_than_it_usually_does():
    assert _one_regime(change=0.0259) == SETTLED and _one_regime(change=0.0261) == MOVING
    assert _one_regime(change=0.0, slow=0.0) == SETTLED
    # twice the change is no jump, but it moves; back to the old change it is quieter than it came to be
    found = [int(_regime(spread)[0]) for spread in _stream((0.3, 0.7), (60, 0.01), (20, 0.02), (40, 0.01))]
    assert set(found[3:61]) == {SETTLED} and found[70:81] == [MOVING] * 11 and found[-1] == SETTLED


# ---- steps between samples ------------------------------------------------------------------------------


def _interval_after(gap, known):
    state = build(ema(1.0)).init(1, 2, (10,))
    return _next_interval(1000 + gap, state._replace(step=np.array(1000), interval=np.array(known)))


def test_a_missing_sample_hardly_stretches_the_interval_and_a_shorter_one_is_taken_at_once():
    assert _next_interval(7, build(ema(1.0)).init(1, 2, (10,))) == 0.0
    assert _interval_after(10, 0.0) == 10.0
    assert _interval_after(20, 10.0) == pytest.approx(11.0)
    assert _interval_after(4, 10.0) == 4.0
    assert _interval_after(10, 10.0) == 10.0


def test_a_longer_interval_is_learnt_when_it_stays():
    known, found = 10.0, []
    for _ in range(50):
        known = _interval_after(20, known)
        found.append(known)
    assert (np.diff(found) > 0).all() and found[5] < 15 < found[7] and found[-1] == pytest.approx(20, abs=0.1)


def test_the_state_carries_the_interval_from_sample_to_sample():
    init, update, _ = build(ema(1.0))
    state, found = init(1, 2, (10,)), []
    for step in (1, 11, 21, 41, 51, 54):
        state = update(step, np.array([[1, 2]]), state)
        found.append(float(state.interval))
    assert found == pytest.approx([0.0, 10.0, 10.0, 11.0, 10.0, 3.0])


# ---- origins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("horizon", "interval", "latest"),
    [(100, 10.0, 50), (2, 10.0, 15), (20, 10.0, 15), (40, 10.0, 20), (1, 1.0, 1)],
)
def test_an_origin_is_scored_when_late_by_half_its_horizon_or_a_sample_and_a_half(horizon, interval, latest):
    for late, scored in ((-1, None), (0, True), (latest, True), (latest + 1, False)):
        step_Q = np.array([FREE, 7, FREE])
        found = take_due(step_Q, horizon, 7 + horizon + late, interval)
        assert found == ([1] if scored else [])
        assert step_Q.tolist() == [FREE, 7 if scored is None else FREE, FREE]  # dropped or scored: free again


def test_origins_are_scored_oldest_first_wherever_they_are_kept():
    step_Q = np.array([30, 10, FREE, 20, 60])
    assert take_due(step_Q, 50, 80, 10.0) == [1, 3, 0]
    assert step_Q.tolist() == [FREE, FREE, FREE, FREE, 60]


def test_origins_of_a_horizon_keep_their_distance():
    for step, slot in ((109, FREE), (110, 1), (111, 1)):  # 40 steps over 5 - 1 slots: 10 apart
        step_Q = np.array([100, FREE, FREE, FREE, FREE])
        assert place(step_Q, 40, step) == slot
        assert step_Q.tolist() == [100, FREE if slot == FREE else step, FREE, FREE, FREE]
    step_Q = np.full(5, FREE)
    assert place(step_Q, 40, 0) == 0  # the first has nothing to keep its distance from


def test_no_origin_is_thrown_out_for_another():
    step_Q = np.array([100, 110, 120, 130])
    assert place(step_Q, 30, 140) == FREE
    assert step_Q.tolist() == [100, 110, 120, 130]


def test_slots_are_as_many_as_fit_from_8_to_64():
    sizes = [0, 1, 2**17, 2**17 + 1, 2**18, 2**20, 2**20 + 1, 2**30]
    assert [num_slots(size) for size in sizes] == [64, 64, 64, 63, 32, 8, 8, 8]
