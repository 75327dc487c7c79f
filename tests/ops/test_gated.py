"""The operators of gated MLPs: accuracy of the C library, bytes, errors."""

import pytest
import torch

from rmm_linear.backends import native as library
from rmm_linear.ops import gated as ops
from rmm_linear.packing import gated as plain

SEEDS = torch.tensor([77, -5])
native = pytest.mark.skipif(not library.is_available(), reason="the C library was not built")


def made(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + columns)
    return [(torch.randn(rows, columns, generator=generator) * scale).to(dtype) for scale in (3, 1, 1)]


@native
@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
def test_the_c_library_computes_the_activations_to_float32(activation):
    """Two columns, of which the second has s = act(0) = 0: offset and scale tell the first."""
    x = torch.linspace(-5, 20, 4001)
    a = torch.stack((x, torch.zeros_like(x)), dim=1)
    b = torch.ones_like(a)
    found, expected = (
        pack(a, b, SEEDS, activation, 8, (True, True), None) for pack in (ops.PACK_GATED, plain.pack_gated)
    )
    for one, other in zip(found, expected, strict=True):
        # Offsets and scales are rounded to bfloat16; an error of 2⁻²² moves one of 4,001 to the next number in 2 %.
        assert (one.qparams != other.qparams).any(-1).float().mean() < 0.05
        torch.testing.assert_close(one.qparams, other.qparams, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("run", [ops.keep_gated, ops.gate_and_pack], ids=["keep_gated", "gate_and_pack"])
@pytest.mark.parametrize("change", [lambda b: b.bfloat16(), lambda b: b[:3], lambda b: b[:, :1]])
def test_factors_of_two_kinds_are_refused(run, change):
    """The C library would read b as a: beyond its end, or as numbers of another dtype."""
    a, b, _ = made(7, 70)
    with pytest.raises(ValueError, match=r"a and b must have one dtype and one shape, got torch.float32 \(7, 70\) and"):
        run(a, change(b), "silu", 4, 77, None, True, True)
