"""Every kind: a linear map that follows from its seed, with the structure its module states, and cheap to make."""

import math

import pytest
import torch
from helpers import chances, heavy_tailed, sketch_matrix
from statistical import Z, z_scores
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.sketches import KINDS, has_blocks, kept_rows, sketch
from rmm_linear.sketches.countsketch import destinations, signs_and_shifts
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import _dct_rows, _dft_rows, _hadamard_rows

VARIANTS = [(kind, None) for kind in KINDS] + [(kind, 5) for kind in KINDS if has_blocks(kind)]
every_variant = pytest.mark.parametrize(("kind", "block"), VARIANTS)
every_kind = pytest.mark.parametrize("kind", KINDS)
transforms = pytest.mark.parametrize("rows_of", [_hadamard_rows, _dct_rows, _dft_rows])


def draw(matrix, kind, rows, seed=0, block=None):
    p = chances(kind, heavy_tailed(len(matrix), 5, 1)[0])
    return sketch(matrix, kind=kind, seed=torch.tensor(seed), rows=rows, block=block, p=p)


# A linear map from a seed


@every_variant
@pytest.mark.parametrize(("tokens", "rows"), [(13, 4), (16, 1), (17, 16), (2, 1)])
def test_sketch_is_the_product_with_its_matrix(kind, block, tokens, rows):
    """S made column by column, from one token at a time, gives the sketch of any matrix."""
    m = torch.randn(tokens, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(tokens, dtype=torch.float64)
    columns = [draw(eye[:, i : i + 1], kind, rows, 7, block) for i in range(tokens)]
    result = draw(m, kind, rows, 7, block)
    assert result.shape == (kept_rows(tokens, rows, block), 3)
    assert torch.allclose(torch.cat(columns, dim=1) @ m, result, rtol=1e-12, atol=1e-12)


@every_variant
def test_same_seed_same_sketch_and_another_seed_another(kind, block):
    matrices = [sketch_matrix(kind, 40, 10, seed, block) for seed in (3, 3, 4, -3, 3 + 2**32)]
    assert torch.equal(matrices[0], matrices[1])
    for other in matrices[2:]:
        assert not torch.equal(matrices[0], other)


@every_variant
def test_sketch_leaves_the_global_generator_alone(kind, block):
    before = torch.get_rng_state()
    sketch_matrix(kind, 20, 5, 1, block)
    assert torch.equal(torch.get_rng_state(), before)


@every_variant
@pytest.mark.parametrize("make", [lambda m: m.t().contiguous().t(), lambda m: m[::2], lambda m: m[:1].expand(20, 6)])
def test_strided_matrices(kind, block, make):
    """But for the last digits: products and Fourier transforms may add in another order in another layout."""
    m = make(torch.randn(40, 6, dtype=torch.float64))
    found = draw(m, kind, 4, 5, block)
    expected = draw(m.clone(memory_format=torch.contiguous_format), kind, 4, 5, block)
    torch.testing.assert_close(found, expected, rtol=0, atol=40 * 2**-52 * float(m.abs().sum(0).max()))


@every_kind
def test_matrix_is_not_changed(kind):
    m = torch.randn(12, 3)
    before = m.clone()
    draw(m, kind, 4)
    assert torch.equal(m, before)


# Unbiased entry by entry: E[S Sᵀ] = 1


@every_variant
def test_second_moment_is_the_identity(kind, block):
    """All N(N+1)/2 entries of the mean of SSᵀ over 600 seeds, each over its own standard error.

    The largest of 136 scores of about normal numbers stays below 5 (p = 8e-5 by chance).
    """
    tokens, draws = 16, 600
    samples = torch.stack([s.T @ s for s in (sketch_matrix(kind, tokens, 4, 50 + i, block) for i in range(draws))])
    error = samples.mean(0) - torch.eye(tokens)
    deviation = samples.std(0)
    never = deviation < 1e-9  # entries without noise, as between two blocks: they must be right to rounding
    assert error[never].abs().max() < 1e-5 if never.any() else True
    assert (error / deviation.clamp_min(1e-9) * math.sqrt(draws))[~never].abs().max() < 5


# Structure of each kind


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


def test_blocks_of_hadamard_are_rows_of_its_matrix_with_signs_of_their_own():
    """Blocks of 3 are rows of the transform of 4 tokens, cut off: every column of S has a norm of 1."""
    s = sketch_matrix("hadamard", 8, 6, 1, block=3)
    assert s.shape == (6, 8)
    assert torch.equal(s != 0, torch.block_diag(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2)).bool())
    assert torch.allclose(s[s != 0].abs(), torch.tensor(1 / math.sqrt(2), dtype=torch.float64))
    assert any(not torch.equal(s[:2, :3], s[2:4, 3:6]) for s in (sketch_matrix("hadamard", 8, 6, i, 3) for i in (1, 2)))


@pytest.mark.parametrize(("tokens", "rows", "block"), [(5, 4, 2), (65, 64, 4), (10, 9, 3)])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "hadamard"])
def test_blocks_never_keep_more_rows_than_tokens(kind, tokens, rows, block):
    """A row per block too many would cost more than the input itself; then the input itself is kept."""
    assert kept_rows(tokens, rows, block) <= tokens
    m = torch.randn(tokens, 3)
    result = draw(m, kind, rows, 0, block)
    assert result.shape[0] == kept_rows(tokens, rows, block)
    if result.shape[0] == tokens:
        assert torch.equal(result, m)


@pytest.mark.parametrize(("tokens", "rows"), [(20, 5), (23, 5), (7, 6), (9, 1)])
def test_countsketch_gives_every_token_one_row_and_no_segment_a_collision(tokens, rows):
    s = sketch_matrix("countsketch", tokens, rows, 3)
    assert set(s.abs().unique().tolist()) <= {0.0, 1.0}
    assert torch.equal((s != 0).sum(0), torch.ones(tokens, dtype=torch.int64))
    for segment in s.split(rows, dim=1):
        assert (segment != 0).sum(1).max() == 1


@pytest.mark.parametrize(("tokens", "rows"), [(20, 5), (23, 5), (7, 6), (9, 1)])
def test_countsketch_destinations_are_those_of_the_sketch(tokens, rows):
    """The gather form, which devices use, and the segment form, which the CPU uses, are one map."""
    s = sketch_matrix("countsketch", tokens, rows, 3)
    signs, shifts = signs_and_shifts(torch.tensor(3), tokens, rows)
    assert torch.equal(s.abs().argmax(0), destinations(shifts, tokens, rows))
    assert torch.equal(s.sum(0), signs.double())


def test_countsketch_shifts_are_uniform_and_independent():
    """χ² of 7 rows over 7,000 shifts, and of the 49 pairs of the first two shifts over 1,000 seeds; p = 1e-5 bounds.

    The first segment stays where it is and has no shift.
    """
    counts = torch.bincount(signs_and_shifts(torch.tensor(5), 49_007, 7)[1][1:], minlength=7).double()
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 33.1  # 6 degrees of freedom
    pairs = [signs_and_shifts(torch.tensor(seed), 21, 7)[1][1:] for seed in range(1_000)]
    cells = torch.bincount(torch.stack([7 * a + b for a, b in pairs]), minlength=49).double()
    assert ((cells - 1_000 / 49) ** 2 / (1_000 / 49)).sum() < 98.0  # 48 degrees of freedom


def test_countsketch_signs_and_shifts_are_independent():
    """The sign of token 4 must not tell its row: z of the mean of sign · (row − mean row) over 1,000 seeds."""
    values = []
    for seed in range(1_000):
        column = sketch_matrix("countsketch", 8, 4, seed)[:, 4]
        values.append(float(column.sum()) * (int(column.abs().argmax()) - 1.5))
    assert abs(z_scores(torch.tensor(values))) < Z


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


@transforms
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


# Half types


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_close_to_float32(kind, block, dtype):
    m = torch.randn(200, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    half, full = (draw(v, kind, 20, 1, block) for v in (m, m.float()))
    assert half.dtype == dtype
    assert (half.float() - full).norm() / full.norm() < 5e-3


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_the_scale(kind, block, dtype):
    """Σ‖SᵀM‖² over 40 seeds equals float32's to 5e-4.

    Independent rounding of 16,000 elements by at most 2⁻⁸ moves the sum by 2·2⁻⁸/√3/√16000 = 4e-5; a scale 1/√K that
    is itself rounded to bfloat16 would move it by up to 8e-3.
    """
    m = torch.randn(190, 20, generator=torch.Generator().manual_seed(2)).to(dtype)
    half = sum(float(draw(m, kind, 20, seed, block).double().square().sum()) for seed in range(40))
    full = sum(float(draw(m.float(), kind, 20, seed, block).double().square().sum()) for seed in range(40))
    assert half / full == pytest.approx(1, abs=5e-4)


@every_kind
def test_float16_sums_do_not_overflow_on_the_way(kind):
    """Partial sums are made in float32: 4,096 equal tokens of 100 would pass 65,504 in float16."""
    m = torch.full((4096, 2), 100.0, dtype=torch.float16)
    found, expected = draw(m, kind, 1024), draw(m.float(), kind, 1024)
    assert (found.float() - expected).norm() < 1e-3 * expected.norm()


# Cost


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


DENSE = ("gaussian", "rademacher")


@pytest.mark.parametrize(
    ("kind", "block"), [(kind, None) for kind in KINDS if kind not in DENSE] + [("gaussian", 64), ("hadamard", 64)]
)
def test_nothing_of_size_tokens_times_rows_is_made(kind, block):
    """Largest tensor: at most two matrices (a transform's two halves), or N · K_b entries of the blocks."""
    tokens, rows, columns = 4096, 1024, 8
    m = torch.randn(tokens, columns)
    with LargestTensor() as largest:
        draw(m, kind, rows, 0, block)
    limit = tokens * rows * block // tokens if kind in DENSE else 2 * tokens * columns
    assert rows * columns <= largest.numel <= limit


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_measure_sees_a_dense_sketch(kind):
    with LargestTensor() as largest:
        draw(torch.randn(512, 2), kind, 128)
    assert largest.numel >= 512 * 128


def test_heavy_tailed_data_is_heavy_tailed():
    """What the statistics are run on: the longest of 24 tokens holds far more than 1/24 of the squared norm."""
    x, y = heavy_tailed(24, 5, 4)
    for matrix in (x, y):
        norms = matrix.square().sum(1)
        assert norms.max() / norms.sum() > 0.2
    assert torch.corrcoef(torch.stack((x.norm(dim=1), y.norm(dim=1))))[0, 1] > 0.8
