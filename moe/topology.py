"""Topology: which rank stands where on the grid (expert data parallel, expert parallel). Integers only.

World 8 with ep_size 4; a row is an EP group, a column an expert-data-parallel (EDP) group:

    ep axis ->    0  1  2  3      experts 0..E/4-1 live on ranks 0 and 4,
    edp 0         0  1  2  3      the next E/4 on ranks 1 and 5, ...
    edp 1         4  5  6  7      (the order in which DeepSpeed lays out its groups)
"""

from dataclasses import dataclass

import numpy as np


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The rank grid of one job.

    world_size: ranks of the job;  ep_size: ranks P that share one set of experts;  rank: this one.
    Raises ValueError where ep_size does not divide the world.

    >>> Topology(world_size=8, ep_size=4, rank=6).ep_ranks().tolist()
    [4, 5, 6, 7]
    >>> Topology(world_size=8, ep_size=4, rank=6).edp_ranks().tolist()
    [2, 6]
    """

    world_size: int = 1
    ep_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is out of 0..{self.world_size - 1} (world_size)")
        if self.ep_size < 1 or self.world_size % self.ep_size:
            raise ValueError(
                f"ep_size={self.ep_size} does not divide world_size={self.world_size}; use one of "
                f"{divisors(self.world_size)}"
            )

    @property
    def edp_size(self) -> int:
        """Copies of every expert that are trained in data parallel."""
        return self.world_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        """This rank's place in its EP group."""
        return self.rank % self.ep_size

    @property
    def edp_rank(self) -> int:
        """This rank's place in its EDP group."""
        return self.rank // self.ep_size

    def grid(self) -> np.ndarray:
        """All ranks, [edp_size, ep_size] int64."""
        return np.arange(self.world_size, dtype=np.int64).reshape(self.edp_size, self.ep_size)

    def ep_ranks(self) -> np.ndarray:
        """Ranks of this rank's EP group, [ep_size] int64."""
        return self.grid()[self.edp_rank]

    def edp_ranks(self) -> np.ndarray:
        """Ranks of this rank's EDP group, [edp_size] int64."""
        return self.grid()[:, self.ep_rank]

    def home_experts(self, num_experts: int) -> np.ndarray:
        """Ids of the logical experts that live on this rank, [E / P] int64, contiguous and ascending.

        Raises ValueError where the experts do not divide, with the nearest numbers that do.
        """
        check_experts(num_experts, self.ep_size)
        local = num_experts // self.ep_size
        return np.arange(self.ep_rank * local, (self.ep_rank + 1) * local, dtype=np.int64)


def check_experts(num_experts: int, ep_size: int) -> None:
    """Raise ValueError unless every rank of an EP group gets the same number of experts."""
    if num_experts % ep_size == 0:
        return
    below, above = num_experts // ep_size * ep_size, -(-num_experts // ep_size) * ep_size
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ValueError(
        f"num_experts={num_experts} is not divisible by ep_size={ep_size}; use {nearest} experts, or an "
        f"ep_size out of {divisors(num_experts)}"
    )
