"""Quantiles of histograms against the definition, and what is refused."""

import numpy as np
import pytest

from balancer.histogram import histogram_quantile


def test_a_quantile_lies_within_its_bin_of_the_sorted_values():
    rng = np.random.default_rng(0)
    edges = np.concatenate([[-1.0], np.sort(rng.uniform(-0.9, 0.9, size=30)), [1.0]])
    values = rng.uniform(-1, 1, size=(3, 4, 500))
    counts = np.stack([[np.histogram(v, edges)[0] for v in layer] for layer in values])
    share = rng.uniform(0, 1, size=(3, 4))
    got = histogram_quantile(counts, edges, share)
    for index in np.ndindex(3, 4):
        exact = np.quantile(values[index], share[index], method="inverted_cdf")
        bin_of = np.searchsorted(edges, exact, side="right") - 1
        assert edges[bin_of] <= got[index] <= edges[bin_of + 1]


def test_nothing_counted_has_no_quantile():
    assert np.isnan(histogram_quantile(np.zeros(2), [0.0, 1.0, 2.0], 0.5))


@pytest.mark.parametrize(
    ("edges", "share", "says"),
    [([0.0, 1.0], 0.5, "3 increasing"), ([0.0, 1.0, 1.0], 0.5, "increasing"), ([0, 1, 2], 1.5, "share")],
)
def test_bad_edges_and_shares_are_refused(edges, share, says):
    with pytest.raises(ValueError, match=says):
        histogram_quantile(np.ones(2), edges, share)
