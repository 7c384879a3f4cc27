"""The choice between placements: by what, and that it is not by the scenarios that a search saw."""

import numpy as np
import pytest

from balancer import placement, planning
from balancer.bound import peak_bound
from balancer.candidates import best_of, busiest_port, constraints_of, layer_times
from balancer.connect import default_placement
from balancer.cost import CostModel
from balancer.planning import plan_placement
from balancer.search import risk_of

START = default_placement(1, 8, 12, 4)


def limits(fixed=True, slots=START):
    return constraints_of((1, 8), 4, 12, 1, 0, slots, fixed, None, None)


def choose(search, judge, price=0.0, beta=0.1, **more):
    return best_of(
        search,
        judge,
        START,
        limits(),
        np.full(1, price),
        beta,
        0.1,
        1000,
        True,
        anew=False,
        tolerance=0.0,
        **more,
    )


def load_of(hot, copies=6000):
    load = np.full((1, 1, 8), 200)
    load[0, 0, hot] = copies
    return load


def test_the_busiest_port_is_the_one_that_sends_or_receives_most():
    #                     homes 0 1      2 3      4 5      6 7, one spare slot each
    slots = np.array([[0, 1, 2, 2, 3, 0, 4, 5, 0, 6, 7, 0]])
    assert busiest_port(slots, limits(slots=slots)).tolist() == [3]  # rank 0 sends expert 0 three times
    wide = np.array([[0, 1, -1, -1, 2, 3, -1, -1, 4, 5, 0, 2, 6, 7, -1, -1]])
    found = constraints_of((1, 8), 4, 16, 1, 0, wide, True, None, None)
    assert busiest_port(wide, found).tolist() == [2]  # rank 2 receives two, ranks 0 and 1 send one each
    assert busiest_port(slots, limits(fixed=False, slots=slots)).tolist() == [0]  # nothing travels


def test_a_search_that_only_suits_its_own_scenarios_is_not_followed():
    hot, other = load_of(4), load_of(int(START[0, 2]))
    followed, _ = choose(hot, hot)
    assert (followed != START).any()
    kept, judged = choose(hot, np.concatenate([other] * 3))
    assert (kept == START).all() and judged.moved_L.tolist() == [0]


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_placements_are_judged_by_mean_and_tail_and_what_they_fetch(beta):
    judge = np.concatenate([load_of(e, 3000 + 500 * e) for e in range(6)])
    slots, judged = choose(load_of(5), judge, beta=beta, fetch_price=0.01)
    even = np.full(6, 1 / 6)
    for found, placed in ((judged.before_L, START), (judged.after_L, slots)):
        times = layer_times(placed, judge, limits(), 0.01)
        assert found == pytest.approx(risk_of(times, even, beta, 0.1))


def test_the_search_and_the_judge_of_a_plan_see_different_scenarios(monkeypatch):
    seen = []

    def spy(search, judge, *args, **more):
        seen.append((search, judge))
        return best_of(search, judge, *args, **more)

    monkeypatch.setattr(planning, "best_of", spy)
    plan_placement([[9, 4, 3, 2, 1, 1, 1, 1]], num_ranks=4, num_slots=12)
    search, judge = seen[0]
    assert len(search) == len(judge) == 32
    assert not (search[:, None] == judge[None]).all(axis=(2, 3)).any()


def test_the_controller_judges_by_scenarios_that_its_search_did_not_see(monkeypatch):
    seen = []

    def spy(search, judge, *args, **more):
        seen.append((search, judge))
        return best_of(search, judge, *args, **more)

    monkeypatch.setattr(placement, "best_of", spy)
    cost = CostModel.of_machine("infiniband", 1024, 1024)
    config = placement.PlacementConfig(num_ranks=4, num_slots=12, cost=cost, num_scenarios=5)
    init, update = placement.placement_controller(config)
    update(0, np.array([[9000, 400, 300, 200, 100, 100, 100, 100]]), START, init(1, 8, START))
    search, judge = seen[0]
    assert len(search) == 1 + 5 and len(judge) == 5  # the last load is one of those of the search
    assert not (search[:, None] == judge[None]).all(axis=(2, 3)).any()


def test_a_plan_for_a_history_is_for_its_forecast_not_for_the_last_sample():
    """Noise around an even load: last samples are uneven, what is to be expected is hardly so."""
    over_last = over_planned = 0.0
    for seed in range(8):
        history = np.random.default_rng(seed).multinomial(200, np.full(8, 1 / 8), size=(60, 1))
        plan = plan_placement(history, num_ranks=4, num_slots=8, fixed_homes=True)
        over_last += peak_bound(history[-1], 8, 4, home_slot_E=np.arange(8))[0] - 50
        over_planned += plan.bound_L[0] - 50
    assert over_planned < 0.5 * over_last
