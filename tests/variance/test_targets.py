"""The ratio for a target, and the batch that a noise is worth."""

import math

import pytest
import torch
from statistical import ROWS, TOKENS, counterexample, padded

from rmm_linear.sketches import KINDS, variance
from rmm_linear.variance import effective_batch, required_ratio, sgd_variance, sketch_variance


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_required_ratio_is_quiet_enough_and_one_row_less_is_not(kind, bits, masked):
    x, y, mask = padded()
    given = {"kind": kind, "bits": bits, "mask": mask if masked else None}
    limit = 1.5 * float(sgd_variance(x, y, samples=(10, 4)))
    rows = float(required_ratio(x, y, target=1.5, samples=(10, 4), **given)) * TOKENS
    assert rows == pytest.approx(round(rows))
    assert float(sketch_variance(x, y, rows=round(rows), **given)) <= limit
    assert round(rows) > 1
    assert float(sketch_variance(x, y, rows=round(rows) - 1, **given)) > limit


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"countsketch", "wta"}))
def test_required_ratio_is_the_smallest(kind):
    x, y, _ = padded()
    limit = 2.0 * float(sgd_variance(x, y))
    smallest = next(k for k in range(1, TOKENS + 1) if float(variance(x, y, kind=kind, rows=k)) <= limit)
    assert float(required_ratio(x, y, kind=kind, bits=None, target=2.0)) == smallest / TOKENS


def test_required_ratio_says_when_no_ratio_suffices():
    """Rounding remains when every row is stored; without it, storing every row is exact."""
    x, y, mask = padded()
    assert required_ratio(x, y, kind="rows", bits=2, target=1e-6) == math.inf
    assert required_ratio(x, y, kind="rows", bits=None, target=1e-9) == 1
    masked = required_ratio(x, y, kind="rows", bits=None, target=1e-9, mask=mask)
    assert float(masked) * TOKENS == int(mask.sum())  # as soon as all tokens that count are stored
    x, y = counterexample()
    assert required_ratio(x, y, kind="gaussian", bits=None, target=1.0) == 1  # no minibatch noise to hide behind
    with pytest.raises(ValueError, match="target must be positive, got 0"):
        required_ratio(x, y, kind="rows", bits=None, target=0)


@pytest.mark.parametrize(("kind", "masked"), [("rademacher", True), ("hadamard", False), ("countsketch", False)])
def test_required_ratio_finds_a_quiet_ratio_below_rows_that_are_stored_as_they_are(kind, masked):
    """In 2 bits the noise is not monotone: where tokens are long in X and Y at once, storing all of them is louder."""
    generator = torch.Generator().manual_seed(20)
    length = torch.exp(1.2 * torch.randn(64, 1, generator=generator, dtype=torch.float64))
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64) * length
    y = torch.randn(64, 4, generator=generator, dtype=torch.float64) * length
    mask = torch.arange(64) % 4 > 0 if masked else torch.ones(64, dtype=torch.bool)
    y *= mask.unsqueeze(1)
    given = {"kind": kind, "bits": 2, "mask": mask if masked else None}
    sgd = float(sgd_variance(x, y, samples=(16, 4)))
    noises = [float(sketch_variance(x, y, rows=rows, **given)) / sgd for rows in range(1, 129)]
    for share in (0.3, 0.7, 1.5):
        target = min(noises) + share * (noises[-1] - min(noises))
        quiet = [rows for rows, noise in enumerate(noises, start=1) if noise <= target]
        found = round(64 * float(required_ratio(x, y, target=target, samples=(16, 4), **given)))
        assert found in quiet
        assert found - 1 not in quiet
        assert found <= quiet[0] + 8  # the rounding term of a few seeds wavers from K to K
    if kind != "countsketch":  # most rows of which hold few tokens long before
        assert min(noises) < 0.7 * noises[-1]


def test_effective_batch_has_the_noise_of_both_together():
    x, y, _ = padded()
    sgd, sketch = sgd_variance(x, y, samples=(10, 4)), sketch_variance(x, y, kind="countsketch", rows=ROWS)
    batch = effective_batch(10, sketch / sgd)
    torch.testing.assert_close(sgd * 10 / batch, sgd + sketch)
    assert effective_batch(10, 0.0) == 10
    assert effective_batch(10, math.inf) == 0
    with pytest.raises(ValueError, match="batch must be at least 1 sample, got 0"):
        effective_batch(0, 1.0)
