"""Quantiles of counted histograms: how a bias law reads where the scores of an expert lie.

Beside the flow of the bias loop: it knows bins and edges, and nothing of experts.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def histogram_quantile(count_XB: NDArray[Any], edges_X: ArrayLike, share_X: ArrayLike) -> NDArray[np.float64]:
    """Return the value below which a share of what was counted lies, spread evenly within a bin.

    count_XB: [..., B] counts. edges_X: [B + 1] increasing edges, finite. share_X: [...] in [0, 1], broadcast.
    Returns [...] float64, off by less than the width of the bin; NaN where nothing was counted. Raises
    ValueError for edges that do not fit the bins or do not increase, or a share out of range.

    >>> float(histogram_quantile(np.array([0, 4]), [0.0, 1.0, 3.0], 0.25))
    1.5
    """
    count_XB = np.asarray(count_XB)
    edges = np.asarray(edges_X, dtype=np.float64)
    num_bins = count_XB.shape[-1]
    if edges.shape != (num_bins + 1,) or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges of {num_bins} bins are {num_bins + 1} increasing numbers, not {edges.shape}")
    share = np.broadcast_to(np.asarray(share_X, dtype=np.float64), count_XB.shape[:-1])
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError("a share must lie in [0, 1]; 0.5 is the median")
    upto_XB = np.cumsum(count_XB, axis=-1, dtype=np.float64)
    wanted_X1 = share[..., None] * upto_XB[..., -1:]
    index_X1 = np.minimum((upto_XB < wanted_X1).sum(axis=-1, keepdims=True), num_bins - 1)
    inside_X1 = np.take_along_axis(count_XB, index_X1, axis=-1).astype(np.float64)
    before_X1 = np.take_along_axis(upto_XB, index_X1, axis=-1) - inside_X1
    part_X1 = np.divide(wanted_X1 - before_X1, inside_X1, out=np.zeros_like(inside_X1), where=inside_X1 > 0)
    value_X1 = edges[index_X1] + part_X1 * (edges[index_X1 + 1] - edges[index_X1])
    return np.where(upto_XB[..., -1:] > 0, value_X1, np.nan)[..., 0]


def finite_edges(edges_X: ArrayLike, num_bins: int) -> NDArray[np.float64]:
    """Return the edges of margins as [B + 1] float64, an infinite outermost one at its neighbour.

    Raises ValueError for edges that do not fit num_bins or do not increase.
    """
    edges_X = np.array(edges_X, dtype=np.float64)
    if edges_X.shape != (num_bins + 1,) or not (edges_X[1:] > edges_X[:-1]).all():
        raise ValueError(
            f"margin_edges_X {edges_X.shape} must be {num_bins + 1} increasing numbers, the edges of "
            f"{num_bins} bins"
        )
    if np.isinf(edges_X[0]):
        edges_X[0] = edges_X[1]
    if np.isinf(edges_X[-1]):
        edges_X[-1] = edges_X[-2]
    return edges_X
