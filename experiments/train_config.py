"""TrainConfig: the section [train]. Every field's help names its unit and a good value."""

import math
from dataclasses import dataclass, field

SCHEDULES = ("cosine", "constant", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What the training loop needs to know beyond the model and the data.

    Raises ValueError for a value out of bounds; checks that need the number of ranks are in `check_world`.
    """

    steps: int = field(default=400, metadata={"help": "optimizer steps of the whole run; 400 to 100000"})
    ep_size: int = field(
        default=0,
        metadata={"help": "ranks that share one set of experts; 0 = all ranks, else a divisor of the ranks"},
    )
    micro_batch: int = field(
        default=8, metadata={"help": "sequences per rank and micro-batch; 4 to 32, less when memory is short"}
    )
    accumulation: int = field(
        default=1, metadata={"help": "micro-batches that each rank sums up per optimizer step; 1 to 64"}
    )
    lr: float = field(
        default=2e-3, metadata={"help": "peak learning rate per step; 2e-3 (tiny), 3e-4 (1e9 parameters)"}
    )
    router_lr_factor: float = field(
        default=1.0,
        metadata={
            "help": "learning rate of the routers' gate weights as a multiple of lr; 1.0, less where routers "
            "run away"
        },
    )
    min_lr_frac: float = field(
        default=0.1, metadata={"help": "last learning rate as a fraction of lr (cosine only); 0.1"}
    )
    warmup_steps: int = field(
        default=20, metadata={"help": "optimizer steps of linear warm-up from 0 to lr; 1 to 5 % of steps"}
    )
    schedule: str = field(
        default="cosine",
        metadata={
            "help": "learning rate after the warm-up: cosine, constant, or deepspeed (the JSON's scheduler)",
            "choices": SCHEDULES,
        },
    )
    beta1: float = field(default=0.9, metadata={"help": "AdamW's decay of the gradient's mean; 0.9"})
    beta2: float = field(default=0.95, metadata={"help": "AdamW's decay of its square; 0.95 to 0.999"})
    weight_decay: float = field(
        default=0.1, metadata={"help": "decoupled weight decay (AdamW); 0.1, 0 = off"}
    )
    clip: float = field(
        default=1.0, metadata={"help": "largest global gradient norm, longer ones are scaled; 1.0, 0 = off"}
    )
    deepspeed: str = field(
        default="zero1.json",
        metadata={
            "help": "DeepSpeed's JSON (ZeRO stage, offload...): a path, or a packaged zero0..3.json, "
            "zero2_offload.json, zero3_offload.json"
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of the initial weights; 0 or more"})
    init: str = field(
        default="",
        metadata={
            "help": "weights to start from: a folder of `counterpoise weights import` or `upcycle`, or a "
            'model.safetensors of a checkpoint; "" = drawn from the seed'
        },
    )
    log_every: int = field(default=10, metadata={"help": "optimizer steps between two lines of metrics; 10"})
    valid_every: int = field(
        default=100, metadata={"help": "optimizer steps between two validations; 100, 0 = only at the end"}
    )
    valid_sequences: int = field(
        default=16, metadata={"help": "validation sequences per domain; 16 to 1000 (fewer: noisier)"}
    )
    checkpoint_every: int = field(
        default=100, metadata={"help": "optimizer steps between two checkpoints; 100, 0 = only at the end"}
    )
    keep_checkpoints: int = field(default=2, metadata={"help": "newest complete checkpoints kept on disk; 2"})
    heatmap_every: int = field(
        default=50, metadata={"help": "optimizer steps between two images of the expert loads; 50, 0 = none"}
    )
    timeout_s: float = field(
        default=600.0,
        metadata={
            "help": "seconds that a rank waits for the others before it gives up and says who is missing; "
            "600, more where rank 0 needs longer to hash a checkpoint"
        },
    )
    ledger: bool = field(
        default=True,
        metadata={"help": "record the bytes of every collective (comm/... in the metrics); about 1 % a step"},
    )
    export: bool = field(
        default=True,
        metadata={"help": "checkpoints also hold the whole model as one safetensors file (to sample from)"},
    )

    def __post_init__(self) -> None:
        for name, least in _TRAIN_LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"train.{name}={getattr(self, name)} must be {least} or more")
        if not self.lr > 0:
            raise ValueError(f"train.lr={self.lr} must be more than 0; a tiny model takes 2e-3")
        if not 0 < self.router_lr_factor < math.inf:
            raise ValueError(
                f"train.router_lr_factor={self.router_lr_factor} must be more than 0, and finite; 1.0 = the "
                "routers learn as fast as the rest"
            )
        if self.schedule == "deepspeed" and self.router_lr_factor != 1.0:
            raise ValueError(
                f"train.router_lr_factor={self.router_lr_factor} does not go with "
                'train.schedule="deepspeed": its scheduler sets every learning rate by itself; use '
                'router_lr_factor=1.0, or schedule="cosine" or "constant"'
            )
        if not self.min_lr_frac <= 1:
            raise ValueError(f"train.min_lr_frac={self.min_lr_frac} must be a fraction in 0..1; 0.1 is usual")
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be below 1; 0.9, 0.95 are usual")
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} is more than train.steps={self.steps}: the run "
                f"would end before the peak; use warmup_steps <= {self.steps}"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"train.schedule={self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}"
            )
        if not self.deepspeed:
            raise ValueError("train.deepspeed is empty; name a JSON file, for example zero1.json")


_TRAIN_LEAST = {
    **dict.fromkeys(("steps", "micro_batch", "accumulation", "log_every", "valid_sequences"), 1),
    **dict.fromkeys(("timeout_s",), 1),
    **dict.fromkeys(("keep_checkpoints",), 1),
    **dict.fromkeys(
        ("ep_size", "warmup_steps", "seed", "valid_every", "checkpoint_every", "heatmap_every"), 0
    ),
    **dict.fromkeys(("min_lr_frac", "beta1", "beta2", "weight_decay", "clip"), 0),
}
