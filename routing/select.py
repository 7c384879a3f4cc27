"""Select: scores and bias -> the experts of each token, and their weights."""

import torch

from routing.gate import log_scores


def top_k(scores_TE: torch.Tensor, bias_E: torch.Tensor | None, k: int) -> torch.Tensor:
    """The k experts with the largest score + bias of each token; among equals the lowest id wins.

    torch.topk leaves the order of equal values open, and it differs between devices, so the maximum is taken
    k times (torch.max returns the first of equal maxima; no slower than topk for k <= 8 on CPU).

    scores_TE: [T, E], finite;  bias_E: [E] float32, added for the selection only; None = no bias.
    Returns expert_TK: [T, k] int64, best first, no expert twice.   Raises ValueError for k out of 1..E.
    """
    num_experts = scores_TE.shape[1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} is out of 1..{num_experts} (the number of experts)")
    with torch.no_grad():
        left_TE = scores_TE.detach().clone() if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
        expert_TK = torch.empty(scores_TE.shape[0], k, dtype=torch.int64, device=scores_TE.device)
        for choice in range(k):
            best_T = left_TE.max(dim=1, keepdim=True).indices
            expert_TK[:, choice : choice + 1] = best_T
            left_TE.scatter_(1, best_T, -torch.inf)
    return expert_TK


def selected_weights(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, expert_TK: torch.Tensor, *, score: str, normalize: bool
) -> torch.Tensor:
    """The weights of the selected experts, from the scores without bias.

    Normalised weights are s / sum(s) = softmax(log s) over the selected, taken from the logarithms: the sum
    is 1 also where every selected score underflows.

    logits_TE, scores_TE: [T, E];  expert_TK: [T, K] int64.   Returns [T, K], differentiable in the logits.
    """
    if not normalize:
        return scores_TE.gather(1, expert_TK)
    if score == "softmax":  # log s = logit - logsumexp, and the constant drops out of the softmax
        return torch.softmax(logits_TE.gather(1, expert_TK), dim=1)
    return torch.softmax(log_scores(logits_TE, score).gather(1, expert_TK), dim=1)
