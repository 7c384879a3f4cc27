"""Cost: what a placement costs in seconds, for planners that weigh a better balance against what it takes.

Beside the planners: loads and placements in, seconds out; it measures nothing itself. The time of one layer
in one training step (or one batch in serving), all its micro-batches together, is

    max over the ranks of   row_s * rows / speed                        rows through the experts
                          + active_s * activated slots / speed          weights read, once a micro-batch
                          + exchange not hidden behind those two        dispatch and combine
                          + weights fetched, gradients sent back        replicas, in training only

Rows in units of one routed copy, so top-k is in the loads. All of it is a model: ratios of plans are to be
trusted further than seconds; measure a machine's own figures and pass them to `CostModel`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.machines import MACHINES
from balancer.metrics import checked_load
from balancer.placement_checks import check_homes, slot_table
from balancer.split_checks import check_ranks, check_slots, nearest_divisor, speeds

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_FORWARD, _BACKWARD = 2, 4  # operations for each weight and row: multiply and add; two products of that size


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Prices of one expert layer; see the module for the sum that they make, `from_sizes` to compute them.

    Raises ValueError for a price that is not finite, negative, or 0 where something is divided by it.

    >>> prices = {"row_bytes": 1e4, "expert_bytes": 4e7, "bandwidth_bytes_per_s": 4e11}
    >>> CostModel(row_s=1e-6, active_s=2e-5, **prices).layer_time_s([[100, 300]], [[4, 4]])
    array([0.00038])
    """

    row_s: float = field(
        metadata={"help": "one row through one expert on a rank of speed 1 (s); with the backward if trained"}
    )
    active_s: float = field(
        metadata={
            "help": "each slot that has rows in a micro-batch (s): its weights are read; decode is this"
        }
    )
    row_bytes: float = field(metadata={"help": "one row, one way (bytes): width times bytes of an element"})
    expert_bytes: float = field(metadata={"help": "weights of one expert (bytes)"})
    bandwidth_bytes_per_s: float = field(
        metadata={"help": "what the port of one rank carries each way (bytes/s), both ways at once"}
    )
    node_bandwidth_bytes_per_s: float | None = field(
        default=None,
        metadata={"help": "the same to other nodes, a rank's share of it (bytes/s); None = as within a node"},
    )
    grad_bytes: float | None = field(
        default=None,
        metadata={"help": "gradient of one expert on its way home (bytes); None = as many as its weights"},
    )
    overlap_frac: float = field(
        default=0.0,
        metadata={
            "help": "share of the exchange that can hide behind compute, 0 to 1; 0 = one after the other"
        },
    )
    micro_batches: int = field(
        default=1, metadata={"help": "micro-batches of a step: each fetches replicas and reads weights anew"}
    )
    trained: bool = field(
        default=True,
        metadata={
            "help": "True: replicas are fetched for every micro-batch and their gradients sent back, a "
            "changed replica costs nothing more; False: serving, weights travel once, when they move"
        },
    )
    move_price_s: float | None = field(
        default=None,
        metadata={
            "help": "one move (s); None = expert_bytes / bandwidth: in serving the transfer itself, in "
            "training the time of one fetch, a price that keeps plans quiet"
        },
    )
    solve_s: float = field(
        default=0.0, metadata={"help": "one exact split of one layer (s); 1e-5 for 256 experts on 32 ranks"}
    )

    def __post_init__(self) -> None:
        above = ("row_s", "bandwidth_bytes_per_s", "node_bandwidth_bytes_per_s")
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and name in above):
                least = "above 0" if name in above else "0 or more"
                raise ValueError(f"{name}={value} must be finite and {least}")
        if self.overlap_frac > 1:
            raise ValueError(f"overlap_frac={self.overlap_frac} is a share; it must lie between 0 and 1")
        if self.micro_batches < 1 or self.micro_batches != int(self.micro_batches):
            raise ValueError(f"micro_batches={self.micro_batches} must be an integer of at least 1")

    @classmethod
    def from_sizes(
        cls,
        hidden: int,
        ffn: int,
        *,
        flops_per_s: float,
        memory_bytes_per_s: float,
        bandwidth_bytes_per_s: float,
        bytes_per_element: int = 2,
        grad_bytes_per_element: int | None = None,
        num_matrices: int = 3,
        trained: bool = True,
        **more: Any,
    ) -> "CostModel":
        """Prices from the sizes of an expert and what a rank does in a second.

        hidden: D;  ffn: F;  num_matrices: D x F matrices of an expert, 3 for SwiGLU (gate, up, down), 2 for
        GELU;  bytes_per_element: of weights and rows;  grad_bytes_per_element: of gradients that are sent
        back, None = the same;  flops_per_s, memory_bytes_per_s, bandwidth_bytes_per_s: of one rank, in
        practice rather than on paper;  more: other fields of `CostModel`. With W = num_matrices * D * F:

            row_s        = 2 W / flops_per_s in serving, 6 W / flops_per_s trained (backward 4 W: the
                           gradients of the rows and of the weights)
            active_s     = W * bytes_per_element / memory_bytes_per_s, trained three times that
            row_bytes    = D * bytes_per_element
            expert_bytes = W * bytes_per_element;  grad_bytes = W * grad_bytes_per_element

        Raises ValueError for a size below 1 or a rate that is not above 0.
        """
        rates = {"flops_per_s": flops_per_s, "memory_bytes_per_s": memory_bytes_per_s}
        sizes = {
            "hidden": hidden,
            "ffn": ffn,
            "num_matrices": num_matrices,
            "bytes_per_element": bytes_per_element,
        }
        for name, value in (rates | sizes).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be finite and above 0")
        weights = num_matrices * hidden * ffn
        passes = (_FORWARD + _BACKWARD) // _FORWARD if trained else 1
        grad_bytes = bytes_per_element if grad_bytes_per_element is None else grad_bytes_per_element
        return cls(
            row_s=passes * _FORWARD * weights / flops_per_s,
            active_s=passes * weights * bytes_per_element / memory_bytes_per_s,
            row_bytes=float(hidden * bytes_per_element),
            expert_bytes=float(weights * bytes_per_element),
            grad_bytes=float(weights * grad_bytes),
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            trained=trained,
            **more,
        )

    @classmethod
    def of_machine(
        cls, machine: str, hidden: int, ffn: int, *, trained: bool = True, **more: Any
    ) -> "CostModel":
        """`from_sizes` with the round figures of a kind of machine.

        machine: nvlink, infiniband or gloo (`MACHINES`);  hidden, ffn: D and F of a SwiGLU expert;  more:
        other arguments of `from_sizes`, which win. Raises ValueError for another machine.

        >>> [round(CostModel.of_machine(name, 4096, 1024).break_even_rows()) for name in MACHINES]
        [1000, 8000, 107]
        """
        if machine not in MACHINES:
            raise ValueError(f"machine={machine!r} is not known; use one of {', '.join(MACHINES)}")
        figures: dict[str, Any] = asdict(MACHINES[machine])
        figures.update({"solve_s": 1e-5}, **more)
        return cls.from_sizes(hidden, ffn, trained=trained, **figures)

    def layer_time_s(
        self,
        load_LG: ArrayLike,
        active_LG: ArrayLike,
        port_bytes_LG: ArrayLike | None = None,
        replica_bytes_LG: ArrayLike | None = None,
        speed_G: Sequence[float] | Floats | None = None,
        *,
        node_bytes_LG: ArrayLike | None = None,
        solved: bool = False,
    ) -> Floats:
        """Seconds of each layer in one step: the slowest rank's.

        load_LG: [L, P] rows of the step, all micro-batches together;  active_LG: [L, P] slots with rows in a
        micro-batch;  port_bytes_LG: [L, P] bytes of the step through each port (`exchange_bytes`), None = not
        counted;  replica_bytes_LG: the same for replicas (`replica_bytes_LG`);  speed_G: [P] relative speed
        of computing, None = 1;  node_bytes_LG: the part of port_bytes_LG that leaves the node;  solved: add
        solve_s for every micro-batch.

        Returns [L] float64, 0 for a layer without rows, slots and bytes. Of the exchange at most the share
        overlap_frac is hidden, and no more than the rank computes; replica traffic is not hidden. The ranks
        wait for one another once, at the end of a layer: a lower bound where they do at every exchange.
        Raises ValueError for a negative or non-finite entry, unlike shapes, or speeds that are not above 0.
        """
        load = _per_rank("load_LG", load_LG, None)
        active = _per_rank("active_LG", active_LG, load.shape)
        speed = speeds(speed_G)
        check_ranks(speed, np.empty(0, np.int64), load.shape[1])
        rows_s = load * self.row_s + active * (self.active_s * self.micro_batches)
        compute_s = rows_s / speed if speed.size else rows_s
        exchange_s = self._exchange_s(port_bytes_LG, node_bytes_LG, load.shape)
        hidden_s = np.minimum(exchange_s * self.overlap_frac, compute_s)
        replica = _per_rank("replica_bytes_LG", replica_bytes_LG, load.shape)
        total_s = compute_s + (exchange_s - hidden_s) + replica / self.bandwidth_bytes_per_s
        return total_s.max(axis=1) + (self.solve_s * self.micro_batches if solved else 0.0)

    def _exchange_s(
        self, port_bytes_LG: ArrayLike | None, node_bytes_LG: ArrayLike | None, shape: tuple[int, ...]
    ) -> Floats:
        """Seconds that each port is busy; those to other nodes after the others."""
        port = _per_rank("port_bytes_LG", port_bytes_LG, shape)
        node = _per_rank("node_bytes_LG", node_bytes_LG, shape)
        more = node > port * (1 + 1e-9)
        if more.any():
            layer, rank = np.argwhere(more)[0].tolist()
            raise ValueError(
                f"node_bytes_LG[{layer}, {rank}]={node[layer, rank]} is more than port_bytes_LG there, "
                f"{port[layer, rank]}; bytes that leave the node are a part of those"
            )
        node_bandwidth = self.node_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        return np.maximum(port - node, 0.0) / self.bandwidth_bytes_per_s + node / node_bandwidth

    def exchange_bytes(self, load_LG: ArrayLike, num_nodes: int | None = None) -> Floats:
        """Bytes of dispatch and combine that the port of each rank carries in a step, sources uniform.

        load_LG: [L, P] rows of the step;  num_nodes: None = all bytes that leave a rank; M = only those that
        leave its node (`node_bytes_LG`).   Returns [L, P] float64.

        Every rank is the source of 1/P of every rank's rows. In dispatch a rank receives load * (1 - 1/P)
        rows and sends (total - load) / P; in combine the same the other way round; a port carries both ways
        at once, so that each takes the larger of the two. Two exchanges in serving, four trained (forward
        and backward). Raises ValueError for a bad load, or a number of nodes that does not divide the ranks.
        """
        load = _per_rank("load_LG", load_LG, None)
        num_ranks = load.shape[1]
        if num_nodes is not None and (num_nodes < 1 or num_ranks % num_nodes):
            nearest = nearest_divisor(num_ranks, num_nodes)
            raise ValueError(f"num_nodes={num_nodes} does not divide {num_ranks} ranks; use {nearest}")
        near = 1 if num_nodes is None else num_ranks // num_nodes
        own = load.reshape(len(load), -1, near).sum(axis=2).repeat(near, axis=1)
        received = load * (1 - near / num_ranks)
        sent = np.maximum(load.sum(axis=1, keepdims=True) - own, 0.0) / num_ranks
        return np.maximum(received, sent) * (self.row_bytes * (4 if self.trained else 2))

    def replica_bytes_LG(
        self, slots_LS: ArrayLike, num_ranks: int, home_slot_LE: ArrayLike | None = None
    ) -> Floats:
        """Bytes that the port of each rank carries in a step for replicas: weights there, gradients back.

        slots_LS: [L, S] integers, expert of each slot, -1 = empty;  num_ranks: P, a divisor of S;
        home_slot_LE: [L, E] integers, slot that owns each expert; None = its first slot.   Returns [L, P]
        float64: 0 in serving. Homes send and replicas' ranks receive, back the other way round; both ways at
        once, so each takes the larger of the two. All replicas are fetched for every micro-batch, as with a
        prefetch; one on its home's own rank is free. Raises ValueError for sizes that do not fit, or homes
        that hold another expert.
        """
        slots = slot_table("slots_LS", slots_LS)
        check_slots(slots.shape[1], num_ranks)
        num_layers, local = len(slots), slots.shape[1] // num_ranks
        if not self.trained:
            return np.zeros((num_layers, num_ranks))
        owner_LE = _homes(slots, home_slot_LE) // local
        layer_n, slot_n = np.nonzero(slots >= 0)
        to_n, from_n = slot_n // local, owner_LE[layer_n, slots[layer_n, slot_n]]
        away = to_n != from_n
        received, sent = (
            np.bincount((layer_n * num_ranks + rank_n)[away], minlength=num_layers * num_ranks)
            for rank_n in (to_n, from_n)
        )
        fetched_LG = np.maximum(received, sent).reshape(num_layers, num_ranks)
        return fetched_LG * (self._fetch_bytes() * self.micro_batches)

    @overload
    def move_s(self, num_moves: int) -> float: ...
    @overload
    def move_s(self, num_moves: NDArray[Any]) -> Floats: ...
    def move_s(self, num_moves: int | NDArray[Any]) -> float | Floats:
        """Seconds that moves cost, one after the other: a number, or an array of one for each layer.

        Raises ValueError for a negative number.
        """
        if np.any(np.asarray(num_moves) < 0):
            raise ValueError(f"num_moves={num_moves} must be 0 or more")
        price_s = self.expert_bytes / self.bandwidth_bytes_per_s
        return num_moves * (price_s if self.move_price_s is None else self.move_price_s)

    def fetch_s(self) -> float:
        """Seconds of a step that a port needs for one replica: its weights and gradient, every micro-batch.

        0 in serving, where replicas stay.
        """
        if not self.trained:
            return 0.0
        return self._fetch_bytes() * self.micro_batches / self.bandwidth_bytes_per_s

    def break_even_rows(self) -> float:
        """Rows of a micro-batch that a replica must take off the hottest rank to pay for itself.

        Trained: the time of fetching its weights and sending their gradient back, in rows: (b + b_grad) / 6 *
        flops / bandwidth, whatever the sizes of the expert. Serving: nothing travels; the time of reading its
        weights, in rows.
        """
        if self.trained:
            return self._fetch_bytes() / self.bandwidth_bytes_per_s / self.row_s
        return self.active_s / self.row_s

    def _fetch_bytes(self) -> float:
        """Bytes of one replica in one micro-batch: its weights, and their gradient back."""
        return self.expert_bytes + (self.expert_bytes if self.grad_bytes is None else self.grad_bytes)


def _per_rank(name: str, given: ArrayLike | None, shape: tuple[int, ...] | None) -> Floats:
    """The array as [L, P] float64, checked; zeros for None."""
    if given is None and shape is not None:
        return np.zeros(shape)
    array = checked_load(np.asarray(given), name)
    if array.ndim != 2 or (shape is not None and array.shape != shape):
        raise ValueError(
            f"{name} has shape {array.shape}; expected [L, P]{'' if shape is None else f' = {shape}'}"
        )
    return array


def _homes(slots_LS: Integers, home_slot_LE: ArrayLike | None) -> Integers:
    """Home slot of each expert [L, E], checked, or the first slot of each; S for experts without one."""
    num_layers, num_slots = slots_LS.shape
    if home_slot_LE is None:
        homes = np.full((num_layers, max(int(slots_LS.max()) + 1, 1)), num_slots, np.int64)
        layer_n, slot_n = np.nonzero(slots_LS >= 0)
        np.minimum.at(homes, (layer_n, slots_LS[layer_n, slot_n]), slot_n)
        return homes
    homes = slot_table("home_slot_LE", home_slot_LE)
    if slots_LS.max() >= homes.shape[1]:
        raise ValueError(f"slots_LS has expert {slots_LS.max()}, home_slot_LE only {homes.shape[1]} experts")
    check_homes(slots_LS, homes)
    return homes
