"""Figures of the collapse monitor: what a layer's load and its router look like in one sample.

Under `balancer/monitor_core.py`. The first rows come from the counts alone; the others only from what the
caller gives, and are NaN where it gives nothing. Rows of the router (gain margin, autocorrelation, swaps,
logits) lead a collapse or attend it; they explain an alarm and raise none.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import violation_floor

Floats = NDArray[np.float64]

# name of a figure -> what it is
FIGURES: dict[str, str] = {
    "tokens": "tokens of the sample",
    "copies": "copies routed",
    "max_share": "largest share of an expert",
    "entropy": "H / ln E: 1 = even, ln K / ln E = K experts have all",
    "effective_experts": "exp(H): as many evenly loaded experts would have this entropy",
    "max_violation": "largest load over the mean - 1",
    "violation_floor": "the same that a balanced router shows by chance (multinomial)",
    "excess": "max_violation - violation_floor",
    "mean_excess": "max violation of the mean shares lately, over what their noise gives",
    "log_lack": "y = ln(D + d0), D = ln E - H",
    "baseline_entropy": "entropy at the baseline of the charts",
    "before_entropy": "entropy at the baseline before the growth that is watched",
    "slow_chart": "over its limit: 1 = a first sign of growth",
    "mid_chart": "over its limit",
    "fast_chart": "over its limit",
    "growth": "ln D since the watch began, 0 = none on",
    "autocorrelation": "of y from sample to sample, lately (0 to 0.95): near 1 the load hardly returns",
    "change": "total variation from the last sample",
    "dispersion": "variance of the counts from sample to sample over multinomial",
    "batch_dispersion": "variance of the counts from batch to batch of the step over multinomial",
    "switches": "jumps of the shares so far that were no collapse",
    "fading_experts": "experts that lately have little, and under half of what was usual for them",
    "dead_experts": "experts under 1 % of their fair share over the window, NaN while it is too short",
    "nearly_dead_experts": "the same for three times that share",
    "dead_window_steps": "training steps that the window spans",
    "aux_loss_over_balance": "balance loss per token - 1",
    "confidence": "mean of the largest score, as a share of a token's scores",
    "logit_rise": "ln of the logits' rms over its baseline",
    "swap_density": "tokens at the border per unit of score and expert, over the baseline's",
    "gain_margin": "bias gain / reinforcement: below 1 the bias cannot hold the load",
    "gain_limit_frac": "bias gain / largest stable gain",
    "bias_saturation": "share of the experts whose bias is at its limit",
    "rank_skew": "rows of the fullest rank over the mean",
    "bytes": "bytes of the step, over all pairs of ranks",
    "bytes_ratio": "bytes of the step over the formula's",
    "pair_bytes_ratio": "the same of the pair of ranks that is furthest over",
    "balancer_age_steps": "training steps since the balancer last acted",
    "gap_steps": "training steps since the last sample",
}
ROW: dict[str, int] = {name: row for row, name in enumerate(FIGURES)}
# shares of a baseline of what comes with a step or every so many
_SLOW = 0.05
# share of the limit at which a bias counts as being there
_AT_LIMIT = 0.999


class Given(NamedTuple):
    """What the caller gave beside counts, checked; None where nothing.   See `CollapseMonitor.update`."""

    aux_loss_L: Floats | None = None
    rows_to_rank_LP: Floats | None = None
    bytes_PP: Floats | None = None
    expected_bytes_PP: Floats | None = None
    bias_LE: Floats | None = None
    bias_limit_L: Floats | None = None
    gain_L: Floats | None = None
    reinforcement_L: Floats | None = None
    most_gain_L: Floats | None = None
    logit_rms_L: Floats | None = None
    confidence_L: Floats | None = None
    swaps_LE: Floats | None = None
    swap_delta: float | None = None
    squares_LE: Floats | None = None
    tokens_squared: float | None = None
    balancer_step: int | None = None


class IndicatorState(NamedTuple):
    """swaps_L, logits_L: baselines of ln swap density and ln logit rms, NaN before the first. below_L:
    samples in a row with a gain below the reinforcement."""

    swaps_L: Floats
    logits_L: Floats
    below_L: Floats


def init_indicators(num_layers: int) -> IndicatorState:
    """Return the state before the first sample."""
    unknown_L = np.full(num_layers, np.nan)
    return IndicatorState(unknown_L, unknown_L.copy(), np.zeros(num_layers))


def update_indicators(given: Given, rows_FL: Floats, state: IndicatorState) -> IndicatorState:
    """Write the rows of what was given into rows_FL [F, L], and return the state after it."""
    swaps_L, logits_L, below_L = state
    if given.aux_loss_L is not None:
        rows_FL[ROW["aux_loss_over_balance"]] = given.aux_loss_L - 1.0
    if given.confidence_L is not None:
        rows_FL[ROW["confidence"]] = given.confidence_L
    if given.logit_rms_L is not None:
        rise_L, logits_L = _against(given.logit_rms_L, logits_L)
        rows_FL[ROW["logit_rise"]] = np.where(np.isinf(rise_L), np.nan, rise_L)  # no logits rise no way
    if given.swaps_LE is not None and given.swap_delta is not None:
        share_L = given.swaps_LE.mean(axis=1) / (2.0 * given.swap_delta * rows_FL[ROW["tokens"]])
        rise_L, swaps_L = _against(share_L, swaps_L)
        rows_FL[ROW["swap_density"]] = np.exp(rise_L)
    if given.gain_L is not None:
        below_L = _gain_rows(given.gain_L, given, rows_FL, below_L)
    if given.bias_LE is not None and given.bias_limit_L is not None:
        at_LE = np.abs(given.bias_LE) >= _AT_LIMIT * given.bias_limit_L[:, None]
        rows_FL[ROW["bias_saturation"]] = at_LE.mean(axis=1)
    _traffic_rows(given, rows_FL)
    return IndicatorState(swaps_L, logits_L, below_L)


def _against(value_L: Floats, base_L: Floats) -> tuple[Floats, Floats]:
    """ln of a value over its baseline, and the next baseline, of ln. A value of 0 is none: -inf, and the
    baseline stays, NaN where there is no baseline yet."""
    known_L = value_L > 0
    log_L = np.log(np.where(known_L, value_L, 1.0))
    base_L = np.where(np.isnan(base_L) & known_L, log_L, base_L)
    rise_L = np.where(known_L, log_L - base_L, np.where(value_L == 0, -np.inf - base_L, np.nan))
    return rise_L, np.where(known_L, base_L + _SLOW * rise_L, base_L)


def write_batch_dispersion(counts_LE: Floats, copies_L: Floats, given: Given, rows_FL: Floats) -> None:
    """Write the variance of the counts over the batches of the step, as a multiple of a multinomial's.

    With c the copies of an expert over T tokens, t those of a batch, p = c / copies: sum of squares over the
    batches = (c / T)^2 sum t^2 + phi c (1 - p) (1 - sum t^2 / T^2), summed over the experts.
    """
    if given.squares_LE is None or given.tokens_squared is None:
        return
    copies_L = np.where(copies_L > 0, copies_L, np.nan)
    top_tokens = float(given.tokens_squared)
    tokens_L = rows_FL[ROW["tokens"]]
    share_L = top_tokens / tokens_L**2
    squares_L = (counts_LE**2).sum(axis=1)
    extra_L = given.squares_LE.sum(axis=1) - squares_L * share_L
    unit_L = (copies_L - squares_L / copies_L) * (1.0 - share_L)
    rows_FL[ROW["batch_dispersion"]] = extra_L / np.where(unit_L > 1e-9, unit_L, np.nan)


def _gain_rows(gain_L: Floats, given: Given, rows_FL: Floats, below_L: Floats) -> Floats:
    """Margins of the bias loop; returns how long the gain has been below the reinforcement."""
    if given.most_gain_L is not None:
        rows_FL[ROW["gain_limit_frac"]] = gain_L / given.most_gain_L
    if given.reinforcement_L is None:
        return below_L
    with np.errstate(divide="ignore", invalid="ignore"):
        margin_L = np.where(given.reinforcement_L > 0, gain_L / given.reinforcement_L, np.inf)
    margin_L[np.isnan(gain_L) | np.isnan(given.reinforcement_L)] = np.nan
    rows_FL[ROW["gain_margin"]] = margin_L
    return np.where(margin_L < 1.0, below_L + 1.0, np.where(np.isnan(margin_L), below_L, 0.0))


def _traffic_rows(given: Given, rows_FL: Floats) -> None:
    if given.rows_to_rank_LP is not None:
        mean_L = given.rows_to_rank_LP.mean(axis=1)
        rows_FL[ROW["rank_skew"]] = given.rows_to_rank_LP.max(axis=1) / np.where(mean_L > 0, mean_L, np.nan)
    if given.bytes_PP is not None:
        rows_FL[ROW["bytes"]] = given.bytes_PP.sum()
    if given.bytes_PP is not None and given.expected_bytes_PP is not None:
        expected = given.expected_bytes_PP
        total, wanted = float(given.bytes_PP.sum()), float(expected.sum())
        rows_FL[ROW["bytes_ratio"]] = _over(total, wanted)
        pairs = [_over(float(a), float(b)) for a, b in zip(given.bytes_PP.ravel(), expected.ravel())]
        rows_FL[ROW["pair_bytes_ratio"]] = max(pairs)


def _over(value: float, wanted: float) -> float:
    return value / wanted if wanted > 0 else (1.0 if value == 0 else math.inf)


def noise_floor(num_tokens: float, num_experts: int, top_k: int) -> float:
    """Return `violation_floor` at the nearest of the token counts that are 8 an octave apart, scaled."""
    if num_tokens < 1:
        return math.nan
    near = max(1, round(2.0 ** (round(8.0 * math.log2(num_tokens)) / 8.0)))
    return _floor(near, num_experts, top_k) * math.sqrt(near / num_tokens)


@lru_cache(maxsize=256)
def _floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    return violation_floor(num_tokens, num_experts, top_k)


# ---- what the caller gives, checked ----------------------------------------------------------------------


def check_given(shape_LE: tuple[int, int], fields: dict[str, Any]) -> Given:
    """Return what was given as float64 arrays.

    Raises ValueError for a shape that is not that of the load, or an entry that is negative where it cannot
    be; NaN in a row of [L] means that the figure is not known.
    """
    layers = shape_LE[0]
    done: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    for name, value in done.items():
        if name in ("swap_delta", "tokens_squared", "balancer_step"):
            continue
        array = np.asarray(value)
        usual = array.shape == (layers,) and array.dtype == np.float64 and name.endswith("_L")
        if usual and (name == "reinforcement_L" or not (array < 0).any()):
            done[name] = array
            continue
        if name.endswith("_L") and array.ndim == 0 and array.dtype.kind in "iuf":
            array = np.full(layers, array)  # one for all layers
        shape = {"L": (layers,), "LE": shape_LE, "LP": (layers, array.shape[-1] if array.ndim else 0)}.get(
            name.rpartition("_")[2], array.shape if array.ndim == 2 and len({*array.shape}) == 1 else (-1, -1)
        )
        if array.dtype.kind not in "iuf" or array.shape != shape or array.size == 0:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, and the load is [L, E] = {shape_LE}")
        done[name] = array = array.astype(np.float64)
        signed = name in ("bias_LE", "reinforcement_L")
        if name.endswith("_L"):
            bad = (array < 0).any() and not signed
        else:
            bad = not np.isfinite(array).all() or (not signed and (array < 0).any())
        if bad:
            raise ValueError(f"{name} holds negative, NaN or infinite entries; it must be finite, 0 or more")
    _check_pairs(done)
    return Given(**done)


def _check_pairs(done: dict[str, Any]) -> None:
    for name, other in (
        ("swaps_LE", "swap_delta"),
        ("squares_LE", "tokens_squared"),
        ("expected_bytes_PP", "bytes_PP"),
    ):
        if name in done and other not in done:
            raise ValueError(f"{name} says nothing without {other}; give both or neither")
    if "expected_bytes_PP" in done and done["bytes_PP"].shape != done["expected_bytes_PP"].shape:
        raise ValueError(
            f"bytes_PP is {done['bytes_PP'].shape} and expected_bytes_PP {done['expected_bytes_PP'].shape}; "
            "both are [P, P]"
        )
    if not done.get("swap_delta", 1.0) > 0:
        raise ValueError(f"swap_delta={done['swap_delta']} must be above 0, in units of score")
