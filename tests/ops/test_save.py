"""What a layer saves and what it makes of it: unbiased, with the stated variance, for every kind, width and mask."""

import pytest
import torch
from cases import KIND_AND_BLOCK
from helpers import chances, heavy_tailed
from statistical import ROWS, TOKENS, assert_moments, padded

from rmm_linear.ops.save import save_input
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.packing import pack, rounding_variance
from rmm_linear.sketches import SAMPLERS, UNIFORM_MIX, TokenMask, sketch, variance
from rmm_linear.spec import SaveSpec


def masked_data(masked):
    return padded() if masked else (*heavy_tailed(TOKENS, 70, 3), None)


def check_statistics(kind, block, bits, masked, count):
    """The mean is the exact gradient; ‖error‖² is the variance of S plus, for each S, the rounding's, both exact.

    Few draws make a wide band: what is tested is the way that layers go. The formulas are held to narrow bands, on the
    same data, in tests/variance/test_closed_forms.py and tests/variance/test_simulation.py.
    """
    x, y, mask = masked_data(masked)
    ranks = None if mask is None else TokenMask.of(mask)
    spec = SaveSpec(kind, ROWS, block, bits, UNIFORM_MIX if kind in SAMPLERS else 0.0)
    p = chances(kind, x, ranks)
    exact = y.T @ x
    stated = variance(x, y, kind=kind, rows=ROWS, block=block, mask=ranks, p=p)
    errors, roundings = [], []
    for value in range(count):
        kept = save_input(x, spec, ranks, value)
        errors.append(weight_gradient(y, kept, spec, x.shape[1], ranks) - exact)
        if bits is not None:
            shape = {"kind": kind, "seed": kept[-1], "rows": ROWS, "block": block, "mask": ranks, "p": p}
            weights, z = sketch(y, **shape).square().sum(1), sketch(x, **shape)
            roundings.append(weights @ rounding_variance(pack(z, bits, kept[-1])[1], z.shape[1]))
    roundings = torch.stack(roundings) if roundings else None
    assert_moments(torch.stack(errors), exact, stated, widest=0.25, roundings=roundings)


@pytest.mark.diagonal
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_unbiased_with_the_stated_variance(kind, block, bits, masked):
    check_statistics(kind, block, bits, masked, 150)


@pytest.mark.montecarlo
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_unbiased_with_the_stated_variance_heavy(kind, block, bits, masked):
    check_statistics(kind, block, bits, masked, 1_000)
