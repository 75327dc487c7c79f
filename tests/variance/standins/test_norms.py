"""The variance of a norm's gradients from a packed copy, row by row and element by element, against simulation."""

import math

import pytest
import torch
from norm_helpers import EPS, exact, rows_of
from statistical import Z

from rmm_linear.ops.norms import NORM_GRADIENTS, PACK_NORM
from rmm_linear.variance.standins.norms import norm_input_variance, norm_weight_variance


@pytest.mark.parametrize(("bits", "centered", "columns"), [(2, True, 96), (2, False, 64), (4, True, 40)])
def test_of_every_row_and_every_element_of_the_weight(bits, centered, columns):
    """Each within Z of its own standard error, which for that many draws is less than a sixth of it."""
    draws, (x, y, weight) = 400, rows_of(columns, torch.float32)
    dx, dgamma, _ = exact(x, y, weight, centered)
    rows, elements = [], []
    for value in range(draws):
        seed, options = torch.tensor([value]), {"bits": bits, "seed": value, "eps": EPS, "centered": centered}
        saved = PACK_NORM(x, bits, seed, EPS, centered)
        found = NORM_GRADIENTS(y, saved, bits, seed, weight, centered=centered)
        # The closed forms hold for the scales of a draw, so each draw is compared with its own.
        rows.append((found.x - dx).square().sum(1) / norm_input_variance(x, y, weight, **options))
        elements.append((found.weight - dgamma).square() / norm_weight_variance(x, y, **options))
    for ratios in (torch.stack(rows), torch.stack(elements)):
        errors = ratios.std(0) / math.sqrt(draws)
        assert ((ratios.mean(0) - 1).abs() < Z * errors).all()
        assert (errors < 1 / 6).all()


def test_scales_with_the_gradient_and_not_with_the_input():
    x, y, weight = rows_of(96)
    options = {"bits": 2, "seed": 3, "eps": 0.0}
    one, other = (norm_input_variance(scale * x, y, weight, **options) for scale in (1.0, 4.0))
    torch.testing.assert_close(other * 16, one)
    torch.testing.assert_close(norm_input_variance(x, 3 * y, weight, **options), 9 * one)
    sums = norm_weight_variance(x, y, **options)
    torch.testing.assert_close(norm_weight_variance(4 * x + 1, 3 * y, **options), 9 * sums)


def test_nothing_to_round_is_no_variance():
    x, y, weight = torch.zeros(3, 70), torch.randn(3, 70), torch.ones(70)
    options = {"bits": 2, "seed": 3, "eps": EPS}
    assert not norm_input_variance(x, y, weight, **options).any()
    assert not norm_weight_variance(x, y, **options).any()
