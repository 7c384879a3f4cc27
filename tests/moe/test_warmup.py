"""After the warm-up no kernel is left to compile, and nothing else has changed."""

import subprocess
import sys

import torch

from moe.warmup import warm

# what a layer calls, and the compiler must not be asked for again
SCRIPT = """
import torch
from moe import LoadMeter, MoEConfig, MoELayer, Topology
from moe.kernels import kernels
from moe.warmup import warm
from routing import RouterConfig

dtype = getattr(torch, {dtype!r})
warm(dtype)
count = lambda: sum(len(kernel.signatures) for kernel in vars(kernels()).values())
before = count()
config = MoEConfig(router=RouterConfig(d_model=24, num_experts=3, top_k=2), expert_hidden=40)
layer = MoELayer(config, Topology(), meter=LoadMeter()).to(dtype)
y, aux = layer(torch.randn(11, 24).to(dtype))
(y.float().sum() + aux).backward()
print(before, count())
"""


def test_a_layer_compiles_nothing_after_the_warm_up():
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", SCRIPT.format(dtype=dtype)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        before, after = done.stdout.split()
        assert before == after != "0"


def test_the_warm_up_draws_no_number_of_the_caller():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    warm(torch.float32)
    assert torch.equal(torch.rand(3), wanted)
