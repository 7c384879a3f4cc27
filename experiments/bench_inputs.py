"""Bench inputs: what every contender of `bench layer` gets, and what it gives back to be measured.

Case -> make_inputs -> rows, gate, experts -> a contender -> Run
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from experiments.bench_layer import Case
from routing.forced import ForcedSelection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What every contender gets, drawn alike: rows [T, D], gate [E, D], experts [E, F, D] and [E, D, F]."""

    x_TD: torch.Tensor
    grad_TD: torch.Tensor
    gate_ED: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor


def chosen_experts(case: Case, rank: int, generator: torch.Generator) -> torch.Tensor:
    """The experts [T, K] of a rank's tokens: in turn, so that all get the same number, or as skewed as the
    case says."""
    if case.skew:
        forced = ForcedSelection(case.skew, seed=1, num_experts=case.experts, num_chosen=case.top_k)
        return forced.draw(case.tokens, stream=(rank,))
    turns = (torch.arange(case.tokens)[:, None] * case.top_k + torch.arange(case.top_k)) % case.experts
    return turns[torch.randperm(case.tokens, generator=generator)]


def make_inputs(case: Case, rank: int) -> Inputs:
    """Rows whose routing is known by construction, under a gate with orthonormal rows.

    A token's row is noise outside the gate's span plus the gate's rows of its K experts, so that each
    contender's own gate selects just these: see `chosen_experts`.
    """
    generator = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(99)
    experts, width = case.experts, case.width
    gate_ED = torch.linalg.qr(torch.randn(width, experts, generator=shared))[0].T
    chosen_TK = chosen_experts(case, rank, generator)
    noise = torch.randn(case.tokens, width, generator=generator)
    noise -= noise @ gate_ED.T @ gate_ED
    strength = 3 + torch.arange(case.top_k) * 0.25
    x_TD = noise + (gate_ED[chosen_TK] * strength[None, :, None]).sum(dim=1)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=shared) * shape[-1] ** -0.5).to(dtype)

    return Inputs(
        x_TD=x_TD.to(dtype),
        grad_TD=torch.randn(case.tokens, width, generator=generator).to(dtype),
        gate_ED=gate_ED.to(dtype),
        w1=normal(experts, case.hidden, width),
        w2=normal(experts, width, case.hidden),
        w3=normal(experts, case.hidden, width),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A contender, ready.

    step: one forward and backward;  outputs: [T, D] of its forward alone, to compare contenders by; None for
    the floor, which has none;  inside: entered around the timed step.
    """

    step: Callable[[], None]
    outputs: Callable[[], torch.Tensor] | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def layer_run(
    forward: Callable[[torch.Tensor], Any], inputs: Inputs, parameters: Iterable[nn.Parameter]
) -> Run:
    """Forward and backward with gradients of rows and parameters, which are then dropped.

    forward: rows -> (y, auxiliary loss or None)
    """
    x_TD, weights = inputs.x_TD.clone().requires_grad_(True), list(parameters)

    def step() -> None:
        y, aux = forward(x_TD)
        roots, grads = [y.view_as(inputs.grad_TD)], [inputs.grad_TD]
        if aux is not None:
            roots, grads = [*roots, aux], [*grads, torch.ones_like(aux)]
        torch.autograd.backward(roots, grads)
        del y, aux, roots
        for tensor in (x_TD, *weights):
            tensor.grad = None

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return forward(x_TD)[0].view_as(inputs.grad_TD)

    return Run(step=step, outputs=outputs)
