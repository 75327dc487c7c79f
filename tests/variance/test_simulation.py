"""The variance of packed sketches, seed by seed, and what simulations take and hold.

For every S the rounding adds Σ_b ‖(SᵀY)_b‖² E‖ẑ_b − z_b‖², exactly, so ‖error‖² less that has the mean of the unpacked
variance. That is checked group by group of 50 draws, by a z-test over the groups' means as in test_closed_forms.py,
and needs no mean of the rounding over seeds, which differs by half from one to the next at this size. The standard
error is a few per cent of the whole variance, so a rounding term wrong by a fifth is seen in 2 bits, where it is the
larger part.
"""

import math

import pytest
import torch
from cases import KIND_AND_BLOCK
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, Z, assert_variance, padded

from rmm_linear.memory import peak
from rmm_linear.packing.normal import LEVELS as NORMAL
from rmm_linear.packing.pack import WIDTHS, pack, rounding_variance, unpack
from rmm_linear.sketches import TokenMask, variance
from rmm_linear.variance import sgd_variance, simulate_sgd_variance, simulate_variance, sketch_variance
from rmm_linear.variance.arguments import sampling_probabilities
from rmm_linear.variance.simulation import Simulation, draw_sketches

GROUP = 50


def errors_and_roundings(x, y, bits, seeds, **shape):
    """‖error‖² and the exact rounding term of every draw of a group, which has one seed of the rounding."""
    z, sketched_y = draw_sketches(torch.cat((x, y), 1), seeds, **shape).split((x.shape[1], y.shape[1]), 2)
    flat = z.reshape(-1, x.shape[1])
    restored = unpack(*pack(flat, bits, seeds[:1]), seeds[:1], bits, x.shape[1], z.dtype).view(z.shape)
    errors = (sketched_y.transpose(1, 2) @ restored - y.T @ x).square().sum((1, 2))
    roundings = sketched_y.square().sum(2) * rounding_variance(pack(flat, bits, seeds[:1])[1], x.shape[1]).view(
        z.shape[:2]
    )
    return errors, roundings.sum(1)


def check_packed(kind, block, bits, draws, widest, rounding_scale=1.0):
    x, y, mask = padded()
    ranks = TokenMask.of(mask)
    shape = {"kind": kind, "rows": ROWS, "block": block, "mask": ranks}
    shape["p"] = sampling_probabilities(x, kind, ROWS, None, ranks)
    groups = [errors_and_roundings(x, y, bits, seeds, **shape) for seeds in torch.arange(draws).split(GROUP)]
    found = Simulation.of([errors - rounding_scale * roundings for errors, roundings in groups])
    stated = variance(x, y, **shape)
    whole = float(stated + torch.stack([rounding.mean() for _, rounding in groups]).mean())
    assert_variance(found, stated, widest=widest, whole=whole)


@pytest.mark.diagonal
@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("draws", "widest"), [(2_000, 0.05), pytest.param(100_000, 0.007, marks=pytest.mark.montecarlo)]
)
def test_packing_adds_what_is_stated(kind, block, bits, draws, widest):
    check_packed(kind, block, bits, draws=draws, widest=widest)


def test_a_rounding_term_that_is_wrong_by_a_fifth_is_outside_the_band():
    check_packed("rademacher", None, 2, draws=2_000, widest=0.05)
    for scale in (0.8, 1.2):
        with pytest.raises(AssertionError, match="stated"):
            check_packed("rademacher", None, 2, draws=2_000, widest=0.05, rounding_scale=scale)


@pytest.mark.diagonal
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize(("kind", "block"), KIND_AND_BLOCK)
def test_sketch_variance_is_the_stated_one_and_the_mean_of_the_rounding_over_its_seeds(kind, block, bits):
    x, y, mask = padded()
    ranks = TokenMask.of(mask)
    shape = {"kind": kind, "rows": ROWS, "block": block, "mask": ranks}
    shape["p"] = sampling_probabilities(x, kind, ROWS, None, ranks)
    roundings = [errors_and_roundings(x, y, bits, torch.tensor([seed]), **shape)[1] for seed in range(3)]
    expected = variance(x, y, **shape) + torch.stack(roundings).mean()
    found = sketch_variance(x, y, kind=kind, rows=ROWS, block=block, bits=bits, mask=mask, draws=3)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("rows", [ROWS, TOKENS])
@pytest.mark.parametrize("bits", NORMAL)
def test_normal_codes_add_what_is_stated(bits, rows):
    """Both are means over seeds, the simulation's over the masked rows of other ones."""
    x, y, mask = padded()
    found = simulate_variance(x, y, kind="countsketch", rows=rows, bits=bits, mask=mask, draws=1000, seed=10_000)
    stated = sketch_variance(x, y, kind="countsketch", rows=rows, bits=bits, mask=mask, draws=1000)
    assert abs(found.z_score(stated)) < Z * 2**0.5, (found, stated)
    assert found.standard_error < 0.06 * found.variance


@pytest.mark.parametrize("kind", ["countsketch", "rademacher"])
def test_a_simulation_holds_a_few_million_numbers(kind):
    """Errors are summed up sketch by sketch; the 50 sketches of a group would be 13 million float32 numbers here."""
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    with peak("cpu") as highest:
        simulate_variance(x, y, kind=kind, rows=256, draws=100)
    assert highest.bytes / 4 < 9e6


def test_a_group_that_is_made_in_parts_has_the_same_draws(monkeypatch):
    x, y = heavy_tailed(12, 5, 3)
    for kind in ("countsketch", "rademacher"):
        shape = {"kind": kind, "rows": 4, "draws": 400}
        whole = simulate_variance(x, y, **shape)
        with monkeypatch.context() as patch:
            patch.setattr("rmm_linear.variance.simulation._ELEMENTS", 12 * (8 + 4) * 7)
            parts = simulate_variance(x, y, **shape)
        assert (parts.variance, parts.draws) == (pytest.approx(whole.variance, rel=1e-12), 400)


def test_draws_of_minibatches_are_counted():
    x, y = heavy_tailed(8, 3, 2)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        simulate_sgd_variance(x, y, draws=0)
    assert [simulate_sgd_variance(x, y, draws=draws).draws for draws in (1, 100, 125, 2_001)] == [40, 100, 126, 2_050]
    assert math.isfinite(simulate_sgd_variance(x, y, draws=1).standard_error)


def test_the_interval_of_a_few_draws_covers_the_variance_as_often_as_it_says():
    """95 of 100 times, up to the skew of 100 draws: of 200 intervals 190, with a standard deviation of 3 to 4."""
    x, y = heavy_tailed(12, 3, 2)
    exact = float(sgd_variance(x, y))
    intervals = [simulate_sgd_variance(x, y, draws=100, seed=seed).interval(0.95) for seed in range(200)]
    assert 175 <= sum(low < exact < high for low, high in intervals) <= 199


def test_an_interval_is_as_wide_as_its_confidence():
    found = Simulation(10.0, 2.0, 100)
    assert found.interval(0.95) == pytest.approx((10 - 1.95996 * 2, 10 + 1.95996 * 2), rel=1e-5)
    assert found.z_score(7.0) == 1.5
    assert Simulation(1.0, 0.0, 100).z_score(1.0) == 0
    assert Simulation(1.0, 0.0, 100).z_score(2.0) == -math.inf
