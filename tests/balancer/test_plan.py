"""Plans: what is refused, and with which words; moves as the metric counts them; the way through JSON."""

import doctest
import json

import numpy as np
import pytest

from balancer import placement_checks, plan
from balancer.metrics import moved_slots
from balancer.plan import (
    Move,
    Plan,
    check_placement,
    check_plan,
    home_slots,
    list_moves,
    plan_from_dict,
    plan_to_dict,
)
from moe.placement import make_placement

# 5 experts on 2 ranks of 4 slots, homes first: rank 0 owns 0, 1, 2 and rank 1 owns 3, 4
HOMES = np.array([[0, 1, 2, 4, 5]] * 2)
NOW = np.array([[0, 1, 2, -1, 3, 4, 0, -1], [0, 1, 2, 4, 3, 4, -1, -1]])
THEN = np.array([[0, 1, 2, 3, 3, 4, 0, -1], [0, 1, 2, -1, 3, 4, 2, 1]])


def make_plan(**changes):
    """A good plan from NOW to THEN, but for the changes."""
    values = {
        "slot_to_expert_LS": THEN.copy(),
        "home_slot_LE": HOMES.copy(),
        "num_ranks": 2,
        "moves": list_moves(NOW, THEN, 2),
        "bound_L": np.array([10.0, 0.0]),
        "peak_L": np.array([12.0, 0.0]),
        "expected_gain_s": 0.5,
        "move_cost_s": 0.25,
        "version": 3,
        "made_at_step": 100,
        "applies_at_step": 110,
        "reason": "peak 15 -> 12",
    }
    return Plan(**(values | changes))


def check(good=None, **changes):
    arguments = {"num_experts": 5, "current_LS": NOW, "version": 2, "step": 105}
    check_plan(good or make_plan(), **(arguments | changes))


def swapped(layer, slot, expert, table=THEN):
    """The placement with another expert in one slot."""
    result = table.copy()
    result[layer, slot] = expert
    return result


def test_examples_in_docstrings_print_what_they_say():
    for module in (plan, placement_checks):
        assert doctest.testmod(module).failed == 0
    assert doctest.testmod(placement_checks).attempted > 0


def test_a_good_plan_passes_every_check_and_says_its_gap():
    made = make_plan()
    check(made)
    np.testing.assert_allclose(made.gap_L, [0.2, 0.0])  # no gap where there is no load
    check(make_plan(applies_at_step=105))  # at this very step is not too late


def test_a_layer_takes_a_plan_by_its_attributes():
    made = make_plan()
    for layer in range(2):
        now = make_placement(NOW[layer], 5, 2, HOMES[layer], version=2)
        then = now.with_replicas(made.slot_to_expert_LS[layer], made.version)
        np.testing.assert_array_equal(then.home_slot_E, made.home_slot_LE[layer])
        assert then.version == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"slot_to_expert_LS": THEN.astype(np.int32)},
            r"slot_to_expert_LS is int32 \(2, 8\); expected int64",
        ),
        ({"slot_to_expert_LS": THEN.tolist()}, "slot_to_expert_LS is a list; expected a numpy array"),
        ({"slot_to_expert_LS": THEN[0]}, r"int64 \(8,\); expected int64 \[L, S\]"),
        ({"slot_to_expert_LS": THEN[:0]}, "not empty"),
        ({"slot_to_expert_LS": swapped(1, 7, -2)}, "slot 7 of layer 1 has expert -2; an empty slot is -1"),
        ({"num_ranks": 3}, "8 slots are not a multiple of 3 ranks; use 6 or 9"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
        ({"home_slot_LE": HOMES.astype(np.float64)}, "home_slot_LE is float64"),
        ({"home_slot_LE": HOMES[:1]}, "home_slot_LE has 1 layers instead of 2"),
        ({"home_slot_LE": swapped(1, 4, 8, HOMES)}, "layer 1: home of expert 4 is slot 8, out of 0..7"),
        ({"home_slot_LE": swapped(0, 1, 4, HOMES)}, "slot 4 is the home of expert 1 and holds 3"),
        ({"bound_L": np.array([10, 0])}, "bound_L is int64"),
        ({"bound_L": np.array([10.0])}, "bound_L has 1 layers instead of 2"),
        ({"bound_L": np.array([10.0, -1.0])}, r"bound_L\[1\]=-1.0 is no load"),
        ({"peak_L": np.array([np.nan, 0.0])}, r"peak_L\[0\]=nan is no load"),
        ({"peak_L": np.array([9.9, 0.0])}, r"peak_L\[0\]=9.9 is below bound_L\[0\]=10.0"),
        ({"expected_gain_s": np.inf}, "expected_gain_s=inf and move_cost_s=0.25 must be finite"),
        ({"move_cost_s": np.nan}, "move_cost_s=nan must be finite"),
        ({"move_cost_s": -0.1}, "move_cost_s=-0.1 must be 0 or more"),
        ({"version": -1}, "version=-1 must be 0 or more"),
        ({"made_at_step": -5}, "made_at_step=-5 must be 0 or more"),
        ({"applies_at_step": 99}, "applies_at_step=99 is before made_at_step=100"),
        ({"moves": (Move(2, 3, 0, 3, -1),)}, "is out of 2 layers of 8 slots"),
        ({"moves": (Move(0, 3, 1, 3, -1),)}, "do not fit 2 ranks of 8 slots"),
        ({"moves": (Move(0, 7, 1, -1, 0),)}, "do not fit 2 ranks"),
        ({"moves": (Move(0, 3, 0, 4, -1),)}, "the plan has expert 3 in that slot"),
        (
            {"moves": (Move(1, 7, 1, 1, -1), Move(0, 3, 0, 3, -1))},
            "comes after a move into slot 7 of layer 1",
        ),
        ({"moves": (Move(0, 3, 0, 3, -1),) * 2}, "comes after a move into slot 3 of layer 0"),
    ],
)
def test_a_plan_that_contradicts_itself_is_not_made(changes, words):
    with pytest.raises(ValueError, match=words):
        make_plan(**changes)


def test_a_peak_that_differs_from_its_bound_by_rounding_is_taken():
    assert make_plan(peak_L=np.array([10.0 * (1 - 1e-9), 0.0])).gap_L[0] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_experts": 4}, "layer 0, rank 1: slot 5 has expert 4, out of 0..3"),
        ({"num_experts": 6}, "layer 0: expert 5 has no slot on any rank"),
        ({"current_LS": NOW[:, :6]}, r"the plan is \(2, 8\) and the placement in force \(2, 6\)"),
        ({"current_LS": NOW[:1]}, r"the placement in force \(1, 8\)"),
        ({"current_LS": NOW[0]}, "expected integers with two axes"),
        ({"version": 3}, "plan version 3 is not newer than 3, which is in force"),
        ({"version": 4}, "plan version 3 is not newer than 4"),
        ({"step": 111}, "applies at step 110, which has passed: it is step 111"),
        ({"step": 99}, "made at step 100 and it is only step 99; plan on the past"),
        ({"current_LS": THEN}, "lists 3 moves, the change from the placement in force needs 0"),
        ({"current_LS": swapped(1, 6, 2, NOW)}, r"needs 2: missing \[\], not needed \[Move\(layer=1, slot=6"),
        ({"current_LS": swapped(0, 6, -1, NOW)}, r"needs 4: missing \[Move\(layer=0, slot=6"),
        (
            {"current_LS": NOW[:, [4, 1, 2, 3, 0, 5, 6, 7]]},
            "layer 0: slot 0 is the home of expert 0 and holds 3 in the one in force; homes stay",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_world_is_refused_whole(given, words):
    with pytest.raises(ValueError, match=words):
        check(**given)


def test_a_move_that_names_another_expert_as_replaced_is_refused():
    first, *others = list_moves(NOW, THEN, 2)
    lying = make_plan(moves=(first._replace(replaced=2), *others))
    with pytest.raises(
        ValueError, match=r"missing \[Move\(.*replaced=-1\)\], not needed \[Move\(.*replaced=2"
    ):
        check(lying)


def test_a_plan_that_names_homes_of_some_experts_only_is_refused():
    with pytest.raises(ValueError, match="home_slot_LE has 4 experts instead of 5"):
        check(make_plan(home_slot_LE=HOMES[:, :4]))


def test_unknown_surroundings_are_not_checked():
    check(current_LS=None, version=None, step=None)


def test_an_expert_twice_on_a_rank_is_refused_while_another_rank_has_none():
    double = np.array([[0, 1, 2, 0], [0, 0, 1, 2]])
    with pytest.raises(ValueError, match="layer 1, rank 0: expert 0 stands there twice and rank 1 has none"):
        check_placement(double, num_experts=3, num_ranks=2)
    check_placement(np.array([[0, 0, 1, 2]]), num_experts=3, num_ranks=2, distinct=False)


def test_an_expert_twice_on_a_rank_is_taken_where_every_rank_has_it():
    check_placement(np.array([[0, 1, 0, 0, 0, 2]]), num_experts=3, num_ranks=2)
    # not empty slots, of which a rank may have many
    check_placement(np.array([[0, -1, -1, 1, -1, -1]]), num_experts=2, num_ranks=2)


@pytest.mark.parametrize("seed", range(20))
def test_over_claimed_replicas_are_found_wherever_they_are(seed):
    rng = np.random.default_rng(seed)
    layers, ranks, local, experts = 3, int(rng.integers(2, 5)), int(rng.integers(2, 5)), 3
    slots = rng.integers(-1, experts, (layers, ranks * local))
    slots = np.where(np.arange(ranks * local) < experts, np.arange(ranks * local), slots)
    by_rank = slots.reshape(layers, ranks, local)
    counts = (by_rank[..., None] == np.arange(experts)).sum(axis=2)  # [L, P, E]
    wrong = [
        (layer, rank, expert)
        for layer, rank, expert in np.argwhere(counts > 1).tolist()
        if (counts[layer, :, expert] == 0).any()
    ]
    assert bool(wrong) == (seed not in (6, 11, 14, 16, 19))  # both kinds are met
    if not wrong:
        check_placement(slots, num_experts=experts, num_ranks=ranks)
        return
    layer, rank, expert = wrong[0]
    with pytest.raises(ValueError, match=f"layer {layer}, rank {rank}: expert {expert} stands there twice"):
        check_placement(slots, num_experts=experts, num_ranks=ranks)


def test_a_dropped_expert_and_a_moved_home_are_refused():
    dropped = swapped(1, 2, 3)[:, :6]
    with pytest.raises(ValueError, match="layer 1: expert 2 has no slot on any rank; every expert needs one"):
        check_placement(dropped, num_experts=5, num_ranks=2)
    moved = THEN.copy()
    moved[1, 1], moved[1, 7] = -1, 1
    with pytest.raises(
        ValueError, match="layer 1: slot 1 is the home of expert 1 and holds -1 in the placement"
    ):
        check_placement(moved, num_experts=5, num_ranks=2, home_slot_LE=HOMES)
    with pytest.raises(ValueError, match="home_slot_LE has 4 experts instead of 5"):
        check_placement(THEN, num_experts=5, num_ranks=2, home_slot_LE=HOMES[:, :4])
    with pytest.raises(ValueError, match="float64"):
        check_placement(THEN * 1.0, num_experts=5, num_ranks=2)


@pytest.mark.parametrize("seed", range(10))
def test_moves_are_as_many_as_the_metric_counts_and_say_what_happens(seed):
    rng = np.random.default_rng(seed)
    before, after = rng.integers(-1, 6, (2, 4, 12))
    for start in (before, None):
        moves = list_moves(start, after, 3)
        known = np.full_like(after, -1) if start is None else start
        counted = np.bincount([move.layer for move in moves], minlength=4)
        np.testing.assert_array_equal(counted, moved_slots(known, after, 3))
        assert list(moves) == sorted(moves, key=lambda move: (move.layer, move.slot))
        for move in moves:
            assert move.rank == move.slot // 4
            assert move.expert == after[move.layer, move.slot]
            assert move.replaced == known[move.layer, move.slot]
            assert move.expert not in known[move.layer, move.rank * 4 : move.rank * 4 + 4]


def test_moves_between_unlike_placements_are_refused():
    with pytest.raises(ValueError, match=r"before is \(2, 6\) and after \(2, 8\)"):
        list_moves(NOW[:, :6], THEN, 2)
    with pytest.raises(ValueError, match="8 slots are not a multiple of 3 ranks"):
        list_moves(NOW, THEN, 3)


def test_homes_come_first_on_every_rank_and_are_spread_evenly():
    np.testing.assert_array_equal(home_slots(5, 8, 2), HOMES[0])
    for experts, ranks, local in ((8, 4, 3), (7, 3, 3), (3, 5, 1), (1, 1, 1)):
        slots = home_slots(experts, ranks * local, ranks)
        owned = np.bincount(slots // local, minlength=ranks)
        assert owned.max() - owned.min() <= 1
        assert (np.diff(owned) <= 0).all()
        within = slots % local
        assert all(
            within[slots // local == rank].tolist() == list(range(owned[rank])) for rank in range(ranks)
        )
        assert (np.diff(slots) > 0).all()


def test_homes_that_find_no_room_are_refused_with_the_nearest_size():
    with pytest.raises(ValueError, match="num_experts=9 must be 1 to num_slots=8; use 10 slots or more"):
        home_slots(9, 8, 2)
    with pytest.raises(ValueError, match="7 slots are not a multiple of 2 ranks; use 6 or 8"):
        home_slots(5, 7, 2)


@pytest.mark.parametrize("homes", [HOMES, None])
@pytest.mark.parametrize("moves", [list_moves(NOW, THEN, 2), ()])
def test_a_plan_comes_back_from_json_as_it_was(homes, moves):
    made = make_plan(home_slot_LE=homes, moves=moves, version=np.int64(7))
    back = plan_from_dict(json.loads(json.dumps(plan_to_dict(made))))
    for name in Plan.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name), err_msg=name)
    assert back.slot_to_expert_LS.dtype == np.int64
    assert all(isinstance(move, Move) for move in back.moves)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": 1}, r"has the unknown keys \['extra'\]"),
        ({"slot_to_expert_LS": [[0, 1], [2]]}, "slot_to_expert_LS is no table of numbers"),
        ({"slot_to_expert_LS": [[0.5] * 8] * 2}, r"slot_to_expert_LS is float64 \(2, 8\); expected integers"),
        ({"slot_to_expert_LS": None}, "slot_to_expert_LS is object"),
        ({"slot_to_expert_LS": [0, 1]}, "expected integers with 2 axes"),
        ({"home_slot_LE": [["a"]]}, "home_slot_LE is <U1"),
        ({"bound_L": 3.0}, r"bound_L is float64 \(\); expected numbers with 1 axes"),
        ({"peak_L": [1.0]}, "peak_L has 1 layers instead of 2"),
        (
            {"moves": [[0, 3, 0, 3]]},
            "moves have 4 numbers each; expected layer, slot, rank, expert, replaced",
        ),
        ({"moves": None}, "moves is object"),
        ({"version": 1.5}, "version=1.5 must be an integer"),
        ({"num_ranks": True}, "num_ranks=True must be an integer"),
        ({"move_cost_s": "1"}, "move_cost_s='1' must be a number of seconds"),
        ({"reason": None}, "reason=None must be text"),
        ({"applies_at_step": 1}, "applies_at_step=1 is before made_at_step=100"),
    ],
)
def test_a_record_with_anything_amiss_is_refused_whole(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_from_dict(plan_to_dict(make_plan()) | changes)


def test_a_record_that_lacks_a_key_or_is_none_is_refused():
    record = plan_to_dict(make_plan())
    del record["version"]
    with pytest.raises(ValueError, match=r"lacks the keys \['version'\]"):
        plan_from_dict(record)
    with pytest.raises(ValueError, match="a plan is a list"):
        plan_from_dict([record])
