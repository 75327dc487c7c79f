"""What the tests of packed norms share: data with long rows, and the exact gradients."""

from __future__ import annotations

import torch
from helpers import heavy_tailed
from torch import Tensor

EPS = 1e-5
ROWS = 12


def rows_of(columns: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """X with a mean, Y that depends on it, and a weight."""
    x, y = heavy_tailed(ROWS, columns, columns, dtype)
    return x + 0.5, 0.05 * y + 0.2 * x, torch.linspace(0.5, 1.5, columns, dtype=dtype)


def exact(x: Tensor, y: Tensor, weight: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dγ and dβ by autograd, in float64."""
    x, weight = (part.detach().double().clone().requires_grad_() for part in (x, weight))
    bias = torch.zeros_like(weight, requires_grad=True)
    shift = x.mean(1, keepdim=True) if centered else 0
    h = (x - shift) * ((x - shift).square().mean(1, keepdim=True) + EPS).rsqrt()
    dx, dgamma, dbeta = torch.autograd.grad(h * weight + bias, (x, weight, bias), y.double())
    return dx, dgamma, dbeta
