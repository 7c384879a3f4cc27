"""Router: x_TD -> gate -> scores -> selection -> Routing. The file to read first in this package."""

import torch
from torch import nn
from typing_extensions import override

from routing.bias import ExpertBias
from routing.config import RouterConfig
from routing.forced import ForcedSelection
from routing.gate import Gate, scores
from routing.record import Routing, count_experts
from routing.select import selected_weights, top_k


class Router(nn.Module):
    """Top-k router with softmax or sigmoid scores and a selection bias.

    config: the settings;  stream: whose draws a forced selection (`config.forced`) takes, say (layer, rank):
    routers of one seed and one stream draw the same.

    >>> _ = torch.manual_seed(0)
    >>> router = Router(RouterConfig(d_model=8, num_experts=4, top_k=2))
    >>> routing = router(torch.randn(6, 8))
    >>> int(routing.demand_E.sum()), routing.weight_N.view(6, 2).sum(1).allclose(torch.ones(6))
    (12, True)
    """

    def __init__(self, config: RouterConfig, *, stream: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config, self.stream = config, stream
        self.gate = Gate(config.d_model, config.num_experts)
        self.bias = ExpertBias(config.num_experts)
        self.forced = (
            ForcedSelection(
                config.forced,
                seed=config.forced_seed,
                num_experts=config.num_experts,
                num_chosen=config.top_k,
            )
            if config.forced
            else None
        )

    @override
    def forward(self, x_TD: torch.Tensor, token_mask_T: torch.Tensor | None = None) -> Routing:
        """Route a batch; see `route`."""
        return self.route(x_TD, token_mask_T)

    def route(
        self,
        x_TD: torch.Tensor,
        token_mask_T: torch.Tensor | None = None,
        expert_TK: torch.Tensor | None = None,
    ) -> Routing:
        """Route a batch. A plain method: engines that hook a module's forward (ZeRO-3) cannot read a record.

        x_TD: [T, D] rows of the tokens, any float type;  token_mask_T: [T] bool, False = padding, which gets
        no expert and counts nowhere;  expert_TK: [T, K] int64, a selection made before, to be kept; None
        selects, or draws where `config.forced` says so.   Raises ValueError for other shapes.
        """
        config = self.config
        self.check(x_TD, token_mask_T)
        if token_mask_T is not None:  # padding may hold NaN: 0 * NaN would reach the gate's gradient
            x_TD = torch.where(token_mask_T[:, None], x_TD, 0.0)
        logits_TE = self.gate(x_TD)
        scores_TE = scores(logits_TE, config.score)
        if expert_TK is not None:
            expert_TK = expert_TK.clamp(min=0)  # -1 of padding, which the mask below sets again
        elif self.forced is not None:
            expert_TK = self.forced.draw(x_TD.shape[0], x_TD.device, self.stream)
        else:
            expert_TK = top_k(scores_TE, self.bias.bias_E, config.top_k)
        weight_TK = selected_weights(
            logits_TE, scores_TE, expert_TK, score=config.score, normalize=config.normalize
        )
        if config.scale != 1.0:
            weight_TK = weight_TK * config.scale
        if token_mask_T is not None:
            expert_TK = torch.where(token_mask_T[:, None], expert_TK, -1)
            weight_TK = torch.where(token_mask_T[:, None], weight_TK, 0.0)
        demand_E = count_experts(expert_TK, config.num_experts)
        num_tokens = x_TD.shape[0]
        return Routing(
            token_N=torch.arange(num_tokens, device=x_TD.device).repeat_interleave(config.top_k),
            expert_N=expert_TK.reshape(-1),
            weight_N=weight_TK.reshape(-1),
            scores_TE=scores_TE,
            logits_TE=logits_TE,
            demand_E=demand_E,
            routed_E=demand_E,
            num_tokens=num_tokens,
            top_k=config.top_k,
            token_mask_T=token_mask_T,
        )

    def check(self, x_TD: torch.Tensor, token_mask_T: torch.Tensor | None) -> None:
        """Raise ValueError unless x_TD is [T, D] and token_mask_T, if given, [T] bool."""
        if x_TD.ndim != 2 or x_TD.shape[1] != self.config.d_model:
            raise ValueError(
                f"x has shape {tuple(x_TD.shape)}, expected (T, {self.config.d_model}): one row per token"
            )
        if token_mask_T is None:
            return
        if token_mask_T.shape != x_TD.shape[:1] or token_mask_T.dtype != torch.bool:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask_T.shape)} of {token_mask_T.dtype}, expected "
                f"({x_TD.shape[0]},) of torch.bool: True for a real token, False for padding"
            )
