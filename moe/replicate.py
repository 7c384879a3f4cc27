"""Replicate: a replica borrows its expert's weights from home for one forward, and sends their gradient back.

    home rank     w1, w2, w3 of an expert ---- one all-to-all-v a layer ---->  the ranks of its replicas
    home's gradients   += sum in float32 <---- one all-to-all-v a layer ----   gradients of the replicas

The experts' feed-forward (slot_loop.py, feed_forward.py) calls `Replicas` so:

    start, [products of the homes], wait, [products of the replicas]                            forward
    [gradients of the replicas], send_back, [gradients of the homes], add_returned              backward

Weights travel while the homes are computed, and so do their gradients. To autograd it is one function of the
home weights; optimizer and engine do not know that replicas exist. A rank without replicas takes part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe.exchange import Exchange, Transfer
from moe.naming import tag
from moe.placement import Placement
from moe.traffic import Volume


@dataclass(frozen=True, kw_only=True, slots=True)
class Itinerary:
    """Which weights travel where, as one rank sees it.

    sent_n: of every expert that is sent, its index among this rank's homes, by destination, then slot;
    input_splits, output_splits: experts that go to, come from each rank;  slot_r: local slots whose weights
    arrive here, by source rank, then slot.
    """

    sent_n: tuple[int, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    slot_r: tuple[int, ...]


def itinerary(placement: Placement, rank: int, replica_slots: np.ndarray) -> Itinerary:
    """The way of some replicas' weights.

    replica_slots: ascending int64 slots of the whole group, the same on every rank.
    """
    num_ranks, local = placement.num_ranks, placement.slots_per_rank
    expert_n = placement.slot_to_expert_S[replica_slots]
    to_n, from_n = replica_slots // local, placement.home_rank_E[expert_n]
    sent = from_n == rank
    arrives = np.flatnonzero(to_n == rank)
    arrives = arrives[np.argsort(from_n[arrives], kind="stable")]
    sent_n = np.searchsorted(placement.home_slots(rank), placement.home_slot_E[expert_n[sent]])
    return Itinerary(
        sent_n=tuple(sent_n.tolist()),
        input_splits=tuple(np.bincount(to_n[sent], minlength=num_ranks).tolist()),
        output_splits=tuple(np.bincount(from_n[arrives], minlength=num_ranks).tolist()),
        slot_r=tuple((replica_slots[arrives] - rank * local).tolist()),
    )


def replica_bytes(
    placement: Placement, rank: int, expert_bytes: int, rows_S: np.ndarray | None = None
) -> Volume:
    """Bytes that a rank sends and receives when weights are fetched; their gradients travel the other way.

    expert_bytes: of the matrices of one expert;  rows_S: [S] rows of every slot, for replicas that get some;
    None = all replicas, as a prefetch takes them. A replica on its home's own rank costs nothing.
    """
    slots = placement.replica_slots
    busy = slots if rows_S is None else slots[rows_S[slots] > 0]
    way = itinerary(placement, rank, busy)
    return Volume(
        sent_bytes=(sum(way.input_splits) - way.input_splits[rank]) * expert_bytes,
        received_bytes=(sum(way.output_splits) - way.output_splits[rank]) * expert_bytes,
    )


class Replicas:
    """The replicas of one layer in one forward and its backward, as one rank sees them.

    placement: the slots;  exchange: this rank's end of the EP group;  name: tag of its collectives. `use`
    says which replicas get rows: only those send a gradient back, and only those are fetched, unless `start`
    was called before it, which fetches all.
    """

    def __init__(self, placement: Placement, exchange: Exchange, name: str) -> None:
        self.placement, self.exchange, self.name = placement, exchange, name
        self.home_slots: list[int] = placement.home_columns(exchange.rank).tolist()
        self.dtype: torch.dtype | None = None
        self._fetched: Itinerary | None = None
        self._used = self._to_fetch = self._way(placement.replica_slots)
        self._arriving: tuple[Transfer, list[torch.Size]] | None = None
        self._returning: Transfer | None = None

    def _way(self, replica_slots: np.ndarray) -> Itinerary:
        return itinerary(self.placement, self.exchange.rank, replica_slots)

    def use(self, rows_S: np.ndarray, *, fetch_all: bool = False) -> None:
        """Take in the rows [S] int64 of every slot in this batch, the same on every rank.

        fetch_all: `start` is to fetch replicas without rows too, as one before this would have.
        """
        slots = self.placement.replica_slots
        self._used = self._way(slots[rows_S[slots] > 0])
        self._to_fetch = self._to_fetch if fetch_all else self._used

    @property
    def started(self) -> bool:
        """Whether the weights are under way already."""
        return self._fetched is not None

    @property
    def slot_r(self) -> tuple[int, ...]:
        """Local slots whose weights `wait` gives, in its order."""
        return (self._fetched or self._to_fetch).slot_r

    def start(self, weights: Sequence[torch.Tensor]) -> None:
        """Send copies of home weights, [e, ...] each, on their way. Collective; once a forward.

        weights: frozen ones are to be frozen on every rank alike: those send no gradient back.
        """
        self._fetched, self.dtype = self._to_fetch, weights[0].dtype
        way = self._fetched
        shapes = [weight.shape[1:] for weight in weights]
        packed, views = pack(len(way.sent_n), shapes, weights[0])
        with torch.no_grad():
            for weight, view in zip(weights, views):
                for place, index in enumerate(way.sent_n):
                    view[place].copy_(weight[index])
        with tag(self.name):
            transfer = self.exchange.start_rows(packed, way.input_splits, way.output_splits)
        self._arriving = (transfer, shapes)

    def wait(self) -> list[torch.Tensor]:
        """The weights that have arrived, [r, ...] each, in the order of `slot_r`; once."""
        assert self._arriving is not None, "start has sent the weights on their way"
        (transfer, shapes), self._arriving = self._arriving, None  # a checkpoint wants them let go
        return unpack(transfer.wait(), shapes)

    def send_back(self, packed_uX: torch.Tensor) -> None:
        """Send the gradients of the replicas that got rows home, packed (see `pack`), in the order of
        `slot_r`. Collective."""
        with tag(self.name):
            self._returning = self.exchange.start_rows(
                packed_uX, self._used.output_splits, self._used.input_splits
            )

    def add_returned(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add what `send_back` sent to the gradients of the home weights, [e, ...] each, in place.

        Sums are float32 or better and rounded once, in the order of the replicas' slots.
        """
        assert self._returning is not None, "send_back has sent the gradients on their way"
        transfer, self._returning = self._returning, None
        returned = unpack(transfer.wait(), [gradient.shape[1:] for gradient in gradients])
        for gradient, parts in zip(gradients, returned):
            acc = torch.promote_types(gradient.dtype, torch.float32)
            for index in sorted(set(self._used.sent_n)):
                total = gradient[index].to(acc)  # itself, unless its type is a short one
                for place, sent in enumerate(self._used.sent_n):
                    if sent == index:
                        total.add_(parts[place])
                if total.dtype != gradient.dtype:
                    gradient[index].copy_(total)


def pack(
    num: int, shapes: Sequence[torch.Size], like: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An empty buffer [num, X] for `num` experts' matrices one after the other, and the matrices as views."""
    packed = like.new_empty((num, sum(shape.numel() for shape in shapes)))
    return packed, unpack(packed, shapes)


def unpack(packed_nX: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The matrices [n, ...] in a packed buffer, as views."""
    parts = packed_nX.split([shape.numel() for shape in shapes], dim=1)
    return [part.view(packed_nX.shape[0], *shape) for part, shape in zip(parts, shapes)]
