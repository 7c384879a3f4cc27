"""Tables of deduplicated dispatch: which copies make a pair (token, rank), on both ends. No communication.

On CPU compiled kernels, elsewhere torch operations: twins, and a test holds them equal. Letters as in
moe/dedup.py: U pairs sent, V pairs received, J the most copies of one pair, Q = min(K, P).
"""

from dataclasses import dataclass

import numpy as np
import torch

from moe.kernels import kernels
from moe.permute import to_device, transposed_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The pairs that a rank sends, in the order (rank, token).

    token_of_pair: [U] int64;  pair_TQ: [T, Q] int64, each token's pairs in ascending order, padded with U.
    """

    token_of_pair: torch.Tensor
    pair_TQ: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """The pairs that a rank receives, in the order (source rank, token), and their copies, the rows.

    pair_of_row: [R] int64, rows in the order (local slot, source rank, token);  row_VJ: [V, J] int64, each
    pair's rows in ascending order, padded with R;  by_slot: [R] int64, the place of each row among the copies
    as they arrived, by (source rank, local slot, token);  by_source: [R] int64, its inverse.
    """

    pair_of_row: torch.Tensor
    row_VJ: torch.Tensor
    by_slot: torch.Tensor
    by_source: torch.Tensor


def count_pairs(
    row_TK: torch.Tensor, copy_of_row: torch.Tensor, rank_R: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the pairs of every rank in token order, without a host sync.

    row_TK: [T, K] int64, where each copy stands in the order (slot, token), R = not sent;  copy_of_row: [R]
    int64, its inverse;  rank_R: [R] int64, the rank that each copy is sent to.
    Returns position_R [R] int64, each copy's pair as a number within its rank, and pairs_P [P] int64.
    """
    if row_TK.device.type != "cpu":
        return count_pairs_torch(row_TK, copy_of_row, rank_R, num_ranks)
    position_R, pairs_P = torch.empty_like(rank_R), row_TK.new_empty(num_ranks)
    kernels().count_pairs(row_TK.numpy(), rank_R.numpy(), position_R.numpy(), pairs_P.numpy())
    return position_R, pairs_P


def count_pairs_torch(
    row_TK: torch.Tensor, copy_of_row: torch.Tensor, rank_R: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `count_pairs`."""
    num_tokens, top_k = row_TK.shape
    token_R = copy_of_row // top_k
    is_pair_PT = row_TK.new_zeros((num_ranks, num_tokens + 1))  # one token more: the last of something
    is_pair_PT[rank_R, token_R] = 1  # copies of one pair write the same
    upto_PT = is_pair_PT.cumsum(dim=1)
    return upto_PT[rank_R, token_R] - 1, upto_PT[:, -1]


def index_pairs(
    row_TK: torch.Tensor, copy_of_row: torch.Tensor, pair_R: torch.Tensor, num_pairs: int, width: int
) -> Pairs:
    """The tables of the pairs that this rank sends.

    row_TK, copy_of_row: as in `count_pairs`;  pair_R: [R] int64, each copy's pair, by its number in the order
    (rank, token);  num_pairs: U;  width: Q.
    """
    if row_TK.device.type != "cpu":
        return index_pairs_torch(row_TK, copy_of_row, pair_R, num_pairs, width)
    token_of_pair, pair_TQ = row_TK.new_empty(num_pairs), row_TK.new_empty((row_TK.shape[0], width))
    kernels().index_pairs(row_TK.numpy(), pair_R.numpy(), token_of_pair.numpy(), pair_TQ.numpy())
    return Pairs(token_of_pair=token_of_pair, pair_TQ=pair_TQ)


def index_pairs_torch(
    row_TK: torch.Tensor, copy_of_row: torch.Tensor, pair_R: torch.Tensor, num_pairs: int, width: int
) -> Pairs:
    """Twin of `index_pairs`: a token's equal pairs become one by sorting them side by side."""
    token_of_pair = row_TK.new_empty(num_pairs)
    token_of_pair[pair_R] = copy_of_row // row_TK.shape[1]  # copies of one pair write the same
    pair_TK = torch.full_like(row_TK, num_pairs)
    pair_TK.view(-1)[copy_of_row] = pair_R
    pair_TK = pair_TK.sort(dim=1).values
    again_TK = torch.zeros_like(pair_TK, dtype=torch.bool)
    again_TK[:, 1:] = pair_TK[:, 1:] == pair_TK[:, :-1]
    pair_TQ = torch.where(again_TK, num_pairs, pair_TK).sort(dim=1).values[:, :width]
    return Pairs(token_of_pair=token_of_pair, pair_TQ=pair_TQ.contiguous())


def count_arrivals(position_A: torch.Tensor, copies_P: np.ndarray) -> torch.Tensor:
    """What the copies that arrived say of their pairs, without a host sync.

    position_A: [R] integers, each copy's pair as a number within the pairs of its source, copies by source
    rank;  copies_P: [P] int64 on the host, the copies from each rank.
    Returns [P + 1] int64, the pairs from each rank, and the most copies of one: J. Raises RuntimeError on CPU
    for positions that no copy can have: ranks that worked from unequal splits.
    """
    if position_A.device.type != "cpu":  # to look at the positions would wait for the device
        return count_arrivals_torch(position_A, copies_P)
    counts_X = torch.empty(copies_P.shape[0] + 1, dtype=torch.int64)
    if not kernels().count_arrivals(position_A.numpy(), copies_P, counts_X.numpy()):
        raise RuntimeError(
            f"the metadata of {copies_P.tolist()} copies from the ranks do not fit them; give the same "
            "rows_PS on all ranks"
        )
    return counts_X


def count_arrivals_torch(position_A: torch.Tensor, copies_P: np.ndarray) -> torch.Tensor:
    """Twin of `count_arrivals`."""
    position_A = position_A.to(torch.int64)
    source_A = np.repeat(np.arange(copies_P.shape[0]), copies_P)
    source_A, start_A = (
        to_device(torch.from_numpy(a), position_A.device)
        for a in (source_A, (np.cumsum(copies_P) - copies_P)[source_A])
    )
    pairs_P = position_A.new_zeros(copies_P.shape[0]).scatter_reduce_(0, source_A, position_A + 1, "amax")
    copies_V = position_A.new_zeros(position_A.shape[0] + 1)  # a rank has no more pairs than copies
    copies_V.scatter_add_(0, start_A + position_A, torch.ones_like(position_A))
    return torch.cat([pairs_P, copies_V.max()[None]])


def place_copies(position_A: torch.Tensor, rows_Ps: np.ndarray, pairs_P: np.ndarray, most: int) -> Arrivals:
    """The tables of the pairs that this rank receives.

    position_A: as in `count_arrivals`, each source's copies by (local slot, token);  rows_Ps: [P, s] int64 on
    the host, the copies from each rank for each slot;  pairs_P, most: what count_arrivals found, on the host.
    """
    if position_A.device.type != "cpu":
        return place_copies_torch(position_A, rows_Ps, pairs_P, most)
    num_rows = position_A.shape[0]
    pair_R, by_slot, by_source = (torch.empty(num_rows, dtype=torch.int64) for _ in range(3))
    row_VJ = torch.empty((int(pairs_P.sum()), most), dtype=torch.int64)
    tables = (t.numpy() for t in (pair_R, row_VJ, by_slot, by_source))
    kernels().place_copies(position_A.numpy(), rows_Ps, pairs_P, *tables)
    return Arrivals(pair_of_row=pair_R, row_VJ=row_VJ, by_slot=by_slot, by_source=by_source)


def place_copies_torch(
    position_A: torch.Tensor, rows_Ps: np.ndarray, pairs_P: np.ndarray, most: int
) -> Arrivals:
    """Twin of `place_copies`: copies sorted by their pair, stable, so that each knows its place in it."""
    device, num_rows, num_pairs = position_A.device, position_A.shape[0], int(pairs_P.sum())
    place_R = torch.arange(num_rows, device=device)
    by_slot, by_source = transposed_blocks(rows_Ps, device)
    if by_slot is None or by_source is None:
        by_slot = by_source = place_R
    base_A = np.repeat(np.cumsum(pairs_P) - pairs_P, rows_Ps.sum(axis=1))
    pair_R = (position_A.to(torch.int64) + to_device(torch.from_numpy(base_A), device))[by_slot]
    by_pair = torch.argsort(pair_R, stable=True)
    copies_V = torch.zeros(num_pairs, dtype=torch.int64, device=device)
    copies_V.scatter_add_(0, pair_R, torch.ones_like(pair_R))
    start_V = copies_V.cumsum(0) - copies_V
    row_VJ = torch.full((num_pairs, most), num_rows, device=device)
    sorted_R = pair_R[by_pair]
    row_VJ[sorted_R, place_R - start_V[sorted_R]] = by_pair
    return Arrivals(pair_of_row=pair_R, row_VJ=row_VJ, by_slot=by_slot, by_source=by_source)
