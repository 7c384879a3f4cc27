"""ExpertBias: float32 whatever the model is cast to, set from outside, finite, no gradient."""

import numpy as np
import pytest
import torch
from torch import nn

from routing import ExpertBias, Router, RouterConfig

# needs 20 bits: bfloat16 (8) and float16 (11) would round it
FINE = 1 + 2.0**-19


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_of_the_model_neither_changes_nor_rounds_the_bias(dtype):
    model = nn.Sequential(nn.Linear(2, 2), ExpertBias(3))
    bias = model[1]
    bias.set(torch.tensor([FINE, -FINE, 0.0]))
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    assert bias.bias_E.dtype == torch.float32
    assert bias.bias_E.tolist() == [FINE, -FINE, 0.0]
    assert list(model[1].state_dict()) == ["bias_E"]


def test_the_bias_of_a_cast_router_still_can_be_set():
    router = Router(RouterConfig(d_model=4, num_experts=3, top_k=1)).bfloat16()
    router.bias.set(torch.tensor([0.0, FINE, 0.0]))
    assert float(router.bias.bias_E[1]) == FINE
    assert router(torch.zeros(5, 4, dtype=torch.bfloat16)).demand_E.tolist() == [0, 5, 0]


def test_set_copies_its_argument():
    bias, given = ExpertBias(2), torch.tensor([1.0, 2.0])
    bias.set(given)
    given.zero_()
    assert bias.bias_E.tolist() == [1.0, 2.0]


def test_a_bias_in_float64_is_rounded_to_float32():
    bias, given = ExpertBias(3), np.array([1 + 2.0**-40, -FINE, 1e-30])
    bias.set(torch.from_numpy(given))
    assert bias.bias_E.dtype == torch.float32 and bias.bias_E.tolist() == [
        1.0,
        -FINE,
        float(np.float32(1e-30)),
    ]
    bias.set(torch.tensor([2.0, 0.5, -1.0], dtype=torch.bfloat16))
    assert bias.bias_E.tolist() == [2.0, 0.5, -1.0]


def test_a_number_beyond_float32_is_refused_and_the_old_bias_stays():
    bias = ExpertBias(2)
    with pytest.raises(ValueError, match=r"bias of expert 1 is 1e\+39, expected a finite number of float32"):
        bias.set(torch.tensor([0.0, 1e39], dtype=torch.float64))
    assert bias.bias_E.tolist() == [0.0, 0.0]


def test_a_bias_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(4,\) \(one per expert\)"):
        ExpertBias(4).set(torch.zeros(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bias_that_is_not_finite_is_refused_and_the_old_one_stays(value):
    bias = ExpertBias(3)
    bias.set(torch.ones(3))
    with pytest.raises(ValueError, match=rf"bias of expert 1 is {value}, expected a finite number"):
        bias.set(torch.tensor([0.0, value, 0.0]))
    assert bias.bias_E.tolist() == [1.0, 1.0, 1.0]


def test_the_bias_is_saved_and_is_no_parameter():
    bias = ExpertBias(3)
    assert list(bias.state_dict()) == ["bias_E"]
    assert list(bias.parameters()) == []
