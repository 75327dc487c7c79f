"""Norms of rows, of half types too."""

import pytest
import torch

from rmm_linear.sketches import row_norms


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
