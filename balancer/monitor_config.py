"""Monitor settings: what counts as uneven, dead, collapsed, stale, and how sure an alarm has to be."""

import math
from dataclasses import dataclass, field

# name -> least and most value, both allowed
_BOUNDS: dict[str, tuple[float, float]] = {
    "false_alarm_samples": (1e2, 1e15),
    "least_spread": (1e-4, 1.0),
    "least_growth": (0.01, 10.0),
    "growth_sds": (0.0, 100.0),
    "jump_sds": (1.0, 100.0),
    "collapsed_height": (0.0, 1.0),
    "uneven_violation": (0.0, 1e6),
    "dead_frac": (1e-6, 0.5),
    "fading_share": (0.0, 1.0),
    "fading_frac": (1e-3, 1.0),
    "dead_copies": (1.0, 1e9),
    "collapsed_dead_frac": (1e-3, 1.0),
    "saturated_frac": (0.0, 1.0),
    "rank_skew": (1.0, 1e6),
    "bytes_ratio": (1.0, 1e6),
    "memory": (10.0, 1e6),
}
_WHOLE: dict[str, int] = {
    "watch_samples": 1,
    "calm_samples": 1,
    "margin_samples": 1,
    "stale_after_steps": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """What the collapse monitor calls what, and how sure it has to be. Raises ValueError for a bad value."""

    false_alarm_samples: float = field(
        default=6e8,
        metadata={
            "help": "samples of a quiet layer between first signs of growth; 6e8: 1 % for 60 layers x 1e5"
        },
    )
    least_spread: float = field(
        default=0.05,
        metadata={"help": "relative spread of the load below which its growth is nothing that matters"},
    )
    least_growth: float = field(
        default=0.25, metadata={"help": "ln D must go on growing by this much after the first sign"}
    )
    growth_sds: float = field(
        default=4.5, metadata={"help": "the same in standard deviations of ln D around its baseline"}
    )
    watch_samples: int = field(
        default=150, metadata={"help": "samples after a first sign or a jump within which it must"}
    )
    calm_samples: int = field(
        default=100, metadata={"help": "samples without growth after which COLLAPSING ends"}
    )
    jump_sds: float = field(
        default=6.0, metadata={"help": "change of the shares beyond the usual one that is a jump (sd)"}
    )
    collapsed_height: float = field(
        default=0.4,
        metadata={
            "help": "(H - ln K) / (ln E - ln K) below which growth is an alarm at once; 0 = K have all"
        },
    )
    uneven_violation: float = field(
        default=0.3, metadata={"help": "mean max violation over its floor from which a layer is SKEWED"}
    )
    dead_frac: float = field(
        default=0.01, metadata={"help": "share of the fair share below which one is dead"}
    )
    dead_copies: float = field(
        default=100.0, metadata={"help": "copies of fair share that the window for it must hold"}
    )
    fading_share: float = field(
        default=0.25,
        metadata={"help": "share of the fair share, lately, under which an expert that had twice it fades"},
    )
    fading_frac: float = field(
        default=0.05, metadata={"help": "share of the experts (1 at least) that must fade for COLLAPSING"}
    )
    collapsed_dead_frac: float = field(
        default=0.1, metadata={"help": "share of the experts that must be dead for COLLAPSED"}
    )
    saturated_frac: float = field(
        default=0.1, metadata={"help": "share of the biases at their limit from which a layer is SKEWED"}
    )
    rank_skew: float = field(
        default=1.5, metadata={"help": "fullest rank over the mean from which a layer is SKEWED"}
    )
    bytes_ratio: float = field(
        default=1.01, metadata={"help": "bytes over those of the formula from which all layers are SKEWED"}
    )
    margin_samples: int = field(
        default=20, metadata={"help": "samples in a row with gain below reinforcement: then SKEWED"}
    )
    stale_after_steps: int = field(
        default=1000, metadata={"help": "age of the balancer, or steps without a sample: then STALE"}
    )
    memory: float = field(
        default=200.0, metadata={"help": "samples that the baseline remembers (to 1/e), unless it is frozen"}
    )

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not (least <= value <= most and math.isfinite(value)):
                raise ValueError(f"{name}={value} must lie between {least:g} and {most:g}")
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if int(value) != value or value < least:
                raise ValueError(f"{name}={value} must be a whole number of {least} or more")
