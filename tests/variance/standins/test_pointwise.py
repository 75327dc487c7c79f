"""The variance that packed activations add to the weight gradient of the layer below: closed form and simulation."""

import pytest
import torch
from pointwise_helpers import ROUNDED, randn
from statistical import assert_moments

from rmm_linear.ops.derivatives import apply_derivative, pack_derivative, stored_parts
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.stored import views
from rmm_linear.variance.standins.pointwise import element_variance, weight_gradient_variance

TOKENS, INPUTS, COLUMNS = 30, 6, 70


def simulate(function, bits, draws):
    """Errors of dW, the exact dW, and what is stored: tokens of very different sizes, as in training."""
    size = randn(TOKENS, 1, seed=4).exp()
    x, below = randn(TOKENS, INPUTS, seed=5) * size, randn(INPUTS, COLUMNS, seed=6)
    z, y = x @ below, randn(TOKENS, COLUMNS, seed=7) * size
    exact = (y.double() * function.derivative(z.double())).T @ x.double()
    how, errors, variances = (function.name, function.parameters, bits), [], []
    for seed in range(draws):
        stored = pack_derivative(z, None, seed, *how)
        errors.append(apply_derivative(y, stored, None, *how).double().T @ x.double() - exact)
        if not function.is_bounded:
            qparams = views(stored, stored_parts(function, bits, TOKENS, COLUMNS))[2]
            variances.append(weight_gradient_variance(x, y, element_variance(function, bits, qparams, COLUMNS)))
    return x, y, exact, torch.stack(errors), variances


def check(function, bits, draws):
    x, y, exact, errors, variances = simulate(function, bits, draws)
    # ‖error‖² sums 420 numbers, of which those of a column share their tokens: below 25 % of spread for one draw.
    if function.is_bounded:
        stated = weight_gradient_variance(x, y, element_variance(function, bits))
        assert_moments(errors, exact, stated, widest=0.25 / draws**0.5)
    else:
        assert_moments(errors, exact, 0.0, widest=0.5 / draws**0.5, roundings=torch.stack(variances))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("function", ROUNDED[:3], ids=str)
def test_simulated_variance_is_the_closed_form(function, bits):
    check(function, bits, 300)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_simulated_variance_of_the_square_of_relu_is_the_closed_form(bits):
    check(Pointwise("relu_squared"), bits, 300)


@pytest.mark.montecarlo
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("function", ROUNDED, ids=str)
def test_simulated_variance_is_the_closed_form_heavy(function, bits):
    check(function, bits, 5_000)


def test_exact_functions_add_nothing():
    assert float(element_variance(Pointwise("relu"), 1)) == 0
    x, y = randn(3, 2), randn(3, 4)
    assert float(weight_gradient_variance(x, y, element_variance(Pointwise("leaky_relu", (0.1,)), 1))) == 0
