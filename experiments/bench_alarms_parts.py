"""Parts of `counterpoise bench alarms`: each runs monitors over the same loads and says what they saw."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import dead_experts
from balancer.monitor import CollapseMonitor
from balancer.monitor_config import MonitorConfig
from balancer.monitor_core import COLLAPSED, COLLAPSING, init_monitor, update_monitor
from balancer.monitor_figures import ROW, Given
from balancer.trace import Trace
from experiments.bench_alarms_closed import CLOSED, STRENGTHS, closed_loop
from experiments.bench_alarms_loads import CASES, ONSET, Case, Counts, benign, collapse, dead_step

Row = dict[str, Any]
TUNING, TEST = 1, 101  # seeds
RAMPS = (200, 1000, 5000)
GRAVE = ("COLLAPSING", "COLLAPSED")
# settings of the curve of delay against false alarms; the fourth is the default
SWEEP: tuple[dict[str, float], ...] = (
    {"growth_sds": 0.5, "least_growth": 0.05, "false_alarm_samples": 1e4},
    {"growth_sds": 1.5, "least_growth": 0.1, "false_alarm_samples": 1e6},
    {"growth_sds": 3.0},
    {},
    {"growth_sds": 7.0, "least_growth": 0.5},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command was asked for. quick: smaller;  trace: a recorded load, None = none;  top_k: its K."""

    quick: bool = False
    trace: Trace | None = None
    top_k: int = 2


@dataclass(kw_only=True, slots=True)
class Found:
    """What a part found: rows for the file, and what its plot is drawn from."""

    rows: list[Row] = field(default_factory=list)
    drawn: dict[str, Any] = field(default_factory=dict)

    def add(self, case: str, contender: str, metric: str, value: float, **more: Any) -> None:
        """Keep a figure and print it."""
        row = {"case": case, "contender": contender, "metric": metric, "value": value, **more}
        self.rows.append({**row, "ratio_to_best_peer": None, "ratio_to_floor": None})
        words = "  ".join(f"{name} {text}" for name, text in more.items())
        print(f"{case:<18} {contender:<10} {metric:<22} {value:>12.6g}  {words}", flush=True)


class Watched:
    """A monitor of one setting: when it raised its alarms, [(layer, step)], in entry order."""

    def __init__(self, case: Case, layers: int, settings: Mapping[str, Any] | None = None) -> None:
        config = MonitorConfig(**(settings or {}))
        self._core, self._state = init_monitor(layers, case.experts, case.top_k, config)
        self._tokens = case.tokens
        self.alarms: list[tuple[int, int]] = []

    def see(self, step: int, counts_LE: Counts) -> None:
        """Take in one sample."""
        out, self._state = update_monitor(step, counts_LE, self._tokens, Given(), self._core, self._state)
        began_L = (out.code_L >= COLLAPSING) & (out.was_L < COLLAPSING)
        self.alarms += [(int(layer), step) for layer in np.flatnonzero(began_L)]

    def first_after(self, step: int, layers: int) -> NDArray[np.int64]:
        """Step of each layer's first alarm from one step on, -1 for none."""
        first_L = np.full(layers, -1, dtype=np.int64)
        for layer, at in reversed(self.alarms):
            if at >= step:
                first_L[layer] = at
        return first_L

    @property
    def switches(self) -> float:
        """Jumps of the shares that were seen as changes of domain."""
        return float(self._state.charts.switches_L.sum())


# ---- false alarms ----------------------------------------------------------------------------------------


def false_part(options: Options) -> Found:
    """Alarms on load that does not collapse: over-dispersed, autocorrelated, with changes of domain."""
    found, layer_steps = Found(), 4_000 if options.quick else 6_000_000
    layers = 8 if options.quick else 128
    steps = -(-layer_steps // (2 * len(CASES) * layers))
    alarms = switches = 0
    for case in CASES:
        for levelled in (False, True):
            one, changed = Watched(case, layers), 0
            for t, (counts_LE, switch_L) in enumerate(benign(case, layers, steps, TEST, levelled=levelled)):
                one.see(t, counts_LE)
                changed += int(switch_L.sum())
            alarms, switches = alarms + len(one.alarms), switches + changed
            name = "levelled" if levelled else "plain"
            found.add(
                case.name, name, "false_alarms", len(one.alarms), switches=changed, seen=int(one.switches)
            )
    total = 2 * len(CASES) * layers * steps
    found.add("all", "monitor", "false_alarms", alarms, layer_steps=total, switches=switches)
    found.add("all", "monitor", "per_million", 1e6 * alarms / total, upper_95=1e6 * upper(alarms) / total)
    return found


def upper(events: int) -> float:
    """Upper 95 % bound of a Poisson mean of which so many events were seen: 3 for none."""
    from scipy.stats import chi2

    return float(chi2.ppf(0.95, 2 * events + 2) / 2.0)


# ---- delay and lead --------------------------------------------------------------------------------------


def delay_part(options: Options) -> Found:
    """Lead before a tenth of the experts is dead, by cause; delay on ramps; both against false alarms."""
    found = Found()
    cases = CASES[:1] if options.quick else CASES
    layers = 2 if options.quick else 4
    leads: dict[str, list[float]] = {}
    for cause in ("growth", "feedback", "deaths", "sudden"):
        for case in cases:
            steps = ONSET + (60 if cause == "sudden" else 300 if options.quick else 1000)
            _induced(found, leads, cause, case, layers, steps, collapse(cause, case, layers, steps, TEST))
    for cause in () if options.quick else STRENGTHS:
        copies = layers * len(STRENGTHS[cause])
        steps = ONSET + 1000
        _induced(found, leads, cause, CLOSED, copies, steps, closed_loop(cause, layers, steps, TEST))
    _lead_rows(found, leads)
    found.drawn["leads"] = leads
    found.drawn["ramps"] = _ramps(found, options)
    found.drawn["curve"] = [] if options.quick else _curve(found)
    return found


def _induced(
    found: Found, leads: dict[str, list[float]], cause: str, case: Case, layers: int, steps: int,
    loads: Iterable[Counts],
) -> None:  # fmt: skip
    one, seen = Watched(case, layers), []
    for t, counts_LE in enumerate(loads):
        one.see(t, counts_LE)
        seen.append(counts_LE)
    dead_L, first_L = dead_step(seen, case), one.first_after(ONSET, layers)
    early = sum(at < ONSET for _, at in one.alarms)
    died_L = dead_L >= ONSET
    lead_L = np.where(first_L >= 0, dead_L - first_L, -np.inf)[died_L]
    leads.setdefault(cause, []).extend(lead_L.tolist())
    found.drawn.setdefault("spans", []).extend((dead_L - ONSET)[died_L].tolist())
    delay_L = (first_L - ONSET)[first_L >= 0]
    found.add(
        case.name, cause, "lead_median_steps", float(np.median(lead_L)) if died_L.any() else float("nan"),
        least=float(lead_L.min(initial=np.inf)), dead=int(died_L.sum()), of=layers, false=early,
        dead_after=float(np.median(dead_L[died_L] - ONSET)) if died_L.any() else float("nan"),
        delay=float(np.median(delay_L)) if delay_L.size else float("nan"), alarmed=int((first_L >= 0).sum()),
    )  # fmt: skip


def _lead_rows(found: Found, leads: dict[str, list[float]]) -> None:
    """Share of the collapses with a lead of 50 steps or more, by cause and in all."""
    for cause, lead in leads.items():
        if lead:
            found.add(
                "all", cause, "lead_50_frac", float(np.mean(np.array(lead) >= 50.0)), collapses=len(lead)
            )
    gradual = np.array([x for cause, lead in leads.items() if cause != "sudden" for x in lead])
    every = np.array([x for lead in leads.values() for x in lead])
    found.add("all", "gradual", "lead_50_frac", float((gradual >= 50).mean()), collapses=gradual.size)
    found.add("all", "every", "lead_50_frac", float((every >= 50).mean()), collapses=every.size)
    # nobody can lead by 50 steps what takes fewer
    slow = every[np.array(found.drawn["spans"]) >= 100]
    found.add("all", "100 steps up", "lead_50_frac", float((slow >= 50).mean()), collapses=slow.size)


def _ramps(found: Found, options: Options) -> dict[tuple[str, int], tuple[float, float]]:
    """Median delay and time to dead of ramps."""
    drawn: dict[tuple[str, int], tuple[float, float]] = {}
    layers = 2 if options.quick else 6
    for length in RAMPS[:1] if options.quick else RAMPS:
        for case in CASES[:1] if options.quick else CASES:
            if case.experts == 256 and length == 5000:
                continue  # minutes of drawing counts
            steps = ONSET + length // 2 + 40
            one, seen = Watched(case, layers), []
            for t, counts_LE in enumerate(collapse("ramp", case, layers, steps, TEST, length)):
                one.see(t, counts_LE)
                seen.append(counts_LE.astype(np.int32))
            dead_L, first_L = dead_step(seen, case), one.first_after(ONSET, layers)
            delay = float(np.median(np.where(first_L >= 0, first_L - ONSET, np.inf)))
            dead = float(np.median(np.where(dead_L >= 0, dead_L - ONSET, np.inf)))
            worst = float(
                np.min(np.where(dead_L >= 0, dead_L - first_L, np.inf)[first_L >= 0], initial=np.inf)
            )
            drawn[case.name, length] = (delay, dead)
            found.add(
                case.name, f"ramp {length}", "delay_median_steps", delay, dead_after=dead, least_lead=worst,
                alarmed=int((first_L >= 0).sum()), of=layers,
                false=sum(at < ONSET for _, at in one.alarms),
            )  # fmt: skip
    return drawn


def _curve(found: Found) -> list[tuple[float, float, float]]:
    """False alarms a million layer-steps and median delay of feedback collapses, for every setting."""
    counts = [0] * len(SWEEP)
    delays: list[list[float]] = [[] for _ in SWEEP]
    total, layers = 0, 64
    for case in [c for c in CASES if c.experts < 256]:
        watched = [Watched(case, layers, settings) for settings in SWEEP]
        for t, (counts_LE, _) in enumerate(benign(case, layers, 1500, TEST + 1, levelled=False)):
            for one in watched:
                one.see(t, counts_LE)
        total += layers * 1500
        counts = [n + len(one.alarms) for n, one in zip(counts, watched)]
        watched = [Watched(case, 8, settings) for settings in SWEEP]
        for t, counts_LE in enumerate(collapse("feedback", case, 8, ONSET + 600, TEST + 1)):
            for one in watched:
                one.see(t, counts_LE)
        for delay, one in zip(delays, watched):
            first_L = one.first_after(ONSET, 8)
            delay += np.where(first_L >= 0, first_L - ONSET, 600).tolist()
    curve: list[tuple[float, float, float]] = []
    for settings, alarms, delay in zip(SWEEP, counts, delays):
        name = ", ".join(f"{k} {v:g}" for k, v in settings.items()) or "default"
        rate, bound, median = 1e6 * alarms / total, 1e6 * upper(alarms) / total, float(np.median(delay))
        curve.append((rate, bound, median))
        found.add(
            "curve", "monitor", "delay_median_steps", median, per_million=rate, upper_95=bound, setting=name
        )
    return curve


# ---- a recorded load, and speed --------------------------------------------------------------------------


def trace_part(options: Options) -> Found:
    """First alarm of every layer of a recorded load, beside what it was then."""
    found = Found()
    if options.trace is None:
        print("part trace is left out: no --trace was given")
        return found
    counts_WLE, steps_W = options.trace.tokens_per_expert_WLE, options.trace.steps_W
    layers, experts = counts_WLE.shape[1:]
    monitor, first_L = CollapseMonitor(layers, experts, options.top_k), np.full(layers, -1)
    drawn, alarms = [], 0
    for w, counts_LE in enumerate(counts_WLE):
        verdicts = monitor.update(int(steps_W[w]), counts_LE)
        grave_L = np.array([v.state in GRAVE for v in verdicts])
        alarms += sum(v.state in GRAVE and v.was not in GRAVE for v in monitor.alarms())
        first_L = np.where(grave_L & (first_L < 0), w, first_L)
        drawn.append([v.figures["entropy"] for v in verdicts])
    dead_WL = np.array([dead_experts(counts_LE) for counts_LE in counts_WLE]) >= 0.1 * experts
    gone_L = np.where(dead_WL.any(axis=0), dead_WL.argmax(axis=0), -1)
    found.add("trace", "monitor", "layers_alarmed", float((first_L >= 0).sum()), of=layers)
    by = int(((first_L >= 0) & (first_L <= 1) & (gone_L >= 0)).sum())
    found.add("trace", "monitor", "by_second_sample", by, of=int((gone_L >= 0).sum()))
    late = int(((gone_L >= 0) & ((first_L < 0) | (first_L > gone_L))).sum())
    found.add("trace", "monitor", "later_than_dead", late, entries=alarms)
    found.drawn = {"entropy_WL": np.array(drawn), "first_L": first_L, "steps_W": steps_W}
    return found


def speed_part(options: Options) -> Found:
    """Median time of an update with what a training loop gives."""
    found = Found()
    for layers, experts, top_k in ((12, 8, 2), (24, 32, 2), (60, 256, 8)):
        times = _times(layers, experts, top_k, 60 if options.quick else 400)
        case = f"{layers}x{experts}"
        found.add(case, "monitor", "update_ms", float(np.median(times)), slowest=round(max(times), 3))
    return found


def _times(layers: int, experts: int, top_k: int, steps: int) -> Sequence[float]:
    rng, times = np.random.default_rng(0), []
    loads = rng.multinomial(8192 * top_k, np.full(experts, 1 / experts), size=(16, layers))
    monitor, row_L, bias_LE = (
        CollapseMonitor(layers, experts, top_k),
        np.ones(layers),
        np.zeros((layers, experts)),
    )
    for step in range(steps):
        begun = time.perf_counter()
        monitor.update(
            step, loads[step % 16], num_tokens=8192, aux_loss_L=row_L, bias_LE=bias_LE, bias_limit_L=row_L,
            gain_L=row_L, reinforcement_L=row_L, most_gain_L=row_L, logit_rms_L=row_L, confidence_L=row_L,
        )  # fmt: skip
        times.append(1e3 * (time.perf_counter() - begun))
    return times[steps // 2 :]


__all__ = ["COLLAPSED", "ROW", "Found", "Options", "delay_part", "false_part", "speed_part", "trace_part"]
