"""Balancer: keeps the experts of a mixture-of-experts model evenly loaded, from counts alone.

Knows no torch and no model: counts go in, placements and biases come out. Importing it loads numpy only; what
needs more (TensorBoard, numba, scipy) imports it on use. So this folder can be copied into other code.
"""

from balancer.dashboard import Dashboard, JsonlSink, load_heatmap, read_jsonl, training_layout
from balancer.metrics import (
    balancedness,
    dead_experts,
    effective_experts,
    load_shares,
    max_violation,
    mean_balancedness,
    normalized_entropy,
    rank_load,
    sum_balancedness,
    total_variation,
    violation_floor,
)
from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit, SplitResult, balanced_peak, exact_split, split_rows
from balancer.synth import collapse_trace
from balancer.trace import Trace, TraceWriter, check_conservation, load_trace, save_npz

__all__ = [
    "Dashboard",
    "ExactSplit",
    "JsonlSink",
    "SplitResult",
    "Trace",
    "TraceWriter",
    "balanced_peak",
    "balancedness",
    "check_conservation",
    "collapse_trace",
    "dead_experts",
    "effective_experts",
    "exact_split",
    "fill_spare_slots",
    "load_heatmap",
    "load_shares",
    "load_trace",
    "max_violation",
    "mean_balancedness",
    "normalized_entropy",
    "rank_load",
    "read_jsonl",
    "save_npz",
    "split_rows",
    "sum_balancedness",
    "total_variation",
    "training_layout",
    "violation_floor",
]
