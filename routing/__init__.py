"""Routing: which experts a token goes to, and with what weight. Knows no experts, no ranks, no balancer.

x_TD, token_mask_T -> Router -> Routing. Start with `router.py`.

Names are imported on first use: settings can be read and checked without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routing import losses
    from routing.bias import ExpertBias
    from routing.config import RouterConfig
    from routing.forced import ForcedSelection
    from routing.record import Routing
    from routing.router import Router

__all__ = ["ExpertBias", "ForcedSelection", "Router", "RouterConfig", "Routing", "losses"]

_MODULES = {
    "ExpertBias": "bias",
    "ForcedSelection": "forced",
    "Router": "router",
    "RouterConfig": "config",
    "Routing": "record",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("routing.losses")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"routing.{_MODULES[name]}"), name)
