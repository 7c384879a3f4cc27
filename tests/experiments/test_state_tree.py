"""A loop's state as JSON and tensors: everything comes back as it was, nothing is pickled."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.state_tree import pack, unpack


def there_and_back(tree, tmp_path):
    tensors = {}
    packed = json.loads(json.dumps(pack(tree, "loop", tensors)))
    save_file(tensors, tmp_path / "arrays.safetensors")
    return unpack(packed, load_file(tmp_path / "arrays.safetensors"))


def test_numbers_texts_and_nesting_come_back(tmp_path):
    tree = {"a": 1, "b": [True, None, "text", 0.1], "c": (1, {"d": []}), "inf": float("inf")}
    assert there_and_back(tree, tmp_path) == tree


@pytest.mark.parametrize("dtype", ["int64", "float32", "float64", "bool", "uint8"])
def test_arrays_come_back_with_their_type_and_shape(tmp_path, dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype).T  # not contiguous
    back = there_and_back({"x": array, "y": array[0, 0], "z": np.zeros((0, 2), dtype)}, tmp_path)
    assert back["x"].dtype == array.dtype
    np.testing.assert_array_equal(back["x"], array)
    assert (type(back["y"]), back["y"]) == (type(array[0, 0]), array[0, 0])
    assert back["z"].shape == (0, 2)


def test_tensors_come_back_bfloat16_too(tmp_path):
    tensor = torch.randn(3, 2).bfloat16().t()
    back = there_and_back([tensor, torch.tensor(3)], tmp_path)
    assert back[0].dtype == torch.bfloat16
    assert torch.equal(back[0], tensor)
    assert back[1].item() == 3


def test_keys_with_slashes_do_not_share_a_name(tmp_path):
    back = there_and_back({"a/b": np.array([1]), "a": {"b": np.array([2])}}, tmp_path)
    assert (back["a/b"].tolist(), back["a"]["b"].tolist()) == ([1], [2])


def test_the_other_byte_order_comes_back_as_numbers(tmp_path):
    assert there_and_back({"x": np.array([1, 300], dtype=">i8")}, tmp_path)["x"].tolist() == [1, 300]


def test_what_is_packed_is_a_copy():
    array, tensors = np.zeros(2), {}
    pack({"x": array}, "loop", tensors)
    array += 1
    assert tensors["loop/x#0"].tolist() == [0.0, 0.0]


class Pair(NamedTuple):
    first: int


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [object()]}, r"state loop/a/0 is a object, which cannot be saved"),
        ({1: 2}, r"state loop is a dict, which cannot be saved.*text keys"),
        (Pair(first=1), r"state loop is a Pair.*_asdict"),
        ({"s": np.array(["x"])}, r"state loop/s is an array of <U1"),
        ({"o": np.array([None])}, r"state loop/o is an array of object"),
        ({"l": np.zeros(1, np.longdouble)}, r"state loop/l is an array of float128"),
        ({"m": np.ma.masked_array([1, 2], [True, False])}, r"state loop/m is a masked array"),
    ],
)
def test_objects_are_refused_with_their_place(tree, message):
    with pytest.raises(TypeError, match=message):
        pack(tree, "loop", {})


@pytest.mark.parametrize("packed", [None, [], ["dict"], ["shape", 1], ["tensor", "gone"], ["dict", 3]])
def test_texts_of_another_form_are_refused(packed):
    with pytest.raises(ValueError, match="no packed state"):
        unpack(packed, {})
