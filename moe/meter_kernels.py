"""Kernels of meter_stats.py, as plain functions over arrays, which moe/kernels.py compiles."""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

HELPERS = ()
KERNELS = ("add_scores", "add_spread", "add_margins")


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


def add_spread(scores_TE, logits_TE, best_T, valid_T, sums_2):
    """Squares of the logits less their mean over the experts, and the largest score best_T over the sum of
    the scores, summed over valid tokens (valid_T of length 0: over all).
    """
    num_experts = scores_TE.shape[1]
    masked = valid_T.shape[0] > 0
    squares, confidence = 0.0, 0.0
    for t in range(scores_TE.shape[0]):
        if masked and not valid_T[t]:
            continue
        scores_E, logits_E = scores_TE[t], logits_TE[t]
        total, mean = 0.0, 0.0
        for e in range(num_experts):
            total += scores_E[e]
            mean += logits_E[e]
        mean /= num_experts
        for e in range(num_experts):
            squares += (logits_E[e] - mean) ** 2
        if total > 0:
            confidence += best_T[t] / total
    sums_2[0] += squares
    sums_2[1] += confidence


def add_margins(biased_TE, chosen_TK, valid_T, lowest, count_EB):
    """Histogram of the margins of valid tokens (valid_T of length 0: of all).

    The bin of a margin's size is read off the upper bits of float64, whose steps are an eighth of an octave;
    those of 2^-14, less one, are `lowest`.
    """
    num_experts, side = biased_TE.shape[1], count_EB.shape[1] // 2
    top_k, masked = chosen_TK.shape[1], valid_T.shape[0] > 0
    bin_E, chosen_E = np.empty(num_experts, np.int64), np.zeros(num_experts, np.bool_)
    for t in range(biased_TE.shape[0]):
        if masked and not valid_T[t]:
            continue
        row = biased_TE[t]
        weakest, best = np.inf, -np.inf
        for k in range(top_k):
            chosen_E[chosen_TK[t, k]] = True
            weakest = min(weakest, np.float64(row[chosen_TK[t, k]]))
        for e in range(num_experts):
            best = max(best, -np.inf if chosen_E[e] else np.float64(row[e]))
        for e in range(num_experts):  # apart from the counting, so that it becomes vector code
            margin = np.float64(row[e]) - (best if chosen_E[e] else weakest)
            size = max(margin if chosen_E[e] else -margin, 0.0)
            index = min(max((np.float64(size).view(np.int64) >> 49) - lowest, 0), side - 1)
            bin_E[e] = side + index if chosen_E[e] else side - 1 - index
        for e in range(num_experts):
            count_EB[e, bin_E[e]] += 1
        for k in range(top_k):
            chosen_E[chosen_TK[t, k]] = False
