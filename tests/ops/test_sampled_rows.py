"""The operators of the kinds that sample rows: what is drawn, in parts, counted, and what they refuse."""

import math

import pytest
import torch
from cases import every_sampler, needs_triton
from helpers import chances
from operator_helpers import SEED, ranks

from rmm_linear import packing
from rmm_linear.ops import sketches as table
from rmm_linear.sketches import (
    sketch,
    sketch_parts,
)
from rmm_linear.spec import SaveSpec

every_mask = pytest.mark.parametrize("mask", ["all", "some", "few"])
every_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def heavy(tokens=40, columns=70, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator) * torch.randn(tokens, 1, generator=generator).exp()
    return x.to(dtype)


def sample(x, kind, rows, uniform_mix=0.1, expected=None, mask=None):
    return table.SAMPLE_ROWS(x, SEED, SaveSpec(kind, rows, None, None, uniform_mix), expected, mask)


@every_backend
@every_mask
@every_sampler
def test_drawn_rows_are_those_of_the_sketch(kind, mask, backend, monkeypatch):
    """The operators' rows and scales make the S that follows from the seed and p; kernels' norms differ by rounding."""
    monkeypatch.setenv("RMM_BACKEND", backend)
    x, chosen = heavy(), ranks(mask)
    index, scale = sampled = sample(x, kind, 7, mask=chosen)
    assert (index.dtype, scale.dtype) == (torch.int32, torch.float32)
    z = sketch(x, kind=kind, seed=SEED, rows=7, mask=chosen, p=chances(kind, x, chosen))
    torch.testing.assert_close(table.GATHER_ROWS(x, sampled), z, rtol=1e-5, atol=1e-5)
    codes, scales = table.PACKED_ROWS(x, SEED, sampled, 8)
    restored = packing.unpack(codes, scales, SEED, 8, 70, x.dtype)
    torch.testing.assert_close(restored, z, rtol=0, atol=float(z.abs().max()) / 40)


def test_expected_norms_and_the_mix_decide_what_is_drawn():
    x = torch.ones(1000, 3)
    expected = torch.ones(1000)
    expected[:100] = 100.0
    for mix, given, share in ((1e-3, expected, 0.917), (1.0, expected, 0.1), (1e-3, None, 0.1)):
        index, _ = sample(x, "norm_rows", 900, mix, given)
        assert float((index < 100).double().mean()) == pytest.approx(
            share, abs=4 * math.sqrt(share * (1 - share) / 900)
        )


def test_what_cannot_be_drawn_is_refused():
    x = heavy()
    for rows in (0, 40):
        with pytest.raises(ValueError, match=f"rows must be at least 1 and less than the 40 tokens, got {rows}"):
            sample(x, "wta", rows)
    with pytest.raises(ValueError, match=r"expected must have one number per token, \(40,\), got \(4,\)"):
        sample(x, "wta", 7, expected=torch.ones(4))
    with pytest.raises(ValueError, match=r"uniform_mix must be in \(0, 1\], got 0.0"):
        sample(x, "wta", 7, 0.0)
    for run in (sketch, sketch_parts):
        with pytest.raises(ValueError, match="kind='wta' samples rows by the probabilities p of the tokens"):
            run(x, kind="wta", seed=SEED, rows=7)
    with pytest.raises(ValueError, match="kind='norm_rows' samples rows by the probabilities p"):
        torch.ops.rmm_linear.sketch(x, SEED, "norm_rows", 7)
