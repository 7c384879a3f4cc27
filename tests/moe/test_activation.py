"""The activations between the products: kernels against torch's operations, and against float64."""

import pytest
import torch
from torch.nn import functional as F

from moe.activation import activate, activate_backward, activate_backward_torch, activate_torch

SHAPES = [(0, 7), (1, 1), (3, 5), (40, 129), (257, 512)]


def inputs(shape, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(3)]


def tolerance(dtype):
    """Of float32: exp by a polynomial of relative error 1e-7 and a few roundings; of bfloat16: one rounding,
    where torch's operations round after each."""
    return {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_equal_float64(shape, dtype):
    gate, up, grad = inputs(shape, dtype)
    leaves = [t.double().requires_grad_(True) for t in (gate, up)]
    wanted = F.silu(leaves[0]) * leaves[1]
    grad_gate, grad_up = torch.autograd.grad(wanted, leaves, grad.double())

    out = torch.empty_like(gate)
    activate(gate, up, out)
    torch.testing.assert_close(out.double(), wanted.detach(), **tolerance(dtype))
    got_gate, hidden, got_up = grad.clone(), torch.empty_like(gate), torch.empty_like(gate)
    activate_backward(got_gate, gate, up, hidden, got_up)
    torch.testing.assert_close(hidden, out, **tolerance(dtype))  # compiled apart: the last bit may differ
    torch.testing.assert_close(got_up.double(), grad_up, **tolerance(dtype))
    torch.testing.assert_close(got_gate.double(), grad_gate, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_twins_agree(dtype):
    gate, up, grad = inputs((33, 65), dtype)
    results = []
    for forward, backward in ((activate, activate_backward), (activate_torch, activate_backward_torch)):
        out, hidden, got_up, got_gate = (*(torch.empty_like(gate) for _ in range(3)), grad.clone())
        forward(gate, up, out)
        backward(got_gate, gate, up, hidden, got_up)
        results.append([out, hidden, got_gate, got_up])
    bounds = tolerance(dtype) if dtype != torch.float64 else {"rtol": 0, "atol": 0}
    if dtype == torch.bfloat16:
        bounds = {"rtol": 3e-2, "atol": 1e-2}  # torch's operations round after each step
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_values_saturate_and_nan_stays_nan(dtype):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, torch.nan]]).to(dtype)
    up, grad = torch.ones_like(gate), torch.ones_like(gate)
    out, hidden, got_up = (torch.empty_like(gate) for _ in range(3))
    activate(gate, up, out)
    activate_backward(grad, gate, up, hidden, got_up)
    assert out[0, 1:6].tolist() == pytest.approx([0, 0, 0, 90, float(gate[0, 5])], abs=1e-30)
    # sigmoid(-1e30) is not 0 but the least that the exponent's limit allows, 1e-38
    assert float(out[0, 0].abs()) < 1e-7
    assert grad[0, 1:6].tolist() == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-30)
    for result in (out, hidden, grad, got_up):
        assert torch.isnan(result[0, 6]), "an error in the rows must not be lost on the way"
        assert torch.isfinite(result[0, :6]).all()


def test_gelu_equals_torch():
    gate, _, grad = inputs((9, 11), torch.float64)
    leaf = gate.clone().requires_grad_(True)
    (wanted,) = torch.autograd.grad(F.gelu(leaf), leaf, grad)
    out, hidden = torch.empty_like(gate), torch.empty_like(gate)
    activate(gate, None, out)
    activate_backward(grad, gate, None, hidden, None)
    assert torch.equal(out, F.gelu(gate)) and torch.equal(hidden, out) and torch.equal(grad, wanted)
