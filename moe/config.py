"""Settings of the expert layer and of the model around it. Every field's help names unit and a good value."""

import math
from dataclasses import dataclass, field

from routing.config import RouterConfig

DTYPES = ("float32", "bfloat16")
ACTIVATIONS = ("swiglu", "gelu")
WEIGHT_POSITIONS = ("after", "before")
METHODS = ("auto", "loop", "grouped_mm", "bmm")
DEDUP = ("off", "on", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """What a `MoELayer` needs to know: the router's settings and the shape of its experts."""

    router: RouterConfig = field(default_factory=RouterConfig)
    expert_hidden: int = field(
        default=256,
        metadata={"help": "hidden width F of one expert (elements); 1 to 4 times the model width"},
    )
    shared_hidden: int = field(
        default=0, metadata={"help": "hidden width of the shared expert that sees every token; 0 = none"}
    )
    activation: str = field(
        default="swiglu",
        metadata={
            "help": "feed-forward of an expert: swiglu (three matrices), or gelu (two)",
            "choices": ACTIVATIONS,
        },
    )
    weight_position: str = field(
        default="after",
        metadata={
            "help": "where the router weight multiplies a row: after the expert, or before its second matrix "
            "(the weights then travel too); the gradients are the same",
            "choices": WEIGHT_POSITIONS,
        },
    )
    method: str = field(
        default="auto",
        metadata={
            "help": "how the experts' products are computed: auto chooses by device, type and sizes; bmm "
            "wants as many rows for every expert",
            "choices": METHODS,
        },
    )

    dedup: str = field(
        default="off",
        metadata={
            "help": "send a token's row once to a rank, however many of its experts are there: off, on, or "
            "auto, where the bytes saved outweigh the extra exchanges on the link, measured in the first "
            "forward (a resumed run measures again, and may choose otherwise)",
            "choices": DEDUP,
        },
    )
    prefetch: bool = field(
        default=False,
        metadata={
            "help": "send the weights of all replicas (MoELayer.place) ahead, while the block's attention "
            "runs; without it only those of replicas that get rows, beside the products of the homes"
        },
    )

    def __post_init__(self) -> None:
        if self.expert_hidden < 1:
            raise ValueError(f"moe.expert_hidden={self.expert_hidden} must be at least 1")
        if self.shared_hidden < 0:
            raise ValueError(f"moe.shared_hidden={self.shared_hidden} must be 0 (no shared expert) or more")
        known = {"activation": ACTIVATIONS, "weight_position": WEIGHT_POSITIONS}
        known |= {"method": METHODS, "dedup": DEDUP}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"moe.{name}={getattr(self, name)!r} is unknown; use one of {', '.join(choices)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What a `Transformer` needs to know, its MoE layers included."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    vocab_size: int = field(default=256, metadata={"help": "size of the vocabulary; 256 for bytes"})
    num_layers: int = field(default=4, metadata={"help": "transformer blocks, dense ones included; 2 to 60"})
    num_dense_layers: int = field(
        default=0,
        metadata={
            "help": "leading blocks with a dense feed-forward instead of experts; 0 to 3, fewer than "
            "num_layers to train"
        },
    )
    d_model: int = field(
        default=128,
        metadata={"help": "model width D (elements); a multiple of num_heads, unless head_dim is set"},
    )
    num_heads: int = field(default=4, metadata={"help": "attention heads; d_model / num_heads is 32 to 128"})
    num_kv_heads: int = field(
        default=0,
        metadata={
            "help": "heads of keys and values, shared by num_heads / num_kv_heads query heads each (grouped-"
            "query attention); a divisor of num_heads, 0 = num_heads"
        },
    )
    head_dim: int = field(
        default=0,
        metadata={"help": "width of an attention head (elements), even; 64 to 128, 0 = d_model / num_heads"},
    )
    qk_norm: bool = field(
        default=False,
        metadata={"help": "RMSNorm of every head of queries and keys, ahead of the rotation (Qwen3)"},
    )
    norm_eps: float = field(
        default=1e-6, metadata={"help": "added to the mean square in every RMSNorm; 1e-6 (Mixtral: 1e-5)"}
    )
    dense_hidden: int = field(
        default=512, metadata={"help": "hidden width of a dense block's feed-forward (elements); 4 * d_model"}
    )
    seq_len: int = field(default=256, metadata={"help": "longest sequence (tokens); 128 to 4096"})
    rope_base: float = field(default=10000.0, metadata={"help": "base of the rotary position angles; 10000"})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "type of weights and activations: float32, or bfloat16 with float32 master weights",
            "choices": DTYPES,
        },
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "dense_hidden", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} is out of 0..{self.num_layers}, the blocks "
                f"of model.num_layers={self.num_layers}"
            )
        self._check_heads()
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"model.rope_base={self.rope_base} must be more than 0; 10000 is usual")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"model.norm_eps={self.norm_eps} must be above 0 and below 1; 1e-6 is usual")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if self.moe.router.d_model != self.d_model:
            raise ValueError(
                f"moe.router.d_model={self.moe.router.d_model} differs from model.d_model={self.d_model}: "
                "router and model share one width"
            )

    def _check_heads(self) -> None:
        kv_heads = self.kv_heads
        if kv_heads < 1 or self.num_heads % kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use one of {', '.join(map(str, fitting))}, or 0 for all"
            )
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim} must be even (rotary angles pair the elements of a head), "
                "or 0 for d_model / num_heads; 64 to 128 are usual"
            )
        if not self.head_dim and self.d_model % (2 * self.num_heads):
            step = 2 * self.num_heads
            below = max(step, self.d_model // step * step)
            raise ValueError(
                f"model.d_model={self.d_model} is not an even multiple of model.num_heads={self.num_heads} "
                f"(rotary angles pair the elements of a head); use {below} or {below + step}, or set "
                "model.head_dim"
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, where 0 has been taken for all."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Elements of a head, where 0 has been taken for d_model / num_heads."""
        return self.head_dim or self.d_model // self.num_heads
