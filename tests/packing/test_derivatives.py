"""Derivatives in few bits: unbiased with the variance stated, exact in one bit, in the bytes of the formula."""

import pytest
import torch
from cases import light_and_heavy
from pointwise_helpers import EXACT, ROUNDED, SEED, WIDTHS, is_within_half_a_step, randn
from statistical import assert_moments

from rmm_linear.ops.derivatives import apply_derivative, pack_derivative, stored_parts
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.stored import views
from rmm_linear.variance.standins.pointwise import element_variance, input_gradient_variance

ROWS, COLUMNS = 20, 70


@light_and_heavy(100, 4_000)
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("function", "bits"), WIDTHS, ids=str)
def test_unbiased_with_the_stated_variance(function, bits, is_masked, draws):
    x, y = randn(ROWS, COLUMNS, scale=2), randn(ROWS, COLUMNS, seed=2)
    index = torch.arange(0, ROWS, 3) if is_masked else None
    rows = ROWS if index is None else len(index)
    if index is not None:
        y = torch.zeros_like(y).index_copy_(0, index, y[index])
    exact = y.double() * function.derivative(x.double())
    name, errors, roundings = (function.name, function.parameters, bits), [], []
    for seed in range(draws):
        stored = pack_derivative(x, index, seed, *name)
        errors.append(apply_derivative(y, stored, index, *name) - exact)
        if not function.is_bounded:
            scales = views(stored, stored_parts(function, bits, rows, COLUMNS))[2]
            variance = element_variance(function, bits, scales, COLUMNS)
            roundings.append(input_gradient_variance(y if index is None else y[index], variance))
    errors = torch.stack(errors)
    if index is not None:
        outside = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, index, False)
        assert not errors[:, outside].any()
    if function.is_exact:
        assert torch.equal(errors + exact, (y * function.derivative(x)).double().expand_as(errors))
    elif function.is_bounded:
        # Elements have kurtosis 1.8, and a draw some 500: its ‖error‖² has a spread of 7 % at most.
        stated = input_gradient_variance(y, element_variance(function, bits))
        assert_moments(errors, exact, stated, widest=0.1 / draws**0.5)
    else:
        assert_moments(errors, exact, 0.0, widest=0.2 / draws**0.5, roundings=torch.stack(roundings))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("columns", [64, 130, 70, 5, 1])
def test_bytes_and_layout_are_those_of_packing(bits, columns):
    """Byte i of a group of h bytes holds the codes i, i + h, …, lower bits first."""
    function = ROUNDED[0]
    x = randn(3, columns)
    codes = plain.pack_derivative(x, function, bits, SEED)
    assert codes.shape == (3, -(-columns * bits // 8))
    found = plain.apply_derivative(torch.ones_like(x), codes, function, bits, SEED)
    u = found[1, columns - 1]  # the last element alone, through its byte
    size = (columns - 1) % 64 + 1
    h = -(-size * bits // 8)
    place, shift = (columns - size) * bits // 8 + (size - 1) % h, (size - 1) // h * bits
    codes[1, place] ^= ((1 << bits) - 1) << shift
    changed = plain.apply_derivative(torch.ones_like(x), codes, function, bits, SEED)
    assert changed[1, -1] != u
    changed[1, -1] = u
    assert torch.equal(changed, found)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_used_up_to_the_last_one_and_no_further(bits):
    """tanh' is 1 at 0 and 0 far away, both ends of its range."""
    function = next(function for function in ROUNDED if function.name == "tanh")
    x = torch.tensor([[0.0, 50.0] * 64]).expand(500, -1)
    codes = plain.pack_derivative(x, function, bits, SEED)
    found = plain.apply_derivative(torch.ones_like(x), codes, function, bits, SEED)
    assert is_within_half_a_step(found, x, torch.ones_like(x), function, bits)


@pytest.mark.parametrize("function", EXACT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_exact_ones_give_the_gradient_of_autograd_to_the_bit(function, dtype):
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, -1.0, 2.0], dtype=dtype)
    x = torch.cat((randn(13, 7, dtype=dtype), odd.expand(7, 7))).requires_grad_()
    y = torch.cat((randn(13, 7, seed=2, dtype=dtype), odd.unsqueeze(1).expand(7, 7)))
    if function.name == "hardtanh":  # whose vectors and scalars differ at NaN
        x = x.detach().nan_to_num(0.5).requires_grad_()
    (expected,) = torch.autograd.grad(function(x), x, y)
    codes = plain.pack_derivative(x.detach(), function, 1)
    for found in (
        plain.apply_derivative(y, codes, function, 1),
        apply_derivative(y, pack_derivative(x, None, None, function.name, function.parameters, 1), None,
                         function.name, function.parameters, 1),
    ):  # fmt: skip
        assert torch.equal(found.nan_to_num(77.0), expected.nan_to_num(77.0))
        assert torch.equal(found.signbit(), expected.signbit() & ~expected.isnan() | found.signbit() & found.isnan())


def test_rows_and_columns_are_rounded_independently():
    """Of one element and of equal ones beside and below it: errors of any two are uncorrelated."""
    function, draws = ROUNDED[0], 2_000
    x, y = torch.full((2, 2), 0.3), torch.ones(2, 2)
    found = [apply_derivative(y, pack_derivative(x, None, s, "gelu", (), 2), None, "gelu", (), 2) for s in range(draws)]
    errors = (torch.stack(found).flatten(1) - function.derivative(x).flatten()).double()
    correlation = errors.T.corrcoef()
    # Off the diagonal the sample's correlation has the standard error 1 / √draws.
    assert (correlation - torch.eye(4)).abs().max() < 4.5 / draws**0.5


def test_the_variance_of_what_has_no_range_needs_the_stored_scales():
    with pytest.raises(ValueError, match="follows from stored scales: give scales and columns"):
        element_variance(Pointwise("relu_squared"), 4)
