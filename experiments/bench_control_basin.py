"""Bench control, part `basin` (F2): how often a router collapses, by how strongly it reinforces itself.

A run has collapsed where a tenth of the experts or more are below 1 % of their fair share over the last 50
steps. 20 runs a point, Wilson's 95 % bands, and a logistic curve of the logarithm of rho fitted by maximum
likelihood, whose middle stands beside theory:

    linear   rho = gain lam                     small signal: the loop's pole is 1 - (gain lam - rho)
    sign     rho = step lam / max |y|           at the start, median over the runs: beyond, it is slower

Settings: chosen at rho = 0.05 on runs of their own, six to choose from.
"""

import math
from dataclasses import replace

import numpy as np

from balancer.plant import PlantConfig, init_plant, plant_scale, step_plant
from experiments import bench_control_parts as parts
from experiments.bench_control_parts import TEST_SEED, TUNING_SEED, Floats, close_loop, excess, values_of
from experiments.bench_placement_parts import Found
from experiments.forecast_plots_parts import grid, look, png

LAWS = (
    "identified", "linear", "sign", "smebu", "quantile-damped", "longcat", "laplacian", "quantile",
    "sign-decay", "bip",
)  # fmt: skip
RHOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)
PLANT = PlantConfig(num_layers=20, imbalance=0.3, drift=0.01, seed=TEST_SEED)
STEPS, TUNED_AT, COLLAPSED = 200, 0.05, 0.1


def tuned(name: str, config: PlantConfig, steps: int) -> float | None:
    """The setting of least excess, on runs of their own."""
    config = replace(config, seed=TUNING_SEED, num_layers=3)

    def left(value: float | None) -> float:
        return float(excess(close_loop(config, parts.make(name, value), steps), config).mean())

    return min(values_of(name), key=left) if len(values_of(name)) > 1 else None


def wilson(hits: int, runs: int) -> tuple[float, float]:
    """95 % interval of a probability by Wilson's score.

    >>> [round(x, 3) for x in wilson(0, 20)]
    [0.0, 0.161]
    """
    z, p = 1.96, hits / runs
    middle, half = p + z * z / (2 * runs), z * math.sqrt(p * (1 - p) / runs + (z / (2 * runs)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / runs)), min(1.0, (middle + half) / (1 + z * z / runs))


def threshold(rho_R: Floats, hits_R: Floats, runs: int) -> float:
    """The rho of probability 1/2 of the likeliest logistic curve in ln rho; inf where nothing collapsed."""
    if not hits_R.any():
        return math.inf
    x_R = np.log(rho_R)
    middle_X, slope_S = np.linspace(x_R[0] - 0.5, x_R[-1] + 0.5, 241), np.geomspace(1, 60, 40)
    z_XSR = np.clip(slope_S[:, None] * (x_R - middle_X[:, None, None]), -50, 50)
    likely_XS = (hits_R * -np.log1p(np.exp(-z_XSR)) + (runs - hits_R) * -np.log1p(np.exp(z_XSR))).sum(axis=-1)
    return float(np.exp(middle_X[np.unravel_index(likely_XS.argmax(), likely_XS.shape)[0]]))


def run(quick: bool) -> Found:
    """Probability of collapse by reinforcement."""
    found, steps, rhos = Found(), 60 if quick else STEPS, (0.05, 0.3, 1.0) if quick else RHOS
    config = replace(PLANT, num_layers=4) if quick else PLANT
    curves: dict[str, list[int]] = {}
    for name in LAWS[:3] if quick else LAWS:
        value = tuned(name, replace(config, reinforcement=TUNED_AT), steps)
        curves[name] = _collapses(found, name, value, config, rhos, steps)
        middle = threshold(np.array(rhos), np.array(curves[name]), config.num_layers)
        wanted = _theory(name, value, config)
        # inf is no JSON: beyond the last point is said as such
        seen = math.isfinite(middle)
        found.add(
            "threshold", name, "1/rho", 1 / middle if seen else 1 / rhos[-1], rho=middle if seen else None,
            beyond=None if seen else rhos[-1], theory_rho=wanted, setting=value,
        )  # fmt: skip
        print(
            f"    {name}: collapses from rho {middle:.3g}, theory {wanted or math.nan:.3g}, setting {value}"
        )
    found.plots["basin"] = _plot(curves, rhos, config.num_layers)
    return found


def _collapses(
    found: Found, name: str, value: float | None, config: PlantConfig, rhos: tuple[float, ...], steps: int
) -> list[int]:
    hits = []
    for rho in rhos:
        plant = replace(config, reinforcement=rho)
        track = close_loop(plant, parts.make(name, value), steps)
        hits.append(int((track.dead_L >= COLLAPSED).sum()))
        low, high = wilson(hits[-1], plant.num_layers)
        found.add(
            f"rho {rho:g}", name, "collapsed", hits[-1] / plant.num_layers, lowest=low, highest=high,
            runs=plant.num_layers,
        )  # fmt: skip
    return hits


def _theory(name: str, value: float | None, config: PlantConfig) -> float | None:
    """The threshold that the inequalities give, for the laws that they speak of."""
    plant = init_plant(config)
    scale = float(plant_scale(plant).mean())
    if name == "linear" and value is not None:
        return value * scale
    if name == "sign" and value is not None:
        y_LE = step_plant(np.zeros(plant.drift_LE.shape), plant)[0].violation_LE
        return value * scale / float(np.median(np.abs(y_LE).max(axis=1)))
    return None


def _plot(curves: dict[str, list[int]], rhos: tuple[float, ...], runs: int) -> bytes:
    figure, ((ax,),) = grid(1, 1, (8.0, 4.6))
    for i, (name, hits) in enumerate(curves.items()):
        band = np.array([wilson(h, runs) for h in hits])
        ax.plot(rhos, np.array(hits) / runs, marker="o", ms=4, label=name, **look(i))
        ax.fill_between(rhos, band[:, 0], band[:, 1], color=look(i)["color"], alpha=0.12, lw=0)
    ax.set_xscale("log")
    ax.set_xlabel("reinforcement rho (share of an imbalance that the router adds a step)")
    ax.set_ylabel("probability of collapse (95 % band)")
    ax.legend(fontsize=8)
    return png(figure, "F2: basin (E 32, k 2, 2^14 tokens, softmax; start sd of y .3)")
