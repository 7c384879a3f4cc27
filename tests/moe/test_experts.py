"""Experts: the loop and its grouped twin against one F.linear per expert, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from moe.experts import Experts, SwiGLU, grouped_linear, grouped_mm_is_legal

# 16-byte strides in float32 and bfloat16 for inputs and outputs; all sizes distinct
SLOTS, WIDTH, HIDDEN = 5, 8, 24
COUNTS = {
    "uneven": [4, 1, 7, 2, 3],
    "zeros_at_start": [0, 0, 6, 1, 2],
    "zeros_at_end": [3, 5, 1, 0, 0],
    "zeros_between": [3, 0, 1, 0, 6],
    "all_to_one": [0, 0, 9, 0, 0],
    "single_row": [0, 1, 0, 0, 0],
    "nothing": [0, 0, 0, 0, 0],
}


def tensors(counts, dtype):
    generator = torch.Generator().manual_seed(4)
    shapes = ((sum(counts), WIDTH), (SLOTS, HIDDEN, WIDTH), (sum(counts), HIDDEN))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def step(function, counts, dtype):
    """Output, gradient of the rows, gradient of the weights."""
    rows, weight, factor = tensors(counts, dtype)
    rows.requires_grad_(True)
    weight.requires_grad_(True)
    out = function(rows, weight, torch.tensor(counts, dtype=torch.int64))
    out.backward(factor)
    return out.detach(), rows.grad, weight.grad


def per_expert(rows, weight, counts):
    parts = [F.linear(part, weight[e]) for e, part in enumerate(rows.split(counts.tolist()))]
    return torch.cat(parts)


def compare(got, want, tolerance):
    for name, ours, plain in zip(("out", "grad of rows", "grad of weights"), got, want, strict=True):
        assert ours is not None, name
        error = (ours.double() - plain).abs().max().item() if plain.numel() else 0.0
        assert error <= tolerance, f"{name} is off by {error}"


# sums of up to 24 terms of size 1: 24 * 2^-53, 24 * 2^-24; bfloat16 rounds once, by 2^-9 of a value under 20
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.04}


@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("loop", torch.float64),
        ("loop", torch.float32),
        ("loop", torch.bfloat16),
        ("auto", torch.float64),
        ("grouped_mm", torch.float32),
        ("grouped_mm", torch.bfloat16),
    ],
    ids=str,
)
def test_every_method_equals_one_linear_per_expert(method, dtype, counts):
    """The plain one gets the same rounded inputs, and computes in float64."""
    rows_per_slot = COUNTS[counts]
    got = step(lambda *a: grouped_linear(*a, method), rows_per_slot, dtype)
    assert all(t.dtype == dtype for t in got)
    rows, weight, factor = (t.double() for t in tensors(rows_per_slot, dtype))
    rows.requires_grad_(True)
    weight.requires_grad_(True)
    plain = per_expert(rows, weight, torch.tensor(rows_per_slot))
    plain.backward(factor)
    compare(got, (plain.detach(), rows.grad, weight.grad), TOLERANCE[dtype])


@pytest.mark.parametrize("counts", list(COUNTS))
def test_a_slot_without_rows_has_the_gradient_zero_on_poisoned_memory(counts, monkeypatch):
    """Every buffer starts as NaN here: what is not written shows."""
    poison(monkeypatch)
    out, rows_grad, weight_grad = step(lambda *a: grouped_linear(*a, "loop"), COUNTS[counts], torch.float64)
    assert not out.isnan().any()
    assert rows_grad is not None and not rows_grad.isnan().any()
    assert weight_grad is not None and not weight_grad.isnan().any()
    for e, rows in enumerate(COUNTS[counts]):
        assert bool(weight_grad[e].any()) == (rows > 0)


def poison(monkeypatch):
    real, real_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda tensor, *a, **k: real(tensor, *a, **k).fill_(torch.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **k: real_like(tensor, **k).fill_(torch.nan))


def test_the_loop_passes_gradcheck():
    counts = torch.tensor([2, 0, 1])
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2), (3, 4, 2))]
    assert torch.autograd.gradcheck(lambda r, w: grouped_linear(r, w, counts, "loop"), leaves)


def test_an_expanded_gradient_is_taken():
    """`out.sum()` sends back one element seen everywhere; its strides are 0."""
    rows, weight, _ = tensors([4, 1, 7, 2, 3], torch.float64)
    rows.requires_grad_(True)
    grouped_linear(rows, weight, torch.tensor([4, 1, 7, 2, 3]), "loop").sum().backward()
    want = torch.cat([weight[e].sum(0).expand(n, -1) for e, n in enumerate([4, 1, 7, 2, 3])])
    torch.testing.assert_close(rows.grad, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "legal"),
    [
        (torch.float32, 8, 12, True),
        (torch.float32, 6, 12, False),  # 24 bytes
        (torch.float32, 8, 10, False),
        (torch.bfloat16, 8, 16, True),
        (torch.bfloat16, 8, 12, False),  # 24 bytes
        (torch.float64, 8, 16, False),
    ],
    ids=str,
)
def test_grouped_mm_is_legal_for_strides_of_16_bytes_and_never_in_float64(dtype, width, hidden, legal):
    rows, weight = torch.zeros(3, width, dtype=dtype), torch.zeros(2, hidden, width, dtype=dtype)
    assert grouped_mm_is_legal(rows, weight) == legal


def test_rows_that_the_counts_do_not_cover_are_refused():
    rows, weight, _ = tensors([4, 1, 7, 2, 3], torch.float32)
    with pytest.raises(ValueError, match="must be 0 or more each and sum to the 17 rows given"):
        grouped_linear(rows, weight, torch.tensor([4, 1, 7, 2, 2]))


def test_an_unknown_method_lists_the_known_ones():
    rows, weight, _ = tensors([0, 0, 0, 0, 0], torch.float32)
    with pytest.raises(ValueError, match="method='cutlass' is unknown; use one of auto, loop, grouped_mm"):
        grouped_linear(rows, weight, torch.zeros(SLOTS, dtype=torch.int64), "cutlass")


@pytest.mark.parametrize("method", ["loop", "grouped_mm"])
@pytest.mark.parametrize("counts", ["uneven", "all_to_one", "zeros_between"])
def test_experts_are_swiglu_of_each_slot(method, counts):
    torch.manual_seed(6)
    experts = Experts(SLOTS, WIDTH, HIDDEN, method)
    rows, _, _ = tensors(COUNTS[counts], torch.float32)
    plain = SwiGLU(WIDTH, HIDDEN)
    want = []
    for e, part in enumerate(rows.split(COUNTS[counts])):
        with torch.no_grad():
            for name in ("w1", "w2", "w3"):
                getattr(plain, name).weight.copy_(getattr(experts, name)[e])
        want.append(plain(part))
    got = experts(rows, torch.tensor(COUNTS[counts]))
    # float32 sums of 24 terms
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)


def test_swiglu_is_the_formula():
    ff, x = SwiGLU(WIDTH, HIDDEN).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    gate = x @ ff.w1.weight.T
    want = (gate / (1 + (-gate).exp()) * (x @ ff.w3.weight.T)) @ ff.w2.weight.T
    torch.testing.assert_close(ff(x), want, rtol=1e-12, atol=1e-14)
