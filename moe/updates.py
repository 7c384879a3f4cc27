"""Updates: whether training moves every parameter. Plain torch; no engine is needed, and none is imported.

    check = UpdateCheck(model)  ->  N optimizer steps  ->  check.unchanged(model)  ->  names, or []

The fault that it finds: an optimizer that was built before modules were swapped, or whose groups lack a
parameter. Training then goes on, and that parameter stays as it was drawn, without a word.

What a rank holds is a part: its own experts, and under ZeRO-3 its partition of everything. A part can stay
equal for a good reason: experts that got no rows, a partition of two elements whose updates round away, and
bfloat16 weights at a small learning rate (w changes where the update is more than about w / 512, its float32
master before that). So a caller that knows of ranks asks for those that moved on none:

    moved_N = check.changed(model)                         # bool, in the order of check.names
    moved_N = maximum over all ranks of moved_N            # one small reduction
    frozen = [name for name, moved in zip(check.names, moved_N.tolist()) if not moved]

and raises for float32 weights, warns for bfloat16 ones, or asks again after more steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_CHUNK = 1 << 20  # elements; their bits are widened to int64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UpdateCheck:
    """Fingerprints of a model's trainable parameters, 16 bytes each, to compare with later ones.

    model: as it is trained, so wrapped by its engine before, if there is one: an engine may cast weights and
    take them apart. A parameter that is no longer there later, or is new, counts as unchanged.

    >>> layer = nn.Linear(3, 2)
    >>> check = UpdateCheck(layer)
    >>> _ = layer.bias.data.add_(1.0)
    >>> check.unchanged(layer)
    ['weight']
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._before_N2 = self._fingerprints(model)

    def changed(self, model: nn.Module) -> torch.Tensor:
        """Whether this rank's part of each parameter differs from then.

        model: the one of the constructor.   Returns [N] bool on the CPU, in the order of `names`; False too
        where this rank holds no element. Raises ValueError where its trainable parameters are others.
        """
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if names != self.names:
            other = sorted(set(names) ^ set(self.names)) or names
            raise ValueError(
                f"{len(names)} trainable parameters, {len(self.names)} when the check was made; different: "
                f"{', '.join(other[:5])}; make a new UpdateCheck after modules were swapped or frozen"
            )
        return (self._fingerprints(model) != self._before_N2).any(dim=1)

    def unchanged(self, model: nn.Module) -> list[str]:
        """Names of the trainable parameters whose part on this rank is bit for bit what it was then.

        One without an element on this rank is not among them. Raises as `changed` does.
        """
        parameters = dict(model.named_parameters())
        changed = self.changed(model).tolist()
        return [
            name
            for name, moved in zip(self.names, changed)
            if not moved and held_part(parameters[name]).numel() > 0
        ]

    def _fingerprints(self, model: nn.Module) -> torch.Tensor:
        """[N, 2] int64 on the CPU, read from the device at once."""
        parameters = dict(model.named_parameters())
        prints = [fingerprint(held_part(parameters[name])) for name in self.names]
        return torch.stack(prints).cpu() if prints else torch.zeros(0, 2, dtype=torch.int64)


def held_part(parameter: Any) -> torch.Tensor:
    """The elements of a parameter that this rank keeps: all, or under ZeRO-3 its partition without padding.

    Returns a tensor of one dimension, which may be empty.
    """
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().reshape(-1)
    # partitions are of equal length; the last ones may reach over the end, or lie behind it
    length, place = partition.numel(), dist.get_rank(parameter.ds_process_group)
    return partition.detach().reshape(-1)[: max(0, min(length, parameter.ds_numel - place * length))]


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares of a flat tensor's bits, as integers modulo 2^64.   Returns [2] int64.

    Exact, so the smallest change of one element shows; the squares tell an element up and another down.
    """
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in tensor.contiguous().view(_BITS[tensor.element_size()]).split(_CHUNK):
        wide = chunk.long()
        found += torch.stack([wide.sum(), (wide * wide).sum()])
    return found
