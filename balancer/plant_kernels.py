"""Kernels of plant.py: top-k selection of a population of tokens, and what a router reports of it.

Plain functions over arrays, which `balancer/plant.py` compiles; as they stand they are its twin.

    select_token  ->  count_layer     how many tokens select each expert
                  ->  measure_layer   and swaps, pairs, margins and scores by bins, as asked for

M tokens, E experts, K of each token. Scores and shifts are float32, as in a router; counts int64.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

ENTRIES = ("count_layer", "measure_layer")
# bins of a signed number: BINS_PER_OCTAVE equal parts of each octave from 2^LOWEST to 2^HIGHEST, on both
# sides of zero, and one more on each side from 0 to 2^LOWEST. Numbers beyond the ends count in the last bins.
LOWEST, HIGHEST, BITS = -17, 3, 3
BINS_PER_OCTAVE = 1 << BITS
SIDE = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 1
# what the bits of a float32 of 2^LOWEST are, less the mantissa beyond BITS
FIRST = (127 + LOWEST) << BITS


def bin_of(bits):
    """Bin of a float32, by its bits as int32: its exponent and the head of its mantissa are the number."""
    size = ((bits & 0x7FFFFFFF) >> (23 - BITS)) - FIRST + 1
    size = min(max(size, 0), SIDE - 1)
    return SIDE - 1 - size if bits < 0 else SIDE + size


def select_token(score_E, shift_E, value_X, id_X):
    """The K + 1 largest of score + shift in falling order, and whose they are; ties: lowest expert first."""
    last = len(value_X) - 1
    value_X[:] = -np.inf
    least = value_X[last]
    for e in range(len(score_E)):
        value = score_E[e] + shift_E[e]
        if value > least:
            at = last
            while at > 0 and value_X[at - 1] < value:
                value_X[at] = value_X[at - 1]
                id_X[at] = id_X[at - 1]
                at -= 1
            value_X[at] = value
            id_X[at] = e
            least = value_X[last]


def count_layer(score_ME, shift_E, top_k, counts_E):
    """Add the tokens that select each expert."""
    value_X = np.empty(top_k + 1, np.float32)
    id_X = np.empty(top_k + 1, np.int64)
    for m in range(len(score_ME)):
        select_token(score_ME[m], shift_E, value_X, id_X)
        for k in range(top_k):
            counts_E[id_X[k]] += 1


def measure_layer(score_ME, shift_E, z_E, top_k, delta, counts_E, swap_2E, pair_2EE, margin_EB, score_EB):
    """Add what a router reports: counts, and the other arrays where they are not empty (length 0).

    swap_2E, pair_2EE: by gap below delta and below 2 delta. margin_EB, score_EB: by bin of `bin_of`; score is
    score + z, without bias.
    """
    value_X = np.empty(top_k + 1, np.float32)
    id_X = np.empty(top_k + 1, np.int64)
    number_E = np.empty(len(shift_E), np.float32)
    bits_E = number_E.view(np.int32)
    for m in range(len(score_ME)):
        select_token(score_ME[m], shift_E, value_X, id_X)
        for k in range(top_k):
            counts_E[id_X[k]] += 1
        inner, outer = id_X[top_k - 1], id_X[top_k]
        gap = value_X[top_k - 1] - value_X[top_k]
        for wide in range(2):
            if gap < delta * (1 + wide):
                if len(swap_2E) > 0:
                    swap_2E[wide, inner] += 1
                    swap_2E[wide, outer] += 1
                if len(pair_2EE) > 0:
                    pair_2EE[wide, inner, outer] += 1
        if len(margin_EB) > 0:
            for e in range(len(shift_E)):
                # -(0) is below 0: who ties and is not selected has no margin above 0
                number_E[e] = -(value_X[top_k - 1] - (score_ME[m, e] + shift_E[e]))
            for k in range(top_k):
                number_E[id_X[k]] = value_X[k] - value_X[top_k]
            for e in range(len(shift_E)):
                margin_EB[e, bin_of(bits_E[e])] += 1
        if len(score_EB) > 0:
            for e in range(len(shift_E)):
                number_E[e] = score_ME[m, e] + z_E[e]
            for e in range(len(shift_E)):
                score_EB[e, bin_of(bits_E[e])] += 1
