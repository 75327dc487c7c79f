"""The operations in plain PyTorch, composed of :mod:`rmm_linear.sketches` and :mod:`rmm_linear.packing`.

On CPU, intermediate results that are read only once are made a few rows at a time and never exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask
from rmm_linear.sketches.philox import Generator, philox
from rmm_linear.spec import SaveSpec

_CHUNK = 1 << 20  # elements that are unpacked at a time on CPU: they stay in its caches and need no new pages
_BLOCK = 128  # rows of Z of which libraries of products like a multiple


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return SᵀM, shape (kept_rows, D); M itself if every row is saved in its dtype.

    matrix: M, shape (N, D), floating point. seed: int64 with one element, on the device of ``matrix``. p: Probability
    of every token, for kinds that sample rows by it. dtype: The dtype in which the sketch is made; None is that of
    ``matrix``.
    """
    matrix = matrix if dtype is None else matrix.to(dtype)
    return sketches.sketch(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, p=p)


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) of M, shape (N, D); on CPU, SᵀM never exists as a whole.

    Of float16, sketches are made in float32: the sums may exceed it. ``seed`` is that of S and of the rounding.
    """
    matrix = matrix.float() if matrix.dtype == torch.float16 else matrix
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if matrix.device.type != "cpu":
        return packing.pack(sketches.sketch(matrix, **shape), spec.bits or 0, seed)
    size = spec.kept_rows(matrix.shape[0]), matrix.shape[1]
    return packing.pack_parts(sketches.sketch_parts(matrix, **shape), size, spec.bits or 0, seed)


def unpacked_product(
    y: Tensor, codes: Tensor, qparams: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z), shape (O, I), with float32 accumulation at least, for Y (N, O).

    The product is taken with Z still rotated and is unrotated afterwards, since it has O rows where Z has K.
    """
    dtype, y = y.dtype, y.float() if y.dtype == torch.float16 else y
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if y.device.type != "cpu":
        if mask is not None or len(codes) < y.shape[0]:
            y = sketches.sketch(y, **shape)
        z = packing.unpack(codes, qparams, seed, spec.bits or 0, columns, y.dtype, rotated=True)
        return packing.unrotate(y.T @ z, seed).to(dtype)
    sketched = sketches.sketch_parts(y, **shape)
    unpacked = packing.unpack_parts(codes, qparams, seed, spec.bits or 0, columns, y.dtype)
    product = product_of_parts(y, len(codes), columns, sketched, unpacked)
    return packing.unrotate(product, seed).to(dtype)


def product_of_parts(
    y: Tensor, rows: int, columns: int, left: Callable[[int, int], Tensor], right: Callable[[int, int], Tensor]
) -> Tensor:
    """Return the product of two matrices that are made a few rows at a time, the left one transposed.

    y: Any matrix with the columns and dtype of the left one. left, right: Functions of ``begin`` and ``end`` that
    return the rows begin … end − 1.
    """
    product = None
    for part in product_parts(rows, columns, y.shape[1], y.dtype):
        transposed, values = left(part.start, part.stop).T, right(part.start, part.stop)
        product = torch.mm(transposed, values) if product is None else product.addmm_(transposed, values)
    return y.new_zeros(y.shape[1], columns) if product is None else product


def product_parts(rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Iterator[slice]:
    """Cut the rows of Z into parts that are unpacked and multiplied one after the other on CPU.

    Half types have one part, since they would round the sum after every part.
    """
    step = _CHUNK // max(1, columns, outputs) if dtype in (torch.float32, torch.float64) else rows
    step -= step % _BLOCK if step > _BLOCK else 0
    for begin in range(0, rows, max(1, step)):
        yield slice(begin, min(begin + max(1, step), rows))


def sample_rows(
    x: Tensor,
    seed: Tensor,
    spec: SaveSpec,
    expected: Tensor | None,
    mask: TokenMask | None,
    generator: Generator = philox,
) -> RowSample:
    """Sample K of N rows by their norms, see :mod:`rmm_linear.sketches.sampling`: int32 indices, and scales.

    x: Input X, shape (N, I). expected: ŷ, the expected norms ‖yᵢ‖, shape (N,); None without a prediction.
    """
    p = sketches.probabilities(sketches.row_norms(x), spec.uniform_mix, expected, mask)
    keys = sketches.random_keys(seed, spec.rows, generator)
    return sketches.sample_rows(p, keys, SAMPLERS[spec.kind], mask)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: int) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) of M, shape (N, D), for K sampled rows; on CPU, SᵀM never exists as a whole."""
    return packing.pack_parts(row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


def row_parts(matrix: Tensor, sample: RowSample) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that makes the sampled rows begin … end − 1 of SᵀM."""
    return lambda begin, end: sketches.gather(matrix, RowSample(sample.index[begin:end], sample.scale[begin:end]))


def fp16_scale(dtype: torch.dtype, tokens: int, rows: int) -> float:
    """Return the power of two that keeps sums of a sketch within float16, 4√(N/K) at least; 1 for all other dtypes.

    SᵀX is divided by it before it is stored, SᵀY multiplied by it. Every row of SᵀX is a sum of tokens: on average
    √(N/K) times as large as a token, and hardly ever four times more than that. So where one channel is large in all
    tokens, SᵀX would be infinite in every step although X is finite. A loss scale would not help: it scales Y alone.
    """
    if dtype != torch.float16 or rows >= tokens:
        return 1.0
    return 2.0 ** math.ceil(math.log2(4 * math.sqrt(tokens / max(rows, 1))))
