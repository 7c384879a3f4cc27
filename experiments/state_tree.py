"""State tree: a loop's state_dict as one JSON text and named tensors, and back, without pickle.

Leaves may be None, bool, int, float, str, numpy arrays and scalars, torch tensors; nodes dict, list, tuple.
"""

from typing import Any, cast

import numpy as np
import torch

_PLAIN = (bool, int, float, str, type(None))


def pack(tree: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree as plain JSON; its arrays go into `tensors` under name/key/key and a number.

    Raises TypeError, with the place, for anything else: an object would have to be pickled.
    """
    if isinstance(tree, _PLAIN) and not isinstance(tree, np.generic):  # numpy's float64 is a float
        return ["plain", tree]
    if isinstance(tree, torch.Tensor):
        return ["tensor", _keep(tree.detach().to("cpu", copy=True).contiguous(), name, tensors)]
    if isinstance(tree, (np.ndarray, np.generic)):
        return _pack_array(np.asanyarray(tree), name, tensors, isinstance(tree, np.generic))
    if isinstance(tree, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], tree)):
        items = cast(dict[str, Any], tree).items()
        return ["dict", {key: pack(value, f"{name}/{key}", tensors) for key, value in items}]
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        entries = enumerate(cast(list[Any], tree))
        return [kind, [pack(value, f"{name}/{number}", tensors) for number, value in entries]]
    raise TypeError(
        f"state {name} is a {type(tree).__name__}, which cannot be saved: a state_dict holds numbers, texts, "
        "arrays and tensors, in dicts with text keys, lists and tuples (of a NamedTuple give _asdict())"
    )


def _pack_array(array: np.ndarray, name: str, tensors: dict[str, torch.Tensor], scalar: bool) -> Any:
    masked = isinstance(array, np.ma.MaskedArray)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or masked:
        what = "a masked array" if masked else f"an array of {array.dtype}"
        raise TypeError(f"state {name} is {what}, which cannot be saved; use numbers of up to 8 bytes")
    own = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")  # a copy: the loop goes on
    return ["number" if scalar else "array", _keep(torch.from_numpy(own), name, tensors)]


def _keep(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Numbered: the keys "a/b" and "a", "b" would share a name otherwise."""
    name = f"{name}#{len(tensors)}"
    tensors[name] = tensor
    return name


def unpack(packed: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `pack` was given.   Raises ValueError for a text of another form."""
    try:
        kind, value = packed
        if kind == "plain":
            return value
        if kind == "tensor":
            return tensors[value]
        if kind in ("array", "number"):
            array = tensors[value].numpy()
            return array[()] if kind == "number" else array
        if kind == "dict":
            return {key: unpack(entry, tensors) for key, entry in value.items()}
        if kind in ("list", "tuple"):
            entries = [unpack(entry, tensors) for entry in value]
            return tuple(entries) if kind == "tuple" else entries
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"no packed state: {packed!r} ({error})") from error
    raise ValueError(f"no packed state: {packed!r}")
