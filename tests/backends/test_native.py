"""The C library gives what plain PyTorch gives, and leaves it the work where it cannot be used."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rmm_linear import packing
from rmm_linear.backends import native
from rmm_linear.backends.native import library
from rmm_linear.ops import sketches as table
from rmm_linear.ops.dispatch import Operation
from rmm_linear.ops.native import sketches as ops
from rmm_linear.packing.rounding import scales_of
from rmm_linear.sketches import sketch
from rmm_linear.sketches.philox import philox

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


def test_arguments_are_those_of_the_sources():
    """ctypes checks none: an argument too many or of another size would be read from wherever it ends up."""
    found = {}
    for path in Path(library.__file__).parent.glob("*.c"):
        for name, arguments in re.findall(r"V\((rmm_\w+)\)\(([^)]*)\)", path.read_text(encoding="utf-8")):
            kinds = ["pointer" if "*" in one else one.split()[-2] for one in arguments.split(",")]
            found[name] = "".join({"pointer": "p", "int64_t": "q", "int": "i", "float": "f"}[kind] for kind in kinds)
    assert found == library.SIGNATURES


@pytest.mark.parametrize("level", [one for one in (0, 3, 4) if library.is_available() and one <= library.level()])
def test_every_level_has_every_function(level):
    assert all(callable(library._function(name, level)) for name in library.SIGNATURES)


@pytest.mark.parametrize("stream", [0, 3, 2**32 - 1])
def test_random_numbers_are_the_same_to_the_bit(stream):
    offset = torch.cat((torch.arange(100), torch.tensor([2**32 - 1, 2**32, 2**62]))).view(103, 1)
    for found, word in zip(native.philox(SEED, offset, stream), philox(SEED, offset, stream), strict=True):
        assert found.shape == offset.shape
        assert torch.equal(found, word)
    strided = torch.arange(40)[::3]
    assert torch.equal(native.philox(SEED, strided)[1], philox(SEED, strided)[1])
    assert native.philox(SEED, torch.arange(0))[0].shape == (0,)
    with torch.device("meta"):
        assert native.philox(SEED, offset, stream)[0].device.type == "cpu"


@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("dtype", list(library.TYPES), ids=str)
@pytest.mark.parametrize("level", [one for one in (0, 3, 4) if library.is_available() and one <= library.level()])
def test_what_is_unpacked_in_parts_and_unrotated_later_is_the_same_to_the_bit(level, dtype, bits, monkeypatch):
    """At every level, with what is not finite in some groups; codes of those mean nothing."""
    x = torch.randn(37, 64 * 19 + 23)
    x[3, 70], x[4, 200], x[5], x[6] = math.nan, math.inf, 0.0, x[6] * 1e-14
    codes, scales = ops.pack(x.to(dtype), bits, SEED)
    monkeypatch.setattr(library, "level", lambda: level)
    again = ops.pack(x.to(dtype), bits, SEED)
    assert torch.equal(again[1], scales)
    finite = scales_of(scales).isfinite().repeat_interleave(8 * bits, 1)[:, : codes.shape[1]]
    assert torch.equal(again[0][finite], codes[finite])
    assert 0.9 < finite.float().mean() < 1
    expected = packing.unpack_parts(codes, scales, SEED, bits, x.shape[1], torch.float32)
    for begin in (0, 18):
        found, whole = (torch.empty(37 - begin, x.shape[1]) for _ in range(2))
        native.unpack(codes.data_ptr(), scales.data_ptr(), bits, int(SEED), found, begin)
        assert torch.equal(found.nan_to_num(), expected(begin, 37).nan_to_num())
        native.unpack(codes.data_ptr(), scales.data_ptr(), bits, int(SEED), whole, begin, rotated=False)
        native.unrotate(found, int(SEED))
        assert torch.equal(found.nan_to_num(), whole.nan_to_num())


@pytest.mark.parametrize("bits", packing.CODES)
@pytest.mark.parametrize("dtype", list(library.TYPES), ids=str)
@pytest.mark.parametrize("level", [one for one in (0, 3, 4) if library.is_available() and one <= library.level()])
def test_products_are_unrotated_in_their_own_dtype(level, dtype, bits, monkeypatch):
    """In float32 sums, which are rounded once."""
    monkeypatch.setattr(library, "level", lambda: level)
    columns = 64 * 19 + 23
    matrix = torch.randn(37, packing.rotated_columns(columns, bits)).to(dtype)
    expected = packing.unrotate(matrix, SEED, bits, columns)
    found = ops._unrotate(matrix.clone(), SEED, bits, columns)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_odd_values_are_packed_the_same(bits):
    z = torch.randn(6, 200)
    z[0], z[1], z[2, 70] = 0, -1.2345, math.nan
    z[3] *= 2.0**25
    z[4] *= 2.0**-40
    codes, scales = ops.pack(z, bits, SEED)
    expected_codes, expected_scales = packing.pack(z, bits, SEED)
    assert (scales.int() - expected_scales.int()).abs().max() <= 1  # on the edge of two
    assert (scales_of(scales).isnan().nonzero() == torch.tensor([[2, 1]])).all()
    finite = torch.tensor([0, 1, 3, 4, 5])
    assert (codes[finite] != expected_codes[finite]).float().mean() < 0.01
    z[5, 199] = math.inf
    for pack in (packing.pack, ops.pack):
        assert scales_of(pack(z, bits, SEED)[1])[5, 3].isnan()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_is_beyond_the_scales_is_nan(backend, monkeypatch):
    """The largest is 2³², and 4 bits reach 7.5 of it."""
    monkeypatch.setenv("RMM_BACKEND", backend)
    for large, is_beyond in ((3e38, True), (7.6 * 2.0**32, True), (7.4 * 2.0**32, False)):
        z = torch.tensor([[large, -large]])
        assert table.UNPACK(*table.PACK(z, 4, SEED), SEED, 4, 2, z.dtype).isnan().all() == is_beyond
    assert scales_of(table.PACK(torch.tensor([[1e39, 0.0]], dtype=torch.float64), 4, SEED)[1]).isnan().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_smallest_numbers_come_back_within_the_smallest_scale(backend, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    z = torch.rand(3, 70) * 1e-40
    restored = table.UNPACK(*table.PACK(z, 4, SEED), SEED, 4, 70, z.dtype)
    assert (restored - z).abs().max() < 64**0.5 * 2.0**-51  # half a step, in a group of 64 that is rotated


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
