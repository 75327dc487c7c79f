"""The C library computes the same for every generation of processors that it is compiled for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rmm_linear import packing
from rmm_linear.backends import native
from rmm_linear.backends.native import library, transforms
from rmm_linear.ops.native import attention, derivatives, gated, masks, norms
from rmm_linear.packing import empty_packed
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.packing.norms import NormCopy
from rmm_linear.packing.pointwise import Pointwise

SEED = torch.tensor([7])
ROWS, COLUMNS = 37, 64 * 19 + 23  # more groups than a batch of any level has, and a short one
HIGHEST = library.level() if library.is_available() else 0
LOWER = [level for level in (0, 3) if level < HIGHEST]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch):
    """Run a function at a level and at the highest one."""

    def run(level, function):
        found = []
        for one in (level, HIGHEST):
            monkeypatch.setattr(library, "level", lambda one=one: one)
            found.append(function())
        return found

    return run


def matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[3, 70], x[4, 200], x[5] = float("nan"), float("inf"), 0.0
    x[6] *= 1e-30
    return x.to(dtype)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_arguments_are_those_of_the_sources():
    """ctypes checks none: an argument too many or of another size would be read from wherever it ends up."""
    found = {}
    for path in Path(library.__file__).parent.glob("*.c"):
        for name, arguments in re.findall(r"V\((rmm_\w+)\)\(([^)]*)\)", path.read_text(encoding="utf-8")):
            kinds = ["pointer" if "*" in one else one.split()[-2] for one in arguments.split(",")]
            found[name] = "".join({"pointer": "p", "int64_t": "q", "int": "i", "float": "f"}[kind] for kind in kinds)
    assert found == library.SIGNATURES


@pytest.mark.parametrize("level", [*LOWER, HIGHEST] if library.is_available() else [])
def test_every_level_has_every_function(level):
    assert all(callable(library._function(name, level)) for name in library.SIGNATURES)


def native_unrotated(matrix, seed):
    matrix = matrix.clone()
    native.unrotate(matrix, seed)
    return matrix


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("bits", packing.WIDTHS)
@pytest.mark.parametrize("dtype", list(library.TYPES))
def test_packing_is_the_same_to_the_bit(level, bits, dtype, both):
    seed = int(SEED)

    def run():
        codes, qparams = empty_packed(ROWS, COLUMNS, bits, SEED)
        is_finite = native.pack(matrix(dtype), bits, seed, codes.data_ptr(), qparams.data_ptr(), ROWS)
        packing.mark_infinite(qparams)
        rotated, z = torch.empty(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
        native.unpack(codes.data_ptr(), qparams.data_ptr(), bits, seed, rotated)
        native.unpack(codes.data_ptr(), qparams.data_ptr(), bits, seed, z, rotated=False)
        half = torch.empty(ROWS, COLUMNS, dtype=dtype)
        native.unpack(codes.data_ptr(), qparams.data_ptr(), bits, seed, half)
        assert torch.equal(native_unrotated(rotated, seed).nan_to_num(), z.nan_to_num())
        return is_finite, codes, qparams, half, rotated, z

    found, expected = both(level, run)
    assert not found[0]
    assert not expected[0]
    same(found[2:], expected[2:])
    finite = expected[2].float().isfinite().all(-1).repeat_interleave(8 * bits, 1)[:, : expected[1].shape[1]]
    assert torch.equal(found[1][finite], expected[1][finite])  # the codes of other groups mean nothing
    assert finite.float().mean() > 0.9


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("dtype", list(library.TYPES))
def test_sketches_are_the_same_to_the_bit(level, dtype, both):
    index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[: ROWS - 4]
    many = torch.randn(400, 300, generator=torch.Generator().manual_seed(2))
    scale = torch.linspace(-2, 2, 9)  # 0 among them, for the row with an infinity

    def run():
        return [
            native.countsketch(matrix(dtype), int(SEED), 7, 2, 7, index),
            native.countsketch(matrix(dtype), int(SEED), 7, 0, 7, index, torch.float32),
            native.countsketch(many.to(dtype), int(SEED), 5, 0, 5),  # 79 tokens are added to a row, 32 at a time
            native.gather_rows(matrix(dtype), torch.arange(9), scale),
        ]

    found, expected = both(level, run)
    same(found, expected)
    assert found[3][4].count_nonzero() == 0


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("dtype", list(library.TYPES))
@pytest.mark.parametrize(("name", "bits"), [("gelu", 8), ("gelu", 4), ("gelu", 2), ("silu", 1), ("relu", 1)])
def test_derivatives_are_the_same_to_the_bit(level, dtype, name, bits, both):
    function = Pointwise(name)
    how = function, bits, None if function.is_exact else SEED, None

    def run():
        codes = torch.empty(ROWS, -(-COLUMNS * bits // 8), dtype=torch.uint8)
        derivatives.pack_derivative(matrix(dtype), codes, *how)
        return codes, derivatives.apply_derivative(matrix(dtype), codes, *how)

    same(*both(level, run))


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("kind", transforms.KINDS)
def test_transforms_are_the_same_to_the_bit(level, kind, both):
    places = torch.cat((torch.arange(ROWS), torch.full((256 - ROWS,), -1)))
    index, signs = torch.tensor([0, 3, 128, 255]), torch.linspace(-1, 1, 256)

    def run():
        return [
            transforms.sampled_transform(matrix(dtype).nan_to_num(0, 2), kind, index, places, signs)
            for dtype in library.TYPES
        ]

    same(*both(level, run))


@pytest.mark.parametrize("level", LOWER)
def test_masks_are_the_same_to_the_bit(level, both):
    mask = matrix() > 0.3

    def run():
        bits = [masks.pack_mask(mask), masks.pack_mask(mask.float()), masks.pack_mask(mask, torch.tensor([5, 0, 9]))]
        return [*bits, *(masks.apply_mask(matrix(dtype), bits[0], 1.25) for dtype in library.TYPES)]

    found, expected = both(level, run)
    same(found, expected)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(library.TYPES))
def test_gated_products_are_the_same_to_the_bit(level, activation, dtype, both):
    seeds = torch.tensor([1, 2])
    a, b = matrix(dtype).nan_to_num(0, 2), matrix(dtype).flip(0).nan_to_num(0, 2)

    def run():
        packed = gated.pack_gated(a, b, seeds, activation, 4, (True, True), None)
        gradients = gated.apply_gated(a, seeds, packed, 4, None)
        return *packed[0], *packed[1], *gradients

    same(*both(level, run))


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("dtype", list(library.TYPES))
def test_sums_over_rows_are_the_same_but_for_their_order(level, dtype, both):
    """Norms and softmax: sums of n float32 numbers of about 1 in two orders, each within n · 2⁻²⁴ relatively."""
    x, gamma = matrix(dtype).nan_to_num(0, 2), torch.linspace(0.5, 2, COLUMNS)

    def run():
        codes, qparams, rstd = norms.pack_norm(x, 8, SEED, 1e-5)
        # From the same codes, so that a sum that is a little different does not move an element to the next code.
        saved = NormCopy(torch.full_like(codes, 77), torch.full_like(qparams, 0.5), rstd)
        gradients = norms.norm_gradients(x, saved, 8, SEED, gamma, dtype=torch.float32)
        scores, dp = x.float().clone(), x.flip(1).float()
        attention.softmax_gradients(scores, dp)
        return rstd, *gradients, scores, dp

    for found, expected in zip(*both(level, run), strict=True):
        bound = COLUMNS * 2.0**-24
        torch.testing.assert_close(found, expected, rtol=8 * bound, atol=8 * bound * float(expected.abs().max()))
