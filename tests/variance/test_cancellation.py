"""Variances are differences of two numbers that may be close: they come from products in float64, on every processor.

All tokens have nearly one gradient here: aᵢ = 1 + kᵢ·2⁻¹⁶ with kᵢ from 0 to 7, and yᵢ = 1, so that α is 1 but for 1e-9
and N·d − g is 1.2e-9 of g. That is less than float32 tells apart, in whatever order a BLAS adds: its numbers near g lie
6e-8 of g apart, and none is as close to an entry of XᵀY as would be needed. In float64, sums of N numbers are off by
N·2⁻⁵³ of themselves at most, which leaves three digits of the difference.
"""

from fractions import Fraction

import pytest
import torch

from rmm_linear.estimators import LayerCall, RunningNorms
from rmm_linear.sketches import SAMPLERS, probabilities, row_norms
from rmm_linear.spec import SaveSpec
from rmm_linear.variance import sketch_variance
from rmm_linear.variance.probe.call import noises

BATCH, LENGTH, INPUTS, OUTPUTS = 30, 100, 4, 8
TOKENS, ROWS = BATCH * LENGTH, 1000
STEPS = torch.randint(8, (TOKENS,), generator=torch.Generator().manual_seed(1))
LOST = 1e-9  # of g: what has to be told apart
# P, g, d and what is made of them: four sums over the tokens at most, of which each is off by N·2⁻⁵³ of g.
TOLERANCE = 4 * TOKENS * 2**-53 / LOST


def nearly_one_gradient():
    x = (1 + STEPS * 2.0**-16).unsqueeze(1).expand(TOKENS, INPUTS).contiguous()
    return x, torch.ones(TOKENS, OUTPUTS)


def moments():
    """d and g without rounding; every entry of XᵀY is Σ aᵢ."""
    a = [1 + Fraction(step, 2**16) for step in STEPS.tolist()]
    size = INPUTS * OUTPUTS
    return [size * value**2 for value in a], size * sum(a) ** 2, a


def test_float32_cannot_tell_these_gradients_apart():
    """Else the tests below would pass in float32 too."""
    d, g, a = moments()
    difference = TOKENS * sum(d) - g
    assert LOST < difference / g < 2**-25
    entry = sum(a)
    nearest = Fraction(torch.tensor(float(entry), dtype=torch.float64).float().item())
    assert 2 * abs(nearest - entry) / entry > difference / g  # twice, as the entries are squared


def test_the_probe():
    """N·d − g over tokens and over sequences, and in the sketch of sampled rows."""
    x, y = nearly_one_gradient()
    d, g, a = moments()
    sequences = [INPUTS * OUTPUTS * sum(a[i : i + LENGTH]) ** 2 for i in range(0, TOKENS, LENGTH)]
    over_sequences = (BATCH * sum(sequences) - g) / (BATCH - 1)
    over_tokens = (TOKENS * sum(d) - g) / (TOKENS - 1)
    found = noises(x, y, SaveSpec("rows", ROWS), (BATCH, LENGTH), None)
    assert found.sgd_tokens == pytest.approx(float(over_tokens), rel=TOLERANCE)
    assert found.sgd == pytest.approx(float(over_sequences), abs=TOLERANCE * float(over_tokens))
    assert found.sketch == pytest.approx(float(Fraction(TOKENS - ROWS, ROWS) * over_tokens), rel=TOLERANCE)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_rows_drawn_by_what_an_estimator_expects(kind):
    """Σ d/p − g: the better p is known, the closer the two."""
    x, y = nearly_one_gradient()
    d, g, _ = moments()
    estimator, call = RunningNorms(["position"]), LayerCall((BATCH, LENGTH), x.device)
    for _ in range(3):
        estimator.observe(call, y.norm(dim=1))
    expected = estimator.predict(call)
    p = probabilities(row_norms(x), 0.1, expected)
    shares = [Fraction(chance) for chance in p.tolist()]
    stated = (sum(shares) * sum(map(Fraction.__truediv__, d, shares)) - g) / ROWS
    assert float(stated) / float(g) * ROWS < 2**-25
    spec = SaveSpec(kind, ROWS, uniform_mix=0.1)
    found = noises(x, y, spec, (BATCH, LENGTH), None, expected=expected)
    for noise in (found.sketch, float(sketch_variance(x, y, kind=kind, rows=ROWS, probabilities=p))):
        assert noise == pytest.approx(float(stated), abs=TOLERANCE * LOST * float(g) / ROWS)
