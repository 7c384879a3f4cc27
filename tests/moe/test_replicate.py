"""Replicas: whose weights travel where, what comes back, and when a placement may change."""

import gc
import weakref

import numpy as np
import pytest
import torch

from balancer.split import ExactSplit, exact_split
from moe import (
    DistExchange,
    Groups,
    LoadMeter,
    MoEConfig,
    MoELayer,
    PlacementMismatchError,
    SoloExchange,
    Topology,
    make_placement,
)
from moe.placement import even_split
from moe.recompute import checkpoint
from moe.replicate import Itinerary, Replicas, itinerary, pack
from moe.testing import RankFailedError, run_loopback, run_ranks
from routing import RouterConfig

EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 2, 11, 13
# three ranks with two homes and two spare slots each
HOMES = np.array([0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1])
PLACED = np.array([0, 1, 4, 3, 2, 3, 4, -1, 4, 5, 0, 4])


def test_the_way_of_the_weights_by_hand():
    placement = make_placement(PLACED, EXPERTS, 3)
    assert placement.replica_slots.tolist() == [2, 3, 6, 10, 11]
    ways = [itinerary(placement, rank, placement.replica_slots) for rank in range(3)]
    assert ways == [  # expert 4 goes to ranks 0, 1 and, for slot 11, to its own
        Itinerary(sent_n=(0,), input_splits=(0, 0, 1), output_splits=(0, 1, 1), slot_r=(3, 2)),
        Itinerary(sent_n=(1,), input_splits=(1, 0, 0), output_splits=(0, 0, 1), slot_r=(2,)),
        Itinerary(sent_n=(0, 0, 0), input_splits=(1, 1, 1), output_splits=(1, 0, 1), slot_r=(2, 3)),
    ]


def home_weights(rank: int, dtype=torch.float64) -> list[torch.Tensor]:
    """Matrices that name their expert and their element."""
    shapes = [(2, HIDDEN, WIDTH), (2, WIDTH, HIDDEN), (2, HIDDEN, WIDTH)]
    expert = 2 * rank + torch.arange(2)[:, None, None]
    return [
        (1000 * expert + 100 * m + torch.rand(s, generator=gen(9))).to(dtype) for m, s in enumerate(shapes)
    ]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fetch(exchange, busy: list[int] | None):
    placement = make_placement(PLACED, EXPERTS, 3)
    replicas = Replicas(placement, exchange, "test")
    if busy is not None:
        rows_PS = np.zeros((3, 12), dtype=np.int64)
        rows_PS[1, busy] = 5
        replicas.use(rows_PS.sum(axis=0))
    replicas.start(home_weights(exchange.rank))
    slots = np.array(replicas.slot_r, dtype=np.int64) + 4 * exchange.rank
    return slots, [w.numpy() for w in replicas.wait()]


@pytest.mark.parametrize("busy", [None, [0, 2, 6], [5]], ids=str)
def test_replicas_hold_the_weights_of_their_experts_and_idle_ones_are_not_fetched(busy):
    everybody = run_loopback(fetch, 3, busy)
    fetched = sorted(slot for slots, _ in everybody for slot in slots)
    assert fetched == [slot for slot in (2, 3, 6, 10, 11) if busy is None or slot in busy]
    for slots, weights in everybody:
        for place, slot in enumerate(slots):
            expert = PLACED[slot]
            home = home_weights(expert // 2)
            for matrix, given in zip(weights, home):
                np.testing.assert_array_equal(matrix[place], given[expert % 2].numpy())


def send_back(exchange, dtype, parts):
    placement = make_placement(PLACED, EXPERTS, 3)
    replicas = Replicas(placement, exchange, "test")
    rows_S = np.zeros(12, dtype=np.int64)
    rows_S[list(parts)] = 1
    replicas.use(rows_S)
    replicas.start(home_weights(exchange.rank, dtype))
    replicas.wait()
    shapes = [w.shape[1:] for w in home_weights(0)]
    packed, views = pack(len(replicas.slot_r), shapes, home_weights(0, dtype)[0])
    for view in views:
        for place, slot in enumerate(replicas.slot_r):
            view[place] = 2.0**-9 * parts[slot + 4 * exchange.rank]
    replicas.send_back(packed)
    gradients = [torch.ones_like(w) for w in home_weights(exchange.rank, dtype)]
    replicas.add_returned(gradients)
    return [g.double().numpy() for g in gradients]


def test_gradients_that_come_back_are_summed_at_home():
    parts = {2: 3, 3: 4, 10: 11, 11: 12}  # not slot 6
    sums = {4: 3 + 12, 3: 4, 0: 11}
    for rank, gradients in enumerate(run_loopback(send_back, 3, torch.float64, parts)):
        for local in range(2):
            for gradient in gradients:
                assert (gradient[local] == 1 + 2.0**-9 * sums.get(2 * rank + local, 0)).all()


def test_a_sum_in_bfloat16_is_rounded_once():
    """Each of three parts is a quarter of a step beside 1, and would vanish alone; together they are not."""
    gradients = run_loopback(send_back, 3, torch.bfloat16, {2: 1, 6: 1, 11: 1})[2]
    for gradient in gradients:
        assert (gradient[0] == 1 + 2.0**-7).all() and (gradient[1] == 1).all()


# ---- the layer ------------------------------------------------------------------------------------------


def config(**more) -> MoEConfig:
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K, balance_loss=0.1)
    return MoEConfig(router=router, expert_hidden=HIDDEN, **more)


def make_layer(exchange, slots=HOMES, dtype=torch.float64, meter=None, homes=None, **more) -> MoELayer:
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)
    torch.manual_seed(5)
    groups = Groups(ep=exchange, edp=SoloExchange())
    layer = MoELayer(
        config(**more), topology, groups=groups, slot_to_expert_S=slots, home_slot_E=homes, meter=meter
    ).to(dtype)
    with torch.no_grad():  # seeded by threads in turn: the same on every rank, whoever is first
        layer.router.gate.weight.copy_(torch.randn(EXPERTS, WIDTH, generator=gen(6), dtype=dtype))
        for name, parameter in layer.experts.named_parameters():
            for local, expert in enumerate(layer.home_experts.tolist()):
                one = torch.randn(parameter.shape[1:], generator=gen(10 * expert + len(name)), dtype=dtype)
                parameter[local].copy_(one * 0.3)
    return layer


def step(layer: MoELayer, rank: int, tokens=(9, 0, 14), prefetch=False):
    """Outputs and gradients of a step."""
    dtype = layer.router.gate.weight.dtype
    x = torch.randn(tokens[rank], WIDTH, generator=gen(rank), dtype=torch.float64).to(dtype).requires_grad_()
    if prefetch:
        layer.prefetch()
    y, aux = layer(x)
    ((y.double() ** 2).sum() + aux).backward()
    found = {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    result = {name: t.detach().double().numpy().copy() for name, t in found.items()}
    layer.zero_grad()
    layer.end_step()
    return result


def before_and_after(exchange, placements, how=None):
    how = dict(how or {})
    split = how.pop("split", even_split)
    layer = make_layer(exchange, **how)
    results = [step(layer, exchange.rank)]
    for slots in placements:
        placement = layer.place(np.array(slots))
        homes = tuple(placement.home_slot_E.tolist())
        layer.split = ExactSplit(min_rows=3, home_slot_E=homes) if split == "min_rows" else split
        results.append(step(layer, exchange.rank))
    return results, layer.placement.version


PLACEMENTS = [
    PLACED.tolist(),
    [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 4, 5, 4, 5, 0, 1, 2, 3],  # another number of slots, all everywhere
    [0, 1, 0, 2, 3, 0, 4, 5, 0],
    [-1, 0, 1, 2, -1, 3, 4, 5, 4],  # homes elsewhere among the rank's slots
    HOMES.tolist(),
]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"split": exact_split},
        {"split": "min_rows"},
        {"split": exact_split, "dedup": "on"},
        {"dedup": "on", "weight_position": "before"},
        {"activation": "gelu"},
    ],
    ids=lambda how: "-".join(getattr(v, "__name__", v) for v in how.values()) or "even",
)
def test_any_change_of_the_replicas_leaves_outputs_and_gradients_as_they_were(how):
    for results, version in run_loopback(before_and_after, 3, PLACEMENTS, how):
        assert version == len(PLACEMENTS)
        for result in results[1:]:
            for name, values in results[0].items():
                np.testing.assert_allclose(result[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def adam_steps(exchange, placements):
    """Parameters, and Adam's moments of the experts, after four steps; a placement before each."""
    layer = make_layer(exchange)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for number, slots in enumerate(placements):
        layer.place(np.array(slots))
        x = torch.randn(9, WIDTH, generator=gen(10 * number + exchange.rank), dtype=torch.float64)
        y, aux = layer(x)
        ((y**2).sum() + aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.end_step()
    states = [optimizer.state[p][m] for p in layer.experts.parameters() for m in ("exp_avg", "exp_avg_sq")]
    return [t.detach().numpy() for t in (*layer.parameters(), *states)]


def test_optimizer_states_stay_with_the_homes_however_the_replicas_move():
    """float64; Adam divides by roots of squares that differ in rounding only, but small ones by much."""
    moved = run_loopback(adam_steps, 3, PLACEMENTS[:4])
    stayed = run_loopback(adam_steps, 3, [HOMES.tolist()] * 4)
    for ours, theirs in zip(moved, stayed):
        for got, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.dist
def test_the_same_over_gloo():
    for results, _ in run_ranks(gloo_before_and_after, 3, [PLACED.tolist(), HOMES.tolist()]):
        for result in results[1:]:
            for name, values in results[0].items():
                np.testing.assert_allclose(result[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def gloo_before_and_after(rank, world, placements):
    return before_and_after(DistExchange(None), placements)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (
            [0, -1, 2, 2, 3, 1, 4, 5, -1],
            r"slots of rank 0 are \[0, -1, 2\]: expert 1, which is at home there, is missing; homes stay",
        ),
        ([1, 0, 2, 2, 3, 1, 4, 5, -1], r"rank 0 are \[1, 0, 2\]: its homes \[0, 1\] must keep their order"),
        ([0, 1, 6, 2, 3, 1, 4, 5, -1], r"slot 2 has expert 6, out of 0\.\.5"),
        ([0, 1, 2, 3, 4, 5, 0], r"slot_to_expert has shape \(7,\); expected \[S\] with S a multiple"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_whole(slots, message):
    layer = make_layer(FakeRank(3, 0))
    before = layer.placement
    with pytest.raises(ValueError, match=message):
        layer.place(np.array(slots))
    assert layer.placement is before


class FakeRank:
    """A rank whose layer is built but never run."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank


def test_homes_that_are_given_are_checked():
    placement = make_placement(np.array([0, 1, 0, 1]), 2, 2, np.array([2, 1]))
    assert placement.home_rank_E.tolist() == [1, 0] and placement.replica_slots.tolist() == [0, 3]
    with pytest.raises(ValueError, match="slot 3 is to be the home of expert 0 and holds 1"):
        make_placement(np.array([0, 1, 0, 1]), 2, 2, np.array([3, 1]))
    with pytest.raises(ValueError, match=r"home_slot of expert 1 is 4, out of 0\.\.3"):
        make_placement(np.array([0, 1, 0, 1]), 2, 2, np.array([0, 4]))
    with pytest.raises(ValueError, match=r"home_slot has shape \(1,\), expected \(2,\)"):
        make_placement(np.array([0, 1, 0, 1]), 2, 2, np.array([0]))


# ---- when a placement may change ------------------------------------------------------------------------

SOLO = np.array([*range(EXPERTS), 0, 3])


@pytest.mark.parametrize("how", ["plain", "reentrant", "recompute"])
def test_a_change_inside_an_accumulation_window_is_refused_and_changes_nothing(how):
    layer = make_layer(SoloExchange(), SOLO)
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    run = {
        "plain": layer,
        "reentrant": lambda x: checkpoint(layer, x, use_reentrant=True),
        "recompute": lambda x: checkpoint(layer, x),
    }[how]
    y, _ = run(x)
    before = layer.placement
    with pytest.raises(RuntimeError, match=r"layer 0 has run forward since .* version 0: call place\(\) af"):
        layer.place(SOLO[:-1])
    y.sum().backward()
    with pytest.raises(RuntimeError, match="has run forward since the last optimizer step"):
        layer.place(SOLO[:-1])
    assert layer.placement is before
    layer.end_step()
    assert layer.place(SOLO[:-1], version=7).version == 7


def test_evaluation_opens_no_window_and_a_meters_sample_closes_one():
    meter = LoadMeter()
    layer = make_layer(SoloExchange(), SOLO, meter=meter)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        layer.eval()(x)
        layer.train()(x)  # a look in between, with nothing to train
    layer.place(SOLO[:-1])
    layer.train()(x)
    with pytest.raises(RuntimeError, match="has run forward"):
        layer.place(SOLO)
    meter.sample(1)
    layer.place(SOLO)


def differing(exchange):
    layer = make_layer(exchange, PLACED)
    if exchange.rank:  # ranks 1 and 2 got the plan, rank 0 did not
        layer.place(HOMES)
    with pytest.raises(PlacementMismatchError, match="MoE layer 0 on rank 1, 2 differs from that"):
        layer(torch.ones(2, WIDTH, dtype=torch.float64))
    return layer.placement.version


def test_ranks_with_different_placements_raise_together():
    assert run_loopback(differing, 3) == [0, 1, 1]


def differing_slots(exchange):
    layer = make_layer(exchange, PLACED)
    layer.place(other_slots(exchange.rank))
    layer(torch.ones(2, WIDTH, dtype=torch.float64))


def other_slots(rank: int) -> np.ndarray:
    """On rank 2 another expert in a spare slot of rank 0."""
    slots = PLACED.copy()
    slots[2] = 5 if rank == 2 else 4
    return slots


def test_other_slots_under_the_same_version_are_another_placement():
    with pytest.raises(RankFailedError, match=r"PlacementMismatchError.*on rank 2 differs"):
        run_loopback(differing_slots, 3)


def differing_versions(exchange):
    layer = make_layer(exchange, PLACED)
    layer.place(PLACED, version=1 + exchange.rank)
    layer(torch.ones(2, WIDTH, dtype=torch.float64))


def test_the_same_slots_under_another_version_are_another_placement():
    with pytest.raises(RankFailedError, match="PlacementMismatchError"):
        run_loopback(differing_versions, 3)


def prefetching_apart(rank, world):
    layer = make_layer(DistExchange(None), HOMES)
    if rank == 0:  # the others did not get the plan, and have nothing to fetch
        layer.place(PLACED)
    with pytest.raises(PlacementMismatchError, match="on rank 1, 2 differs"):
        layer.prefetch()


@pytest.mark.dist
def test_ranks_with_different_placements_raise_together_ahead_of_a_fetch_too():
    run_ranks(prefetching_apart, 3, timeout_s=30)


# ---- prefetch -------------------------------------------------------------------------------------------


class CountCalls:
    """An exchange that counts the all-to-alls of weights (wider than rows)."""

    def __init__(self, inner):
        self.inner, self.size, self.rank, self.sent, self.wide = inner, inner.size, inner.rank, [], []

    def all_gather(self, row_X):
        return self.inner.all_gather(row_X)

    def send_rows(self, *args):
        return self.inner.send_rows(*args)

    def start_rows(self, rows, *splits):
        if rows.shape[1] > 2 * WIDTH:
            self.sent.append(rows.shape[0])
            self.wide.append(rows.shape[1])
        return self.inner.start_rows(rows, *splits)


def prefetched(exchange):
    counted = CountCalls(exchange)
    layer = make_layer(counted, PLACED)
    plain = step(layer, exchange.rank)
    calls = len(counted.sent)
    early = step(layer, exchange.rank, prefetch=True)
    assert len(counted.sent) == 2 * calls == 4  # there and back, each time
    layer.prefetch()
    layer.prefetch()  # once is enough
    assert len(counted.sent) == 5
    layer.experts.w1.data.mul_(2)  # as an engine writes, behind torch's back
    layer.end_step()  # the optimizer's step: what was fetched before it is out of date
    doubled = step(layer, exchange.rank)
    layer.prefetch()
    with torch.no_grad():
        layer.experts.w1.div_(2)  # seen without anybody's word
    again = step(layer, exchange.rank)
    layer.prefetch()
    layer.place(HOMES)
    layer.place(PLACED)  # as it was, but another plan
    return plain, early, doubled, again, step(layer, exchange.rank)


def doubled_step(exchange):
    layer = make_layer(exchange, PLACED)
    with torch.no_grad():
        layer.experts.w1.mul_(2)
    return step(layer, exchange.rank)


def test_weights_that_were_fetched_ahead_give_the_same_and_never_outlive_the_step():
    wanted = run_loopback(doubled_step, 3)
    for rank, (plain, early, doubled, again, placed) in enumerate(run_loopback(prefetched, 3)):
        for name, values in plain.items():
            for same in (early, again, placed):
                np.testing.assert_array_equal(same[name], values, err_msg=name)
            np.testing.assert_array_equal(doubled[name], wanted[rank][name], err_msg=name)


def outside_of_a_checkpoint(exchange, keep):
    """Fetched ahead of a checkpointed call: its second forward fetches the same, and so finds as many."""
    layer = make_layer(exchange, PLACED)
    layer.split = only_homes
    plain = step(layer, exchange.rank)
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, keep=keep)
    return plain, step(layer, exchange.rank, prefetch=True)


@pytest.mark.parametrize("keep", ["routes", "rows"])
def test_a_fetch_ahead_of_a_checkpointed_call_is_repeated_in_it(keep):
    for plain, checkpointed in run_loopback(outside_of_a_checkpoint, 3, keep):
        for name, values in plain.items():
            np.testing.assert_allclose(checkpointed[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def placed_in_between(exchange):
    """In eval a change between a checkpointed forward and its backward is allowed: the old slots are used."""
    layer = make_layer(exchange, PLACED)
    plain = step(layer, exchange.rank)
    forward = layer.eval().forward

    def then_place(x):
        y, aux = checkpoint(forward, x)
        layer.place(HOMES)
        return y, aux

    layer.forward = then_place
    return plain, step(layer, exchange.rank)


def test_a_second_forward_uses_the_placement_of_the_first():
    for plain, checkpointed in run_loopback(placed_in_between, 3):
        for name, values in plain.items():
            np.testing.assert_allclose(checkpointed[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_fetch_under_another_autocast_is_refused():
    layer = make_layer(SoloExchange(), SOLO, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer.prefetch()
    with pytest.raises(ValueError, match=r"fetched ahead in torch\.bfloat16, the experts compute"):
        layer(torch.ones(3, WIDTH))


@pytest.mark.parametrize("method", ["loop", "grouped_mm"])
def test_borrowed_weights_are_let_go_with_the_graph(method):
    router = RouterConfig(d_model=16, num_experts=EXPERTS, top_k=TOP_K)
    config = MoEConfig(router=router, expert_hidden=24, method=method)
    layer = MoELayer(config, Topology(), slot_to_expert_S=SOLO)
    arrived = []

    class Seen(Replicas):
        def wait(self):
            weights = super().wait()
            arrived.extend(weakref.ref(w.untyped_storage()) for w in weights)
            return weights

    layer._replicas = lambda placement: Seen(placement, layer.groups.ep, "seen")
    y, aux = layer(torch.randn(9, 16, requires_grad=True))
    gc.disable()
    try:
        (y.sum() + aux).backward()
        del y, aux
        assert arrived and not any(ref() for ref in arrived)
    finally:
        gc.enable()


def idle_replicas(exchange, prefetch):
    counted = CountCalls(exchange)
    layer = make_layer(counted, PLACED)
    layer.split = only_homes
    step(layer, exchange.rank, prefetch=prefetch)
    return counted.sent


def only_homes(counts_PE, slot_to_expert_S):
    rows_PS = np.zeros((3, 12), dtype=np.int64)
    rows_PS[:, [0, 1, 4, 5, 8, 9]] = counts_PE
    return rows_PS


def test_replicas_without_rows_cost_nothing_unless_they_were_fetched_ahead():
    assert run_loopback(idle_replicas, 3, False) == [[0, 0]] * 3
    assert run_loopback(idle_replicas, 3, True) == [[1, 0], [1, 0], [3, 0]]


# ---- frozen, autocast -----------------------------------------------------------------------------------


def frozen(exchange, method, names):
    width, hidden = 16, 24
    counted = CountCalls(exchange)
    router = RouterConfig(d_model=width, num_experts=EXPERTS, top_k=TOP_K)
    topology = Topology(world_size=3, ep_size=3, rank=exchange.rank)
    layers = []
    for freeze in (False, True):
        torch.manual_seed(1)
        layer = MoELayer(
            MoEConfig(router=router, expert_hidden=hidden, method=method), topology,
            groups=Groups(ep=counted, edp=SoloExchange()), slot_to_expert_S=PLACED,
        )  # fmt: skip
        for name, p in layer.experts.named_parameters():
            torch.nn.init.normal_(p, generator=gen(exchange.rank + len(name)))
            p.requires_grad_(not (freeze and name in names))
        torch.nn.init.normal_(layer.router.gate.weight, generator=gen(3))
        x = torch.randn(7 * exchange.rank, width, generator=gen(exchange.rank)).requires_grad_()
        y, _ = layer(x)
        counted.wide.clear()
        y.square().sum().backward()
        trained = 3 - len(names) if freeze else 3
        assert counted.wide == [trained * width * hidden] * (trained > 0), "only what is trained goes home"
        layers.append((x.grad, {n: p.grad for n, p in layer.experts.named_parameters()}))
    (x_all, all_grads), (x_some, some) = layers
    torch.testing.assert_close(x_some, x_all)
    for name, gradient in some.items():
        if name in names:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, all_grads[name])
    return True


@pytest.mark.parametrize("names", [("w1", "w2", "w3"), ("w2",), ("w1", "w3")], ids=str)
@pytest.mark.parametrize("method", ["loop", "grouped_mm"])
def test_frozen_experts_get_no_gradient_and_the_others_theirs(method, names):
    assert run_loopback(frozen, 3, method, names) == [True] * 3


def autocast(exchange, prefetch):
    layer = make_layer(exchange, PLACED, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with_replicas = step(layer, exchange.rank, prefetch=prefetch)
    layer.place(HOMES)
    with torch.autocast("cpu", torch.bfloat16):
        return with_replicas, step(layer, exchange.rank)


@pytest.mark.parametrize("prefetch", [False, True])
def test_under_autocast_replicas_compute_what_homes_do(prefetch):
    """Rows of one product may be summed in another order where fewer stand together: one rounding of 2^-8."""
    for replicated, plain in run_loopback(autocast, 3, prefetch):
        for name, values in plain.items():
            scale = np.abs(values).max(initial=1.0)
            np.testing.assert_allclose(replicated[name] / scale, values / scale, atol=2**-7, err_msg=name)


def metered_rank(rank, world):
    seen = []

    def split(counts_PE, slot_to_expert_S):
        seen.append(exact_split(counts_PE, slot_to_expert_S))
        return seen[-1]

    meter = LoadMeter(world, rank)
    layer = make_layer(DistExchange(None), PLACED, meter=meter)
    layer.split = split
    for _ in range(2):
        step(layer, rank)
    sample = meter.sample(1)
    loads_P = [rows_PS.sum(axis=0).reshape(world, -1).sum(axis=1) for rows_PS in seen]
    return sample.rows_to_rank_LP[0].tolist(), sample.peak_rows_LG[0, 0], np.array(loads_P).tolist()


@pytest.mark.dist
def test_the_meter_counts_the_rows_that_replicas_computed():
    for rows_P, peak, loads in run_ranks(metered_rank, 3):
        assert rows_P == np.sum(loads, axis=0).tolist()
        assert peak == sum(map(max, loads))


def test_the_even_split_shares_with_replicas():
    counts_PE = np.array([[5, 0, 0, 1, 7, 0], [0, 1, 0, 0, 3, 0], [0, 0, 2, 0, 0, 9]])
    rows_PS = even_split(counts_PE, PLACED)
    assert rows_PS[0].tolist() == [3, 0, 2, 1, 0, 0, 2, 0, 2, 0, 2, 1]
    assert rows_PS.sum() == counts_PE.sum()
