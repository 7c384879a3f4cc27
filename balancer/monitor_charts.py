"""Charts of the collapse monitor: does the unevenness of a layer grow, more than a change of domain makes it?

Under `balancer/monitor_core.py`. What is charted is y = ln(D + d0), with D = ln E - H(p) the entropy that a
load lacks to an even one (blind to which expert is which) and d0 that of a spread that matters to nobody.

    y = mean + dev,   dev(t) = a dev(t-1) + e(t)          local level and AR(1); z = e / sd(e) is white
    S = max(0, S + clip(z, 4) - k)                        cumulative sums (Page, 1954), three in parallel

A chart that crosses its limit h says that y has risen, which a change of domain does too; what only a
collapse does is to go on. So the first crossing, or a jump of the shares, sets the baseline to where y is now
and starts a watch: growth beyond *that* within the watch is the alarm. A layer in which few experts carry
everything, and more so than before, is one at once.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.monitor_config import MonitorConfig

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# reference values k of the slow, mid and fast chart: half the shift in sd that each is quickest at
SLACKS = (0.5, 1.0, 2.0)
# Siegmund's correction of the limit for the overshoot of a discrete sum
_OVERSHOOT = 1.166
# innovations count up to so many sd, but in the fast chart: one wild sample is no trend
_CLIP = 4.0
# the chart for a fall, which only moves the baseline down: no alarm hangs on it
_FALL_SLACK, _FALL_LIMIT = 0.5, 8.0
# a baseline of n samples is off by sd(dev) sqrt((1 + a) / ((1 - a) n)), which shifts every z by 1 / sqrt(n):
# the charts leave out so many of these
_UNSURE = 1.5
_LEVEL_GAIN = 0.3
_MOST_AUTOCORRELATION = 0.95
_LEAST_SD = 0.03
# samples after a jump that tell where y is now: one of them alone may be a low one
_SETTLING = 30
# growth too slow for the charts, whose baseline follows it: so many means of so many samples rise one after
# the other, each time by this part of the whole rise (a change of domain that was not seen as a jump is one
# step, in one block or two), which is so many times what a watch asks for, and so many sd of e
_BLOCKS, _BLOCK, _CREEP_PART, _CREEP, _CREEP_SDS = 5, 100, 0.125, 2.0, 5.0
# part of growth_sds that is enough where a chart crosses its limit a second time
_CROSSED_PART = 0.67
# jumps that follow each other within so many samples are one
_SAME_JUMP = 20
# samples that tell what a usual change of the shares is; before: so much and so many times the noise
_USUAL_CHANGES, _EARLY_CHANGE, _EARLY_NOISE = 8, 0.1, 2.0
# rise of y in a severe sample over the baseline, that it is news
_SEVERE_GROWTH = 0.5


def run_length(slack: float, limit: float) -> float:
    """Return the mean number of samples between false alarms of a one-sided chart on white normal noise.

    slack: k, in standard deviations. limit: h. Siegmund's approximation (Sequential Analysis, 1985):
    (exp(2k(h + 1.166)) - 2k(h + 1.166) - 1) / (2 k^2); within some 7 %. Raises ValueError unless both are
    above 0.

    >>> round(run_length(0.5, 5.0))
    938
    """
    if not (slack > 0 and limit > 0 and math.isfinite(slack * limit)):
        raise ValueError(f"slack={slack} and limit={limit} must be above 0 and finite")
    x = 2.0 * slack * (limit + _OVERSHOOT)
    return (math.exp(x) - x - 1.0) / (2.0 * slack * slack)


def chart_limit(slack: float, samples: float, parallel: int = 1) -> float:
    """Return the limit h at which `parallel` charts of one slack give a false alarm every `samples` samples.

    slack: k. samples: mean run length that is wanted, above 1 / k + 1. parallel: m; h grows by ln(m) / (2k).
    Raises ValueError for a value out of range.

    >>> round(chart_limit(0.5, 6e8), 2), round(chart_limit(1.0, 6e8), 2), round(chart_limit(2.0, 6e8), 2)
    (18.35, 9.29, 4.41)
    """
    if not (slack > 0 and parallel >= 1 and math.isfinite(samples)):
        raise ValueError(f"slack={slack} must be above 0, parallel={parallel} 1 or more, samples finite")
    low, high = 1e-9, (math.log(max(samples, 2.0)) + 10.0 + abs(math.log(slack))) / slack
    if not samples > run_length(slack, low):
        raise ValueError(
            f"samples={samples} is less than {run_length(slack, low):.3g}, what a limit of 0 gives at "
            f"slack={slack}; ask for more"
        )
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if run_length(slack, middle) < samples else (low, middle)
    return 0.5 * (low + high) + math.log(parallel) / (2.0 * slack)


class ChartState(NamedTuple):
    """What the charts remember, [L] each but charts_CL [3, L] (slow, mid, fast).

    mean_L: baseline of y. age_L: samples in it. last_L: y of the last sample. level_L: y lately. var_L,
    cross_L: of dev, and of it with the one before. noise_L: variance of e. seen_L: samples that these come
    from. fall_L: chart for a fall. change_L, change_var_L: usual total variation from sample to sample, and
    its variance. quiet_L: samples since the last jump. watch_L: samples left of the watch, 0 = none. from_L:
    y at its start. before_L: baseline before it. block_L,
    blocks_BL: sum of y over the running block, means of the last ones, NaN before. growing_L: 1 = an alarm is
    on. peak_L: highest level in it.
    calm_L: samples since. onset_L: step of the watch's start. switches_L: jumps so far. rises_L: first signs.
    """

    mean_L: Floats
    age_L: Floats
    last_L: Floats
    level_L: Floats
    var_L: Floats
    cross_L: Floats
    noise_L: Floats
    seen_L: Floats
    charts_CL: Floats
    fall_L: Floats
    change_L: Floats
    change_var_L: Floats
    quiet_L: Floats
    watch_L: Floats
    from_L: Floats
    before_L: Floats
    block_L: Floats
    blocks_BL: Floats
    growing_L: Floats
    peak_L: Floats
    calm_L: Floats
    onset_L: Floats
    switches_L: Floats
    rises_L: Floats


class Limits(NamedTuple):
    """Slacks and limits of the three charts, [3, 1]."""

    slack_C1: Floats
    limit_C1: Floats


def chart_limits(config: MonitorConfig) -> Limits:
    """Return the limits that give the wished run length, all charts together."""
    limits = [chart_limit(k, config.false_alarm_samples, len(SLACKS)) for k in SLACKS]
    return Limits(np.array(SLACKS)[:, None], np.array(limits)[:, None])


def init_charts(num_layers: int) -> ChartState:
    """Return the state before the first sample: `age_L` 0."""
    zeros: dict[str, Floats] = {name: np.zeros(num_layers) for name in ChartState._fields}
    zeros["charts_CL"] = np.zeros((len(SLACKS), num_layers))
    zeros["quiet_L"] += _SAME_JUMP
    zeros["blocks_BL"] = np.full((_BLOCKS, num_layers), np.nan)
    for name in ("var_L", "noise_L"):
        zeros[name] += 1.0
    return ChartState(**zeros)


def start_charts(y_L: Floats, quiet_y_L: Floats, sd_L: Floats, uniform_L: Flags, state: ChartState) -> None:
    """Take in a layer's first sample, where `age_L` is 0.

    quiet_y_L: y that an even router gives on average. sd_L: sd of y there. uniform_L: layers whose sample may
    come from one; they have a baseline at once, the others one sample of it.
    """
    new_L = state.age_L == 0
    for values_L, start_L in (
        (state.mean_L, np.where(uniform_L, np.maximum(y_L, quiet_y_L), y_L)),
        (state.age_L, np.where(uniform_L, 8.0, 1.0)),
        (state.last_L, y_L),
        (state.level_L, y_L),
        (state.var_L, sd_L**2),
        (state.noise_L, sd_L**2),
    ):
        np.copyto(values_L, start_L, where=new_L)


def update_charts(
    step: int, y_L: Floats, change_L: Floats, early_L: Floats, change_sd: float, severe_L: Flags,
    fading_L: Flags, limits: Limits, config: MonitorConfig, s: ChartState,
) -> ChartState:  # fmt: skip
    """Return the state after one more sample of every layer; the given one stays as it is.

    step: of training. y_L: ln(D + d0). change_L: total variation from the last sample. early_L: the same as
    noise alone would make it, for as long as the usual is not known. change_sd: least sd of it, over its
    mean. severe_L: few experts carry everything. fading_L: many experts lose what they had.
    """
    # ---- innovation
    dev_L = y_L - s.mean_L
    a_L = _within(s.cross_L / s.var_L, 0.0, _MOST_AUTOCORRELATION)
    e_L = dev_L - a_L * (s.last_L - s.mean_L)
    sd_L = np.sqrt(s.noise_L)
    z_L = e_L / sd_L
    clipped_L = _within(z_L, -_CLIP, _CLIP)
    unsure_L = _UNSURE / np.sqrt(np.maximum(s.age_L, 1.0))

    # ---- charts
    charts_CL = s.charts_CL - (limits.slack_C1 + unsure_L)
    charts_CL[:2] += clipped_L
    charts_CL[2] += z_L
    np.maximum(charts_CL, 0.0, out=charts_CL)
    full_CL = charts_CL / limits.limit_C1
    fullest_L = full_CL.max(axis=0)
    fall_L = np.maximum(0.0, s.fall_L - clipped_L - (_FALL_SLACK + unsure_L))
    level_L = s.level_L + _LEVEL_GAIN * (y_L - s.level_L)

    # ---- jumps of the shares
    known_L = s.seen_L >= _USUAL_CHANGES
    change_sd_L = np.maximum(np.sqrt(s.change_var_L), change_sd * s.change_L)
    usual_bound_L = s.change_L + config.jump_sds * change_sd_L
    bound_L = np.where(known_L, usual_bound_L, _EARLY_CHANGE + _EARLY_NOISE * early_L)
    leap_L = change_L > bound_L
    quiet_L = s.quiet_L + 1.0
    jumped_L = leap_L & (quiet_L > _SAME_JUMP)
    quiet_L[leap_L] = 0.0

    # ---- what it means
    watched_L = s.watch_L > 0
    before_L = np.where(watched_L, s.before_L, s.mean_L)
    spread_L = np.sqrt(np.maximum(s.var_L, s.noise_L / (1.0 - a_L * a_L)))
    growth_L = level_L - np.maximum(s.from_L, s.before_L)
    sds_L = config.growth_sds * spread_L
    enough_L = growth_L >= np.maximum(config.least_growth, sds_L)
    severe_L = severe_L & (y_L > before_L + _SEVERE_GROWTH)
    crossed_L = (fullest_L >= 1.0) & ~jumped_L
    some_L = growth_L >= np.maximum(config.least_growth, _CROSSED_PART * sds_L)
    risen_L = level_L - before_L >= spread_L
    alarm_L = (
        severe_L
        | (fading_L & risen_L & ~leap_L)
        | (watched_L & ~jumped_L & (enough_L | (some_L & crossed_L)))
    )
    creep_L = np.maximum(_CREEP * config.least_growth, _CREEP_SDS * sd_L)
    block_L, blocks_BL, crept_L = _blocks(y_L, jumped_L, creep_L, s)
    alarm_L = (alarm_L | crept_L) & (s.growing_L == 0)
    began_L = jumped_L | (crossed_L & ~watched_L)
    moved_L = jumped_L | crossed_L | (fall_L >= _FALL_LIMIT)

    # ---- what is usual, learnt while nothing goes on; then baseline, watch, alarm
    frozen_L = (fullest_L > 0.5) | leap_L | (s.growing_L > 0)
    usual = _usual(dev_L, e_L, sd_L, 3.5 * spread_L, frozen_L, config, s)
    mean_gain_L = ~frozen_L * np.maximum(1.0 / config.memory, 1.0 / (s.age_L + 1.0))
    mean_L = s.mean_L + mean_gain_L * (y_L - s.mean_L)
    age_L = np.minimum(s.age_L + ~frozen_L, 2.0 * config.memory)
    if moved_L.any():
        np.copyto(level_L, y_L, where=jumped_L)
        np.copyto(mean_L, level_L, where=moved_L)
        np.copyto(age_L, np.where(jumped_L, 1.0, 3.0), where=moved_L)
        charts_CL[:, moved_L] = 0.0
        fall_L[moved_L] = 0.0
    state = s._replace(
        mean_L=mean_L, age_L=age_L, last_L=y_L, level_L=level_L, seen_L=s.seen_L + 1.0, quiet_L=quiet_L,
        charts_CL=charts_CL, fall_L=fall_L, block_L=block_L, blocks_BL=blocks_BL,
        switches_L=s.switches_L + jumped_L, rises_L=s.rises_L + (began_L & ~jumped_L), **usual,
        **_usual_change(change_L, bound_L, leap_L, config, s),
    )  # fmt: skip
    state = _watched(step, began_L, jumped_L, config, s.mean_L, state)
    if alarm_L.any() or s.growing_L.any():
        state = _alarmed(step, alarm_L, watched_L, severe_L | fading_L, config, s.mean_L, state)
    return state


def _usual(
    dev_L: Floats, e_L: Floats, sd_L: Floats, far_L: Floats, frozen_L: Flags, config: MonitorConfig,
    s: ChartState,
) -> dict[str, Floats]:  # fmt: skip
    """Moments of dev and e, with what is wild cut down."""
    gain_L = ~frozen_L * np.maximum(1.0 / config.memory, 1.0 / (10.0 + s.seen_L))
    dev_L, last_dev_L = _within(dev_L, -far_L, far_L), _within(s.last_L - s.mean_L, -far_L, far_L)
    e_L = _within(e_L, -3.0 * sd_L, 3.0 * sd_L)
    return {
        "var_L": s.var_L + gain_L * (dev_L * dev_L - s.var_L),
        "cross_L": s.cross_L + gain_L * (dev_L * last_dev_L - s.cross_L),
        "noise_L": np.maximum(s.noise_L + gain_L * (e_L * e_L - s.noise_L), _LEAST_SD**2),
    }


def _usual_change(
    change_L: Floats, bound_L: Floats, leap_L: Flags, config: MonitorConfig, s: ChartState
) -> dict[str, Floats]:
    """Mean and variance of the change from sample to sample, without jumps."""
    gain_L = ~leap_L * np.maximum(1.0 / config.memory, 1.0 / (1.0 + s.seen_L))
    off_L = np.minimum(change_L, bound_L) - s.change_L
    return {
        "change_L": s.change_L + gain_L * off_L,
        "change_var_L": s.change_var_L + gain_L * (off_L * off_L * (1.0 - gain_L) - s.change_var_L),
    }


def _watched(
    step: int, began_L: Flags, jumped_L: Flags, config: MonitorConfig, mean_L: Floats, s: ChartState
) -> ChartState:
    """Begin and go on with watches. mean_L: the baseline before this sample."""
    if not (began_L.any() or s.watch_L.any()):
        return s
    watch_L = np.where(began_L, float(config.watch_samples), np.maximum(0.0, s.watch_L - 1.0))
    from_L = np.where(began_L, s.level_L, s.from_L)
    # right after a jump y may be low by chance: what it is in the mean counts
    settling_L = (s.watch_L > 0) & (s.quiet_L > 0) & (s.quiet_L <= _SETTLING)
    np.copyto(from_L, np.maximum(from_L, s.mean_L), where=settling_L)
    return s._replace(
        watch_L=watch_L,
        from_L=from_L,
        before_L=np.where(began_L, mean_L, s.before_L),
        onset_L=np.where(began_L, float(step), s.onset_L),
    )


def _alarmed(
    step: int, alarm_L: Flags, watched_L: Flags, grave_L: Flags, config: MonitorConfig, mean_L: Floats,
    s: ChartState,
) -> ChartState:  # fmt: skip
    """Begin and end alarms. grave_L: what does not end now; mean_L: the baseline before this sample."""
    alone_L = alarm_L & ~watched_L  # no watch says where it began
    from_L, before_L = np.where(alone_L, mean_L, s.from_L), np.where(alone_L, mean_L, s.before_L)
    higher_L = alarm_L | (s.level_L > s.peak_L + 0.1)
    calm_L = np.where(higher_L, 0.0, s.calm_L + 1.0)
    over_L = (calm_L >= config.calm_samples) | (s.level_L < from_L)
    ended_L = (s.growing_L > 0) & over_L & ~grave_L
    return s._replace(
        from_L=from_L,
        before_L=before_L,
        onset_L=np.where(alone_L, float(step), s.onset_L),
        peak_L=np.where(higher_L, s.level_L, s.peak_L),
        calm_L=calm_L,
        growing_L=np.where(alarm_L, 1.0, np.where(ended_L, 0.0, s.growing_L)),
        watch_L=np.where(ended_L, 0.0, s.watch_L),
        mean_L=np.where(ended_L, s.level_L, s.mean_L),
        age_L=np.where(ended_L, 3.0, s.age_L),
    )


def _blocks(y_L: Floats, jumped_L: Flags, growth_L: Floats, s: ChartState) -> tuple[Floats, Floats, Flags]:
    """Means of y over blocks of samples, and the layers in which they rise steadily."""
    block_L = s.block_L + y_L
    done_L = (s.seen_L % _BLOCK == _BLOCK - 1) & ~jumped_L
    crept_L = np.zeros(len(y_L), dtype=np.bool_)
    if not (done_L.any() or jumped_L.any()):
        return block_L, s.blocks_BL, crept_L
    shifted_BL = np.concatenate([s.blocks_BL[1:], block_L[None] / _BLOCK])
    blocks_BL = np.where(done_L, shifted_BL, s.blocks_BL)
    blocks_BL[:, jumped_L] = np.nan
    # the block with the jump in it is no block
    block_L = np.where(jumped_L, np.nan, np.where(done_L, 0.0, block_L))
    rise_BL, total_L = np.diff(blocks_BL, axis=0), blocks_BL[-1] - blocks_BL[0]
    crept_L = done_L & (total_L >= growth_L) & (rise_BL >= _CREEP_PART * total_L).all(axis=0)
    return block_L, blocks_BL, crept_L


def _within(value_L: Floats, low: Floats | float, high: Floats | float) -> Floats:
    """np.clip in half its time."""
    return np.minimum(np.maximum(value_L, low), high)
