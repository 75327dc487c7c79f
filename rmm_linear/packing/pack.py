"""Storage of a matrix in 8, 4, 3 or 2 bits per element, unbiased.

Every row is cut into groups of 64 columns (the last one may be shorter). A group of 64 is rotated by random signs and
the orthonormal Hadamard transform, so that one large column does not enlarge the steps of the 63 others; rotated groups
are symmetric about 0. A group stores one scale, a byte, and one code in {0 … 2^bits − 1} per element. The scale is the
least of the numbers that a byte stands for (:func:`~rmm_linear.packing.rounding.scales_of`) by which every element lies
within the codes. Rounding is by subtractive dither: with t = z / scale + m, m = (2^bits − 1) / 2, and a random number
u, uniform on [0, 1),

    code q = ⌊t + u⌋        value = scale · (q − m + ½ − u)

The u of packing follows from the seed, so unpacking has it too. The error of an element, scale · (½ − frac(t + u)), is
uniform on ± scale / 2 whatever z is: its mean is 0, so E[unpack(pack(z))] = z, and its variance scale² / 12 is known
from what is stored, without z. (Stochastic rounding, scale · (q − m) with the same codes, has scale² · f · (1 − f), f
the fraction of a step that t lies above a code: scale² / 6 on average. It is the smaller one only for elements close to
a code.) A group of zeros has scale 0: no error. Scales reach from 2⁻⁵⁰ to 2³²; a group that needs a larger one, as with
an infinity, is NaN.

The rotation is orthonormal, so the mean stays z and the squared error is that of the rotated elements. It costs one
product with a 64 × 64 matrix, and can be undone after a product from the left, on YᵀZ instead of Z: see ``rotated`` of
:func:`unpack` and :func:`unrotate`.

The u of row b and column j is a_b xor c_j, a number of 23 bits read as a fraction, with a_b and c_j uniform and
independent. Any two of these numbers are independent, and the variance of dW, a second moment, depends on no more: it
is the same as with one random number per element, with rows + columns random numbers instead of rows · columns. Where
an estimate has products of two elements of a row, as that of a norm, rows that are alike would have products of errors
that are alike, so a hash of a_b xor c_j takes its place (``mixed``).

Of normal elements with the variance 1, the error has the variance 0.28 at 2 bits, 0.051 at 3, 0.011 at 4. No unbiased
code of R bits has less than 1 / (4^R − 1), and the scale takes 1/8 bit: 4.9, 3.9 and 3.4 times the least.

Bytes: rows · (⌈columns · bits / 8⌉ + ⌈columns / 64⌉), 3 bits as a plane of 2 and one of 1. Time: one pass.

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
    code_bytes,
    pack_rows,
    rotate_groups,
    scales_of,
    unpack_rows,
)
from rmm_linear.packing.stored import Part

_CHUNK = 1 << 19  # elements that a CPU handles at a time: they fit into its cache, and outweigh the overhead


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes that :func:`pack` makes of a matrix."""
    return rows * (code_bytes(columns, bits) + (columns + GROUP - 1) // GROUP)


def packed_parts(rows: int, columns: int, bits: int) -> list[Part]:
    """Return the shapes and dtypes of codes and scales."""
    scales: Part = (rows, (columns + GROUP - 1) // GROUP), torch.uint8
    return [((rows, code_bytes(columns, check_bits(bits))), torch.uint8), scales]


@without_autocast
def pack(matrix: Tensor, bits: int, seed: Tensor, *, mixed: bool = False) -> tuple[Tensor, Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    A NaN makes its whole group NaN.

    matrix: Floating point, shape (rows, columns). seed: int64 with one element, on the device of ``matrix``. Returns
    codes, uint8, shape (rows, ⌈columns · bits / 8⌉): for each group, byte i of a plane holds the elements i, i + h, …,
    lower bits first, where h is the plane's bytes. And the scales of all groups, uint8, shape (rows, ⌈columns / 64⌉).
    mixed: See :class:`~rmm_linear.packing.rounding.RoundingNoise`.
    """
    return pack_parts(lambda begin, end: matrix[begin:end], matrix.shape, bits, seed, mixed=mixed)


def pack_parts(
    part: Callable[[int, int], Tensor],
    shape: tuple[int, int] | torch.Size,
    bits: int,
    seed: Tensor,
    *,
    mixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pack a matrix as :func:`pack` does, a few rows at a time, so that it never exists as a whole.

    part: A function of ``begin`` and ``end`` that returns the rows begin … end − 1.
    """
    check_bits(bits)
    rows, columns = shape
    codes, scales = empty_packed(rows, columns, bits, seed)
    noise = RoundingNoise.of(seed, rows, columns, mixed=mixed)
    for place in row_parts(rows, columns, seed.device):
        pack_rows(part(place.start, place.stop), bits, noise, noise.rows[place], codes[place], scales[place])
    return codes, scales


def empty_packed(rows: int, columns: int, bits: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for a packed matrix."""
    codes, scales = (like.new_empty(shape, dtype=dtype) for shape, dtype in packed_parts(rows, columns, bits))
    return codes, scales


@without_autocast
def unpack(
    codes: Tensor,
    scales: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
    mixed: bool = False,
) -> Tensor:
    """Return the matrix that codes and scales represent.

    codes, scales: uint8, as :func:`pack` returns them. rotated: Leave the groups rotated; :func:`unrotate` undoes it
    later.
    """
    matrix = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    parts = unpack_parts(codes, scales, seed, bits, columns, dtype, mixed=mixed)
    for rows in row_parts(codes.shape[0], columns, codes.device):
        matrix[rows] = parts(rows.start, rows.stop)
    return matrix if rotated else unrotate(matrix, seed)


def unpack_parts(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype, *, mixed: bool = False
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that unpacks these rows, whole groups still rotated."""
    noise = RoundingNoise.of(seed, codes.shape[0], columns, mixed=mixed)

    def part(begin: int, end: int) -> Tensor:
        values = torch.empty(end - begin, columns, dtype=torch.float32, device=codes.device)
        unpack_rows(codes[begin:end], scales[begin:end], bits, noise, noise.rows[begin:end], values)
        return values.to(dtype)

    return part


def unrotate(matrix: Tensor, seed: Tensor) -> Tensor:
    """Undo the rotation of whole groups in a result of ``unpack(..., rotated=True)``, or in a product with it."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return rotate_groups(wide, RoundingNoise.of(seed, 0, GROUP).rotation.T).to(matrix.dtype)


def rounding_variance(scales: Tensor, columns: int) -> Tensor:
    """Return the variance that packing added to every row, exactly: Σ over its elements of scale² / 12.

    scales: Of :func:`pack`. Returns E‖unpack(pack(z)) − z‖² per row, float64, shape (rows,).
    """
    sizes = torch.full((scales.shape[1],), GROUP, dtype=torch.float64, device=scales.device)
    sizes[-1:] = columns - GROUP * (scales.shape[1] - 1)
    return scales_of(scales).double().square() @ sizes / 12


def sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of sums; None for that of bfloat16, which are rounded once and may be as large as in float32.

    On a CPU, sums in another dtype are those of a copy.
    """
    return None if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def weighted_variance(scales: Tensor, y: Tensor, index: Tensor | None = None) -> Tensor:
    """Return the variance that packing added to a product with y, element by element: Σ y² · scale² / 12.

    scales: Of :func:`pack`. y: Floating point, shape (N, columns). index: The rows of y that were packed; None for all.
    Returns float64 without dimensions.
    """
    how, whole = {"dtype": sum_dtype(y.dtype)}, y.shape[1] // GROUP * GROUP
    norms = torch.linalg.vector_norm(y[:, :whole].unflatten(1, (whole // GROUP, GROUP)), dim=2, **how)
    if whole < y.shape[1]:
        norms = torch.cat([norms, torch.linalg.vector_norm(y[:, whole:], dim=1, keepdim=True, **how)], 1)
    norms = norms if index is None else norms.index_select(0, index)
    return (norms.double() * scales_of(scales)).square().sum() / 12


def element_variance(scales: Tensor, columns: int) -> Tensor:
    """Return v = scale² / 12, the variance of every element that packing added, float64, shape (rows, columns)."""
    return (scales_of(scales).double().square() / 12).repeat_interleave(GROUP, dim=1)[:, :columns]


def check_bits(bits: int | None) -> int:
    """Refuse a width that cannot be packed."""
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4, 3 or 2, got {bits!r}. Use None to store the dtype itself.")
    return bits


def row_parts(rows: int, columns: int, device: torch.device, chunk: int = _CHUNK) -> Iterator[slice]:
    """Cut a matrix into parts of rows that fit into a CPU's cache; on other devices, all rows are one part."""
    step = max(1, chunk // max(1, columns)) if device.type == "cpu" else max(1, rows)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
