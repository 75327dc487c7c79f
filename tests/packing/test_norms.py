"""Gradients of a norm from one packed copy: unbiased, with the stated variance, on every backend and every shape."""

import math
from unittest import mock

import pytest
import torch
from cases import light_and_heavy
from norm_helpers import EPS, ROWS, exact, rows_of
from statistical import Z, assert_variance, z_scores

from rmm_linear.ops.norms import NORM_GRADIENTS, PACK_NORM, normalize_and_pack
from rmm_linear.packing import WIDTHS, norms
from rmm_linear.variance.simulation import Simulation
from rmm_linear.variance.standins.norms import norm_input_variance, norm_weight_variance

INDEX = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11])
KINDS = pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])


def seed(value):
    return torch.tensor([value])


def draw(x, y, weight, bits, centered, value, index=None):
    saved = PACK_NORM(x, bits, seed(value), EPS, centered, index)
    return NORM_GRADIENTS(y, saved, bits, seed(value), weight, centered=centered, index=index)


def padded(y, index):
    return y if index is None else torch.zeros_like(y).index_copy_(0, index, y[index])


@light_and_heavy(40, 4_000)
@KINDS
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("columns", [64, 96, 40])
@pytest.mark.parametrize("bits", WIDTHS)
def test_unbiased_with_the_stated_variance(bits, columns, masked, centered, draws):
    """Float32 data, as in training; errors of rounding are 1e-7 of the gradient, far below the noise at 8 bits."""
    x, y, weight = rows_of(columns, torch.float32)
    index = INDEX if masked else None
    y = padded(y, index)
    dx, dgamma, dbeta = exact(x, y, weight, centered)
    errors, sums, stated, stated_sums = [], [], [], []
    kept = torch.arange(ROWS) if index is None else index
    for value in range(draws):
        found = draw(x, y, weight, bits, centered, value, index)
        errors.append(found.x.double() - dx)
        sums.append(found.weight.double() - dgamma)
        options = {"bits": bits, "seed": value, "eps": EPS, "centered": centered}
        stated.append(norm_input_variance(x[kept], y[kept], weight, **options).sum())
        stated_sums.append(norm_weight_variance(x[kept], y[kept], **options).sum())
        torch.testing.assert_close(found.bias.double(), dbeta, rtol=1e-6, atol=1e-6 * float(y.abs().sum(0).max()))
    for error, gradient, variances in ((errors, dx, stated), (sums, dgamma, stated_sums)):
        error, variance = torch.stack(error), torch.stack(variances)
        assert abs(float(z_scores((error * gradient).flatten(1).sum(1)))) < Z
        assert draws * float(error.mean(0).square().sum() / variance.mean()) < Z**2
        # The closed form holds for the scales of a draw, so each draw is compared with its own.
        excess = error.square().flatten(1).sum(1) / variance - 1
        spread = Simulation(1 + float(excess.mean()), float(excess.std()) / math.sqrt(draws), draws)
        assert_variance(spread, 1.0, widest=0.2)


def biased_by(correct, columns):
    """z of the mean of ⟨dX̂ − dX, v ∘ g⟩, the direction that one copy read twice is biased in."""
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, weight = x.sign() * 0.1 + 0.5, torch.ones(columns, dtype=torch.float64)
    dx, dgamma, _ = exact(x, y, weight, True)
    values, sums = [], []
    no_variance = mock.patch.object(
        norms, "element_variance", lambda scales, columns: torch.zeros(len(scales), columns)
    )
    for value in range(200):
        saved = norms.pack_norm(x, 2, seed(value), EPS)
        v = norms.element_variance(saved.scales, columns)
        if correct:
            found = norms.norm_gradients(y, saved, 2, seed(value), weight)
        else:
            with no_variance:
                found = norms.norm_gradients(y, saved, 2, seed(value), weight)
        values.append(((found.x - dx) * v * y).sum())
        sums.append(((found.weight - dgamma) * dgamma).sum())
    return float(z_scores(torch.stack(values))), float(z_scores(torch.stack(sums)))


@pytest.mark.parametrize("columns", [8, 64], ids=["unrotated", "rotated"])
def test_the_mean_is_exact_because_the_variance_of_the_copy_is_taken_out(columns):
    """At 2 bits the same test fails by far for the formula without it, which reads one copy twice."""
    along, sums = biased_by(True, columns)
    assert abs(along) < Z
    assert abs(sums) < Z
    assert biased_by(False, columns)[0] < -Z


@KINDS
@pytest.mark.parametrize("bits", WIDTHS)
def test_constant_rows_have_the_eps_alone(bits, centered):
    """Their h is 0, exactly."""
    x, y, weight = rows_of(96, torch.float32)
    x[5] = 0.0
    if centered:
        x[6] = 7.0
    saved = PACK_NORM(x, bits, seed(0), EPS, centered)
    found = NORM_GRADIENTS(y, saved, bits, seed(0), weight, centered=centered)
    for row in (5, 6) if centered else (5,):
        torch.testing.assert_close(saved.rstd[row], torch.tensor(1 / math.sqrt(EPS)))
        g = y[row] * weight
        g = (g - g.mean() if centered else g) / math.sqrt(EPS)
        torch.testing.assert_close(found.x[row], g, rtol=1e-5, atol=1e-5 * float(g.abs().max()))


def test_float64_is_computed_in_float64():
    x, y, weight = rows_of(96)
    dx, _, dbeta = exact(x, y, weight, True)
    found = draw(x, y, weight, 8, True, 0)
    assert found.x.dtype == found.bias.dtype == torch.float64
    torch.testing.assert_close(found.bias, dbeta, rtol=1e-14, atol=1e-14 * float(y.abs().sum(0).max()))
    assert float((found.x - dx).norm() / dx.norm()) < 0.01


def test_other_widths_are_refused():
    for pack in (PACK_NORM, norms.pack_norm):
        with pytest.raises(ValueError, match="bits must be 8, 4, 3 or 2"):
            pack(torch.randn(2, 4), 5, seed(0), EPS)
    with pytest.raises(ValueError, match=r"bits must be .* got 1"):
        normalize_and_pack(torch.randn(2, 3), None, None, None, 5, 1, EPS, True, torch.float32, torch.float32)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_noise_of_rows_that_repeat_averages_out(bits):
    """The sum of the gradients of equal rows with equal gradients has the sum of their variances."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 64, generator=generator).expand(512, -1).contiguous() for _ in range(2))
    gradients = torch.stack([draw(x, y, None, bits, True, value).x.double() for value in range(200)])
    errors = gradients - gradients.mean((0, 1))
    ratio = errors.sum(1).square().sum(1).mean() / errors.square().sum((1, 2)).mean()
    # ‖Σ‖² of 64 columns is χ² of many numbers, over 200 draws; errors that are tied gave 8.2 and 2.4.
    assert 0.8 < ratio < 1.25, ratio
