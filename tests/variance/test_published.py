"""The published formulas: what they are, and where they are violated."""

import pytest
from helpers import heavy_tailed
from statistical import ROWS, counterexample, padded

from rmm_linear.variance import correlation, paper_bound, paper_sketch_variance, sgd_variance, sketch_variance


def test_the_published_theorem_is_violated():
    """Two tokens with the same gradient, or nearly: the minibatch is quiet, the sketch is not, for every K."""
    x, y = counterexample()
    assert sgd_variance(x, y) == 0
    assert paper_sketch_variance(x, y, rows=1) == 2.25
    assert float(paper_bound(x, y)) == 2.5625
    assert float(sketch_variance(x, y, kind="gaussian", rows=1)) == 5 * 1.25 + 4  # P + g, not P − g
    assert float(sketch_variance(x, y, kind="rademacher", rows=1)) == 5 * 1.25 + 4 - 2 * 2
    x, y = counterexample(0.6)  # and with a minibatch noise above zero
    ratio = paper_sketch_variance(x, y, rows=1) / sgd_variance(x, y)  # K/(N−1) is 1
    assert float(ratio) > 10 * float(paper_bound(x, y))


def test_the_published_variance_is_too_small_by_a_factor_of_alpha():
    x, y, _ = padded()
    alpha = float(correlation(x, y))
    exact = float(sketch_variance(x, y, kind="gaussian", rows=ROWS))
    assert float(paper_sketch_variance(x, y, rows=ROWS)) == pytest.approx(exact * (1 - alpha) / (1 + alpha))
    one = heavy_tailed(1, 5, 3)  # one token: P = g
    assert float(correlation(*one)) == pytest.approx(1)
    exact = float(sketch_variance(*(part.repeat(2, 1) for part in one), kind="gaussian", rows=1))
    assert float(paper_sketch_variance(*one, rows=1)) == pytest.approx(0, abs=1e-9 * exact)
