"""Slot loop: the feed-forward of all slots, one after the other, as one autograd function.

What lies between a slot's products stays in the cache, a slot's blocks are read from and written to where
they stand among the arrived rows, and no fused weight is indexed under autograd. Replicas are slots like
others, whose weights come from elsewhere: homes are computed first, while those travel, and last in the
backward, while their gradients do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe.activation import activate, activate_backward
from moe.replicate import Replicas, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRows:
    """Where the rows of one slot stand: its block from every source rank that sent any.

    slot: index of the slot's matrices among the weights that it is computed with
    """

    slot: int
    blocks: list[slice]
    sizes: list[int]

    @property
    def total(self) -> int:
        """Rows of the slot."""
        return sum(self.sizes)

    def read(self, rows: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """The slot's rows, one block after the other: a view where there is one block, else a copy."""
        if len(self.blocks) == 1:
            return rows[self.blocks[0]]
        blocks = [rows[block] for block in self.blocks]
        return torch.cat(blocks) if buffer is None else torch.cat(blocks, out=buffer[: self.total])

    def place(self, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Where to compute the slot's rows, before `write`: right there, or the buffer."""
        return rows[self.blocks[0]] if len(self.blocks) == 1 else buffer[: self.total]

    def write(self, written: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the slot's rows to where they stand; nothing to do where `place` was right there."""
        if len(self.blocks) > 1:
            for block, part in zip(self.blocks, written.split(self.sizes)):
                rows[block].copy_(part)


def slot_rows(rows_Ps: torch.Tensor, columns: Sequence[int]) -> list[SlotRows]:
    """The slots of some columns of rows_Ps that have rows, the rows [P, s] int64 of every block."""
    ends_Ps = rows_Ps.reshape(-1).cumsum(0).view_as(rows_Ps)
    sizes_sP, ends_sP = rows_Ps.T.tolist(), ends_Ps.T.tolist()
    found = []
    for slot, column in enumerate(columns):
        sizes, ends = sizes_sP[column], ends_sP[column]
        blocks = [slice(end - size, end) for size, end in zip(sizes, ends) if size]
        if blocks:
            found.append(SlotRows(slot=slot, blocks=blocks, sizes=[size for size in sizes if size]))
    return found


class LoopFeedForward(torch.autograd.Function):
    """rows_RD, w1, w2, w3 or None, weight_R or None, rows_Ps, output, keep, replicas or None -> [R, D].

    See `feed_forward`. The activations are computed again in the backward from what the first products gave:
    cheaper than the memory they would take. What is kept is kept slot by slot, and the rest lives in buffers
    of the fullest slot's size: an allocator gives small blocks again and again, and must ask the system for
    large ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Any,
        w1: Any,
        w2: Any,
        w3: Any,
        weight_R: Any,
        rows_Ps: Any,
        output: Any,
        keep: Any,
        replicas: Any,
    ) -> Any:
        homes, borrowed = _slots(rows_Ps, replicas)
        out_RD = rows_RD.new_empty((rows_RD.shape[0] if output else 0, w2.shape[1]))
        buffers = _buffers([*homes, *borrowed] if output else [], w1, w1.shape[1], w2.shape[1])
        kept: list[torch.Tensor] = []

        def compute(slots: list[SlotRows], weights: list[torch.Tensor]) -> None:
            kept.extend(_forward_slots(slots, weights, rows_RD, weight_R, out_RD, buffers, output, keep))

        weights = [w1, w2] if w3 is None else [w1, w2, w3]
        compute(homes, weights)
        arrived: list[torch.Tensor] = []
        if replicas is not None:
            arrived = replicas.wait()
            compute(borrowed, arrived)
        ctx.save_for_backward(weight_R, *weights, *arrived, *kept)
        ctx.slots, ctx.num_weights, ctx.replicas = (homes, borrowed), len(weights), replicas
        ctx.shape = rows_RD.shape
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_RD,) = grad_outputs
        weight_R, *saved = ctx.saved_tensors
        (homes, borrowed), num, replicas = ctx.slots, ctx.num_weights, ctx.replicas
        weights, saved = saved[:num], saved[num:]
        arrived, kept = (saved[:num], saved[num:]) if replicas is not None else ([], saved)
        w1 = weights[0]
        widths = (w1.shape[2], *[w1.shape[1]] * num)
        buffers = _buffers([*homes, *borrowed], w1, *widths)
        grad_rows_RD = grad_RD.new_empty(ctx.shape)
        wanted = ctx.needs_input_grad[1 : 1 + num]
        grad_weight_R = _empty_like(weight_R if ctx.needs_input_grad[4] else None)
        rows = (grad_RD, weight_R, grad_rows_RD, grad_weight_R, buffers)
        if replicas is not None:
            packed, grads_u = _packed_like(weights, wanted, len(borrowed))
            places = [(at, u) for u, at in enumerate(borrowed)]  # the order in which they travel, too
            _backward_slots(places, arrived, grads_u, kept[len(homes) * num :], *rows)
            if any(wanted):
                replicas.send_back(packed)
        grads = [_empty_like(w if want else None) for w, want in zip(weights, wanted)]
        _zero_idle(grads, homes)
        _backward_slots([(at, at.slot) for at in homes], weights, grads, kept[: len(homes) * num], *rows)
        if replicas is not None and any(wanted):
            replicas.add_returned([grad for grad in grads if grad is not None])
        return grad_rows_RD, *grads, *[None] * (3 - num), grad_weight_R, None, None, None, None


def _slots(rows_Ps: torch.Tensor, replicas: Replicas | None) -> tuple[list[SlotRows], list[SlotRows]]:
    """The busy slots of the homes, and those of the replicas."""
    if replicas is None:
        return slot_rows(rows_Ps, range(rows_Ps.shape[1])), []
    return slot_rows(rows_Ps, replicas.home_slots), slot_rows(rows_Ps, replicas.slot_r)


def _packed_like(
    weights: list[torch.Tensor], wanted: tuple[bool, ...], num: int
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """A packed buffer for the gradients of `num` slots, and their views; None for frozen matrices."""
    packed, views = pack(num, [w.shape[1:] for w, want in zip(weights, wanted) if want], weights[0])
    left = iter(views)
    return packed, [next(left) if want else None for want in wanted]


def _forward_slots(
    slots: list[SlotRows],
    weights: list[torch.Tensor],
    rows_RD: torch.Tensor,
    weight_R: torch.Tensor | None,
    out_RD: torch.Tensor,
    buffers: list[torch.Tensor],
    output: bool,
    keep: bool,
) -> list[torch.Tensor]:
    """Compute some slots with their weights [n, ...]; what their backward wants, two or three a slot."""
    hidden_buffer, out_buffer = buffers
    kept: list[torch.Tensor] = []
    w1_n, w2_n, w3_n = _three([w.transpose(1, 2).unbind() for w in weights])
    for at in slots:
        rows = at.read(rows_RD)
        gate = torch.mm(rows, w1_n[at.slot])
        up = None if w3_n is None else torch.mm(rows, w3_n[at.slot])
        if keep:  # else a forward without backward would hold all slots' at once
            kept += [rows, gate] if up is None else [rows, gate, up]
        if not output:
            continue
        hidden = hidden_buffer[: at.total]
        activate(gate, up, hidden)
        if weight_R is not None:
            hidden.mul_(at.read(weight_R)[:, None])
        out = torch.mm(hidden, w2_n[at.slot], out=at.place(out_RD, out_buffer))
        at.write(out, out_RD)
    return kept


def _backward_slots(
    slots: list[tuple[SlotRows, int]],
    weights: list[torch.Tensor],
    grads: list[torch.Tensor | None],
    kept: list[torch.Tensor],
    grad_RD: torch.Tensor,
    weight_R: torch.Tensor | None,
    grad_rows_RD: torch.Tensor,
    grad_weight_R: torch.Tensor | None,
    buffers: list[torch.Tensor],
) -> None:
    """Gradients of some slots, each with the place of its matrices' gradients: of rows, weights, matrices."""
    wide, *narrow = buffers
    w1_n, w2_n, w3_n = _three([w.unbind() for w in weights])
    grad_w1_n, grad_w2_n, grad_w3_n = _three([() if grad is None else grad.unbind() for grad in grads])
    num = len(weights)
    for count, (at, place) in enumerate(slots):
        rows, gate, up = _three(kept[count * num : (count + 1) * num])
        grad, hidden, grad_up = _three([buffer[: at.total] for buffer in narrow])
        grad_out = at.read(grad_RD, wide)
        torch.mm(grad_out, w2_n[at.slot], out=grad)
        weight = None if weight_R is None else at.read(weight_R)
        _activations(at, gate, up, grad, hidden, grad_up, weight, grad_weight_R)
        if grad_w2_n:  # frozen weights have none
            torch.mm(grad_out.t(), hidden, out=grad_w2_n[place])
        if grad_w1_n:
            torch.mm(grad.t(), rows, out=grad_w1_n[place])
        # grad_out has been used up: its buffer takes the gradient of the rows
        grad_rows = torch.mm(grad, w1_n[at.slot], out=at.place(grad_rows_RD, wide))
        if grad_w3_n:
            torch.mm(grad_up.t(), rows, out=grad_w3_n[place])
        if w3_n is not None:
            grad_rows.addmm_(grad_up, w3_n[at.slot])
        at.write(grad_rows, grad_rows_RD)


def _activations(
    at: SlotRows,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    grad: torch.Tensor,
    hidden: torch.Tensor,
    grad_up: torch.Tensor | None,
    weight: torch.Tensor | None,
    grad_weight_R: torch.Tensor | None,
) -> None:
    """What the second matrix saw, into `hidden`, and the gradients of the first products: grad_up, and the
    gate's over `grad`, which comes in as the gradient of `hidden`."""
    if weight is not None:
        if grad_weight_R is not None:
            activate(gate, up, hidden)
            place = at.place(grad_weight_R, torch.empty_like(weight))
            at.write(torch.sum(grad * hidden, dim=1, out=place), grad_weight_R)
        grad.mul_(weight[:, None])
    activate_backward(grad, gate, up, hidden, grad_up)
    if weight is not None:
        hidden.mul_(weight[:, None])


def _three(items: list[Any]) -> tuple[Any, Any, Any]:
    """The items; GELU has no third."""
    return items[0], items[1], items[2] if len(items) > 2 else None


def _buffers(slots: list[SlotRows], like: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    """Buffers of these widths, with as many rows as the fullest slot."""
    most = max((at.total for at in slots), default=0)
    return [like.new_empty((most, width)) for width in widths]


def _empty_like(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else torch.empty_like(tensor)


def _zero_idle(grads: list[Any], slots: list[SlotRows]) -> None:
    """Zeros for the slots without rows, which no product writes."""
    busy = {at.slot for at in slots}
    for grad in (g for g in grads if g is not None):
        for slot in set(range(grad.shape[0])) - busy:
            grad[slot].zero_()
