"""Kernels of permute.py, as plain functions over arrays, which moe/kernels.py compiles. One pass over the
rows each.

Row number R = rows.shape[0] stands for a copy that was not sent. bfloat16 comes as uint16, the upper half of
a float32; sums are float32 and rounded once, to nearest even.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

HELPERS = ("round_half",)
KERNELS = (
    "add_up",
    "order",
    "sum_rows",
    "sum_rows_half",
    "weighted_sum_backward",
    "weighted_sum_backward_half",
)


def add_up(rows_PS, counts_PE, slot_to_expert_S, rows_S, sent_E):
    """Add the rows of every slot to rows_S. False where a rank's rows are not its copies of every expert."""
    for source in range(rows_PS.shape[0]):
        sent_E[:] = counts_PE[source]
        for slot in range(rows_PS.shape[1]):
            rows = rows_PS[source, slot]
            if rows == 0:
                continue
            expert = slot_to_expert_S[slot]
            if rows < 0 or expert < 0:
                return False
            rows_S[slot] += rows
            sent_E[expert] -= rows
        for expert in range(sent_E.shape[0]):
            if sent_E[expert] != 0:
                return False
    return True


def order(expert_N, rows_S, slot_to_expert_S, copy_of_row, row_of_copy):
    """Counting sort of copies into slots, stable in the token; an expert fills its slots in ascending order.

    False where the rows of an expert's slots are not as many as its copies.
    """
    num_slots, total = slot_to_expert_S.shape[0], copy_of_row.shape[0]
    first_E = np.full(slot_to_expert_S.max() + 1, -1, np.int64)  # the slot that an expert fills now
    next_S = np.full(num_slots, -1, np.int64)  # and the one after it
    for slot in range(num_slots - 1, -1, -1):
        expert = slot_to_expert_S[slot]
        if expert >= 0:
            next_S[slot] = first_E[expert]
            first_E[expert] = slot
    end_S = np.cumsum(rows_S)
    place_S = end_S - rows_S
    for n in range(expert_N.shape[0]):
        expert = expert_N[n]
        if expert < 0:
            row_of_copy[n] = total
            continue
        slot = first_E[expert] if expert < first_E.shape[0] else -1
        while slot >= 0 and place_S[slot] == end_S[slot]:
            slot = next_S[slot]
            first_E[expert] = slot
        if slot < 0:
            return False
        row = place_S[slot]
        place_S[slot] = row + 1
        copy_of_row[row] = n
        row_of_copy[n] = row
    return np.all(place_S == end_S)


def sum_rows(rows_RD, row_TK, weight_TK, out_TD):
    """out_t = sum_k weight_tk * rows[row_tk]."""
    for t in range(row_TK.shape[0]):
        out = out_TD[t]
        out[:] = 0
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            if r < rows_RD.shape[0]:
                row = rows_RD[r]
                weight = weight_TK[t, k]
                for d in range(row.shape[0]):
                    out[d] += weight * row[d]


def sum_rows_half(rows_RD, row_TK, weight_TK, out_TD):
    """The same in bfloat16."""
    width = rows_RD.shape[1]
    acc = np.empty(width, np.float32)
    bits = acc.view(np.uint32)
    for t in range(row_TK.shape[0]):
        acc[:] = 0
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            if r < rows_RD.shape[0]:
                row = rows_RD[r]
                weight = np.float32(weight_TK[t, k])
                for d in range(width):
                    acc[d] += weight * np.uint32(np.uint32(row[d]) << np.uint32(16)).view(np.float32)
        round_half(bits, out_TD[t])


def round_half(bits_D, out_D):
    """float32 bits -> bfloat16 bits, to nearest even; NaN stays NaN."""
    for d in range(bits_D.shape[0]):
        b = bits_D[d]
        if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out_D[d] = np.uint16(0x7FC0)
        else:
            odd = (b >> np.uint32(16)) & np.uint32(1)
            out_D[d] = np.uint16((b + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def weighted_sum_backward(grad_TD, rows_RD, weight_TK, row_TK, grad_RD, grad_TK):
    """Gradients of sum_rows: of each row its weight times the token's gradient, of each weight a dot
    product."""
    for t in range(row_TK.shape[0]):
        grad = grad_TD[t]
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            dot = weight_TK[t, k] * 0
            if r < rows_RD.shape[0]:
                row = rows_RD[r]
                into = grad_RD[r]
                weight = weight_TK[t, k]
                for d in range(row.shape[0]):
                    into[d] = weight * grad[d]
                    dot += grad[d] * row[d]
            grad_TK[t, k] = dot


def weighted_sum_backward_half(grad_TD, rows_RD, weight_TK, row_TK, grad_RD, grad_TK):
    """The same in bfloat16."""
    width = rows_RD.shape[1]
    grad, acc = np.empty(width, np.float32), np.empty(width, np.float32)
    bits = acc.view(np.uint32)
    for t in range(row_TK.shape[0]):
        for d in range(width):
            grad[d] = np.uint32(np.uint32(grad_TD[t, d]) << np.uint32(16)).view(np.float32)
        for k in range(row_TK.shape[1]):
            r = row_TK[t, k]
            dot = np.float32(0)
            if r < rows_RD.shape[0]:
                row = rows_RD[r]
                weight = np.float32(weight_TK[t, k])
                for d in range(width):
                    acc[d] = weight * grad[d]
                    dot += grad[d] * np.uint32(np.uint32(row[d]) << np.uint32(16)).view(np.float32)
                round_half(bits, grad_RD[r])
            grad_TK[t, k] = dot
