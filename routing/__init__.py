"""Routing: which experts a token goes to, and with what weight. Knows no experts, no ranks, no balancer.

x_TD, token_mask_T -> Router -> Routing. Start with `router.py`.
"""

from routing import losses
from routing.bias import ExpertBias
from routing.config import RouterConfig
from routing.forced import ForcedSelection
from routing.record import Routing
from routing.router import Router

__all__ = ["ExpertBias", "ForcedSelection", "Router", "RouterConfig", "Routing", "losses"]
