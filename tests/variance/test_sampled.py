"""The public formulas with probabilities of one's own: against simulation, with masks, by layers, and what is refused.

The band is that of test_closed_forms.py: z = 4 over groups of 50 draws, and the standard error is asserted too.
"""

import math

import pytest
import torch
from cases import every_sampler
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, Z, assert_variance, padded

from rmm_linear.variance import required_ratio, sgd_variance, simulate_variance, sketch_variance


def chances(tokens=TOKENS):
    """Not those of the norms, and of no particular sum."""
    return 1 + 3 * torch.rand(tokens, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("bits", [None, 4])
@every_sampler
def test_rows_are_drawn_by_the_probabilities_that_are_given(kind, bits):
    """Up to a factor, and whatever they are for padding; by ‖x‖ alone, the variance would be another one."""
    x, y, mask = padded()
    p = torch.where(mask, chances(), math.nan)
    shape = {"kind": kind, "rows": ROWS, "bits": bits, "mask": mask}
    stated = float(sketch_variance(x, y, probabilities=p, draws=100, **shape))
    found = simulate_variance(x, y, probabilities=p, draws=2_000, **shape)
    assert_variance(found, stated, widest=0.05)
    assert abs(found.z_score(sketch_variance(x, y, draws=100, **shape))) > 2 * Z
    assert float(sketch_variance(x, y, probabilities=3 * p, draws=100, **shape)) == pytest.approx(stated, rel=1e-9)


@every_sampler
def test_layers_in_a_batch_have_probabilities_of_their_own(kind):
    x, y = (torch.stack((part, part.flip(0) + 1)) for part in heavy_tailed(24, 5, 3))
    p = torch.stack((chances(24), chances(24).square()))
    for closed_form, more in (
        (sketch_variance, {"rows": 6, "mask": torch.arange(24) % 3 != 1}),
        (required_ratio, {"target": 10.0, "bits": None}),
    ):
        single = [closed_form(x[i], y[i], kind=kind, probabilities=p[i], **more) for i in range(2)]
        assert torch.equal(closed_form(x, y, kind=kind, probabilities=p, **more), torch.stack(single))
        assert single[0] != single[1]


@every_sampler
def test_the_ratio_for_a_target_goes_by_the_probabilities(kind):
    x, y, mask = padded()
    given = {"kind": kind, "mask": mask, "probabilities": y.norm(dim=1) * x.norm(dim=1) + 0.01}
    limit = 0.5 * float(sgd_variance(x, y))
    rows = round(TOKENS * float(required_ratio(x, y, bits=None, target=0.5, **given)))
    assert float(sketch_variance(x, y, rows=rows, **given)) <= limit
    assert float(sketch_variance(x, y, rows=rows - 1, **given)) > limit
    assert rows < TOKENS * float(required_ratio(x, y, bits=None, target=0.5, kind=kind, mask=mask))


@pytest.mark.parametrize("rows", [2, 3, 6])
@pytest.mark.parametrize("bits", [None, 8])
@every_sampler
def test_tokens_that_are_never_drawn_add_nothing_or_infinity(kind, bits, rows):
    """Three of ten tokens may be drawn: wta keeps them all where it can, and rows that are left over are nothing."""
    x, y = heavy_tailed(10, 3, 2)
    p = torch.zeros(10, dtype=torch.float64).index_put_((torch.tensor([1, 4, 7]),), torch.tensor([2.0, 3, 5]).double())
    shape = {"kind": kind, "rows": rows, "bits": bits, "probabilities": p}
    assert sketch_variance(x, y, **shape) == math.inf
    y *= (p > 0).unsqueeze(1)
    stated, found = sketch_variance(x, y, draws=200, **shape), simulate_variance(x, y, draws=2_000, **shape)
    scale = float((y.square().sum(1) * x.square().sum(1)).sum())
    if kind == "wta" and rows >= 3:
        # t·d/p − g of a token that is certain to be drawn: two numbers that are off by a few eps of d.
        limit = 64 * 2**-53 * scale if bits is None else 1e-3 * float((y.T @ x).square().sum())
        assert float(stated) == pytest.approx(0, abs=limit)
        assert found.variance == pytest.approx(0, abs=limit)
    else:
        assert stated > 0
        assert abs(found.z_score(stated)) < Z


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "rows"}, ValueError, "probabilities are for wta and norm_rows, got kind='rows'"),
        ({"probabilities": torch.ones(7)}, ValueError, r"probabilities must have .*8.* rows of x, got \(7,\)"),
        ({"probabilities": torch.ones(8, 1)}, ValueError, r"probabilities must have .*8.* rows of x, got \(8, 1\)"),
        ({"probabilities": torch.ones(8).long()}, TypeError, "probabilities must be floating point, got torch.int64"),
        ({"probabilities": torch.arange(8.0) - 1}, ValueError, "must be finite, not negative and not all 0"),
        ({"probabilities": torch.full((8,), math.nan)}, ValueError, "must be finite, not negative and not all 0"),
        ({"probabilities": torch.zeros(8)}, ValueError, "must be finite, not negative and not all 0"),
    ],
)
@pytest.mark.parametrize("formula", [sketch_variance, simulate_variance])
def test_wrong_probabilities_are_refused(formula, change, error, message):
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(error, match=message):
        formula(x, y, **{"kind": "wta", "rows": 2, "probabilities": torch.ones(8), **change})
