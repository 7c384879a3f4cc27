"""Loops of the default bias law over layers and experts: plain Python that numba compiles, its own twin.

Under `balancer/bias_noise.py` and `balancer/bias_identified.py`, which say what the figures mean; compiled by
`balancer/kernels.py`. Two passes over [L, E] instead of forty: 0.4 ms become 0.05 at 60 x 256.
"""

from typing import Any

# columns of the sums that `measure_layers` gives
CHANGE_SQUARE, CHANGE_LAST, CHANGE_EARLIER, LAST_EARLIER, EARLIER_SQUARE, SQUARE, MEAN_SQUARE = range(7)
NUM_SUMS = 7

ENTRIES = ("read_margins", "measure_layers", "act_layers")


def read_margins(counts_LEB: Any, edges_X: Any, wanted_3: Any, found_LE3: Any) -> None:
    """Write the margins above which `wanted_3` tokens (increasing) lie, spread evenly within a bin.

    counts_LEB: [L, E, B] tokens by margin. edges_X: [B + 1] increasing, units of score. wanted_3: [3].
    found_LE3: [L, E, 3], written, units of score. Of several margins that do (empty bins, and the
    number is that of whole bins) the middle one of the three takes that next to 0.
    """
    num_layers, num_experts, num_bins = counts_LEB.shape
    slack = 1e-9 * wanted_3[2]
    for layer in range(num_layers):
        for e in range(num_experts):
            place, above = num_bins - 1, 0.0
            for k in range(3):
                inside = float(counts_LEB[layer, e, place])
                while place > 0 and above + inside < wanted_3[k] - slack:
                    above += inside
                    place -= 1
                    inside = float(counts_LEB[layer, e, place])
                part = min((wanted_3[k] - above) / max(inside, 1e-300), 1.0)
                margin = edges_X[place + 1] - part * (edges_X[place + 1] - edges_X[place])
                if k == 1 and above + inside <= wanted_3[k] + slack and edges_X[place] > 0.0:
                    below = place - 1
                    while below >= 0 and counts_LEB[layer, e, below] == 0:
                        below -= 1
                    margin = max(edges_X[below + 1], 0.0)
                found_LE3[layer, e, k] = margin


def measure_layers(
    counts_LE: Any,
    scale: Any,
    measured_LE: Any,
    before_LE: Any,
    tau_LE: Any,
    last_LE: Any,
    earlier_LE: Any,
    last_change_LE: Any,
    most: Any,
    known: Any,
    rate: Any,
    mean_LE: Any,
    y_LE: Any,
    change_LE: Any,
    sums_LX: Any,
) -> None:
    """Write violations y, their changes c less the effect of the bias, and sums over the experts.

    scale: 1 / (r T). measured_LE, before_LE: the bias of this and of the last measurement. most: E / K - 1,
    the largest y: the effect of the bias ends there, and at -1. known: 0 if there was no last measurement
    (then c = 0). mean_LE: running mean of y with weight `rate`, changed in place. y_LE, change_LE, sums_LX
    [L, NUM_SUMS]: written.
    """
    num_layers, num_experts = counts_LE.shape
    for layer in range(num_layers):
        s0, s1, s2, s3, s4, s5, s6 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for e in range(num_experts):
            y = counts_LE[layer, e] * scale - 1.0
            last, earlier = last_LE[layer, e], earlier_LE[layer, e]
            tau = tau_LE[layer, e]
            change = 0.0
            if known > 0.0:
                expected = last
                if tau > 0.0:
                    expected += (measured_LE[layer, e] - before_LE[layer, e]) / tau
                change = y - min(max(expected, min(-1.0, last)), max(most, last))
            mean = mean_LE[layer, e] + rate * (y - mean_LE[layer, e])
            y_LE[layer, e], change_LE[layer, e], mean_LE[layer, e] = y, change, mean
            s0 += change * change
            s1 += change * last_change_LE[layer, e]
            s2 += change * earlier
            s3 += last * earlier
            s4 += earlier * earlier
            s5 += y * y
            s6 += mean * mean
        sums_LX[layer, CHANGE_SQUARE], sums_LX[layer, CHANGE_LAST] = s0, s1
        sums_LX[layer, CHANGE_EARLIER], sums_LX[layer, LAST_EARLIER] = s2, s3
        sums_LX[layer, EARLIER_SQUARE], sums_LX[layer, SQUARE] = s4, s5
        sums_LX[layer, MEAN_SQUARE] = s6


def act_layers(
    y_LE: Any,
    last_LE: Any,
    far_L: Any,
    tau_LE: Any,
    gain_L: Any,
    ramp_L: Any,
    ti: Any,
    lost_LE: Any,
    push_LE: Any,
    trust_LE: Any,
    most_trust: Any,
    bend: Any,
    most: Any,
    aim_LE: Any,
    aimed: Any,
    change_LE: Any,
) -> None:
    """Write the change of the bias: g v + push within `most` tau, v = -tau y / (1 + max(y, 0) / bend).

    aimed: 1 = v is aim_LE, what the margins say, and the limit is that or `most` tau; 0 = there are none.
    push_LE: (g / Ti) I, changed in place: where ramp_L it grows by (g v + lost) / ti, elsewhere it fades by a
    tenth. trust_LE: factor of v, changed in place by what the last step did to an
    expert that was and is beyond far_L: halved where y has changed its sign and is more than half as large,
    1.4 times as much (up to most_trust) where y is still more than 0.7 of what it was (with an aim, which is
    no guess: more than it was); else back towards 1.
    """
    num_layers, num_experts = y_LE.shape
    for layer in range(num_layers):
        gain, on = gain_L[layer], 1.0 if ramp_L[layer] > 0.0 else 0.0
        keep, part = 0.9 + 0.1 * on, on / ti
        judge(y_LE, last_LE, far_L, most_trust, 1.0 if aimed > 0.0 else 0.7, trust_LE, layer)
        for e in range(num_experts):  # without a branch, so that it becomes vector instructions
            y, tau = y_LE[layer, e], tau_LE[layer, e]
            guess, aim = -tau * (y / (1.0 + max(y, 0.0) / bend)), aimed * aim_LE[layer, e]
            step = gain * trust_LE[layer, e] * (aim + (1.0 - aimed) * guess)
            push = keep * push_LE[layer, e] + part * (step + lost_LE[layer, e])
            push = push if abs(push) > 1e-30 else 0.0
            push_LE[layer, e] = push
            bound = max(most * tau, most_trust * abs(aim))
            change_LE[layer, e] = min(max(step + push, -bound), bound)


def judge(y_LE: Any, last_LE: Any, far_L: Any, most_trust: Any, left: Any, trust_LE: Any, layer: Any) -> None:
    """Change the trust of the layer's experts that went too far or not far enough; lead the others' to 1."""
    num_experts, far = y_LE.shape[1], far_L[layer]
    most = 0.0
    for e in range(num_experts):
        trust = trust_LE[layer, e]
        trust_LE[layer, e] = max(min(1.05 * trust, 1.0), 0.95 * trust)
        most = max(most, abs(y_LE[layer, e]))
    if most <= far:
        return
    for e in range(num_experts):
        y, last = y_LE[layer, e], last_LE[layer, e]
        if abs(y) > far and abs(last) > far:
            if y * last < 0.0 and abs(y) > 0.5 * abs(last):
                trust_LE[layer, e] *= 0.5
            elif y * last > 0.0 and abs(y) > left * abs(last):
                limit = most_trust if y > 0.0 else min(most_trust, 2.0)
                trust_LE[layer, e] = max(trust_LE[layer, e], min(1.4 * trust_LE[layer, e], limit))
