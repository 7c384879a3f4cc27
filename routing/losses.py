"""Losses of the router, as pure functions. Each is a *sum over tokens*; the docstring has the value per
token.

Sums, so that a global batch gives the same loss and gradient however it is divided over ranks and micro-
batches:
add the sums of all parts and divide once by the valid tokens of the whole global batch. All are taken per
layer:
on logits that were concatenated over layers, opposite imbalances would cancel.
"""

import torch

from routing.gate import log_scores


def load_fraction(tokens_per_expert_E: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The share f_e of the copies that each expert got; uniform where there are none.

    tokens_per_expert_E: [E] int64 counts.   Returns [E] of `dtype`, sum 1.
    """
    total = tokens_per_expert_E.sum()
    uniform = torch.full_like(tokens_per_expert_E, 1.0 / tokens_per_expert_E.shape[0], dtype=dtype)
    return torch.where(total > 0, tokens_per_expert_E.to(dtype) / total.clamp(min=1), uniform)


def router_probs(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    """Scores divided by their sum over the experts: a distribution for every gate.

    For sigmoid gates this is DeepSeek-V3's s'. It is taken from the logarithms, and because it is normalised
    a router cannot lower its loss by making all its scores small.   [T, E] -> [T, E], rows sum to 1.
    """
    return torch.softmax(log_scores(logits_TE, score), dim=-1)


def balance_loss(
    probs_TE: torch.Tensor, fraction_E: torch.Tensor, token_mask_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Switch / GShard balance loss, E * sum_e f_e * sum_t p_te.   Per token 1 at perfect balance.

    1 is not a lower bound: f = (.75, .25) with P = (.385, .615) gives 0.885. The gradient flows through p
    only.
    Source: Fedus et al., Switch Transformers, section 2.2; f here counts all K choices.

    probs_TE: [T, E], rows sum to 1;  fraction_E: [E] shares f_e, from whichever tokens the scope names;
    token_mask_T: [T] bool, False = padding.   Returns a scalar: the sum over this call's valid tokens.
    """
    probs_TE = _drop_padding(probs_TE, token_mask_T)
    return probs_TE.shape[1] * (fraction_E.detach().to(probs_TE.dtype) * probs_TE.sum(dim=0)).sum()


def sequence_balance_loss(
    probs_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    num_sequences: int,
    token_mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Balance loss with f and p of each sequence by itself.   Per token 1 at perfect balance.

    Source: DeepSeek-V3, section 2.1.2 (complementary sequence-wise loss), weighted here by the sequence's
    valid tokens, so that the sum over sequences is a sum over tokens.

    probs_TE: [T, E] with T = num_sequences * length, sequence after sequence;  expert_TK: [T, K] int64, -1 =
    not routed.   Returns a scalar.   Raises ValueError where T is no multiple of num_sequences.
    """
    num_tokens, num_experts = probs_TE.shape
    if num_tokens == 0:
        return probs_TE.sum()
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"{num_tokens} tokens are no multiple of num_sequences={num_sequences}")
    probs_BSE = _drop_padding(probs_TE, token_mask_T).view(num_sequences, -1, num_experts)
    chosen_BN = expert_TK.reshape(num_sequences, -1)
    counts_BE = probs_TE.new_zeros(num_sequences, num_experts + 1)
    bins_BN = torch.where(chosen_BN < 0, num_experts, chosen_BN)
    counts_BE.scatter_add_(1, bins_BN, torch.ones_like(bins_BN, dtype=probs_TE.dtype))
    counts_BE = counts_BE[:, :num_experts]
    fraction_BE = counts_BE / counts_BE.sum(dim=1, keepdim=True).clamp(min=1)
    return num_experts * (fraction_BE * probs_BSE.sum(dim=1)).sum()


def z_loss(logits_TE: torch.Tensor, token_mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Router z-loss, sum_t logsumexp(logits_t)^2: keeps the logits small.   ln(E)^2 at logits 0.

    Source: Zoph et al., ST-MoE, equation 5.   logits_TE: [T, E].   Returns a scalar sum over the valid
    tokens.
    """
    squares_T = torch.logsumexp(logits_TE, dim=1).square()
    return squares_T.sum() if token_mask_T is None else torch.where(token_mask_T, squares_T, 0.0).sum()


def _drop_padding(values_TE: torch.Tensor, token_mask_T: torch.Tensor | None) -> torch.Tensor:
    """Zero the rows of padding tokens (where, not *: padding may hold NaN)."""
    return values_TE if token_mask_T is None else torch.where(token_mask_T[:, None], values_TE, 0.0)
