"""Topology: the rank grid in integers, and errors that name the numbers that would work."""

import numpy as np
import pytest

from moe import Topology
from moe.topology import check_experts, divisors

WORLDS = [(1, 1), (2, 1), (2, 2), (6, 3), (8, 4), (12, 2)]


def at(world, ep_size):
    return [Topology(world_size=world, ep_size=ep_size, rank=rank) for rank in range(world)]


@pytest.mark.parametrize(("world", "ep_size"), WORLDS)
def test_groups_are_rows_and_columns_of_the_grid(world, ep_size):
    for rank, topology in enumerate(at(world, ep_size)):
        assert topology.edp_size == world // ep_size
        assert topology.grid().shape == (topology.edp_size, ep_size)
        assert topology.grid()[topology.edp_rank, topology.ep_rank] == rank
        assert topology.ep_ranks()[topology.ep_rank] == rank
        assert topology.edp_ranks()[topology.edp_rank] == rank
        assert sorted(topology.grid().reshape(-1).tolist()) == list(range(world))


def test_ep_groups_are_neighbours():
    """An EP group exchanges rows in every layer, so it stands on adjacent ranks."""
    topology = Topology(world_size=6, ep_size=3, rank=4)
    assert topology.ep_ranks().tolist() == [3, 4, 5]
    assert topology.edp_ranks().tolist() == [1, 4]


@pytest.mark.parametrize(("world", "ep_size"), WORLDS)
def test_homes_share_out_every_expert_once_per_ep_group(world, ep_size):
    topologies = at(world, ep_size)
    for group in range(world // ep_size):
        homes = [topologies[group * ep_size + p].home_experts(12) for p in range(ep_size)]
        assert np.concatenate(homes).tolist() == list(range(12))
    for topology in topologies:
        peers = [topologies[rank].home_experts(12).tolist() for rank in topology.edp_ranks()]
        assert peers == [topology.home_experts(12).tolist()] * len(peers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4, "rank": 4}, r"rank=4 is out of 0\.\.3"),
        ({"world_size": 4, "rank": -1}, r"rank=-1 is out of 0\.\.3"),
        ({"world_size": 0}, r"rank=0 is out of 0\.\.-1 \(world_size\)"),
        (
            {"world_size": 6, "ep_size": 4},
            r"ep_size=4 does not divide world_size=6; use one of \[1, 2, 3, 6\]",
        ),
        ({"world_size": 2, "ep_size": 0}, r"ep_size=0 does not divide world_size=2; use one of \[1, 2\]"),
    ],
)
def test_a_grid_that_does_not_exist_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Topology(**changes)


@pytest.mark.parametrize(
    ("experts", "ep_size", "message"),
    [
        (10, 4, r"num_experts=10 is not divisible by ep_size=4; use 8 or 12 experts.*\[1, 2, 5, 10\]"),
        (3, 4, r"num_experts=3 is not divisible by ep_size=4; use 4 experts.*\[1, 3\]"),
    ],
)
def test_experts_that_do_not_divide_name_the_nearest_that_do(experts, ep_size, message):
    with pytest.raises(ValueError, match=message):
        check_experts(experts, ep_size)
    with pytest.raises(ValueError, match=message):
        Topology(world_size=ep_size, ep_size=ep_size).home_experts(experts)


@pytest.mark.parametrize("number", [1, 7, 12])
def test_divisors_are_all_of_them(number):
    assert divisors(number) == [d for d in range(1, number + 1) if (number / d).is_integer()]
