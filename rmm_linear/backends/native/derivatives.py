"""Derivatives in few bits with the C library, see :mod:`rmm_linear.packing.derivatives`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, function, pointer, threads

TABLE, RELU, LEAKY_RELU = range(3)
Noise = tuple[Tensor, Tensor]  # RoundingNoise.rows and .columns


@dataclass(frozen=True)
class DerivativeTable:
    """A derivative as the C library reads it, in steps above its low end.

    Attributes:
        knots: Values at equally distant x, between which it is linear; float32.
        begin: x of the first knot.
        density: Knots per unit of x.
        end: From this x on, the derivative is ``above``.
        below: The derivative up to ``begin``, and of NaN.
        above: See ``end``.
    """

    knots: Tensor
    begin: float
    density: float
    end: float
    below: float
    above: float


def pack_derivative(
    x: Tensor,
    codes: Tensor,
    kind: int,
    bits: int,
    table: DerivativeTable | None,
    noise: Noise | None,
    index: Tensor | None,
) -> None:
    """Write codes, as :func:`rmm_linear.packing.derivatives.pack_derivative` returns them.

    Args:
        x: float32, bfloat16 or float16, shape (N, C), elements of a row side by side.
        codes: Written to; uint8, shape (n, ⌈C · bits / 8⌉), contiguous.
        kind: ``TABLE``, ``RELU`` or ``LEAKY_RELU``.
        bits: 8, 4, 2 or 1.
        table: The derivative, for ``TABLE``.
        noise: Random numbers of n rows and of C columns, for ``TABLE``.
        index: int64, shape (n,), contiguous, or None.
    """
    knots, line = None, [0.0] * 5
    if table is not None:
        knots, line = table.knots, [table.begin, table.density, table.end, table.below, table.above]
    a, c = noise or (None, None)
    function("rmm_pack_derivative")(
        pointer(x), TYPES[x.dtype], x.stride(0), len(codes), x.shape[1], pointer(index),
        kind, bits, pointer(knots), 0 if knots is None else len(knots),
        *line, pointer(a), pointer(c), pointer(codes), threads(x),
    )  # fmt: skip


def apply_derivative(
    y: Tensor,
    codes: Tensor,
    kind: int,
    bits: int,
    line: tuple[float, float],
    noise: Noise | None,
    index: Tensor | None,
) -> Tensor:
    """Return what :func:`rmm_linear.packing.derivatives.apply_derivative` does.

    Args:
        y: float32, bfloat16 or float16, shape (N, C), contiguous.
        codes: uint8, shape (n, ⌈C · bits / 8⌉), contiguous.
        kind: ``TABLE``, ``RELU`` or ``LEAKY_RELU``.
        bits: 8, 4, 2 or 1.
        line: Low end of the derivative (the slope for ``LEAKY_RELU``) and step.
        noise: Random numbers of n rows and of C columns, for ``TABLE``.
        index: int64, shape (n,), contiguous, or None.

    Returns:
        Shape (N, C), dtype of ``y``.
    """
    out = torch.empty_like(y) if index is None else torch.zeros_like(y)
    a, c = noise or (None, None)
    function("rmm_apply_derivative")(
        pointer(y), TYPES[y.dtype], pointer(codes), len(codes), y.shape[1], pointer(index),
        kind, bits, *line, pointer(a), pointer(c), pointer(out),
        threads(y),
    )  # fmt: skip
    return out
