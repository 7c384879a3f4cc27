"""Options of the EP layer against the dense reference: feed-forward, weight position, homes, replicas, split,
recomputation, deduplication.

A seeded generator draws 1,000 configurations. Those of them that together have every pair of choices run
always, all others under the mark slow.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
import pytest
import torch

from balancer.split import exact_split
from moe import DenseMoE, Groups, MoEConfig, MoELayer, SoloExchange, Topology
from moe.exchange import DistExchange
from moe.placement import even_split
from moe.recompute import checkpoint
from moe.testing import run_loopback, run_ranks
from routing import RouterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One random configuration. Its sizes are distinct (but K and E), so that no transposed axis can pass."""

    seed: int
    world: int
    experts: int
    top_k: int
    width: int
    hidden: int
    shared: int
    tokens_P: tuple[int, ...]
    score: str
    scope: str
    activation: str
    weight_position: str
    bias: str
    masked: bool
    recompute: str
    spare: int
    dtype: torch.dtype
    method: str = "auto"
    replicas: str = "none"
    split: str = "even"
    prefetch: bool = False
    dedup: str = "off"

    @property
    def config(self) -> MoEConfig:
        router = RouterConfig(
            d_model=self.width, num_experts=self.experts, top_k=self.top_k, score=self.score,
            normalize=self.seed % 3 > 0, scale=1.0 + self.seed % 2, balance_scope=self.scope,
            balance_loss=0.3,
        )  # fmt: skip
        return MoEConfig(
            router=router, expert_hidden=self.hidden, shared_hidden=self.shared, activation=self.activation,
            weight_position=self.weight_position, method=self.method, dedup=self.dedup,
        )  # fmt: skip

    def slots(self) -> np.ndarray:
        """Homes in any order, spare slots anywhere among them: as many slots on every rank."""
        return self.slots_and_homes()[0]

    def slots_and_homes(self) -> tuple[np.ndarray, np.ndarray]:
        """The slots [S], and the one that is each expert's home [E]; spare ones are empty or replicas."""
        draw = np.random.default_rng(self.seed)
        slots = np.concatenate([np.arange(self.experts), np.full(self.spare * self.world, -1)])
        draw.shuffle(slots)
        home_slot_E = np.argsort(slots)[self.spare * self.world :]
        for slot in np.flatnonzero(slots < 0):
            rank = slot // (slots.shape[0] // self.world)
            there = np.flatnonzero(home_slot_E // (slots.shape[0] // self.world) == rank)
            if self.replicas == "random":
                slots[slot] = draw.integers(-1, self.experts)
            elif self.replicas == "one_expert":
                slots[slot] = self.experts // 2
            elif self.replicas == "same_rank" and there.size:  # beside its own home
                slots[slot] = draw.choice(there)
        return slots, home_slot_E

    def splitter(self):
        """The split of a batch, a function of the counts."""
        return {"even": even_split, "random": random_split(self.seed), "exact": exact_split}[self.split]


def random_split(seed: int):
    """Any split will do: copies to the slots of their expert by chance, the same chance on every rank."""

    def split(counts_PE, slot_to_expert_S):
        draw = np.random.default_rng(seed)
        rows_PS = np.zeros((counts_PE.shape[0], slot_to_expert_S.shape[0]), dtype=np.int64)
        for source, expert in np.argwhere(counts_PE):
            slots = np.flatnonzero(slot_to_expert_S == expert)
            share = draw.dirichlet(np.full(slots.size, 0.3))
            rows_PS[source, slots] = draw.multinomial(counts_PE[source, expert], share)
        return rows_PS

    return split


def make_draw(seed: int) -> Draw:
    draw = np.random.default_rng(seed)
    world = int(draw.choice([1, 2, 3, 4]))
    experts = world * int(draw.integers(1, 4)) if world > 1 else int(draw.integers(2, 7))
    dtype = [torch.float64, torch.float64, torch.float32, torch.bfloat16][int(draw.integers(0, 4))]
    method = "auto" if dtype == torch.float64 else str(draw.choice(["auto", "grouped_mm"]))
    # grouped products want rows of a multiple of 16 bytes
    width, hidden = (11, 13) if method == "auto" else (16, 24)
    shared = int(draw.choice([0, 17]))
    return Draw(
        seed=seed,
        world=world,
        experts=experts,
        top_k=int(draw.integers(1, min(experts, 4) + 1)),
        width=width,
        hidden=hidden,
        shared=shared,
        tokens_P=tuple(int(draw.choice([0, 1, 7, 10])) for _ in range(world)),
        score=str(draw.choice(["softmax", "sigmoid"])),
        scope=str(draw.choice(["global", "previous"])),
        activation=str(draw.choice(["swiglu", "gelu"])),
        weight_position=str(draw.choice(["after", "before"])),
        bias=str(draw.choice(["none", "mixed", "one_expert", "one_rank"])),
        masked=bool(draw.integers(0, 2)),
        recompute=str(draw.choice(["no", "reentrant", "non_reentrant", "keep_rows"])),
        spare=int(draw.integers(0, 3)),
        dtype=dtype,
        method=method,
        replicas=str(draw.choice(["none", "random", "random", "one_expert", "same_rank"])),
        split=str(draw.choice(["even", "random", "exact"])),
        prefetch=bool(draw.integers(0, 2)),
        dedup=str(draw.choice(["off", "on", "on"])),
    )


def reference_of(draw: Draw) -> DenseMoE:
    generator = torch.Generator().manual_seed(draw.seed)
    reference = DenseMoE(draw.config, generator=generator)
    with torch.no_grad():
        reference.gate.mul_(20)
        if draw.bias == "mixed":
            reference.bias.copy_(torch.rand(draw.experts, generator=generator))
        if draw.bias == "one_expert":
            reference.bias[draw.experts // 2] = 9.0
        if draw.bias == "one_rank":
            reference.bias[-draw.experts // draw.world :] = 9.0
        for parameter in (*reference.parameters(), reference.bias):
            parameter.copy_(parameter.to(draw.dtype))  # what the layer holds, to the bit
    return reference


def inputs(draw: Draw):
    """Rows, gradients that come back, and masks (None: no padding) of every rank."""
    generator = torch.Generator().manual_seed(1000 + draw.seed)
    x, grad, masks = [], [], []
    for tokens in draw.tokens_P:
        x.append(torch.randn(tokens, draw.width, dtype=torch.float64, generator=generator).to(draw.dtype))
        grad.append(torch.randn(tokens, draw.width, dtype=torch.float64, generator=generator).to(draw.dtype))
        masks.append(torch.rand(tokens, generator=generator) < 0.7 if draw.masked else None)
    return x, grad, masks


def layer_step(exchange, draw: Draw):
    """Outputs and gradients of one rank; float64 whatever the layer's type."""
    topology = Topology(world_size=draw.world, ep_size=draw.world, rank=exchange.rank)
    reference = reference_of(draw)
    groups = Groups(ep=exchange, edp=SoloExchange())
    slots, home_slot_E = draw.slots_and_homes()
    layer = MoELayer(
        draw.config, topology, groups=groups, slot_to_expert_S=slots, home_slot_E=home_slot_E,
        split=draw.splitter(),
    ).to(draw.dtype)  # fmt: skip
    with torch.no_grad():
        layer.router.gate.weight.copy_(reference.gate)
        layer.router.bias.set(reference.bias.float())
        for name, _ in layer.experts.named_parameters():
            getattr(layer.experts, name).copy_(getattr(reference, name)[layer.home_experts])
        if layer.shared_expert is not None:
            for name in ("w1", "w2", "w3"):
                getattr(layer.shared_expert, name).weight.copy_(getattr(reference, f"shared_{name}"))
    x, grad, masks = (parts[exchange.rank] for parts in inputs(draw))
    x.requires_grad_(True)

    def block(x, masks):
        if draw.prefetch:
            layer.prefetch()
        return layer(x, masks)

    if draw.recompute == "no":
        y, aux_loss = block(x, masks)
    else:
        keep = "rows" if draw.recompute == "keep_rows" else "routes"
        y, aux_loss = checkpoint(block, x, masks, use_reentrant=draw.recompute == "reentrant", keep=keep)
        with torch.no_grad():  # another bias in the second forward: the stored routes must be used
            layer.router.bias.set(layer.router.bias.bias_E.flip(0) + torch.arange(draw.experts))
    torch.autograd.backward([y, aux_loss], [grad, torch.ones_like(aux_loss)])
    grads = {name: p.grad.double().numpy() for name, p in layer.named_parameters()}
    return {
        "y": y.detach().double().numpy(),
        "aux": float(aux_loss.detach()),
        "x_grad": x.grad.double().numpy(),
        "grads": grads,
        "homes": layer.home_experts,
    }


def check(draw: Draw, results) -> None:
    """Against the float64 reference on the same rounded weights and rows, relative to the largest value."""
    reference = reference_of(draw)
    x, grad, masks = inputs(draw)
    x_TD = torch.cat(x).double().requires_grad_(True)
    mask_T = torch.cat(masks) if draw.masked else None
    uniform = torch.full((draw.experts,), 1 / draw.experts, dtype=torch.float64)
    y, aux_loss, _ = reference(x_TD, mask_T, uniform if draw.scope == "previous" else None)
    torch.autograd.backward([y, aux_loss], [torch.cat(grad).double(), torch.ones_like(aux_loss)])

    def close(got, want, what: str) -> None:
        want = want.detach().numpy() if isinstance(want, torch.Tensor) else want
        scale = max(1.0, np.abs(want).max(initial=0.0))
        assert np.abs(got - want).max(initial=0.0) <= TOLERANCE[draw.dtype] * scale, f"{what} of {draw}"

    close(np.concatenate([r["y"] for r in results]), y, "output")
    close(np.array(sum(r["aux"] for r in results)), aux_loss, "auxiliary loss")
    close(np.concatenate([r["x_grad"] for r in results]), x_TD.grad, "gradient of x")
    close(sum(r["grads"]["router.gate.weight"] for r in results), zeros_or_grad(reference.gate), "gate")
    for name in ("w1", "w2", "w3") if draw.activation == "swiglu" else ("w1", "w2"):
        want = zeros_or_grad(getattr(reference, name))
        for result in results:
            close(result["grads"][f"experts.{name}"], want[result["homes"]], name)
        if draw.shared:
            total = sum(r["grads"][f"shared_expert.{name}.weight"] for r in results)
            close(total, zeros_or_grad(getattr(reference, f"shared_{name}")), f"shared {name}")


def zeros_or_grad(parameter: torch.Tensor) -> np.ndarray:
    return np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()


# float64 and float32: rounding of sums; bfloat16: a dozen roundings of 2^-9 from the rows to the gradients
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 12 * 2**-9}
ALL = 1000


def run(draw: Draw) -> None:
    check(draw, run_loopback(layer_step, draw.world, draw, timeout_s=60))


def routes_are_safe(draw: Draw) -> bool:
    """Whether rounding cannot change a route: below float64 near-ties may flip, and are another routing."""
    if draw.dtype == torch.float64:
        return True
    reference = reference_of(draw)
    x_TD = torch.cat(inputs(draw)[0]).double()
    logits = x_TD @ reference.gate.T
    scores = (logits.softmax(1) if draw.score == "softmax" else logits.sigmoid()) + reference.bias
    if not len(scores) or draw.top_k == draw.experts:
        return True
    ranked = scores.sort(dim=1, descending=True).values
    return bool((ranked[:, :-1] - ranked[:, 1:]).min() > 1e-3)


def safe_draw(seed: int) -> Draw:
    """The seed's configuration, or the first one after it whose routes no rounding can change."""
    return next(draw for draw in map(make_draw, range(seed, 10**9, ALL)) if routes_are_safe(draw))


FACTORS = (
    "world", "top_k", "shared", "score", "scope", "activation", "weight_position", "bias", "masked",
    "recompute", "spare", "dtype", "method", "replicas", "split", "prefetch", "dedup",
)  # fmt: skip


def choices(seed: int) -> set[tuple]:
    """Every pair of choices that the seed's configuration has."""
    draw = make_draw(seed)
    values = [(name, getattr(draw, name)) for name in FACTORS]
    values += [("empty", 0 in draw.tokens_P), ("all", draw.top_k == draw.experts)]
    return set(combinations(values, 2))


@lru_cache(maxsize=1)
def covering() -> list[int]:
    """Seeds, greedily chosen, that together have every pair of choices which any of the 1,000 has."""
    found = {seed: choices(seed) for seed in range(ALL)}
    missing, chosen = set.union(*found.values()), []
    while missing:
        chosen.append(max(found, key=lambda seed: len(found[seed] & missing)))
        missing -= found[chosen[-1]]
    return sorted(chosen)


def test_the_covering_has_every_pair_and_is_much_smaller():
    pairs = set.union(*(choices(seed) for seed in covering()))
    for one, two in (
        (("recompute", "keep_rows"), ("dtype", torch.bfloat16)),
        (("weight_position", "before"), ("method", "grouped_mm")),
        (("world", 4), ("empty", True)),
    ):
        assert (one, two) in pairs or (two, one) in pairs
    assert len(covering()) < ALL / 8


@pytest.mark.parametrize("seed", covering())
def test_random_configuration_equals_the_dense_reference(seed):
    run(safe_draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(ALL)) - set(covering())))
def test_more_random_configurations_equal_the_dense_reference(seed):
    run(safe_draw(seed))


def step_on_ranks(rank, world, draw):
    return layer_step(DistExchange(None), draw)


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["no", "reentrant", "non_reentrant", "keep_rows"])
@pytest.mark.parametrize(("tokens_P", "dedup"), [((0, 7), "off"), ((5, 0, 3), "on")], ids=str)
def test_gloo_ranks_equal_the_reference_with_a_rank_without_rows(tokens_P, dedup, recompute):
    draw = Draw(
        seed=1, world=len(tokens_P), experts=6, top_k=2, width=11, hidden=13, shared=7, tokens_P=tokens_P,
        score="softmax", scope="global", activation="swiglu", weight_position="before", bias="one_rank",
        masked=False, recompute=recompute, spare=1, dtype=torch.float64, replicas="one_expert",
        split="random", dedup=dedup,
    )  # fmt: skip
    check(draw, run_ranks(step_on_ranks, draw.world, draw, timeout_s=60))


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["no", "non_reentrant"])
def test_gloo_ranks_with_grouped_products_and_replicas_equal_the_reference(recompute):
    """One rank has no tokens, and with the bias nothing but replicas to compute."""
    draw = Draw(
        seed=1, world=3, experts=6, top_k=2, width=16, hidden=24, shared=0, tokens_P=(9, 0, 14),
        score="softmax", scope="global", activation="swiglu", weight_position="before", bias="one_rank",
        masked=False, recompute=recompute, spare=1, dtype=torch.float32, method="grouped_mm",
        replicas="one_expert",
    )  # fmt: skip
    draw = next(d for d in (replace(draw, seed=seed) for seed in range(1000)) if routes_are_safe(d))
    check(draw, run_ranks(step_on_ranks, draw.world, draw, timeout_s=60))


# ---- homes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1, 2], r"slot_to_expert has shape \(3,\); expected \[S\] with S a multiple of ep_size=2"),
        ([0, 1, 2, 4], r"slot 3 has expert 4, out of 0\.\.3"),
        ([0, 1, 2, 2], "expert 3 stands in no slot; every expert has a home"),
        ([0, 1, 2, -1], "expert 3 stands in no slot"),
        ([0.0, 1, 2, 3], "slot_to_expert is float64; expected integers"),
        ([1, 0, 1, 1, 2, 3], r"the first 2 slots of every rank hold \[1, 0, 1, 2\], not each of the 4"),
    ],
)
def test_wrong_homes_are_refused(slots, message):
    config = MoEConfig(router=RouterConfig(d_model=11, num_experts=4, top_k=2), expert_hidden=13)
    groups = Groups(ep=SoloExchange(), edp=SoloExchange())
    with pytest.raises(ValueError, match=message):
        MoELayer(config, Topology(world_size=2, ep_size=2), groups=groups, slot_to_expert_S=np.array(slots))


def test_output_and_gradients_are_the_same_for_any_order_of_the_homes():
    """float64: the same numbers to 1e-12 wherever an expert lives."""
    base = make_draw(7)
    outcomes = []
    for seed in (3, 4, 5):
        slots = np.random.default_rng(seed).permutation(6)
        draw = Draw(
            seed=7, world=3, experts=6, top_k=2, width=11, hidden=13, shared=0, tokens_P=(5, 0, 9),
            score=base.score, scope="global", activation="swiglu", weight_position="after", bias="mixed",
            masked=False, recompute="no", spare=0, dtype=torch.float64,
        )  # fmt: skip
        results = run_loopback(step_with_homes, 3, draw, slots)
        experts = {}
        for result in results:
            for local, expert in enumerate(result["homes"]):
                experts[expert] = [result["grads"][f"experts.{n}"][local] for n in ("w1", "w2", "w3")]
        outcomes.append((np.concatenate([r["y"] for r in results]), [experts[e] for e in range(6)]))
    for y, experts in outcomes[1:]:
        np.testing.assert_allclose(y, outcomes[0][0], rtol=0, atol=1e-12)
        for ours, first in zip(experts, outcomes[0][1]):
            for a, b in zip(ours, first):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def step_with_homes(exchange, draw, slots):
    class Moved(Draw):
        def slots_and_homes(self):
            return slots, np.argsort(slots)

    moved = Moved(**{name: getattr(draw, name) for name in Draw.__dataclass_fields__})
    return layer_step(exchange, moved)
