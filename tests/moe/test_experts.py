"""Experts: every way to compute them against one plain feed-forward per slot, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from moe import MoEConfig, MoELayer, Topology
from moe.experts import Experts, SwiGLU
from moe.feed_forward import choose_method, fastest_method, feed_forward, grouped_mm_is_legal
from routing import RouterConfig

# 16-byte strides in float32 and bfloat16; all sizes distinct
SLOTS, WIDTH, HIDDEN = 5, 8, 24
COUNTS = {
    "uneven": [4, 1, 7, 2, 3],
    "zeros_at_start": [0, 0, 6, 1, 2],
    "zeros_at_end": [3, 5, 1, 0, 0],
    "zeros_between": [3, 0, 1, 0, 6],
    "all_to_one": [0, 0, 9, 0, 0],
    "single_row": [0, 1, 0, 0, 0],
    "nothing": [0, 0, 0, 0, 0],
    "even": [3, 3, 3, 3, 3],
}
NAMES = ("rows", "w1", "w2", "w3", "weight")


def tensors(counts, dtype, swiglu=True, weighted=False):
    """rows, w1, w2, w3 or None, router weight or None, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(4)
    rows = sum(counts)
    shapes = [(rows, WIDTH), (SLOTS, HIDDEN, WIDTH), (SLOTS, WIDTH, HIDDEN), (SLOTS, HIDDEN, WIDTH), (rows,)]
    scales = (1.0, WIDTH**-0.5, HIDDEN**-0.5, WIDTH**-0.5, 1.0)
    made = [
        torch.randn(s, dtype=torch.float64, generator=generator).mul_(c).to(dtype)
        for s, c in zip(shapes, scales)
    ]
    grad = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    leaves = [*made[:3], made[3] if swiglu else None, made[4] if weighted else None]
    return [None if t is None else t.requires_grad_(True) for t in leaves], grad


def plain(rows, w1, w2, w3, counts, weight):
    """One nn.functional.linear after the other, slot by slot."""
    out, start = [], 0
    for e, n in enumerate(counts.tolist()):
        part = rows[start : start + n]
        hidden = F.linear(part, w1[e])
        hidden = F.gelu(hidden) if w3 is None else F.silu(hidden) * F.linear(part, w3[e])
        if weight is not None:
            hidden = hidden * weight[start : start + n, None]
        out.append(F.linear(hidden, w2[e]))
        start += n
    return torch.cat(out)


def step(function, counts, dtype, swiglu, weighted):
    """Output and every gradient."""
    leaves, grad = tensors(counts, dtype, swiglu, weighted)
    *parameters, weight = leaves
    out = function(*parameters, torch.tensor(counts, dtype=torch.int64), weight)
    out.backward(grad)
    return [out.detach(), *(None if t is None else t.grad for t in leaves)]


# relative to the largest value: sums of up to 24 terms; bfloat16 rounds by 2^-9, up to 8 times in a backward
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8 * 2**-9}
WAYS = [
    ("loop", torch.float64),
    ("loop", torch.float32),
    ("loop", torch.bfloat16),
    ("auto", torch.float64),
    ("grouped_mm", torch.float32),
    ("grouped_mm", torch.bfloat16),
    ("bmm", torch.float64),
    ("bmm", torch.float32),
]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize(("method", "dtype"), WAYS, ids=str)
def test_every_method_equals_a_plain_feed_forward_per_slot(method, dtype, counts, swiglu, weighted):
    """The plain one gets the same rounded inputs, and computes in float64."""
    numbers = COUNTS[counts]
    if method == "bmm" and len(set(numbers)) > 1:
        leaves, _ = tensors(numbers, dtype, swiglu)
        with pytest.raises(
            ValueError, match=r'bmm takes the same number of rows for every slot.*method="loop"'
        ):
            feed_forward(*leaves[:4], torch.tensor(numbers), None, method)
        return
    got = step(lambda *a: feed_forward(*a, method), numbers, dtype, swiglu, weighted)
    leaves, grad = tensors(numbers, dtype, swiglu, weighted)
    exact = [None if t is None else t.detach().double().requires_grad_(True) for t in leaves]
    out = plain(*exact[:4], torch.tensor(numbers), exact[4])
    out.backward(grad.double())
    assert got[0].dtype == dtype
    for name, ours, want in zip(
        ("out", *NAMES), got, [out.detach(), *(t if t is None else t.grad for t in exact)]
    ):
        if want is None:
            assert ours is None, name
            continue
        assert ours is not None, f"{name} must have a gradient, of zeros where a slot has no rows"
        if want.numel():
            error = ((ours.double() - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
            assert error <= TOLERANCE[dtype], f"{name} is off by {error}"


@pytest.mark.parametrize("counts", list(COUNTS))
def test_a_slot_without_rows_has_the_gradient_zero_on_poisoned_memory(counts, monkeypatch):
    """Every buffer starts as NaN here: what is not written shows."""
    poison(monkeypatch)
    out, *grads = step(lambda *a: feed_forward(*a, "loop"), COUNTS[counts], torch.float64, True, True)
    for tensor in (out, *grads):
        assert not tensor.isnan().any()
    for grad in grads[1:4]:
        for e, rows in enumerate(COUNTS[counts]):
            assert bool(grad[e].any()) == (rows > 0)


def poison(monkeypatch):
    real, real_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda tensor, *a, **k: real(tensor, *a, **k).fill_(torch.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **k: real_like(tensor, **k).fill_(torch.nan))


@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "gelu"])
def test_the_loop_passes_gradcheck(swiglu):
    counts = torch.tensor([2, 0, 1])
    shapes = ((3, 2), (3, 4, 2), (3, 2, 4), (3, 4, 2))
    rows, w1, w2, w3 = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    leaves = [rows, w1, w2, w3 if swiglu else None, weight]

    def run(rows, w1, w2, w3, weight):
        return feed_forward(rows, w1, w2, w3, counts, weight, "loop")

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("method", ["loop", "grouped_mm"])
def test_an_expanded_gradient_is_taken(method):
    """`out.sum()` sends back one element seen everywhere; its strides are 0."""
    numbers = COUNTS["uneven"]
    leaves, _ = tensors(numbers, torch.float32)
    feed_forward(*leaves[:4], torch.tensor(numbers), None, method).sum().backward()
    twins, _ = tensors(numbers, torch.float32)
    plain(*twins[:4], torch.tensor(numbers), None).sum().backward()
    for name, ours, want in zip(NAMES[:4], leaves, twins):
        torch.testing.assert_close(ours.grad, want.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "legal"),
    [
        (torch.float32, 8, 12, True),
        (torch.float32, 6, 12, False),  # 24 bytes
        (torch.float32, 8, 10, False),
        (torch.bfloat16, 8, 16, True),
        (torch.bfloat16, 8, 12, False),  # 24 bytes
        (torch.float64, 8, 16, False),
    ],
    ids=str,
)
def test_grouped_mm_is_legal_for_strides_of_16_bytes_and_never_in_float64(dtype, width, hidden, legal):
    rows, w1 = torch.zeros(3, width, dtype=dtype), torch.zeros(2, hidden, width, dtype=dtype)
    assert grouped_mm_is_legal(rows, w1) == legal
    if not legal:
        with pytest.raises(ValueError, match=r'grouped_mm takes no .* use method="loop"'):
            feed_forward(rows, w1, w1.transpose(1, 2), w1, torch.tensor([1, 2]), None, "grouped_mm")


def test_on_cpu_the_loop_is_chosen():
    rows, w1 = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 16, 8, dtype=torch.bfloat16)
    assert choose_method(rows, w1) == "loop"


# rows by source rank and slot: empty blocks, a source without rows, a slot of one source, slots alike in sum
BLOCKS = {
    "uneven": [[2, 0, 5, 0, 1], [0, 0, 0, 0, 0], [2, 1, 2, 2, 2]],
    "even": [[1, 0, 3, 2, 2], [2, 3, 0, 1, 1]],
    "nothing": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("blocks", "method", "dtype"),
    [(b, m, d) for b in BLOCKS for m, d in WAYS if m != "bmm" or b != "uneven"],  # bmm takes even slots only
    ids=str,
)
def test_rows_in_blocks_by_source_give_what_they_give_in_order_of_the_slots(
    blocks, method, dtype, swiglu, weighted
):
    rows_Ps = torch.tensor(BLOCKS[blocks])
    counts = rows_Ps.sum(dim=0).tolist()
    slot_R = torch.arange(SLOTS).repeat(len(rows_Ps)).repeat_interleave(rows_Ps.reshape(-1))
    order = torch.argsort(slot_R, stable=True)  # from blocks by source to order by slot

    def in_order(rows, w1, w2, w3, _, weight):
        shuffled = plain(
            rows[order], w1, w2, w3, torch.tensor(counts), None if weight is None else weight[order]
        )
        return shuffled[torch.argsort(order)]

    got = step(lambda *a: feed_forward(*a[:4], rows_Ps, a[5], method), counts, dtype, swiglu, weighted)
    wanted = step(in_order, counts, torch.float64, swiglu, weighted)
    for name, ours, reference in zip(("out", *NAMES), got, wanted):
        if ours is not None:
            largest = max(1.0, reference.abs().max()) if reference.numel() else 1.0
            assert ((ours.double() - reference).abs() <= TOLERANCE[dtype] * largest).all(), name


def test_without_output_the_loop_leaves_the_second_product_out():
    leaves, _ = tensors(COUNTS["uneven"], torch.float64)
    out = feed_forward(*leaves[:4], torch.tensor(COUNTS["uneven"]), None, "loop", output=False)
    assert out.shape == (0, WIDTH)


def test_rows_of_another_number_of_slots_are_refused():
    leaves, _ = tensors(COUNTS["uneven"], torch.float32)
    with pytest.raises(ValueError, match="rows_Ps has 4 slots, and the weights are of 5"):
        feed_forward(*leaves[:4], torch.tensor([[4, 1, 7, 5]]))


@pytest.mark.parametrize("wrong", [[4, 1, 7, 2, 2], [4, 1, 7, -2, 7]])
def test_rows_that_the_counts_do_not_cover_are_refused(wrong):
    leaves, _ = tensors(COUNTS["uneven"], torch.float32)
    with pytest.raises(ValueError, match="must be 0 or more each and sum to the 17 rows given"):
        feed_forward(*leaves[:4], torch.tensor(wrong))


def test_unknown_choices_list_the_known_ones():
    leaves, _ = tensors(COUNTS["nothing"], torch.float32)
    with pytest.raises(
        ValueError, match="method='cutlass' is unknown; use one of auto, loop, grouped_mm, bmm"
    ):
        feed_forward(*leaves[:4], torch.tensor([0] * 5), None, "cutlass")
    with pytest.raises(ValueError, match="activation='relu' is unknown; use one of swiglu, gelu"):
        Experts(2, 8, 16, activation="relu")


def test_experts_without_third_matrix_have_two():
    assert [name for name, _ in Experts(2, 8, 16, activation="gelu").named_parameters()] == ["w1", "w2"]
    assert [name for name, _ in Experts(2, 8, 16).named_parameters()] == ["w1", "w2", "w3"]


def test_experts_of_equal_weights_are_the_dense_feed_forward():
    torch.manual_seed(0)
    experts, dense = Experts(2, 8, 24).double(), SwiGLU(8, 24).double()
    with torch.no_grad():
        for name in ("w1", "w2", "w3"):
            getattr(experts, name).copy_(getattr(dense, name).weight.expand(2, -1, -1))
    rows = torch.randn(7, 8, dtype=torch.float64)
    torch.testing.assert_close(experts(rows, torch.tensor([3, 4])), dense(rows), rtol=1e-12, atol=1e-13)


def test_the_fastest_way_is_one_that_is_legal_here():
    for dtype, counts, legal in (
        (torch.float64, "uneven", {"loop"}),
        (torch.float64, "even", {"loop", "bmm"}),
        (torch.float32, "even", {"loop", "bmm", "grouped_mm"}),
    ):
        leaves, _ = tensors(COUNTS[counts], dtype)
        assert fastest_method(*leaves[:4], torch.tensor(COUNTS[counts])) in legal
        assert leaves[1].grad is None, "what is measured leaves no gradient"


def test_the_layer_computes_its_experts_in_the_way_of_its_config():
    router = RouterConfig(d_model=8, num_experts=4, top_k=2)
    for method in ("loop", "grouped_mm"):
        assert MoELayer(MoEConfig(router=router, method=method), Topology()).experts.method == method
    with pytest.raises(ValueError, match=r"moe\.method='cutlass' is unknown; use one of auto, loop"):
        MoEConfig(router=router, method="cutlass")
