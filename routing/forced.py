"""Forced: a selection that does not look at the scores, for experiments with a given skew of the load.

    RouterConfig.forced, "zipf:1.0" -> log_shares -> ForcedSelection.draw -> expert_TK [T, K]

It stands in the place of the top-k of score + bias. The weights stay the router's own, at the experts that
were drawn, so its gradients flow as ever; the selection bias has no effect.
"""

import hashlib

import torch
from torch import nn

from routing.select import top_k
from routing.shares import log_shares


class ForcedSelection(nn.Module):
    """Draws K distinct experts for every token, as a distribution over the experts says.

    Gumbel top-k: the K experts with the largest log share + Gumbel noise, which are K draws one after another
    without putting back. The first follows the shares exactly. For K > 1 the load over all K choices is
    *flatter* than the shares: an expert is in a token at most once, so a share over 1 / K cannot be reached.
    Source: Kool et al., Stochastic beams and where to find them: the Gumbel-top-k trick.

    forced:      as in RouterConfig;  seed: any whole number;  num_experts, num_chosen: E, K.
    Raises ValueError for a form that is unknown or does not fit E and K (`log_shares`).

    `draws` counts the training forwards and is saved with the model, so that a resumed run goes on with the
    draws that it would have had. It is the same on all ranks: what tells them apart is the stream.

    >>> ForcedSelection("only:2-3", seed=0, num_experts=4, num_chosen=2).draw(3).sort(1).values.tolist()
    [[2, 3], [2, 3], [2, 3]]
    """

    draws: torch.Tensor

    def __init__(self, forced: str, *, seed: int, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.seed, self.num_chosen = seed, num_chosen
        # no buffer: a cast of the model would round it
        self._log_share_E = torch.tensor(log_shares(forced, num_experts, num_chosen), dtype=torch.float64)
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self._known: tuple[torch.Tensor, int, int] | None = None

    @torch.no_grad()
    def draw(
        self, num_tokens: int, device: torch.device | str = "cpu", stream: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The experts of this forward, from the seed, the stream and the number of training forwards before.

        In float64 on the CPU, in float32 on a device: other draws, and there an expert with a share below
        about 1e-6 comes too seldom, for u has 24 bits. Advances `draws` in training only: evaluation changes
        nothing of what training draws.
        stream: what draws for itself, say (layer, rank).   Returns expert_TK [T, K] int64, as drawn, an
        "always" expert first, no expert twice.   Raises RuntimeError in a backward: that is a checkpoint's
        second forward, which must have the draws of its first.
        """
        if self.training and torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError(
                "a forced selection cannot be drawn again in a backward: the second forward of a checkpoint "
                "needs the experts of the first; use moe.recompute.checkpoint, which keeps them"
            )
        device = torch.device(device)
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        if self._log_share_E.device != device or self._log_share_E.dtype != dtype:
            self._log_share_E = self._log_share_E.to(device, dtype)
        generator = torch.Generator(device).manual_seed(self._seed_of(stream))
        size = (num_tokens, self._log_share_E.shape[0])
        u_TE = torch.rand(size, dtype=dtype, device=device, generator=generator)  # 0 <= u < 1
        # Gumbel noise is -log(-log u); u = 0 would be -inf, and NaN at an expert that every token has
        minus_noise_TE = u_TE.clamp_(min=torch.finfo(dtype).tiny).log_().neg_().log_()
        if self.training:
            self._advance()
        return top_k(self._log_share_E - minus_noise_TE, None, self.num_chosen)

    def _seed_of(self, stream: tuple[int, ...]) -> int:
        text = "/".join(map(str, (self.seed, *stream, self._count())))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _count(self) -> int:
        """The value of `draws`, read only where another hand has written it: a read waits for the device."""
        known = self._known
        if known is None or known[0] is not self.draws or known[1] != self.draws._version:
            known = (self.draws, self.draws._version, int(self.draws))
            self._known = known
        return known[2]

    def _advance(self) -> None:
        count = self._count() + 1
        self.draws.fill_(count)
        self._known = (self.draws, self.draws._version, count)
