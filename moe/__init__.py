"""Expert-parallel mixture-of-experts layers: dispatch, experts, combine, and what they report.

Start with `layer.py`, then `dispatch.py` and `exchange.py`; `reference.py` says what all of it must equal.
"""

from moe.agreement import NonFiniteRouterError, PlacementMismatchError
from moe.config import ModelConfig, MoEConfig
from moe.ddp import prepare_ddp
from moe.exchange import DistExchange, LoopbackWorld, SoloExchange
from moe.groups import Groups, make_groups
from moe.layer import MoELayer
from moe.meter import LoadMeter, LoadSample
from moe.placement import Placement, make_placement
from moe.reference import DenseMoE
from moe.topology import Topology

__all__ = [
    "DenseMoE",
    "DistExchange",
    "Groups",
    "LoadMeter",
    "LoadSample",
    "LoopbackWorld",
    "MoEConfig",
    "MoELayer",
    "ModelConfig",
    "NonFiniteRouterError",
    "Placement",
    "PlacementMismatchError",
    "SoloExchange",
    "Topology",
    "make_groups",
    "make_placement",
    "prepare_ddp",
]
