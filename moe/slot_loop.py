"""Slot loop: the feed-forward of all slots, one after the other, as one autograd function.

What lies between a slot's products stays in the cache, a slot's blocks are read from and written to where
they stand among the arrived rows, and no fused weight is indexed under autograd.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe.activation import activate, activate_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRows:
    """Where the rows of one slot stand: its block from every source rank that sent any."""

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


def slot_rows(rows_Ps: torch.Tensor) -> list[SlotRows]:
    """The slots that have rows, from the rows [P, s] int64 of every block."""
    ends_Ps = rows_Ps.reshape(-1).cumsum(0).view_as(rows_Ps)
    found = []
    for slot, (sizes, ends) in enumerate(zip(rows_Ps.T.tolist(), ends_Ps.T.tolist())):
        blocks = [slice(end - size, end) for size, end in zip(sizes, ends) if size]
        if blocks:
            found.append(SlotRows(slot=slot, blocks=blocks, sizes=[size for size in sizes if size]))
    return found


class LoopFeedForward(torch.autograd.Function):
    """rows_RD, w1, w2, w3 or None, weight_R or None, rows_Ps, output, keep -> [R, D]; see `feed_forward`.

    The activations are computed again in the backward from what the first products gave: cheaper than the
    memory they would take. What is kept is kept slot by slot, and the rest lives in buffers of the fullest
    slot's size: an allocator gives small blocks again and again, and must ask the system for large ones.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Any, w1: Any, w2: Any, w3: Any, weight_R: Any, rows_Ps: Any, output: Any, keep: Any
    ) -> Any:
        slots = slot_rows(rows_Ps)
        out_RD = rows_RD.new_empty((rows_RD.shape[0] if output else 0, w2.shape[1]))
        hidden_buffer, out_buffer = _buffers(slots if output else [], w1, w1.shape[1], w2.shape[1])
        kept: list[torch.Tensor] = []
        w1_e, w2_e, w3_e = (_slots_of(w if w is None else w.transpose(1, 2)) for w in (w1, w2, w3))
        for at in slots:
            rows = at.read(rows_RD)
            gate = torch.mm(rows, w1_e[at.slot])
            up = None if w3 is None else torch.mm(rows, w3_e[at.slot])
            if keep:  # else a forward without backward would hold all slots' at once
                kept += [rows, gate] if up is None else [rows, gate, up]
            if not output:
                continue
            hidden = hidden_buffer[: at.total]
            activate(gate, up, hidden)
            if weight_R is not None:
                hidden.mul_(at.read(weight_R)[:, None])
            out = torch.mm(hidden, w2_e[at.slot], out=at.place(out_RD, out_buffer))
            at.write(out, out_RD)
        ctx.save_for_backward(w1, w2, w3, weight_R, *kept)
        ctx.slots, ctx.shape = slots, rows_RD.shape
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_RD,) = grad_outputs
        w1, w2, w3, weight_R, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:5]
        grads = [_empty_like(t if want else None) for t, want in zip((w1, w2, w3, weight_R), wanted)]
        _zero_idle(grads[:3], ctx.slots)
        grad_rows_RD = grad_RD.new_empty(ctx.shape)
        wide, *narrow = _buffers(ctx.slots, w1, w1.shape[2], *[w1.shape[1]] * (2 if w3 is None else 3))
        w1_e, w2_e, w3_e = (_slots_of(w) for w in (w1, w2, w3))
        grad_w1_e, grad_w2_e, grad_w3_e = (_slots_of(grad) for grad in grads[:3])
        num_kept = 2 if w3 is None else 3
        for place, at in enumerate(ctx.slots):
            rows, gate, up = _three(kept[place * num_kept : (place + 1) * num_kept])
            grad, hidden, grad_up = _three([buffer[: at.total] for buffer in narrow])
            grad_out = at.read(grad_RD, wide)
            torch.mm(grad_out, w2_e[at.slot], out=grad)
            weight = None if weight_R is None else at.read(weight_R)
            _activations(at, gate, up, grad, hidden, grad_up, weight, grads[3])
            if grad_w2_e:  # frozen weights have none
                torch.mm(grad_out.t(), hidden, out=grad_w2_e[at.slot])
            if grad_w1_e:
                torch.mm(grad.t(), rows, out=grad_w1_e[at.slot])
            # grad_out has been used up: its buffer takes the gradient of the rows
            grad_rows = torch.mm(grad, w1_e[at.slot], out=at.place(grad_rows_RD, wide))
            if grad_w3_e:
                torch.mm(grad_up.t(), rows, out=grad_w3_e[at.slot])
            if w3 is not None:
                grad_rows.addmm_(grad_up, w3_e[at.slot])
            at.write(grad_rows, grad_rows_RD)
        return grad_rows_RD, *grads, None, None, None


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


def _three(items: list[torch.Tensor]) -> tuple[Any, Any, Any]:
    """The items; GELU has no third."""
    return items[0], items[1], items[2] if len(items) > 2 else None


def _buffers(slots: list[SlotRows], like: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    """Buffers of these widths, with as many rows as the fullest slot."""
    most = max((at.total for at in slots), default=0)
    return [like.new_empty((most, width)) for width in widths]


def _slots_of(weight: torch.Tensor | None) -> Any:
    """One view a slot, all made at once: cheaper than to index slot by slot."""
    return () if weight is None else weight.unbind()


def _empty_like(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else torch.empty_like(tensor)


def _zero_idle(grads: list[Any], slots: list[SlotRows]) -> None:
    """Zeros for the slots without rows, which no product writes."""
    busy = {at.slot for at in slots}
    for grad in (g for g in grads if g is not None):
        for slot in set(range(grad.shape[0])) - busy:
            grad[slot].zero_()
