"""The operators that make outputs along with stand-ins: opcheck, the bytes of the others, outputs, seeds, FLOPs."""

import pytest
import torch
from cases import needs_triton
from pointwise_helpers import FOUND, randn
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops import derivatives, gated, norms
from rmm_linear.ops.dispatch import runs_fused
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.packing.pointwise import Pointwise

ACTIVATE = torch.ops.rmm_linear.activate_and_pack.default
GATE = torch.ops.rmm_linear.gate_and_pack.default
NORMALIZE = torch.ops.rmm_linear.normalize_and_pack.default
INDICES = [None, torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)]
every_index = pytest.mark.parametrize("index", INDICES)
every_backend = pytest.mark.parametrize("backend", ["torch", "auto", pytest.param("triton", marks=needs_triton)])
UNIT = 2.0**-24


def close(found, expected, dtype, room):
    """Within one rounding to the dtype, and what float32 may add to it; the interpreter cuts off to bfloat16."""
    share = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 0.5)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return bool(((found.double() - expected).abs() <= share * expected.abs() + room + smallest).all())


@every_index
@pytest.mark.parametrize("function", FOUND, ids=str)
def test_activations_pass_opcheck(function, index):
    how = (function.name, list(function.parameters), function.bits(2))
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(ACTIVATE, (randn(3, 70, dtype=dtype), index, 7, *how), test_utils="test_faketensor")
    torch.library.opcheck(
        ACTIVATE, (randn(3, 70), index, 7, *how), test_utils=("test_schema", "test_autograd_registration")
    )


def test_activations_pass_opcheck_with_dynamic_shapes():
    torch.library.opcheck(ACTIVATE, (randn(3, 70), None, 7, "gelu", [], 4))


@every_index
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_products_pass_opcheck(index, dtype):
    a, b = randn(7, 70, dtype=dtype), randn(7, 70, seed=2, dtype=dtype)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(GATE, (a, b, "silu", 4, 77, index, *needs))


@every_index
@pytest.mark.parametrize("dims", [1, 2])
def test_norms_pass_opcheck(index, dims):
    x = randn(2, 3, 8, 12) if dims == 2 else randn(6, 96)
    gamma, beta = randn(96, seed=2), randn(96, seed=3)
    torch.library.opcheck(NORMALIZE, (x, gamma, beta, index, 5, 2, 1e-5, True, torch.float32, torch.float32, dims))
    casts = torch.bfloat16, torch.bfloat16
    torch.library.opcheck(NORMALIZE, (x.bfloat16(), gamma, None, index, 5, 2, 1e-5, False, *casts, dims))


@needs_triton
def test_the_kernels_pass_opcheck(monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    a, b = randn(5, 70), randn(5, 70, seed=2)
    for name in ("silu", "relu", "relu_squared"):
        torch.library.opcheck(ACTIVATE, (a, INDICES[1], 7, name, [], Pointwise(name).bits(4)))
    torch.library.opcheck(GATE, (a, b, "silu", 4, 77, None, True, True))
    torch.library.opcheck(NORMALIZE, (a, b[0], None, None, 5, 2, 1e-5, True, torch.float32, torch.float32))


@pytest.mark.pairs
@every_backend
@every_index
@pytest.mark.parametrize("function", FOUND, ids=str)
def test_activations_store_what_they_store_alone(function, index, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    for dtype, columns in ((torch.float32, 70), (torch.bfloat16, 130)):
        x = randn(9, columns, scale=3, dtype=dtype)
        how = x, index, 7, function.name, function.parameters, function.bits(4)
        output, stored = derivatives.activate_and_pack(*how)
        assert torch.equal(stored, derivatives.pack_derivative(*how))
        assert output.dtype == dtype
        wide = x.double()
        expected = function(wide)
        assert close(output, expected, dtype, 16 * UNIT * torch.maximum(wide.abs(), expected.abs()))


@every_backend
@every_index
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_store_what_they_store_alone(activation, index, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    a, b = randn(9, 70, scale=2), randn(9, 70, seed=2)
    for needs in ((True, True), (False, True)):
        how = a, b, activation, 4, 7, index, *needs
        output, stored = gated.gate_and_pack(*how)
        assert torch.equal(stored, gated.keep_gated(*how))
        value = Pointwise(activation)(a.double())
        room = 20 * UNIT * torch.maximum(a.double().abs(), value.abs()) * b.double().abs()
        assert close(output, value * b.double(), torch.float32, room)


@every_backend
@every_index
@pytest.mark.parametrize("centered", [True, False])
def test_norms_store_what_they_store_alone(centered, index, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    x, gamma, beta = randn(9, 96) + 1, randn(96, seed=2), randn(96, seed=3)
    for dtype in (torch.float32, torch.float16):
        rows = x.to(dtype)
        output, stored = norms.normalize_and_pack(rows, gamma, beta, index, 5, 4, 1e-5, centered, torch.float32, dtype)
        assert torch.equal(stored, norms.pack_norm(rows, index, 5, 4, 1e-5, centered))
        wide = rows.double()
        wide = wide - wide.mean(1, keepdim=True) if centered else wide
        h = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gamma.double()
        # Sums of 96 numbers, of up to 5 deviations, in any order.
        room = 200 * UNIT * (gamma.double().abs() * 5 + h.abs() + beta.double().abs())
        assert output.dtype == dtype
        assert close(output, h + beta.double(), dtype, room)


@every_backend
@pytest.mark.parametrize("shape", [(0, 70), (3, 0), (1, 1)])
def test_nothing_is_a_result_too(shape, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    x, one = randn(*shape), torch.ones(shape[1])
    for name in ("gelu", "relu", "relu_squared"):
        output, stored = derivatives.activate_and_pack(x, None, 7, name, (), Pointwise(name).bits(4))
        assert output.shape == shape
        assert torch.equal(stored, derivatives.pack_derivative(x, None, 7, name, (), Pointwise(name).bits(4)))
    assert gated.gate_and_pack(x, x, "silu", 4, 7, None, True, True)[0].shape == shape
    if shape[1]:
        casts = torch.float32, torch.float32
        assert norms.normalize_and_pack(x, one, one, None, 5, 4, 1e-5, True, *casts)[0].shape == shape


def test_a_seed_that_is_not_given_is_drawn():
    x = randn(5, 70)
    calls = (
        lambda: ACTIVATE(x, None, None, "gelu", [], 4),
        lambda: GATE(x, x, "silu", 4, None, None, True, True),
        lambda: NORMALIZE(x, None, None, None, None, 2, 1e-5, True, torch.float32, torch.float32),
    )
    for call in calls:
        torch.manual_seed(3)
        (output, first), (again, second) = call(), call()
        torch.manual_seed(3)
        assert torch.equal(call()[1], first)
        assert not torch.equal(first, second)
        assert torch.equal(output, again)


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"bits must be .* got 3"):
        derivatives.activate_and_pack(randn(2, 3), None, 7, "gelu", (), 3)
    with pytest.raises(ValueError, match=r"bits must be .* got 1"):
        norms.normalize_and_pack(randn(2, 3), None, None, None, 5, 1, 1e-5, True, torch.float32, torch.float32)


def test_operations_are_counted():
    x = randn(4, 70)
    with FlopCounterMode(display=False) as counter:
        ACTIVATE(x, None, 7, "gelu", [], 4)
        GATE(x, x, "silu", 4, 7, None, True, True)
        NORMALIZE(x, None, None, None, 7, 2, 1e-5, True, torch.float32, torch.float32)
    rotations = 3 * 2 * 64 * x.numel()
    assert rotations < counter.get_total_flops() < 1.1 * rotations


def test_where_kernels_run(monkeypatch):
    x = randn(2, 3)
    assert not runs_fused(x, is_composed=False)
    monkeypatch.setenv("RMM_BACKEND", "triton")
    assert runs_fused(x, is_composed=True)
    assert not runs_fused(x.double(), is_composed=False)
    assert not runs_fused(torch._neg_view(x), is_composed=False)  # memory does not hold its values
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_fused(x, is_composed=False)
        assert not runs_fused(x, is_composed=True)
