"""Feed-forward: every slot's feed-forward over its rows, which stand in blocks.

    as they arrive, by source rank:   (r0,s0 ...)(r0,s1 ..)(r1,s0 ..)(r1,s1 ....)     rows_Ps [[3, 2], [2, 4]]

SwiGLU: w2 (silu(w1 x) * w3 x).   GELU: w2 gelu(w1 x).   Three ways to compute them:

    loop        slot after slot, the whole feed-forward in one autograd function (slot_loop.py; any type)
    grouped_mm  one kernel a projection (16 and 32 bit, rows a multiple of 16 bytes)
    bmm         one batched product a projection, where every slot has the same number of rows

The loop takes its blocks where they stand; for the others the rows are put in order by slot, and back, and
homes and replicas are computed in two calls each: no weights are copied side by side.
No way indexes a fused weight expert by expert under autograd: that would add up E gradients of the full size.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe.config import METHODS
from moe.permute import permute_rows, to_device, transposed_blocks
from moe.replicate import Replicas
from moe.slot_loop import LoopFeedForward


def grouped_mm_is_legal(rows_RI: torch.Tensor, weight_eOI: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these: no float64, row strides of a multiple of 16 bytes."""
    size = rows_RI.element_size()
    strides_fit = all(n * size % 16 == 0 for n in (rows_RI.shape[1], *weight_eOI.shape[1:]))
    return rows_RI.dtype in (torch.bfloat16, torch.float16, torch.float32) and strides_fit


def choose_method(rows_RD: torch.Tensor, w1: torch.Tensor) -> str:
    """The fastest legal way: first what the types and sizes allow, then what was measured to be fast.

    Measured with `counterpoise bench layer` (D 256, F 512, 64 to 2048 rows a slot). On CPU the loop won or
    tied at every size in float32 and bfloat16: what lies between the products stays in the cache. On CUDA the
    loop would launch 3 kernels a slot and product, so one grouped kernel is taken where it is legal (not in
    float32, where it is none of the fast kernels). The rule looks at sizes alone, so a resumed run chooses
    alike; `fastest_method` measures on the device at hand, for MoEConfig.method.
    """
    grouped = rows_RD.is_cuda and rows_RD.element_size() == 2 and grouped_mm_is_legal(rows_RD, w1)
    return "grouped_mm" if grouped and rows_RD.shape[0] else "loop"


def fastest_method(
    rows_RD: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor | None,
    rows_Ps: torch.Tensor,
    repeats: int = 3,
) -> str:
    """The legal way whose forward and backward take the least time here, the best of `repeats` each.

    Arguments as in `feed_forward`; gradients are computed and dropped.
    """
    leaves: list[Any] = [
        None if t is None else t.detach().requires_grad_(True) for t in (rows_RD, w1, w2, w3)
    ]
    rows_RD, w1, w2, w3 = leaves
    times: dict[str, float] = {}
    for method in METHODS[1:]:
        try:
            for _ in range(1 + repeats):  # the first one compiles, allocates
                begun = _clock(rows_RD)
                out = feed_forward(rows_RD, w1, w2, w3, rows_Ps, method=method)
                torch.autograd.grad(out, [t for t in leaves if t is not None], out.detach())
                times[method] = min(times.get(method, math.inf), _clock(rows_RD) - begun)
        except ValueError:  # not legal for these
            continue
    return min(times, key=lambda method: times[method])


def _clock(rows_RD: torch.Tensor) -> float:
    if rows_RD.is_cuda:
        torch.cuda.synchronize(rows_RD.device)
    return time.perf_counter()


def as_computed(first: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
    """The tensors in the type that they are computed in: autocast's where it is on."""
    device, tensors = first.device.type, (first, *others)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def feed_forward(
    rows_RD: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor | None,
    rows_Ps: torch.Tensor,
    weight_R: torch.Tensor | None = None,
    method: str = "auto",
    output: bool = True,
    replicas: Replicas | None = None,
) -> torch.Tensor:
    """Run every slot's feed-forward over its rows.

    rows_RD: [R, D], in blocks by (source rank, slot);  w1, w3: [e, F, D], w2: [e, D, F]; w3 None = GELU
    instead of SwiGLU;  rows_Ps: [P, e] int64 on the host, the blocks' rows, or [e] where there is one source;
    weight_R: [R] router weight, applied before the second matrix;  method: one of METHODS;
    output: False computes what a backward wants; the result is then not to be used;
    replicas: slots that borrow their weights; rows_Ps is then [P, s] over all slots of the rank, which of
    them are the homes of w1, w2, w3 it knows. Collective then.
    Returns [R, D], in the order of rows_RD.   Raises ValueError where the counts do not sum to R, and for a
    method that is unknown or not legal here.
    """
    device = rows_RD.device.type
    if torch.is_autocast_enabled(device):
        rows_RD, w1, w2, w3, weight_R = as_computed(rows_RD, w1, w2, w3, weight_R)
        with torch.autocast(device, enabled=False):
            return feed_forward(rows_RD, w1, w2, w3, rows_Ps, weight_R, method, output, replicas)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    rows_Ps = rows_Ps[None] if rows_Ps.ndim == 1 else rows_Ps
    if replicas is None and rows_Ps.shape[1] != w1.shape[0]:
        raise ValueError(f"rows_Ps has {rows_Ps.shape[1]} slots, and the weights are of {w1.shape[0]}")
    if int(rows_Ps.sum()) != rows_RD.shape[0] or bool((rows_Ps < 0).any()):
        raise ValueError(
            f"rows_Ps {rows_Ps.tolist()} must be 0 or more each and sum to the {rows_RD.shape[0]} rows given"
        )
    if weight_R is not None:
        weight_R = weight_R.to(rows_RD.dtype)
    if method == "auto":
        method = choose_method(rows_RD, w1)
    weights = [w1, w2] if w3 is None else [w1, w2, w3]
    if replicas is not None:
        _start(replicas, weights)
    if method == "loop":
        keep = torch.is_grad_enabled()  # inside the function it never is
        return LoopFeedForward.apply(rows_RD, w1, w2, w3, weight_R, rows_Ps, output, keep, replicas)
    if replicas is not None:
        return _with_replicas(rows_RD, weights, rows_Ps, weight_R, method, replicas)
    by_slot, by_source = transposed_blocks(rows_Ps.numpy(), rows_RD.device)
    rows_RD, weight_R = (_permuted(rows, by_slot, by_source) for rows in (rows_RD, weight_R))
    out_RD = _products(rows_RD, weights, rows_Ps.sum(dim=0), weight_R, method)
    return permute_rows(out_RD, by_source, by_slot)


def _start(replicas: Replicas, weights: Sequence[torch.Tensor]) -> None:
    """Send the replicas' weights on their way, in the type that is computed in, if they are not so yet."""
    if not replicas.started:
        replicas.start(weights)
    elif replicas.dtype != weights[0].dtype:
        raise ValueError(
            f"replicas were fetched ahead in {replicas.dtype}, the experts compute in {weights[0].dtype}: "
            "call prefetch() under the same autocast as the forward"
        )


def _permuted(rows: Any, index: torch.Tensor | None, inverse: torch.Tensor | None) -> Any:
    return None if rows is None else permute_rows(rows, index, inverse)


def _products(
    rows_RD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows_s: torch.Tensor,
    weight_R: torch.Tensor | None,
    method: str,
) -> torch.Tensor:
    """The feed-forward of rows in order by slot, one grouped or batched product a projection."""
    if not weights[0].shape[0]:  # no slots, no rows; but every backward is to run as on other ranks
        rows_RD = rows_RD + sum(weight.sum() for weight in weights)
        return rows_RD if weight_R is None else rows_RD * weight_R[:, None]
    product = _grouped(rows_RD, weights[0], rows_s) if method == "grouped_mm" else _batched(rows_s)
    gate = product(rows_RD, weights[0])
    hidden = F.gelu(gate) if len(weights) == 2 else F.silu(gate) * product(rows_RD, weights[2])
    if weight_R is not None:
        hidden = hidden * weight_R[:, None]
    return product(hidden, weights[1])


def _with_replicas(
    rows_RD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows_Ps: torch.Tensor,
    weight_R: torch.Tensor | None,
    method: str,
    replicas: Replicas,
) -> torch.Tensor:
    """The feed-forward of homes, then that of replicas, whose weights have travelled meanwhile."""
    columns = np.array([*replicas.home_slots, *replicas.slot_r], dtype=np.int64)
    by_slot, by_source = transposed_blocks(rows_Ps.numpy(), rows_RD.device, columns)
    rows_RD, weight_R = (_permuted(rows, by_slot, by_source) for rows in (rows_RD, weight_R))
    rows_s = rows_Ps.sum(dim=0)[torch.from_numpy(columns)]
    homes = len(replicas.home_slots)
    cut = [int(rows_s[:homes].sum()), int(rows_s[homes:].sum())]
    row_parts = rows_RD.split(cut)
    weight_parts = (None, None) if weight_R is None else weight_R.split(cut)
    own = _HomeWeights.apply(replicas, *weights)
    home_RD = _products(row_parts[0], own, rows_s[:homes], weight_parts[0], method)
    trained = tuple(weight.requires_grad for weight in weights)
    busy_u = to_device(torch.nonzero(rows_s[homes:])[:, 0], rows_RD.device)
    borrowed = _BorrowedWeights.apply(replicas, busy_u, trained, home_RD)
    replica_RD = _products(row_parts[1], borrowed, rows_s[homes:], weight_parts[1], method)
    return permute_rows(torch.cat([home_RD, replica_RD]), by_source, by_slot)


class _HomeWeights(torch.autograd.Function):
    """The home weights as they are; the backward adds the gradients that replicas have sent back."""

    @staticmethod
    def forward(ctx: Any, replicas: Any, *weights: Any) -> Any:
        ctx.replicas = replicas
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = ctx.needs_input_grad[1:]
        ctx.replicas.add_returned([grad for grad, wanted in zip(grad_outputs, trained) if wanted])
        return None, *grad_outputs


class _BorrowedWeights(torch.autograd.Function):
    """The weights that have arrived; the backward sends their gradients home.

    Takes the homes' output, so that its backward comes before theirs, and the gradients travel meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, replicas: Any, busy_u: Any, trained: Any, home_RD: Any) -> Any:
        ctx.replicas, ctx.busy_u, ctx.trained = replicas, busy_u, trained
        ctx.save_for_backward(home_RD.new_empty(0))
        borrowed = tuple(replicas.wait())
        ctx.mark_non_differentiable(*[w for w, wanted in zip(borrowed, trained) if not wanted])
        return borrowed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors  # where a checkpoint computes again, at the same point on every rank
        wanted = [grad for grad, trained in zip(grad_outputs, ctx.trained) if trained]
        parts = [grad.index_select(0, ctx.busy_u).flatten(1) for grad in wanted]
        ctx.replicas.send_back(torch.cat(parts, dim=1))
        return None, None, None, None


def _grouped(rows_RD: torch.Tensor, w1: torch.Tensor, rows_s: torch.Tensor) -> Any:
    """The product of torch's grouped kernel."""
    if not grouped_mm_is_legal(rows_RD, w1):
        raise ValueError(
            f"grouped_mm takes no {rows_RD.dtype} rows of width {rows_RD.shape[1]} and {w1.shape[1]} (16 or "
            '32 bits, a multiple of 16 bytes): use method="loop"'
        )
    offs = to_device(rows_s.cumsum(0).to(torch.int32), rows_RD.device)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # the clone in the backward: the kernel refuses an expanded gradient (that of a sum)
        return _OwnGradient.apply(F.grouped_mm(rows, weight.transpose(1, 2), offs=offs))

    return product


class _OwnGradient(torch.autograd.Function):
    """Identity whose gradient lies in memory row by row."""

    @staticmethod
    def forward(ctx: Any, rows):
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return grad_outputs[0].contiguous()


def _batched(rows_s: torch.Tensor) -> Any:
    """The product of one batched matrix product."""
    if int(rows_s.max()) != int(rows_s.min()):
        raise ValueError(
            f'bmm takes the same number of rows for every slot, got {rows_s.tolist()}: use method="loop"'
        )

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cut = rows.view(weight.shape[0], int(rows_s[0]), rows.shape[1])
        return torch.bmm(cut, weight.transpose(1, 2)).flatten(0, 1)

    return product
