"""Identification: what models, fitted to the series of a trace, say about a good filter of that load.

Beside the forecasters of `balancer/forecast_stats.py`, with the same fits: which order, which signal-to-noise
ratio, and so which gain an exponential moving average should have. Work for a person, not for every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.forecast_stats import ARIMA_ORDERS, COMPONENTS, Spec, fit_all_specs, ljung_box_p, spec_name
from balancer.forecast_stats_fit import MIN_SAMPLES
from balancer.metrics import load_shares
from balancer.trace import Trace
from balancer.workers import Progress, check_workers, map_in_processes

IDENTIFY_SPECS: tuple[Spec, ...] = (
    *(("arima", order) for order in ARIMA_ORDERS),
    *(("unobserved", (component,)) for component in COMPONENTS),
)
_LEVEL = IDENTIFY_SPECS.index(("unobserved", ("level",)))


class _Series(NamedTuple):
    aicc_C: NDArray[np.float64]
    signal_to_noise: float
    ar1: float
    ljung_box_p: float
    converged: bool
    warnings: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Identification:
    """What fits say about the series of a trace. N series that vary, C = len(models) models each.

    interval_steps: training steps between samples. layer_N, expert_N: which series. models: names. aicc_NC:
    NaN where a fit failed. order_N: name of the model of least AICc, "none" where all failed.
    signal_to_noise_N: q of the local level, variance of its steps over that of measurement; infinite where no
    measurement noise was found, NaN where the fit failed. gain_N: steady-state Kalman gain for that q, the
    gain that an exponential moving average should have. ar1_N: AR(1) coefficient of the differences, which is
    -1 / (2 + q) for a local level. ljung_box_p_N: small where the chosen model's one-step errors are still
    correlated. not_converged: series whose chosen or local-level fit did not converge, as (layer, expert).
    num_constant: series left out because they never vary. num_warnings: warnings of all fits.
    """

    interval_steps: float
    layer_N: NDArray[np.int64]
    expert_N: NDArray[np.int64]
    models: tuple[str, ...]
    aicc_NC: NDArray[np.float64]
    order_N: tuple[str, ...]
    signal_to_noise_N: NDArray[np.float64]
    gain_N: NDArray[np.float64]
    ar1_N: NDArray[np.float64]
    ljung_box_p_N: NDArray[np.float64]
    not_converged: tuple[tuple[int, int], ...]
    num_constant: int
    num_warnings: int

    def quartiles(self, layer: int | None = None) -> dict[str, NDArray[np.float64]]:
        """Return lower quartile, median and upper quartile, [3] each, of q, gain, ar1 and ljung_box_p.

        layer: of one layer, or None for all. Those of q follow from those of the gain, as q itself may be
        infinite. NaN where no series has the figure.
        """
        chosen_N = np.ones(len(self.layer_N), dtype=bool) if layer is None else self.layer_N == layer
        gain_3 = _quartiles(self.gain_N[chosen_N])
        with np.errstate(divide="ignore"):  # a gain of 1 is an infinite q
            q_3 = gain_3**2 / (1.0 - gain_3)
        return {
            "signal_to_noise": q_3,
            "gain": gain_3,
            "ar1": _quartiles(self.ar1_N[chosen_N]),
            "ljung_box_p": _quartiles(self.ljung_box_p_N[chosen_N]),
        }


def steady_gain(signal_to_noise: ArrayLike) -> NDArray[np.float64]:
    """Return K = (-q + sqrt(q^2 + 4q)) / 2, the steady-state Kalman gain of a local level.

    signal_to_noise: [...] q, 0 or more, infinity included. Returns [...] float64 in [0, 1]; NaN for NaN.
    Raises ValueError for a negative q.

    >>> steady_gain([0, 0.5, float("inf")])
    array([0. , 0.5, 1. ])
    """
    q = np.asarray(signal_to_noise, dtype=np.float64)
    if (q < 0).any():
        raise ValueError(
            f"signal_to_noise={float(q[q < 0][0])} is a ratio of variances; it must be 0 or more"
        )
    # the same, written so that large q loses no digits
    positive = np.where(q > 0, q, 1.0)
    return np.where(q == 0, 0.0, np.where(np.isnan(q), np.nan, 2.0 / (1.0 + np.sqrt(1.0 + 4.0 / positive))))


def identify(
    trace: Trace | ArrayLike,
    steps_W: ArrayLike | None = None,
    *,
    series: int | Sequence[tuple[int, int]] | None = 4,
    workers: int = 2,
    progress: Progress | None = None,
) -> Identification:
    """Fit every model of `IDENTIFY_SPECS` to the square-root shares of a trace, and say what came out.

    trace: a Trace, or counts [W, L, E] with `steps_W` [W]; one regime at a time says most. series: how many
    of the heaviest experts of each layer, the (layer, expert) pairs themselves, or None for all. 4 a layer of
    24 take half a minute on one core. workers: processes. progress(done, total) after each series. A sample
    in which a layer has no load is left out of its series. Exponential smoothing is not among the models: its
    likelihood is that of other data, and without trend it is ARIMA(0,1,1). Raises ValueError for a bad trace
    or series, or fewer than 10 samples.

    >>> identify([[[3, 1]]] * 10, range(10), workers=1).num_constant
    2
    """
    check_workers(workers)
    counts_WLE, steps = _counts_and_steps(trace, steps_W)
    roots_WLE = np.sqrt(load_shares(counts_WLE, "trace"))
    pairs = _chosen(counts_WLE, series)
    columns = [roots_WLE[:, layer, expert] for layer, expert in pairs]
    columns = [column[~np.isnan(column)] for column in columns]
    varying = [i for i, column in enumerate(columns) if len(column) >= MIN_SAMPLES and np.ptp(column) > 0]
    found = map_in_processes(_identify_series, [columns[i] for i in varying], workers, progress)
    pairs_N2 = np.array([pairs[i] for i in varying], dtype=np.int64).reshape(-1, 2)
    names = tuple(spec_name(spec) for spec in IDENTIFY_SPECS)
    aicc_NC = np.array([one.aicc_C for one in found]).reshape(-1, len(names))
    q_N = np.array([one.signal_to_noise for one in found], dtype=np.float64)
    return Identification(
        interval_steps=float(np.median(np.diff(steps))),
        layer_N=pairs_N2[:, 0],
        expert_N=pairs_N2[:, 1],
        models=names,
        aicc_NC=aicc_NC,
        order_N=tuple("none" if np.isnan(row).all() else names[int(np.nanargmin(row))] for row in aicc_NC),
        signal_to_noise_N=q_N,
        gain_N=steady_gain(q_N),
        ar1_N=np.array([one.ar1 for one in found], dtype=np.float64),
        ljung_box_p_N=np.array([one.ljung_box_p for one in found], dtype=np.float64),
        not_converged=tuple(pairs[i] for i, one in zip(varying, found) if not one.converged),
        num_constant=len(pairs) - len(varying),
        num_warnings=sum(one.warnings for one in found),
    )


def _identify_series(values_W: NDArray[np.float64]) -> _Series:
    fits, num_warnings = fit_all_specs(values_W, IDENTIFY_SPECS)
    aicc_C = np.array([np.nan if fit is None else fit.aicc for fit, _ in fits])
    step_W = np.diff(values_W) - np.diff(values_W).mean()
    power = float((step_W**2).sum())
    level = fits[_LEVEL][0]
    q, p, converged = np.nan, np.nan, False
    if level is not None:
        q = float(level.state_cov_MM[0, 0]) / level.obs_var if level.obs_var > 0 else np.inf
    if not np.isnan(aicc_C).all():
        chosen, error_W = fits[int(np.nanargmin(aicc_C))]
        p = ljung_box_p(error_W)
        converged = level is not None and level.converged and chosen is not None and chosen.converged
    return _Series(
        aicc_C=aicc_C,
        signal_to_noise=q,
        ar1=float((step_W[1:] * step_W[:-1]).sum()) / power if power > 0 else np.nan,
        ljung_box_p=p,
        converged=converged,
        warnings=num_warnings,
    )


def _counts_and_steps(
    trace: Trace | ArrayLike, steps_W: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if isinstance(trace, Trace):
        if steps_W is not None:
            raise ValueError("steps_W is given beside a Trace, which has its own; leave it out")
        checked = trace
    else:
        counts = np.asarray(trace)
        steps = np.arange(len(counts)) if steps_W is None else np.asarray(steps_W)
        if counts.dtype.kind not in "iu" or steps.dtype.kind not in "iu":
            raise ValueError(f"counts are {counts.dtype} and steps {steps.dtype}; both must be integers")
        checked = Trace(tokens_per_expert_WLE=counts.astype(np.int64), steps_W=steps.astype(np.int64))
    if len(checked.steps_W) < MIN_SAMPLES:
        raise ValueError(
            f"{len(checked.steps_W)} samples tell no model from another; give {MIN_SAMPLES} or more"
        )
    return checked.tokens_per_expert_WLE, checked.steps_W


def _chosen(
    counts_WLE: NDArray[np.int64], series: int | Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs that are asked for: heaviest first within a layer."""
    _, num_layers, num_experts = counts_WLE.shape
    if series is None or isinstance(series, int):
        most = num_experts if series is None else min(series, num_experts)
        if most < 1:
            raise ValueError(f"series={series} experts of each layer must be at least 1; None takes all")
        ranking_LE = np.argsort(-counts_WLE.sum(axis=0), axis=-1, kind="stable")
        return [(layer, int(expert)) for layer in range(num_layers) for expert in ranking_LE[layer, :most]]
    for layer, expert in series:
        if not (0 <= layer < num_layers and 0 <= expert < num_experts):
            raise ValueError(
                f"series holds (layer, expert) = {(layer, expert)}, outside of {num_layers} layers and "
                f"{num_experts} experts"
            )
    return [(int(layer), int(expert)) for layer, expert in series]


def _quartiles(figure_N: NDArray[np.float64]) -> NDArray[np.float64]:
    known_N = figure_N[~np.isnan(figure_N)]
    return np.quantile(known_N, [0.25, 0.5, 0.75]) if len(known_N) else np.full(3, np.nan)
