"""The operators of derivatives in few bits: tables, odd values, bytes, errors."""

import pytest
import torch
from cases import needs_triton
from pointwise_helpers import ROUNDED, SEED, WIDTHS, randn
from torch import nn

from rmm_linear.activations.pointwise import pointwise_function
from rmm_linear.backends.native import is_available
from rmm_linear.ops import derivatives
from rmm_linear.ops.native import derivatives as native_derivatives
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import Pointwise

BOUNDED = [(function, bits) for function, bits in WIDTHS if function.is_bounded]
ODD = torch.tensor([3.0, -3.0, 0.0, 1e-30, torch.inf, -torch.inf, 16.0, -16.0, 1e30])
PACK = torch.ops.rmm_linear.pack_derivative.default

needs_library = pytest.mark.skipif(not is_available(), reason="the C library was not built")


def from_table(table, x):
    """What the C library reads: the same lines in float64."""
    place = ((x - table.begin) * table.density).clamp(0, len(table.knots) - 1 - 1e-9)
    knots, whole = table.knots[place.long()], place.floor()
    value = ((knots & 0xFFFF) + (place - whole) * (knots >> 16)) * table.unit
    value = value.where(x > table.begin, table.below)
    return value.where(x < table.end, table.above)


@pytest.mark.parametrize("function", [*ROUNDED, Pointwise("elu", (-0.5,)), Pointwise("elu")], ids=str)
def test_table_is_right_to_a_ten_thousandth_of_the_range(function):
    """Against autograd in float64, everywhere: between knots, at jumps, and beyond the last knot."""
    function = Pointwise("elu", (1.0,)) if function == Pointwise("elu") else function
    near = torch.logspace(-12, 0, 300, dtype=torch.float64)
    sides = [edge + sign * near for edge in (-16, -3, 0, 3, 16) for sign in (-1, 1)]
    x = torch.cat((torch.linspace(-40, 40, 400_001, dtype=torch.float64), *sides)).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    low, high = function.range
    for bits in (1, 8):
        table = native_derivatives.derivative_table(function, bits)
        found = low + function.step(bits) * from_table(table, x.detach())
        assert (found - expected).abs().max() < 1e-4 * (high - low)


@needs_library
@pytest.mark.parametrize(("function", "bits"), BOUNDED, ids=str)
def test_library_reads_odd_values_as_plain_pytorch_does(function, bits):
    x, y = ODD.expand(64, -1).contiguous(), randn(64, len(ODD))
    codes = plain.pack_derivative(x, function, bits, SEED)
    found = torch.full_like(codes, 255)
    derivatives.PACK_DERIVATIVE(x, found, function, bits, SEED, None)
    assert (found != codes).sum() <= (0 if function.is_exact else 0.01 * codes.numel())
    expected = plain.apply_derivative(y, codes, function, bits, SEED)
    torch.testing.assert_close(derivatives.APPLY_DERIVATIVE(y, codes, function, bits, SEED, None), expected)


@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("backend", ["torch", "auto", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("pack", [derivatives.pack_derivative, derivatives.activate_and_pack])
@pytest.mark.parametrize("function", ROUNDED, ids=str)
def test_a_nan_arrives_in_the_gradient_and_infinity_has_the_limit(function, pack, backend, monkeypatch):
    """In every row that is stored: no code is left for NaN."""
    monkeypatch.setenv("RMM_BACKEND", backend)
    index, how = torch.tensor([0, 2, 4, 5]), (function.name, list(function.parameters), 4)

    def gradient(value, place):
        x = randn(6, 70)
        x[place] = value
        stored = pack(x, index, 7, *how)
        stored = stored if pack is derivatives.pack_derivative else stored[1]
        return derivatives.apply_derivative(torch.ones_like(x), stored, index, *how)

    for value in (torch.inf, -torch.inf):
        exact = function.derivative(torch.tensor(value))
        assert abs(gradient(value, (2, 67))[2, 67] - exact) <= function.step(4) / 2 + 1e-4
    assert gradient(torch.nan, (3, 5)).isfinite().all()  # in a row that is not stored
    for place in ((0, 1), (5, 69)):
        found = gradient(torch.nan, place)
        assert found[index].isnan().all()
        assert not found[[1, 3]].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("backend", ["torch", "auto", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("module", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(-0.3, 1.7), nn.ReLU6()], ids=str)
def test_one_pass_makes_bits_and_pytorchs_output(module, dtype, backend, monkeypatch):
    """Of odd values too, and of numbers at a limit that the dtype does not have."""
    monkeypatch.setenv("RMM_BACKEND", backend)
    function = pointwise_function(module)
    room = 2**-7 if backend == "triton" and dtype == torch.bfloat16 else 0  # Triton's interpreter cuts digits off
    near = torch.tensor([-0.3, 1.7, 6.0, 0.0, -0.0, torch.nan])
    for columns in (64, 70, 200):
        x = torch.cat((ODD, near, randn(4 * columns - len(ODD) - len(near)))).view(4, columns).to(dtype)
        how = None, None, function.name, list(function.parameters), 1
        with torch.no_grad():
            output, stored = derivatives.activate_and_pack(x, *how)
            expected = derivatives.pack_derivative(x, *how)
        torch.testing.assert_close(output, module(x), rtol=room, atol=0, equal_nan=True)
        signs = [one[~one.isnan()].signbit() for one in (output, module(x))]  # of zeros too
        assert backend == "triton" or torch.equal(*signs)
        assert torch.equal(stored, expected)


@pytest.mark.parametrize(("name", "bits"), [("gelu", 3), ("gelu", 16), ("relu", 2), ("relu_squared", 1)])
def test_other_widths_are_refused(name, bits):
    for pack in (derivatives.pack_derivative, derivatives.activate_and_pack):
        with pytest.raises(ValueError, match=r"bits must be .* got"):
            pack(randn(2, 3), None, 7, name, (), bits)


def test_nan_and_infinity_of_the_square_of_relu_stay_in_their_group():
    x = randn(3, 130)
    x[1, 70] = torch.nan
    found = derivatives.apply_derivative(
        torch.ones_like(x), PACK(x, None, 7, "relu_squared", [], 4), None, "relu_squared", (), 4
    )
    assert found[1, 64:128].isnan().all()
    assert int(found.isnan().sum()) == 64
