"""Names: which tensors of a transformers file make up which tensor of our model, as data.

It stands under the conversion: `entries` writes the whole correspondence down, name by name with shapes, and
`join` and `pieces` follow it in the two directions. Names are those of the files (safetensors as saved by
`save_pretrained`), not those of the modules in memory, which fuse the experts.

    ours                                    Mixtral                              Qwen3-MoE
    blocks.N.attention.qkv.weight           q_proj, k_proj, v_proj, one below the other, under
                                            model.layers.N.self_attn
    blocks.N.feed_forward.router.gate       block_sparse_moe.gate                mlp.gate
    blocks.N.feed_forward.experts.w1 [e]    block_sparse_moe.experts.e.w1        mlp.experts.e.gate_proj
    blocks.N.feed_forward.experts.w2 [e]    block_sparse_moe.experts.e.w2        mlp.experts.e.down_proj
    blocks.N.feed_forward.experts.w3 [e]    block_sparse_moe.experts.e.w3        mlp.experts.e.up_proj
    blocks.N.feed_forward.w1, w2, w3        (has no dense blocks)                mlp.gate_proj, down_proj,
                                                                                 up_proj
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moe.config import ModelConfig

MIXTRAL, QWEN3_MOE = "mixtral", "qwen3_moe"
FORMATS = (MIXTRAL, QWEN3_MOE)
# dense models whose names are those of the dense blocks of Qwen3-MoE
DENSE = ("llama", "mistral", "qwen3")
BIAS = "router.bias.bias_E"
COUNTS = "previous_counts_E"

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of our model, and the tensors of the file that it is made of.

    name, shape: ours;  parts: names and shapes in the file, in their order along dimension 0, none for a
    buffer that no such file has (zeros when read);  stacked: each part is one slice [1, ...], not rows;
    dtype: of such a buffer.
    """

    name: str
    shape: Shape
    parts: tuple[tuple[str, Shape], ...] = ()
    stacked: bool = False
    dtype: torch.dtype = torch.float32


def entries(config: ModelConfig, layout: str) -> Iterator[Entry]:
    """Every tensor of the model with its counterpart, in the order of the model's own state dict.

    layout: "mixtral", or "qwen3_moe", which dense models share (`DENSE`).
    """
    width, rows = config.d_model, (config.vocab_size, config.d_model)
    yield _one("embedding.weight", "model.embed_tokens.weight", rows)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield _one(f"{ours}.norm_1.weight", f"{theirs}.input_layernorm.weight", (width,))
        yield from _attention(config, f"{ours}.attention", f"{theirs}.self_attn")
        yield _one(f"{ours}.norm_2.weight", f"{theirs}.post_attention_layernorm.weight", (width,))
        if layer < config.num_dense_layers:
            yield from _dense(config, f"{ours}.feed_forward", f"{theirs}.mlp")
        elif layout == MIXTRAL:
            names = {"w1": "w1", "w2": "w2", "w3": "w3"}
            yield from _experts(config, f"{ours}.feed_forward", f"{theirs}.block_sparse_moe", names)
        else:
            yield from _experts(config, f"{ours}.feed_forward", f"{theirs}.mlp", _PROJECTIONS)
    yield _one("norm.weight", "model.norm.weight", (width,))
    yield _one("head.weight", "lm_head.weight", rows)


_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _one(ours: str, theirs: str, shape: Shape) -> Entry:
    return Entry(name=ours, shape=shape, parts=((theirs, shape),))


def _attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    width, head = config.d_model, config.head_width
    queries, keys = config.num_heads * head, config.kv_heads * head
    rows = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    yield Entry(
        name=f"{ours}.qkv.weight",
        shape=(queries + 2 * keys, width),
        parts=tuple((f"{theirs}.{name}.weight", (count, width)) for name, count in rows),
    )
    yield _one(f"{ours}.out.weight", f"{theirs}.o_proj.weight", (width, queries))
    if config.qk_norm:
        yield _one(f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight", (head,))
        yield _one(f"{ours}.k_norm.weight", f"{theirs}.k_norm.weight", (head,))


def _dense(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    width, hidden = config.d_model, config.dense_hidden
    for name, projection in _PROJECTIONS.items():
        shape = (width, hidden) if name == "w2" else (hidden, width)
        yield _one(f"{ours}.{name}.weight", f"{theirs}.{projection}.weight", shape)


def _experts(config: ModelConfig, ours: str, theirs: str, names: dict[str, str]) -> Iterator[Entry]:
    width, hidden, experts = config.d_model, config.moe.expert_hidden, config.moe.router.num_experts
    yield Entry(name=f"{ours}.{COUNTS}", shape=(experts,), dtype=torch.int64)
    yield _one(f"{ours}.router.gate.weight", f"{theirs}.gate.weight", (experts, width))
    yield Entry(name=f"{ours}.{BIAS}", shape=(experts,))
    for name, projection in names.items():
        shape = (width, hidden) if name == "w2" else (hidden, width)
        parts = tuple((f"{theirs}.experts.{e}.{projection}.weight", shape) for e in range(experts))
        yield Entry(name=f"{ours}.experts.{name}", shape=(experts, *shape), parts=parts, stacked=True)


def join(entry: Entry, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Our tensor from those of the file.   read: name in the file -> tensor of the entry's shape."""
    if not entry.parts:
        return torch.zeros(entry.shape, dtype=entry.dtype)
    parts = [read(name) for name, _ in entry.parts]
    if entry.stacked:
        return torch.stack(parts)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def pieces(entry: Entry) -> Iterator[tuple[str, Shape, int, int]]:
    """Name and shape in the file, first and end row of ours: the inverse of `join`, as data."""
    first = 0
    for name, shape in entry.parts:
        end = first + (1 if entry.stacked else shape[0])
        yield name, shape, first, end
        first = end


def our_state(theirs: dict[str, torch.Tensor], config: ModelConfig, layout: str) -> dict[str, torch.Tensor]:
    """Our state dict from that of a file.   Raises ValueError for missing, unknown or misshapen tensors."""
    listed = list(entries(config, layout))
    expected = {name: shape for entry in listed for name, shape in entry.parts}
    check_names(expected, {name: tuple(value.shape) for name, value in theirs.items()}, layout)
    return {entry.name: join(entry, theirs.__getitem__) for entry in listed}


def their_state(ours: dict[str, torch.Tensor], config: ModelConfig, layout: str) -> dict[str, torch.Tensor]:
    """The state dict of a file from ours.   Raises ValueError as `our_state` does."""
    listed = list(entries(config, layout))
    expected = {entry.name: entry.shape for entry in listed}
    check_names(expected, {name: tuple(value.shape) for name, value in ours.items()}, "our model")
    return {
        name: ours[entry.name][first:end].view(shape)
        for entry in listed
        for name, shape, first, end in pieces(entry)
    }


def check_names(expected: dict[str, Shape], found: dict[str, Shape], where: object) -> None:
    """Raise one ValueError that lists what is missing, unknown and of another shape; a few names of each."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    unknown = [name for name in found if name not in expected]
    shapes = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    kinds = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    problems = [_some(kind, names) for kind, names in kinds.items() if names]
    if any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in unknown):
        problems.append(
            "experts fused as in memory (gate_up_proj): the file was saved from a bare state_dict; write it "
            "with transformers' save_pretrained"
        )
    if problems:
        raise ValueError(f"{where}: the tensors do not fit the configuration: {'; '.join(problems)}")


def _some(kind: str, names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} {kind}: {', '.join(names[:most])}{rest}"
