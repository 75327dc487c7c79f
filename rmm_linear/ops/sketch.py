"""Sketches of a matrix and their storage in few bits, run by whatever is fastest for its device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops import table
from rmm_linear.ops.arguments import SCHEMA, from_arguments, to_arguments
from rmm_linear.packing import GROUP
from rmm_linear.sketches import TokenMask, kept_rows
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.spec import SaveSpec


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
) -> Tensor:
    """Return SᵀM; the arguments are those of :func:`rmm_linear.sketches.sketch`, which this equals.

    Args:
        matrix: M, shape (N, D), floating point.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        seed: int64 with one element, on the device of ``matrix``.
        rows: K, at least 1.
        block: Tokens per block, or None.
        mask: The tokens that count, or None for all.
        p: Probability of every token, for kinds that sample rows by it.

    Returns:
        Shape (kept rows, D), dtype of ``matrix``; ``matrix`` itself where all rows are kept.
    """
    run = table.SKETCH.choose(matrix, seed)
    return run(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, p=p)


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM), made in one go: on CPU in parts, in a kernel before it is stored.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``; of S and of the rounding.
        spec: Kind, rows, block and bits.
        mask: The tokens that count, or None for all.

    Returns:
        Codes and qparams, see :func:`rmm_linear.packing.pack`.
    """
    return table.PACKED_SKETCH.choose(matrix, seed)(matrix, seed, spec, mask)


def unpacked_product(
    y: Tensor,
    codes: Tensor,
    qparams: Tensor,
    seed: Tensor,
    spec: SaveSpec,
    columns: int,
    mask: TokenMask | None = None,
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z), with float32 accumulation at least.

    The product is made with the groups still rotated, and rotated back afterwards: it has O rows where Z has K. On CPU
    SᵀY and Z are made and multiplied in parts, so that they never exist as a whole.

    Args:
        y: Y, shape (N, O), floating point.
        codes: uint8, shape (K, ⌈I · bits / 8⌉).
        qparams: bfloat16, shape (K, ⌈I / 64⌉, 2).
        seed: The seed of S and of the rounding, int64, shape (1,).
        spec: As Z was made.
        columns: I.
        mask: As Z was made.

    Returns:
        Shape (O, I), dtype of ``y``.
    """
    return table.UNPACKED_PRODUCT.choose(y, codes, qparams, seed)(y, codes, qparams, seed, spec, columns, mask)


def pack(matrix: Tensor, bits: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to few bits; the arguments are those of :func:`rmm_linear.packing.pack`.

    Args:
        matrix: Floating point, shape (rows, columns).
        bits: 8, 4 or 2.
        seed: int64 with one element, on the device of ``matrix``.

    Returns:
        Codes and qparams.
    """
    return table.PACK.choose(matrix, seed)(matrix, bits, seed)


def unpack(
    codes: Tensor,
    qparams: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Tensor:
    """Return the matrix that packed storage stands for; see :func:`rmm_linear.packing.unpack`.

    Args:
        codes: uint8, shape (rows, ⌈columns · bits / 8⌉).
        qparams: bfloat16, shape (rows, ⌈columns / 64⌉, 2).
        seed: The seed they were packed with.
        bits: 8, 4 or 2.
        columns: Columns of the matrix.
        dtype: dtype of the result.
        rotated: Leave the groups rotated.

    Returns:
        Shape (rows, columns).
    """
    run = table.UNPACK.choose(codes, qparams, seed)
    return run(codes, qparams, seed, bits, columns, dtype, rotated=rotated)


def scaled_sketch(
    matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None, scale: float = 1.0
) -> Tensor:
    """Return SᵀM times a number, in memory of its own.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``.
        spec: Kind, rows and block.
        mask: The tokens that count, or None for all.
        scale: The number, see :func:`rmm_linear.ops.fp16.fp16_scale`. Unless it is 1, the sketch is made in float32.

    Returns:
        Shape (kept rows, D), dtype of ``matrix``, contiguous.
    """
    dtype = None if scale == 1 else torch.float32
    run = table.SKETCH.choose(matrix, seed)
    result = run(matrix, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask, dtype=dtype)
    if scale != 1:
        return (result * scale).to(matrix.dtype, memory_format=torch.contiguous_format)
    if result is matrix:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()  # transforms return other strides


@torch.library.custom_op(
    "rmm_linear::sketch", mutates_args=(), schema=f"(Tensor matrix, Tensor seed, {SCHEMA}, float scale=1.0) -> Tensor"
)
def _sketch(matrix, seed, *arguments, scale=1.0, **named):
    *arguments, scale = arguments if len(arguments) == 8 else (*arguments, scale)
    return scaled_sketch(matrix, seed, *from_arguments(*arguments, **named), scale)


@_sketch.register_fake
def _(matrix, seed, kind, rows, block=None, *arguments, **named):
    return matrix.new_empty(kept_rows(matrix.shape[0], rows, block), matrix.shape[1])


@torch.library.custom_op(
    "rmm_linear::unpacked_product",
    mutates_args=(),
    schema=f"(Tensor y, Tensor codes, Tensor qparams, Tensor seed, int columns, {SCHEMA}) -> Tensor",
)
def _unpacked_product(y, codes, qparams, seed, columns, *arguments, **named):
    spec, mask = from_arguments(*arguments, **named)
    return unpacked_product(y, codes, qparams, seed, spec, columns, mask)


@_unpacked_product.register_fake
def _(y, codes, qparams, seed, columns, *arguments, **named):
    return y.new_empty(y.shape[1], columns)


def sketch_operator(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None, scale: float) -> Tensor:
    """Do what :func:`scaled_sketch` does as an operator, which PyTorch counts and traces.

    Args:
        matrix: See there, as for the other arguments.
        seed: See there.
        spec: See there.
        mask: See there.
        scale: See there.

    Returns:
        SᵀM times ``scale``.
    """
    return _sketch(matrix, seed, *to_arguments(spec, mask), scale)


def unpacked_product_operator(
    y: Tensor, codes: Tensor, qparams: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Do what :func:`unpacked_product` does as an operator, which PyTorch counts and traces.

    Args:
        y: See there, as for the other arguments.
        codes: See there.
        qparams: See there.
        seed: See there.
        spec: See there.
        columns: See there.
        mask: See there.

    Returns:
        (SᵀY)ᵀ unpack(Z).
    """
    return _unpacked_product(y, codes, qparams, seed, columns, *to_arguments(spec, mask))


def sketch_flops(shape: Sequence[int], kind: str, rows: int, block: int | None) -> int:
    """Count multiplications and additions, each one, as PyTorch counts a product; of the transforms the fast form.

    Args:
        shape: (N, D).
        kind: One of :data:`rmm_linear.sketches.FAMILIES`.
        rows: K.
        block: Tokens per block, or None.

    Returns:
        The operations of SᵀM.
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
    kept, outputs = codes[0], y[1]
    unpacking = 2 * kept * columns + 2 * GROUP * outputs * columns
    return sketch_flops(y, kind, rows, block) + 2 * kept * outputs * columns + unpacking
