"""Expert-parallel mixture-of-experts layers: dispatch, experts, combine, and what they report.

Start with `layer.py`, then `dispatch.py` and `exchange.py`; `reference.py` says what all of it must equal.

Names are imported on first use: settings can be read and checked without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "DenseMoE": "reference",
    "DistExchange": "exchange",
    "Groups": "groups",
    "LoadMeter": "meter",
    "LoadSample": "meter",
    "LoopbackWorld": "exchange",
    "MoEConfig": "config",
    "MoELayer": "layer",
    "ModelConfig": "config",
    "NonFiniteRouterError": "agreement",
    "Placement": "placement",
    "PlacementMismatchError": "agreement",
    "SoloExchange": "exchange",
    "Topology": "topology",
    "make_groups": "groups",
    "make_placement": "placement",
    "prepare_ddp": "ddp",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"moe.{_MODULES[name]}"), name)
