"""The operations in plain PyTorch, made of :mod:`rmm_linear.sketches` and :mod:`rmm_linear.packing`.

On CPU what is only read once is made and used in parts, so that it never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    """Return SᵀM.

    Args:
        matrix: M, shape (N, D), floating point.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        seed: int64 with one element, on the device of ``matrix``.
        rows: K, at least 1.
        block: Tokens per block, or None.
        mask: The tokens that count, or None for all.
        p: Probability of every token, for kinds that sample rows by it.
        dtype: The dtype the sketch is made in; None is that of ``matrix``.

    Returns:
        Shape (kept rows, D); ``matrix`` itself where all rows are kept in its dtype.
    """
    matrix = matrix if dtype is None else matrix.to(dtype)
    return sketches.sketch(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, p=p)


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM), made in one go.

    Args:
        matrix: M, shape (N, D), floating point. A sketch of float16 is made in float32, which has room for the sums.
        seed: int64, shape (1,), on the device of ``matrix``; of S and of the rounding.
        spec: Kind, rows, block and bits.
        mask: The tokens that count, or None for all.

    Returns:
        Codes and qparams, see :func:`rmm_linear.packing.pack`.
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
    """Return (SᵀY)ᵀ unpack(Z), with float32 accumulation at least.

    The product is made with the groups still rotated, and rotated back afterwards: it has O rows where Z has K.

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
    dtype, y = y.dtype, y.float() if y.dtype == torch.float16 else y
    shape = {"kind": spec.kind, "seed": seed, "rows": spec.rows, "block": spec.block, "mask": mask}
    if y.device.type != "cpu":
        if mask is not None or len(codes) < y.shape[0]:
            y = sketches.sketch(y, **shape)
        z = packing.unpack(codes, qparams, seed, spec.bits or 0, columns, y.dtype, rotated=True)
        return packing.unrotate(y.T @ z, seed).to(dtype)
    sketched, product = sketches.sketch_parts(y, **shape), y.new_zeros(y.shape[1], columns)
    for part in product_parts(len(codes), columns, y.shape[1], y.dtype):
        z = packing.unpack(codes[part], qparams[part], seed, spec.bits or 0, columns, y.dtype, rotated=True)
        transposed = sketched(part.start, part.stop).T
        product = product.addmm_(transposed, z) if part.start else torch.mm(transposed, z)
    return packing.unrotate(product, seed).to(dtype)


def product_parts(rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Iterator[slice]:
    """Cut the rows of Z into those that are unpacked and multiplied at a time on CPU.

    Args:
        rows: K.
        columns: I.
        outputs: O.
        dtype: Of Y.

    Yields:
        The rows: all of them for half types, which would round after every part.
    """
    step = _CHUNK // max(1, columns, outputs) if dtype in (torch.float32, torch.float64) else rows
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
    """Sample K rows of an input by what they weigh; :mod:`rmm_linear.sketches.sampling` says how.

    Args:
        x: Input X, shape (N, I), floating point.
        seed: int64, shape (1,), on the device of ``x``.
        spec: Kind, rows (K, less than N), and the part of the probability that all tokens share alike.
        expected: ŷ, what is expected of ‖yᵢ‖, shape (N,); None where nothing is known.
        mask: The tokens that count, or None for all.
        generator: Makes the random words.

    Returns:
        Rows, int32, and their scales, float32, both of shape (K,).
    """
    p = sketches.probabilities(sketches.row_norms(x), spec.uniform_mix, expected, mask)
    keys = sketches.random_keys(seed, spec.rows, generator)
    return sketches.sample_rows(p, keys, SAMPLERS[spec.kind], mask)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: int) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) for sampled rows, made in one go.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``; of the rounding.
        sample: Rows and scales, shape (K,).
        bits: 8, 4 or 2.

    Returns:
        Codes and qparams, see :func:`rmm_linear.packing.pack`.
    """
    return packing.pack_parts(row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


def row_parts(matrix: Tensor, sample: RowSample) -> Callable[[int, int], Tensor]:
    """Prepare to make some sampled rows after others.

    Args:
        matrix: M, shape (N, D).
        sample: Rows and scales, shape (K,).

    Returns:
        A function of the first row and the row after the last, which makes these rows of SᵀM.
    """
    return lambda begin, end: sketches.gather(matrix, RowSample(sample.index[begin:end], sample.scale[begin:end]))
