"""The operators that make outputs along with stand-ins: the bytes of the others, outputs, errors."""

import pytest
import torch
from cases import needs_triton
from pointwise_helpers import FOUND, randn

from rmm_linear.ops import derivatives, gated, norms
from rmm_linear.ops.dispatch import runs_fused
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.packing.pointwise import Pointwise

INDICES = [None, torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)]
every_index = pytest.mark.parametrize("index", INDICES)
every_backend = pytest.mark.parametrize("backend", ["torch", "auto", pytest.param("triton", marks=needs_triton)])
UNIT = 2.0**-24


def close(found, expected, dtype, room):
    """Within one rounding to the dtype, and what float32 may add to it; the interpreter cuts off to bfloat16."""
    share = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 0.5)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return bool(((found.double() - expected).abs() <= share * expected.abs() + room + smallest).all())


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


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"bits must be .* got 3"):
        derivatives.activate_and_pack(randn(2, 3), None, 7, "gelu", (), 3)
    with pytest.raises(ValueError, match=r"bits must be .* got 1"):
        norms.normalize_and_pack(randn(2, 3), None, None, None, 5, 1, 1e-5, True, torch.float32, torch.float32)


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
