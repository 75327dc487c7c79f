"""The C library: random numbers, CountSketch and packing on CPU, called with ctypes.

Built when the package is installed, if there is a C compiler; without it, and with RMM_BACKEND=torch, everything runs
in plain PyTorch, with the same result. The library has no state, and shares PyTorch's OpenMP threads. Tensors must be
plain ones on CPU, see :func:`rmm_linear.backends.select.backend_of`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native.library import (
    TYPES,
    function,
    is_available,
    matrix_arguments,
    pointer,
    run,
    threads,
)

__all__ = [
    "countsketch",
    "gather_rows",
    "is_available",
    "pack",
    "philox",
    "run",
    "signs_and_shifts",
    "unpack",
    "unrotate",
]


def philox(seed: Tensor, offset: Tensor, stream: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`rmm_linear.sketches.philox.philox` does.

    Args:
        seed: Key, int64 with one element.
        offset: Counters, int64, any shape.
        stream: Number of the stream.

    Returns:
        Four int64 tensors of the shape of ``offset``.
    """
    offset = offset.contiguous()
    words = offset.new_empty(4, *offset.shape)
    key, count = int(seed), offset.numel()
    function("rmm_philox")(key, stream, count, pointer(offset), pointer(words))
    first, second, third, fourth = words.unbind()
    return first, second, third, fourth


def signs_and_shifts(seed: Tensor, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return what :func:`rmm_linear.sketches.countsketch.signs_and_shifts` does.

    Args:
        seed: int64 with one element.
        tokens: N.
        rows: K.

    Returns:
        Signs, int8, shape (N,), and shifts, int64, shape (⌈N/K⌉,).
    """
    signs = seed.new_empty(tokens, dtype=torch.int8)
    shifts = seed.new_empty(-(-tokens // rows))
    function("rmm_signs_and_shifts")(int(seed), tokens, rows, pointer(signs), pointer(shifts))
    return signs, shifts


def pack(
    matrix: Tensor,
    bits: int,
    seed: int,
    codes: int,
    qparams: int,
    rows: int,
    first: int = 0,
    index: Tensor | None = None,
) -> bool:
    """Round rows to ``bits`` per element, as described in :mod:`rmm_linear.packing.pack`.

    Args:
        matrix: float32, bfloat16 or float16, shape (N, I); elements of a row side by side.
        bits: 8, 4 or 2.
        seed: Of the rounding, and of the sketch.
        codes: Address to write to: uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        qparams: Address to write to: bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
        rows: K. Of fewer rows than ``matrix`` has, its CountSketch is packed, row by row; sums of bfloat16 are rounded
            to it before.
        first: The number of the first row, where they are a part of a matrix.
        index: Rows of ``matrix`` that are taken instead of all, int64, shape (N,), contiguous.

    Raises:
        MemoryError: If a row cannot be allocated.
    """
    return not run(
        "rmm_pack", *matrix_arguments(matrix, index), rows, seed, first, bits, codes, qparams, threads(matrix)
    )


def unpack(
    codes: int, qparams: int, bits: int, seed: int, matrix: Tensor, first: int = 0, *, rotated: bool = True
) -> None:
    """Write rows that codes and qparams represent.

    Args:
        codes: Address of uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        qparams: Address of bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
        bits: 8, 4 or 2.
        seed: They were packed with.
        matrix: Written to; float32, bfloat16 or float16, shape (n, I), contiguous: the rows from ``first`` on.
        first: See there.
        rotated: Whether whole groups stay rotated; where not, ``matrix`` is float32.

    Raises:
        MemoryError: If the random numbers cannot be allocated.
    """
    run(
        "rmm_unpack", codes, qparams, first, *matrix.shape, bits, seed, not rotated,
        matrix.data_ptr(), TYPES[matrix.dtype], threads(matrix),
    )  # fmt: skip


def unrotate(matrix: Tensor, seed: int) -> None:
    """Undo the rotation of whole groups of 64 columns, in place.

    Args:
        matrix: float32, shape (O, I), contiguous.
        seed: It was packed with.
    """
    function("rmm_unrotate")(matrix.data_ptr(), *matrix.shape, seed, threads(matrix))


def countsketch(
    matrix: Tensor,
    seed: int,
    rows: int,
    begin: int,
    end: int,
    index: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return some rows of SᵀM, as described in :mod:`rmm_linear.sketches.countsketch`.

    Args:
        matrix: M, float32, bfloat16 or float16, shape (N, D), N > K, elements of a row side by side.
        seed: Of the sketch.
        rows: K.
        begin: First row of SᵀM.
        end: The row after the last, at most K.
        index: Rows of ``matrix`` that are taken instead of all, int64, shape (N,), contiguous.
        dtype: Of the result; None is that of ``matrix``. Sums are made in float32.

    Raises:
        MemoryError: If a row of the sketch cannot be allocated.
    """
    z = matrix.new_empty(end - begin, matrix.shape[1], dtype=dtype)
    run(
        "rmm_countsketch", *matrix_arguments(matrix, index), rows, seed, begin, end - begin, z.data_ptr(),
        TYPES[z.dtype], threads(matrix),
    )  # fmt: skip
    return z


def gather_rows(matrix: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Return what :func:`rmm_linear.sketches.gather` does.

    Args:
        matrix: float32, bfloat16 or float16, shape (N, D), elements of a row side by side.
        index: int64, shape (K,), contiguous.
        scale: float32, shape (K,), contiguous.

    Returns:
        Shape (K, D), dtype of ``matrix``.
    """
    z = matrix.new_empty(len(index), matrix.shape[1])
    function("rmm_gather_rows")(
        pointer(matrix), TYPES[matrix.dtype], matrix.stride(0), matrix.shape[1], pointer(index), pointer(scale),
        len(index), pointer(z), threads(z),
    )  # fmt: skip
    return z
