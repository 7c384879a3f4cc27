"""LoadSample: the load of one optimizer step, and what else the router said of it. Made by moe/meter.py."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """The load of one optimizer step, summed over ranks and micro-batches.

    A *batch* is what one rank routes in one forward of the layers; padding is in nothing. G are the EP groups
    of the job, in the order of their ranks; B the bins of the histograms.

    step:                 optimizer step that it belongs to
    tokens_per_expert_LE: [L, E] int64, copies that the router wanted to send to each expert
    rows_to_rank_LP:      [L, world] int64, rows that each rank's experts computed
    balance_loss_L:       [L] float64, balance loss per token (1 at balance), without coefficient
    z_loss_L:             [L] float64, router z-loss per token, without coefficient
    num_tokens:           valid tokens of the step, each once
    extra_X:              [X] float64, the caller's own figures, summed over ranks in the same reduction

    squares_LE:           [L, E] float64, sum over the batches of (copies of this batch)^2: of each rank's own
                          counts, not of their sum over a group, so that a step without accumulation has
                          as many draws as ranks. With r = tokens_per_expert / num_tokens, the over-dispersion
                          of the counts is phi = (squares - r^2 tokens_squared) /
                          (r (1 - r) (num_tokens - tokens_squared / num_tokens)), and the counts of T more
                          tokens, of one rank or of all, have the variance phi r (1 - r) T as long as ranks
                          draw sequences of their own. 0 / 0 where the step was one batch
    tokens_squared:       sum over the batches of (valid tokens)^2
    peak_rows_LG:         [L, G] int64, sum over the micro-batches of the most rows that any rank of the group
                          computed in each: what the group waits for. None where the layers did not say
    largest_rows_LG:      [L, G] int64, the most of them in any one micro-batch: what must fit in memory

    In steps that score statistics are due (None in between, `LoadMeter`):
    score_sum_LE:         [L, E] float64, sum over the tokens of the router's scores, without bias
    score_histogram_LEB:  [L, E, B] int64, tokens by score; `moe.meter_stats.score_quantile` reads it
    score_edges_X:        [B + 1] float64, the bins' edges, always the same (`meter_stats.score_edges`)

    In steps that swap counts are due (None in between):
    swaps_LE:             [L, E] int64, tokens whose K-th and (K+1)-th expert by score + bias lie less than
                          swap_delta apart and which have this expert as one of the two. swaps_LE /
                          (2 num_tokens swap_delta) is the diagonal of dn/db, the gain of the selection bias
    wide_swaps_LE:        the same for 2 swap_delta: 2 a(delta) - a(2 delta) takes most of the bias of a
                          finite delta away

    In steps that pairs are due:
    swap_pairs_LEE:       [L, E, E] int64, the same tokens by (K-th, (K+1)-th) expert: row sums + column sums
                          are swaps_LE;  wide_swap_pairs_LEE: for 2 swap_delta
    swap_delta:           delta, in units of score; there with either of the two

    In steps that margins are due:
    margin_histogram_LEB: [L, E, B] int64, tokens by margin: score + bias, less the K-th largest score + bias
                          among the other experts; the bins above 0 hold tokens_per_expert_LE, all others lie
                          below 0 (`meter_stats.add_margins`)
    margin_edges_X:       [B + 1] float64, always the same (`meter_stats.margin_edges`)

    In steps that a sample is due:
    sample_LME:           [L, M, E] float64, scores without bias of the first sample_tokens valid tokens of
                          each rank, rank by rank, from its first batch that has any; a rank with fewer in it
                          repeats them. A rank that had none in the whole step is left out: M = sample_tokens
                          * the ranks that had one

    In every step, over the valid tokens:
    logit_rms_L:          [L] float64, root mean square over tokens and experts of the router's logits, less
                          the token's mean over the experts: how far the router tells experts apart
    confidence_L:         [L] float64, mean of the largest score over the sum of the token's scores: 1/E for a
                          router that knows nothing, 1 for one that is sure. Both 0 without a token
    """

    step: int
    tokens_per_expert_LE: np.ndarray
    rows_to_rank_LP: np.ndarray
    balance_loss_L: np.ndarray
    z_loss_L: np.ndarray
    num_tokens: int
    extra_X: np.ndarray
    squares_LE: np.ndarray | None = None
    tokens_squared: int | None = None
    peak_rows_LG: np.ndarray | None = None
    largest_rows_LG: np.ndarray | None = None
    score_sum_LE: np.ndarray | None = None
    score_histogram_LEB: np.ndarray | None = None
    score_edges_X: np.ndarray | None = None
    swaps_LE: np.ndarray | None = None
    wide_swaps_LE: np.ndarray | None = None
    swap_delta: float | None = None
    swap_pairs_LEE: np.ndarray | None = None
    wide_swap_pairs_LEE: np.ndarray | None = None
    margin_histogram_LEB: np.ndarray | None = None
    margin_edges_X: np.ndarray | None = None
    sample_LME: np.ndarray | None = None
    logit_rms_L: np.ndarray | None = None
    confidence_L: np.ndarray | None = None
