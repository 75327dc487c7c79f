"""The statistical checks that other tests rely on: they pass what is right, and can fail."""

import math

import pytest
import torch
from helpers import heavy_tailed
from statistical import assert_moments, assert_unbiased, assert_variance

from rmm_linear.sketches import sketch, variance
from rmm_linear.variance.simulation import Simulation

X, Y = heavy_tailed(24, 5, 4)
EXACT = Y.T @ X
DRAWS = 300


def estimate(seed, kind="rademacher"):
    z = sketch(torch.cat((X, Y), 1), kind=kind, seed=torch.tensor(seed), rows=12)
    return z[:, 5:].T @ z[:, :5]


def test_an_unbiased_estimate_passes():
    values = assert_unbiased(estimate, EXACT, draws=DRAWS, widest=0.1)
    assert len(values.unique()) == DRAWS
    by_name = lambda seed: {"first": estimate(seed)[:2], "rest": estimate(seed)[2:], "other": None}  # noqa: E731
    exact = {"first": EXACT[:2], "rest": EXACT[2:]}
    torch.testing.assert_close(assert_unbiased(by_name, exact, draws=DRAWS, widest=0.1), values)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda seed: 1.3 * estimate(seed),
        lambda seed: torch.zeros_like(EXACT),
        lambda seed: estimate(seed) - EXACT,  # noise alone, as Z of one S with Y of another
        lambda seed: estimate(seed) * math.nan,
        lambda seed: 1.001 * EXACT,  # without any noise there is no room
    ],
    ids=["scale", "zeros", "noise", "nan", "constant"],
)
def test_a_wrong_estimate_fails(wrong):
    with pytest.raises(AssertionError, match="projection"):
        assert_unbiased(wrong, EXACT, draws=DRAWS, widest=0.1)


def test_draws_that_say_too_little_fail():
    with pytest.raises(AssertionError, match="standard error"):
        assert_unbiased(estimate, EXACT, draws=DRAWS, widest=1e-3)


def test_room_is_for_rounding_in_addition_to_the_noise():
    assert_unbiased(lambda seed: 1.001 * EXACT, EXACT, draws=2, widest=0.1, room=2e-3)
    with pytest.raises(AssertionError, match="projection"):
        assert_unbiased(lambda seed: 1.001 * EXACT, EXACT, draws=2, widest=0.1, room=5e-4)


def errors():
    return torch.stack([estimate(seed) for seed in range(DRAWS)]) - EXACT


def test_the_moments_of_an_estimate_are_mean_scale_and_variance():
    drawn, stated = errors(), variance(X, Y, kind="rademacher", rows=12)
    assert_moments(drawn, EXACT, stated, widest=0.1)
    aside = torch.zeros_like(EXACT)
    aside[0, 0], aside[0, 1] = EXACT[0, 1], -EXACT[0, 0]  # a bias that no projection sees
    for wrong, message in ((drawn + aside / aside.norm() * stated.sqrt(), "bias"), (drawn + EXACT, "bias")):
        with pytest.raises(AssertionError, match=message):
            assert_moments(wrong, EXACT, stated, widest=0.1)
    for factor in (0.5, 2):
        with pytest.raises(AssertionError, match="stated"):
            assert_moments(drawn, EXACT, factor * stated, widest=0.1)


def test_what_rounding_adds_is_taken_off_every_draw():
    stated, rounding = variance(X, Y, kind="rademacher", rows=12), torch.rand(DRAWS, 1, 1).double() * 50
    noise = torch.randn(DRAWS, *EXACT.shape, dtype=torch.float64) * (rounding / EXACT.numel()).sqrt()
    assert_moments(errors() + noise, EXACT, stated, widest=0.1, roundings=rounding.flatten())
    with pytest.raises(AssertionError, match="stated"):
        assert_moments(errors(), EXACT, stated, widest=0.1, roundings=stated.expand(DRAWS))


def test_a_variance_has_a_band_of_its_own_standard_error():
    found = Simulation(10.0, 0.2, 100)
    assert_variance(found, 10.7, widest=0.03)
    for stated, widest, whole in ((10.9, 0.03, None), (9.1, 0.03, None), (10.0, 0.01, None), (10.0, 0.03, 5.0)):
        with pytest.raises(AssertionError, match="stated"):
            assert_variance(found, stated, widest=widest, whole=whole)
    with pytest.raises(AssertionError, match="nan"):
        assert_variance(Simulation(math.nan, 0.2, 100), 10.0, widest=1)
