"""Which parameters training has not moved: by their bits, on the part of them that a rank holds."""

import pytest
import torch
from torch import nn

from moe.testing import run_ranks
from moe.updates import UpdateCheck, fingerprint, held_part


class Small(nn.Module):
    """A late layer that an optimizer may lack, and a bias of one element, which one rank of two holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.late = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.late(torch.tanh(self.first(x))))).square().mean()


def test_a_parameter_in_no_group_of_the_optimizer_is_named_and_no_other():
    model = Small()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "late.weight"], lr=0.1)
    check = UpdateCheck(model)
    assert check.unchanged(model) == check.names == [name for name, _ in model.named_parameters()]
    for _ in range(2):
        model(torch.randn(4, 3)).backward()
        optimizer.step()
    assert check.unchanged(model) == ["late.weight"]
    assert check.changed(model).tolist() == [name != "late.weight" for name in check.names]


def test_an_optimizer_built_before_a_module_was_swapped_leaves_the_new_one_behind():
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.late = nn.Linear(5, 5, bias=False)
    check = UpdateCheck(model)
    model(torch.randn(4, 3)).backward()
    optimizer.step()
    assert check.unchanged(model) == ["late.weight"]


def test_a_parameter_without_requires_grad_is_not_asked_for():
    model = Small()
    model.late.requires_grad_(False)
    assert UpdateCheck(model).names == ["first.weight", "first.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_smallest_change_shows_also_where_a_sum_would_stay(dtype):
    weight = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint(weight.reshape(-1))
    assert torch.equal(fingerprint(weight.clone().reshape(-1)), before)
    bits = weight.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    bits[0, 0] += 1
    assert not torch.equal(fingerprint(weight.reshape(-1)), before)
    bits[5, 6] -= 1
    assert not torch.equal(fingerprint(weight.reshape(-1)), before)


def test_a_tensor_longer_than_a_chunk_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr("moe.updates._CHUNK", 4)
    weight = torch.arange(10.0)
    before = fingerprint(weight)
    bits = weight.view(torch.int32).tolist()
    modulo = [number % 2**64 for number in before.tolist()]
    assert modulo == [sum(bits), sum(number**2 for number in bits) % 2**64]
    weight[9] = -9.0
    assert not torch.equal(fingerprint(weight), before)


def test_a_tensor_without_elements_is_neither_changed_nor_named():
    model = nn.ParameterDict({"none": torch.zeros(0, 4), "some": torch.zeros(4)})
    check = UpdateCheck(model)
    assert check.unchanged(model) == ["some"]
    assert check.changed(model).tolist() == [False, False]


def test_one_expert_that_moves_moves_the_tensor_of_all():
    model = nn.ParameterDict({"w1": torch.randn(4, 3, 2)})
    check = UpdateCheck(model)
    with torch.no_grad():
        model["w1"][3] += 1.0
    assert check.unchanged(model) == []


def test_a_model_with_other_parameters_is_refused():
    check = UpdateCheck(Small())
    other = Small()
    other.late = nn.Linear(5, 5)
    with pytest.raises(ValueError, match=r"6 trainable .*, 5 when .*: late\.bias; make a new"):
        check.changed(other)


def engine_rank(rank, world, cases):
    """For every case: names unchanged here, names changed on some rank, elements of last.bias held here."""
    import deepspeed
    import torch.distributed as dist

    from moe import zero

    zero.init_distributed("gloo")
    found = []
    for stage, frozen in cases:
        model = Small()
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != frozen], lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        check = UpdateCheck(model)
        for step in range(2):
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(rows))
            engine.step()
        moved_N = check.changed(model).int()
        dist.all_reduce(moved_N, op=dist.ReduceOp.MAX)
        nowhere = [name for name, moved in zip(check.names, moved_N.tolist()) if not moved]
        found.append((check.unchanged(model), nowhere, held_part(model.last.bias).numel()))
        engine.destroy()
    return found


@pytest.mark.dist
@pytest.mark.deepspeed
def test_under_an_engine_every_rank_names_the_frozen_parameter_and_no_padding():
    cases = [(stage, frozen) for stage in (0, 3) for frozen in ("late.weight", "last.bias", "")]
    everybody = run_ranks(engine_rank, 2, cases)
    for number, (stage, frozen) in enumerate(cases):
        for rank, outcomes in enumerate(everybody):
            unchanged, nowhere, bias_elements = outcomes[number]
            assert nowhere == [name for name in [frozen] if name], (stage, frozen)
            # under ZeRO-3 rank 1 holds padding of the bias, and nothing of it to judge by
            assert bias_elements == (0 if stage == 3 and rank == 1 else 1)
            assert unchanged == (nowhere if frozen != "last.bias" or bias_elements else []), (stage, rank)
