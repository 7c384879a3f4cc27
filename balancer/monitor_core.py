"""Core of the collapse monitor: one sample of every layer's load -> figures, reasons, a code of its state.

Under `balancer/monitor.py`, which gives it a face. Pure functions over a state of arrays:

    counts [L, E] -> shares -> y = ln(D + d0) -> charts (monitor_charts.py)        growth, jumps
                            -> sums over a window                                  dead experts
                            -> mean shares, router's figures (monitor_figures.py)  what makes a layer uneven
"""

import math
import operator
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.bias_record import checked_sizes
from balancer.forecast_record import MOST_COPIES, checked_sample, copy_state
from balancer.monitor_charts import ChartState, Limits, chart_limits, init_charts, start_charts, update_charts
from balancer.monitor_config import MonitorConfig
from balancer.monitor_figures import (
    FIGURES,
    ROW,
    Given,
    IndicatorState,
    init_indicators,
    noise_floor,
    update_indicators,
    write_batch_dispersion,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# states, the worse the higher
HEALTHY, SKEWED, STALE, COLLAPSING, COLLAPSED = range(5)
STATES = ("HEALTHY", "SKEWED", "STALE", "COLLAPSING", "COLLAPSED")
# reasons, as bits: those of a collapse, those of an uneven layer, those of a stale one, supporting ones
REASONS = (
    "dead", "growing", "concentrated", "fading",
    "uneven", "margin", "saturated", "ranks", "bytes",
    "balancer", "gap",
    "swaps", "logits", "returning",
)  # fmt: skip
BIT: dict[str, int] = {name: 1 << i for i, name in enumerate(REASONS)}
_SKEW_BITS = sum(BIT[name] for name in ("uneven", "margin", "saturated", "ranks", "bytes"))
_STALE_BITS = BIT["balancer"] | BIT["gap"]
# COLLAPSED ends when fewer than this share of the experts that it took have less than so many times the bound
_RELEASE, _NEARLY = 0.5, 3.0
# an expert fades whose load lately is under this share of its usual one (and of a share of the fair one)
_FADED = 0.5
# gain of the usual shares while experts fade and nothing grows: the change of domain was not seen as one
_NO_GROWTH_GAIN = 0.05
# samples that tell what is usual for an expert
_USUAL_SAMPLES = 20
# gain of the mean shares, by which a layer is uneven, and of the dispersion
_MEAN_GAIN, _DISPERSION_GAIN = 0.1, 0.05
# an even router's counts look like this many times a multinomial's at most, at the start
_START_DISPERSION = 8.0
# copies per sample that change by this factor need a new baseline: the noise in y is another
_OTHER_SIZE = 1.5
# supporting reasons: swap density and logits against their baselines, and autocorrelation of y
_FEW_SWAPS, _MORE_LOGITS, _RETURNS_HARDLY = 0.5, math.log(1.5), 0.94


class MonitorState(NamedTuple):
    """What the monitor remembers.

    step []: of the last sample, -1 before the first. shares_LE: of the last sample. mean_LE: shares lately.
    usual_LE, usual_samples_L: mean shares since the last jump, and of how many samples.
    stuck_L: 1 = enough experts fade for an alarm and D does not grow.
    samples_L: with load so far. copies_L: copies of the samples that the baseline is of. dispersion_L: phi.
    block_LE, earlier_LE: counts of the running and the last block of the window for dead experts;
    block_step_L, earlier_step_L: the steps before they began. dead_L: 1 = COLLAPSED is on. uneven_L: 1 =
    "uneven" is on. code_L, since_L: state and the step since which it holds. charts, indicators.
    """

    step: Integers
    shares_LE: Floats
    mean_LE: Floats
    usual_LE: Floats
    usual_samples_L: Floats
    stuck_L: Floats
    samples_L: Floats
    copies_L: Floats
    dispersion_L: Floats
    block_LE: Floats
    earlier_LE: Floats
    block_step_L: Floats
    earlier_step_L: Floats
    dead_L: Floats
    uneven_L: Floats
    code_L: Integers
    since_L: Integers
    charts: ChartState
    indicators: IndicatorState


class Core(NamedTuple):
    """What does not change: sizes, settings, limits of the charts, d0, experts that must fade."""

    num_layers: int
    num_experts: int
    top_k: int
    config: MonitorConfig
    limits: Limits
    least_lack: float
    fading: float


class Output(NamedTuple):
    """code_L [L]: index into STATES, was_L [L]: that of the sample before, reasons_L [L]: bits,
    rows_FL [F, L]: figures, in the order of FIGURES."""

    code_L: Integers
    was_L: Integers
    reasons_L: Integers
    rows_FL: Floats


def init_monitor(
    num_layers: int, num_experts: int, top_k: int, config: MonitorConfig | None = None
) -> tuple[Core, MonitorState]:
    """Return the constants and the state before the first sample.

    num_layers: L. num_experts: E, 2 or more. top_k: K, below E. Raises ValueError for other sizes.
    """
    checked_sizes(num_layers, num_experts, top_k)
    used = MonitorConfig() if config is None else config
    lack, fading = 0.5 * used.least_spread**2, max(1.0, used.fading_frac * num_experts)
    core = Core(num_layers, num_experts, top_k, used, chart_limits(used), lack, fading)
    zero_L, zero_LE = np.zeros(num_layers), np.zeros((num_layers, num_experts))
    state = MonitorState(
        step=np.array(-1), shares_LE=zero_LE, mean_LE=zero_LE.copy(), usual_LE=zero_LE.copy(),
        usual_samples_L=zero_L, stuck_L=zero_L.copy(), samples_L=zero_L.copy(),
        copies_L=zero_L.copy(), dispersion_L=np.ones(num_layers), block_LE=zero_LE.copy(),
        earlier_LE=zero_LE.copy(), block_step_L=zero_L - 1.0, earlier_step_L=zero_L - 1.0,
        dead_L=zero_L.copy(), uneven_L=zero_L.copy(), code_L=np.zeros(num_layers, dtype=np.int64),
        since_L=np.zeros(num_layers, dtype=np.int64), charts=init_charts(num_layers),
        indicators=init_indicators(num_layers),
    )  # fmt: skip
    return core, state


def update_monitor(
    step: SupportsIndex, tokens_per_expert_LE: ArrayLike, num_tokens: int | None, given: Given, core: Core,
    state: MonitorState,
) -> tuple[Output, MonitorState]:  # fmt: skip
    """Return what one sample says of every layer, and the state after it; takes the given state over.

    A layer without load has NaN figures and keeps its state. Raises ValueError for counts that are none, a
    step that does not increase, or more copies than num_tokens * K.
    """
    counts_LE = _checked(step, tokens_per_expert_LE, state)
    now, last = operator.index(step), int(state.step)
    copies_L = counts_LE.sum(axis=1)
    _check_copies(now, copies_L, num_tokens, core.top_k)
    live_L = copies_L > 0
    before = None if live_L.all() else copy_state(state)
    rows_FL = np.full((len(FIGURES), core.num_layers), np.nan)
    rows_FL[ROW["copies"]] = copies_L
    rows_FL[ROW["tokens"]] = copies_L / core.top_k if num_tokens is None else num_tokens
    rows_FL[ROW["gap_steps"]] = now - last if last >= 0 else 0

    shares_LE = counts_LE * (1.0 / np.where(live_L, copies_L, 1.0))[:, None]  # a product is quicker
    if before is not None:
        shares_LE[~live_L] = state.shares_LE[~live_L]
    state = _load_rows(core, shares_LE, copies_L, rows_FL, state)
    state = _chart_rows(core, now, shares_LE, live_L, rows_FL, state)
    state = _dead_rows(core, now, counts_LE, rows_FL, state)
    write_batch_dispersion(counts_LE, copies_L, given, rows_FL)
    indicators = update_indicators(given, rows_FL, state.indicators)
    if given.balancer_step is not None:
        rows_FL[ROW["balancer_age_steps"]] = now - given.balancer_step
    reasons_L, dead_L, uneven_L = _reasons(core, given, rows_FL, indicators.below_L, state)
    code_L = _codes(reasons_L)
    state = state._replace(
        step=np.array(now), shares_LE=shares_LE, indicators=indicators, dead_L=dead_L, uneven_L=uneven_L
    )
    was_L = state.code_L
    if before is not None:
        code_L = np.where(live_L, code_L, was_L)
        rows_FL[:, ~live_L] = np.nan
        reasons_L[~live_L] = 0
        state = _kept(before, state, live_L)._replace(step=np.array(now))
    since_L = np.where(code_L != was_L, now, state.since_L)
    return Output(code_L, was_L, reasons_L, rows_FL), state._replace(code_L=code_L, since_L=since_L)


def _checked(step: SupportsIndex, tokens_per_expert_LE: ArrayLike, state: MonitorState) -> Floats:
    """The counts, as fast as can be: the slow check says what is wrong."""
    counts = np.asarray(tokens_per_expert_LE)
    shape = state.shares_LE.shape
    plain = type(step) is int and int(state.step) < step <= 2**62 and counts.dtype.kind in "iuf"
    if plain and counts.shape == shape and counts.min() >= 0 and counts.max() <= MOST_COPIES:
        return counts.astype(np.float64)
    return checked_sample(step, counts, int(state.step), (shape[0], shape[1]))


def _check_copies(step: int, copies_L: Floats, num_tokens: int | None, top_k: int) -> None:
    if num_tokens is None:
        return
    most = operator.index(num_tokens) * top_k
    if num_tokens < 0 or copies_L.max() > most * (1 + 1e-9):
        layer = int(copies_L.argmax())
        raise ValueError(
            f"step {step}, layer {layer}: {copies_L[layer]:.0f} copies for {num_tokens} tokens of "
            f"top_k={top_k} are {copies_L[layer] - most:.0f} too many; give all tokens of the global batch"
        )


def _load_rows(
    core: Core, shares_LE: Floats, copies_L: Floats, rows_FL: Floats, state: MonitorState
) -> MonitorState:
    """Figures of the shares: entropy, violations, change from the last sample, dispersion."""
    experts = core.num_experts
    log_LE = np.maximum(shares_LE, 1e-300)
    np.log(log_LE, out=log_LE)
    entropy_L = np.minimum(-np.einsum("le,le->l", shares_LE, log_LE), math.log(experts))
    largest_L = shares_LE.max(axis=1)
    off_LE = np.subtract(shares_LE, state.shares_LE, out=log_LE)
    squares_L = np.einsum("le,le->l", off_LE, off_LE)
    change_L = 0.5 * np.abs(off_LE, out=off_LE).sum(axis=1)

    first_L = state.samples_L == 0
    # sum of p (1 - p), with exp(-H) for the sum of squares
    unit_L = np.maximum(1.0 - np.exp(-entropy_L), 1e-12) * 2.0 / np.maximum(copies_L, 1.0)
    seen_L = np.minimum(squares_L / unit_L, 9.0 * np.maximum(state.dispersion_L, 1.0))  # a jump is no noise
    gain_L = np.where(first_L, 0.0, np.maximum(_DISPERSION_GAIN, 1.0 / (state.samples_L + 1.0)))
    dispersion_L = state.dispersion_L + gain_L * (seen_L - state.dispersion_L)
    weight_L = np.maximum(_MEAN_GAIN, 1.0 / (state.samples_L + 1.0))
    mean_LE, usual_LE = state.mean_LE, state.usual_LE  # taken over
    np.subtract(shares_LE, mean_LE, out=off_LE)
    off_LE *= weight_L[:, None]
    mean_LE += off_LE
    usual_gain_L = np.maximum(0.1 / core.config.memory, 1.0 / (state.usual_samples_L + 1.0))
    usual_gain_L = np.maximum(usual_gain_L, _NO_GROWTH_GAIN * state.stuck_L)
    np.subtract(shares_LE, usual_LE, out=off_LE)
    off_LE *= usual_gain_L[:, None]
    usual_LE += off_LE
    faded_L = np.zeros(len(copies_L))
    bound = core.config.fading_share / experts
    if mean_LE.min() < bound:
        faded_LE = (mean_LE < bound) & (mean_LE < _FADED * usual_LE)
        faded_L = np.count_nonzero(faded_LE, axis=1) * (state.usual_samples_L >= _USUAL_SAMPLES)
    rows_FL[ROW["fading_experts"]] = faded_L

    tokens_L = rows_FL[ROW["tokens"]]
    floor_L = np.full(len(copies_L), noise_floor(float(tokens_L[0]), experts, core.top_k))
    for layer in np.flatnonzero(tokens_L != tokens_L[0]):
        floor_L[layer] = noise_floor(float(tokens_L[layer]), experts, core.top_k)
    remembered_L = np.sqrt(weight_L / (2.0 - weight_L))
    rows_FL[ROW["max_share"]] = largest_L
    rows_FL[ROW["entropy"]] = entropy_L / math.log(experts)
    rows_FL[ROW["effective_experts"]] = np.exp(entropy_L)
    rows_FL[ROW["max_violation"]] = violation_L = experts * largest_L - 1.0
    rows_FL[ROW["violation_floor"]] = floor_L
    rows_FL[ROW["excess"]] = violation_L - floor_L
    noise_L = floor_L * np.sqrt(np.maximum(dispersion_L, 1.0)) * remembered_L
    rows_FL[ROW["mean_excess"]] = experts * mean_LE.max(axis=1) - 1.0 - noise_L
    lack_L = np.maximum(math.log(experts) - entropy_L, 0.0)
    rows_FL[ROW["log_lack"]] = np.log(lack_L + core.least_lack)
    rows_FL[ROW["change"]] = np.where(first_L, 0.0, change_L)
    rows_FL[ROW["dispersion"]] = dispersion_L
    return state._replace(
        mean_LE=mean_LE, usual_LE=usual_LE, usual_samples_L=state.usual_samples_L + 1.0,
        dispersion_L=dispersion_L, samples_L=state.samples_L + 1.0,
    )  # fmt: skip


def _chart_rows(
    core: Core, step: int, shares_LE: Floats, live_L: Flags, rows_FL: Floats, state: MonitorState
) -> MonitorState:
    """Take y into the charts; layers whose samples have another size than the baseline's start anew."""
    copies_L, y_L = rows_FL[ROW["copies"]], rows_FL[ROW["log_lack"]]
    experts, charts = core.num_experts, state.charts
    ratio_L = copies_L / np.where(state.copies_L > 0, state.copies_L, 1.0)
    fresh_L = live_L & ((ratio_L > _OTHER_SIZE) | (ratio_L < 1.0 / _OTHER_SIZE))
    noise_L = experts / np.where(live_L, copies_L, 1.0)
    if fresh_L.any():
        started = copy_state(charts)
        started.blocks_BL[:, fresh_L] = np.nan
        for part in (started.age_L, started.block_L, started.seen_L, started.fall_L, started.watch_L):
            part[fresh_L] = 0.0
        started.charts_CL[:, fresh_L] = 0.0
        quiet_L = np.log(0.5 * noise_L + core.least_lack)
        lack_L = np.exp(y_L) - core.least_lack
        sd = math.sqrt(2.0 / (experts - 1))
        uniform_L = lack_L <= 0.5 * _START_DISPERSION * noise_L * (1.0 + 3.0 * sd)
        start_charts(y_L, quiet_L, np.full(len(y_L), max(0.1, sd)), uniform_L, started)
        if fresh_L.all():
            charts = started
        else:
            charts = update_charts_of(core, step, noise_L, rows_FL, charts)
            charts = _kept(started, charts, ~fresh_L)
    else:
        charts = update_charts_of(core, step, noise_L, rows_FL, charts)
    _write_charts(core, rows_FL, charts)
    jumped_L = charts.switches_L > state.charts.switches_L
    if jumped_L.any():  # what the shares were says nothing any more
        for part_LE in (state.mean_LE, state.usual_LE):
            part_LE[jumped_L] = shares_LE[jumped_L]
        state.usual_samples_L[jumped_L] = 1.0
    stuck_L = 1.0 * ((rows_FL[ROW["fading_experts"]] >= core.fading) & (charts.growing_L == 0))
    copies_L = np.where(fresh_L, copies_L, state.copies_L)
    return state._replace(charts=charts, copies_L=copies_L, stuck_L=stuck_L)


def update_charts_of(
    core: Core, step: int, noise_L: Floats, rows_FL: Floats, charts: ChartState
) -> ChartState:
    """Run the charts on the rows of a sample. noise_L: [L] E / copies."""
    # change of noise alone: the sum over the experts of |p - q| / 2 at uniform
    early_L = np.sqrt(_START_DISPERSION / math.pi * noise_L)
    bound = math.log(core.top_k) + core.config.collapsed_height * math.log(core.num_experts / core.top_k)
    severe_L = np.log(rows_FL[ROW["effective_experts"]]) < bound
    fading_L = rows_FL[ROW["fading_experts"]] >= core.fading
    # relative sd of a total variation over E - 1 free shares of normal noise
    change_sd = math.sqrt((math.pi / 2.0 - 1.0) / (core.num_experts - 1))
    return update_charts(
        step, rows_FL[ROW["log_lack"]], rows_FL[ROW["change"]], early_L, change_sd, severe_L, fading_L,
        core.limits, core.config, charts,
    )  # fmt: skip


def _write_charts(core: Core, rows_FL: Floats, charts: ChartState) -> None:
    entropy, least = math.log(core.num_experts), core.least_lack
    rows_FL[ROW["baseline_entropy"]] = 1.0 - np.maximum(np.exp(charts.mean_L) - least, 0.0) / entropy
    watched_L = (charts.watch_L > 0) | (charts.growing_L > 0)
    before_L = np.where(watched_L, charts.before_L, charts.mean_L)
    rows_FL[ROW["before_entropy"]] = 1.0 - np.maximum(np.exp(before_L) - least, 0.0) / entropy
    rows_FL[ROW["slow_chart"] : ROW["fast_chart"] + 1] = charts.charts_CL / core.limits.limit_C1
    rows_FL[ROW["growth"]] = np.where(watched_L, charts.level_L - charts.from_L, 0.0)
    rows_FL[ROW["autocorrelation"]] = np.minimum(np.maximum(charts.cross_L / charts.var_L, 0.0), 0.95)
    rows_FL[ROW["switches"]] = charts.switches_L


def _dead_rows(
    core: Core, step: int, counts_LE: Floats, rows_FL: Floats, state: MonitorState
) -> MonitorState:
    """Dead experts over a window of two blocks, each of which holds so many copies of fair share."""
    # counts that are over-dispersed say less: as many copies more
    fair_L = core.config.dead_copies * core.num_experts * np.maximum(state.dispersion_L, 1.0)
    copies_L = rows_FL[ROW["copies"]]
    if (copies_L >= fair_L).all() and not state.block_LE.any():  # a block a sample
        _write_dead(counts_LE, copies_L, copies_L > 0, core, rows_FL)
        last_L = np.full(core.num_layers, float(state.step))
        rows_FL[ROW["dead_window_steps"]] = step - last_L
        return state._replace(
            earlier_LE=counts_LE, block_step_L=np.full(core.num_layers, float(step)), earlier_step_L=last_L
        )
    block_LE = state.block_LE + counts_LE
    full_L = block_LE.sum(axis=1) >= fair_L
    window_LE = block_LE + np.where(full_L[:, None], 0.0, state.earlier_LE)
    held_L = window_LE.sum(axis=1)
    _write_dead(window_LE, held_L, held_L >= fair_L, core, rows_FL)
    rows_FL[ROW["dead_window_steps"]] = step - np.where(full_L, state.block_step_L, state.earlier_step_L)
    return state._replace(
        earlier_LE=np.where(full_L[:, None], block_LE, state.earlier_LE),
        block_LE=np.where(full_L[:, None], 0.0, block_LE),
        earlier_step_L=np.where(full_L, state.block_step_L, state.earlier_step_L),
        block_step_L=np.where(full_L, float(step), state.block_step_L),
    )


def _write_dead(window_LE: Floats, held_L: Floats, long_L: Flags, core: Core, rows_FL: Floats) -> None:
    """Experts under a share of the fair share of a window, and under a few times that; NaN if not long_L."""
    bound_L1 = (core.config.dead_frac / core.num_experts * held_L)[:, None]
    nearly_L = dead_L = np.zeros(core.num_layers)
    nearly_LE = window_LE < _NEARLY * bound_L1
    if nearly_LE.any():
        nearly_L = np.count_nonzero(nearly_LE, axis=1)
        dead_L = np.count_nonzero(window_LE < bound_L1, axis=1)
    rows_FL[ROW["dead_experts"]] = np.where(long_L, dead_L, np.nan)
    rows_FL[ROW["nearly_dead_experts"]] = np.where(long_L, nearly_L, np.nan)


def _reasons(
    core: Core, given: Given, rows_FL: Floats, below_L: Floats, state: MonitorState
) -> tuple[Integers, Floats, Floats]:
    """Bits of what holds now, and the two latches."""
    config, charts = core.config, state.charts
    on_L, most = state.dead_L > 0, config.collapsed_dead_frac * core.num_experts
    dead_now_L, nearly_L = rows_FL[ROW["dead_experts"]], rows_FL[ROW["nearly_dead_experts"]]
    enough_L = (~on_L & (dead_now_L >= most)) | (on_L & (nearly_L >= _RELEASE * most))
    dead_L = np.where(np.isnan(dead_now_L), state.dead_L, 1.0 * enough_L)
    excess_L = rows_FL[ROW["mean_excess"]]
    uneven_L = 1.0 * (excess_L > config.uneven_violation * np.where(state.uneven_L > 0, 0.7, 1.0))
    height_L = rows_FL[ROW["entropy"]] * math.log(core.num_experts) - math.log(core.top_k)
    low_L = height_L < config.collapsed_height * math.log(core.num_experts / core.top_k)
    growing_L = charts.growing_L > 0
    holds = {"dead": dead_L > 0, "growing": growing_L, "uneven": uneven_L > 0}
    holds["gap"] = rows_FL[ROW["gap_steps"]] > config.stale_after_steps
    holds["returning"] = rows_FL[ROW["autocorrelation"]] > _RETURNS_HARDLY
    if growing_L.any():
        holds["concentrated"] = growing_L & low_L
        holds["fading"] = growing_L & (rows_FL[ROW["fading_experts"]] >= core.fading)
    if given.gain_L is not None:
        holds["margin"] = below_L >= config.margin_samples
    if given.bias_LE is not None:
        holds["saturated"] = rows_FL[ROW["bias_saturation"]] >= config.saturated_frac
    if given.rows_to_rank_LP is not None:
        holds["ranks"] = rows_FL[ROW["rank_skew"]] >= config.rank_skew
    if given.bytes_PP is not None:
        holds["bytes"] = rows_FL[ROW["pair_bytes_ratio"]] > config.bytes_ratio
    if given.balancer_step is not None:
        holds["balancer"] = rows_FL[ROW["balancer_age_steps"]] > config.stale_after_steps
    if given.swaps_LE is not None:
        holds["swaps"] = rows_FL[ROW["swap_density"]] < _FEW_SWAPS
    if given.logit_rms_L is not None:
        holds["logits"] = rows_FL[ROW["logit_rise"]] > _MORE_LOGITS
    reasons_L = np.zeros(core.num_layers, dtype=np.int64)
    for name, holds_L in holds.items():
        reasons_L += BIT[name] * holds_L
    return reasons_L, dead_L, uneven_L


def _codes(reasons_L: Integers) -> Integers:
    code_L = np.where(reasons_L & _SKEW_BITS, SKEWED, HEALTHY)
    code_L = np.where(reasons_L & _STALE_BITS, STALE, code_L)
    code_L = np.where(reasons_L & BIT["growing"], COLLAPSING, code_L)
    return np.where(reasons_L & BIT["dead"], COLLAPSED, code_L)


def _kept(before: Any, after: Any, live_L: Flags) -> Any:
    """The state after, with the layers that are not live as they were before."""
    parts: dict[str, Any] = {}
    for name, new in after._asdict().items():
        old = getattr(before, name)
        if isinstance(new, tuple):
            parts[name] = _kept(old, new, live_L)
        elif name == "step":
            parts[name] = new
        else:  # [L, E], or [L] and [3, L]
            parts[name] = np.where(live_L[:, None] if name.endswith("_LE") else live_L, new, old)
    return type(after)(**parts)
