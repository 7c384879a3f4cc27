"""Constants of the bank of forecasts, beside `balancer/bank.py`, which says what they do."""

from dataclasses import dataclass

_BOUNDS = {
    "ridge": (1e-6, 1e6),
    "eta": (0.0, 100.0),
    "switch": (0.0, 1.0),
    "bonus": (0.0, 1e6),
    "bonus_power": (0.0, 10.0),
    "mean_weight": (0.0, 1e3),
    "regression_weight": (0.0, 1e3),
    "borrow": (0.0, 1.0),
    "decay_rate": (0.0, 0.999),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BankConfig:
    """Constants of the bank; the defaults were chosen on synthetic traces and half of a real one.

    gains: of the means, the first 1 (the last sample). reference: index of the mean that the regressions lean
    on. regressors: indices of the others. memories: lambda of each regression, 1 forgets nothing; 0.8 lives 5
    samples. ridge: pull of theta to 0, in units of the (normalised) Gram matrix. eta: speed of the weights.
    switch: share s of the prior at every sample. bonus, bonus_power: prior of the last sample over another
    mean's at lag 1, and its fall with the lag. mean_weight, regression_weight: prior of a mean, and of any
    other member.
    borrow: evidence of the next shorter horizon, 0 to 1. decay_rate: gain of the bias loop, 0 for none.
    """

    gains: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05)
    reference: int = 2
    regressors: tuple[int, ...] = (0, 1, 3, 5, 6, 7)
    memories: tuple[float, ...] = (0.8, 0.9, 0.95)
    ridge: float = 0.03
    eta: float = 6.0
    switch: float = 0.01
    bonus: float = 300.0
    bonus_power: float = 1.5
    mean_weight: float = 1.0
    regression_weight: float = 0.2
    borrow: float = 0.75
    decay_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gains", "regressors", "memories"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a tuple of numbers")
        if not self.gains or self.gains[0] != 1.0 or not all(0.0 < gain <= 1.0 for gain in self.gains):
            raise ValueError(f"gains={self.gains} must lie in (0, 1], the first 1 (the last sample)")
        indices = (self.reference, *self.regressors)
        if not all(i in range(len(self.gains)) for i in indices) or len(set(indices)) != len(indices):
            raise ValueError(
                f"reference={self.reference} and regressors={self.regressors} must be different indices of "
                f"gains, 0 to {len(self.gains) - 1}"
            )
        if not all(0.0 < memory <= 1.0 for memory in self.memories):
            raise ValueError(f"memories={self.memories} must lie in (0, 1]; 0.95 lives 20 samples")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value} must lie between {least} and {most}")
        if self.mean_weight == 0.0 and (self.regression_weight == 0.0 or not self.memories):
            raise ValueError(
                f"mean_weight={self.mean_weight} and regression_weight={self.regression_weight} leave "
                "nothing to forecast with; give one of them a weight above 0"
            )

    @property
    def num_members(self) -> int:
        """M: means, then decay where there is one, then regressions; slow members come after these."""
        return len(self.gains) + (self.decay_rate > 0) + len(self.memories)
