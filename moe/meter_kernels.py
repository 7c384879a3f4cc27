"""Kernel of meter_stats.py, as a plain function over arrays, which moe/kernels.py compiles."""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

HELPERS = ()
KERNELS = ("add_scores",)


def add_scores(scores_TE, valid_T, low_base, high_base, sum_E, count_EB):
    """Sums and histogram of the scores of valid tokens (valid_T of length 0: of all).

    The bin is read off the upper bits of float32, whose steps are an eighth of an octave: those of s below
    1/2, those of 1 - s (exact in float32) from there on, counted from the other end. The bits of 1 - s minus
    one are those of the number just below, so that every bin holds its lower edge.
    """
    num_experts, last = scores_TE.shape[1], count_EB.shape[1] - 1
    bin_E = np.empty(num_experts, np.int32)
    masked = valid_T.shape[0] > 0
    for t in range(scores_TE.shape[0]):
        if masked and not valid_T[t]:
            continue
        row = scores_TE[t]
        for e in range(num_experts):  # apart from the counting, so that it becomes vector code
            score = np.float32(row[e])
            sum_E[e] += row[e]
            low = (score.view(np.int32) >> np.int32(20)) - low_base
            high = (
                (np.float32(np.float32(1) - score).view(np.int32) - np.int32(1)) >> np.int32(20)
            ) - high_base
            low, high = max(low, np.int32(0)), max(high, np.int32(0))
            index = low if score < np.float32(0.5) else np.int32(last) - high
            bin_E[e] = min(max(index, np.int32(0)), np.int32(last))  # whatever comes, no write elsewhere
        for e in range(num_experts):
            count_EB[e, bin_E[e]] += 1
