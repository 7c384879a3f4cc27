"""Permute: index arithmetic against counting one by one, and gathers whose gradients are exact."""

import numpy as np
import pytest
import torch

from moe.permute import (
    block_index,
    expand_tokens,
    order_copies,
    order_copies_torch,
    permute_rows,
    sum_rows,
    sum_rows_torch,
    take_rows,
    transposed_blocks,
    weighted_sum,
    weighted_sum_backward,
    weighted_sum_backward_torch,
)
from moe.placement import even_split

CPU = torch.device("cpu")
WIDTH = 3
LENGTHS = {
    "uneven": [[2, 0, 3], [1, 4, 0]],
    "zeros_at_start": [[0, 0, 5], [0, 2, 1]],
    "zeros_at_end": [[5, 1, 0], [2, 0, 0]],
    "one_block": [[0, 0, 0], [0, 7, 0]],
    "nothing": [[0, 0, 0], [0, 0, 0]],
}
# 4 tokens of 3 copies; copies 1, 6, 7 and all of token 3 are not sent (row number 6 = R)
ROW_OF_COPY = torch.tensor([4, 6, 0, 1, 5, 2, 6, 6, 3, 6, 6, 6])
TOKEN_OF_ROW = torch.tensor([0, 1, 1, 2, 0, 1])


@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_blocks_are_transposed_and_back(lengths):
    length_AB = np.array(LENGTHS[lengths])
    names = [(a, b, i) for a in range(2) for b in range(3) for i in range(length_AB[a, b])]
    index, inverse = transposed_blocks(length_AB, CPU)
    assert index is not None and inverse is not None
    assert [names[i] for i in index.tolist()] == sorted(names, key=lambda n: (n[1], n[0], n[2]))
    assert index[inverse].tolist() == list(range(len(names)))


@pytest.mark.parametrize("lengths", [[[1, 2, 3]], [[1], [2], [3]]], ids=["one_source", "one_slot"])
def test_rows_that_stand_right_already_are_left_alone(lengths):
    assert transposed_blocks(np.array(lengths), CPU) == (None, None)
    rows = torch.randn(6, WIDTH)
    assert permute_rows(rows, None, None) is rows


def test_block_index_follows_the_blocks_in_the_order_given():
    index = block_index(np.array([5, 0, 2, 2]), np.array([2, 1, 0, 3]), CPU)
    assert index.tolist() == [5, 6, 0, 2, 3, 4]
    assert block_index(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), CPU).shape == (0,)


def test_the_backward_of_a_permutation_is_the_indexing_one():
    index, inverse = transposed_blocks(np.array(LENGTHS["uneven"]), CPU)
    rows = torch.randn(10, WIDTH, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(10, WIDTH, dtype=torch.float64)
    (ours,) = torch.autograd.grad((permute_rows(rows, index, inverse) * factor).sum(), rows)
    (plain,) = torch.autograd.grad((rows[index] * factor).sum(), rows)
    assert torch.equal(ours, plain)
    assert torch.autograd.gradcheck(lambda r: permute_rows(r, index, inverse), (rows,))


def test_copies_that_were_not_sent_read_zeros():
    rows = torch.arange(1.0, 7.0)[:, None].expand(-1, WIDTH).contiguous()
    taken = take_rows(rows, ROW_OF_COPY)[:, 0].tolist()
    assert taken == [5, 0, 1, 2, 6, 3, 0, 0, 4, 0, 0, 0]


def test_copies_that_were_all_sent_are_a_permutation():
    rows, order = torch.randn(5, WIDTH), torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(take_rows(rows, order), rows[order])
    assert take_rows(rows[:0], order[:0]).shape == (0, WIDTH)
    assert torch.equal(take_rows(rows[:0], torch.zeros(4, dtype=torch.int64)), torch.zeros(4, WIDTH))


@pytest.mark.parametrize("top_k", [3, None], ids=["regular", "copy_list"])
def test_expanded_rows_and_their_gradient_equal_plain_indexing(top_k):
    x_TD = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(6, WIDTH, dtype=torch.float64)
    rows = expand_tokens(x_TD, TOKEN_OF_ROW, ROW_OF_COPY, top_k)
    assert torch.equal(rows, x_TD[TOKEN_OF_ROW])
    (ours,) = torch.autograd.grad((rows * factor).sum(), x_TD)
    (plain,) = torch.autograd.grad((x_TD[TOKEN_OF_ROW] * factor).sum(), x_TD)
    # sums of up to three terms, in another order
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)
    assert not ours[3].any(), "a token without a sent copy has the gradient zero"
    assert torch.autograd.gradcheck(lambda x: expand_tokens(x, TOKEN_OF_ROW, ROW_OF_COPY, top_k), (x_TD,))


@pytest.mark.parametrize("top_k", [256, None], ids=["regular", "copy_list"])
def test_a_tokens_copies_are_summed_in_float32(top_k):
    """256 + 1 is no bfloat16 number: a running sum in bfloat16 would stay at 256."""
    copies = 256
    x_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = expand_tokens(x_TD, torch.zeros(copies, dtype=torch.int64), torch.arange(copies), top_k)
    rows.backward(torch.cat([torch.full((1, 1), 256.0), torch.ones(copies - 1, 1)]).bfloat16())
    assert x_TD.grad is not None
    assert x_TD.grad.dtype == torch.bfloat16
    assert x_TD.grad.tolist() == [[512.0]], "256 + 255 = 511, to bfloat16's nearest even"


def test_no_token_expands_to_no_row():
    none = torch.zeros(0, dtype=torch.int64)
    x_TD = torch.zeros(0, WIDTH, requires_grad=True)
    expand_tokens(x_TD, none, none, 3).sum().backward()
    assert x_TD.grad is not None and x_TD.grad.shape == (0, WIDTH)
    assert take_rows(x_TD, none).shape == (0, WIDTH)


# ---- twins: numba kernels against torch ---
TWIN_SHAPES = [
    (5, 3, 7, 0),
    (6, 2, 9, 4),
    (1, 1, 3, 0),
    (0, 2, 5, 0),
    (4, 8, 33, 11),
]  # T, K, D, copies not sent


def twin_inputs(shape, dtype):
    num_tokens, top_k, width, unsent = shape
    generator = torch.Generator().manual_seed(num_tokens)
    num_rows = num_tokens * top_k - unsent
    order = torch.randperm(num_tokens * top_k, generator=generator)
    row_of_copy_TK = torch.where(order < num_rows, order, num_rows).view(num_tokens, top_k)
    rows_RD = torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
    acc = torch.promote_types(dtype, torch.float32)
    weight_TK = torch.rand(num_tokens, top_k, generator=generator, dtype=acc)
    grad_TD = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    return rows_RD, row_of_copy_TK, weight_TK, grad_TD


# one rounding of the type, on sums of up to 33 terms of size 1
TWIN_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", list(TWIN_TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", TWIN_SHAPES, ids=str)
def test_kernels_over_rows_equal_their_torch_twins(shape, dtype):
    rows_RD, row_of_copy_TK, weight_TK, grad_TD = twin_inputs(shape, dtype)
    tolerance = {"rtol": 0.0, "atol": TWIN_TOLERANCE[dtype]}
    for weights in (weight_TK, None):
        ours, twin = (f(rows_RD, row_of_copy_TK, weights) for f in (sum_rows, sum_rows_torch))
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, twin, **tolerance)
    ours = weighted_sum_backward(grad_TD, rows_RD, weight_TK, row_of_copy_TK)
    twin = weighted_sum_backward_torch(grad_TD, rows_RD, weight_TK, row_of_copy_TK)
    for a, b in zip(ours, twin, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **tolerance)


def test_half_kernels_round_to_nearest_even_and_keep_nan_and_infinity():
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3.0e38, float("inf"), float("nan")])
    rows_RD = values.to(torch.bfloat16)[None]
    ones, index = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    assert torch.equal(sum_rows(rows_RD, index, ones)[0, :5], rows_RD[0, :5])
    assert sum_rows(rows_RD, index, ones)[0, 5].isnan()
    scaled = sum_rows(rows_RD[:, :1], index, ones * 1.00390625)  # halfway between two bfloat16 values
    assert scaled.item() == torch.tensor(1.00390625).to(torch.bfloat16).item() == 1.0


def test_weighted_sum_passes_gradcheck():
    rows_RD, row_of_copy_TK, weight_TK, _ = twin_inputs((4, 3, 5, 2), torch.float64)
    leaves = [rows_RD.requires_grad_(True), weight_TK.requires_grad_(True)]
    assert torch.autograd.gradcheck(lambda r, w: weighted_sum(r, w, row_of_copy_TK), leaves)


@pytest.mark.parametrize("seed", range(20))
def test_counting_sort_equals_its_torch_twin(seed):
    """Random copies over random slots: replicas, empty slots, experts without copies, unrouted copies."""
    draw = np.random.default_rng(seed)
    num_experts, num_slots = 5, 9
    slots = np.concatenate([np.arange(num_experts), draw.integers(-1, num_experts, num_slots - num_experts)])
    draw.shuffle(slots)
    expert_N = torch.from_numpy(draw.integers(-1, num_experts, 40) if seed else np.full(0, 0))
    counts_PE = np.array([[(expert_N == e).sum().item() for e in range(num_experts)]])
    rows_S = even_split(counts_PE, slots)[0]
    ours = order_copies(expert_N, rows_S, slots)
    twin = order_copies_torch(expert_N, rows_S, slots)
    for got, want in zip(ours, twin, strict=True):
        assert torch.equal(got, want)
