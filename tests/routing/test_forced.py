"""Forced selection: the distribution that was asked for, alike after a resume, and the router's weights."""

import copy
import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from experiments.config import load_config, to_toml
from routing import ForcedSelection, Router, RouterConfig
from routing.shares import log_shares

TOKENS, EXPERTS, TOP_K, WIDTH = 13, 7, 3, 5
MANY = 20000
# chi-square values that a right distribution exceeds with probability 1e-6, by degrees of freedom; with fixed
# seeds the tests are no lottery, and a wrong share of a few percent gives values in the hundreds
CHI_SQUARE = {2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89, 6: 38.26, 11: 48.87}


def selection(forced, *, seed=0, experts=EXPERTS, chosen=1) -> ForcedSelection:
    return ForcedSelection(forced, seed=seed, num_experts=experts, num_chosen=chosen)


def make_router(forced="uniform", stream=(), **changes) -> Router:
    torch.manual_seed(2)
    settings = {"d_model": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K, "forced": forced} | changes
    router = Router(RouterConfig(**settings), stream=stream).double()
    with torch.no_grad():
        router.gate.weight.mul_(50)
    return router


def rows(num_tokens=TOKENS, seed=3):
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def chi_square(counts, expected) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


# ---- the distribution -----------------------------------------------------------------------------------

SHARES = {
    "uniform": [1.0] * EXPERTS,
    "zipf:0": [1.0] * EXPERTS,
    "zipf:1.0": [1 / (e + 1) for e in range(EXPERTS)],
    "zipf:2.5": [(e + 1) ** -2.5 for e in range(EXPERTS)],
    "share:3,1,0.5,2,1e-1,1,7": [3, 1, 0.5, 2, 0.1, 1, 7],
    "share:0,1,0,2,0,1,0": [0, 1, 0, 2, 0, 1, 0],
    "only:2-4": [0, 0, 1, 1, 1, 0, 0],
    "only:0,5-6,2": [1, 0, 1, 0, 0, 1, 1],
    "always:6": [0] * 6 + [1],
}


@pytest.mark.parametrize("forced", SHARES)
def test_one_choice_follows_the_shares(forced):
    shares = SHARES[forced]
    counts = selection(forced).draw(MANY)[:, 0].bincount(minlength=EXPERTS).tolist()
    assert [c > 0 for c in counts] == [s > 0 for s in shares], "a share of 0 is never drawn"
    allowed = [e for e, share in enumerate(shares) if share > 0]
    if len(allowed) > 1:
        expected = [MANY * shares[e] / sum(shares) for e in allowed]
        assert chi_square([counts[e] for e in allowed], expected) < CHI_SQUARE[len(allowed) - 1]


def test_two_choices_are_two_draws_without_putting_back():
    """P(i, then j) = p_i p_j / (1 - p_i): every ordered pair by itself."""
    p = [0.4, 0.3, 0.2, 0.1]
    expert_TK = selection("share:4,3,2,1", experts=4, chosen=2).draw(MANY)
    pairs = list(itertools.permutations(range(4), 2))
    counts = [int(((expert_TK[:, 0] == i) & (expert_TK[:, 1] == j)).sum()) for i, j in pairs]
    expected = [MANY * p[i] * p[j] / (1 - p[i]) for i, j in pairs]
    assert sum(counts) == MANY, "no expert twice in a token"
    assert chi_square(counts, expected) < CHI_SQUARE[11]


@pytest.mark.parametrize(
    ("forced", "always"), [("always:4", [4]), ("always:5,1", [1, 5]), ("always:0-2", [0, 1, 2])]
)
def test_always_is_in_every_token_and_the_others_are_uniform(forced, always):
    expert_TK = selection(forced, chosen=TOP_K).draw(MANY)
    assert expert_TK[:, : len(always)].tolist() == [always] * MANY
    rest = [e for e in range(EXPERTS) if e not in always]
    if len(always) < TOP_K:
        assert (expert_TK.sort(1).values.diff(dim=1) > 0).all()
        second = expert_TK[:, len(always)].bincount(minlength=EXPERTS)[rest].tolist()
        assert chi_square(second, [MANY / len(rest)] * len(rest)) < CHI_SQUARE[len(rest) - 1]


@pytest.mark.parametrize("forced", ["only:1-4", "only:4,2,1,3", "share:0,5,5,5,5,0,0"])
def test_only_keeps_all_choices_among_these(forced):
    expert_TK = selection(forced, chosen=TOP_K).draw(MANY)
    assert set(expert_TK.unique().tolist()) == {1, 2, 3, 4}
    assert (expert_TK.sort(1).values.diff(dim=1) > 0).all(), "no expert twice in a token"
    # who is left out is uniform too: 10 - the sum of the three
    left_out = (10 - expert_TK.sum(1)).bincount(minlength=5)[1:].tolist()
    assert chi_square(left_out, [MANY / 4] * 4) < CHI_SQUARE[3]


def test_as_many_allowed_as_chosen_leaves_no_choice():
    expert_TK = selection("share:0,1e-300,0,1,0,1,0", chosen=TOP_K).draw(200)
    assert expert_TK.sort(1).values.tolist() == [[1, 3, 5]] * 200
    assert selection("uniform", chosen=EXPERTS).draw(9).sort(1).values.tolist() == [list(range(EXPERTS))] * 9
    steepest = selection("zipf:1000", chosen=TOP_K).draw(200)
    assert steepest.tolist() == [[0, 1, 2]] * 200


def test_the_load_of_several_choices_is_flatter_than_the_shares():
    """A share of 0.9 cannot be had: an expert is in a token once at most, 1 / K of its copies."""
    counts = (
        selection("share:90,2,2,2,2,1,1", chosen=TOP_K).draw(2000).reshape(-1).bincount(minlength=EXPERTS)
    )
    assert 0.32 < counts[0] / counts.sum() <= 1 / TOP_K


# ---- seeds, streams, resuming ---------------------------------------------------------------------------


def test_draws_repeat_by_seed_and_stream_and_differ_otherwise():
    first = selection("uniform", seed=1).draw(TOKENS, stream=(0, 1))
    assert torch.equal(first, selection("uniform", seed=1).draw(TOKENS, stream=(0, 1)))
    # no two of them alike: not rank 1 of layer 0 and rank 0 of layer 1, not seed 1 of rank 2 and the reverse
    drawn = [
        tuple(selection("uniform", seed=seed).draw(TOKENS, stream=stream)[:, 0].tolist())
        for seed in (1, 2, 11)
        for stream in [(), (0, 0), (0, 1), (1, 0), (1, 1), (1,), (11,), (1, 11)]
    ]
    assert len(set(drawn)) == len(drawn)


def test_every_forward_draws_anew_and_leaves_torchs_own_random_state_alone():
    torch.manual_seed(4)
    before, forced = torch.get_rng_state(), selection("uniform")
    drawn = {tuple(forced.draw(TOKENS)[:, 0].tolist()) for _ in range(5)}
    assert len(drawn) == 5
    assert int(forced.draws) == 5
    assert torch.equal(before, torch.get_rng_state())


def test_a_resumed_router_goes_on_where_the_saved_one_would_have():
    router = make_router()
    for _ in range(3):
        router(rows())
    saved = copy.deepcopy(router.state_dict())
    assert saved["forced.draws"].dtype == torch.int64
    want = [router(rows()).expert_N for _ in range(3)]
    resumed = make_router()
    resumed(rows())  # has a count of its own, which the saved one replaces
    resumed.load_state_dict(saved)
    assert all(torch.equal(resumed(rows()).expert_N, expert_N) for expert_N in want)
    assert int(resumed.forced.draws) == 6


def test_a_count_that_takes_the_place_of_another_is_noticed():
    router, other = make_router(), make_router()
    for _ in range(3):
        other(rows())
    want = other(rows()).expert_N
    router(rows())
    count = torch.tensor(2).add_(1)  # written to once, like the router's own
    router.load_state_dict(router.state_dict() | {"forced.draws": count}, assign=True)
    assert torch.equal(router(rows()).expert_N, want)


def test_a_copied_and_a_cast_router_go_on_alike():
    router = make_router()
    router(rows())
    copied, cast = copy.deepcopy(router), copy.deepcopy(router).bfloat16()
    want = router(rows()).expert_N
    assert torch.equal(copied(rows()).expert_N, want)
    assert torch.equal(cast(rows().bfloat16()).expert_N, want)
    assert cast.forced.draws.dtype == torch.int64


def test_evaluation_draws_without_touching_what_training_draws():
    trained, evaluated = make_router(), make_router()
    for _ in range(2):
        trained(rows()), evaluated(rows())
    evaluated.eval()
    held = [evaluated(rows()).expert_N for _ in range(3)]
    assert int(evaluated.forced.draws) == 2
    evaluated.train()
    assert all(torch.equal(expert_N, held[0]) for expert_N in held)
    assert torch.equal(trained(rows()).expert_N, evaluated(rows()).expert_N)


def test_an_unforced_router_has_no_new_key_in_its_state():
    assert set(make_router("").state_dict()) == {"gate.weight", "bias.bias_E"}
    assert set(make_router().state_dict()) == {"gate.weight", "bias.bias_E", "forced.draws"}


# ---- in the router --------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_and_gate_gradient_equal_a_plain_loop_at_the_drawn_experts(score, normalize):
    router = make_router("zipf:1.0", score=score, normalize=normalize, scale=1.5)
    x_TD, factor_N = rows(), torch.linspace(-1, 1, TOKENS * TOP_K, dtype=torch.float64)
    routing = router(x_TD)
    (routing.weight_N * factor_N).sum().backward()
    leaf = router.gate.weight.detach().clone().requires_grad_(True)
    weights = []
    for token, experts in enumerate(routing.expert_N.view(TOKENS, TOP_K).tolist()):
        logits_E = leaf @ x_TD[token]
        scores_E = logits_E.softmax(0) if score == "softmax" else logits_E.sigmoid()
        total = sum(scores_E[e] for e in experts) if normalize else 1.0
        weights += [1.5 * scores_E[e] / total for e in experts]
    (torch.stack(weights) * factor_N).sum().backward()
    # float64, another order of the same few operations
    torch.testing.assert_close(routing.weight_N, torch.stack(weights), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(router.gate.weight.grad, leaf.grad, rtol=1e-9, atol=1e-11)


def test_neither_bias_nor_scores_nor_rows_matter():
    want = make_router("zipf:1.0")(rows()).expert_N
    other = make_router("zipf:1.0")
    other.bias.set(torch.linspace(-9, 9, EXPERTS))
    with torch.no_grad():
        other.gate.weight.neg_()
    assert torch.equal(other(rows(seed=8)).expert_N, want)


def test_padding_gets_no_expert_and_the_others_keep_theirs():
    mask_T = torch.arange(TOKENS) % 3 != 1
    x_TD = rows()
    x_TD[~mask_T] = float("nan")
    routing, whole = make_router().route(x_TD, mask_T), make_router().route(rows())
    expert_TK, weight_TK = routing.expert_N.view(-1, TOP_K), routing.weight_N.view(-1, TOP_K)
    assert (expert_TK[~mask_T] == -1).all()
    assert (weight_TK[~mask_T] == 0).all()
    assert torch.equal(expert_TK[mask_T], whole.expert_N.view(-1, TOP_K)[mask_T])
    assert int(routing.demand_E.sum()) == int(mask_T.sum()) * TOP_K
    assert torch.equal(routing.demand_E, routing.routed_E)
    assert make_router()(rows(0)).expert_N.shape == (0,)


def test_a_selection_that_is_given_is_kept_and_not_counted():
    router = make_router("only:0-3")
    given_TK = torch.tensor([[6, 5, 4]]).expand(TOKENS, -1)
    assert torch.equal(router.route(rows(), expert_TK=given_TK).expert_N, given_TK.reshape(-1))
    assert int(router.forced.draws) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_drawing_again_in_a_backward_is_refused(reentrant):
    """torch's own checkpoint would get other experts in its second forward, and wrong gradients."""
    router = make_router()
    x_TD = rows().requires_grad_(True)
    weight_N = checkpoint(lambda x_TD: router(x_TD).weight_N, x_TD, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"use moe\.recompute\.checkpoint"):
        weight_N.square().sum().backward()


# ---- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ("zip:1", r"'zip:1' is unknown; use one of .*zipf:A, always:I"),
        ("uniform:", r"'uniform:' is unknown"),
        ("Uniform", r"'Uniform' is unknown"),
        (" ", r"' ' is unknown"),
        ("zipf", r"'' is out of bounds or no number; give a number in 0\.\.1000"),
        ("zipf:x", r"'x' is out of bounds or no number"),
        ("zipf:-0.5", r"'-0\.5' is out of bounds or no number; give a number in 0\.\.1000"),
        ("zipf:1001", r"'1001' is out of bounds"),
        ("zipf:nan", r"'nan' is out of bounds or no number"),
        ("always", r"'' is no expert and no range of experts; write 3 or 0-3"),
        ("always:-1", r"'-1' is no expert and no range"),
        ("always:1.5", r"'1\.5' is no expert"),
        ("always:7", r"'7' is no range or out of 0\.\.6 \(router\.num_experts=7\)"),
        ("always:1,1", r"names expert 1 twice"),
        ("always:0-3", r"names 4 experts for every token, more than router\.top_k=3; name 3 at most"),
        ("only:0-1", r"allows 2 experts, but every token selects router\.top_k=3 .*allow 3 or more"),
        ("only:5-7", r"'5-7' is no range or out of 0\.\.6"),
        ("only:4-2", r"'4-2' is no range or out of .*low end first"),
        ("only:1-2-3", r"'1-2-3' is no expert and no range"),
        ("only:0-3,2", r"names expert 2 twice"),
        ("only:0,,3", r"'' is no expert"),
        ("share:1,1", r"gives 2 shares, expected 7: one for each of the router\.num_experts=7"),
        ("share:1,1,1,1,1,1,-1", r"'-1' is out of bounds or no number; give a number 0 or more, and finite"),
        ("share:1,1,1,1,1,1,nan", r"'nan' is out of bounds"),
        ("share:1,1,1,1,1,1,inf", r"'inf' is out of bounds"),
        ("share:1,1,1,1,1,1,", r"'' is out of bounds or no number"),
        ("share:0,0,0,0,0,0,0", r"allows 0 experts, but every token selects router\.top_k=3"),
        ("share:1,1,0,0,0,0,0", r"allows 2 experts, but every token selects router\.top_k=3"),
    ],
)
def test_a_form_that_does_not_fit_is_refused_with_its_remedy(forced, message):
    with pytest.raises(ValueError, match=r"router\.forced=.*" + message):
        RouterConfig(num_experts=EXPERTS, top_k=TOP_K, forced=forced)


def test_logarithms_of_shares_hold_what_a_share_would_underflow():
    assert log_shares("zipf:1000", 4, 2)[3] == pytest.approx(-1000 * math.log(4))
    assert log_shares("always:1", 3, 2) == [0.0, math.inf, 0.0]
    assert log_shares("only:1-2", 3, 2) == [-math.inf, 0.0, 0.0]


@pytest.mark.parametrize("forced", ["zipf:1.0", "always:0,3", "only:0-3", "share:1,2,3,4,0,0,0,0"])
def test_a_run_sets_it_in_toml_and_on_the_command_line(tmp_path, forced):
    path = tmp_path / "run.toml"
    path.write_text(f'[router]\nforced = "{forced}"\nforced_seed = 7\n')
    read = load_config(path)
    (tmp_path / "empty.toml").write_text("")
    given = load_config(tmp_path / "empty.toml", [f"router.forced={forced}", "router.forced_seed=7"])
    assert (read.router.forced, read.router.forced_seed) == (forced, 7)
    assert read == given
    path.write_text(to_toml(read))
    assert load_config(path) == read


def test_a_run_with_a_wrong_form_is_told_where_it_stands(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[router]\nforced = "only:8-9"\n')
    with pytest.raises(ValueError, match=r"run\.toml: router\.forced='only:8-9': '8-9' is .* 0\.\.7"):
        load_config(path)
