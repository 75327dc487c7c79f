"""hadamard, dct and dft: orthonormal, and what their names say."""

import math

import pytest
import torch
from helpers import sketch_matrix

from rmm_linear.sketches.transforms import _dct_rows, _dft_rows, _hadamard_rows
from rmm_linear.variance import sketch_variance


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
