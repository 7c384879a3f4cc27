"""Transformer: a small decoder-only language model with mixture-of-experts blocks.

    tokens -> embedding -> [norm, attention, norm, dense or MoE feed-forward] * L -> norm -> head -> logits

Pre-norm with RMSNorm, rotary positions, untied head. The class of the MoE layers comes in from outside, so an
engine's own class can be used without this file knowing the engine.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional as F

from moe.config import ModelConfig
from moe.experts import Experts, SwiGLU
from moe.groups import Groups
from moe.layer import MoELayer
from moe.meter import LoadMeter
from moe.timing import no_timer
from moe.topology import Topology


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions (Su et al., RoFormer, section 3.4).

    Query heads may share the heads of keys and values (grouped-query attention, Ainslie et al., GQA): the
    first num_heads / num_kv_heads of them the first one, and so on. `qkv` has the rows of all queries, then
    of all keys, then of all values.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head = config.num_heads, config.kv_heads, config.head_width
        self.rope_base = config.rope_base
        inner = self.num_heads * self.head
        self.qkv = nn.Linear(config.d_model, inner + 2 * self.kv_heads * self.head, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)
        self.q_norm = nn.RMSNorm(self.head, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        batch, length, _ = x_BSD.shape
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        qkv = self.qkv(x_BSD).view(batch, length, sum(heads), self.head).transpose(1, 2)
        q, k, v = qkv.split(heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos_SH, sin_SH = rotary_angles(length, self.head, self.rope_base, x_BSD.device, dtype)
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        grouped = self.kv_heads != self.num_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(batch, length, self.num_heads * self.head))


def rotary_angles(
    length: int, head: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position * base^(-2i/head), each [S, head / 2] of `dtype`, float32 or better."""
    rate = base ** (-torch.arange(0, head, 2, device=device, dtype=dtype) / head)
    angle = torch.arange(length, device=device, dtype=dtype)[:, None] * rate
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
    """Turn element i of a head against element i + head/2 by the angle of its position.   [..., S, head]."""
    first, second = x.to(cos_SH.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos_SH - second * sin_SH, first * sin_SH + second * cos_SH], dim=-1)
    return turned.to(x.dtype)


class Block(nn.Module):
    """Attention, then a dense or a mixture-of-experts feed-forward; both behind a norm, both residual."""

    def __init__(self, config: ModelConfig, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm_2 = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x_BSD: torch.Tensor, token_mask_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, D] -> [B, S, D] and the auxiliary loss, 0 for a dense block."""
        if isinstance(self.feed_forward, MoELayer) and self.feed_forward.config.prefetch:
            self.feed_forward.prefetch()  # replicas' weights travel during attention
        x_BSD = x_BSD + self.attention(self.norm_1(x_BSD))
        if isinstance(self.feed_forward, MoELayer):
            y_BSD, aux_loss = self.feed_forward(self.norm_2(x_BSD), token_mask_T)
        else:
            y_BSD, aux_loss = self.feed_forward(self.norm_2(x_BSD)), x_BSD.new_zeros((), dtype=torch.float32)
        return x_BSD + y_BSD, aux_loss


class Transformer(nn.Module):
    """The language model.

    config: shapes;  topology, groups, meter, timer: handed to every MoE layer;  layer_class: MoELayer or a
    subclass. Parameters are uninitialised copies of torch's defaults until `init_weights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology | None = None,
        *,
        groups: Groups | None = None,
        meter: LoadMeter | None = None,
        timer: Callable[[str], AbstractContextManager[None]] = no_timer,
        layer_class: type[MoELayer] = MoELayer,
    ) -> None:
        super().__init__()
        topology = topology or Topology()
        self.config, self.topology = config, topology
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList()
        for layer in range(config.num_layers):
            if layer < config.num_dense_layers:
                feed_forward: nn.Module = SwiGLU(config.d_model, config.dense_hidden)
            else:
                feed_forward = layer_class(
                    config.moe,
                    topology,
                    groups=groups,
                    meter=meter,
                    timer=timer,
                    layer_id=layer - config.num_dense_layers,  # the meter's number, without a meter too
                )
            self.blocks.append(Block(config, feed_forward))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor | None = None,
        mask_BS: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits, or the losses where targets are given.

        tokens_BS, targets_BS: [B, S] int64, B may be 0;  mask_BS: [B, S] bool, False = padding,
        which must follow the tokens of its row: attention is causal and masks nothing else.
        Returns logits [B, S, vocab], or (cross entropy in nats, weighted auxiliary loss), both float32 *sums*
        over this rank's valid tokens. Raises ValueError for a sequence longer than config.seq_len.
        """
        if tokens_BS.shape[1] > self.config.seq_len:
            raise ValueError(
                f"sequence of {tokens_BS.shape[1]} tokens is longer than model.seq_len={self.config.seq_len}"
            )
        mask_T = None if mask_BS is None else mask_BS.reshape(-1)
        x_BSD = self.embedding(tokens_BS)
        aux_loss = torch.zeros((), dtype=torch.float32, device=x_BSD.device)
        for block in self.blocks:
            x_BSD, aux = block(x_BSD, mask_T)
            aux_loss = aux_loss + aux
        logits = self.head(self.norm(x_BSD))
        if targets_BS is None:
            return logits
        nats_T = F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            targets_BS.reshape(-1),
            reduction="none",
        )
        ce_sum = nats_T.sum() if mask_T is None else torch.where(mask_T, nats_T, 0.0).sum()
        return ce_sum, aux_loss

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from the seed and its name, every expert from its own logical number.

        So a model is the same for every number of ranks, and experts of different ranks differ.
        """
        depth = (2 * self.config.num_layers) ** -0.5
        homes = {layer.experts: layer.home_experts for layer in self.modules() if isinstance(layer, MoELayer)}
        for module_name, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}"
                # projections back into the residual stream are scaled down with depth
                scale = depth if full_name.endswith((".w2", ".w2.weight", ".out.weight")) else 1.0
                if parameter.ndim == 1:
                    parameter.fill_(1.0)  # norms
                elif isinstance(module, Experts):
                    for local, expert in enumerate(homes[module]):
                        fill_normal(parameter[local], scale, seed, f"{full_name}.{expert}")
                else:
                    fill_normal(parameter, scale, seed, full_name)


@torch.no_grad()
def fill_normal(weight: torch.Tensor, scale: float, seed: int, name: str) -> None:
    """Fill with what `init_weights` gives a parameter: normal values of deviation scale / sqrt(inputs).

    0.02 for embedding, head and gate. Drawn on CPU, so alike everywhere.
    weight: changed in place;  scale: factor on the deviation;  name: its full name in the model.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    narrow = name.startswith(("embedding", "head")) or name.endswith("gate.weight")
    std = 0.02 if narrow else scale * weight.shape[-1] ** -0.5
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model: "dense" (on every rank), "experts" (shared out), "active" per token."""
    moe, width = config.moe, config.d_model
    moe_layers = config.num_layers - config.num_dense_layers
    expert = (3 if moe.activation == "swiglu" else 2) * width * moe.expert_hidden
    attention = 2 * width * (config.num_heads + config.kv_heads) * config.head_width + 2 * width
    attention += 2 * config.head_width * config.qk_norm
    dense = 2 * config.vocab_size * width + width + config.num_layers * attention
    dense += config.num_dense_layers * 3 * width * config.dense_hidden
    dense += moe_layers * (moe.router.num_experts * width + 3 * width * moe.shared_hidden)
    experts = moe_layers * moe.router.num_experts * expert
    return {
        "dense": dense,
        "experts": experts,
        "active": dense + moe_layers * moe.router.top_k * expert,
    }
