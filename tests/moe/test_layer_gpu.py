"""The layer on a GPU: the same results as the reference, and one wait for the device in a forward."""

import warnings

import numpy as np
import pytest
import torch

from moe import DenseMoE, LoadMeter, MoEConfig, MoELayer, Topology
from moe.recompute import checkpoint
from routing import RouterConfig

pytestmark = pytest.mark.gpu
WIDTH, EXPERTS, HIDDEN, TOKENS = 64, 6, 96, 130


def orthonormal() -> torch.Tensor:
    """A gate [E, D] under which `tokens` select what they are made of, whatever the rounding."""
    return torch.linalg.qr(torch.randn(WIDTH, EXPERTS, generator=torch.Generator().manual_seed(2)))[0].T


def tokens() -> torch.Tensor:
    """Rows [T, D] of noise, and of 3 and 2 times the gate's rows of two experts."""
    generator = torch.Generator().manual_seed(1)
    gate_ED = orthonormal()
    noise = torch.randn(TOKENS, WIDTH, generator=generator)
    noise -= noise @ gate_ED.T @ gate_ED
    first = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    second = (first + 1 + torch.randint(EXPERTS - 1, (TOKENS,), generator=generator)) % EXPERTS
    return noise + 3 * gate_ED[first] + 2 * gate_ED[second]


def make(dtype, method="auto", meter=None, dedup="off", replicas=False):
    """A layer on the GPU, and the float64 reference with its weights."""
    slots = np.array([*range(EXPERTS), 4, 1, -1, 4]) if replicas else None
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=2, balance_loss=0.3)
    config = MoEConfig(router=router, expert_hidden=HIDDEN, shared_hidden=32, method=method, dedup=dedup)
    torch.manual_seed(0)
    layer = MoELayer(config, Topology(), meter=meter, slot_to_expert_S=slots).to("cuda", dtype)
    reference = DenseMoE(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.router.gate.weight.copy_(orthonormal())
        reference.gate.copy_(layer.router.gate.weight.cpu())
        for name in ("w1", "w2", "w3"):
            getattr(reference, name).copy_(getattr(layer.experts, name).cpu())
            getattr(reference, f"shared_{name}").copy_(getattr(layer.shared_expert, name).weight.cpu())
    return layer, reference


@pytest.mark.parametrize("skew_proof", [{}, {"replicas": True}, {"dedup": "on", "replicas": True}], ids=str)
@pytest.mark.parametrize("keep", ["", "routes", "rows"])
@pytest.mark.parametrize(
    ("dtype", "method", "bound"),
    [
        (torch.float64, "auto", 1e-10),
        (torch.float32, "auto", 1e-3),  # matrix products in TF32 where it is allowed
        (torch.bfloat16, "auto", 0.05),
        (torch.bfloat16, "loop", 0.05),
        (torch.bfloat16, "grouped_mm", 0.05),
    ],
)
def test_the_layer_on_a_gpu_equals_the_reference(dtype, method, bound, keep, skew_proof):
    layer, reference = make(dtype, method, **skew_proof)
    x = tokens().to(dtype)
    ours, theirs = x.cuda().requires_grad_(True), x.detach().double().requires_grad_(True)
    y, aux_loss = checkpoint(layer, ours, keep=keep) if keep else layer(ours)
    (y.double().square().sum() + aux_loss.double()).backward()
    wanted, wanted_aux, _ = reference(theirs)
    (wanted.square().sum() + wanted_aux).backward()
    pairs = [(y, wanted), (ours.grad, theirs.grad), (layer.router.gate.weight.grad, reference.gate.grad)]
    pairs += [(getattr(layer.experts, n).grad, getattr(reference, n).grad) for n in ("w1", "w2", "w3")]
    for got, want in pairs:
        scale = float(want.detach().abs().max())
        assert float((got.detach().cpu().double() - want.detach()).abs().max()) <= bound * scale


@pytest.mark.parametrize("replicas", [False, True])
def test_a_forward_and_backward_wait_for_the_device_once(replicas):
    layer, _ = make(torch.bfloat16, meter=LoadMeter(), replicas=replicas)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the first one allocates and loads
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                y, aux_loss = layer(x)
                torch.autograd.backward([y, aux_loss], [torch.ones_like(y), torch.ones_like(aux_loss)])
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits


def test_the_meter_counts_on_the_device_what_the_host_would():
    meter = LoadMeter()
    layer, _ = make(torch.float32, meter=meter)
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    layer(x)
    sample = meter.sample(1)
    wanted = np.bincount(layer.router.route(x).expert_N.cpu().numpy(), minlength=EXPERTS)
    assert (sample.tokens_per_expert_LE[0] == wanted).all()
    assert sample.score_histogram_LEB.sum() == TOKENS * EXPERTS
