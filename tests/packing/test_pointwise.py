"""Derivatives of pointwise functions against autograd, and the ranges that hold them."""

import pytest
import torch
from pointwise_helpers import EXACT, FOUND, ROUNDED

from rmm_linear.packing.pointwise import Pointwise

GRID = torch.linspace(-30, 30, 60_001, dtype=torch.float64)


def autograd(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


@pytest.mark.parametrize("function", FOUND, ids=str)
def test_derivative_is_that_of_autograd(function):
    """In float64 at multiples of 0.001, with the jumps of Hardswish and ELU: some 50 roundings of values to 60."""
    assert (function.derivative(GRID) - autograd(function, GRID)).abs().max() < 1e-13


@pytest.mark.parametrize("function", EXACT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_ones_are_those_of_autograd_to_the_bit(function, dtype):
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45], dtype=dtype)
    odd = odd[~odd.isnan()] if function.name == "hardtanh" else odd  # whose vectors and scalars differ there
    x = torch.cat((GRID.to(dtype), odd))
    assert torch.equal(function.derivative(x), autograd(function, x))


@pytest.mark.parametrize("function", [*ROUNDED, Pointwise("elu", (-0.5,)), Pointwise("elu", (0.25,))], ids=str)
def test_range_holds_every_derivative_and_little_more(function):
    low, high = function.range
    found = torch.cat((autograd(function, GRID), function.derivative(GRID.float()).double()))
    assert low <= found.min() + 1e-12  # float64 rounds e⁻³⁰ above 0
    assert found.max() <= high * (1 + 2**-23)  # α in float32; a step has a margin of 2⁻¹⁸
    assert found.max() - found.min() > 0.999 * (high - low)


@pytest.mark.parametrize("function", ROUNDED, ids=str)
def test_infinity_has_the_limit_and_nan_counts_as_minus_infinity(function):
    below, above, nan = function.derivative(torch.tensor([-torch.inf, torch.inf, torch.nan])).tolist()
    last = 0.0 if function.name in ("sigmoid", "tanh") else 1.0
    assert (below, above, nan) == (0.0, last, 0.0)


def test_step_cuts_the_range():
    assert Pointwise("sigmoid").step(2) == pytest.approx(0.25 / 3, rel=1e-5)
    assert Pointwise("elu", (1.5,)).step(1) == pytest.approx(1.5, rel=1e-5)
