"""Balancer: keeps the experts of a mixture-of-experts model evenly loaded, from counts alone.

Knows no torch and no model: counts go in, placements and biases come out. Importing it loads numpy only; what
needs more (TensorBoard, numba, scipy) imports it on use. So this folder can be copied into other code.
"""

from balancer.bias import LAWS, init_bias, law, switch_law, update_bias
from balancer.bias_record import Measurement, read_measurement
from balancer.bound import peak_bound
from balancer.connect import connected_placement, default_placement
from balancer.control_config import ControlConfig
from balancer.cost import CostModel
from balancer.dashboard import Dashboard, JsonlSink, load_heatmap, read_jsonl, training_layout
from balancer.dispersion import (
    current_dispersion,
    estimate_dispersion,
    init_dispersion,
    update_dispersion,
)
from balancer.even import even_placement, even_repair
from balancer.forecast import FORECASTERS, forecaster
from balancer.forecast_record import REGIMES, Forecast, Forecaster, copy_state
from balancer.loop import BalancerLoop, Report
from balancer.metrics import (
    balancedness,
    dead_experts,
    effective_experts,
    load_shares,
    max_violation,
    mean_balancedness,
    moved_slots,
    normalized_entropy,
    rank_load,
    sum_balancedness,
    total_variation,
    violation_floor,
)
from balancer.monitor import CollapseMonitor, MonitorConfig, Verdict
from balancer.moves import relabel
from balancer.packing import rebalance_experts
from balancer.placement import placement_controller
from balancer.placement_config import PlacementConfig
from balancer.plan import Move, Plan, check_plan, plan_from_dict, plan_to_dict
from balancer.planning import plan_placement
from balancer.scenarios import Scenarios, draw_scenarios
from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit, SplitResult, balanced_peak, exact_split, split_rows
from balancer.synth import collapse_trace
from balancer.synth_kinds import synth_trace, true_shares
from balancer.trace import Trace, TraceWriter, check_conservation, load_trace, save_npz

__all__ = [
    "FORECASTERS",
    "LAWS",
    "REGIMES",
    "BalancerLoop",
    "CollapseMonitor",
    "ControlConfig",
    "CostModel",
    "Dashboard",
    "ExactSplit",
    "Forecast",
    "Forecaster",
    "JsonlSink",
    "Measurement",
    "MonitorConfig",
    "Move",
    "PlacementConfig",
    "Plan",
    "Report",
    "Scenarios",
    "SplitResult",
    "Trace",
    "TraceWriter",
    "Verdict",
    "balanced_peak",
    "balancedness",
    "check_conservation",
    "check_plan",
    "collapse_trace",
    "connected_placement",
    "copy_state",
    "current_dispersion",
    "dead_experts",
    "default_placement",
    "draw_scenarios",
    "effective_experts",
    "estimate_dispersion",
    "even_placement",
    "even_repair",
    "exact_split",
    "fill_spare_slots",
    "forecaster",
    "init_bias",
    "init_dispersion",
    "law",
    "load_heatmap",
    "load_shares",
    "load_trace",
    "max_violation",
    "mean_balancedness",
    "moved_slots",
    "normalized_entropy",
    "peak_bound",
    "placement_controller",
    "plan_from_dict",
    "plan_placement",
    "plan_to_dict",
    "rank_load",
    "read_jsonl",
    "read_measurement",
    "rebalance_experts",
    "relabel",
    "save_npz",
    "split_rows",
    "sum_balancedness",
    "switch_law",
    "synth_trace",
    "total_variation",
    "training_layout",
    "true_shares",
    "update_bias",
    "update_dispersion",
    "violation_floor",
]
