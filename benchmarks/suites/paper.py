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
from torch.profiler import record_function

from benchmarks.library import mix

HEAD = "classifier"  # of models for classification


class PaperLinear(nn.Linear):
    """``nn.Linear`` that keeps Z = SᵀX and the seed to draw S again."""

    def __init__(self, inputs: int, outputs: int, ratio: float, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.ratio = ratio
        # Seeds of its own, new in every call: drawn on the way, they would shift the masks of dropout behind the layer.
        self.seed, self.calls = int(torch.randint(2**62, ())), 0

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to X, shape (..., I); N is the product of the others."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        x = input.reshape(-1, self.in_features)
        self.calls += 1
        rows, seed = max(1, round(self.ratio * len(x))), mix(self.seed, self.calls)
        output = _PaperFunction.apply(x, self.weight, self.bias, rows, seed)
        return output.view(*input.shape[:-1], self.out_features)


def use_paper(model: nn.Module, ratio: float) -> None:
    """Put the published layer in place of all linear layers but those of the head, which see one row per sequence."""
    for parent_name, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or HEAD in (*parent_name.split("."), name):
                continue
            layer = PaperLinear(child.in_features, child.out_features, ratio, device="meta")
            layer.weight, layer.bias = child.weight, child.bias
            setattr(parent, name, layer.train(child.training))


class _PaperFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, seed: int) -> Tensor:
        ctx.has_bias = bias is not None
        s = _matrix(seed, rows, x)
        with record_function("paper::sketch_x"):
            z = s @ x
        ctx.save_for_backward(weight, z, torch.tensor(seed))  # a recomputation's Z belongs to its own seed
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = grad_outputs
        weight, z, seed = ctx.saved_tensors
        s = _matrix(int(seed), len(z), y)
        with record_function("paper::sketch_y"):
            sketched = s @ y
        with record_function("paper::weight_gradient"):
            to_weight = sketched.T @ z
        return y @ weight, to_weight, y.sum(0) if ctx.has_bias else None, None, None


def _matrix(seed: int, rows: int, like: Tensor) -> Tensor:
    with record_function("paper::draw_s"):
        generator = torch.Generator(like.device).manual_seed(seed)
        s = torch.randn(rows, len(like), generator=generator, device=like.device, dtype=like.dtype)
        return s.mul_(rows**-0.5)
