"""Permute: index arithmetic against counting one by one, and gathers whose gradients are exact."""

import numpy as np
import pytest
import torch

from moe.permute import block_index, expand_tokens, permute_rows, take_rows, transposed_blocks

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
