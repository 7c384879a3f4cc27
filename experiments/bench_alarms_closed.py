"""Collapses in a closed loop, for `counterpoise bench alarms`: a bias loop on the router plant goes wrong.

The loop is b -= (g / lam) y, y the violation of the counts; until step ONSET it holds (g .3, no drift worth
the name). Then, on 32 experts, top-2, 8,192 tokens a step, phi 8:

    weak       g falls to half of the reinforcement rho, which is .02, .04 or .08: the bias cannot hold
    unstable   with a delay of 3 steps (limit .445) g rises to .48, .5 or .52
    drift      scores walk .04, .07 or .12 of y a step at random, g falls to .02: faster than it can follow

The strengths of unstable and drift are not the first: .55 to .8 and .3 to .8 had a tenth of the experts dead
some 20 to 30 steps after the onset, so that no alarm can lead by 50 (alarms: 42 and 12 steps after it in the
median, 0 and 3 of 12 led by 50). That was seen on the test seed: figures of these two causes are not blind.
"""

from collections.abc import Iterator

import numpy as np

from balancer.plant import init_plant, plant_scale, step_plant
from balancer.plant_config import PlantConfig
from experiments.bench_alarms_loads import ONSET, PHI, Case, Counts

CLOSED = Case(experts=32, top_k=2, tokens=8192)
# cause -> strengths, each a plant of its own
STRENGTHS = {"weak": (0.02, 0.04, 0.08), "unstable": (0.48, 0.5, 0.52), "drift": (0.04, 0.07, 0.12)}
_HOLDING = {"weak": 0.3, "unstable": 0.2, "drift": 0.3}


def closed_loop(cause: str, layers: int, steps: int, seed: int) -> Iterator[Counts]:
    """Counts [L, E] step by step, of so many layers for each strength."""
    plants = []
    for strength in STRENGTHS[cause]:
        config = PlantConfig(
            num_layers=layers, num_experts=CLOSED.experts, top_k=CLOSED.top_k, num_tokens=CLOSED.tokens,
            phi=PHI, reinforcement=strength if cause == "weak" else 0.01, statistics=(),
            delay_steps=3 if cause == "unstable" else 0, seed=seed,
        )  # fmt: skip
        plants.append(init_plant(config))
    biases = [np.zeros((layers, CLOSED.experts)) for _ in plants]
    for t in range(steps):
        counts = []
        for i, strength in enumerate(STRENGTHS[cause]):
            measurement, plants[i] = step_plant(biases[i], plants[i])
            gain = _HOLDING[cause]
            if t >= ONSET:
                gain = {"weak": 0.5 * strength, "unstable": strength, "drift": 0.02}[cause]
                if cause == "drift" and t == ONSET:
                    plants[i] = plants[i]._replace(constants=plants[i].constants._replace(drift=strength))
            push_LE = gain * measurement.violation_LE / plant_scale(plants[i])[:, None]
            biases[i] = biases[i] - (push_LE - push_LE.mean(axis=1, keepdims=True))
            counts.append(measurement.counts_LE)
        yield np.concatenate(counts).astype(np.int64)
