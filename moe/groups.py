"""Groups: topology -> the process groups of this rank, created in one fixed order on every rank."""

from dataclasses import dataclass

import torch.distributed as dist

from moe.exchange import DistExchange, Exchange, SoloExchange
from moe.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """This rank's ends: `ep` for its experts' traffic, `edp` to the ranks that hold the same experts."""

    ep: Exchange
    edp: Exchange


def make_groups(topology: Topology) -> Groups:
    """Create all groups of the grid and return this rank's.

    Collective: every rank of the job calls it, after torch.distributed was initialised (a world of one needs
    no initialisation).   Raises ValueError where the job's size is not the topology's.
    """
    if topology.world_size == 1:
        return Groups(ep=SoloExchange(), edp=SoloExchange())
    if dist.get_world_size() != topology.world_size:
        raise ValueError(
            f"topology.world_size={topology.world_size} but the job has {dist.get_world_size()} ranks"
        )
    grid = topology.grid()
    ep = _one_of([row.tolist() for row in grid], topology)
    edp = _one_of([column.tolist() for column in grid.T], topology)
    return Groups(ep=ep, edp=edp)


def _one_of(rank_lists: list[list[int]], topology: Topology) -> Exchange:
    """Create every group of the list, on every rank and in the same order; return the one with this rank."""
    mine: Exchange = SoloExchange()
    for ranks in rank_lists:
        if len(ranks) == 1:
            continue
        group = None if len(ranks) == topology.world_size else dist.new_group(ranks)
        if topology.rank in ranks:
            assert not isinstance(group, int), "this rank is a member of its group"
            mine = DistExchange(group)
    return mine
