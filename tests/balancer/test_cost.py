"""Costs in seconds: against sums by hand, in the right units, monotone, in training and in serving."""

import doctest
from dataclasses import replace

import numpy as np
import pytest

from balancer import cost
from balancer.cost import CostModel
from balancer.machines import MACHINES
from moe.placement import make_placement
from moe.replicate import itinerary

# powers of two: sums by hand are exact
MODEL = CostModel(
    row_s=2.0**-10,
    active_s=2.0**-4,
    row_bytes=64.0,
    expert_bytes=1024.0,
    grad_bytes=2048.0,
    bandwidth_bytes_per_s=4096.0,
)
SERVING = replace(MODEL, trained=False)
SLOTS = np.array([[0, 1, 2, 3, 4, 5, 0, -1, 0], [0, 1, -1, 2, 3, 1, 4, 5, -1]])  # 3 ranks
HOMES = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 6, 7]])


def random_case(seed, layers=3, ranks=4):
    """Load, slots, port and replica bytes and speeds at random, zeros among them."""
    rng = np.random.default_rng(seed)
    load, active, port, replica = rng.integers(0, 50, (4, layers, ranks)) * rng.integers(
        0, 2, (4, layers, ranks)
    )
    return load, active, port * 1.0, replica * 1.0, rng.uniform(0.5, 2.0, ranks)


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(cost)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_time_of_a_layer_is_that_of_its_slowest_rank_by_hand():
    model = replace(MODEL, overlap_frac=0.5, micro_batches=2, solve_s=0.25)
    load, active, port, replica = (
        [[1024, 512], [0, 0]],
        [[2, 4], [0, 0]],
        [[4096, 0], [0, 0]],
        [[0, 8192], [0, 0]],
    )
    # rank 0: 1 s rows + 2 * 2/16 s slots + 1 s exchange, half of it hidden
    # rank 1: 1/2 s rows + 2 * 4/16 s slots + 2 s replicas
    np.testing.assert_array_equal(model.layer_time_s(load, active, port, replica), [3.0, 0.0])
    np.testing.assert_array_equal(model.layer_time_s(load, active, port), [1.75, 0.0])
    np.testing.assert_array_equal(model.layer_time_s(load, active), [1.25, 0.0])
    np.testing.assert_array_equal(model.layer_time_s(load, active, solved=True), [1.75, 0.5])
    # at half the speed rows and slots take twice as long, the port does not
    np.testing.assert_array_equal(model.layer_time_s(load, active, port, speed_G=[0.5, 1.0]), [3.0, 0.0])


def test_no_more_of_the_exchange_hides_than_there_is_compute():
    model = replace(MODEL, overlap_frac=1.0)
    # a second of exchange behind half a second of rows
    np.testing.assert_array_equal(model.layer_time_s([[512]], [[0]], [[4096]]), [1.0])
    np.testing.assert_array_equal(model.layer_time_s([[2048]], [[0]], [[4096]]), [2.0])
    np.testing.assert_array_equal(MODEL.layer_time_s([[512]], [[0]], [[4096]]), [1.5])


def test_bytes_to_other_nodes_go_at_their_own_bandwidth():
    model = replace(MODEL, node_bandwidth_bytes_per_s=1024.0)
    time_s = model.layer_time_s([[0]], [[0]], [[4096]], node_bytes_LG=[[1024]])
    np.testing.assert_array_equal(time_s, [0.75 + 1.0])
    np.testing.assert_array_equal(MODEL.layer_time_s([[0]], [[0]], [[4096]], node_bytes_LG=[[1024]]), [1.0])
    with pytest.raises(
        ValueError, match=r"node_bytes_LG\[0, 0\]=1025.0 is more than port_bytes_LG there, 1024.0"
    ):
        model.layer_time_s([[0]], [[0]], [[1024]], node_bytes_LG=[[1025]])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_time_never_falls_when_anything_grows(seed, overlap):
    model = replace(MODEL, overlap_frac=overlap)
    *given, speed = random_case(seed)
    before = model.layer_time_s(*given, speed)
    rng = np.random.default_rng(seed + 100)
    for index in range(4):
        more = list(given)
        more[index] = given[index] + rng.integers(0, 9, given[index].shape)
        assert (model.layer_time_s(*more, speed) >= before).all()
    assert (model.layer_time_s(*given, speed * 0.9) >= before).all()
    assert model.layer_time_s(*given, speed).shape == (3,)


@pytest.mark.parametrize("seed", range(5))
def test_time_has_the_unit_of_its_prices(seed):
    *given, speed = random_case(seed)
    slower = replace(
        MODEL,
        row_s=MODEL.row_s * 3,
        active_s=MODEL.active_s * 3,
        bandwidth_bytes_per_s=MODEL.bandwidth_bytes_per_s / 3,
        overlap_frac=0.5,
    )
    before = replace(MODEL, overlap_frac=0.5).layer_time_s(*given, speed)
    np.testing.assert_allclose(slower.layer_time_s(*given, speed), 3 * before, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([[-1, 0]], [[0, 0]]), r"load_LG\[0, 0\]=-1.0 is not a load"),
        (([[np.nan, 0]], [[0, 0]]), r"load_LG\[0, 0\]=nan"),
        (([1, 2], [[0, 0]]), r"load_LG has shape \(2,\); expected \[L, P\]"),
        (([[1, 2]], [[0, 0, 0]]), r"active_LG has shape \(1, 3\); expected \[L, P\] = \(1, 2\)"),
        (([[1, 2]], [[0, 0]], [[1]]), "port_bytes_LG has shape"),
        (([[1, 2]], [[0, 0]], None, [[1, -2]]), r"replica_bytes_LG\[0, 1\]=-2.0"),
        (([[1, 2]], [[0, 0]], None, None, [1.0]), "speed_P has 1 entries for 2 ranks"),
        (([[1, 2]], [[0, 0]], None, None, [1.0, 0.0]), r"speed_P\[1\]=0.0 must be finite and above 0"),
    ],
)
def test_loads_and_speeds_that_are_none_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        MODEL.layer_time_s(*given)


def brute_force_exchange(load_G, row_bytes, ranks_per_node):
    """The larger way of dispatch, and of combine, counted pair by pair."""
    ranks = len(load_G)
    sent, received = np.zeros((2, ranks))
    for source in range(ranks):
        for rank in range(ranks):
            if source // ranks_per_node != rank // ranks_per_node:
                sent[source] += load_G[rank] / ranks
                received[rank] += load_G[rank] / ranks
    return (np.maximum(sent, received) + np.maximum(received, sent)) * row_bytes


@pytest.mark.parametrize("nodes", [None, 1, 2, 3, 6])
def test_exchange_bytes_are_those_of_every_pair_of_ranks(nodes):
    load = np.random.default_rng(0).integers(0, 1000, (3, 6))
    load[1] = 0
    load[2, 1:] = 0  # all to one rank: others only send
    expected = [brute_force_exchange(row, 64.0, 1 if nodes is None else 6 // nodes) for row in load]
    np.testing.assert_allclose(SERVING.exchange_bytes(load, nodes), expected, rtol=1e-12, atol=1e-9)
    # the backward does the same again, the other way round
    np.testing.assert_allclose(
        MODEL.exchange_bytes(load, nodes), 2 * np.array(expected), rtol=1e-12, atol=1e-9
    )


def test_bytes_that_leave_the_node_are_a_part_of_those_that_leave_the_rank():
    load = np.random.default_rng(1).integers(0, 1000, (5, 8))
    for nodes in (1, 2, 4, 8):
        port, node = MODEL.exchange_bytes(load), MODEL.exchange_bytes(load, nodes)
        assert (node <= port * (1 + 1e-12)).all()
        MODEL.layer_time_s(load, load * 0, port, node_bytes_LG=node)
    np.testing.assert_array_equal(MODEL.exchange_bytes(load, 1), 0)  # one node: nothing leaves it
    with pytest.raises(ValueError, match="num_nodes=3 does not divide 8 ranks; use"):
        MODEL.exchange_bytes(load, 3)


def test_replica_bytes_by_hand_and_of_every_micro_batch():
    model = replace(MODEL, micro_batches=4)
    # layer 0: expert 0 goes from rank 0 to slots 6 and 8 of rank 2; layer 1: expert 1 from rank 0 to rank 1
    expected = np.array([[2, 0, 2], [1, 1, 0]]) * (1024 + 2048) * 4
    np.testing.assert_array_equal(model.replica_bytes_LG(SLOTS, 3, HOMES), expected)
    np.testing.assert_array_equal(
        model.replica_bytes_LG(SLOTS, 3), expected
    )  # homes are the first slots here
    np.testing.assert_array_equal(
        replace(model, grad_bytes=None).replica_bytes_LG(SLOTS, 3), expected * 2048 // 3072
    )
    # a port carries both ways at once: rank 1 sends one expert and receives another
    np.testing.assert_array_equal(MODEL.replica_bytes_LG([[0, -1, 1, 0, 2, 1]], 3), [[3072, 3072, 3072]])


def test_replicas_on_the_rank_of_their_home_and_empty_slots_are_free():
    np.testing.assert_array_equal(MODEL.replica_bytes_LG([[0, 0, 1, -1]], 2), [[0, 0]])
    np.testing.assert_array_equal(MODEL.replica_bytes_LG([[-1, -1]], 2), [[0, 0]])


@pytest.mark.parametrize("layer", [0, 1])
def test_replica_bytes_are_those_that_the_expert_layer_sends(layer):
    placement = make_placement(SLOTS[layer], 6, 3, HOMES[layer])
    expected = []
    for rank in range(3):
        way = itinerary(placement, rank, placement.replica_slots)
        sent = sum(way.input_splits) - way.input_splits[rank]
        received = sum(way.output_splits) - way.output_splits[rank]
        expected.append(max(sent, received) * (1024 + 2048))
    np.testing.assert_array_equal(MODEL.replica_bytes_LG(SLOTS, 3, HOMES)[layer], expected)


@pytest.mark.parametrize(
    ("slots", "ranks", "homes", "words"),
    [
        (SLOTS, 2, HOMES, "9 slots are not a multiple of 2 ranks; use 8 or 10"),
        (SLOTS * 1.0, 3, None, "slots_LS is float64"),
        (SLOTS, 3, HOMES[:, :5], "slots_LS has expert 5, home_slot_LE only 5 experts"),
        (SLOTS, 3, HOMES[:1], "home_slot_LE has 1 layers instead of 2"),
        (SLOTS, 3, HOMES[:, ::-1], "slot 5 is the home of expert 0 and holds 5"),
    ],
)
def test_placements_that_fit_no_ranks_or_homes_are_refused(slots, ranks, homes, words):
    with pytest.raises(ValueError, match=words):
        MODEL.replica_bytes_LG(slots, ranks, homes)


def test_in_serving_replicas_cost_once_and_in_training_every_micro_batch():
    assert (SERVING.replica_bytes_LG(SLOTS, 3, HOMES) == 0).all()
    assert SERVING.move_s(3) == 3 * 1024 / 4096
    assert MODEL.move_s(3) == 3 * 1024 / 4096  # the time of one fetch each, so that plans stay quiet
    assert replace(MODEL, move_price_s=0.0).move_s(3) == 0.0  # nothing is moved in truth
    np.testing.assert_array_equal(replace(MODEL, move_price_s=2.0).move_s(np.array([0, 1, 5])), [0, 2, 10])
    assert MODEL.break_even_rows() == (1024 + 2048) / 4096 * 1024
    assert SERVING.break_even_rows() == 2.0**-4 * 1024  # the weights are read, not sent
    with pytest.raises(ValueError, match="num_moves=-1 must be 0 or more"):
        MODEL.move_s(-1)


def test_a_replica_pays_from_its_break_even_rows_on():
    ready = replace(MODEL, active_s=0.0)
    rows = ready.break_even_rows()
    replica = np.array([[3072.0, 3072.0]])
    alone = ready.layer_time_s([[4096, 0]], [[1, 1]])
    for taken, pays in ((rows - 1, False), (rows + 1, True)):
        shared = ready.layer_time_s([[4096 - taken, taken]], [[1, 1]], None, replica)
        assert bool(shared < alone) is pays


def test_prices_from_sizes_follow_the_formulas_of_a_swiglu_expert():
    sizes = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "bandwidth_bytes_per_s": 1e9}
    trained = CostModel.from_sizes(512, 256, grad_bytes_per_element=4, micro_batches=3, **sizes)
    weights = 3 * 512 * 256
    assert trained.row_s == pytest.approx(6 * weights / 1e12, rel=1e-12)
    assert trained.active_s == pytest.approx(3 * 2 * weights / 1e11, rel=1e-12)
    assert (trained.row_bytes, trained.expert_bytes, trained.grad_bytes) == (1024, 2 * weights, 4 * weights)
    assert (trained.trained, trained.micro_batches) == (True, 3)
    # (b + b_grad) / 6 * flops / bandwidth, whatever the sizes
    assert trained.break_even_rows() == pytest.approx((2 + 4) / 6 * 1e12 / 1e9, rel=1e-12)
    served = CostModel.from_sizes(512, 256, trained=False, num_matrices=2, **sizes)
    assert served.row_s == pytest.approx(2 * 2 * 512 * 256 / 1e12, rel=1e-12)
    assert served.active_s == pytest.approx(2 * 2 * 512 * 256 / 1e11, rel=1e-12)
    with pytest.raises(ValueError, match="ffn=0 must be finite and above 0"):
        CostModel.from_sizes(512, 0, **sizes)
    with pytest.raises(ValueError, match="flops_per_s=inf must be finite"):
        CostModel.from_sizes(512, 256, **(sizes | {"flops_per_s": float("inf")}))


@pytest.mark.parametrize(("machine", "rows"), [("nvlink", 1000), ("infiniband", 8000), ("gloo", 100)])
def test_machines_have_the_break_even_rows_that_are_known_of_them(machine, rows):
    # round figures: within a tenth
    for sizes in ((4096, 1024), (64, 96)):
        assert CostModel.of_machine(machine, *sizes).break_even_rows() == pytest.approx(rows, rel=0.1)
    served = CostModel.of_machine(machine, 4096, 1024, trained=False, bandwidth_bytes_per_s=7.0)
    assert served.bandwidth_bytes_per_s == 7.0
    assert served.solve_s > 0
    assert not served.trained


def test_an_unknown_machine_is_refused_with_those_that_are_known():
    with pytest.raises(
        ValueError, match="machine='abacus' is not known; use one of nvlink, infiniband, gloo"
    ):
        CostModel.of_machine("abacus", 8, 8)
    assert list(MACHINES) == ["nvlink", "infiniband", "gloo"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_s": 0.0}, "row_s=0.0 must be finite and above 0"),
        ({"row_s": float("nan")}, "row_s=nan must be finite and above 0"),
        ({"active_s": -1.0}, "active_s=-1.0 must be finite and 0 or more"),
        ({"expert_bytes": float("inf")}, "expert_bytes=inf must be finite"),
        ({"grad_bytes": -1.0}, "grad_bytes=-1.0"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s=0.0 must be finite and above 0"),
        ({"node_bandwidth_bytes_per_s": 0.0}, "node_bandwidth_bytes_per_s=0.0 must be finite and above 0"),
        ({"overlap_frac": 1.1}, "overlap_frac=1.1 is a share"),
        ({"micro_batches": 0}, "micro_batches=0 must be an integer of at least 1"),
        ({"micro_batches": 1.5}, "micro_batches=1.5 must be an integer"),
        ({"move_price_s": -1.0}, "move_price_s=-1.0"),
        ({"solve_s": float("nan")}, "solve_s=nan"),
    ],
)
def test_prices_that_are_none_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(MODEL, **changes)
