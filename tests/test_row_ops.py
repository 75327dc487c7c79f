"""The operators of the kinds that draw rows: PyTorch's rules, the kernels, and what they refuse."""

import itertools
import math
import sys

import pytest
import torch
from helpers import assert_packed_alike, chances
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear import RMMConfig, native, ops, packing, sketched_linear
from rmm_linear.kept import Recipe, keep
from rmm_linear.sketches import (
    SAMPLERS,
    TokenMask,
    draw,
    gather,
    probabilities,
    random_keys,
    row_norms,
    sketch,
    sketch_parts,
)

SEED = torch.tensor([77])
every_sampler = pytest.mark.parametrize("kind", SAMPLERS)
every_mask = pytest.mark.parametrize("mask", ["all", "some", "few"])
every_backend = pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.skipif(sys.platform != "linux", reason="Triton has no build")),
    ],
)


def made(tokens=40, columns=70, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator) * torch.randn(tokens, 1, generator=generator).exp()
    return x.to(dtype)


def ranks(name, tokens=40):
    return None if name == "all" else TokenMask.of(torch.arange(tokens) % (3 if name == "some" else 16) == 1)


def parts(mask):
    return () if mask is None else (mask.order, mask.count)


@every_backend
@every_mask
@every_sampler
def test_operators_keep_pytorchs_rules(kind, mask, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    for expected, bits in itertools.product((None, made()[:, 0].abs()), (None, 4)):
        more = (kind, 7, None, bits, 0.1, expected, *parts(ranks(mask)))
        torch.library.opcheck(torch.ops.rmm_linear.keep.default, (made(), 77, *more))
    drawn = ops.draw_rows(made(), SEED, kind, 7, 0.1, None, *parts(ranks(mask)))
    torch.library.opcheck(ops.gather_rows, (made().T.contiguous().T, *drawn))


@every_backend
@every_mask
@every_sampler
def test_drawn_rows_are_those_of_the_sketch(kind, mask, backend, monkeypatch):
    """The operators' rows and scales make the S that follows from the seed and p; kernels' norms differ by rounding."""
    monkeypatch.setenv("RMM_BACKEND", backend)
    x, chosen = made(), ranks(mask)
    index, scale = ops.draw_rows(x, SEED, kind, 7, 0.1, None, *parts(chosen))
    assert (index.dtype, scale.dtype) == (torch.int32, torch.float32)
    z = sketch(x, kind=kind, seed=SEED, rows=7, mask=chosen, p=chances(kind, x, chosen))
    torch.testing.assert_close(ops.gather_rows(x, index, scale), z, rtol=1e-5, atol=1e-5)
    codes, ranges = ops.packed_rows(x, SEED, index, scale, 8)
    restored = packing.unpack(codes, ranges, SEED, 8, 70, x.dtype)
    torch.testing.assert_close(restored, z, rtol=0, atol=float(z.abs().max()) / 40)


@every_sampler
def test_a_draw_never_waits_for_the_device(kind):
    """Fake tensors have no numbers: a draw that asked for one would wait for an accelerator, and raises here."""
    with FakeTensorMode():
        x, mask = torch.randn(64, 5), TokenMask.of(torch.ones(64))
        p = probabilities(row_norms(x), 0.1, torch.ones(64), mask)
        drawn = draw(p, random_keys(torch.zeros(1, dtype=torch.int64), 7), SAMPLERS[kind], mask)
        assert gather(x, drawn).shape == (7, 5)
        with pytest.raises(DataDependentOutputException):
            bool(mask.count > 7)


def test_expected_norms_and_the_mix_decide_what_is_drawn():
    x = torch.ones(1000, 3)
    expected = torch.ones(1000)
    expected[:100] = 100.0
    for mix, given, share in ((1e-3, expected, 0.917), (1.0, expected, 0.1), (1e-3, None, 0.1)):
        index, _ = ops.draw_rows(x, SEED, "norm_rows", 900, mix, given)
        assert float((index < 100).double().mean()) == pytest.approx(
            share, abs=4 * math.sqrt(share * (1 - share) / 900)
        )


@every_sampler
def test_rows_packed_in_parts_are_the_packed_rows(kind, monkeypatch):
    x = made()
    drawn = ops.draw_rows(x, SEED, kind, 13, 0.1)
    expected = packing.pack(ops.gather_rows(x, *drawn), 4, SEED)
    for name in ("_CHUNK", "_COMPILED_CHUNK"):
        monkeypatch.setattr(packing, name, 70 * 4)
    found = ops.packed_rows(x, SEED, *drawn, 4)
    assert_packed_alike(found, expected, 4)
    if native.applies_to(x):  # in compiled form every row is made by itself
        assert all(map(torch.equal, found, expected))


def test_what_cannot_be_drawn_is_refused():
    x = made()
    with pytest.raises(ValueError, match="draw_rows needs one of wta, norm_rows, got kind='rows'"):
        ops.draw_rows(x, SEED, "rows", 7, 0.1)
    for rows in (0, 40):
        with pytest.raises(ValueError, match=f"rows must be at least 1 and less than the 40 tokens, got {rows}"):
            ops.draw_rows(x, SEED, "wta", rows, 0.1)
    with pytest.raises(ValueError, match=r"expected must have one number per token, \(40,\), got \(4,\)"):
        ops.draw_rows(x, SEED, "wta", 7, 0.1, torch.ones(4))
    with pytest.raises(ValueError, match=r"uniform_mix must be in \(0, 1\], got 0.0"):
        ops.draw_rows(x, SEED, "wta", 7, 0.0)
    for run in (sketch, sketch_parts):
        with pytest.raises(ValueError, match="kind='wta' draws rows by the probabilities p of the tokens"):
            run(x, kind="wta", seed=SEED, rows=7)
    with pytest.raises(ValueError, match="kind='norm_rows' draws rows by the probabilities p"):
        ops.sketch(x, SEED, "norm_rows", 7)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_sampler
def test_other_types_draw_the_same_rows(kind, dtype, backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    x = made(dtype=dtype)
    index, scale = ops.draw_rows(x, SEED, kind, 9, 0.1)
    p = probabilities(row_norms(x))
    expected = sketch(x, kind=kind, seed=SEED, rows=9, p=p)
    found = ops.gather_rows(x, index, scale)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


def test_operations_are_counted():
    x, drawn, norms = made(), ops.draw_rows(made(), SEED, "wta", 8, 0.1), 2 * 40 * 70
    for run, flops in (
        (lambda: keep(x, Recipe("wta", 8, uniform_mix=0.1), 77), norms + 8 * 70),
        (lambda: keep(x, Recipe("wta", 8, bits=4, uniform_mix=0.1), 77), norms + 8 * 70 + 2 * 64 * 8 * 70),
        (lambda: ops.gather_rows(x, *drawn), 8 * 70),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == flops


@every_mask
@pytest.mark.parametrize("bits", [None, 4])
@every_sampler
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no build for this platform")
def test_a_layer_on_the_kernels_is_the_layer(kind, bits, mask, monkeypatch):
    config = RMMConfig(kind=kind, ratio=0.2, bits=bits, min_rows=1)
    token_mask = None if mask == "all" else torch.arange(40) % (3 if mask == "some" else 16) == 1
    y = made(40, 6) if token_mask is None else made(40, 6) * token_mask.unsqueeze(1)
    gradients = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("RMM_BACKEND", backend)
        weight = made(6, 70).requires_grad_()
        sketched_linear(made(), weight, config=config, seed=5, token_mask=token_mask).backward(y)
        gradients[backend] = weight.grad
    error = (gradients["torch"] - gradients["triton"]).norm() / gradients["torch"].norm()
    assert error <= (1e-5 if bits is None else 2e-2), error
