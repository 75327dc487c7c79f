"""Sampled rows of orthogonal transforms with the C library, see :mod:`rmm_linear.sketches.transforms`."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, function, pointer, threads

KINDS = ("hadamard", "dct", "dft")


def sampled_transform(matrix: Tensor, kind: str, index: Tensor, places: Tensor, signs: Tensor) -> Tensor:
    """Return some rows of a transform of signed rows, times √(n / K).

    matrix: float32, bfloat16 or float16, shape (N, D), elements of a row side by side. index: Rows of the transform,
    int64, shape (K,). places: The row of ``matrix`` at each place that is transformed, −1 for zeros; int64, shape (n,),
    n a power of two. signs: Factors of the places, float32, shape (n,). Returns shape (K, D), dtype of ``matrix``; sums
    are made in float32.
    """
    size, rows = len(places), len(index)
    first, second, u, v = _combination(kind, index.contiguous(), size)
    order, cosine, sine = _plan(kind, size)
    places, signs = places[order], signs[order]
    z = matrix.new_empty(rows, matrix.shape[1])
    result = function("rmm_transform")(
        pointer(matrix), TYPES[matrix.dtype], matrix.shape[1], matrix.stride(0), size, pointer(places), pointer(signs),
        pointer(cosine), pointer(sine), pointer(first), pointer(second), pointer(u), pointer(v), rows, pointer(z),
        threads(matrix),
    )  # fmt: skip
    if result:
        raise MemoryError(f"No memory for {size} rows of 32 columns.")
    return z


@functools.lru_cache(maxsize=16)
def _plan(kind: str, size: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the order of the rows before the first step, and the cosines and sines of all steps."""
    order = torch.arange(size, device="cpu")
    if kind == "hadamard":
        return order, None, None
    angle = torch.arange(size // 2, dtype=torch.float64, device="cpu") * (2 * math.pi / size)
    reverse = torch.zeros_like(order)
    for bit in range(size.bit_length() - 1):
        reverse = reverse << 1 | order >> bit & 1
    if kind == "dct":  # even rows, and backwards the odd ones (Makhoul 1980)
        reverse = torch.cat((order[::2], order[1::2].flip(0)))[reverse]
    return reverse, angle.cos().float(), angle.sin().float()


def _combination(kind: str, index: Tensor, size: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return rows of the Hadamard or Hartley transform whose weighted sum is a row of the result, and weights."""
    if kind != "dct":
        return index, None, index.new_full((len(index),), len(index) ** -0.5, dtype=torch.float32), None
    # With Hartley's H, the Fourier transform is (H_k + H_-k)/2 + i (H_-k − H_k)/2.
    angle = index.double() * (math.pi / (2 * size))
    scale = (2 - (index == 0).double()).sqrt() * (len(index) ** -0.5 / 2)
    u, v = ((scale * (angle.cos() + sign * angle.sin())).float() for sign in (-1, 1))
    return index, (size - index) % size, u, v
