"""Forecasters of expert load, by name: what every expert's share will be, and how sure that is.

Start here:

    init, update, forecast = forecaster("regime")
    state = init(num_layers, num_experts, horizons=(10, 100, 500))      training steps ahead
    state = update(step, tokens_per_expert_LE, state)                   once a sample
    forecast(state).mean_HLE, .low_HLE, .high_HLE                       shares and their 90 % interval

    regime       the default: a bank of means and regressions, mixed by their recent errors      bank.py
    ar           its regression alone: autoregression over a basis of exponential means           bank.py
    persistence  the last sample                                                       forecast_members.py
    window, ema, holt, decay     means over a time, and with a trend or a pull to uniform        (same)
    level, trend                 Kalman filters with noises learnt online                         kalman.py
    seasonal                     the same phase of earlier periods                              periodic.py
    var                          low-rank vector autoregression across the experts               lowrank.py

What is common (checks, layers without load, missing samples, calibrated intervals) is in forecast_build.py.
The inner loops of bank and Kalman filters are compiled by numba, where there is one, else run in numpy.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer import forecast_kernels
from balancer.bank import NumpyPasses, Passes, bank
from balancer.bank_config import BankConfig
from balancer.compiled import compile_file
from balancer.conformal import NumpyBands
from balancer.forecast_build import Member, build
from balancer.forecast_members import decay, ema, holt, window
from balancer.forecast_record import Forecaster
from balancer.kalman import NumpyFilters, local_level, local_trend
from balancer.lowrank import lowrank
from balancer.periodic import seasonal

Floats = NDArray[np.float64]
_COMPILING = threading.Lock()


class CompiledPasses:
    """The bank's passes by numba; see `NumpyPasses`."""

    def learn(
        self, config: BankConfig, level_KLE: Any, theta_RLD: Any, share_LE: Floats, fade: float
    ) -> tuple[Floats, Floats, Floats]:
        """Errors and normal equations of one origin."""
        return _kernels().bank_learn(level_KLE, theta_RLD, share_LE, _order(config), _fade(config, fade))

    def solve(self, config: BankConfig, gram_RLDD: Floats, moment_RLD: Floats) -> Floats:
        """Solutions of the regressions."""
        return _kernels().bank_solve(gram_RLDD, moment_RLD, float(config.ridge))

    def mix(
        self, config: BankConfig, level_KLE: Floats, theta_RLD: Floats, weight_ML: Floats, fade: float
    ) -> Floats:
        """Weighted mean of the members."""
        return _kernels().bank_mix(level_KLE, theta_RLD, weight_ML, _order(config), _fade(config, fade))


def _regime(compiled: bool, *, slow: Sequence[str] = ("seasonal",), **options: Any) -> Member:
    unknown = [name for name in slow if name not in FORECASTERS or name == "regime"]
    if isinstance(slow, str) or len(set(slow)) != len(slow):
        raise ValueError(f"forecaster 'regime': slow={slow!r} must be different names: ('seasonal', 'var')")
    if unknown:
        known = ", ".join(name for name in FORECASTERS if name != "regime")
        raise ValueError(f"forecaster 'regime': slow member {unknown[0]!r} is unknown; use some of {known}")
    return bank(_config(options, "regime"), _passes(compiled), [_member(name, compiled, {}) for name in slow])


def _ar(compiled: bool, *, memory: float = 0.95, ridge: float = 0.03) -> Member:
    alone: dict[str, Any] = {"memories": (memory,), "mean_weight": 0.0, "regression_weight": 1.0, "eta": 0.0}
    return bank(_config({"ridge": ridge, **alone}, "ar"), _passes(compiled))


def _level(compiled: bool) -> Member:
    return local_level(_kernels() if compiled else NumpyFilters())


def _trend(compiled: bool, *, damping: float = 0.8, slope_ratio: float = 0.05) -> Member:
    return local_trend(_kernels() if compiled else NumpyFilters(), damping, slope_ratio)


def _persistence() -> Member:
    return ema(1.0)


FORECASTERS: dict[str, Callable[..., Member]] = {
    "regime": _regime,
    "persistence": _persistence,
    "window": window,
    "ema": ema,
    "holt": holt,
    "ar": _ar,
    "level": _level,
    "trend": _trend,
    "decay": decay,
    "seasonal": seasonal,
    "var": lowrank,
}


def forecaster(
    name: str = "regime", *, level: float = 0.9, compiled: bool | None = None, **options: Any
) -> Forecaster:
    """Return a forecaster (init, update, forecast) by name; "regime" is the default one.

    level: coverage of its intervals, in (0, 1). compiled: inner loops by numba (True), in numpy (False), or
    by numba where it is installed (None). options: constants of the one named: ema(gain), window(length),
    holt(gain, trend_gain, damping), decay(gain, rate), trend(damping, slope_ratio), seasonal(period_steps,
    length, gain), var(rank, length, gain, every), ar(memory, ridge), regime(slow: names of further members,
    and any field of `BankConfig`). Raises ValueError for an unknown name or option, or a constant out of
    range.

    >>> import numpy as np
    >>> init, update, forecast = forecaster("ema", gain=0.5)
    >>> state = update(1, np.array([[6, 2]]), init(1, 2, horizons=(10,)))
    >>> forecast(update(11, np.array([[2, 6]]), state)).mean_HLE
    array([[[0.5, 0.5]]])
    """
    if name not in FORECASTERS:
        raise ValueError(f"forecaster {name!r} is unknown; use one of {', '.join(FORECASTERS)}")
    known = set(signature(FORECASTERS[name]).parameters) - {"compiled", "options"}
    if name == "regime":
        known |= {field.name for field in fields(BankConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise ValueError(f"forecaster {name!r} has no option {', '.join(unknown)}; it has {has}")
    numba = _use_numba(compiled)
    return build(_member(name, numba, options), level, _kernels() if numba else NumpyBands())


def warm_forecast() -> None:
    """Compile the kernels for the types that forecasters use, so that the first sample need not wait."""
    counts_LE = np.ones((1, 2), dtype=np.int64)
    for name in ("regime", "level", "trend"):
        init, update, _ = forecaster(name, compiled=True)
        state = init(1, 2, (1,))
        for step in range(3):
            state = update(step, counts_LE, state)


def _config(options: dict[str, Any], name: str) -> BankConfig:
    try:
        return BankConfig(**options)
    except ValueError as error:
        raise ValueError(f"forecaster {name!r}: {error}") from None


def _member(name: str, compiled: bool, options: dict[str, Any]) -> Member:
    make = FORECASTERS[name]
    return make(compiled, **options) if "compiled" in signature(make).parameters else make(**options)


def _passes(compiled: bool) -> Passes:
    return CompiledPasses() if compiled else NumpyPasses()


def _use_numba(compiled: bool | None) -> bool:
    there = find_spec("numba") is not None
    if compiled and not there:
        raise ValueError("compiled=True needs numba, which is not installed; leave it out to run in numpy")
    return there if compiled is None else compiled


def _order(config: BankConfig) -> NDArray[np.int64]:
    return np.array((config.reference, *config.regressors), dtype=np.int64)


def _fade(config: BankConfig, fade: float) -> float:
    return fade if config.decay_rate > 0 else -1.0


def _kernels() -> Any:
    with _COMPILING:  # ranks may be threads
        return _compile()


@lru_cache(maxsize=1)
def _compile() -> Any:
    entries: dict[str, Any] = dict.fromkeys(forecast_kernels.ENTRIES)
    return SimpleNamespace(**compile_file(forecast_kernels, entries, fastmath={"reassoc", "nsz"}))
