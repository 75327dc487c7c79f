"""GELU with a deterministic derivative of few bits, as published by those who thought of it first.

Source: Novikov et al. 2022, "Few-bit backward" (arXiv 2202.00441): g' is replaced by the piecewise constant function
with 2^bits pieces that is closest to it in the mean square, on an interval that holds all but the tails, and the number
of the piece is what is saved. The error is the same in every step: the gradient is biased.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DOMAIN = 10.0
_POINTS = 1001  # of the grid that borders lie on: a fiftieth apart


def best_steps(values: np.ndarray, pieces: int) -> list[int]:
    """Cut a row of numbers into pieces with the least sum of squared distances from each piece's mean."""
    count = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(numbers)]) for numbers in (values, values**2))
    begin, end = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / (end - begin)
    cost[begin >= end] = math.inf
    best, cuts = cost[0], list[np.ndarray]()
    for _ in range(pieces - 1):
        every = best[:, None] + cost
        cuts.append(every.argmin(0))
        best = every.min(0)
    found, end_of = list[int](), count
    for row in reversed(cuts):
        end_of = int(row[end_of])
        found.append(end_of)
    return found[::-1]


@functools.lru_cache
def gelu_steps(bits: int) -> tuple[Tensor, Tensor]:
    """Return the piecewise constant function that stands for the derivative of GELU."""
    edges = np.linspace(-_DOMAIN, _DOMAIN, _POINTS + 1)
    x = torch.tensor((edges[:-1] + edges[1:]) / 2, requires_grad=True)
    derivative = torch.autograd.grad(F.gelu(x).sum(), x)[0].numpy()
    cuts = best_steps(derivative, 2**bits)
    levels = [part.mean() for part in np.split(derivative, cuts)]
    return torch.tensor(edges[cuts], dtype=torch.float32), torch.tensor(levels, dtype=torch.float32)


class FewBitGELU(nn.Module):
    """GELU that saves the number of a piece of its derivative."""

    borders: Tensor
    levels: Tensor

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        for name, tensor in zip(("borders", "levels"), gelu_steps(bits), strict=True):
            self.register_buffer(name, tensor.clone(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return _FewBits.apply(input, self.borders, self.levels, self.bits)


class _FewBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, borders: Tensor, levels: Tensor, bits: int) -> Tensor:
        ctx.bits, ctx.shape = bits, input.shape
        codes = torch.zeros(input.numel(), dtype=torch.uint8, device=input.device)
        for border in borders.tolist():
            codes += input.reshape(-1) > border
        ctx.save_for_backward(pack_codes(codes, bits), levels)
        return F.gelu(input)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        stored, levels = ctx.saved_tensors
        codes = unpack_codes(stored, ctx.bits, ctx.shape.numel())
        return grad_outputs[0] * levels[codes.int()].view(ctx.shape), None, None, None


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Store small numbers, eight of them in ``bits`` bytes."""
    lanes = F.pad(codes, (0, -len(codes) % 8)).view(-1, 8)
    rows = torch.zeros(bits, len(lanes), dtype=torch.uint8, device=codes.device)
    for bit, row in enumerate(rows):
        for lane in range(8):
            row |= ((lanes[:, lane] >> bit) & 1) << lane
    return rows


def unpack_codes(stored: Tensor, bits: int, count: int) -> Tensor:
    lanes = torch.zeros(stored.shape[1], 8, dtype=torch.uint8, device=stored.device)
    for bit, row in enumerate(stored):
        for lane in range(8):
            lanes[:, lane] |= ((row >> lane) & 1) << bit
    return lanes.flatten()[:count]


def use_few_bits(model: nn.Module, bits: int) -> None:
    found = [name for name, module in model.named_modules() if _is_gelu(module)]
    if not found:
        raise ValueError("A derivative of few bits needs a GELU, and the model has none as a module.")
    for name in found:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FewBitGELU(bits))


def _is_gelu(module: nn.Module) -> bool:
    return type(module).__name__ == "GELUActivation" or (type(module) is nn.GELU and module.approximate == "none")
