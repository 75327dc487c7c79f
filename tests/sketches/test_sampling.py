"""norm_rows and wta: the probabilities, the draw, and both exact variances in every branch."""

import itertools
import math

import pytest
import torch
from cases import every_sampler
from helpers import heavy_tailed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from statistical import assert_moments

from rmm_linear.sketches import (
    SAMPLERS,
    RowSample,
    TokenMask,
    gather,
    probabilities,
    random_keys,
    row_norms,
    sample_rows,
    variance,
)
from rmm_linear.sketches.sampling import NORM_ROWS, WTA, Sampler
from rmm_linear.sketches.sampling import variance as sampling_variance


def winners(p, rows, kind=WTA):
    """C: how many tokens are kept as they are, and what they weigh."""
    ranked = p.sort(descending=True).values
    count = int(kind.winners(ranked.flip(0).cumsum(0).flip(0), rows))
    return count, float(ranked[:count].sum())


def lengthened(rows, factor):
    """Heavy-tailed X and Y with some of X's rows longer."""
    x, y = heavy_tailed(24, 5, 4)
    x[rows] *= factor
    return x, y


def equal_norms():
    x, y = heavy_tailed(24, 5, 4)
    return x / x.norm(dim=1, keepdim=True), y


def first_step():
    x, y = heavy_tailed(24, 5, 4)
    return x, y, 6, {}, None


def known_norms():
    """ŷ off by a factor of a few from ‖y‖, and useless for some tokens."""
    x, y = heavy_tailed(24, 5, 4)
    expected = y.norm(dim=1) * torch.linspace(0.5, 2, 24)
    expected[3], expected[4], expected[5] = math.nan, -1.0, math.inf
    return x, y, 6, {"expected": expected}, None


def no_winner():
    x, y = equal_norms()
    return x, y, 6, {}, lambda count, share: count == 0


def winners_take_nearly_all():
    x, y = lengthened(slice(0, 5), 1e4)
    return x, y, 6, {"uniform_mix": 1e-4}, lambda count, share: count == 5 and 0.999 < share < 1


def one_dominates():
    x, y = lengthened(slice(7, 8), 1e4)
    return x, y, 6, {}, lambda count, share: count == 1 and share > 0.8


def padding():
    x, y = heavy_tailed(40, 5, 4)
    mask = torch.arange(40) % 5 > 1
    return x, y * mask.unsqueeze(1), 6, {"mask": TokenMask.of(mask)}, None


def almost_as_many_rows_as_tokens():
    """22 rows for 24 tokens: most of what norm_rows draws is drawn more than once."""
    x, y = heavy_tailed(24, 5, 4)
    return x, y, 22, {}, None


CASES = [
    first_step, known_norms, no_winner, winners_take_nearly_all, one_dominates, padding, almost_as_many_rows_as_tokens
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def errors(x, y, p, rows, kind, mask, first, count):
    """dŴ − dW for ``count`` draws."""
    keys = torch.stack([random_keys(seed, rows) for seed in torch.arange(first, first + count)])
    index, scale = sample_rows(p, keys, SAMPLERS[kind], mask)
    z, sketched = x[index] * scale.double().unsqueeze(-1), y[index] * scale.double().unsqueeze(-1)
    return sketched.transpose(1, 2) @ z - y.T @ x


def check(case, kind, count, widest):
    x, y, rows, options, holds = case()
    p, mask = probabilities(row_norms(x), **options), options.get("mask")
    assert holds is None or holds(*winners(p, rows))
    stated, exact = variance(x, y, kind=kind, rows=rows, mask=mask, p=p), y.T @ x
    parts = [errors(x, y, p, rows, kind, mask, first, min(500, count)) for first in range(0, count, 500)]
    assert_moments(torch.cat(parts), exact, stated, widest=widest)


@pytest.mark.diagonal
@every_case
@every_sampler
def test_mean_and_variance_in_every_branch(kind, case):
    check(case, kind, 4_000, 0.05)


@pytest.mark.montecarlo
@every_case
@every_sampler
def test_mean_and_variance_in_every_branch_heavy(kind, case):
    check(case, kind, 100_000, 0.01)


@pytest.mark.parametrize("rows", [1, 2, 3])
@every_sampler
def test_mean_and_variance_over_all_outcomes(kind, rows):
    """Nothing random: every outcome of the draw with its probability, for five tokens."""
    x, y = heavy_tailed(5, 3, 2)
    p = probabilities(row_norms(x), 0.2)
    count = winners(p, rows, SAMPLERS[kind])[0]
    order = p.argsort(descending=True).tolist()
    kept, rest = order[:count], order[count:]
    mass = float(p[rest].sum())
    mean, squares, exact = torch.zeros(2, 3, dtype=torch.float64), 0.0, y.T @ x
    for drawn in itertools.product(rest, repeat=rows - count):
        chance = math.prod(float(p[j]) / mass for j in drawn)
        scales = [1.0] * count + [mass / ((rows - count) * float(p[j])) for j in drawn]
        estimate = sum(s * torch.outer(y[j], x[j]) for j, s in zip((*kept, *drawn), scales, strict=True))
        mean += chance * estimate
        squares += chance * float((estimate - exact).square().sum())
    torch.testing.assert_close(mean, exact)
    assert float(variance(x, y, kind=kind, rows=rows, p=p)) == pytest.approx(squares, rel=1e-9)


def test_wta_keeps_its_winners_and_norm_rows_draws_duplicates():
    x, _, rows, options, _ = one_dominates()
    p = probabilities(row_norms(x), **options)
    index, scale = sample_rows(p, random_keys(torch.tensor(1), rows), WTA)
    assert (int(index[0]), float(scale[0])) == (7, 1.0)
    assert 7 not in index[1:]
    index, scale = sample_rows(p, random_keys(torch.tensor(1), rows), NORM_ROWS)
    assert (index == 7).sum() > 1
    torch.testing.assert_close(scale, (1 / (rows * p[index]).sqrt()).float())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_number_of_winners_is_the_best_by_brute_force(case):
    x, _, rows, options, _ = case()
    p = probabilities(row_norms(x), **options)
    ranked = sorted(p.tolist(), reverse=True)
    noise = [sum(ranked[c:]) / (rows - c) for c in range(rows)]
    assert noise[winners(p, rows)[0]] == pytest.approx(min(noise), rel=1e-12)


def test_draws_follow_the_probabilities():
    """χ² of 23 degrees of freedom over 24,000 draws with replacement; p = 1e-5 bound 66.2."""
    p = probabilities(row_norms(heavy_tailed(24, 5, 4)[0]))
    index, _ = sample_rows(p, random_keys(torch.tensor(3), 24_000).view(4_000, 6), NORM_ROWS)
    counts = torch.bincount(index.flatten(), minlength=24)
    assert ((counts - 24_000 * p).square() / (24_000 * p)).sum() < 66.2


# Theorem 2

norms = st.floats(1e-3, 1e3) | st.sampled_from([0.0, 1.0, 1e6])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(3, 12), st.sampled_from([1e-3, 0.1, 1.0]), st.integers(0, 2**32))
def test_winners_lower_the_variance_whenever_they_weigh_more_than_their_rows(data, tokens, mix, seed):
    """Theorem 2 for every c, not only the best; and wta, whose c is the best, is never above norm_rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(data.draw(st.lists(norms, min_size=tokens, max_size=tokens)), dtype=torch.float64)
    x = torch.randn(tokens, 2, generator=generator, dtype=torch.float64) * lengths.unsqueeze(1)
    y = torch.randn(tokens, 2, generator=generator, dtype=torch.float64)
    if data.draw(st.booleans()):
        y = torch.ones_like(y)  # gradients that agree: nothing cancels
    rows = data.draw(st.integers(1, tokens - 1))
    p = probabilities(row_norms(x), mix)
    plain = float(variance(x, y, kind="norm_rows", rows=rows, p=p))
    slack = 1e-9 * float((x.square().sum(1) * y.square().sum(1) / p).sum())
    ranked = p.sort(descending=True).values
    for count in range(rows):
        if float(ranked[:count].sum()) > count / rows:
            fixed = Sampler("", "", lambda tails, _, count=count: torch.tensor([count]))
            assert float(sampling_variance(x, y, p, rows, fixed)) <= plain + slack
    assert float(variance(x, y, kind="wta", rows=rows, p=p)) <= plain + slack


# Probabilities

anything = st.floats(width=32) | st.sampled_from([0.0, math.nan, math.inf, 3e38, 1e-45])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(anything.map(abs), anything | st.none(), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.booleans(),
)
@example([(math.nan, math.nan, True), (0.0, -1.0, True)], 0.1, True)
@example([(math.inf, 1.0, False), (0.0, 0.0, True)], 0.1, True)
def test_probabilities_are_probabilities_whatever_they_are_made_of(rows, mix, is_masked):
    x = torch.tensor([row[0] for row in rows])
    expected = None if any(row[1] is None for row in rows) else torch.tensor([row[1] for row in rows])
    mask = torch.tensor([row[2] for row in rows]) if is_masked else torch.ones(len(rows), dtype=torch.bool)
    if not mask.any():
        mask[0] = True
    p = probabilities(x, mix, expected, TokenMask.of(mask) if is_masked else None)
    assert p.dtype == torch.float64
    assert float(p.sum()) == pytest.approx(1, rel=1e-12)
    assert (p[~mask] == 0).all()
    share = mix if x[mask].isfinite().all() else mix / 2
    assert (p[mask] >= share / int(mask.sum()) * (1 - 1e-12)).all()


def test_probabilities_are_the_product_of_both_norms_mixed():
    x, y = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 0.0])
    expected = 0.8 * torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64) + 0.2 / 3
    torch.testing.assert_close(probabilities(x, 0.2, y), expected)


def test_what_is_not_finite_has_half_of_the_chances_and_what_is_unknown_is_average():
    p = probabilities(torch.tensor([1.0, math.nan, 4.0, math.inf, 1.0]), 0.1)
    others = [0.5 * (0.9 * weight / 6 + 0.1 / 5) for weight in (1, 0, 4, 0, 1)]
    expected = [other + bad for other, bad in zip(others, (0, 0.25, 0, 0.25, 0), strict=True)]
    torch.testing.assert_close(p, torch.tensor(expected, dtype=torch.float64))
    p = probabilities(torch.ones(5), 0.1, torch.tensor([1.0, math.nan, 3.0, -1.0, 2.0]))
    torch.testing.assert_close(p[1], p[4])  # the mean of 1, 3 and 2
    assert p[1] == p[3]
    nothing = probabilities(torch.tensor([1.0, 2.0]), 0.1, torch.tensor([math.nan, -1.0]))
    assert torch.equal(nothing, probabilities(torch.tensor([1.0, 2.0]), 0.1))


@every_sampler
@pytest.mark.parametrize("key", [0, 2**63 - 1])
def test_the_ends_of_the_distribution_are_tokens_that_count(kind, key):
    """The first and the last random number there is, with tokens of probability 0 at both ends and in between."""
    mask = TokenMask.of(torch.arange(1000) % 3 == 1)
    for norms in (torch.ones(1000), torch.linspace(0, 7, 1000) ** 4):
        p = probabilities(norms, 0.1, mask=mask)
        index, scale = sample_rows(p, torch.full((200,), key), SAMPLERS[kind], mask)
        assert (p[index] > 0).all()
        assert (scale > 0).all()
        assert scale.isfinite().all()


@every_sampler
def test_tokens_that_fit_are_the_rows_and_the_rest_is_nothing(kind):
    mask = TokenMask.of(torch.tensor([0, 1, 0, 1, 1, 0, 0, 0]))
    for ranks, rows in ((mask, [1, 3, 4]), (TokenMask.of(torch.zeros(8)), [])):
        index, scale = sample_rows(
            probabilities(torch.ones(8), mask=ranks), random_keys(torch.tensor(2), 5), SAMPLERS[kind], ranks
        )
        assert index[: len(rows)].tolist() == rows
        assert scale.tolist() == [1.0] * len(rows) + [0.0] * (5 - len(rows))
        x = torch.full((8, 3), math.nan)
        assert not gather(x, RowSample(index, scale))[len(rows) :].any()


def test_a_gradient_that_is_never_drawn_makes_the_variance_infinite():
    x, y = heavy_tailed(6, 3, 2)
    p = torch.tensor([0, 1, 1, 1, 1, 1]) / 5.0
    assert variance(x, y, kind="norm_rows", rows=2, p=p) == math.inf
    y[0] = 0
    assert variance(x, y, kind="norm_rows", rows=2, p=p) < math.inf
    x[2] = math.nan
    assert variance(x, y, kind="norm_rows", rows=2, p=p).isnan()
