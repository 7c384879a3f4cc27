"""Kernels of dedup.py, as plain functions over arrays, which moe/kernels.py compiles: the tables of pairs.

Row number R = the number of rows stands for a copy that was not sent, pair number U for no pair.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

HELPERS = ()
KERNELS = ("count_pairs", "index_pairs", "count_arrivals", "place_copies")


def count_pairs(row_TK, rank_R, position_R, pairs_P):
    """Number the pairs of every rank in token order."""
    num_rows = rank_R.shape[0]
    last_P = np.full(pairs_P.shape[0], -1, np.int64)  # the token of the rank's last pair
    pairs_P[:] = 0
    for t in range(row_TK.shape[0]):
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            if r < num_rows:
                p = rank_R[r]
                if last_P[p] != t:
                    last_P[p] = t
                    pairs_P[p] += 1
                position_R[r] = pairs_P[p] - 1


def index_pairs(row_TK, pair_R, token_of_pair, pair_TQ):
    """Each pair's token, and each token's pairs in ascending order, padded with U."""
    num_rows, num_pairs = pair_R.shape[0], token_of_pair.shape[0]
    token_of_pair[:] = -1
    pair_TQ[:] = num_pairs
    for t in range(row_TK.shape[0]):
        found = 0
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            if r < num_rows and token_of_pair[pair_R[r]] < 0:
                pair = pair_R[r]
                token_of_pair[pair] = t
                place = found
                while place > 0 and pair_TQ[t, place - 1] > pair:
                    pair_TQ[t, place] = pair_TQ[t, place - 1]
                    place -= 1
                pair_TQ[t, place] = pair
                found += 1


def count_arrivals(position_A, copies_P, counts_X):
    """Into counts_X the pairs from each rank, then the most copies of one.

    False where a position is less than 0, or more than the copies from its rank allow.
    """
    num_ranks = copies_P.shape[0]
    copies_V = np.zeros(position_A.shape[0], np.int64)  # a rank has no more pairs than copies
    counts_X[:] = 0
    start = 0
    for p in range(num_ranks):
        for a in range(start, start + copies_P[p]):
            position = np.int64(position_A[a])
            if position < 0 or position >= copies_P[p]:
                return False
            counts_X[p] = max(counts_X[p], position + 1)
            copies_V[start + position] += 1
            counts_X[num_ranks] = max(counts_X[num_ranks], copies_V[start + position])
        start += copies_P[p]
    return True


def place_copies(position_A, rows_Ps, pairs_P, pair_R, row_VJ, arrival_R, row_A):
    """Put the copies, which came by (source, slot), into the order (slot, source), each under its pair."""
    num_ranks, num_slots = rows_Ps.shape
    end_P = np.cumsum(pairs_P)
    next_Ps = np.empty((num_ranks, num_slots), np.int64)
    total = 0
    for p in range(num_ranks):
        for s in range(num_slots):
            next_Ps[p, s] = total
            total += rows_Ps[p, s]
    copies_V = np.zeros(row_VJ.shape[0], np.int64)
    row_VJ[:] = total
    r = 0
    for s in range(num_slots):
        for p in range(num_ranks):
            for a in range(next_Ps[p, s], next_Ps[p, s] + rows_Ps[p, s]):
                pair = end_P[p] - pairs_P[p] + np.int64(position_A[a])
                row_VJ[pair, copies_V[pair]] = r
                copies_V[pair] += 1
                pair_R[r] = pair
                arrival_R[r] = a
                row_A[a] = r
                r += 1
