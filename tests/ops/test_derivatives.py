"""The operators of derivatives in few bits: C against plain PyTorch, tables, opcheck, odd shapes, errors."""

import pytest
import torch
from pointwise_helpers import FOUND, ROUNDED, SEED, WIDTHS, randn
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.backends.native import is_available
from rmm_linear.ops import derivatives
from rmm_linear.ops.native import derivatives as native_derivatives
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import Pointwise

BOUNDED = [(function, bits) for function, bits in WIDTHS if function.is_bounded]
ODD = torch.tensor([3.0, -3.0, 0.0, 1e-30, torch.inf, -torch.inf, torch.nan, 16.0, -16.0, 1e30])
PACK = torch.ops.rmm_linear.pack_derivative.default
APPLY = torch.ops.rmm_linear.apply_derivative.default

needs_library = pytest.mark.skipif(not is_available(), reason="the C library was not built")


def from_table(table, x):
    """What the C library reads: the same lines in float64."""
    place = ((x - table.begin) * table.density).clamp(0, len(table.knots) - 1 - 1e-9)
    knots, whole = table.knots.double(), place.long()
    value = knots[whole] + (place - whole) * (knots[whole + 1] - knots[whole])
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_library_equals_plain_pytorch(function, bits, dtype):
    for columns, index in ((70, None), (200, torch.tensor([3, 0, 7, 15])), (3, torch.tensor([], dtype=torch.int64))):
        x, y = randn(16, columns, scale=4).to(dtype), randn(16, columns, seed=2).to(dtype)
        x.flatten()[: len(ODD)] = ODD.to(dtype)
        codes = plain.pack_derivative(x, function, bits, SEED, index)
        found = torch.full_like(codes, 255)
        native_derivatives.pack_derivative(x, found, function, bits, SEED, index)
        # A table is 1e-5 of the range off on average: of 8 bits, 0.3 % of the codes are on the other side of a step.
        assert (found != codes).sum() <= (0 if function.is_exact else max(1, 0.01 * codes.numel()))
        expected = plain.apply_derivative(y, codes, function, bits, SEED, index)
        gradient = native_derivatives.apply_derivative(y, codes, function, bits, SEED, index)
        # Three roundings of float32 of numbers up to 2 steps and the range, then one of the dtype.
        room = 8 * 2**-24 * max(map(abs, function.range)) * y.double().abs() + torch.finfo(dtype).eps * expected.abs()
        assert ((gradient.double() - expected.double()).abs() <= room).all()


@needs_library
def test_library_reads_rows_wherever_they_are():
    x = randn(40, 200)
    for view in (x[:, 3:73], x[::2, :70], x[:, :30].T):
        found = derivatives.pack_derivative(view, None, 7, "gelu", (), 4)
        assert torch.equal(found, derivatives.pack_derivative(view.contiguous(), None, 7, "gelu", (), 4))
        stored = derivatives.apply_derivative(view, found, None, "gelu", (), 4)
        assert torch.equal(stored, derivatives.apply_derivative(view.contiguous(), found, None, "gelu", (), 4))


@pytest.mark.parametrize("function", FOUND, ids=str)
def test_operators_pass_opcheck(function):
    bits = function.bits(2)
    for index in (None, torch.tensor([0, 2])):
        x, y = randn(3, 70), randn(3, 70, seed=2)
        how = (function.name, list(function.parameters), bits)
        torch.library.opcheck(PACK, (x, index, 7, *how), test_utils=("test_schema", "test_faketensor"))
        stored = PACK(x, index, 7, *how)
        torch.library.opcheck(APPLY, (y, stored, index, *how), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(PACK, (x, None, 7, *how), test_utils="test_aot_dispatch_dynamic")
    torch.library.opcheck(APPLY, (y, PACK(x, None, 7, *how), None, *how), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("function", FOUND, ids=str)
@pytest.mark.parametrize("shape", [(0, 70), (4, 1), (1, 70), (5, 130)])
def test_bytes_are_the_formula(function, shape):
    bits = function.bits(2)
    rows, columns = shape
    x = randn(*shape)
    stored = derivatives.pack_derivative(x, None, 7, function.name, function.parameters, bits)
    parts = [rows * -(-columns * bits // 8)]
    parts += [] if function.is_exact else [8]
    parts += [] if function.is_bounded else [rows * 4 * -(-columns // 64)]
    assert stored.nbytes == sum(-(-part // 16) * 16 for part in parts)
    gradient = derivatives.apply_derivative(x, stored, None, function.name, function.parameters, bits)
    assert gradient.shape == shape


def test_seed_decides_and_none_draws_one():
    x, how = randn(3, 70), ("gelu", (), 4)
    assert torch.equal(PACK(x, None, 7, *how), PACK(x, None, 7, *how))
    assert not torch.equal(PACK(x, None, 7, *how), PACK(x, None, 8, *how))
    torch.manual_seed(3)
    drawn = [PACK(x, None, None, *how) for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(3)
    assert torch.equal(PACK(x, None, None, *how), drawn[0])
    state = torch.get_rng_state()
    PACK(x, None, None, "relu", (), 1)
    assert torch.equal(torch.get_rng_state(), state)  # no random numbers where none are needed


@pytest.mark.parametrize(("name", "bits"), [("gelu", 3), ("gelu", 16), ("relu", 2), ("relu_squared", 1)])
def test_other_widths_are_refused(name, bits):
    with pytest.raises(ValueError, match=r"bits must be .* got"):
        derivatives.pack_derivative(randn(2, 3), None, 7, name, (), bits)


def test_flops_are_one_for_each_element():
    x = randn(4, 70)
    with FlopCounterMode(display=False) as counter:
        APPLY(x, PACK(x, None, 7, "gelu", [], 4), None, "gelu", [], 4)
    assert counter.get_total_flops() == 2 * x.numel()


def test_nan_and_infinity_of_the_square_of_relu_stay_in_their_group():
    x = randn(3, 130)
    x[1, 70] = torch.nan
    found = derivatives.apply_derivative(
        torch.ones_like(x), PACK(x, None, 7, "relu_squared", [], 4), None, "relu_squared", (), 4
    )
    assert found[1, 64:128].isnan().all()
    assert int(found.isnan().sum()) == 64
