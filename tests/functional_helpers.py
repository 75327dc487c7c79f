"""What the tests of sketched_linear share: configurations, leaves, and the gradient of an output."""

import pytest
import torch

from rmm_linear import RMMConfig

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def config(ratio=0.2, kind="countsketch", min_rows=1, **fields):
    return RMMConfig(kind=kind, ratio=ratio, min_rows=min_rows, **fields)


def leaves(shape, dtype=torch.float32, outputs=3, bias=True):
    generator = torch.Generator().manual_seed(0)

    def leaf(*size):
        return torch.randn(*size, generator=generator).to(dtype).requires_grad_()

    return [leaf(*shape), leaf(outputs, shape[-1]), leaf(outputs) if bias else None]


def grad_of(output):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
