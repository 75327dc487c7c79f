"""The operators of gated MLPs: accuracy of the C library, bytes, errors."""

import pytest
import torch

from rmm_linear.backends import native as library
from rmm_linear.ops import gated as ops
from rmm_linear.packing import gated as plain
from rmm_linear.packing.pack import unpack
from rmm_linear.packing.rounding import scales_of

SEEDS = torch.tensor([77, -5])
native = pytest.mark.skipif(not library.is_available(), reason="the C library was not built")


def made(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + columns)
    return [(torch.randn(rows, columns, generator=generator) * scale).to(dtype) for scale in (3, 1, 1)]


@native
@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
def test_the_c_library_computes_the_activations_to_float32(activation):
    """63 columns, which are not rotated, so that all of a row are one number.

    A number that is off by e falls to the other side of a code with the probability e / scale, and what is unpacked is
    off by half a step more. Of scales, eight to an octave, it moves one with a probability that is smaller by far.
    """
    x = torch.linspace(-5, 20, 4001)
    a = x.unsqueeze(1).repeat(1, 63)
    b = torch.ones_like(a)
    found, expected = (
        pack(a, b, SEEDS, activation, 8, (True, True), None) for pack in (ops.PACK_GATED, plain.pack_gated)
    )
    error = 2**-22 * x.abs().clamp(min=1)
    for one, other, seed in zip(found, expected, SEEDS, strict=True):
        scales, expected_scales = (scales_of(matrix.scales).squeeze(1) for matrix in (one, other))
        apart = torch.sub(*(unpack(*matrix, seed, 8, 63, x.dtype) for matrix in (one, other))).abs()
        assert (apart.amax(1) <= error + (scales + expected_scales) / 2).all()
        chance = error / scales
        large = chance < 0.01
        assert (scales != expected_scales)[large].float().mean() < 0.001
        assert (one.codes != other.codes)[large].sum() <= 63 * chance[large].sum()


@pytest.mark.parametrize("run", [ops.keep_gated, ops.gate_and_pack], ids=["keep_gated", "gate_and_pack"])
@pytest.mark.parametrize("change", [lambda b: b.bfloat16(), lambda b: b[:3], lambda b: b[:, :1]])
def test_factors_of_two_kinds_are_refused(run, change):
    """The C library would read b as a: beyond its end, or as numbers of another dtype."""
    a, b, _ = made(7, 70)
    with pytest.raises(ValueError, match=r"a and b must have one dtype and one shape, got torch.float32 \(7, 70\) and"):
        run(a, change(b), "silu", 4, 77, None, True, True)
