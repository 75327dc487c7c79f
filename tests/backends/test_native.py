"""The C library gives what plain PyTorch gives, and leaves it the work where it cannot be used."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import assert_packed_alike

from rmm_linear import packing
from rmm_linear.backends import native
from rmm_linear.backends.native import transforms
from rmm_linear.ops import plain
from rmm_linear.ops import sketches as table
from rmm_linear.ops.dispatch import Operation
from rmm_linear.ops.native import sketches as ops
from rmm_linear.packing import ROUNDING_STREAM, RoundingNoise
from rmm_linear.sketches import RowSample, TokenMask, gather, sketch
from rmm_linear.sketches.countsketch import signs_and_shifts
from rmm_linear.sketches.philox import philox
from rmm_linear.spec import SaveSpec

SEED = torch.tensor([-123456789012345678])


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    """These tests are of the C library, whatever the others are asked to run."""
    monkeypatch.delenv("RMM_BACKEND", raising=False)


def test_it_is_built_where_there_is_a_compiler():
    """Else the other tests of this file would compare plain PyTorch with itself."""
    source = Path(native.__file__).with_name("level_0.c")
    compiler = shutil.which("gcc") or shutil.which("cc")
    able = (
        compiler is not None
        and not subprocess.run(
            [compiler, "-std=gnu11", "-fopenmp", "-fsyntax-only", str(source)], capture_output=True, check=False
        ).returncode
    )
    assert native.is_available() == able


@pytest.mark.parametrize("stream", [0, 3, 2**32 - 1])
def test_random_numbers_are_the_same_to_the_bit(stream):
    offset = torch.cat((torch.arange(100), torch.tensor([2**32 - 1, 2**32, 2**62]))).view(103, 1)
    for found, word in zip(native.philox(SEED, offset, stream), philox(SEED, offset, stream), strict=True):
        assert found.shape == offset.shape
        assert torch.equal(found, word)
    strided = torch.arange(40)[::3]
    assert torch.equal(native.philox(SEED, strided)[1], philox(SEED, strided)[1])
    assert native.philox(SEED, torch.arange(0))[0].shape == (0,)


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 410), (100, 64), (33, 1), (32, 32), (65, 7), (1, 5), (0, 3)])
def test_signs_and_shifts_are_the_same_to_the_bit(tokens, rows):
    expected = signs_and_shifts(SEED, tokens, rows)
    for found, other in zip(native.signs_and_shifts(SEED, tokens, rows), expected, strict=True):
        assert found.dtype == other.dtype
        assert torch.equal(found, other)


@pytest.mark.parametrize(("rows", "columns"), [(100, 70), (3, 200), (0, 64), (5, 0), (1, 1)])
def test_the_noise_of_packing_is_the_same_to_the_bit(rows, columns):
    expected = vars(RoundingNoise.of(SEED, rows, columns)).values()
    for found, other in zip(native.rounding_noise(SEED, ROUNDING_STREAM, rows, columns), expected, strict=True):
        assert found.dtype == other.dtype
        assert torch.equal(found, other)


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("shape", [(300, 768), (37, 130), (5, 64), (3, 63), (4, 5), (2, 1), (0, 70), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packing_is_the_same(bits, shape, dtype):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    packed = packing.pack(z, bits, SEED)
    assert_packed_alike(ops.pack(z, bits, SEED), packed, bits)
    unpacking = (*packed, SEED, bits, shape[1], dtype)
    found, expected = ops.unpack(*unpacking, rotated=True), packing.unpack(*unpacking, rotated=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_odd_values_are_packed_the_same(bits):
    z = torch.randn(6, 200)
    z[0], z[1], z[2, 70] = 0, -1.2345, math.nan
    z[3] *= 2.0**100
    z[4] *= 2.0**-100
    codes, qparams = ops.pack(z, bits, SEED)
    expected_codes, expected_qparams = packing.pack(z, bits, SEED)
    assert torch.equal(qparams.isnan(), expected_qparams.isnan())
    assert qparams.isnan().any(-1).sum() == 1
    finite = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(qparams[finite], expected_qparams[finite], rtol=2**-7, atol=0)
    assert (codes[finite] != expected_codes[finite]).float().mean() < 0.01
    z[5, 199] = math.inf
    for pack in (packing.pack, ops.pack):
        assert pack(z, bits, SEED)[1][5, 3].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_range_beyond_float32_is_nan(backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    for z in (torch.tensor([[3e38, -3e38]]), torch.tensor([[1e39, 0.0]], dtype=torch.float64)):
        assert table.PACK(z, 4, SEED)[1].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_smallest_numbers_come_back(backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    z = torch.rand(3, 70) * 1e-40
    restored = table.UNPACK(*table.PACK(z, 4, SEED), SEED, 4, 70, z.dtype)
    assert (restored - z).abs().max() < 1e-38


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", [torch.float16, torch.float32])
def test_the_default_dtype_changes_nothing(dtype, target):
    z = torch.randn(40, 130, generator=torch.Generator().manual_seed(4))
    codes, qparams = ops.pack(z, 4, SEED)
    expected = ops.unpack(codes, qparams, SEED, 4, 130, target)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert all(map(torch.equal, ops.pack(z, 4, SEED), (codes, qparams)))
        assert torch.equal(ops.unpack(codes, qparams, SEED, 4, 130, target), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("tokens", "rows"), [(100, 13), (100, 60), (100, 99), (7, 1), (5, 2)])
@pytest.mark.parametrize(
    "view", [lambda m: m, lambda m: m[:, 3:7], lambda m: m.T, lambda m: m[:, :1], lambda m: m[:, :0]]
)
def test_countsketch_is_the_same(tokens, rows, view):
    m = view(torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(5)))
    rows = min(rows, len(m) - 1) or 1
    found = ops.sketch(m, kind="countsketch", seed=SEED, rows=rows)
    torch.testing.assert_close(found, sketch(m, kind="countsketch", seed=SEED, rows=rows))
    parts = ops._sketch_parts(m, kind="countsketch", seed=SEED, rows=rows, block=None, mask=None)
    cuts = sorted({0, rows // 3, rows // 2, rows})
    assert torch.equal(torch.cat([parts(a, b) for a, b in itertools.pairwise(cuts)]), found)
    packed = ops.packed_sketch(m, SEED, SaveSpec("countsketch", rows, bits=4), None)
    assert all(map(torch.equal, packed, ops.pack(found, 4, SEED)))


@pytest.mark.parametrize("kind", ["hadamard", "dct", "dft", "rows", "countsketch"])
@pytest.mark.parametrize(
    ("tokens", "rows", "valid"), [(256, 25, 0.6), (64, 63, 1), (100, 9, 0.5), (4, 1, 1), (2, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sketches_are_the_same_with_and_without_a_mask(kind, tokens, rows, valid, dtype):
    """But for a few roundings in another order; a half type rounds the result, and a sum at its half once more."""
    m = torch.randn(tokens, 70, generator=torch.Generator().manual_seed(5)).to(dtype)
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(6)) < valid
    bound = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
    for one in (None, TokenMask.of(mask)):
        shape = {"kind": kind, "seed": SEED, "rows": rows, "mask": one}
        found, expected = ops.sketch(m, **shape), sketch(m, **shape)
        assert found.dtype == dtype
        assert (found.float() - expected.float()).norm() <= bound * expected.float().norm()
        packed = ops.packed_sketch(m, SEED, SaveSpec(kind, rows, bits=8), one)
        plain_packed = plain.packed_sketch(m, SEED, SaveSpec(kind, rows, bits=8), one)
        unpacked = [packing.unpack(*stored, SEED, 8, 70, torch.float32) for stored in (packed, plain_packed)]
        step = plain_packed[1][..., 1].float().max()  # an element close to a step may round to either side
        assert (unpacked[0] - unpacked[1]).abs().max() <= 8 * step
        assert dtype != torch.float32 or ((unpacked[0] - unpacked[1]).abs() > step / 100).float().mean() < 0.02


@pytest.mark.parametrize("kind", ["hadamard", "dct", "dft", "rows", "wta"])
def test_the_defaults_of_pytorch_change_no_sketch(kind):
    m = torch.randn(64, 5, generator=torch.Generator().manual_seed(7))
    p = torch.full((64,), 1 / 64) if kind == "wta" else None
    expected = ops.sketch(m, kind=kind, seed=SEED, rows=6, p=p)
    transforms._plan.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(ops.sketch(m, kind=kind, seed=SEED, rows=6, p=p), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sampled_rows_are_the_same_to_the_bit(dtype):
    m = torch.randn(50, 70, generator=torch.Generator().manual_seed(5)).to(dtype)
    m[3] = math.inf
    sample = RowSample(torch.tensor([3, 49, 0, 7, 7], dtype=torch.int32), torch.tensor([0.0, 1.7, -2.0, 0.3, 1e-3]))
    assert torch.equal(table.GATHER_ROWS(m, sample), gather(m, sample))
    assert torch.equal(table.GATHER_ROWS(m.T[:, :50], sample), gather(m.T[:, :50], sample))


@pytest.mark.parametrize("shape", [(9, 768), (5, 130), (3, 5), (0, 64)])
def test_unrotating_is_the_same(shape):
    m = torch.randn(shape)
    expected = packing.unrotate(m, SEED)
    torch.testing.assert_close(ops._unrotate(m, SEED, RoundingNoise.of(SEED, 0, 64)), expected)


@pytest.mark.parametrize(
    "view", [lambda m: m[:, 3:133], lambda m: m[::2], lambda m: m.T, lambda m: m[:1].expand(9, -1)]
)
def test_any_strides(view):
    z = view(torch.randn(150, 150, generator=torch.Generator().manual_seed(2)))
    codes, _ = ops.pack(z, 4, SEED)
    assert (codes != packing.pack(z, 4, SEED)[0]).float().mean() < 0.002


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_rows(threads):
    z = torch.randn(1001, 600, generator=torch.Generator().manual_seed(3))
    expected = ops.pack(z, 4, SEED)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, ops.pack(z, 4, SEED), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("tensor", "backend"),
    [
        (torch.ones(2, 64), "native"),
        (torch.nn.Parameter(torch.ones(2, 64)), "plain"),
        (torch._neg_view(torch.ones(2, 64)), "plain"),
    ],
)
def test_tensors_that_are_not_plain_are_left_to_pytorch(tensor, backend):
    operation = Operation("of the tests", lambda *args: "plain", lambda *args: "native")
    assert operation(tensor, SEED) == backend
    assert operation(SEED, tensor) == backend


def test_maps_over_seeds_are_left_to_pytorch():
    sampled = torch.func.vmap(lambda seed: table.SKETCH(torch.eye(5), kind="rows", seed=seed, rows=2))(
        torch.tensor([1, 2])
    )
    assert torch.equal(sampled[1], sketch(torch.eye(5), kind="rows", seed=torch.tensor(2), rows=2))
