"""The operations in plain PyTorch, made of :mod:`rmm_linear.sketches` and :mod:`rmm_linear.packing`.

On CPU what is only read once is made and used in parts, so that it never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask
from rmm_linear.sketches.philox import Generator, philox
from rmm_linear.spec import SaveSpec

_CHUNK = 1 << 22  # elements that are unpacked at a time on CPU: memory that the allocator has at hand


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
    """Return SᵀM as :func:`rmm_linear.sketches.sketch` does, in ``dtype`` if it is given."""
    matrix = matrix if dtype is None else matrix.to(dtype)
    return sketches.sketch(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, p=p)


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM); :func:`rmm_linear.ops.sketch.packed_sketch` says what the arguments are."""
    matrix, bits = widened(matrix), spec.bits or 0
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if matrix.device.type != "cpu":
        return packing.pack(sketches.sketch(matrix, **shape), bits, seed)
    rows = spec.kept_rows(matrix.shape[0])
    return packing.pack_parts(sketches.sketch_parts(matrix, **shape), (rows, matrix.shape[1]), bits, seed)


def unpacked_product(
    y: Tensor, codes: Tensor, qparams: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z); :func:`rmm_linear.ops.sketch.unpacked_product` says what the arguments are."""
    dtype, y = y.dtype, widened(y)
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if y.device.type == "cpu":
        parts = sketches.sketch_parts(y, **shape)
        return packing.unrotate(product_in_parts(y, parts, codes, qparams, seed, spec, columns), seed).to(dtype)
    if mask is not None or len(codes) < y.shape[0]:
        y = sketches.sketch(y, **shape)
    z = packing.unpack(codes, qparams, seed, spec.bits or 0, columns, y.dtype, rotated=True)
    return packing.unrotate(y.T @ z, seed).to(dtype)


def widened(matrix: Tensor) -> Tensor:
    """Return a float16 matrix in float32, which has room for the sums, and others as they are."""
    return matrix.float() if matrix.dtype == torch.float16 else matrix


def product_in_parts(
    y: Tensor,
    parts: Callable[[int, int], Tensor],
    codes: Tensor,
    qparams: Tensor,
    seed: Tensor,
    spec: SaveSpec,
    columns: int,
    unpack: Callable[..., Tensor] = packing.unpack,
) -> Tensor:
    """Return (SᵀY)ᵀ times the rotated Z, on CPU: rows of both are made and multiplied a part at a time.

    Args:
        y: Y, shape (N, O).
        parts: Makes the rows of SᵀY from one number up to another.
        codes: uint8, shape (K, ⌈I · bits / 8⌉).
        qparams: bfloat16, shape (K, ⌈I / 64⌉, 2).
        seed: The seed of the packing.
        spec: As Z was made.
        columns: I.
        unpack: Unpacks rows, see :func:`rmm_linear.packing.unpack`.

    Returns:
        Shape (O, I), its groups of columns still rotated.
    """
    rows = len(codes)
    # A half type would round after every part.
    step = max(1, _CHUNK // max(1, columns, y.shape[1])) if y.dtype in (torch.float32, torch.float64) else max(1, rows)
    product = y.new_zeros(y.shape[1], columns)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        z = unpack(codes[part], qparams[part], seed, spec.bits, columns, y.dtype, rotated=True)
        transposed = parts(part.start, part.stop).T
        product = product.addmm_(transposed, z) if begin else torch.mm(transposed, z)
    return product


def sample_rows(
    x: Tensor,
    seed: Tensor,
    spec: SaveSpec,
    expected: Tensor | None,
    mask: TokenMask | None,
    generator: Generator = philox,
) -> RowSample:
    """Sample K rows by their importance; :func:`rmm_linear.ops.rows.sample_rows` says what the arguments are."""
    p = sketches.probabilities(sketches.row_norms(x), spec.uniform_mix, expected, mask)
    keys = sketches.random_keys(seed, spec.rows, generator)
    return sketches.sample_rows(p, keys, SAMPLERS[spec.kind], mask)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: int) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) for sampled rows; :func:`rmm_linear.ops.rows.packed_rows` says what the arguments are."""
    return packing.pack_parts(row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


def row_parts(matrix: Tensor, sample: RowSample) -> Callable[[int, int], Tensor]:
    """Return a function of the first sampled row and the row after the last, which makes these rows of SᵀM."""
    return lambda begin, end: sketches.gather(matrix, RowSample(sample.index[begin:end], sample.scale[begin:end]))
