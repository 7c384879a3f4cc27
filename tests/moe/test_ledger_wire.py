"""The wire: in a network namespace of two ranks alone, the interface counts the bytes that the ledger says.

Only these ranks use the namespace's loopback, which counts each byte once as sent and once as received; the
former is read. Nothing is subtracted: headers are 66 bytes in a segment of 64 KiB, and acknowledgements,
barriers and the rendezvous' store are smaller still beside 4 MiB. Gloo sends the logical bytes, but for its
reduce-scatter, which is an all-reduce inside (twice as much), and its reduce, which is a reduce-scatter and a
gather ((n-1) S + (n-1)/n S, where (n-1) S would do).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe import MoEConfig, MoELayer, Topology
from moe.ledger import CommLedger
from moe.testing import run_ranks
from routing import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
WIDTH, TOKENS, PAYLOAD = 256, 4096, 2**20  # float32
# wire bytes of gloo, two ranks, over the formula
FACTORS = {
    "layer": 1, "all_to_all": 1, "all_gather": 1, "all_reduce": 1, "broadcast": 1,
    "reduce_scatter": 2, "reduce": 1.5,
}  # fmt: skip


def sent_on_loopback() -> int:
    """Bytes that lo has sent in this process's network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


def quiet_count() -> int:
    """The counter while nobody sends."""
    dist.barrier()
    time.sleep(0.05)
    count = sent_on_loopback()
    time.sleep(0.05)
    dist.barrier()
    return count


def collectives(rank, world):
    config = MoEConfig(router=RouterConfig(d_model=WIDTH, num_experts=8, top_k=2), expert_hidden=16)
    torch.manual_seed(3)
    layer = MoELayer(config, Topology(world_size=world, ep_size=world, rank=rank))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    full, part = torch.ones(world, PAYLOAD), torch.ones(PAYLOAD)

    def forward_and_backward():
        y, aux = layer(x)
        (y.square().sum() + aux).backward()

    yield "layer", forward_and_backward
    yield "all_to_all", lambda: dist.all_to_all_single(torch.empty_like(full), full)
    yield "all_gather", lambda: dist.all_gather_single(torch.empty_like(full), part[None])
    yield "all_reduce", lambda: dist.all_reduce(part.clone())
    yield "broadcast", lambda: dist.broadcast(part, 0)
    yield "reduce_scatter", lambda: dist.reduce_scatter(torch.empty_like(part), list(full.clone().unbind()))
    yield "reduce", lambda: dist.reduce(part.clone(), 0)


def wire_rank(rank, world):
    """Name -> [bytes on the wire of both ranks, logical bytes sent by this one].

    The fewest of three: where the machine is busy, TCP sends a segment again that was only late, which adds
    64 KiB and never takes any away.
    """
    result = {}
    for name, call in collectives(rank, world):
        wires = []
        for _ in range(3):
            with CommLedger() as ledger:
                before = quiet_count()
                call()
                wires.append(quiet_count() - before)
                logical = sum(entry.sent_bytes for entry in ledger.take())
        result[name] = [min(wires), logical]
    return result


@pytest.fixture(scope="module")
def measured():
    """What the ranks of `wire_rank` return, run inside a namespace."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program} to make a network namespace")
    tried = subprocess.run([*INSIDE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs the privilege to make a network namespace: {tried.stderr.strip()}")
    command = [*INSIDE, sys.executable, __file__]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.dist
@pytest.mark.parametrize("name", FACTORS)
def test_the_interface_counts_the_ledgers_bytes(measured, name):
    wire = measured[0][name][0]
    logical = sum(rank[name][1] for rank in measured)
    assert logical >= 4 * 2**20
    assert wire == pytest.approx(FACTORS[name] * logical, rel=0.02)


if __name__ == "__main__":
    print(json.dumps(run_ranks(wire_rank, 2, env={"GLOO_SOCKET_IFNAME": "lo"})))
