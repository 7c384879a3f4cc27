"""What the time of a score was like: jumps of a recorded trace, and the regime of every origin and layer.

Under `balancer/backtest.py`, in hindsight: used for scoring, never by a forecaster.

The regimes of a score (of origin, horizon and layer; in hindsight, used for nothing but scoring):

    jump      a jump lies after the origin and up to the target: nobody could know
    after     the last jump is the origin's sample or one of the 39 before: little is known yet
    moving    settled, and the running median of the changes at the origin is above the layer's usual one
    quiet     settled otherwise

A change is the total variation from one sample to the next; its running median is over the last 40. A jump is
a change of more than 0.05 that is more than 6 times the running median before it; the first change of a layer
always counts as one. "moving" and "quiet" are told apart by changes up to the origin, never by the target: a
class chosen by the error itself would have any coverage one likes.
"""

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import total_variation
from balancer.trace import Trace

SCORED_REGIMES = ("jump", "after", "quiet", "moving")
JUMP, AFTER, QUIET, MOVING = range(4)
# what a jump is, and how long it is felt; see above
_JUMP_RATIO, _JUMP_TV, _AFTER_SAMPLES = 6.0, 0.05, 40

Float = NDArray[np.float64]
Int = NDArray[np.int64]


def sample_changes(trace: Trace) -> Float:
    """Return the change of every layer with every sample: TV from its last sample with load.

    Returns [W, L] float64 in [0, 1]; NaN where the sample has no load, and at the first that has.
    """
    num_samples, num_layers, num_experts = trace.tokens_per_expert_WLE.shape
    change_WL = np.full((num_samples, num_layers), np.nan)
    last_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
    for w in range(num_samples):  # sample by sample: the trace may be memory-mapped
        row_LE = np.asarray(trace.tokens_per_expert_WLE[w])
        change_WL[w] = total_variation(last_LE, row_LE)
        last_LE = np.where(row_LE.sum(axis=-1, keepdims=True) > 0, row_LE, last_LE)
    return change_WL


def find_jumps(change_WL: Float) -> NDArray[np.bool_]:
    """Return which samples came with a jump, [W, L] bool.

    change_WL: of `sample_changes`. A jump is a change of more than 0.05 that is more than 6 times the median
    of those among the last 40 samples before, or the first change of a layer.
    """
    first_WL = ~np.isnan(change_WL) & (np.cumsum(~np.isnan(change_WL), axis=0) == 1)
    before_WL = np.full(change_WL.shape, np.nan)
    before_WL[1:] = _running_median(change_WL)[:-1]
    # a comparison with NaN is false: no change, or none to compare it with
    return first_WL | ((change_WL > _JUMP_RATIO * before_WL) & (change_WL > _JUMP_TV))


def _running_median(change_WL: Float) -> Float:
    """Return the median of the changes of the last 40 samples, [W, L]; NaN for none."""
    median_WL: Float = np.empty(change_WL.shape)
    for w in range(change_WL.shape[0]):
        median_WL[w] = _median(change_WL[max(0, w + 1 - _AFTER_SAMPLES) : w + 1])
    return median_WL


def _median(values_XL: Float) -> Float:
    """Return the median over the first axis without the NaN, NaN for none (and no warning)."""
    if values_XL.shape[0] == 0:
        return np.full(values_XL.shape[1:], np.nan)
    ordered_XL = np.sort(values_XL, axis=0)  # NaN last
    number_L = (~np.isnan(ordered_XL)).sum(axis=0)
    layers_L = np.arange(values_XL.shape[1], dtype=np.int64)
    below_L: Float = ordered_XL[np.maximum(0, number_L - 1) // 2, layers_L]
    above_L: Float = ordered_XL[number_L // 2, layers_L]
    return 0.5 * (below_L + above_L)


def find_regimes(change_WL: Float, jump_WL: NDArray[np.bool_], target_HW: Int) -> NDArray[np.int8]:
    """Return the regime of every origin and layer at every horizon.

    change_WL: of `sample_changes`. jump_WL: of `find_jumps`. target_HW: [H, W] sample that each origin is
    scored on, -1 for none. Returns [H, W, L] int8, index into SCORED_REGIMES; -1 without a target.
    """
    samples_W1 = np.arange(change_WL.shape[0], dtype=np.int64)[:, None]
    last_WL = np.maximum.accumulate(np.where(jump_WL, samples_W1, -_AFTER_SAMPLES), axis=0)
    after_WL = samples_W1 - last_WL < _AFTER_SAMPLES
    median_WL = _running_median(change_WL)
    usual_L = _median(np.where(after_WL, np.nan, median_WL))
    settled_WL = np.where(median_WL > usual_L, MOVING, QUIET)
    regime_HWL = np.full((target_HW.shape[0], *change_WL.shape), -1, dtype=np.int8)
    for h, target_W in enumerate(target_HW):
        (origins,) = np.nonzero(target_W >= 0)
        jumps_OL = last_WL[target_W[origins]] > origins[:, None]
        calm_OL = np.where(after_WL[origins], AFTER, settled_WL[origins])
        regime_HWL[h, origins] = np.where(jumps_OL, JUMP, calm_OL)
    return regime_HWL
