"""Bench stages, formulas: what a rank sends and holds under each ZeRO stage, on paper and in DeepSpeed.

    Shape: a rank's parameters, topology, stage -> paper_bytes, sent_bytes    of one step, to other ranks
                                                -> state_bytes                weights, gradients, moments...

Dense parameters are shared out over the whole world, a rank's experts over the ranks that hold the same ones
(EDP): expert parallelism has shared out the rest. DeepSpeed 0.19.8, as its collectives show it:

    stage 0    one all-reduce of the gradients, at the last micro-batch
    stage 1    the same, and an all-gather of each optimizer group's flat weights, padded to a multiple of 2n
    stage 2    the all-reduce at every micro-batch, then the all-gather
    stage 3    at every micro-batch an all-gather of each parameter for the forward, another for the backward
               unless it was kept, and a reduce-scatter; each parameter padded to a multiple of n by itself

The paper's ZeRO 1 and 2 reduce-scatter where DeepSpeed all-reduces, which is (n-1)/n of the gradients more.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moe import Topology
from moe.ledger import Entry

KINDS: tuple[str, ...] = ("moe", "gradients", "parameters", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of this rank, whole: elements, dimensions, whether it is of experts, or of a router (an
    optimizer group of its own)."""

    numel: int
    ndim: int
    expert: bool
    router: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Everything that the formulas want to know of a rank.

    parameters: in the order of the model;  element: bytes of a weight;  accumulation: micro-batches a step;
    kept: whether stage 3 keeps a parameter from the forward to the backward
    """

    parameters: list[Parameter]
    topology: Topology
    stage: int
    element: int
    accumulation: int = 1
    kept: bool = False

    def ranks(self, expert: bool) -> int:
        """Over how many ranks ZeRO shards such a parameter."""
        return self.topology.edp_size if expert else self.topology.world_size

    def groups(self) -> list[tuple[int, int, list[int]]]:
        """The optimizer's groups: ranks, this one's place among them, elements of each parameter."""
        dense = [p for p in self.parameters if not p.expert]
        matrices = [p.numel for p in dense if p.ndim > 1 and not p.router]
        routers = [p.numel for p in dense if p.router]
        vectors = [p.numel for p in dense if p.ndim <= 1]
        found = [(self.ranks(False), self.topology.rank, numels) for numels in (matrices, routers, vectors)]
        experts = [p.numel for p in self.parameters if p.expert]
        return [group for group in (*found, (self.ranks(True), self.topology.edp_rank, experts)) if group[2]]


def up(number: int, multiple: int) -> int:
    """The next multiple, or the number itself."""
    return -(-number // multiple) * multiple


# ---- bytes sent -----------------------------------------------------------------------------------------


def kind_of(entry: Entry) -> str:
    """Which of KINDS a collective of a step is. "other": norms and flags, a few bytes.

    ZeRO-3 gathers weights wherever they are used, so also under the tags of a layer's parts.
    """
    if entry.op.startswith("alltoall") or entry.tag.endswith("counts"):
        return "moe"
    if entry.phase == "backward" and entry.op.startswith(("allreduce", "reduce_scatter")):
        return "gradients"
    weights = entry.dtype.is_floating_point and entry.dtype.itemsize <= 4
    return "parameters" if weights and entry.op.startswith("allgather") else "other"


def paper_bytes(shape: Shape) -> float:
    """Gradients and parameters by Rajbhandari et al., ZeRO, section 7: 2 Phi to stage 2, 3 Phi at stage 3.

    With micro-batches stage 2 reduce-scatters at each, and stage 3 does everything at each.
    """
    g = shape.accumulation
    times = {0: 2, 1: 2, 2: g + 1, 3: 3 * g}[shape.stage]
    total = 0.0
    for parameter in shape.parameters:
        n = shape.ranks(parameter.expert)
        total += times * (n - 1) * parameter.numel * shape.element / n
    return total


def sent_bytes(shape: Shape) -> dict[str, float]:
    """Gradients and parameters as DeepSpeed sends them, by kind; exact."""
    g, stage = shape.accumulation, shape.stage
    gradients = parameters = 0.0
    for n, _, numels in shape.groups():
        away = (n - 1) * shape.element  # over n, of every element
        if stage < 3:
            gradients += 2 * away * sum(numels) * (g if stage == 2 else 1) / n
            parameters += away * up(sum(numels), 2 * n) / n if stage else 0
        else:
            padded = sum(up(numel, n) for numel in numels)
            gradients += g * away * padded / n
            parameters += g * (1 if shape.kept else 2) * away * padded / n
    return {"gradients": gradients, "parameters": parameters}


def moe_bytes(
    topology: Topology, rows_PP: list[list[int]], num_forwards: int, num_experts: int, row_bytes: int
) -> int:
    """The layers' exchanges: rows dispatched and combined, forward and backward, and the counts.

    rows_PP: copies of tokens from rank (row) to rank (column) of the EP group, the sum over all forwards.
    """
    me = topology.ep_rank
    there = sum(rows_PP[me]) - rows_PP[me][me]
    back = sum(row[me] for row in rows_PP) - rows_PP[me][me]
    counts = (topology.ep_size - 1) * (num_experts + 2) + (topology.edp_size - 1) * (
        num_experts + topology.ep_size
    )
    return 2 * (there + back) * row_bytes + num_forwards * counts * 8


# ---- bytes held -----------------------------------------------------------------------------------------


def state_bytes(shape: Shape) -> dict[str, int]:
    """Bytes of one rank when the last gradient is there, with Adam; exact.

    Masters: float32, a copy in float32 too; none at stage 0 in float32. Moments: two of float32. Stage 1 lets
    go of other ranks' gradients as it reduces, so that it holds what stage 2 does. Both keep a parameter's
    gradient whole where the border of a rank's share runs through it.
    """
    element, stage = shape.element, shape.stage
    weights = gradients = updated = 0
    for n, place, numels in shape.groups():
        whole = sum(numels)
        if stage == 0:
            weights, gradients, updated = weights + whole, gradients + whole, updated + whole
        elif stage < 3:
            share = up(whole, 2 * n) // n
            weights += up(whole, 2 * n)
            gradients += _touched(numels, share * place, share * (place + 1))
            updated += share
        else:
            share = sum(up(numel, n) // n for numel in numels)
            weights, gradients, updated = weights + share, gradients + share, updated + share
    masters = 0 if stage == 0 and element == 4 else 4 * updated
    return {
        "weights": weights * element,
        "gradients": gradients * element,
        "masters": masters,
        "moments": 8 * updated,
    }


def _touched(numels: Iterable[int], start: int, stop: int) -> int:
    """Elements of all parameters that reach into start .. stop, and of the padding behind the last."""
    found = at = 0
    for numel in numels:
        if at < stop and at + numel > start:
            found += numel
        at += numel
    return found + max(0, stop - max(at, start))
