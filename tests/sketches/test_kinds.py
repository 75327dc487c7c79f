"""Every kind: a linear map that follows from its seed, with the structure its module states, and cheap to make."""

import math

import pytest
import torch
from helpers import chances, heavy_tailed, sketch_matrix
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.sketches import KINDS, has_blocks, kept_rows, sketch

VARIANTS = [(kind, None) for kind in KINDS] + [(kind, 5) for kind in KINDS if has_blocks(kind)]
every_variant = pytest.mark.parametrize(("kind", "block"), VARIANTS)


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


# Half types


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


def test_heavy_tailed_data_is_heavy_tailed():
    """What the statistics are run on: the longest of 24 tokens holds far more than 1/24 of the squared norm."""
    x, y = heavy_tailed(24, 5, 4)
    for matrix in (x, y):
        norms = matrix.square().sum(1)
        assert norms.max() / norms.sum() > 0.2
    assert torch.corrcoef(torch.stack((x.norm(dim=1), y.norm(dim=1))))[0, 1] > 0.8
