"""What layers are made of, run by device, and the operators of the backward pass, known to PyTorch: counted and traced.

The operator of the forward pass is :func:`rmm_linear.ops.save.keep`'s: it makes all that is kept of an input in one go.

Plain PyTorch runs on CPU (packing and random numbers in compiled form where it was built), the Triton kernels on
accelerators, both from the same seed with the same S. The environment variable RMM_BACKEND says otherwise: "torch" is
plain PyTorch everywhere, "triton" the kernels, on CPU in Triton's interpreter (TRITON_INTERPRET=1). Kinds without a
kernel (dct, dft) and float64 run in PyTorch everywhere.

A seed is a tensor on the device and is never read by the host, so nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends import native
from rmm_linear.backends import triton as _triton
from rmm_linear.ops.rows import draw_rows, gather_rows, make_rows, packed_rows
from rmm_linear.packing import pack as packing
from rmm_linear.sketches import TokenMask, has_blocks, kept_rows
from rmm_linear.sketches import sketch as plain_sketch
from rmm_linear.sketches import sketch_parts as plain_parts
from rmm_linear.sketches.blocks import block_rows

__all__ = [
    "draw_rows",
    "gather_rows",
    "lift",
    "make_rows",
    "make_sketch",
    "packed_rows",
    "packed_sketch",
    "sketch",
    "sketch_flops",
    "unpacked_product",
]

_CHUNK = 1 << 22  # elements that are unpacked at a time on CPU: memory that the allocator has at hand


def _check_block(kind: str, block: int | None) -> None:
    if block is not None and not has_blocks(kind):
        raise ValueError(f"block is for kinds with blocks, got block={block} with kind={kind!r}. Use block=None.")


def lift(dtype: torch.dtype, tokens: int, rows: int) -> float:
    """Return by how much SᵀX is stored smaller, and SᵀY made larger: 1 for all dtypes but float16.

    float16 ends at 65504. Every row of SᵀX is a sum of tokens, √(N/K) times as large as they are on the average and
    hardly ever four times more, so where one channel is large in all tokens it would be infinite where X is not, in
    every step, and no loss scale would help: that is in Y alone.

    Args:
        dtype: Of X and Y.
        tokens: N.
        rows: K.

    Returns:
        A power of two, 4√(N/K) at least for float16.
    """
    if dtype != torch.float16 or rows >= tokens:
        return 1.0
    return 2.0 ** math.ceil(math.log2(4 * math.sqrt(tokens / max(rows, 1))))


def make_sketch(
    matrix: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    block: int | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
    power: float = 1.0,
) -> Tensor:
    """Return SᵀM times a number; :func:`rmm_linear.sketches.sketch` says what the other arguments are.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        block: Tokens per block, or None.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.
        power: The number, see :func:`lift`. Unless it is 1, the sketch is made in float32.

    Returns:
        Shape (kept rows, D), dtype of ``matrix``.
    """
    _check_block(kind, block)
    mask, tokens = TokenMask.made_of(order, count), matrix.shape[0]
    dtype = matrix.dtype if power == 1 else torch.float32
    if kept_rows(tokens, rows, block) < tokens and _triton.applies_to(matrix, kind):
        result = _triton.sketch(matrix, seed, kind, rows, block, mask, dtype=dtype)
        return result if power == 1 else result.mul_(power).to(matrix.dtype)
    result = plain_sketch(matrix.to(dtype), kind=kind, seed=seed, rows=rows, block=block, mask=mask)
    if power != 1:
        return (result * power).to(matrix.dtype, memory_format=torch.contiguous_format)
    if result is matrix:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()  # transforms return other strides


sketch = torch.library.custom_op("rmm_linear::sketch", make_sketch, mutates_args=())


@sketch.register_fake
def _(matrix, seed, kind, rows, block=None, order=None, count=None, power=1.0):
    return matrix.new_empty(kept_rows(matrix.shape[0], rows, block), matrix.shape[1])


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
        Codes and ranges, see :func:`rmm_linear.packing.pack.pack`.
    """
    _check_block(kind, block)
    mask, (tokens, columns) = TokenMask.made_of(order, count), matrix.shape
    kept = kept_rows(tokens, rows, block)
    if _triton.applies_to(matrix, kind):
        if kept < tokens:
            return _triton.sketch(matrix, seed, kind, rows, block, mask, bits=bits)
        return _triton.kernels().pack(matrix if mask is None else mask.compact(matrix), bits, seed)
    if matrix.dtype == torch.float16:
        matrix = matrix.float()  # which has room for the sums
    shape = {"kind": kind, "seed": seed, "rows": rows, "block": block, "mask": mask}
    if matrix.device.type != "cpu":
        return packing.pack(plain_sketch(matrix, **shape), bits, seed)
    if kind == "countsketch" and matrix.dtype == torch.float32 and native.applies_to(matrix, seed):
        real = tokens if mask is None else int(mask.count)
        if real > rows:
            real_rows = matrix if mask is None else matrix.index_select(0, mask.order[:real])
            return packing.pack_hashed(real_rows, rows, bits, seed)
    return packing.pack_parts(plain_parts(matrix, **shape), (kept, columns), bits, seed)


@torch.library.custom_op("rmm_linear::unpacked_product", mutates_args=())
def unpacked_product(
    y: Tensor,
    codes: Tensor,
    ranges: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    bits: int,
    columns: int,
    block: int | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z), with float32 accumulation at least.

    The product is made with the groups still turned, and turned back afterwards: it has O rows where Z has K. On CPU
    SᵀY and Z are made and multiplied in parts, so that they never exist as a whole.

    Args:
        y: Y, shape (N, O), floating point.
        codes: uint8, shape (K, ⌈I · bits / 8⌉).
        ranges: bfloat16, shape (K, ⌈I / 64⌉, 2).
        seed: The seed of S and of the rounding, int64, shape (1,).
        kind: As Z was made.
        rows: As Z was made.
        bits: 8, 4 or 2.
        columns: I.
        block: As Z was made.
        order: As Z was made.
        count: As Z was made.

    Returns:
        Shape (O, I), dtype of ``y``.
    """
    mask, tokens, kept = TokenMask.made_of(order, count), y.shape[0], codes.shape[0]
    if y.dtype == torch.float16 and not _triton.applies_to(y):
        made_of = (codes, ranges, seed, kind, rows, bits, columns, block, order, count)
        return unpacked_product(y.float(), *made_of).to(y.dtype)
    if y.device.type == "cpu" and not _triton.applies_to(y):
        made = plain_parts(y, kind=kind, seed=seed, rows=rows, block=block, mask=mask)
        # A half type would round after every part.
        step = max(1, _CHUNK // max(1, columns, y.shape[1])) if y.dtype in (torch.float32, torch.float64) else kept
        product = y.new_zeros(y.shape[1], columns)
        for begin in range(0, kept, max(1, step)):
            part = slice(begin, min(begin + step, kept))
            z = packing.unpack(codes[part], ranges[part], seed, bits, columns, y.dtype, turned=True)
            transposed = made(part.start, part.stop).T
            product = product.addmm_(transposed, z) if begin else torch.mm(transposed, z)
        return packing.turn_back_(product, seed)
    power = lift(y.dtype, tokens, kept)
    if mask is not None or kept < tokens:
        y = sketch(y, seed, kind, rows, block, order, count, power)
    if not _triton.applies_to(y):
        z = packing.unpack(codes, ranges, seed, bits, columns, y.dtype, turned=True)
        return packing.turn_back_(y.T @ z, seed)
    z = _triton.kernels().unpack(codes, ranges, bits, columns, y.dtype if power == 1 else torch.float32)
    z = z if power == 1 else z.mul_(1 / power).to(y.dtype)
    return _triton.kernels().turn_back(y.T @ z, seed)


@unpacked_product.register_fake
def _(y, codes, ranges, seed, kind, rows, bits, columns, block=None, order=None, count=None):
    return y.new_empty(y.shape[1], columns)


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
def _(matrix, seed, kind, rows, block=None, *args, out_shape=None, **kwargs) -> int:
    return sketch_flops(matrix, kind, rows, block)


@register_flop_formula(torch.ops.rmm_linear.unpacked_product)
def _(y, codes, ranges, seed, kind, rows, bits, columns, block=None, *args, out_shape=None, **kwargs) -> int:
    kept, outputs = codes[0], y[1]
    unpacking = 2 * kept * columns + 2 * packing.GROUP * outputs * columns
    return sketch_flops(y, kind, rows, block) + 2 * kept * outputs * columns + unpacking
