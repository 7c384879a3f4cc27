"""Low-rank vector autoregression: experts of a layer that rise and fall together.

    y_t = a exponential mean of root shares + U z_t + rest        U [E, rank]: main directions of what is left
    z_{t+1} = A z_t                                               A by ridge regression on the samples kept

The directions come from a singular value decomposition of the last samples. That takes a millisecond a layer,
so a step refits only some layers, each of them every `every` samples. Experts of a few copies are forecast
low: the square of a mean root is below the mean (`kalman.shares_of_roots`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.forecast_build import Flags, Floats, Integers, Member, Sample, shares
from balancer.forecast_members import checked_fraction, checked_whole

_RIDGE = 0.1  # of the mean variance of the factors
_MOST_GROWTH = 0.99  # spectral radius of A: factors die out, however long the horizon


class LowRank(NamedTuple):
    """root_NLE [n, L, E] float32: ring of root shares less their exponential mean;  number []: samples so
    far;  level_LE: that mean;  started_L [L];  direction_LER, dynamics_LRR: U and A."""

    root_NLE: NDArray[np.float32]
    number: Integers
    level_LE: Floats
    started_L: Flags
    direction_LER: Floats
    dynamics_LRR: Floats


def lowrank(rank: int = 3, length: int = 64, gain: float = 0.3, every: int = 16) -> Member:
    """Low-rank vector autoregression.

    rank: directions, 1 or more; 3. length: samples kept, more than twice the rank; 64. gain: of the
    exponential mean. every: samples between two fits of a layer; 16.
    """
    checked_whole("rank", rank, 1, "3 directions are a good start")
    checked_whole("length", length, 2 * rank + 3, "twice the rank and 3 more; 64 samples are a good start")
    checked_whole("every", every, 1, "16 samples are a good start")
    checked_fraction("gain", gain, "0.3 is a good start")

    def init(num_layers: int, num_experts: int, horizons_H: Integers) -> LowRank:
        small = min(rank, num_experts)
        return LowRank(
            root_NLE=np.zeros((length, num_layers, num_experts), dtype=np.float32),
            number=np.array(0),
            level_LE=np.full((num_layers, num_experts), num_experts**-0.5),
            started_L=np.zeros(num_layers, dtype=np.bool_),
            direction_LER=np.zeros((num_layers, num_experts, small)),
            dynamics_LRR=np.zeros((num_layers, small, small)),
        )

    def update(sample: Sample, state: LowRank) -> LowRank:
        root_LE = np.sqrt(sample.share_LE)
        gain_L = np.where(state.started_L & ~sample.jumped_L, gain, 1.0) * sample.loaded_L
        level_LE = state.level_LE + gain_L[:, None] * (root_LE - state.level_LE)
        state.root_NLE[int(state.number) % length] = root_LE - level_LE
        state.dynamics_LRR[sample.jumped_L] = 0.0
        state = state._replace(
            number=np.asarray(state.number + 1),
            level_LE=level_LE,
            started_L=state.started_L | sample.loaded_L,
        )
        held = min(int(state.number), length)
        if held > 2 * rank + 2:
            for layer in range(int(state.number) % every, level_LE.shape[0], every):
                _fit(layer, held, state)
        return state

    return Member(init, update, _mean)


def _mean(lag_H: Integers, state: LowRank) -> Floats:
    last_LE = state.root_NLE[(int(state.number) - 1) % state.root_NLE.shape[0]].astype(np.float64)
    factor_LR1 = np.einsum("ler,le->lr", state.direction_LER, last_LE)[..., None]
    means: list[Floats] = []
    for lag in lag_H:
        power_LRR = np.linalg.matrix_power(state.dynamics_LRR, int(lag))
        root_LE = state.level_LE + (state.direction_LER @ (power_LRR @ factor_LR1))[..., 0]
        means.append(shares(np.maximum(root_LE, 0.0) ** 2))
    return np.stack(means)


def _fit(layer: int, held: int, state: LowRank) -> None:
    """Refit directions and dynamics of one layer, in place."""
    length, small = state.root_NLE.shape[0], state.dynamics_LRR.shape[-1]
    order = (int(state.number) - held + np.arange(held)) % length
    series_NE = state.root_NLE[order, layer].astype(np.float64)
    _, _, rows = np.linalg.svd(series_NE, full_matrices=False)
    direction_ER = np.zeros((series_NE.shape[1], small))
    direction_ER[:, : min(small, rows.shape[0])] = rows[:small].T
    factor_NR = series_NE @ direction_ER
    before_NR, after_NR = factor_NR[:-1], factor_NR[1:]
    gram_RR = before_NR.T @ before_NR
    ridge = _RIDGE * np.trace(gram_RR) / small + 1e-30
    solve: Any = np.linalg.solve
    dynamics_RR = solve(gram_RR + ridge * np.eye(small), before_NR.T @ after_NR).T
    eigenvalues: Any = np.linalg.eigvals
    radius = max(abs(complex(value)) for value in eigenvalues(dynamics_RR))
    state.direction_LER[layer] = direction_ER
    state.dynamics_LRR[layer] = dynamics_RR * min(1.0, _MOST_GROWTH / max(radius, 1e-30))
