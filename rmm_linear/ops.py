"""The operators that layers are made of, known to PyTorch: traced by compilers, counted in operations, run by device.

Plain PyTorch runs on CPU (packing and random numbers in compiled form where it was built), the Triton kernels on
accelerators, both from the same seed with the same S. The environment variable RMM_BACKEND says otherwise: "torch" is
plain PyTorch everywhere, "triton" the kernels, on CPU in Triton's interpreter (TRITON_INTERPRET=1). Kinds without a
kernel (dct, dft) and float64 run in PyTorch everywhere.

A seed is a tensor on the device and is never read by the host, so nothing waits for the device.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear import _triton, packing
from rmm_linear.backends import requested_backend
from rmm_linear.sketches import FAMILIES, TokenMask, kept_rows
from rmm_linear.sketches import sketch as plain_sketch
from rmm_linear.sketches import sketch_parts as plain_parts
from rmm_linear.sketches.dense import block_rows

_ACCELERATORS = ("cuda", "xpu")  # ROCm calls itself cuda


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _uses_triton(tensor: Tensor, kind: str | None = None) -> bool:
    requested = requested_backend()
    if tensor.dtype not in _triton.DTYPES or not (kind is None or kind in _triton.KINDS):
        return False
    return requested == "triton" or (requested == "auto" and tensor.device.type in _ACCELERATORS and _has_triton())


def _check_block(kind: str, block: int | None) -> None:
    if block is not None and not FAMILIES[kind].blocks:
        raise ValueError(f"block is for kinds with blocks, got block={block} with kind={kind!r}. Use block=None.")


def _mask(order: Tensor | None, count: Tensor | None) -> TokenMask | None:
    return None if order is None or count is None else TokenMask(order, count)


@torch.library.custom_op("rmm_linear::sketch", mutates_args=())
def sketch(
    matrix: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    block: int | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Return SᵀM; :func:`rmm_linear.sketches.sketch` says what the arguments are.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        block: Tokens per block, or None.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.

    Returns:
        Shape (kept rows, D), dtype of ``matrix``.
    """
    _check_block(kind, block)
    mask, tokens = _mask(order, count), matrix.shape[0]
    if kept_rows(tokens, rows, block) < tokens and _uses_triton(matrix, kind):
        return _triton.sketch(matrix, seed, kind, rows, block, mask, None)
    result = plain_sketch(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask)
    if result is matrix:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()  # transforms return other strides


@sketch.register_fake
def _(matrix, seed, kind, rows, block=None, order=None, count=None):
    return matrix.new_empty(kept_rows(matrix.shape[0], rows, block), matrix.shape[1])


@torch.library.custom_op("rmm_linear::packed_sketch", mutates_args=())
def packed_sketch(
    matrix: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    bits: int,
    block: int | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM), made in one go: on CPU in parts, in a kernel before it is stored.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``; of S and of the rounding.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        bits: 8, 4 or 2.
        block: Tokens per block, or None.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.

    Returns:
        Codes and ranges, see :func:`rmm_linear.packing.pack`.
    """
    _check_block(kind, block)
    mask, (tokens, columns) = _mask(order, count), matrix.shape
    kept = kept_rows(tokens, rows, block)
    if _uses_triton(matrix, kind):
        if kept < tokens:
            return _triton.sketch(matrix, seed, kind, rows, block, mask, bits)
        return _triton.kernels().pack(matrix if mask is None else mask.compact(matrix), bits, seed)
    shape = {"kind": kind, "seed": seed, "rows": rows, "block": block, "mask": mask}
    if matrix.device.type != "cpu":
        return packing.pack(plain_sketch(matrix, **shape), bits, seed)
    return packing.pack_parts(plain_parts(matrix, **shape), (kept, columns), bits, seed)


@packed_sketch.register_fake
def _(matrix, seed, kind, rows, bits, block=None, order=None, count=None):
    kept, columns = kept_rows(matrix.shape[0], rows, block), matrix.shape[1]
    codes = matrix.new_empty(kept, (columns * bits + 7) // 8, dtype=torch.uint8)
    groups = (columns + packing.GROUP - 1) // packing.GROUP
    return codes, matrix.new_empty(kept, groups, 2, dtype=torch.bfloat16)


@torch.library.custom_op("rmm_linear::unpacked_product", mutates_args=())
def unpacked_product(y: Tensor, codes: Tensor, ranges: Tensor, seed: Tensor, bits: int, columns: int) -> Tensor:
    """Return Yᵀ unpack(Z), with float32 accumulation at least.

    The product is made with the groups still turned, and turned back afterwards: it has O rows where Z has K. On CPU Z
    is unpacked and multiplied in parts, so that it never exists as a whole.

    Args:
        y: SᵀY, shape (K, O).
        codes: uint8, shape (K, ⌈I · bits / 8⌉).
        ranges: bfloat16, shape (K, ⌈I / 64⌉, 2).
        seed: The seed they were packed with, int64, shape (1,).
        bits: 8, 4 or 2.
        columns: I.

    Returns:
        Shape (O, I), dtype of ``y``.
    """
    if _uses_triton(y):
        z = _triton.kernels().unpack(codes, ranges, bits, columns, y.dtype)
        return _triton.kernels().turn_back(y.T @ z, seed)
    parts = list(packing.row_parts(codes.shape[0], columns, codes))
    if len(parts) < 2 or y.dtype not in (torch.float32, torch.float64):  # a half type would round after every part
        z = packing.unpack(codes, ranges, seed, bits, columns, y.dtype, turned=True)
        return packing.turn_back(y.T @ z, seed)
    product = y.new_zeros(y.shape[1], columns)
    for part in parts:
        z = packing.unpack(codes[part], ranges[part], seed, bits, columns, y.dtype, turned=True)
        product.addmm_(y[part].T, z)
    return packing.turn_back(product, seed)


@unpacked_product.register_fake
def _(y, codes, ranges, seed, bits, columns):
    return y.new_empty(y.shape[1], columns)


def _sketch_flops(shape: Sequence[int], kind: str, rows: int, block: int | None) -> int:
    """Multiplications and additions, each one, as PyTorch counts a matrix product."""
    tokens, columns = shape
    if kept_rows(tokens, rows, block) >= tokens:
        return 0
    if kind in ("gaussian", "rademacher"):
        return 2 * tokens * columns * block_rows(tokens, rows, block)[2]
    if kind in ("hadamard", "dct", "dft"):
        return round(tokens * columns * math.log2(max(tokens, 2)))
    return tokens * columns if kind == "countsketch" else rows * columns


@register_flop_formula(torch.ops.rmm_linear.sketch)
def _(matrix, seed, kind, rows, block=None, *args, out_shape=None, **kwargs) -> int:
    return _sketch_flops(matrix, kind, rows, block)


@register_flop_formula(torch.ops.rmm_linear.packed_sketch)
def _(matrix, seed, kind, rows, bits, block=None, *args, out_shape=None, **kwargs) -> int:
    kept = kept_rows(matrix[0], rows, block)
    return _sketch_flops(matrix, kind, rows, block) + 2 * packing.GROUP * kept * matrix[1]


@register_flop_formula(torch.ops.rmm_linear.unpacked_product)
def _(y, codes, ranges, seed, bits, columns, *args, out_shape=None, **kwargs) -> int:
    return 2 * y[0] * y[1] * columns + 2 * y[0] * columns + 2 * packing.GROUP * y[1] * columns
