"""Loop state: states of NamedTuples as plain dicts and lists for a checkpoint, and back.

Beside balancer/loop.py. A checkpoint names no class of this package: the loop that reads it makes a state of
its own first, as a mould.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def to_tree(state: Any) -> Any:
    """Return a state as dicts (of NamedTuples), lists (of tuples) and its arrays, copied, and numbers."""
    if hasattr(state, "_asdict"):
        return {name: to_tree(part) for name, part in state._asdict().items()}
    if isinstance(state, tuple):
        return [to_tree(part) for part in cast("tuple[Any, ...]", state)]
    return cast("NDArray[Any]", state).copy() if isinstance(state, np.ndarray) else state


def from_tree(mould: Any, tree: Any, where: str) -> Any:
    """Return the state that `to_tree` gave the tree of, in the types of `mould`.

    where: its name for errors. Raises ValueError where the tree has other fields, or an array of another
    shape or type: it is of another law, of other sizes or of another version.
    """
    if hasattr(mould, "_asdict"):
        return _named(mould, tree, where)
    if isinstance(mould, tuple):
        parts = cast("tuple[Any, ...]", mould)
        if len(parts) != len(tree):
            raise ValueError(f"the saved {where} has {len(tree)} parts and not {len(parts)}: of another law?")
        named = enumerate(zip(parts, tree, strict=True))
        return tuple(from_tree(part, entry, f"{where}[{number}]") for number, (part, entry) in named)
    if isinstance(mould, np.ndarray):
        return _array(cast("NDArray[Any]", mould), tree, where)
    return type(mould)(tree)


def _named(mould: Any, tree: Any, where: str) -> Any:
    fields = mould._asdict()
    if not isinstance(tree, dict) or cast("dict[str, Any]", tree).keys() != fields.keys():
        raise ValueError(f"the saved {where} is not of the fields {', '.join(fields)}: of another law?")
    items = cast("dict[str, Any]", tree)
    return type(mould)(**{name: from_tree(fields[name], items[name], f"{where}.{name}") for name in fields})


def _array(mould: NDArray[Any], tree: Any, where: str) -> NDArray[Any]:
    array: NDArray[Any] = np.array(tree)
    if array.shape != mould.shape or array.dtype != mould.dtype:
        raise ValueError(
            f"the saved {where} is {array.dtype} {array.shape}, and this loop's {mould.dtype} {mould.shape}: "
            "of other sizes?"
        )
    return array
