"""Storage of a matrix in 8, 4 or 2 bits per element, unbiased.

Every row is cut into groups of 64 columns (the last one may be shorter). A group stores an offset and a scale in
bfloat16 and one code in {0 … 2^bits − 1} per element. The offset is rounded down and the scale up, so every element
lies inside its group's range. Rounding is by subtractive dither: with t = (z − offset) / scale and a random number u,
uniform on [0, 1),

    code q = ⌊t + u⌋        value = offset + scale · (q + ½ − u)

The u of packing follows from the seed, so unpacking has it too. The error of an element, scale · (½ − frac(t + u)), is
uniform on ± scale / 2 whatever z is: its mean is 0, so E[unpack(pack(z))] = z, and its variance scale² / 12 is known
from what is stored, without z. (Stochastic rounding, offset + scale · q with the same codes, has scale² · f · (1 − f),
f the fraction of a step that t lies above a code: scale² / 6 on average. It is the smaller one only for elements close
to a code.) A group whose elements are equal and exact in bfloat16, as those of a row of zeros, has scale 0: no error.

Before rounding, a group of 64 is rotated by random signs and the orthonormal Hadamard transform: one large column no
longer enlarges the scale of the 63 others. The rotation is orthonormal, so the mean stays z and the squared error is
that of the rotated elements. It costs one product with a 64 × 64 matrix, and can be undone after a product from the
left, on YᵀZ instead of Z: see ``rotated`` of :func:`unpack` and :func:`unrotate`.

The u of row b and column j is a_b xor c_j, a number of 23 bits read as a fraction, with a_b and c_j uniform and
independent. Any two of these numbers are independent, and the variance of dW, a second moment, depends on no more: it
is the same as with one random number per element, with rows + columns random numbers instead of rows · columns.

Bytes: rows · (⌈columns · bits / 8⌉ + 4 · ⌈columns / 64⌉). Time: one pass.

Sources: rounding at random per group for stored activations: Chen et al. 2021 (ActNN), arXiv 2104.14129; subtractive
dither: Schuchman 1964, "Dither signals and their effect on quantization noise".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing.rounding import (
    GROUP,
    WIDTHS,
    RoundingNoise,
    pack_rows,
    rotate_groups,
    unpack_rows,
)

_CHUNK = 1 << 19  # elements that a CPU handles at a time: they fit into its cache, and outweigh the overhead


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes that :func:`pack` makes of a matrix.

    Example:
        >>> packed_bytes(10, 128, 4)
        720
    """
    return rows * (-(-columns * bits // 8) + 4 * -(-columns // GROUP))


@without_autocast
def pack(matrix: Tensor, bits: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    A NaN makes its whole group NaN.

    matrix: Floating point, shape (rows, columns). seed: int64 with one element, on the device of ``matrix``. Returns
    codes, uint8, shape (rows, ⌈columns · bits / 8⌉): for each group, byte i holds the elements i, i + h, …, lower bits
    first, where h is the group's bytes. And qparams, bfloat16, shape (rows, ⌈columns / 64⌉, 2): offset and scale of
    every group.
    """
    return pack_parts(lambda begin, end: matrix[begin:end], matrix.shape, bits, seed)


def pack_parts(
    part: Callable[[int, int], Tensor], shape: tuple[int, int] | torch.Size, bits: int, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Pack a matrix as :func:`pack` does, a few rows at a time, so that it never exists as a whole.

    part: A function of ``begin`` and ``end`` that returns the rows begin … end − 1.
    """
    check_bits(bits)
    rows, columns = shape
    codes, qparams = empty_packed(rows, columns, bits, seed)
    noise = RoundingNoise.of(seed, rows, columns)
    for place in row_parts(rows, columns, seed.device):
        pack_rows(part(place.start, place.stop), bits, noise, noise.rows[place], codes[place], qparams[place])
    mark_infinite(qparams)
    return codes, qparams


def empty_packed(rows: int, columns: int, bits: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for a packed matrix."""
    codes = like.new_empty(rows, (columns * bits + 7) // 8, dtype=torch.uint8)
    return codes, like.new_empty(rows, (columns + GROUP - 1) // GROUP, 2, dtype=torch.bfloat16)


@without_autocast
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
    """Return the matrix that codes and qparams represent.

    codes: uint8, shape (rows, ⌈columns · bits / 8⌉). qparams: bfloat16, shape (rows, ⌈columns / 64⌉, 2). rotated: Leave
    the groups rotated; :func:`unrotate` undoes it later.

    Example:
        >>> z, seed = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor(0)
        >>> error = unpack(*pack(z, 2, seed), seed, 2, 4, z.dtype) - z
        >>> bool(error.abs().max() < 1.01)  # a step of the group, 3 / 3, and the rounding of bfloat16
        True
    """
    matrix = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    parts = unpack_parts(codes, qparams, seed, bits, columns, dtype)
    for rows in row_parts(codes.shape[0], columns, codes.device):
        matrix[rows] = parts(rows.start, rows.stop)
    return matrix if rotated else unrotate(matrix, seed)


def unpack_parts(
    codes: Tensor, qparams: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that unpacks these rows, whole groups still rotated."""
    noise = RoundingNoise.of(seed, codes.shape[0], columns)

    def part(begin: int, end: int) -> Tensor:
        values = torch.empty(end - begin, columns, dtype=torch.float32, device=codes.device)
        unpack_rows(codes[begin:end], qparams[begin:end], bits, noise, noise.rows[begin:end], values)
        return values.to(dtype)

    return part


def unrotate(matrix: Tensor, seed: Tensor) -> Tensor:
    """Undo the rotation of whole groups in a result of ``unpack(..., rotated=True)``, or in a product with it."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return rotate_groups(wide, RoundingNoise.of(seed, 0, GROUP).rotation.T).to(matrix.dtype)


def rounding_variance(qparams: Tensor, columns: int) -> Tensor:
    """Return the variance that packing added to every row, exactly: Σ over its elements of scale² / 12.

    qparams: Of :func:`pack`. Returns E‖unpack(pack(z)) − z‖² per row, float64, shape (rows,).

    Example:
        >>> z, seed = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor(0)
        >>> round(float(rounding_variance(pack(z, 2, seed)[1], 4)), 2)  # four elements, steps of 1
        0.34
    """
    sizes = torch.full((qparams.shape[1],), GROUP, dtype=torch.float64, device=qparams.device)
    sizes[-1:] = columns - GROUP * (qparams.shape[1] - 1)
    return qparams[..., 1].double().square() @ sizes / 12


def check_bits(bits: int | None) -> int:
    """Refuse a width that cannot be packed."""
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}. Use None to store the dtype itself.")
    return bits


def mark_infinite(qparams: Tensor) -> None:
    """Make every group NaN, in place, whose qparams are not finite: a NaN, an infinity, or a scale beyond float32."""
    qparams.masked_fill_(~qparams.isfinite().all(-1, keepdim=True), torch.nan)


def row_parts(rows: int, columns: int, device: torch.device, chunk: int = _CHUNK) -> Iterator[slice]:
    """Cut a matrix into parts of rows that fit into a CPU's cache; on other devices, all rows are one part."""
    step = max(1, chunk // max(1, columns)) if device.type == "cpu" else max(1, rows)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
