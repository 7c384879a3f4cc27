"""make_groups: every rank gets its own row and column of the grid, whatever the grid."""

import pytest
import torch

from moe import Groups, SoloExchange, Topology, make_groups
from moe.testing import run_ranks

GRIDS = (1, 2, 4)


def see_groups(rank, world):
    """For every ep_size: who is in my groups, by asking them; then the error for a wrong world."""
    seen = []
    for ep_size in GRIDS:
        topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
        groups = make_groups(topology)
        me = torch.tensor([rank])
        ends = (groups.ep, groups.edp)
        seen.append([end.all_gather(me)[:, 0].tolist() for end in ends] + [[end.rank for end in ends]])
    try:
        make_groups(Topology(world_size=2 * world, ep_size=2, rank=rank))
    except ValueError as error:
        seen.append(str(error))
    return seen


@pytest.mark.dist
def test_groups_are_the_grids_rows_and_columns():
    for rank, seen in enumerate(run_ranks(see_groups, 4)):
        for ep_size, (ep, edp, places) in zip(GRIDS, seen[:-1], strict=True):
            topology = Topology(world_size=4, ep_size=ep_size, rank=rank)
            assert ep == topology.ep_ranks().tolist()
            assert edp == topology.edp_ranks().tolist()
            assert places == [topology.ep_rank, topology.edp_rank]
        assert seen[-1] == "topology.world_size=8 but the job has 4 ranks"


def test_a_world_of_one_needs_no_process_group():
    groups = make_groups(Topology())
    assert isinstance(groups, Groups)
    assert isinstance(groups.ep, SoloExchange) and isinstance(groups.edp, SoloExchange)
