"""Kernels of activation.py, as plain functions over arrays, which moe/kernels.py compiles. One pass each.

bfloat16 comes as uint16, the upper half of a float32; everything between is float32, rounded once at the end.
exp is a polynomial, so that the compiler makes vectors of the loop: a call of the C library would not be one.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

HELPERS = ("sigmoid", "widen", "narrow")
KERNELS = ("swiglu", "swiglu_half", "swiglu_backward", "swiglu_backward_half")

# exp(r) on [-ln 2 / 2, ln 2 / 2] by interpolation in the Chebyshev points: error 1e-7, relative
_EXP = np.polynomial.Chebyshev.interpolate(np.exp, 6, domain=[-np.log(2) / 2, np.log(2) / 2])
C0, C1, C2, C3, C4, C5, C6 = (np.float32(c) for c in _EXP.convert(kind=np.polynomial.Polynomial).coef)
LOG2_E = np.float32(1 / np.log(2))
# ln 2 in two parts: the first has few bits, so that its multiples are exact
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(np.log(2) - 0.693359375)
ONE, HALF, LIMIT = np.float32(1), np.float32(0.5), np.float32(87)


def sigmoid(x):
    """1 / (1 + exp(-x)) in float32, with exp(-x) = 2^n exp(r), -x held within +-87. Any value for NaN."""
    z = min(max(-x, -LIMIT), LIMIT)
    n = np.floor(z * LOG2_E + HALF)
    r = z - n * LN2_HIGH - n * LN2_LOW
    p = (((((C6 * r + C5) * r + C4) * r + C3) * r + C2) * r + C1) * r + C0
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ONE / (ONE + p * power)


def widen(bits):
    """bfloat16 bits -> float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def narrow(x):
    """float32 -> bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(0x7FC0) if x != x else np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def swiglu(gate_RF, up_RF, out_RF):
    """out = gate * sigmoid(gate) * up."""
    for r in range(gate_RF.shape[0]):
        gate, up, out = gate_RF[r], up_RF[r], out_RF[r]
        for f in range(gate.shape[0]):
            x = gate[f]
            out[f] = x * sigmoid(x) * up[f]


def swiglu_half(gate_RF, up_RF, out_RF):
    """The same in bfloat16."""
    for r in range(gate_RF.shape[0]):
        gate, up, out = gate_RF[r], up_RF[r], out_RF[r]
        for f in range(gate.shape[0]):
            x = widen(gate[f])
            out[f] = narrow(x * sigmoid(x) * widen(up[f]))


def swiglu_backward(grad_RF, gate_RF, up_RF, hidden_RF, grad_up_RF):
    """The forward's result again, and the gradients of its arguments: that of the gate replaces `grad`."""
    for r in range(gate_RF.shape[0]):
        grad, gate, up, hidden, grad_up = grad_RF[r], gate_RF[r], up_RF[r], hidden_RF[r], grad_up_RF[r]
        for f in range(gate.shape[0]):
            x, d = gate[f], grad[f]
            s = sigmoid(x)
            silu = x * s
            hidden[f] = silu * up[f]
            grad_up[f] = d * silu
            grad[f] = d * up[f] * (s + silu * (ONE - s))


def swiglu_backward_half(grad_RF, gate_RF, up_RF, hidden_RF, grad_up_RF):
    """The same in bfloat16."""
    for r in range(gate_RF.shape[0]):
        grad, gate, up, hidden, grad_up = grad_RF[r], gate_RF[r], up_RF[r], hidden_RF[r], grad_up_RF[r]
        for f in range(gate.shape[0]):
            x, d, u = widen(gate[f]), widen(grad[f]), widen(up[f])
            s = sigmoid(x)
            silu = x * s
            hidden[f] = narrow(silu * u)
            grad_up[f] = narrow(d * silu)
            grad[f] = narrow(d * u * (s + silu * (ONE - s)))
