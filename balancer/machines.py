"""Machines: round figures of a few kinds, for costs where nobody has measured (`balancer/cost.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Round figures of a kind of machine: what one rank computes and carries in a second, in practice."""

    flops_per_s: float
    memory_bytes_per_s: float
    bandwidth_bytes_per_s: float
    node_bandwidth_bytes_per_s: float | None
    bytes_per_element: int
    grad_bytes_per_element: int


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        # a large GPU of 2023: 40 % of a thousand bf16 TFLOP/s, 3 TB/s of memory; eight of them joined by
        # switches at 400 GB/s each way
        "nvlink": Machine(
            flops_per_s=4e14,
            memory_bytes_per_s=3e12,
            bandwidth_bytes_per_s=4e11,
            node_bandwidth_bytes_per_s=5e10,
            bytes_per_element=2,
            grad_bytes_per_element=4,
        ),
        # the same GPU with every rank behind a network card of 400 Gbit/s
        "infiniband": Machine(
            flops_per_s=4e14,
            memory_bytes_per_s=3e12,
            bandwidth_bytes_per_s=5e10,
            node_bandwidth_bytes_per_s=None,
            bytes_per_element=2,
            grad_bytes_per_element=4,
        ),
        # a process on a few CPU cores: a tenth of a TFLOP/s in float32, 20 GB/s of memory, 10 Gbit/s
        "gloo": Machine(
            flops_per_s=1e11,
            memory_bytes_per_s=2e10,
            bandwidth_bytes_per_s=1.25e9,
            node_bandwidth_bytes_per_s=None,
            bytes_per_element=4,
            grad_bytes_per_element=4,
        ),
    }
)
