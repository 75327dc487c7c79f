"""What each family states of itself: its entries, blocks and transforms; norms of rows."""

import math

import pytest
import torch
from helpers import sketch_matrix
from statistical import Z, z_scores

from rmm_linear.sketches import kept_rows, row_norms, sketch
from rmm_linear.sketches.countsketch import destinations, signs_and_shifts
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import _dct_rows, _dft_rows, _hadamard_rows
from rmm_linear.variance import sketch_variance

# CountSketch


@pytest.mark.parametrize(("tokens", "rows"), [(20, 5), (23, 5), (7, 6), (9, 1)])
def test_countsketch_gives_every_token_one_row_and_no_segment_a_collision(tokens, rows):
    """The gather form, which devices use, and the segment form, which the CPU uses, are one map."""
    s = sketch_matrix("countsketch", tokens, rows, 3)
    assert set(s.abs().unique().tolist()) <= {0.0, 1.0}
    assert torch.equal((s != 0).sum(0), torch.ones(tokens, dtype=torch.int64))
    for segment in s.split(rows, dim=1):
        assert (segment != 0).sum(1).max() == 1
    signs, shifts = signs_and_shifts(torch.tensor(3), tokens, rows)
    assert torch.equal(s.abs().argmax(0), destinations(shifts, tokens, rows))
    assert torch.equal(s.sum(0), signs.double())


def test_shifts_are_uniform_and_independent():
    """χ² of 7 rows over 7,000 shifts, and of the 49 pairs of the first two shifts over 1,000 seeds; p = 1e-5 bounds.

    The first segment stays where it is and has no shift.
    """
    counts = torch.bincount(signs_and_shifts(torch.tensor(5), 49_007, 7)[1][1:], minlength=7).double()
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 33.1  # 6 degrees of freedom
    pairs = [signs_and_shifts(torch.tensor(seed), 21, 7)[1][1:] for seed in range(1_000)]
    cells = torch.bincount(torch.stack([7 * a + b for a, b in pairs]), minlength=49).double()
    assert ((cells - 1_000 / 49) ** 2 / (1_000 / 49)).sum() < 98.0  # 48 degrees of freedom


def test_signs_and_shifts_are_independent():
    """The sign of token 4 must not tell its row: z of the mean of sign · (row − mean row) over 1,000 seeds."""
    values = []
    for seed in range(1_000):
        column = sketch_matrix("countsketch", 8, 4, seed)[:, 4]
        values.append(float(column.sum()) * (int(column.abs().argmax()) - 1.5))
    assert abs(z_scores(torch.tensor(values))) < Z


# Dense families and blocks


def test_gaussian_blocks_do_not_mix():
    s = sketch_matrix("gaussian", 10, 6, 1, block=4)
    assert s.shape == (6, 10)
    expected = torch.block_diag(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 2)).bool()
    assert torch.equal(s != 0, expected)


def test_rademacher_entries_are_signs():
    assert torch.allclose(
        sketch_matrix("rademacher", 30, 7, 2).abs(), torch.tensor(1 / math.sqrt(7), dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_blocks_have_entries_of_their_own(kind):
    s = sketch_matrix(kind, 12, 6, 1, block=4)
    blocks = [s[2 * i : 2 * i + 2, 4 * i : 4 * i + 4] for i in range(3)]
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])


@pytest.mark.parametrize(("tokens", "rows", "block"), [(5, 4, 2), (65, 64, 4), (10, 9, 3)])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "hadamard"])
def test_blocks_never_keep_more_rows_than_tokens(kind, tokens, rows, block):
    """A row per block too many would cost more than the input itself; then the input itself is kept."""
    assert kept_rows(tokens, rows, block) <= tokens
    m = torch.randn(tokens, 3)
    result = sketch(m, kind=kind, seed=torch.tensor(0), rows=rows, block=block)
    assert result.shape[0] == kept_rows(tokens, rows, block)
    if result.shape[0] == tokens:
        assert torch.equal(result, m)


# Transforms


@pytest.mark.parametrize("rows_of", [_hadamard_rows, _dct_rows, _dft_rows])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 12])
def test_transforms_are_orthonormal(rows_of, tokens):
    size = rows_of(torch.eye(tokens, dtype=torch.float64), torch.tensor([0])).shape[0] and tokens
    padded = 1 << (tokens - 1).bit_length() if rows_of is _hadamard_rows else size
    t = rows_of(torch.eye(tokens, dtype=torch.float64), torch.arange(padded))
    assert torch.allclose(t.T @ t, torch.eye(tokens, dtype=torch.float64), atol=1e-12)


def test_transforms_are_the_ones_they_are_named_after():
    n, eye, index = 8, torch.eye(8, dtype=torch.float64), torch.arange(8)
    k, i = torch.meshgrid(index.double(), index.double(), indexing="ij")
    cosine = torch.cos(math.pi / n * (i + 0.5) * k) * math.sqrt(2 / n)
    cosine[0] /= math.sqrt(2)
    angle = 2 * math.pi / n * i * k
    walsh = torch.tensor([[(-1.0) ** bin(a & b).count("1") for b in range(n)] for a in range(n)], dtype=torch.float64)
    assert torch.allclose(_dct_rows(eye, index), cosine, atol=1e-12)
    assert torch.allclose(_dft_rows(eye, index), (torch.cos(angle) + torch.sin(angle)) / math.sqrt(n), atol=1e-12)
    assert torch.allclose(_hadamard_rows(eye, index), walsh / math.sqrt(n), atol=1e-12)


def test_blocks_of_hadamard_are_rows_of_its_matrix_with_signs_of_their_own():
    """Blocks of 3 are rows of the transform of 4 tokens, cut off: every column of S has a norm of 1."""
    s = sketch_matrix("hadamard", 8, 6, 1, block=3)
    assert s.shape == (6, 8)
    assert torch.equal(s != 0, torch.block_diag(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2)).bool())
    assert torch.allclose(s[s != 0].abs(), torch.tensor(1 / math.sqrt(2), dtype=torch.float64))
    assert any(not torch.equal(s[:2, :3], s[2:4, 3:6]) for s in (sketch_matrix("hadamard", 8, 6, i, 3) for i in (1, 2)))


@pytest.mark.parametrize("kind", ["dct", "dft"])
def test_variances_do_not_depend_on_the_default_device(kind):
    x, y = torch.randn(32, 3), torch.randn(32, 2)
    expected = sketch_variance(x, y, kind=kind, rows=8)
    with torch.device("meta"):
        assert torch.equal(sketch_variance(x, y, kind=kind, rows=8), expected)


# Rows


def test_rows_are_distinct_tokens_scaled():
    s = sketch_matrix("rows", 20, 6, 3)
    assert torch.allclose(s[s != 0], torch.tensor(math.sqrt(20 / 6), dtype=torch.float64))
    assert (s != 0).sum(1).tolist() == [1] * 6
    assert (s != 0).sum(0).max() == 1


def test_rows_includes_tokens_and_pairs_uniformly():
    """Over 2,000 seeds a token is in with probability K/N, a pair with K(K−1)/(N(N−1)); largest of 45 z below 4.5."""
    tokens, rows, draws = 9, 4, 2_000
    inside = torch.zeros(draws, tokens, dtype=torch.float64)
    for seed in range(draws):
        inside[seed, sample(torch.tensor(seed), tokens, rows)] = 1
    counts = inside.T @ inside
    one, two = rows / tokens, rows * (rows - 1) / (tokens * (tokens - 1))
    expected = torch.full((tokens, tokens), two, dtype=torch.float64).fill_diagonal_(one)
    assert ((counts - draws * expected) / (draws * expected * (1 - expected)).sqrt()).abs().max() < 4.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (1, 1), (3000, 700), (2, 2**20 + 1)])
def test_norms_of_rows(dtype, shape):
    """A sum of n squares, however it is split, errs by at most (n + 2) u relative, and its root by half of that."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    norms, expected = row_norms(x), x.double().square().sum(1).sqrt()
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bound = (shape[1] + 4) * torch.finfo(norms.dtype).eps / 2
    assert ((norms.double() - expected).abs() <= bound * expected).all()
    assert norms.shape == shape[:1]
