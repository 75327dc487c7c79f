"""Every kind is unbiased and has exactly the variance its module states, on heavy-tailed, correlated X and Y."""

import pytest
import torch
from helpers import chances, heavy_tailed
from statistical import assert_moments

from rmm_linear.sketches import FAMILIES, KINDS, kept_rows, sketch, variance

INPUTS, OUTPUTS = 5, 4
LOOPED = {name for name, family in FAMILIES.items() if family.reads_seed}
CASES = [  # kind, N, K, block
    pytest.param("gaussian", 24, 6, None, id="gaussian"),
    pytest.param("gaussian", 25, 6, 7, id="gaussian-blocks"),
    pytest.param("rademacher", 24, 6, None, id="rademacher"),
    pytest.param("rademacher", 25, 6, 7, id="rademacher-blocks"),
    pytest.param("hadamard", 32, 6, None, id="hadamard"),
    pytest.param("hadamard", 25, 6, None, id="hadamard-padded"),
    pytest.param("hadamard", 25, 6, 7, id="hadamard-blocks"),
    pytest.param("dct", 24, 6, None, id="dct-even"),
    pytest.param("dct", 25, 6, None, id="dct-odd"),
    pytest.param("dft", 24, 6, None, id="dft-even"),
    pytest.param("dft", 25, 6, None, id="dft-odd"),
    pytest.param("countsketch", 24, 6, None, id="countsketch"),
    pytest.param("countsketch", 27, 6, None, id="countsketch-ragged"),
    pytest.param("rows", 24, 6, None, id="rows"),
    pytest.param("norm_rows", 24, 6, None, id="norm_rows"),
    pytest.param("wta", 24, 6, None, id="wta"),
]


def draw(x, y, kind, rows, block, count):
    """Sketched gradients (M, O, I) for the seeds 0 … M−1."""
    both, p = torch.cat((x, y), dim=1), chances(kind, x)

    def gradient(seed):
        z = sketch(both, kind=kind, seed=seed, rows=rows, block=block, p=p)
        return z[:, x.shape[1] :].T @ z[:, : x.shape[1]]

    if kind in LOOPED:
        return torch.stack([gradient(torch.tensor(seed)) for seed in range(count)])
    parts = [torch.vmap(gradient)(seeds) for seeds in torch.arange(count).split(1_000)]
    assert torch.allclose(parts[-1][-1], gradient(torch.tensor(count - 1)), rtol=1e-9)
    return torch.cat(parts)


def test_every_kind_has_a_case():
    assert {case.values[0] for case in CASES} == set(KINDS)


@pytest.mark.parametrize(
    ("draws", "widest"), [(2_000, 0.05), pytest.param(100_000, 0.008, marks=pytest.mark.montecarlo)]
)
@pytest.mark.parametrize(("kind", "tokens", "rows", "block"), CASES)
def test_mean_and_variance(kind, tokens, rows, block, draws, widest):
    x, y = heavy_tailed(tokens, INPUTS, OUTPUTS)
    exact = y.T @ x
    errors = draw(x, y, kind, rows, block, draws) - exact
    assert_moments(errors, exact, variance(x, y, kind=kind, rows=rows, block=block), widest=widest)


@pytest.mark.parametrize("kind", KINDS)
def test_no_variance_when_every_row_is_kept(kind):
    x, y = heavy_tailed(9, 3, 2)
    assert variance(x, y, kind=kind, rows=9) == 0
    assert torch.equal(sketch(x, kind=kind, seed=torch.tensor(1), rows=9), x)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_one_block_is_no_block(kind):
    x, y = heavy_tailed(20, 3, 2)
    whole = variance(x, y, kind=kind, rows=5)
    assert torch.equal(variance(x, y, kind=kind, rows=5, block=20), whole)
    assert torch.equal(variance(x, y, kind=kind, rows=5, block=50), whole)
    assert kept_rows(20, 5, 50) == 5


def test_gaussian_and_rademacher_differ_by_the_diagonal():
    """(P + g)/K and (P + g − 2d)/K, with P, g and d summed by loops."""
    x, y = heavy_tailed(6, 2, 3)
    p = sum(float(a @ a) for a in x) * sum(float(b @ b) for b in y)
    g = sum(float(x[:, i] @ y[:, j]) ** 2 for i in range(2) for j in range(3))
    d = sum(float(a @ a) * float(b @ b) for a, b in zip(x, y, strict=True))
    assert float(variance(x, y, kind="gaussian", rows=3)) == pytest.approx((p + g) / 3)
    assert float(variance(x, y, kind="rademacher", rows=3)) == pytest.approx((p + g - 2 * d) / 3)


def test_rows_has_the_variance_of_a_smaller_batch():
    """(1 − ρ)/ρ · D²_SGD, with D²_SGD = N/(N−1)·d − g/(N−1), by which minibatch sampling is known."""
    x, y = heavy_tailed(10, 3, 2)
    per_token = torch.einsum("no,ni->noi", y, x)
    mean = per_token.mean(0)
    sgd = 10 / 9 * (per_token - mean).square().sum()
    assert float(variance(x, y, kind="rows", rows=4)) == pytest.approx(float(sgd) * 0.6 / 0.4)
