"""The memory estimate: sharded as ZeRO shards, and refused where it does not fit."""

import pytest
import torch

from experiments.config import load_config
from experiments.estimate import (
    activation_bytes,
    available_bytes,
    check_fits,
    estimate_memory,
    without_offloaded,
)
from moe import Topology
from moe.model import Transformer, count_parameters

CONFIG = load_config("tiny.toml")
WORLD = Topology(world_size=4, ep_size=2)


@pytest.mark.parametrize(("stage", "sharded"), [(0, ""), (1, "o"), (2, "og"), (3, "ogw")])
def test_zero_stages_shard_optimizer_gradients_and_weights(stage, sharded):
    counts = count_parameters(CONFIG.model)
    local_experts = counts["experts"] / 2

    def share(is_sharded: bool) -> float:
        return counts["dense"] / (4 if is_sharded else 1) + local_experts / (2 if is_sharded else 1)

    estimate = estimate_memory(CONFIG, WORLD, stage)
    state = 12 if stage else 8  # in float32 stage 0 updates the weights themselves
    assert estimate.optimizer_bytes == pytest.approx(state * share("o" in sharded), abs=1)
    assert estimate.gradients_bytes == pytest.approx(4 * share("g" in sharded), abs=1)
    assert estimate.weights_bytes == pytest.approx(4 * share("w" in sharded), abs=1)


def test_bfloat16_halves_weights_and_gradients_only():
    whole = estimate_memory(CONFIG, WORLD, 1)
    half = estimate_memory(load_config("tiny.toml", ["model.dtype=bfloat16"]), WORLD, 1)
    assert half.weights_bytes * 2 == whole.weights_bytes
    assert half.optimizer_bytes == whole.optimizer_bytes


@pytest.mark.parametrize(
    "attention",
    [
        [],
        ["model.num_kv_heads=1"],
        ["model.head_dim=128"],
        ["model.head_dim=128", "model.num_kv_heads=1", "model.qk_norm=true"],
    ],
    ids=str,
)
def test_activations_are_within_a_third_of_what_autograd_saves(attention):
    """Saved tensors of one real forward, each storage once; the estimate must be of that size, not a
    guess."""
    sizes = ["train.micro_batch=2", "moe.shared_hidden=64", "model.num_dense_layers=1"]
    config = load_config("tiny.toml", sizes + attention)
    model = Transformer(config.model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 256, (2, config.model.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept = model(tokens, tokens)
    assert sum(saved.values()) == pytest.approx(activation_bytes(config, 4), rel=0.33), kept


def test_too_large_a_model_is_refused_with_its_parts():
    estimate = estimate_memory(CONFIG, WORLD, 1)
    check_fits(estimate, estimate.total_bytes)
    with pytest.raises(ValueError, match=r"will not fit: a rank needs about .* GiB .* higher ZeRO stage"):
        check_fits(estimate, estimate.total_bytes - 1)


def test_ranks_of_one_machine_share_its_memory():
    device = torch.device("cpu")
    assert available_bytes(device, 4) == pytest.approx(available_bytes(device, 1) / 4, rel=0.2)


def test_what_is_offloaded_does_not_count_on_the_device():
    estimate = estimate_memory(CONFIG, WORLD, 3)
    assert without_offloaded(estimate, {"stage": 3}) == estimate
    cpu = {"device": "cpu"}
    optimizer = without_offloaded(estimate, {"offload_optimizer": cpu})
    assert (optimizer.optimizer_bytes, optimizer.weights_bytes) == (0, estimate.weights_bytes)
    both = without_offloaded(estimate, {"offload_optimizer": cpu, "offload_param": cpu})
    assert (both.optimizer_bytes, both.weights_bytes) == (0, 0)
    assert without_offloaded(estimate, {"offload_optimizer": {"device": "none"}}) == estimate
