"""Codes of all widths for the rows that linear layers save: symmetric ones of 8, 4 and 3 bits, normal ones below.

:mod:`rmm_linear.packing.pack` and :mod:`rmm_linear.packing.normal` describe them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing import normal
from rmm_linear.packing.pack import pack_parts, packed_parts, row_parts, unpack, unpack_parts
from rmm_linear.packing.pack import unrotate as unrotate_packed
from rmm_linear.packing.rounding import GROUP, RoundingNoise, rotate_groups
from rmm_linear.packing.stored import Part

# E‖decode(encode(z)) − z‖² by ‖z‖², of normal elements.
RELATIVE_VARIANCE: dict[float, float] = {8: 3.9e-5, 4: 0.0112, 3: 0.0514, 2: 0.132, 1.6: 0.233, 1: 0.569}
CODES = tuple(RELATIVE_VARIANCE)


def is_normal(bits: float | None) -> bool:
    return bits in normal.LEVELS


def check_code(bits: float | None) -> float:
    if bits not in CODES:
        raise ValueError(f"bits must be 8, 4, 3, 2, 1.6 or 1, got {bits!r}. Use None to store the dtype itself.")
    return bits


def encoded_parts(rows: int, columns: int, bits: float) -> list[Part]:
    """Return the shapes and dtypes of codes and scales."""
    if not is_normal(bits):
        return packed_parts(rows, columns, int(bits))
    groups = normal.groups_of(columns)
    return [((rows, groups * normal.GROUP_BYTES[bits]), torch.uint8), ((rows, groups), torch.uint8)]


def encoded_bytes(rows: int, columns: int, bits: float) -> int:
    """Return the bytes that :func:`encode` makes of a matrix.

    Example:
        >>> [encoded_bytes(10, 128, bits) for bits in (3, 1.6)]
        [500, 270]
    """
    return sum(shape[0] * shape[1] for shape, _ in encoded_parts(rows, columns, bits))


def empty_encoded(rows: int, columns: int, bits: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for codes and scales."""
    codes, scales = (like.new_empty(shape, dtype=dtype) for shape, dtype in encoded_parts(rows, columns, bits))
    return codes, scales


@without_autocast
def encode(matrix: Tensor, bits: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Store a matrix, shape (rows, columns), in ``bits`` per element, at random and without bias.

    A NaN makes its whole group NaN. seed: int64 with one element, on the device of ``matrix``. Returns codes and
    scales, uint8, of the shapes of :func:`encoded_parts`.
    """
    return encode_parts(lambda begin, end: matrix[begin:end], matrix.shape, bits, seed)


def encode_parts(
    part: Callable[[int, int], Tensor], shape: tuple[int, int] | torch.Size, bits: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode a matrix a few rows at a time, so that it never exists as a whole.

    part: A function of ``begin`` and ``end`` that returns the rows begin … end − 1.
    """
    if not is_normal(check_code(bits)):
        return pack_parts(part, shape, int(bits), seed)
    rows, columns = shape
    codes, scales = empty_encoded(rows, columns, bits, seed)
    noise = normal.NormalNoise.of(seed, rows, scales.shape[1])
    for place in row_parts(rows, columns, seed.device):
        normal.code_rows(part(place.start, place.stop), bits, noise, noise.rows[place], codes[place], scales[place])
    return codes, scales


@without_autocast
def decode(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: float, columns: int, dtype: torch.dtype, *, rotated: bool = False
) -> Tensor:
    """Return the matrix that codes and scales represent, shape (rows, columns).

    rotated: Leave the groups rotated, of normal codes with the columns that fill up the last one;
    :func:`unrotate` undoes it later.
    """
    if not is_normal(bits):
        return unpack(codes, scales, seed, int(bits), columns, dtype, rotated=rotated)
    parts = decode_parts(codes, scales, seed, bits, columns, dtype)
    matrix = codes.new_empty(codes.shape[0], scales.shape[1] * normal.GROUP, dtype=dtype)
    for rows in row_parts(codes.shape[0], columns, codes.device):
        matrix[rows] = parts(rows.start, rows.stop)
    return matrix if rotated else unrotate(matrix, seed, bits, columns)


def decode_parts(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: float, columns: int, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that decodes these rows, as ``rotated`` of :func:`decode`."""
    if not is_normal(bits):
        return unpack_parts(codes, scales, seed, int(bits), columns, dtype)
    return lambda begin, end: normal.decode_rows(codes[begin:end], scales[begin:end], bits).to(dtype)


def rotated_columns(columns: int, bits: float) -> int:
    """Return the columns of a rotated result of :func:`decode`."""
    return normal.groups_of(columns) * normal.GROUP if is_normal(bits) else columns


def rotate(matrix: Tensor, seed: Tensor, bits: float) -> Tensor:
    """Rotate the rows of a matrix, float32, as :func:`encode` does, with the columns that fill up the last group."""
    if is_normal(bits):
        return normal.rotate(normal.padded(matrix), normal.NormalNoise.of(seed, 0, 0).rotation)
    return rotate_groups(matrix, RoundingNoise.of(seed, 0, GROUP).rotation)


def unrotate(matrix: Tensor, seed: Tensor, bits: float, columns: int) -> Tensor:
    """Undo the rotation in a result of ``decode(..., rotated=True)``, or in a product with it from the left."""
    if not is_normal(bits):
        return unrotate_packed(matrix, seed)
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    rotation = normal.NormalNoise.of(seed, 0, 0).rotation
    return normal.rotate(wide, rotation.T)[:, :columns].contiguous().to(matrix.dtype)
