"""Settings of the router. Every field's help names its unit and a good value."""

import math
from dataclasses import dataclass, field

from routing.shares import log_shares

SCORES = ("softmax", "sigmoid")
BALANCE_SCOPES = ("local", "sequence", "global", "previous", "running")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """What a `Router` needs to know.

    Raises ValueError for a value out of bounds; the message names the nearest that works.
    """

    d_model: int = field(default=128, metadata={"help": "model width D (elements of a token's row)"})
    num_experts: int = field(default=8, metadata={"help": "logical experts E of a layer; 8 to 256"})
    top_k: int = field(default=2, metadata={"help": "experts K that each token selects; 1 to 8"})
    score: str = field(
        default="softmax",
        metadata={
            "help": "gate score: softmax over the experts (Mixtral), or sigmoid of each (DeepSeek-V3)",
            "choices": SCORES,
        },
    )
    normalize: bool = field(
        default=True, metadata={"help": "divide the K selected weights by their sum, so that they add to 1"}
    )
    scale: float = field(default=1.0, metadata={"help": "factor on the weights; 1.0 (DeepSeek-V3: 2.5)"})
    balance_loss: float = field(
        default=0.01, metadata={"help": "coefficient of the balance loss (1 at balance); 0.01, 0 = off"}
    )
    balance_scope: str = field(
        default="global",
        metadata={
            "help": "tokens whose expert fractions enter the balance loss: local (this rank's micro-batch), "
            "sequence, global (all ranks' micro-batch), previous (last optimizer step, all ranks), "
            "running (all ranks, this step's micro-batches so far)",
            "choices": BALANCE_SCOPES,
        },
    )
    z_loss: float = field(
        default=0.001, metadata={"help": "coefficient of the router z-loss (ST-MoE); 0.001, 0 = off"}
    )
    forced: str = field(
        default="",
        metadata={
            "help": "experts drawn from a given distribution, whatever the scores say, for experiments with "
            'skew: "" (the router selects), uniform, zipf:A (share of expert e as (e+1)^-A; 1.0), always:I,J '
            "(in every token, the others uniform), only:A-B or only:I,J (all K among these), share:p0,p1,.. "
            "(one for each expert); for K > 1 the load is flatter than the shares"
        },
    )
    forced_seed: int = field(
        default=0, metadata={"help": "seed of the forced selection; 0 or more, 0 where nothing is forced"}
    )

    def __post_init__(self) -> None:
        for name in ("d_model", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"router.{name}={getattr(self, name)} must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"router.top_k={self.top_k} is more than router.num_experts={self.num_experts}: a token "
                f"selects an expert at most once; use top_k <= {self.num_experts}"
            )
        for name, choices in (("score", SCORES), ("balance_scope", BALANCE_SCOPES)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"router.{name}={getattr(self, name)!r} is unknown; use one of {', '.join(choices)}"
                )
        for name in ("balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"router.{name}={getattr(self, name)} must be 0 or more, and finite")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"router.scale={self.scale} must be more than 0; 1.0 leaves the weights alone")
        self._check_forced()

    def _check_forced(self) -> None:
        if self.forced:
            log_shares(self.forced, self.num_experts, self.top_k)
        elif self.forced_seed:
            raise ValueError(
                f"router.forced_seed={self.forced_seed} has no effect: nothing is forced; set router.forced "
                "too, or leave the seed at 0"
            )
        if self.forced_seed < 0:
            raise ValueError(f"router.forced_seed={self.forced_seed} must be 0 or more")
