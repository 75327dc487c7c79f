"""The weight gradient from what was saved of the input, and the operators that compute it.

Operators do not call each other: inside an operator, the plain functions run instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops import table
from rmm_linear.ops.arguments import SCHEMA, from_arguments, to_arguments
from rmm_linear.ops.fp16 import fp16_scale
from rmm_linear.ops.operator import operator
from rmm_linear.packing import GROUP
from rmm_linear.sketches import RowSample, TokenMask, kept_rows
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.spec import SaveSpec


def scaled_sketch(
    matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None, scale: float = 1.0
) -> Tensor:
    """Return SᵀM times a number, in new memory.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``.
        spec: Kind, rows and block.
        mask: The valid tokens, or None for all.
        scale: The number, see :func:`rmm_linear.ops.fp16.fp16_scale`. If it is not 1, the sketch is made in float32.

    Returns:
        Shape (kept_rows, D), see :func:`rmm_linear.sketches.kept_rows`; dtype of ``matrix``, contiguous.
    """
    dtype = None if scale == 1 else torch.float32
    shape = {"kind": spec.kind, "rows": spec.rows, "block": spec.block}
    result = table.SKETCH(matrix, seed=seed, mask=mask, dtype=dtype, **shape)
    if scale != 1:
        return (result * scale).to(matrix.dtype, memory_format=torch.contiguous_format)
    if result is matrix:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()  # the transforms return other strides


@operator("sketch", f"(Tensor matrix, Tensor seed, {SCHEMA}, *, float scale=1.0) -> Tensor")
def _sketch(matrix, seed, *arguments, scale=1.0, **named):
    return scaled_sketch(matrix, seed, *from_arguments(*arguments, **named), scale)


@_sketch.register_fake
def _(matrix, seed, kind, rows, block=None, *arguments, **named):
    return matrix.new_empty(kept_rows(matrix.shape[0], rows, block), matrix.shape[1])


@operator(
    "unpacked_product", f"(Tensor y, Tensor codes, Tensor qparams, Tensor seed, SymInt columns, {SCHEMA}) -> Tensor"
)
def _unpacked_product(y, codes, qparams, seed, columns, *arguments, **named):
    spec, mask = from_arguments(*arguments, **named)
    return table.UNPACKED_PRODUCT(y, codes, qparams, seed, spec, columns, mask)


@_unpacked_product.register_fake
def _(y, codes, qparams, seed, columns, *arguments, **named):
    return y.new_empty(y.shape[1], columns)


@operator("gather_rows")
def _gather_rows(matrix: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    return table.GATHER_ROWS(matrix, RowSample(index, scale))


@_gather_rows.register_fake
def _(matrix, index, scale):
    return matrix.new_empty(index.shape[0], matrix.shape[1])


class _Parts(NamedTuple):
    """The functions that compute a weight gradient."""

    sketch: Callable[..., Tensor]
    gather_rows: Callable[..., Tensor]
    unpacked_product: Callable[..., Tensor]


_FUNCTIONS = _Parts(scaled_sketch, table.GATHER_ROWS, table.UNPACKED_PRODUCT)
_OPERATORS = _Parts(
    lambda matrix, seed, spec, mask, scale: _sketch(matrix, seed, *to_arguments(spec, mask), scale=scale),
    lambda matrix, sample: _gather_rows(matrix, *sample),
    lambda y, codes, qparams, seed, spec, columns, mask: _unpacked_product(
        y, codes, qparams, seed, columns, *to_arguments(spec, mask)
    ),
)


def weight_gradient(
    y: Tensor,
    saved: Sequence[Tensor],
    spec: SaveSpec,
    features: int,
    mask: TokenMask | None,
    *,
    in_operator: bool = False,
) -> Tensor:
    """Return the estimate of dW = YᵀX.

    Args:
        y: Gradient with respect to the layer's output, shape (N, O).
        saved: Result of :func:`rmm_linear.ops.save.save`.
        spec: The spec it was made with.
        features: I.
        mask: The mask it was made with.
        in_operator: Whether the caller is an operator, which may call no other one.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    use = _FUNCTIONS if in_operator else _OPERATORS
    if spec.samples_rows(y.shape[0]):
        return _sampled_gradient(y, saved, spec, features, use)
    if spec.bits is not None:
        *stored, seeds = saved
        return use.unpacked_product(y, *stored, seeds, spec, features, mask)
    rows = spec.kept_rows(y.shape[0])
    if mask is not None or rows < y.shape[0]:
        y = use.sketch(y, saved[1], spec, mask, fp16_scale(y.dtype, y.shape[0], rows))
    return y.T @ saved[0]


def _sampled_gradient(y: Tensor, saved: Sequence[Tensor], spec: SaveSpec, features: int, use: _Parts) -> Tensor:
    power_of_two = fp16_scale(y.dtype, y.shape[0], spec.rows)
    if spec.bits is None:
        z, index, scale = saved
        return use.gather_rows(y, RowSample(index, scale * power_of_two)).T @ z
    codes, qparams, index, scale, seeds = saved
    sampled = use.gather_rows(y, RowSample(index, scale * power_of_two))
    # SᵀY has K rows already, and K rows are not sketched again.
    return use.unpacked_product(sampled, codes, qparams, seeds, spec, features, None)


def sketch_flops(shape: Sequence[int], kind: str, rows: int, block: int | None) -> int:
    """Count the multiplications and additions of a sketch, as PyTorch counts those of a product.

    Args:
        shape: (N, D).
        kind: One of :data:`rmm_linear.sketches.FAMILIES`.
        rows: K.
        block: Tokens per block, or None.

    Returns:
        The operations of SᵀM, with fast algorithms for the transforms.
    """
    tokens, columns = shape
    if kept_rows(tokens, rows, block) >= tokens:
        return 0
    if kind in ("gaussian", "rademacher"):
        return 2 * tokens * columns * block_rows(tokens, rows, block)[2]
    if kind in ("hadamard", "dct", "dft"):
        return round(tokens * columns * math.log2(max(block_rows(tokens, rows, block)[0], 2)))
    return tokens * columns if kind == "countsketch" else rows * columns


@register_flop_formula(torch.ops.rmm_linear.sketch)
def _(matrix, seed, kind, rows, block=None, *arguments, out_shape=None, **named) -> int:
    return sketch_flops(matrix, kind, rows, block)


@register_flop_formula(torch.ops.rmm_linear.unpacked_product)
def _(y, codes, qparams, seed, columns, kind, rows, block=None, *arguments, out_shape=None, **named) -> int:
    stored_rows, outputs = codes[0], y[1]
    unpacking = 2 * stored_rows * columns + 2 * GROUP * outputs * columns
    return sketch_flops(y, kind, rows, block) + 2 * stored_rows * outputs * columns + unpacking


@register_flop_formula(torch.ops.rmm_linear.gather_rows)
def _(matrix: Sequence[int], index: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return index[0] * matrix[1]
