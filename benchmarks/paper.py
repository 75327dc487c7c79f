"""The published layer, for comparison: a dense Gaussian S, materialised, over all tokens, in the dtype of the input.

A line-by-line reading of algorithm 1, with torch's own random numbers as in the paper's experiments: they are several
times as fast on CPUs as the counter-based ones of ``RMMConfig(kind="gaussian", bits=None)``, which makes the same S on
every device. Slower random numbers would flatter every ratio.

Source: Bershatsky et al. 2022, arXiv 2201.13195, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PaperLinear(nn.Linear):
    """``nn.Linear`` that keeps Z = SᵀX and the state to draw S again."""

    def __init__(self, inputs: int, outputs: int, ratio: float, **options: Any) -> None:
        """Make the layer; ``ratio`` is K/N, and ``options`` are device and dtype."""
        super().__init__(inputs, outputs, **options)
        self.ratio = ratio

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to X, shape (N, I)."""
        seed = int(torch.randint(2**62, ()))
        return _PaperFunction.apply(input, self.weight, self.bias, max(1, round(self.ratio * len(input))), seed)


class _PaperFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rows: int, seed: int) -> Tensor:
        ctx.seed = seed
        ctx.save_for_backward(weight, _matrix(seed, rows, x) @ x)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = grad_outputs
        weight, z = ctx.saved_tensors
        return y @ weight, (_matrix(ctx.seed, len(z), y) @ y).T @ z, y.sum(0), None, None


def _matrix(seed: int, rows: int, like: Tensor) -> Tensor:
    """Sᵀ, shape (K, N), of variance 1/K."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(rows, len(like), generator=generator, device=like.device, dtype=like.dtype).mul_(rows**-0.5)
