"""The products of a gated MLP: formulas are PyTorch's, packing is unbiased, and its bytes are the formula's."""

import math

import pytest
import torch
from torch.nn import functional as F

from rmm_linear.packing import pointwise
from rmm_linear.packing.gated import ACTIVATIONS, apply_gated, pack_gated

SEEDS = torch.tensor([77, -5])
BOTH = (True, True)
FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def inputs(rows=6, columns=70, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + columns)
    return [torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def exact(a, b, y, activation):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    return torch.autograd.grad(FUNCTIONS[activation](a) * b, (a, b), y)


@every_activation
def test_formulas_are_pytorchs(activation):
    points = torch.linspace(-30, 30, 6001, dtype=torch.float64).requires_grad_()
    function = pointwise.FUNCTIONS[activation]
    value, derivative = function.value(points.detach()), function.derivative(points.detach())
    expected = FUNCTIONS[activation](points)
    (slope,) = torch.autograd.grad(expected.sum(), points)
    # Of numbers up to 30, and of products of a few of them, each rounded to 2⁻⁵³ of itself.
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=30 * 2**-50)
    torch.testing.assert_close(derivative, slope, rtol=0, atol=30 * 2**-50)


def test_what_is_not_wanted_is_not_made():
    a, b, y = inputs()
    both = apply_gated(y, SEEDS, pack_gated(a, b, SEEDS, "gelu", 4, BOTH, None), 4, None)
    for place, wanted in enumerate(((True, False), (False, True))):
        found = apply_gated(y, SEEDS, pack_gated(a, b, SEEDS, "gelu", 4, wanted, None), 4, None)
        assert found[1 - place] is None
        assert torch.equal(found[place], both[place])


def test_the_errors_of_the_two_products_are_independent():
    """With a = b and ReLU of positive numbers, p = s: one seed for both would make their errors the same."""
    a = torch.rand(50, 640, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    packed = pack_gated(a, a, SEEDS, "relu", 4, BOTH, None)
    one = torch.ones_like(a)
    errors = [gradient - a for gradient in apply_gated(one, SEEDS, packed, 4, None)]
    first, second = (error / error.norm() for error in errors)
    # The correlation of 32,000 pairs that are independent is 0 ± 1/√32,000.
    assert abs((first * second).sum()) < 4 / math.sqrt(32_000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_are_computed_in_float32(dtype):
    a, b, y = inputs(dtype=dtype)
    wide = [matrix.float() for matrix in (a, b, y)]
    packed = pack_gated(a, b, SEEDS, "gelu", 8, BOTH, None)
    expected = pack_gated(*wide[:2], SEEDS, "gelu", 8, BOTH, None)
    assert all(torch.equal(one.codes, other.codes) for one, other in zip(packed, expected, strict=True))
    wide_gradients = apply_gated(wide[2], SEEDS, expected, 8, None)
    for found, gradient in zip(apply_gated(y, SEEDS, packed, 8, None), wide_gradients, strict=True):
        assert torch.equal(found, gradient.to(dtype))


def test_other_widths_are_refused():
    a, b, _ = inputs()
    with pytest.raises(ValueError, match="bits must be 8, 4, 3 or 2"):
        pack_gated(a, b, SEEDS, "silu", 1, BOTH, None)
