"""What breaks in expert-parallel layers elsewhere, held as kinds of fault: each against the dense reference.

One harness: a `Case` is run on every rank (threads, or gloo ranks) over its micro-batches, and outputs,
losses and every gradient are compared with the dense layer, which sees the batches of all ranks side by side.
"""

import contextlib
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

from balancer.split import exact_split
from moe import DenseMoE, Groups, ModelConfig, MoEConfig, MoELayer, SoloExchange, Topology, make_groups
from moe.exchange import DistExchange
from moe.model import Transformer
from moe.placement import even_split
from moe.recompute import checkpoint
from moe.testing import run_loopback, run_ranks
from routing import RouterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """tokens_MP: tokens of every micro-batch and rank;  live: experts that tokens select, None = all;  slots:
    homes, None = in order;  spare: slots a rank beside them, with replicas of the live ones, split exactly;
    method: how the experts compute. Sizes are distinct and multiples of 4."""

    tokens_MP: tuple[tuple[int, ...], ...] = ((5, 9),)
    experts: int = 12
    top_k: int = 3
    live: tuple[int, ...] | None = None
    width: int = 16
    hidden: int = 20
    shared: int = 0
    score: str = "softmax"
    normalize: bool = True
    auxiliary: bool = True
    weight_position: str = "after"
    recompute: str = "no"
    slots: tuple[int, ...] | None = None
    spare: int = 0
    dedup: str = "off"
    method: str = "auto"
    dtype: torch.dtype = torch.float64

    @property
    def world(self) -> int:
        return len(self.tokens_MP[0])

    @property
    def config(self) -> MoEConfig:
        router = RouterConfig(
            d_model=self.width, num_experts=self.experts, top_k=self.top_k, score=self.score,
            normalize=self.normalize, balance_loss=0.3 * self.auxiliary, z_loss=0.01 * self.auxiliary,
        )  # fmt: skip
        return MoEConfig(
            router=router, expert_hidden=self.hidden, shared_hidden=self.shared,
            weight_position=self.weight_position, dedup=self.dedup,
        )  # fmt: skip

    def placement(self) -> np.ndarray | None:
        if not self.spare:
            return None if self.slots is None else np.array(self.slots)
        hot = np.resize(range(self.experts) if self.live is None else self.live, self.world * self.spare)
        homes = np.arange(self.experts).reshape(self.world, -1)
        return np.concatenate([homes, hot.reshape(self.world, -1)], axis=1).reshape(-1)


def reference_of(case: Case) -> DenseMoE:
    reference = DenseMoE(case.config, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        reference.gate.mul_(20)
        if case.live is not None:
            reference.bias.fill_(-9.0)
            reference.bias[list(case.live)] = 0.0
        for tensor in (*reference.parameters(), reference.bias):
            tensor.copy_(tensor.to(case.dtype))  # what the layer holds, to the bit
    return reference


def batch_of(case: Case, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and the gradient that comes back for them."""
    generator = torch.Generator().manual_seed(1000 * micro + rank)
    shape = (2, case.tokens_MP[micro][rank], case.width)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(case.dtype))


def layer_of(case: Case, topology: Topology, groups: Groups) -> MoELayer:
    reference = reference_of(case)
    split = exact_split if case.spare else even_split
    layer = MoELayer(
        case.config, topology, groups=groups, slot_to_expert_S=case.placement(), split=split
    ).to(case.dtype)  # fmt: skip
    layer.experts.method = case.method
    with torch.no_grad():
        layer.router.gate.weight.copy_(reference.gate)
        layer.router.bias.set(reference.bias.float())
        for name in ("w1", "w2", "w3"):
            getattr(layer.experts, name).copy_(getattr(reference, name)[layer.home_experts])
            if layer.shared_expert is not None:
                getattr(layer.shared_expert, name).weight.copy_(getattr(reference, f"shared_{name}"))
    return layer


def run_layer(case: Case, layer: MoELayer, rank: int) -> dict:
    """Forward and backward of every micro-batch; gradients add up."""
    outputs, x_grads, aux = [], [], 0.0
    for micro in range(len(case.tokens_MP)):
        x_TD, grad_TD = batch_of(case, micro, rank)
        x_TD.requires_grad_(True)
        if case.recompute == "no":
            y_TD, aux_loss = layer(x_TD)
        else:
            keep = "rows" if case.recompute == "keep_rows" else "routes"
            y_TD, aux_loss = checkpoint(layer, x_TD, use_reentrant=case.recompute == "reentrant", keep=keep)
        torch.autograd.backward([y_TD, aux_loss], [grad_TD, torch.ones_like(aux_loss)])
        aux += float(aux_loss.detach())
        outputs.append(y_TD.detach().double().numpy())
        x_grads.append(x_TD.grad.double().numpy())
    grads = {n: None if p.grad is None else p.grad.double().numpy() for n, p in layer.named_parameters()}
    return {"y": outputs, "x_grad": x_grads, "aux": aux, "grads": grads, "homes": layer.home_experts}


def step_in_thread(exchange, case: Case) -> dict:
    topology = Topology(world_size=case.world, ep_size=case.world, rank=exchange.rank)
    layer = layer_of(case, topology, Groups(ep=exchange, edp=SoloExchange()))
    return run_layer(case, layer, exchange.rank)


def step_on_rank(rank: int, world: int, case: Case) -> dict:
    topology = Topology(world_size=world, ep_size=world, rank=rank)
    groups = Groups(ep=DistExchange(None), edp=SoloExchange())
    return run_layer(case, layer_of(case, topology, groups), rank)


def check(case: Case, results: list[dict], tolerance: float = 1e-10) -> DenseMoE:
    """Against the dense layer, relative to the largest value; 1e-10: the rounding of float64 sums."""
    reference = reference_of(case)

    def close(got, want, what: str) -> None:
        want = np.zeros(got.shape) if want is None else np.asarray(want.detach())
        assert got.shape == want.shape, what
        error = np.abs(got - want).max(initial=0.0)
        assert error <= tolerance * max(1.0, np.abs(want).max(initial=0.0)), f"{what}: {error} in {case}"

    aux = 0.0
    for micro in range(len(case.tokens_MP)):
        parts = [batch_of(case, micro, rank) for rank in range(case.world)]
        x_TD, grad_TD = (torch.cat(tensors).double() for tensors in zip(*parts))
        x_TD.requires_grad_(True)
        y_TD, aux_loss, _ = reference(x_TD)
        torch.autograd.backward([y_TD, aux_loss], [grad_TD, torch.ones_like(aux_loss)])
        aux += float(aux_loss.detach())
        close(np.concatenate([r["y"][micro] for r in results]), y_TD, f"output of micro-batch {micro}")
        close(np.concatenate([r["x_grad"][micro] for r in results]), x_TD.grad, f"its gradient {micro}")
    close(np.array(sum(r["aux"] for r in results)), torch.tensor(aux, dtype=torch.float64), "auxiliary loss")
    for name, gradient in results[0]["grads"].items():
        assert all(r["grads"][name] is not None for r in results), (
            f"{name} must have a gradient: zero, not None"
        )
        short = name.removesuffix(".weight").rpartition(".")[2]
        if name.startswith("experts."):
            want = getattr(reference, short).grad
            want = torch.zeros(getattr(reference, short).shape) if want is None else want
            for result in results:
                close(result["grads"][name], want[result["homes"]], name)
        else:
            want = reference.gate if short == "gate" else getattr(reference, f"shared_{short}")
            close(sum(r["grads"][name] for r in results), want.grad, name)
            assert gradient.shape == want.shape
    return reference


def check_in_threads(case: Case, tolerance: float = 1e-10) -> DenseMoE:
    return check(case, run_loopback(step_in_thread, case.world, case), tolerance)


# ---- ranks and experts without rows ---------------------------------------------------------------------


class Listed:
    """An exchange that writes down what it is asked for."""

    def __init__(self, exchange, calls):
        self.inner, self.calls, self.size, self.rank = exchange, calls, exchange.size, exchange.rank

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args[0].dtype, *args[0].shape[1:]))
            return getattr(self.inner, name)(*args)

        return call


def listed_step(exchange, case: Case):
    """Two optimizer steps; what collectives were called, and what became of the experts."""
    calls: list = []
    topology = Topology(world_size=case.world, ep_size=case.world, rank=exchange.rank)
    layer = layer_of(case, topology, Groups(ep=Listed(exchange, calls), edp=SoloExchange()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        run_layer(case, layer, exchange.rank)
        optimizer.step()
    moved = {name: bool((p != before[name]).any()) for name, p in layer.named_parameters()}
    finite = all(bool(torch.isfinite(p).all() and torch.isfinite(p.grad).all()) for p in layer.parameters())
    return calls, moved, finite


MODES = [
    {"recompute": recompute, "shared": shared, "weight_position": position}
    for recompute, shared, position in product(
        ["no", "reentrant", "non_reentrant", "keep_rows"], [0, 8], ["after", "before"]
    )
]
SKEW_PROOF = [
    {"recompute": recompute, "spare": 2, "dedup": dedup, "weight_position": position}
    for recompute, dedup, position in [
        ("no", "off", "after"),
        ("no", "on", "before"),
        ("reentrant", "on", "after"),
        ("non_reentrant", "off", "before"),
        ("non_reentrant", "on", "after"),
        ("keep_rows", "on", "before"),
        ("keep_rows", "off", "after"),
    ]
]
ALL_MODES = MODES + SKEW_PROOF


def mode_id(mode: dict) -> str:
    return "-".join(str(value) for value in mode.values())


@pytest.mark.parametrize("mode", ALL_MODES, ids=mode_id)
@pytest.mark.parametrize(
    ("tokens_P", "live"),
    [((5, 0, 9), (8, 9, 10, 11)), ((0, 0, 3), (0, 1, 2)), ((0, 0, 0), None)],
    ids=["rank_0_and_1_get_no_row", "only_tokens_far_from_their_experts", "nobody_has_tokens"],
)
def test_a_rank_without_rows_skips_no_collective_and_steps_by_zero(mode, tokens_P, live):
    """The same calls on every rank as with a balanced batch; its experts get zeros, and stand still."""
    case = Case(tokens_MP=(tokens_P,), live=live, **mode)
    results = run_loopback(listed_step, case.world, case, timeout_s=20)
    full = run_loopback(listed_step, case.world, replace(case, tokens_MP=((7, 7, 7),), live=None))
    for rank, (calls, moved, finite) in enumerate(results):
        assert calls == full[0][0] and len(calls) >= 2 * 5
        assert finite
        idle = not sum(tokens_P) or rank not in {expert // 4 for expert in live}  # replicas compute for home
        assert moved["experts.w1"] == (not idle)
    check_in_threads(case)


LIVE = {
    "all_to_one": ((5,), 1),
    "all_to_the_first": ((0,), 1),
    "all_to_the_last": ((11,), 1),
    "one_rank": ((4, 5, 6, 7), 3),
    "one_rank_every_expert_of_it": ((8, 9, 10, 11), 4),
    "zeros_at_the_start": ((5, 6, 7, 8, 9, 10, 11), 3),
    "zeros_at_the_end": ((0, 1, 2, 3, 4, 5, 6), 3),
    "zeros_in_the_middle": ((0, 1, 2, 9, 10, 11), 3),
    "one_of_every_rank": ((3, 4, 10), 2),
    "every_expert": (tuple(range(12)), 12),
}


@pytest.mark.parametrize(
    "mode", [{"recompute": "no"}, {"recompute": "non_reentrant"}, *SKEW_PROOF[:2]], ids=mode_id
)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("which", LIVE)
def test_lopsided_counts_equal_the_reference(which, world, mode):
    live, top_k = LIVE[which]
    tokens_MP = ((11, 2, 6)[:world], (0, 4, 1)[:world])
    case = Case(tokens_MP=tokens_MP, live=live, top_k=top_k, normalize=top_k > 1, **mode)
    reference = check_in_threads(case)
    counts_E = reference(torch.cat([batch_of(case, 0, rank)[0] for rank in range(world)]))[2]
    assert set(np.flatnonzero(counts_E.numpy())) <= set(live)


# ---- memory that nobody wrote ---------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_memory():
    """Every buffer of torch starts as NaN, or as the largest integer, in its own C++ too."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def two_steps(exchange, case: Case):
    """Parameters after two optimizer steps, and all that was computed on the way."""
    topology = Topology(world_size=case.world, ep_size=case.world, rank=exchange.rank)
    layer = layer_of(case, topology, Groups(ep=exchange, edp=SoloExchange()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.5)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        result = run_layer(case, layer, exchange.rank)
        seen += [*result["y"], *result["x_grad"], *result["grads"].values()]
        optimizer.step()
    return seen + [p.detach().double().numpy() for p in layer.parameters()]


POISONED = {
    "loop": [
        {"live": (0, 1, 2, 9)},
        {"live": (4, 5, 6)},
        {"shared": 8, "weight_position": "before"},
        {"recompute": "non_reentrant", "dtype": torch.bfloat16},
        {"live": (0, 1, 2, 9), "spare": 2, "dedup": "on"},
        {"live": (4, 5, 6), "spare": 1, "dtype": torch.bfloat16, "recompute": "keep_rows"},
    ],
    "grouped_mm": [
        {"live": (0, 1, 2, 9), "dtype": torch.float32},
        {"live": (4, 5, 6), "dtype": torch.bfloat16, "width": 24, "hidden": 32},
        {"slots": (0, -1, 1, 2, 3, -1, 4, 5), "experts": 6, "dtype": torch.float32, "recompute": "reentrant"},
        {"dtype": torch.bfloat16, "width": 24, "hidden": 32, "weight_position": "before"},
        {"live": (0, 1, 2), "dtype": torch.float32, "spare": 2, "dedup": "on"},
    ],
    "bmm": [
        {"top_k": 12},
        {"top_k": 12, "dtype": torch.bfloat16, "shared": 8},
        {"top_k": 12, "dtype": torch.float32, "weight_position": "before"},
    ],
}


@pytest.mark.parametrize("tokens_P", [(5, 9), (0, 9), (0, 0)], ids=str)
@pytest.mark.parametrize(
    ("method", "changes"), [(m, c) for m, several in POISONED.items() for c in several], ids=str
)
def test_memory_that_nobody_wrote_reaches_no_result(method, changes, tokens_P):
    """Buffers that start as NaN: two steps are finite and equal, to the bit, those on ordinary memory."""
    case = Case(tokens_MP=(tokens_P, tokens_P[::-1]), method=method, **changes)
    plain = run_loopback(two_steps, 2, case)
    with poisoned_memory():
        poisoned = run_loopback(two_steps, 2, case)
    for ours, want in zip(poisoned, plain):
        for a, b in zip(ours, want, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)


# ---- the router's gradient ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES[::3], ids=mode_id)
@pytest.mark.parametrize(
    ("score", "normalize", "top_k"),
    [
        ("softmax", True, 2),
        ("softmax", False, 1),
        ("sigmoid", True, 3),
        ("sigmoid", False, 12),
        ("softmax", True, 12),
    ],
)
def test_the_router_learns_from_the_output_alone(score, normalize, top_k, mode):
    """Without auxiliary losses: a gather of probabilities that is not differentiable would leave nothing."""
    case = Case(
        tokens_MP=((5, 9), (2, 0)), score=score, normalize=normalize, top_k=top_k, auxiliary=False, **mode
    )
    reference = check_in_threads(case)
    assert reference.gate.grad.abs().max() > 1e-3, "the reference has a gradient to miss"


# ---- unequal token counts -------------------------------------------------------------------------------

UNEQUAL = [((0, 1, 7, 64),), ((64, 0, 1, 7), (7, 0, 64, 0))]


@pytest.mark.parametrize("mode", ALL_MODES, ids=mode_id)
@pytest.mark.parametrize("tokens_MP", UNEQUAL, ids=["one_batch", "accumulation"])
def test_unequal_token_counts_equal_the_reference_in_every_mode(tokens_MP, mode):
    check_in_threads(Case(tokens_MP=tokens_MP, **mode))


@pytest.mark.dist
@pytest.mark.parametrize("mode", [MODES[-1], SKEW_PROOF[1]], ids=mode_id)
def test_unequal_token_counts_equal_the_reference_on_gloo_ranks(mode):
    """The mode in which most collectives are in flight, all experts of two ranks idle."""
    case = Case(tokens_MP=UNEQUAL[1], live=(0, 1, 2, 7), **mode)
    check(case, run_ranks(step_on_rank, 4, case, timeout_s=60))


# ---- recomputation under other logits -------------------------------------------------------------------


class Splits:
    """An exchange that writes down how many rows it sends and receives."""

    def __init__(self, exchange):
        self.inner, self.size, self.rank, self.rows = exchange, exchange.size, exchange.rank, []
        self.all_gather = exchange.all_gather

    def send_rows(self, rows_RD, input_splits, output_splits):
        self.rows.append((tuple(input_splits), tuple(output_splits)))
        return self.inner.send_rows(rows_RD, input_splits, output_splits)

    def start_rows(self, rows_RD, input_splits, output_splits):
        self.rows.append((tuple(input_splits), tuple(output_splits)))
        return self.inner.start_rows(rows_RD, input_splits, output_splits)


def perturbed_recomputation(exchange, case: Case, perturbed: bool):
    """Two layers in one checkpoint, two such calls outstanding; their gates change before the backward."""
    topology = Topology(world_size=case.world, ep_size=case.world, rank=exchange.rank)
    ends = [Splits(exchange) for _ in range(2)]
    layers = [layer_of(case, topology, Groups(ep=end, edp=SoloExchange())) for end in ends]

    def block(x_TD):
        y_TD, first = layers[0](x_TD)
        y_TD, second = layers[1](x_TD + y_TD)
        return y_TD, first + second

    losses = []
    for micro in range(2):
        x_TD, grad_TD = batch_of(case, micro, exchange.rank)
        y_TD, aux_loss = checkpoint(
            block, x_TD.requires_grad_(True), use_reentrant=case.recompute == "reentrant"
        )
        losses.append((y_TD * grad_TD).sum() + aux_loss)
    forward = [list(end.rows) for end in ends]
    if perturbed:
        with torch.no_grad():  # other on every rank, as rounding would be
            for layer in layers:
                weight = layer.router.gate.weight
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(exchange.rank))
    sum(losses).backward()
    again = [end.rows[len(first) :] for end, first in zip(ends, forward)]
    return (
        forward,
        again,
        all(bool(torch.isfinite(p.grad).all()) for layer in layers for p in layer.parameters()),
    )


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("tokens_P", [(40, 30, 20), (9, 0, 31)], ids=str)
def test_recomputation_under_other_logits_sends_the_rows_of_the_first_forward(tokens_P, recompute):
    """Row for row the exchanges of an unperturbed one: else splits no longer pair up between ranks."""
    case = Case(tokens_MP=(tokens_P, tokens_P[::-1]), recompute=recompute)
    plain = run_loopback(perturbed_recomputation, 3, case, False, timeout_s=20)
    for (_, want, _), (forward, again, finite) in zip(
        plain, run_loopback(perturbed_recomputation, 3, case, True, timeout_s=20)
    ):
        assert finite
        assert again == want
        for first, second in zip(forward, again):
            assert set(first) <= set(second) and len(second) > len(first)


# ---- where experts live ---------------------------------------------------------------------------------


def test_nothing_depends_on_the_homes_of_the_experts():
    """Any order over ranks, empty slots anywhere: outputs and gradients are those of the first, to 1e-12."""
    case = Case(tokens_MP=((5, 0, 9), (7, 3, 1)), shared=8)
    first = gathered(run_loopback(step_in_thread, 3, case))
    draw = np.random.default_rng(2)
    for spare, mode in zip((0, 0, 1, 2, 3, 0, 1, 2), MODES[1::2] + MODES[1::4]):
        slots = np.concatenate([np.arange(12), np.full(3 * spare, -1)])
        draw.shuffle(slots)
        moved = replace(case, **(mode | {"shared": 8}), slots=tuple(slots.tolist()))
        for name, value in gathered(run_loopback(step_in_thread, 3, moved)).items():
            scale = max(1.0, np.abs(first[name]).max())
            np.testing.assert_allclose(value, first[name], rtol=0, atol=1e-12 * scale, err_msg=name)


def gathered(results: list[dict]) -> dict[str, np.ndarray]:
    """Outputs and gradients of the whole, experts in the order of their numbers."""
    order = np.argsort(np.concatenate([r["homes"] for r in results]))
    whole = {name: np.concatenate([np.concatenate(r[name]) for r in results]) for name in ("y", "x_grad")}
    for name in results[0]["grads"]:
        parts = [r["grads"][name] for r in results]
        whole[name] = np.concatenate(parts)[order] if name.startswith("experts.") else sum(parts)
    return whole


# ---- copies of experts over ranks -----------------------------------------------------------------------


def test_bare_layers_of_ranks_seeded_alike_differ_in_their_experts_and_agree_in_their_copies():
    """World 4 = EP 2 x EDP 2, the seed that every script sets: not the same experts on every rank."""
    experts, gates = [], []
    for rank in range(4):
        torch.manual_seed(0)
        topology = Topology(world_size=4, ep_size=2, rank=rank)
        layer = MoELayer(Case().config, topology, groups=Groups(ep=SoloExchange(), edp=SoloExchange()))
        experts.append(torch.cat([w.detach().flatten(1) for w in layer.experts.parameters()], dim=1))
        gates.append(layer.router.gate.weight.detach())
    for rank in range(4):
        assert torch.equal(gates[rank], gates[0])
        assert torch.equal(experts[rank], experts[rank % 2])
    first = torch.cat(experts[:2])[:, :20]
    assert len(first.unique(dim=0)) == Case().experts


VOCAB, SEQ = 19, 8


def train_on_rank(rank, world, stage):
    """Hashes of every weight after initialisation by ranks with seeds of their own, and after two steps."""
    from moe import zero

    torch.manual_seed(rank)  # ranks that draw from their global generators must not differ, nor agree
    zero.init_distributed("gloo")
    topology = Topology(world_size=world, ep_size=2, rank=rank)
    config = ModelConfig(
        moe=MoEConfig(router=RouterConfig(d_model=12, num_experts=4, top_k=2), expert_hidden=20),
        vocab_size=VOCAB, num_layers=2, num_dense_layers=1, d_model=12, num_heads=3, dense_hidden=16,
        seq_len=SEQ,
    )  # fmt: skip
    model = Transformer(config, topology, groups=make_groups(topology), layer_class=zero.ZeroMoELayer)
    model.init_weights(seed=5)
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 2 * world,
        "gradient_clipping": 0.01, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }  # fmt: skip
    engine = zero.make_engine(model, settings)
    states = [weights(model)]
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
        ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        engine.backward((ce_sum + aux_sum) / (2 * SEQ))
        engine.step()
        states.append(weights(model))
    return states


def weights(model) -> dict[str, np.ndarray]:
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


@pytest.mark.dist
@pytest.mark.deepspeed
def test_experts_of_different_ranks_differ_and_their_copies_are_equal_before_and_after_steps():
    """World 4 = EP 2 x EDP 2. An engine that took experts for dense weights would make them all rank 0's."""
    states_P = run_ranks(train_on_rank, 4, 2, timeout_s=110)
    for step, states in enumerate(zip(*states_P)):
        for name in states[0]:
            expert = ".experts." in name
            for rank in range(4):
                copy_of = rank % 2 if expert else 0
                assert np.array_equal(states[rank][name], states[copy_of][name]), f"{name} after {step} steps"
            if expert:
                matrices = np.concatenate([states[0][name], states[1][name]])
                assert len(np.unique(matrices.reshape(4, -1), axis=0)) == 4, f"{name} after {step} steps"
            if step:
                assert (states[0][name] != states_P[0][0][name]).any(), f"{name} has not moved"
