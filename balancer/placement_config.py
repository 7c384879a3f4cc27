"""Placement settings: what the controller of balancer/placement.py places, how it foresees, when it acts."""

import math
from dataclasses import dataclass, field

from balancer.cost import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """What the controller places, how it foresees, and when it acts. Raises ValueError for a bad value."""

    num_ranks: int = field(metadata={"help": "ranks P; rank g has slots g*S/P to (g+1)*S/P - 1"})
    num_slots: int = field(metadata={"help": "slots over all ranks S, a multiple of P, E or more"})
    cost: CostModel = field(metadata={"help": "prices of rows, weights and moves (seconds)"})
    sample_steps: int = field(default=1, metadata={"help": "training steps between samples"})
    every_steps: int = field(default=1, metadata={"help": "fewest training steps between two plans"})
    horizon_steps: int = field(
        default=500, metadata={"help": "training steps that a plan is taken to last at most"}
    )
    delay_steps: int = field(
        default=0, metadata={"help": "training steps from a plan's last sample to its start"}
    )
    num_nodes: int = field(default=1, metadata={"help": "nodes M, a divisor of P"})
    num_groups: int = field(
        default=0, metadata={"help": "groups of experts that stay on one node; 0 = experts go anywhere"}
    )
    fixed_homes: bool = field(default=True, metadata={"help": "experts keep their home slot (training)"})
    speed_P: tuple[float, ...] | None = field(default=None, metadata={"help": "relative speed of each rank"})
    most_experts_P: tuple[int, ...] | None = field(
        default=None, metadata={"help": "experts that each rank's memory holds; None = all its slots"}
    )
    forecaster: str = field(default="regime", metadata={"help": "name of a forecaster"})
    num_scenarios: int = field(
        default=32, metadata={"help": "drawn scenarios for the search, and as many to judge by; 0 = forecast"}
    )
    beta: float = field(default=0.1, metadata={"help": "weight of the worst scenarios; 0 = mean alone"})
    tail: float = field(default=0.1, metadata={"help": "share of the scenarios that are the worst"})
    tolerance: float = field(default=1e-3, metadata={"help": "a layer this near to even is left alone"})
    confidence: float = field(default=0.9, metadata={"help": "that a gain is one, in (0.5, 1)"})
    margin: float = field(
        default=0.25,
        metadata={"help": "by how much a sure gain must be more than its cost, as a share of it"},
    )
    theta: float = field(default=1.0, metadata={"help": "missed gain over cost at which moves are made"})
    decay: float = field(
        default=0.0, metadata={"help": "share of an imbalance that a bias loop takes away a step"}
    )
    most_scores: int = field(default=2000, metadata={"help": "changes scored in a layer; bounds the time"})
    depth: int = field(
        default=1, metadata={"help": "changes of a layer made though none pays alone, if they pay together"}
    )
    seed: int = field(default=0, metadata={"help": "of the scenarios"})
    compiled: bool = field(default=True, metadata={"help": "False: the twins, plain Python"})

    def __post_init__(self) -> None:
        for name, least in (
            ("num_ranks", 1), ("num_slots", 1), ("sample_steps", 1), ("every_steps", 1), ("horizon_steps", 1),
            ("delay_steps", 0), ("num_scenarios", 0), ("most_scores", 0), ("depth", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be {least} or more")
        if self.horizon_steps < self.every_steps:
            raise ValueError(
                f"horizon_steps={self.horizon_steps} is less than every_steps={self.every_steps}, for which "
                "a plan stays; give as many"
            )
        if self.num_scenarios == 1:
            raise ValueError("num_scenarios=1 does not say how sure a gain is; give 0 (the forecast) or 2 up")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must lie between 0.5 and 1; 0.9 is usual")
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise ValueError(f"theta={self.theta} must be above 0 and finite; 1 is ski rental's")
        if not (self.margin >= 0 and math.isfinite(self.margin)):
            raise ValueError(f"margin={self.margin} must be 0 or more and finite; 0.25 is a good value")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be 0 (no bias loop) or more and below 1")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance} must be 0 or more; 0.001 is a good value")

    @property
    def plan_steps(self) -> int:
        """Training steps from a sample to the next at which a plan may be made."""
        return -(-self.every_steps // self.sample_steps) * self.sample_steps
