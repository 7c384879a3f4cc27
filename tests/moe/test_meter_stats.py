"""Statistics of the router's scores: bins, quantiles, swap counts against numpy, one token at a time."""

import numpy as np
import pytest
import torch

from moe import Groups, LoadMeter, MoEConfig, MoELayer, SoloExchange, Topology, make_groups, meter_stats
from moe.meter_stats import NUM_BINS, NUM_MARGIN_BINS, margin_edges, score_edges, score_quantile
from moe.recompute import checkpoint
from moe.testing import run_loopback, run_ranks
from routing import Router, RouterConfig, Routing

EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 2, 5, 7


def routed(scores_TE, expert_TK=None, mask_T=None, bias_E=None) -> Routing:
    """A routing of given scores; the experts are the best of score + bias, the lowest id among equals."""
    num_tokens, num_experts = scores_TE.shape
    if expert_TK is None:
        biased = scores_TE.numpy() + (0 if bias_E is None else bias_E.numpy().astype(scores_TE.numpy().dtype))
        expert_TK = torch.from_numpy(np.argsort(-biased, axis=1, kind="stable")[:, :TOP_K].copy())
    if mask_T is not None:
        expert_TK = torch.where(mask_T[:, None], expert_TK, -1)
    counts_E = torch.bincount(expert_TK[expert_TK >= 0], minlength=num_experts)
    return Routing(
        token_N=torch.arange(num_tokens).repeat_interleave(expert_TK.shape[1]),
        expert_N=expert_TK.reshape(-1), weight_N=torch.ones(expert_TK.numel()), scores_TE=scores_TE,
        logits_TE=scores_TE, demand_E=counts_E, routed_E=counts_E, num_tokens=num_tokens,
        top_k=expert_TK.shape[1], token_mask_T=mask_T,
    )  # fmt: skip


def brute_scores(scores_TE, valid_T):
    """Sums and histogram, score by score."""
    sum_E, count_EB = np.zeros(scores_TE.shape[1]), np.zeros((scores_TE.shape[1], NUM_BINS))
    edges = score_edges()
    for t, e in np.ndindex(scores_TE.shape):
        if valid_T[t]:
            sum_E[e] += scores_TE[t, e]
            score = float(np.float32(scores_TE[t, e]))
            count_EB[e, max(b for b in range(NUM_BINS) if edges[b] <= score)] += 1
    return sum_E, count_EB


def brute_pairs(scores_TE, bias_E, top_k, valid_T, delta):
    """The swap graph C_ij of its definition."""
    experts = scores_TE.shape[1]
    swaps = np.zeros((experts, experts))
    for t in range(scores_TE.shape[0]):
        biased = scores_TE[t] + bias_E.astype(scores_TE.dtype)
        order = sorted(range(experts), key=lambda e: (-biased[e], e))
        if valid_T[t] and top_k < experts:
            i, j = order[top_k - 1], order[top_k]
            if float(biased[i]) - float(biased[j]) < delta:
                swaps[i, j] += 1
    return swaps


def brute_swaps(*arguments):
    """Row sums and column sums of the swap graph."""
    swaps = brute_pairs(*arguments)
    return swaps.sum(axis=1) + swaps.sum(axis=0)


def brute_margins(scores_TE, bias_E, top_k, valid_T):
    """Margins of their definition, the others sorted anew for every expert; ties by the token's selection."""
    experts, edges = scores_TE.shape[1], margin_edges()
    count_EB = np.zeros((experts, NUM_MARGIN_BINS))
    for t, e in np.ndindex(scores_TE.shape):
        if not valid_T[t]:
            continue
        biased = scores_TE[t] + bias_E.astype(scores_TE.dtype)
        others = sorted((float(biased[i]) for i in range(experts) if i != e), reverse=True)
        margin = float(biased[e]) - others[top_k - 1]
        selected = e in sorted(range(experts), key=lambda i: (-biased[i], i))[:top_k]
        assert margin == 0 or selected == (margin > 0)
        if selected:
            index = max(b for b in range(NUM_MARGIN_BINS) if edges[b] <= margin)
        else:
            index = min(b for b in range(NUM_MARGIN_BINS) if margin <= edges[b + 1])
        index = index if margin else NUM_MARGIN_BINS // 2 - (not selected)
        count_EB[e, index] += 1
    return count_EB


def brute_spread(scores_TE, logits_TE, valid_T):
    """Sum of squares of the logits less their mean, sum of the largest shares of the scores."""
    scores, logits = (x_TE[valid_T].astype(np.float64) for x_TE in (scores_TE, logits_TE))
    squares = (logits - logits.mean(axis=1, keepdims=True)) ** 2
    return np.array([squares.sum(), (scores.max(axis=1) / scores.sum(axis=1)).sum()])


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


WAYS = {"numba": meter_stats.add_scores, "torch": meter_stats.add_scores_torch}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_every_score_lands_in_its_bin(way, dtype, masked):
    """Scores on the edges and one float32 step to both sides of them; padding rows of anything, NaN too."""
    edges = score_edges().astype(np.float32)
    beside = np.concatenate([edges, np.nextafter(edges, np.float32(2))[:-1], np.nextafter(edges, -1)[1:]])
    scores = np.concatenate([beside, np.random.default_rng(0).random(402 - beside.size)], dtype=np.float64)
    scores_TE = torch.from_numpy(np.random.default_rng(1).permutation(scores).reshape(134, 3)).to(dtype)
    mask_T = torch.arange(134) % 4 != 1 if masked else None
    if masked:
        scores_TE[1] = torch.nan
    valid_T = np.ones(134, bool) if mask_T is None else mask_T.numpy()
    sum_E, count_EB = zeros(3), zeros(3, NUM_BINS)
    for _ in range(2):  # adds, and does not replace
        WAYS[way](routed(scores_TE, mask_T=mask_T), sum_E, count_EB)
    want_sum, want_count = brute_scores(scores_TE.numpy(), valid_T)
    assert np.array_equal(count_EB.numpy(), 2 * want_count)
    np.testing.assert_allclose(sum_E.numpy(), 2 * want_sum, rtol=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("way", WAYS)
def test_no_token_adds_nothing(way):
    sum_E, count_EB = zeros(4), zeros(4, NUM_BINS)
    WAYS[way](routed(torch.zeros(0, 4)), sum_E, count_EB)
    assert not sum_E.any() and not count_EB.any()


def test_edges_resolve_small_scores_and_both_ends():
    edges = score_edges()
    widths, low, high = np.diff(edges), edges[1:-2], edges[2:-1]
    assert edges.shape == (NUM_BINS + 1,) and edges[0] == 0 and edges[-1] == 1 and (widths > 0).all()
    assert np.array_equal(edges, edges.astype(np.float32)), "no score is rounded across an edge"
    assert (widths[1:-1] <= np.minimum(low, 1 - high).clip(2**-12) / 8 * (1 + 1e-12)).all()
    assert edges[1] == 2**-12 and edges[-2] == 1 - 2**-5


@pytest.mark.parametrize(
    ("experts", "top_k", "score"), [(8, 2, "softmax"), (256, 8, "softmax"), (64, 4, "sigmoid")]
)
def test_quantiles_are_off_by_less_than_a_bin(experts, top_k, score):
    """The quantile that a bias law inverts, 1 - K/E, and those that bound its range."""
    torch.manual_seed(0)
    router = Router(RouterConfig(d_model=64, num_experts=experts, top_k=top_k, score=score))
    with torch.no_grad():
        router.gate.weight.mul_(5)
        routing = router(torch.randn(1000, 64))
    count_EB = zeros(experts, NUM_BINS)
    meter_stats.add_scores(routing, zeros(experts), count_EB)
    scores_TE, edges = routing.scores_TE.double().numpy(), score_edges()
    for share in (0.001, 0.5, 1 - top_k / experts, 0.999):
        got_E = score_quantile(count_EB.numpy(), share)
        want_E = np.quantile(scores_TE, share, axis=0, method="inverted_cdf")
        width_E = np.diff(edges)[np.searchsorted(edges, want_E, side="right") - 1]
        assert (np.abs(got_E - want_E) <= width_E).all(), share
    # spread evenly within its bin, the median of a thousand scores is far better than that
    assert np.abs(score_quantile(count_EB.numpy(), 0.5) / np.median(scores_TE, axis=0) - 1).max() < 0.03


def test_quantiles_of_nothing_are_nan_and_shares_are_checked():
    count_EB = np.zeros((2, NUM_BINS))
    count_EB[1, 3] = 5
    assert np.isnan(score_quantile(count_EB, 0.5)).tolist() == [True, False]
    edges = score_edges()
    assert score_quantile(count_EB[1], 0.0) == edges[0] or score_quantile(count_EB[1], 0.0) == edges[3]
    assert score_quantile(count_EB[1], 1.0) == edges[4]
    with pytest.raises(ValueError, match=r"share=1.5 is out of 0\.\.1"):
        score_quantile(count_EB, 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_swaps_are_the_sums_of_the_swap_graph(dtype, biased, masked):
    """Scores in steps of 1/64: many ties and many gaps that equal delta, which are not below it."""
    draw = np.random.default_rng(4)
    scores_TE = torch.from_numpy(draw.integers(0, 64, (200, EXPERTS)) / 64.0).to(dtype)
    bias_E = torch.from_numpy(draw.integers(-9, 9, EXPERTS) / 64.0).float() * biased
    mask_T = torch.from_numpy(draw.random(200) < 0.7) if masked else None
    valid_T = np.ones(200, bool) if mask_T is None else mask_T.numpy()
    near_E, wide_E = zeros(EXPERTS), zeros(EXPERTS)
    for _ in range(2):
        meter_stats.add_swaps(routed(scores_TE, None, mask_T, bias_E), bias_E, 2 / 64, near_E, wide_E)
    arguments = (scores_TE.numpy(), bias_E.numpy(), TOP_K, valid_T)
    assert near_E.tolist() == (2 * brute_swaps(*arguments, 2 / 64)).tolist()
    assert wide_E.tolist() == (2 * brute_swaps(*arguments, 4 / 64)).tolist()
    assert 0 < near_E.sum() < wide_E.sum()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_swaps_give_the_gain_of_the_bias(score):
    """Against the change of the counts when one expert's bias is moved: the diagonal of dn/db."""
    torch.manual_seed(1)
    router = Router(RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K, score=score))
    x_TD = torch.randn(200_000, WIDTH)
    delta = 1e-3
    with torch.no_grad():
        router.gate.weight.mul_(40)
        routing = router(x_TD)
        near_E, wide_E = zeros(EXPERTS), zeros(EXPERTS)
        meter_stats.add_swaps(routing, router.bias.bias_E, delta, near_E, wide_E)
        gain_E = (2 * near_E - wide_E / 2) / (2 * delta)
        for e in range(EXPERTS):
            change = torch.zeros(EXPERTS)
            change[e] = delta
            router.bias.set(change)
            up = int(router(x_TD).demand_E[e])
            router.bias.set(-change)
            down = int(router(x_TD).demand_E[e])
            # both count tokens near the threshold, a thousand or more: 4 sd of what they do not share
            assert gain_E[e] == pytest.approx((up - down) / (2 * delta), rel=0.12)


def test_who_selects_every_expert_has_no_swaps_and_uneven_choices_are_refused():
    near_E, wide_E = zeros(TOP_K), zeros(TOP_K)
    meter_stats.add_swaps(routed(torch.rand(9, TOP_K)), torch.zeros(TOP_K), 0.5, near_E, wide_E)
    assert not near_E.any() and not wide_E.any()
    routing = routed(torch.rand(3, EXPERTS))
    routing = Routing(
        **{n: getattr(routing, n) for n in Routing.__dataclass_fields__ if n != "top_k"}, top_k=None
    )
    with pytest.raises(ValueError, match=r"swap counts and margins need K choices of .*swaps_every=0"):
        meter_stats.add_swaps(routing, torch.zeros(EXPERTS), 0.5, zeros(EXPERTS), zeros(EXPERTS))


# ---- pairs, margins, samples, spread ---------------------------------------------------------------------


def coarse(masked, dtype=torch.float32, tokens=120):
    """Scores and a bias in steps of 1/64, so that many are equal; the scores of padding are NaN."""
    draw = np.random.default_rng(5)
    scores_TE = torch.from_numpy(draw.integers(0, 64, (tokens, EXPERTS)) / 64.0).to(dtype)
    bias_E = torch.from_numpy(draw.integers(-9, 9, EXPERTS) / 64.0).float()
    mask_T = torch.from_numpy(draw.random(tokens) < 0.7) if masked else None
    routing = routed(scores_TE, None, mask_T, bias_E)
    valid_T = np.ones(tokens, bool) if mask_T is None else mask_T.numpy()
    if masked:
        scores_TE[~mask_T] = torch.nan
    return routing, bias_E, valid_T


@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_pairs_are_the_swap_graph_whose_sums_are_the_swaps(masked):
    routing, bias_E, valid_T = coarse(masked)
    near_EE, wide_EE = zeros(EXPERTS, EXPERTS), zeros(EXPERTS, EXPERTS)
    near_E, wide_E = zeros(EXPERTS), zeros(EXPERTS)
    for _ in range(2):
        meter_stats.add_pairs(routing, bias_E, 2 / 64, near_EE, wide_EE)
        meter_stats.add_swaps(routing, bias_E, 2 / 64, near_E, wide_E)
    arguments = (routing.scores_TE.numpy(), bias_E.numpy(), TOP_K, valid_T)
    assert near_EE.tolist() == (2 * brute_pairs(*arguments, 2 / 64)).tolist()
    assert wide_EE.tolist() == (2 * brute_pairs(*arguments, 4 / 64)).tolist()
    assert near_E.tolist() == (near_EE.sum(0) + near_EE.sum(1)).tolist()
    assert 0 < near_E.sum() < wide_E.sum() and not torch.equal(near_EE, near_EE.T)


MARGINS = {"numba": meter_stats.add_margins, "torch": meter_stats.add_margins_torch}


@pytest.mark.parametrize("way", MARGINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_margins_are_on_the_side_of_the_selection(masked, dtype, way):
    """A third of the margins is 0, where the lower id was selected."""
    routing, bias_E, valid_T = coarse(masked, dtype)
    count_EB = zeros(EXPERTS, NUM_MARGIN_BINS)
    for _ in range(2):
        MARGINS[way](routing, bias_E, count_EB)
    want_EB = 2 * brute_margins(routing.scores_TE.numpy(), bias_E.numpy(), TOP_K, valid_T)
    assert np.array_equal(count_EB.numpy(), want_EB)
    above = margin_edges()[:-1] >= 0
    assert count_EB[:, above].sum(dim=1).tolist() == (2 * routing.demand_E).tolist()
    assert count_EB.sum(dim=1).tolist() == [2 * valid_T.sum()] * EXPERTS
    half = NUM_MARGIN_BINS // 2
    assert count_EB[:, half - 1].sum() > 0 and count_EB[:, half].sum() > 0, "ties on both sides"


@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_margins_of_the_kernel_are_those_of_torch_to_the_last_token(masked):
    generator = torch.Generator().manual_seed(4)
    scores_TE = torch.softmax(4 * torch.randn(500, EXPERTS, generator=generator), dim=1)
    scores_TE[:50] = 2.0 ** torch.randint(-20, 1, (50, EXPERTS), generator=generator)  # edges of bins
    mask_T = torch.rand(500, generator=generator) > 0.3 if masked else None
    bias_E = 0.1 * torch.randn(EXPERTS, generator=generator)
    routing = routed(scores_TE, bias_E=bias_E, mask_T=mask_T)
    found = {}
    for way, add in MARGINS.items():
        found[way] = zeros(EXPERTS, NUM_MARGIN_BINS)
        add(routing, bias_E, found[way])
    assert torch.equal(found["numba"], found["torch"])


@pytest.mark.parametrize("way", MARGINS)
def test_margins_of_any_size_have_a_bin_and_no_token_adds_nothing(way):
    edges, half = margin_edges(), NUM_MARGIN_BINS // 2
    assert edges.shape == (NUM_MARGIN_BINS + 1,) and edges[0] == -1 and edges[-1] == 1 and edges[half] == 0
    assert np.array_equal(edges, -edges[::-1]) and (np.diff(edges) > 0).all()
    # a bin is 1/8 of its octave or less
    assert edges[half + 1] == 2**-14 and (np.diff(edges)[half + 1 :] <= edges[half + 1 : -1] / 8).all()
    count_EB = zeros(3, NUM_MARGIN_BINS)
    MARGINS[way](routed(torch.zeros(0, 3)), torch.zeros(3), count_EB)
    assert not count_EB.any()
    bias_E = torch.tensor([5.0, 0.0, -5.0])
    MARGINS[way](routed(torch.full((4, 3), 0.5), bias_E=bias_E), bias_E, count_EB)
    assert count_EB[0, -1] == count_EB[1, -1] == count_EB[2, 0] == 4 == count_EB.sum() / 3
    count_EB = zeros(TOP_K, NUM_MARGIN_BINS)
    MARGINS[way](routed(torch.rand(9, TOP_K)), torch.zeros(TOP_K), count_EB)
    assert count_EB[:, -1].tolist() == [9] * TOP_K, "who selects all"


SPREAD = {"numba": meter_stats.add_spread, "torch": meter_stats.add_spread_torch}


@pytest.mark.parametrize("way", SPREAD)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_valid", "masked"])
def test_spread_of_the_logits_and_confidence_are_those_of_valid_tokens(way, score, masked):
    """Logits with a part common to all experts, a hundred times the rest, which must not show."""
    torch.manual_seed(2)
    router = Router(RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K, score=score)).double()
    x_TD = torch.randn(50, WIDTH, dtype=torch.float64)
    mask_T = torch.rand(50) < 0.6 if masked else None
    with torch.no_grad():
        router.gate.weight.mul_(40).add_(100.0 if score == "softmax" else 0.0)
        routing = router(x_TD, mask_T)
    valid_T = np.ones(50, bool) if mask_T is None else mask_T.numpy()
    want_2 = brute_spread(routing.scores_TE.numpy(), routing.logits_TE.numpy(), valid_T)
    if masked:
        routing.scores_TE[~mask_T], routing.logits_TE[~mask_T] = torch.nan, torch.nan
    sums_2 = zeros(2)
    for _ in range(2):
        SPREAD[way](routing, sums_2)
    # float64 sums in another order, of logits of 100 or so whose differences lose two digits
    np.testing.assert_allclose(sums_2.numpy(), 2 * want_2, rtol=1e-11)
    SPREAD[way](routed(torch.zeros(0, EXPERTS)), sums_2)
    np.testing.assert_allclose(sums_2.numpy(), 2 * want_2, rtol=1e-11)
    assert 1 / EXPERTS < want_2[1] / valid_T.sum() < 1


@pytest.mark.parametrize("way", SPREAD)
def test_scores_that_have_all_underflowed_count_as_no_confidence_and_as_no_nan(way):
    sums_2 = zeros(2)
    SPREAD[way](routed(torch.zeros(3, EXPERTS)), sums_2)
    assert sums_2.tolist() == [0.0, 0.0]


def test_a_sample_is_the_first_valid_tokens_of_the_first_batch_that_has_any():
    def take(*batches):
        rows_SE, taken_1 = zeros(5, EXPERTS), zeros(1)
        for scores_TE, mask_T in batches:
            meter_stats.add_sample(routed(scores_TE, mask_T=mask_T), rows_SE, taken_1)
        return rows_SE.tolist(), taken_1.tolist()

    draw = torch.Generator().manual_seed(3)
    scores_TE, other_TE = torch.rand(9, EXPERTS, generator=draw), torch.rand(7, EXPERTS, generator=draw)
    none, padding = (torch.zeros(0, EXPERTS), None), (other_TE, torch.zeros(7, dtype=torch.bool))
    mask_T = torch.tensor([False, True, True, False, False, True, False, True, False])
    want = scores_TE[[1, 2, 5, 7, 1]].tolist(), [1.0]
    assert take((scores_TE, None), (other_TE, None)) == (scores_TE[:5].tolist(), [1.0])
    assert take(none, padding, (scores_TE, mask_T), (other_TE, None)) == want
    assert take((other_TE, None), (scores_TE, mask_T))[0] == other_TE[:5].tolist()
    assert take(none, padding) == (zeros(5, EXPERTS).tolist(), [0.0])


def sample_of_some(exchange):
    """Rank 1 has only padding, rank 2 nothing at all."""
    world, rank = exchange.size, exchange.rank

    def reduce(tensor):
        tensor.copy_(exchange.all_gather(tensor).sum(dim=0))

    meter = LoadMeter(world, rank, sample_every=1, sample_tokens=4, reduce=reduce)
    layers = make_layers(Topology(), None, meter)
    x_TD = torch.randn([7, 3, 0, 3][rank], WIDTH, dtype=torch.float64)
    for layer in layers:
        layer(x_TD, torch.zeros(3, dtype=torch.bool) if rank == 1 else None)
    with torch.no_grad():
        own_LME = torch.stack([layer.router(x_TD).scores_TE for layer in layers]).numpy()
    return meter.sample(1).sample_LME, own_LME


def test_ranks_without_a_token_are_left_out_of_the_sample():
    results = run_loopback(sample_of_some, 4)
    want = np.concatenate([results[0][1][:, :4], results[3][1][:, [0, 1, 2, 0]]], axis=1)
    for sample_LME, _ in results:
        assert sample_LME.shape == (LAYERS, 8, EXPERTS) and np.array_equal(sample_LME, want)


# ---- through the layer, over ranks ----------------------------------------------------------------------

TOKENS = ((15, 0, 9), (8, 7, 1))  # micro-batches x ranks
LAYERS, DELTA, SAMPLED = 2, 0.06, 4


def layer_inputs(micro, rank):
    generator = torch.Generator().manual_seed(10 * micro + rank)
    x_TD = torch.randn(TOKENS[micro][rank], WIDTH, dtype=torch.float64, generator=generator)
    mask_T = torch.rand(x_TD.shape[0], generator=generator) < 0.8 if micro else None
    return x_TD, mask_T


def make_layers(topology, groups, meter):
    layers = []
    for number in range(LAYERS):
        torch.manual_seed(number)
        router = RouterConfig(d_model=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
        config = MoEConfig(router=router, expert_hidden=HIDDEN)
        layer = MoELayer(config, topology, groups=groups, meter=meter).double()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(90 + number)
            layer.router.gate.weight.copy_(torch.randn(EXPERTS, WIDTH, generator=generator))
            layer.router.bias.set(0.05 * torch.randn(EXPERTS, generator=generator))
        layers.append(layer)
    return layers


def metered_step(topology, groups, recompute, reduce=None):
    """Two micro-batches, forward and backward, and an evaluation between them that must not count."""
    every = {"swaps_every": 1, "margins_every": 1, "pairs_every": 1, "sample_every": 1}
    options = {"swap_delta": DELTA, "sample_tokens": SAMPLED, "reduce": reduce}
    meter = LoadMeter(topology.world_size, topology.rank, **every, **options)
    layers = make_layers(topology, groups, meter)
    for micro in range(2):
        x_TD, mask_T = layer_inputs(micro, topology.rank)
        x_TD.requires_grad_(True)
        for layer in layers:
            y, aux_loss = checkpoint(layer, x_TD, mask_T) if recompute else layer(x_TD, mask_T)
            (y.sum() + aux_loss).backward()
            layer.eval()
            layer(torch.ones(3, WIDTH, dtype=torch.float64))
            layer.train()
    sample = meter.sample(1)
    names = ("tokens_per_expert_LE", "squares_LE", "score_sum_LE", "score_histogram_LEB", "swaps_LE",
             "wide_swaps_LE", "swap_pairs_LEE", "wide_swap_pairs_LEE", "margin_histogram_LEB", "peak_rows_LG",
             "rows_to_rank_LP", "num_tokens", "tokens_squared", "sample_LME", "logit_rms_L",
             "confidence_L")  # fmt: skip
    return {name: getattr(sample, name) for name in names}


def check_step(results, ep_size):
    """Every field against numpy over all batches, one token at a time."""
    world = len(results)
    want = {name: [] for name in ("tokens_per_expert_LE", "squares_LE", "score_sum_LE", "score_histogram_LEB",
                                  "swaps_LE", "wide_swaps_LE", "swap_pairs_LEE", "wide_swap_pairs_LEE",
                                  "margin_histogram_LEB")}  # fmt: skip
    spread_L2, samples_LM = np.zeros((LAYERS, 2)), [[] for _ in range(LAYERS)]
    rows_LP, peak_LG = np.zeros((LAYERS, world)), np.zeros((LAYERS, world // ep_size))
    for number, layer in enumerate(
        make_layers(Topology(), Groups(ep=SoloExchange(), edp=SoloExchange()), None)
    ):
        sums = dict.fromkeys(want, 0)
        for micro in range(2):
            rows_P = np.zeros(world)
            for rank in range(world):
                x_TD, mask_T = layer_inputs(micro, rank)
                valid_T = np.ones(x_TD.shape[0], bool) if mask_T is None else mask_T.numpy()
                with torch.no_grad():
                    routing = layer.router(x_TD)
                scores_TE, bias_E = routing.scores_TE.numpy(), layer.router.bias.bias_E.numpy()
                chosen_TK = routing.expert_N.view(-1, TOP_K).numpy()[valid_T]
                counts_E = np.bincount(chosen_TK.reshape(-1), minlength=EXPERTS)
                sum_E, count_EB = brute_scores(scores_TE, valid_T)
                arguments = (scores_TE, bias_E, TOP_K, valid_T)
                near_E, wide_E = (brute_swaps(*arguments, d) for d in (DELTA, 2 * DELTA))
                near_EE, wide_EE = (brute_pairs(*arguments, d) for d in (DELTA, 2 * DELTA))
                values = (counts_E, counts_E**2, sum_E, count_EB, near_E, wide_E, near_EE, wide_EE)
                for name, value in zip(want, (*values, brute_margins(*arguments)), strict=True):
                    sums[name] = sums[name] + value
                spread_L2[number] += brute_spread(scores_TE, routing.logits_TE.numpy(), valid_T)
                group = rank // ep_size * ep_size
                rows_P[group : group + ep_size] += counts_E.reshape(ep_size, -1).sum(axis=1)
            rows_LP[number] += rows_P
            peak_LG[number] += rows_P.reshape(-1, ep_size).max(axis=1)
        for name, value in sums.items():
            want[name].append(value)
        for rank in range(world):
            first = 0 if TOKENS[0][rank] else 1
            x_TD, mask_T = layer_inputs(first, rank)
            with torch.no_grad():
                rows_ME = layer.router(x_TD if mask_T is None else x_TD[mask_T]).scores_TE
            samples_LM[number].append(rows_ME[np.arange(SAMPLED) % rows_ME.shape[0]].numpy())
    tokens = [int(layer_inputs(m, r)[1].sum()) if m else TOKENS[0][r] for m in range(2) for r in range(world)]
    assert 0 < np.sum(want["swaps_LE"]) < np.sum(want["wide_swaps_LE"])
    for result in results:
        for name, value in want.items():
            # counts are exact; sums of scores are float64 sums in another order
            np.testing.assert_allclose(result[name], np.stack(value), rtol=1e-12, atol=0, err_msg=name)
        # sums in another order, of few terms
        np.testing.assert_allclose(result["sample_LME"], [np.concatenate(m) for m in samples_LM], rtol=1e-12)
        mean_L2 = spread_L2 / sum(tokens)
        np.testing.assert_allclose(result["logit_rms_L"], np.sqrt(mean_L2[:, 0] / EXPERTS), rtol=1e-12)
        np.testing.assert_allclose(result["confidence_L"], mean_L2[:, 1], rtol=1e-12)
        assert np.array_equal(result["rows_to_rank_LP"], rows_LP)
        assert np.array_equal(result["peak_rows_LG"], peak_LG)
        assert result["num_tokens"] == sum(tokens)
        assert result["tokens_squared"] == sum(n * n for n in tokens)


def step_in_threads(exchange, recompute):
    topology = Topology(world_size=exchange.size, ep_size=exchange.size, rank=exchange.rank)

    def reduce(tensor):
        tensor.copy_(exchange.all_gather(tensor).sum(dim=0))

    return metered_step(topology, Groups(ep=exchange, edp=SoloExchange()), recompute, reduce)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_field_equals_brute_force_over_ranks_and_micro_batches(world, recompute):
    check_step(run_loopback(step_in_threads, world, recompute), world)


def step_on_ranks(rank, world, ep_size):
    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    return metered_step(topology, make_groups(topology), recompute=True)


@pytest.mark.dist
@pytest.mark.parametrize("ep_size", [1, 3])
def test_every_field_equals_brute_force_on_gloo_ranks(ep_size):
    check_step(run_ranks(step_on_ranks, 3, ep_size), ep_size)
