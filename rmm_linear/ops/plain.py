"""The operations in plain PyTorch, composed of :mod:`rmm_linear.sketches` and :mod:`rmm_linear.packing`.

On CPU, intermediate results that are read only once are made a few rows at a time and never exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask
from rmm_linear.sketches.philox import Generator, philox
from rmm_linear.sketches.seeds import Fresh, place_of
from rmm_linear.spec import COORDINATE_BITS, SaveSpec

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
    """Return encode(SᵀM) of M, shape (N, D); on CPU, SᵀM never exists as a whole.

    Of float16, sketches are made in float32: the sums may exceed it. ``seed`` is that of S and of the rounding.
    """
    matrix = matrix.float() if matrix.dtype == torch.float16 else matrix
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if matrix.device.type != "cpu":
        return packing.encode(sketches.sketch(matrix, **shape), spec.bits or 0, seed)
    size = spec.kept_rows(matrix.shape[0]), matrix.shape[1]
    return packing.encode_parts(sketches.sketch_parts(matrix, **shape), size, spec.bits or 0, seed)


def unpacked_product(
    y: Tensor, codes: Tensor, scales: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ decode(Z), shape (O, I), with float32 accumulation at least, for Y (N, O).

    The product is taken with Z still rotated and is unrotated afterwards, since it has O rows where Z has K.
    """
    dtype, y, bits = y.dtype, y.float() if y.dtype == torch.float16 else y, packing.check_code(spec.bits)
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if y.device.type != "cpu":
        if mask is not None or len(codes) < y.shape[0]:
            y = sketches.sketch(y, **shape)
        z = packing.decode(codes, scales, seed, bits, columns, y.dtype, rotated=True)
        return packing.unrotate(y.T @ z, seed, bits, columns).to(dtype)
    sketched = sketches.sketch_parts(y, **shape)
    unpacked = packing.decode_parts(codes, scales, seed, bits, columns, y.dtype)
    product = product_of_parts(y, len(codes), packing.rotated_columns(columns, bits), sketched, unpacked)
    return packing.unrotate(product, seed, bits, columns).to(dtype)


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


def directed(
    x: Tensor, bits: float, seed: Tensor, basis: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of X − C Bᵀ, and of C = X B in 8 bits; on CPU, the former never exists as a whole.

    basis: B, shape (I, k), orthonormal. index: The rows of X that are encoded, int64, shape (n,); None for all.
    """
    return directed_by(x, bits, seed, basis, index, CODER)


class Coder(NamedTuple):
    """The functions of :mod:`rmm_linear.packing` that fixed directions need, or others that do the same."""

    encode_parts: Callable[..., tuple[Tensor, Tensor]]
    encode: Callable[..., tuple[Tensor, Tensor]]
    decode_parts: Callable[..., Callable[[int, int], Tensor]]
    decode: Callable[..., Tensor]
    rotate: Callable[[Tensor, Tensor, float], Tensor]
    unrotate: Callable[[Tensor, Tensor, float, int], Tensor]


CODER = Coder(
    packing.encode_parts, packing.encode, packing.decode_parts, packing.decode, packing.rotate, packing.unrotate
)


def directed_by(
    x: Tensor, bits: float, seed: Tensor | Fresh, basis: Tensor, index: Tensor | None, coder: Coder
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what :func:`directed` does with other functions."""
    rows = x.shape[0] if index is None else len(index)
    # Coordinates may exceed float16, and both passes need one basis: products are float32's there.
    is_wide = x.device.type == "cpu" or x.dtype == torch.float16
    dtype = torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype
    basis, coordinates = basis.to(dtype), x.new_empty(rows, basis.shape[1], dtype=dtype)
    buffers: list[Tensor] = []  # new memory takes longer than a product

    def rest(begin: int, end: int) -> Tensor:
        values = (x[begin:end] if index is None else x.index_select(0, index[begin:end])).to(dtype)
        found = torch.mm(values, basis, out=coordinates[begin:end])
        if not buffers:
            buffers.append(torch.empty_like(values))
        return torch.addmm(values, found, basis.T, alpha=-1, out=buffers[0][: end - begin])

    stored = coder.encode_parts(rest, (rows, x.shape[1]), bits, seed)
    return *stored, *coder.encode(coordinates, COORDINATE_BITS, place_of(seed) ^ 1)


def directed_product(
    y: Tensor, saved: Sequence[Tensor], bits: float, columns: int, index: Tensor | None = None
) -> Tensor:
    """Return the product of Yᵀ with what :func:`directed` has saved, shape (O, I).

    saved: Codes and scales of the rest, the seed, codes and scales of the coordinates, and B.
    """
    return directed_product_by(y, saved, bits, columns, index, CODER)


def directed_product_by(
    y: Tensor,
    saved: Sequence[Tensor],
    bits: float,
    columns: int,
    index: Tensor | None,
    coder: Coder,
) -> Tensor:
    """Do what :func:`directed_product` does with other functions."""
    (codes, scales, seed, *coordinates, basis), dtype = saved, y.dtype
    y = (y if index is None else y.index_select(0, index)).to(torch.float32 if dtype == torch.float16 else dtype)
    found = coder.decode(*coordinates, seed ^ 1, COORDINATE_BITS, basis.shape[1], y.dtype)
    rotated = coder.rotate(basis.T.contiguous(), seed, bits).to(y.dtype)
    rest = coder.decode_parts(codes, scales, seed, bits, columns, y.dtype)
    is_narrow = y.shape[1] < columns  # whether (YᵀĈ) Bᵀ takes less than Ĉ Bᵀ

    def rows(begin: int, end: int) -> Tensor:
        return rest(begin, end) if is_narrow else rest(begin, end).addmm_(found[begin:end], rotated)

    if y.device.type != "cpu":
        product = y.T @ rows(0, len(codes))
    else:
        product = product_of_parts(y, len(codes), rotated.shape[1], lambda begin, end: y[begin:end], rows)
    if is_narrow:
        product.addmm_((y.T @ found).to(product.dtype), rotated.to(product.dtype))
    return coder.unrotate(product, seed, bits, columns).to(dtype)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: float) -> tuple[Tensor, Tensor]:
    """Return encode(SᵀM) of M, shape (N, D), for K sampled rows; on CPU, SᵀM never exists as a whole."""
    return packing.encode_parts(row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


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
