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
from balancer.monitor_sizes import (
    SizeState,
    at_usual_size,
    change_at_usual_size,
    init_sizes,
    is_usual,
    update_sizes,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# states, the worse the higher
HEALTHY, SKEWED, STALE, COLLAPSING, COLLAPSED = range(5)
STATES = ("HEALTHY", "SKEWED", "STALE", "COLLAPSING", "COLLAPSED")
# reasons, as bits, those of the worse state first: of a collapse, of a stale layer, of an uneven one,
# supporting ones
REASONS = (
    "dead", "growing", "concentrated", "fading",
    "balancer", "gap",
    "uneven", "margin", "saturated", "ranks", "bytes",
    "swaps", "logits", "returning",
)  # fmt: skip
BIT: dict[str, int] = {name: 1 << i for i, name in enumerate(REASONS)}
_SKEW_BITS = sum(BIT[name] for name in ("uneven", "margin", "saturated", "ranks", "bytes"))
_STALE_BITS = BIT["balancer"] | BIT["gap"]
# COLLAPSED ends when fewer than this share of the experts that it took have less than so many times the bound
_RELEASE, _NEARLY = 0.5, 3.0
# the window for dead experts is made of so many blocks and the running one
_WINDOW_BLOCKS = 4
# windows in a row that a single expert must be dead for COLLAPSED, at the least and at the most: as many as
# counts vary more than a multinomial's, which so many samples tell; a sample that holds several windows is
# one, or this part of the square root of them
_LEAST_WINDOWS, _MOST_WINDOWS, _KNOWN_DISPERSION, _ROOT_PART = 3.0, 8.0, 20, 0.25
# an expert is dead whose mean share lately is below so much of the fair one: seven samples after it had that
_LATELY = 0.5
# an expert is back for sure where its mean share is so many sd of it over the bound
_DOUBT_SDS = 4.0
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
# supporting reasons: swap density and logits against their baselines, and autocorrelation of y
_FEW_SWAPS, _MORE_LOGITS, _RETURNS_HARDLY = 0.5, math.log(1.5), 0.94


class MonitorState(NamedTuple):
    """What the monitor remembers.

    step []: of the last sample, -1 before the first. shares_LE: of the last sample. mean_LE: shares lately.
    usual_LE, usual_samples_L: mean shares since the last jump, and of how many samples.
    stuck_L: 1 = enough experts fade for an alarm and D does not grow.
    samples_L: with load so far. dispersion_L: phi while nothing grows.
    block_LE, earlier_WLE: counts of the running and the last blocks of the window for dead experts, the
    newest first; block_step_L: the step before the running one began; spans_WL: steps that the others span.
    gone_L: windows in a row with enough dead experts for COLLAPSED, times the dead; while it is on, below 0:
    windows without any. dead_L: 1 = COLLAPSED is on. uneven_L: 1 = "uneven" is on. code_L, since_L: state
    and the step since which it holds. sizes, charts, indicators.
    """

    step: Integers
    shares_LE: Floats
    mean_LE: Floats
    usual_LE: Floats
    usual_samples_L: Floats
    stuck_L: Floats
    samples_L: Floats
    dispersion_L: Floats
    block_LE: Floats
    earlier_WLE: Floats
    block_step_L: Floats
    spans_WL: Floats
    gone_L: Floats
    dead_L: Floats
    uneven_L: Floats
    code_L: Integers
    since_L: Integers
    sizes: SizeState
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
        dispersion_L=np.ones(num_layers), block_LE=zero_LE.copy(),
        earlier_WLE=np.zeros((_WINDOW_BLOCKS, num_layers, num_experts)), block_step_L=zero_L - 1.0,
        spans_WL=np.zeros((_WINDOW_BLOCKS, num_layers)), gone_L=zero_L.copy(),
        dead_L=zero_L.copy(), uneven_L=zero_L.copy(), code_L=np.zeros(num_layers, dtype=np.int64),
        since_L=np.zeros(num_layers, dtype=np.int64), sizes=init_sizes(num_layers),
        charts=init_charts(num_layers), indicators=init_indicators(num_layers),
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
    reasons_L, uneven_L = _reasons(core, given, rows_FL, indicators.below_L, state)
    code_L = _codes(reasons_L)
    state = state._replace(
        step=np.array(now), shares_LE=shares_LE, indicators=indicators, uneven_L=uneven_L,
        sizes=state.sizes._replace(last_L=copies_L),
    )  # fmt: skip
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
    inverse_L = 1.0 / np.maximum(copies_L, 1.0) + 1.0 / np.maximum(state.sizes.last_L, 1.0)
    unit_L = np.maximum(1.0 - np.exp(-entropy_L), 1e-12) * inverse_L
    seen_L = np.minimum(squares_L / unit_L, 9.0 * np.maximum(state.dispersion_L, 1.0))  # a jump is no noise
    gain_L = np.maximum(_DISPERSION_GAIN, 1.0 / (state.samples_L + 1.0))
    gain_L = np.where(first_L | _growth(core, state.charts), 0.0, gain_L)  # neither is a collapse
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


def _growth(core: Core, charts: ChartState) -> Flags:
    """[L] layers whose load may be growing: an alarm is on, or a chart is half full."""
    return (charts.growing_L > 0) | (charts.charts_CL > 0.5 * core.limits.limit_C1).any(axis=0)


def _chart_rows(
    core: Core, step: int, shares_LE: Floats, live_L: Flags, rows_FL: Floats, state: MonitorState
) -> MonitorState:
    """Take y into the charts; layers whose samples have had another size for long start anew."""
    copies_L, y_L, charts = rows_FL[ROW["copies"]], rows_FL[ROW["log_lack"]], state.charts
    change_L, sizes = rows_FL[ROW["change"]], state.sizes
    noise_L = core.num_experts / np.where(live_L, copies_L, 1.0)
    if is_usual(copies_L, sizes):
        charts = update_charts_of(core, step, y_L, change_L, noise_L, rows_FL, charts)
    else:
        watched_L = (charts.watch_L > 0) | (charts.growing_L > 0)
        fresh_L, sizes = update_sizes(copies_L, live_L, watched_L, sizes)
        started = _started(core, y_L, noise_L, fresh_L, charts)
        y_L = at_usual_size(
            y_L, charts.level_L, copies_L, core.num_experts - 1.0, core.least_lack, state.dispersion_L,
            state.sizes,
        )  # fmt: skip
        change_L = change_at_usual_size(change_L, copies_L, state.sizes)
        if not fresh_L.all():
            charts = update_charts_of(core, step, y_L, change_L, noise_L, rows_FL, charts)
        charts = _kept(started, charts, ~fresh_L)
    _write_charts(core, rows_FL, charts)
    jumped_L = charts.switches_L > state.charts.switches_L
    if jumped_L.any():  # what the shares were says nothing any more
        for part_LE in (state.mean_LE, state.usual_LE):
            part_LE[jumped_L] = shares_LE[jumped_L]
        state.usual_samples_L[jumped_L] = 1.0
    stuck_L = 1.0 * ((rows_FL[ROW["fading_experts"]] >= core.fading) & (charts.growing_L == 0))
    return state._replace(charts=charts, sizes=sizes, stuck_L=stuck_L)


def _started(core: Core, y_L: Floats, noise_L: Floats, fresh_L: Flags, charts: ChartState) -> ChartState:
    """The charts with those of the fresh layers begun at y; nothing but an alarm that is on is kept there."""
    started = copy_state(charts)
    started.blocks_BL[:, fresh_L] = np.nan
    for part in (started.age_L, started.block_L, started.seen_L, started.fall_L, started.watch_L):
        part[fresh_L] = 0.0
    started.charts_CL[:, fresh_L] = 0.0
    quiet_L = np.log(0.5 * noise_L + core.least_lack)
    lack_L = np.exp(y_L) - core.least_lack
    sd = math.sqrt(2.0 / (core.num_experts - 1))
    uniform_L = lack_L <= 0.5 * _START_DISPERSION * noise_L * (1.0 + 3.0 * sd)
    start_charts(y_L, quiet_L, np.full(len(y_L), max(0.1, sd)), uniform_L, started)
    return started


def update_charts_of(
    core: Core, step: int, y_L: Floats, change_L: Floats, noise_L: Floats, rows_FL: Floats, charts: ChartState
) -> ChartState:
    """Run the charts on a sample. y_L, change_L: [L] at the baseline's size. noise_L: [L] E / copies."""
    # change of noise alone: the sum over the experts of |p - q| / 2 at uniform
    early_L = np.sqrt(_START_DISPERSION / math.pi * noise_L)
    bound = math.log(core.top_k) + core.config.collapsed_height * math.log(core.num_experts / core.top_k)
    severe_L = np.log(rows_FL[ROW["effective_experts"]]) < bound
    fading_L = rows_FL[ROW["fading_experts"]] >= core.fading
    # relative sd of a total variation over E - 1 free shares of normal noise
    change_sd = math.sqrt((math.pi / 2.0 - 1.0) / (core.num_experts - 1))
    return update_charts(
        step, y_L, change_L, early_L, change_sd, severe_L, fading_L, core.limits, core.config, charts
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
    """Dead experts over the shortest window that holds enough copies, and how sure they are."""
    fair = core.config.dead_copies * core.num_experts
    copies_L = rows_FL[ROW["copies"]]
    alone_L = copies_L >= fair
    if alone_L.all() and (state.block_step_L == state.step).all():  # a window a sample, no block begun
        state.earlier_WLE[0] = counts_LE
        state.spans_WL[0] = step - state.block_step_L
        rows_FL[ROW["dead_window_steps"]] = state.spans_WL[0]
        _write_dead(counts_LE, copies_L, alone_L, state.mean_LE, core, rows_FL)
        return _sure(core, fair, rows_FL, state._replace(block_step_L=np.full(core.num_layers, float(step))))
    block_LE = state.block_LE + counts_LE
    full_L = block_LE.sum(axis=1) >= fair / _WINDOW_BLOCKS
    window_LE, held_L, steps_L = block_LE.copy(), block_LE.sum(axis=1), step - state.block_step_L
    for earlier_LE, span_L in zip(state.earlier_WLE, state.spans_WL):
        short_L = held_L < fair
        if short_L.any():
            window_LE += earlier_LE * short_L[:, None]
            held_L, steps_L = window_LE.sum(axis=1), steps_L + span_L * short_L
    rows_FL[ROW["dead_window_steps"]] = steps_L
    _write_dead(window_LE, held_L, held_L >= fair, state.mean_LE, core, rows_FL)
    return _sure(core, fair, rows_FL, _block_ended(step, block_LE, full_L, state))


def _block_ended(step: int, block_LE: Floats, full_L: Flags, state: MonitorState) -> MonitorState:
    """Move the running blocks of the layers where they are full to the others."""
    if not full_L.any():
        return state._replace(block_LE=block_LE)
    moved_WLE = np.concatenate([block_LE[None], state.earlier_WLE[:-1]])
    moved_WL = np.concatenate([(step - state.block_step_L)[None], state.spans_WL[:-1]])
    return state._replace(
        block_LE=np.where(full_L[:, None], 0.0, block_LE),
        earlier_WLE=np.where(full_L[:, None], moved_WLE, state.earlier_WLE),
        spans_WL=np.where(full_L, moved_WL, state.spans_WL),
        block_step_L=np.where(full_L, float(step), state.block_step_L),
    )


def _sure(core: Core, fair: float, rows_FL: Floats, state: MonitorState) -> MonitorState:
    """Add up windows with enough dead experts, times their number: many experts have no bad luck at once.
    While COLLAPSED is on, those without go below 0, one each."""
    dead_L, on_L = rows_FL[ROW["dead_experts"]], state.dead_L > 0
    enough_L = dead_L >= _enough_dead(core)
    if not ((enough_L | on_L).any() or state.gone_L.any()):
        return state
    windows_L = rows_FL[ROW["copies"]] / fair
    windows_L = np.minimum(windows_L, np.maximum(1.0, _ROOT_PART * np.sqrt(windows_L)))
    back_L = on_L & (rows_FL[ROW["nearly_dead_experts"]] < _RELEASE * _enough_dead(core))
    back_L = np.where(back_L, np.minimum(state.gone_L, 0.0) - windows_L, 0.0)
    gone_L = np.where(enough_L, np.maximum(state.gone_L, 0.0) + dead_L * windows_L, back_L)
    state = state._replace(gone_L=np.where(np.isnan(dead_L), state.gone_L, gone_L))
    return state._replace(dead_L=_dead_latch(core, rows_FL, state))


def _enough_dead(core: Core) -> float:
    return core.config.collapsed_dead_frac * core.num_experts


def _dead_latch(core: Core, rows_FL: Floats, state: MonitorState) -> Floats:
    """[L] 1 = COLLAPSED. It begins where enough experts have been dead in enough windows. It ends where
    hardly one has been nearly so in as many, or in one if the mean load lately leaves no doubt: a load near
    the bound is one collapse at the most."""
    on_L, gone_L = state.dead_L > 0, state.gone_L
    dispersion_L = np.minimum(np.maximum(state.dispersion_L, _LEAST_WINDOWS), _MOST_WINDOWS)
    need_L = np.where(state.samples_L < _KNOWN_DISPERSION, _MOST_WINDOWS, dispersion_L)
    if on_L.any():
        share = _NEARLY * core.config.dead_frac / core.num_experts
        copies_L = rows_FL[ROW["copies"]] * (2.0 - _MEAN_GAIN) / _MEAN_GAIN
        bound_L = share + _DOUBT_SDS * np.sqrt(dispersion_L * share / np.maximum(copies_L, 1.0))
        lately_L = np.count_nonzero(state.mean_LE < bound_L[:, None], axis=1)
        plain_L = (gone_L < 0) & (lately_L < _RELEASE * _enough_dead(core))
        on_L = on_L & ~plain_L & (gone_L > -need_L)
    return np.where(on_L | (gone_L >= need_L), 1.0, 0.0)


def _write_dead(
    window_LE: Floats, held_L: Floats, long_L: Flags, mean_LE: Floats, core: Core, rows_FL: Floats
) -> None:
    """Experts under a share of the fair share of a window, and under a few times that; NaN if not long_L.

    mean_LE: shares lately. An expert that had its part until a moment ago has lost it for a moment as far as
    anybody knows: a bias that goes too far does that.
    """
    bound_L1 = (core.config.dead_frac / core.num_experts * held_L)[:, None]
    nearly_L = dead_L = np.zeros(core.num_layers)
    nearly_LE = window_LE < _NEARLY * bound_L1
    if nearly_LE.any():
        nearly_L = np.count_nonzero(nearly_LE, axis=1)
        dead_LE = (window_LE < bound_L1) & (mean_LE < _LATELY / core.num_experts)
        dead_L = np.count_nonzero(dead_LE, axis=1)
    rows_FL[ROW["dead_experts"]] = np.where(long_L, dead_L, np.nan)
    rows_FL[ROW["nearly_dead_experts"]] = np.where(long_L, nearly_L, np.nan)


def _reasons(
    core: Core, given: Given, rows_FL: Floats, below_L: Floats, state: MonitorState
) -> tuple[Integers, Floats]:
    """Bits of what holds now, and the latch of "uneven"."""
    config, charts = core.config, state.charts
    excess_L = rows_FL[ROW["mean_excess"]]
    uneven_L = 1.0 * (excess_L > config.uneven_violation * np.where(state.uneven_L > 0, 0.7, 1.0))
    height_L = rows_FL[ROW["entropy"]] * math.log(core.num_experts) - math.log(core.top_k)
    low_L = height_L < config.collapsed_height * math.log(core.num_experts / core.top_k)
    growing_L = charts.growing_L > 0
    holds = {"dead": state.dead_L > 0, "growing": growing_L, "uneven": uneven_L > 0}
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
    return reasons_L, uneven_L


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
        else:  # [L, E] and [W, L, E], or [L] and [3, L]
            parts[name] = np.where(live_L[:, None] if name.endswith("LE") else live_L, new, old)
    return type(after)(**parts)
