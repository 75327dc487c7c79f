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
    threads,
)

__all__ = [
    "countsketch",
    "gather_rows",
    "is_available",
    "pack",
    "philox",
    "rounding_noise",
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


def rounding_noise(seed: Tensor, stream: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :class:`rmm_linear.packing.rounding.RoundingNoise` holds.

    Args:
        seed: int64 with one element.
        stream: Number of the stream.
        rows: Rows of the matrix.
        columns: Columns of the matrix.

    Returns:
        Signs of the rotation, float32, shape (64,); int32 of shape (rows,) and of shape (columns,).
    """
    signs = seed.new_empty(64, dtype=torch.float32)
    a, c = seed.new_empty(rows, dtype=torch.int32), seed.new_empty(columns, dtype=torch.int32)
    function("rmm_rounding_noise")(
        int(seed), stream, rows, columns, signs.data_ptr(), a.data_ptr(), c.data_ptr()
    )  # fmt: skip
    return signs, a, c


def noise_words(seed: Tensor, stream: int, rows: int, columns: int) -> tuple[Tensor, int, int]:
    """Return one tensor of int32 with 64 signs, as float32, and the numbers of rows and of columns; where these are."""
    words = torch.empty(64 + rows + columns, dtype=torch.int32, device="cpu")
    signs = words.data_ptr()
    a = signs + 256
    c = a + 4 * rows
    function("rmm_rounding_noise")(int(seed), stream, rows, columns, signs, a, c)
    return words, a, c


def pack(
    matrix: Tensor,
    bits: int,
    signs: Tensor,
    rows: Tensor,
    columns: Tensor,
    codes: Tensor,
    qparams: Tensor,
    hashing: tuple[Tensor, Tensor] | None = None,
    index: Tensor | None = None,
) -> bool:
    """Round rows to ``bits`` per element, as described in :mod:`rmm_linear.packing.pack`.

    Args:
        matrix: float32, bfloat16 or float16, shape (K, I), or (N, I) with ``hashing``; elements of a row side by side.
        bits: 8, 4 or 2.
        signs: Signs of the rotation, float32, shape (64,).
        rows: :attr:`RoundingNoise.rows`, int32, shape (K,).
        columns: :attr:`RoundingNoise.columns`, int32, shape (I,).
        codes: Written to; uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        qparams: Written to; bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
        hashing: Signs and shifts as :func:`countsketch` takes them, N > K: the CountSketch of ``matrix`` is packed, row
            by row; sums of bfloat16 are rounded to it before. None packs ``matrix`` itself.
        index: Rows of ``matrix`` that are taken instead of all, int64, shape (N,), contiguous.

    Returns:
        Whether all qparams are finite.

    Raises:
        MemoryError: If a row of the sketch cannot be allocated.
    """
    noise = signs.data_ptr(), rows.data_ptr(), columns.data_ptr()
    found = None if hashing is None else (len(hashing[1]), hashing[1].data_ptr(), hashing[0].data_ptr())
    return pack_rows(matrix, bits, *noise, codes, qparams, found, index)


def pack_rows(
    matrix: Tensor,
    bits: int,
    signs: int,
    a: int,
    c: int,
    codes: Tensor,
    qparams: Tensor,
    hashing: tuple[int, int, int] | None = None,
    index: Tensor | None = None,
) -> bool:
    """Do what :func:`pack` does with all rows, with noise at the addresses of :func:`noise_words`.

    ``hashing`` has the number of shifts, and the addresses of shifts and signs, of :func:`signs_and_shifts`.

    Returns:
        As :func:`pack` does.

    Raises:
        MemoryError: As :func:`pack` does.
    """
    result = function("rmm_pack")(
        *matrix_arguments(matrix, index), codes.shape[0], *(hashing or (1, signs, signs)),
        bits, signs, a, c, codes.data_ptr(), qparams.data_ptr(), threads(matrix),
    )  # fmt: skip
    if result > 1:
        raise MemoryError(f"No memory for a row of {matrix.shape[1]} columns.")
    return result == 0


def unpack(codes: Tensor, qparams: Tensor, bits: int, rows: Tensor, columns: Tensor, matrix: Tensor) -> None:
    """Write the rows that codes and qparams represent; whole groups stay rotated.

    Args:
        codes: uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        qparams: bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
        bits: 8, 4 or 2.
        rows: :attr:`RoundingNoise.rows`, int32, shape (K,).
        columns: :attr:`RoundingNoise.columns`, int32, shape (I,).
        matrix: Written to; float32, bfloat16 or float16, shape (K, I), contiguous.
    """
    unpack_rows(codes, qparams, bits, 0, rows.data_ptr(), columns.data_ptr(), 0, matrix)


def unpack_rows(
    codes: Tensor, qparams: Tensor, bits: int, signs: int, a: int, c: int, begin: int, matrix: Tensor
) -> None:
    """Do what :func:`unpack` and :func:`unrotate` do with the rows from ``begin`` on, as many as ``matrix`` has.

    Noise is at the addresses of :func:`noise_words`, for all rows; with signs at 0, they stay rotated.
    """
    (rows, columns), count, values = matrix.shape, threads(matrix), matrix.data_ptr()
    first = codes.data_ptr() + begin * codes.shape[1]
    ranges = qparams.data_ptr() + begin * qparams.shape[1] * 2 * qparams.itemsize
    function("rmm_unpack")(
        first, ranges, rows, columns, bits, a + 4 * begin, c, values, TYPES[matrix.dtype], count
    )  # fmt: skip
    if signs:  # of float32
        function("rmm_unrotate")(values, rows, columns, signs, count)


def unrotate(matrix: Tensor, signs: Tensor) -> None:
    """Undo the rotation of whole groups of 64 columns, in place.

    Args:
        matrix: float32, shape (O, I), contiguous.
        signs: Signs of the rotation, float32, shape (64,).
    """
    rows, columns = matrix.shape
    function("rmm_unrotate")(pointer(matrix), rows, columns, pointer(signs), threads(matrix))


def countsketch(
    matrix: Tensor,
    seed: Tensor,
    rows: int,
    begin: int,
    end: int,
    index: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return some rows of SᵀM, as described in :mod:`rmm_linear.sketches.countsketch`.

    Args:
        matrix: M, float32, bfloat16 or float16, shape (N, D), N > K, elements of a row side by side.
        seed: int64 with one element.
        rows: K.
        begin: First row of SᵀM.
        end: The row after the last, at most K.
        index: Rows of ``matrix`` that are taken instead of all, int64, shape (N,), contiguous.
        dtype: Of the result; None is that of ``matrix``. Sums are made in float32.

    Returns:
        Shape (end − begin, D).

    Raises:
        MemoryError: If a row of the sketch cannot be allocated.
    """
    z = matrix.new_empty(end - begin, matrix.shape[1], dtype=dtype)
    result = function("rmm_countsketch")(
        *matrix_arguments(matrix, index), rows, int(seed), begin, end - begin, pointer(z), TYPES[z.dtype],
        threads(matrix),
    )  # fmt: skip
    if result:
        raise MemoryError(f"No memory for a row of {matrix.shape[1]} columns.")
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
