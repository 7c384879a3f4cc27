"""LoadMeter: exact counts, each training token once, every layer told, one reduction over the job."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import LoadMeter, ModelConfig, MoEConfig, MoELayer, NonFiniteRouterError, Topology
from moe.model import Transformer
from moe.testing import run_ranks
from routing import RouterConfig, Routing, losses

EXPERTS, TOP_K, WIDTH, HIDDEN = 5, 2, 6, 7


class Listener:
    """A layer that only notes what it is told."""

    def __init__(self):
        self.told = []

    def end_step(self, tokens_per_expert_E):
        self.told.append(tokens_per_expert_E.tolist())


def routing_of(counts, tokens) -> Routing:
    """No copies and no scores, only what the meter counts."""
    none, counts_E = torch.zeros(0, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    nothing_TE = torch.zeros(0, len(counts))
    return Routing(
        token_N=none, expert_N=none, weight_N=torch.zeros(0), scores_TE=nothing_TE, logits_TE=nothing_TE,
        demand_E=counts_E, routed_E=counts_E, num_tokens=tokens, top_k=None,
    )  # fmt: skip


def count_meter(world=1, rank=0, **options):
    return LoadMeter(world, rank, **({"scores_every": 0, "swaps_every": 0} | options))


def record(meter, layer, counts, *, rows=0, balance=0.0, z=0.0, tokens=0):
    meter.record(
        layer,
        routing_of(counts, tokens),
        rows=rows,
        bias_E=torch.zeros(len(counts)),
        balance_sum=torch.tensor(balance),
        z_sum=torch.tensor(z),
    )


@pytest.mark.parametrize("count", [40_000, 2**24 + 1, 2**40 + 1])
def test_large_counts_stay_exact_over_micro_batches(count):
    """2^24 + 1 is no float32 number and 40,000 no bfloat16 one; the sums here reach 3 * 2^40 + 3."""
    meter, listener = count_meter(), Listener()
    assert meter.register(listener, 3) == 0
    for _ in range(3):
        record(meter, 0, [count, 0, 1], rows=count, tokens=count)
    sample = meter.sample(step=4)
    assert sample.step == 4
    assert sample.tokens_per_expert_LE.dtype == np.int64
    assert sample.tokens_per_expert_LE.tolist() == [[3 * count, 0, 3]] == [listener.told[0]]
    assert sample.rows_to_rank_LP.tolist() == [[3 * count]]
    assert sample.num_tokens == 3 * count


def test_losses_are_per_token_of_the_step_and_layer_by_layer():
    meter = count_meter()
    for _ in range(2):
        meter.register(Listener(), 2)
    for layer, (first, second) in enumerate([(3.0, 5.0), (30.0, 50.0)]):
        record(meter, layer, [3, 1], balance=first, z=first / 4, tokens=3)
        record(meter, layer, [0, 1], balance=second, z=second / 4, tokens=1)
    sample = meter.sample(step=0)
    assert sample.balance_loss_L.tolist() == [2.0, 20.0]
    assert sample.z_loss_L.tolist() == [0.5, 5.0]
    assert sample.num_tokens == 4, "each token once, not once per layer"


def test_every_step_starts_anew():
    meter, listener = count_meter(), Listener()
    meter.register(listener, 2)
    record(meter, 0, [3, 4])
    meter.sample(step=0)
    record(meter, 0, [1, 0])
    assert meter.sample(step=1).tokens_per_expert_LE.tolist() == [[1, 0]]
    assert listener.told == [[3, 4], [1, 0]]


def test_a_step_without_a_batch_is_refused():
    meter = LoadMeter()
    meter.register(Listener(), 2)
    with pytest.raises(RuntimeError, match=r"no layer has recorded a batch in step 7: .*training mode"):
        meter.sample(step=7)


def test_layers_of_different_size_are_refused():
    meter = LoadMeter()
    meter.register(Listener(), 4)
    with pytest.raises(ValueError, match=r"layer 1 has 6 experts, the ones before 4: .*use a second meter"):
        meter.register(Listener(), 6)
    assert meter.num_layers == 1


def reduce_on_ranks(rank, world):
    """Rank 1 has no token and computes most rows; counts that float32 would round."""
    meter, listeners = count_meter(world, rank), [Listener(), Listener()]
    for listener in listeners:
        meter.register(listener, 3)
    for layer in range(2):
        if rank == 0:
            record(meter, layer, [2**40 + 1, 5, layer], rows=7 + layer, balance=6.0, z=2.0, tokens=4)
        else:
            record(meter, layer, [0, 0, 0], rows=100 + layer, tokens=0)
    sample = meter.sample(3, torch.tensor([rank + 1.0, 0.5], dtype=torch.float64))
    return {
        "told": [listener.told for listener in listeners],
        "counts": sample.tokens_per_expert_LE.tolist(),
        "rows": sample.rows_to_rank_LP.tolist(),
        "balance": sample.balance_loss_L.tolist(),
        "z": sample.z_loss_L.tolist(),
        "tokens": sample.num_tokens,
        "extra": sample.extra_X.tolist(),
    }


@pytest.mark.dist
def test_ranks_are_summed_once_and_all_see_the_same():
    counts = [[2**40 + 1, 5, 0], [2**40 + 1, 5, 1]]
    want = {
        "told": [[row] for row in counts],
        "counts": counts,
        "rows": [[7, 100], [8, 101]],
        "balance": [1.5, 1.5],
        "z": [0.5, 0.5],
        "tokens": 4,
        "extra": [3.0, 1.0],
    }
    assert run_ranks(reduce_on_ranks, 2) == [want, want]


def make_layer(meter=None, **router):
    torch.manual_seed(0)
    config = RouterConfig(**({"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K} | router))
    layer = MoELayer(MoEConfig(router=config, expert_hidden=HIDDEN), Topology(), meter=meter).double()
    with torch.no_grad():
        layer.router.gate.weight.mul_(50)
    return layer


def rows(num_tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, generator=generator)


def test_micro_batches_add_up_and_padding_and_eval_do_not_count():
    meter = LoadMeter()
    layer = make_layer(meter)
    mask_T = torch.tensor([True, False, True, True, False])  # as many tokens as experts
    layer(rows(7))
    layer(rows(5), mask_T)
    layer.eval()
    layer(rows(64))
    layer.train()
    sample = meter.sample(step=0)
    demand_E = layer.router(rows(7)).demand_E + layer.router(rows(5)[mask_T]).demand_E
    assert sample.tokens_per_expert_LE.tolist() == [demand_E.tolist()]
    assert sample.num_tokens == 7 + 3
    assert sample.rows_to_rank_LP.tolist() == [[10 * TOP_K]]
    assert torch.equal(layer.previous_counts_E, demand_E)


def test_nan_in_a_token_raises_and_counts_nothing_and_in_padding_is_nobodys_concern():
    meter = LoadMeter()
    layer, x = make_layer(meter), rows(6)
    x[2, 3] = torch.nan
    with pytest.raises(NonFiniteRouterError, match="MoE layer 0 are NaN or infinite on rank 0"):
        layer(x)
    with pytest.raises(RuntimeError, match="no layer has recorded"):
        meter.sample(step=0)
    mask_T = torch.arange(6) != 2
    y, aux_loss = layer(x, mask_T)
    assert torch.isfinite(y[mask_T]).all() and torch.isfinite(aux_loss)
    assert meter.sample(step=0).num_tokens == 5


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_recomputation_neither_counts_again_nor_changes_a_gradient(reentrant):
    outcomes = []
    for recompute in (True, False):
        meter = LoadMeter()
        layer = make_layer(meter)
        for micro in range(2):
            x = rows(9, seed=micro).requires_grad_(True)
            y, aux_loss = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            (y.square().sum() + aux_loss).backward()
        grads = [p.grad for p in layer.parameters()]
        outcomes.append((meter.sample(step=0), grads))
    (sample, grads), (plain, plain_grads) = outcomes
    assert sample.tokens_per_expert_LE.tolist() == plain.tokens_per_expert_LE.tolist()
    assert sample.num_tokens == 18
    for ours, want in zip(grads, plain_grads, strict=True):
        assert torch.equal(ours, want)


def test_every_layer_is_told_also_behind_leading_dense_ones():
    meter = LoadMeter()
    router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
    config = ModelConfig(
        moe=MoEConfig(router=router, expert_hidden=HIDDEN),
        vocab_size=11,
        num_layers=5,
        num_dense_layers=2,
        d_model=WIDTH,
        num_heads=3,
        dense_hidden=9,
        seq_len=8,
    )
    model = Transformer(config, meter=meter)
    model.init_weights(seed=0)
    model(torch.randint(0, 11, (3, 8)))
    counts_LE = meter.sample(step=0).tokens_per_expert_LE
    assert counts_LE.shape == (3, EXPERTS) and meter.num_layers == 3
    assert counts_LE.sum(axis=1).tolist() == [3 * 8 * TOP_K] * 3
    layers = [block.feed_forward for block in model.blocks[2:]]
    assert [layer.layer_id for layer in layers] == [0, 1, 2]
    assert [layer.previous_counts_E.tolist() for layer in layers] == counts_LE.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_of_the_model_leaves_counts_and_bias_in_their_types(dtype):
    layer = make_layer()
    layer.end_step(torch.full((EXPERTS,), 2**40 + 1))
    layer.to(dtype)
    assert layer.experts.w1.dtype == dtype
    assert layer.previous_counts_E.dtype == layer.running_counts_E.dtype == torch.int64
    assert layer.previous_counts_E.tolist() == [2**40 + 1] * EXPERTS
    assert layer.router.bias.bias_E.dtype == torch.float32


def test_running_fractions_are_those_of_the_steps_own_tokens():
    """Micro-batches of 3 and 29 tokens: neither the last one's shares nor a mean of the two shares."""
    meter = LoadMeter()
    layer = make_layer(meter, balance_scope="running", balance_loss=1.0, z_loss=0.0)
    layer(rows(64, seed=9))  # a step before: must leave no trace
    meter.sample(step=0)
    counts_E = torch.zeros(EXPERTS, dtype=torch.int64)
    for micro, num_tokens in enumerate((3, 29)):
        x = rows(num_tokens, seed=micro)
        layer.eval()
        layer(rows(40, seed=8))  # reads the counts and adds nothing
        layer.train()
        aux_loss = layer(x)[1]
        routing = layer.router(x)
        counts_E += routing.demand_E
        fraction_E = losses.load_fraction(counts_E, torch.float64)
        want = losses.balance_loss(losses.router_probs(routing.logits_TE, "softmax"), fraction_E)
        # float64, the same sums
        torch.testing.assert_close(aux_loss, want, rtol=1e-12, atol=0)
    assert torch.equal(layer.running_counts_E, counts_E)


# ---- squares, peaks, cadence ----------------------------------------------------------------------------


def test_the_over_dispersion_of_the_counts_is_read_from_the_squares():
    """Batches of unequal size whose counts vary phi times as much as a binomial draw."""
    draw, phi, share, batches = np.random.default_rng(3), 9.0, 0.2, 4000
    meter = count_meter()
    meter.register(Listener(), 2)
    tokens = draw.choice([0, 8, 64, 640], batches)
    counts = np.round(
        share * tokens + np.sqrt(phi * share * (1 - share) * tokens) * draw.normal(size=batches)
    )
    for n, count in zip(tokens.tolist(), counts.astype(int).tolist()):
        record(meter, 0, [count, n - count], tokens=n)
    sample = meter.sample(step=1)
    assert sample.squares_LE.tolist() == [[(counts**2).sum(), ((tokens - counts) ** 2).sum()]]
    assert sample.tokens_squared == (tokens**2).sum()
    share_E = sample.tokens_per_expert_LE[0] / sample.num_tokens
    spread = sample.squares_LE[0] - share_E**2 * sample.tokens_squared
    degrees = sample.num_tokens - sample.tokens_squared / sample.num_tokens
    # 3000 draws, most of the weight on 1000 of them: a standard error of sqrt(2 / 1000) = 4.5 %
    np.testing.assert_allclose(spread / (share_E * (1 - share_E) * degrees), phi, rtol=0.15)


def test_the_rows_of_every_rank_of_a_group_give_its_peaks():
    """Two EP groups of two ranks: a column each; every rank reports the same, one of a group counts."""
    step = [
        (np.array([5, 3]), np.array([0, 1])),
        (np.array([1, 4]), np.array([7, 7])),
    ]  # micro-batches x groups
    stacked = []
    for rank in range(4):
        meter = count_meter(4, rank, reduce=lambda tensor: stacked.append(tensor.clone()))
        meter.register(Listener(), 3)
        for micro in step:
            record(meter, 0, [1, 2, 3], rows=micro[rank // 2], tokens=3)
        meter.sample(step=1)
    meter = count_meter(4, 0, reduce=lambda tensor: tensor.copy_(torch.stack(stacked).sum(dim=0)))
    meter.register(Listener(), 3)
    record(meter, 0, [0, 0, 0], rows=step[0][0])
    sample = meter.sample(step=1)
    assert sample.peak_rows_LG.tolist() == [[5 + 4, 1 + 7]]
    assert sample.largest_rows_LG.tolist() == [[5, 7]]
    assert sample.rows_to_rank_LP.tolist() == [[5 + 1, 3 + 4, 0 + 7, 1 + 7]]
    assert sample.tokens_per_expert_LE.tolist() == [[8, 16, 24]]
    assert sample.squares_LE.tolist() == [[8.0, 32.0, 72.0]], "of each rank's own counts"
    assert (sample.num_tokens, sample.tokens_squared) == (24, 8 * 9)


def test_without_the_rows_of_the_others_there_are_no_peaks_but_alone_there_are():
    lonely, alone = count_meter(2, 1, reduce=lambda tensor: None), count_meter()
    for meter in (lonely, alone):
        meter.register(Listener(), 2)
        record(meter, 0, [2, 1], rows=3)
        record(meter, 0, [3, 2], rows=5)
    sample = lonely.sample(step=1)
    assert sample.peak_rows_LG is None and sample.largest_rows_LG is None
    sample = alone.sample(step=1)
    assert (sample.peak_rows_LG.tolist(), sample.largest_rows_LG.tolist()) == ([[8]], [[5]])


def test_rows_of_ranks_that_make_no_groups_of_the_job_are_refused():
    meter = count_meter(4, 0)
    meter.register(Listener(), 2)
    with pytest.raises(ValueError, match="rows of 3 ranks, expected a divisor of 4 ranks"):
        record(meter, 0, [1, 1], rows=np.array([1, 2, 3]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores_every": -1}, r"scores_every=-1 must be 0 \(never\) or more steps"),
        ({"swaps_every": -2}, "swaps_every=-2 must be 0"),
        ({"margins_every": -1}, "margins_every=-1 must be 0"),
        ({"pairs_every": -1}, "pairs_every=-1 must be 0"),
        ({"sample_every": -3}, "sample_every=-3 must be 0"),
        ({"sample_tokens": 0}, "sample_tokens=0 must be 1 or more"),
        ({"swap_delta": 0.0}, r"swap_delta=0.0 is out of \(0, 1\)"),
    ],
)
def test_settings_out_of_their_bounds_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoadMeter(**options)


STATISTICS = {
    "scores": {"score_sum_LE", "score_histogram_LEB", "score_edges_X"},
    "swaps": {"swaps_LE", "wide_swaps_LE"},
    "margins": {"margin_histogram_LEB", "margin_edges_X"},
    "pairs": {"swap_pairs_LEE", "wide_swap_pairs_LEE"},
    "sample": {"sample_LME"},
}


def statistics_of(sample):
    """Names of the statistics in a sample, in order; what is missing is missing with its kind."""
    missing = {f.name for f in fields(sample) if getattr(sample, f.name) is None}
    there = [name for name, of_it in STATISTICS.items() if not of_it & missing]
    absent = [of_it for name, of_it in STATISTICS.items() if name not in there]
    wanted = set().union(*absent) | (set() if {"swaps", "pairs"} & set(there) else {"swap_delta"})
    assert missing == wanted, "a field is there or missing with its kind"
    return " ".join(there)


@pytest.mark.parametrize(
    ("every", "want"),
    [
        (
            {"scores_every": 1, "swaps_every": 3},
            ["scores swaps", "scores", "scores", "scores swaps", "scores", "scores", "scores swaps"],
        ),
        ({"scores_every": 2, "swaps_every": 0}, ["scores", "", "scores", "", "scores", "", "scores"]),
        ({"scores_every": 0, "swaps_every": 1}, ["swaps"] * 7),
        (
            {"scores_every": 0, "swaps_every": 0, "margins_every": 2, "pairs_every": 3, "sample_every": 4},
            ["margins pairs sample", "", "margins", "pairs", "margins sample", "", "margins pairs"],
        ),
    ],
)
def test_statistics_are_there_in_the_steps_that_they_are_due_in_also_after_resuming(every, want):
    def run(meter, steps):
        layer = make_layer(meter)
        found = []
        for step in steps:
            for micro in range(2):
                layer(rows(6, seed=micro))
            found.append(statistics_of(meter.sample(step)))
        return found

    meter = LoadMeter(**every)
    assert run(meter, range(1, 8)) == want
    for resumed in range(1, 7):
        meter = LoadMeter(**every)
        meter.next_step = resumed + 1
        assert run(meter, range(resumed + 1, 8)) == want[resumed:]


def test_statistics_that_are_requested_are_there_in_the_next_step_alone():
    meter = LoadMeter(scores_every=0, swaps_every=2)
    layer = make_layer(meter)

    def step(number, *requested):
        meter.request(requested)
        layer(rows(6, seed=0))
        return statistics_of(meter.sample(number))

    assert [step(1, "margins"), step(2), step(3, "margins", "swaps"), step(4, "scores")] == [
        "swaps margins", "", "swaps margins", "scores",
    ]  # fmt: skip
    meter.request(["margins"])
    meter.request([])  # the last call counts
    assert not meter.due("margins")
    with pytest.raises(ValueError, match=r"statistics \['entropy'\] are not known; use some of"):
        meter.request(["entropy"])
    layer(rows(6, seed=0))
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        meter.request(["margins"])


def test_one_reduction_a_step_carries_everything(monkeypatch):
    """Two layers, two micro-batches, statistics due: one collective, and no tensor is read on the host
    before it."""
    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: calls.append(tensor.numel()))
    meter = LoadMeter(2, 0, swaps_every=1, margins_every=1, pairs_every=1, sample_every=1)
    layers = [make_layer(meter) for _ in range(2)]
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__int__", "__float__", "__bool__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a host sync"))
        for layer in layers:
            for mask_T in (None, torch.tensor([True, False, True])):
                with torch.no_grad():
                    routing = layer.router(rows(3), mask_T)
                zero = torch.zeros(())
                bias_E = layer.router.bias.bias_E
                meter.record(
                    layer.meter_row,
                    routing,
                    rows=np.array([3, 4]),
                    bias_E=bias_E,
                    balance_sum=zero,
                    z_sum=zero,
                )
        assert calls == []
    sample = meter.sample(1, torch.tensor([5.0]))
    assert len(calls) == 1 and statistics_of(sample) == " ".join(STATISTICS)
    assert calls[0] > sample.score_histogram_LEB.size and sample.extra_X.tolist() == [5.0]
