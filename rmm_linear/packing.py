"""Storage of a matrix in 8, 4 or 2 bits per element, unbiased.

Every row is cut into groups of 64 columns (the last one may be shorter). A group keeps an offset and a scale in
bfloat16 and one code q in {0 … 2^bits − 1} per element, which stands for offset + q · scale. The offset is rounded down
and the scale up, so every element lies inside its group's range, and stochastic rounding makes E[unpack(pack(z))] = z.
The variance of an element is scale² · f · (1 − f), f the fraction of a step that it lies above a code.

Before rounding, a group of 64 is turned by random signs and the orthonormal Hadamard transform: one large column no
longer stretches the range of the 63 others. The turn is orthonormal, so the mean stays z and the squared error is that
of the turned elements. It costs one product with a 64 × 64 matrix, and can be undone after a product from the left, on
YᵀZ instead of Z: see ``turned`` of :func:`unpack` and :func:`turn_back`.

An element in row b and column j is rounded up if frac(a_b + c_j) lies in the last f of [0, 1), with a_b and c_j uniform
and independent. Any two of these numbers are independent, and the variance of dW, a second moment, asks for no more: it
is that of a fresh number per element, for rows + columns random numbers instead of rows · columns.

Bytes: rows · (⌈columns · bits / 8⌉ + 4 · ⌈columns / 64⌉). Time: one pass.

Source of stochastic rounding per group for stored activations: Chen et al. 2021 (ActNN), arXiv 2104.14129.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.sketches.philox import philox, unpack_signs

GROUP = 64
WIDTHS = (8, 4, 2)
_STREAM = 3
_CHUNK = 1 << 18  # elements that a CPU handles at a time: small enough for its cache, large enough for its overhead


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes that :func:`pack` makes of a matrix.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        bits: 8, 4 or 2.

    Returns:
        Bytes of codes, scales and offsets.

    Example:
        >>> packed_bytes(10, 128, 4)
        720
    """
    return rows * (-(-columns * bits // 8) + 4 * -(-columns // GROUP))


def pack(matrix: Tensor, bits: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    A NaN makes its whole group NaN.

    Args:
        matrix: Floating point, shape (rows, columns).
        bits: 8, 4 or 2.
        seed: int64 with one element, on the device of ``matrix``. It decides the turn of the groups and the rounding.

    Returns:
        Codes, uint8, shape (rows, ⌈columns · bits / 8⌉): for each group, byte i holds the elements i, i + h, …, lower
        bits first, where h is the group's bytes. And ranges, bfloat16, shape (rows, ⌈columns / 64⌉, 2): offset and
        scale of every group.

    Raises:
        ValueError: If ``bits`` is not 8, 4 or 2, or an element is infinite. On an accelerator the values are not looked
            at, and an infinity makes its group NaN.
    """
    _check_bits(bits)
    rows, columns = matrix.shape
    codes = matrix.new_empty(rows, -(-columns * bits // 8), dtype=torch.uint8)
    ranges = matrix.new_empty(rows, -(-columns // GROUP), 2, dtype=torch.bfloat16)
    draws = _Draws.of(seed, rows, columns)
    for part in _parts(matrix):
        turned = _turn(matrix[part].to(torch.float32), draws.turn)
        for span, places, size in _spans(columns):
            groups = turned[:, span].view(turned.shape[0], -1, size)
            ranges[part, places] = found = _ranges(groups, bits)
            chance = (draws.rows[part, None, None] + draws.columns[span].view(-1, size)).frac_()
            steps = _steps(groups, found).add_(chance).clamp_(0, 2**bits - 1).floor_()
            # Whatever the cast makes of NaN is multiplied by a scale of NaN.
            codes[part, span.start * bits // 8 : -(-span.stop * bits // 8)] = _join(steps, bits).flatten(1)
    _refuse_infinities(matrix, ranges)
    return codes, ranges


def unpack(
    codes: Tensor,
    ranges: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    turned: bool = False,
) -> Tensor:
    """Return the matrix that packed storage stands for.

    Args:
        codes: uint8, shape (rows, ⌈columns · bits / 8⌉).
        ranges: bfloat16, shape (rows, ⌈columns / 64⌉, 2).
        seed: The seed they were packed with.
        bits: 8, 4 or 2.
        columns: Columns of the matrix.
        dtype: dtype of the result.
        turned: Leave the groups turned; :func:`turn_back` undoes it later.

    Returns:
        Shape (rows, columns).

    Example:
        >>> z, seed = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor(0)
        >>> unpack(*pack(z, 2, seed), seed, 2, 4, z.dtype)
        tensor([[0., 1., 2., 3.]])
    """
    matrix = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    for part in _parts(matrix):
        values = torch.empty(matrix[part].shape, device=codes.device)
        for span, places, size in _spans(columns):
            stored = codes[part, span.start * bits // 8 : -(-span.stop * bits // 8)]
            offset, scale = ranges[part, places].to(torch.float32).unsqueeze(-1).unbind(2)
            values[:, span] = _split(stored, bits, size).to(torch.float32).mul_(scale).add_(offset).flatten(1)
        matrix[part] = values
    return matrix if turned else turn_back(matrix, seed)


def turn_back(matrix: Tensor, seed: Tensor) -> Tensor:
    """Undo the turn of a matrix's whole groups of 64 columns.

    Args:
        matrix: A result of ``unpack(..., turned=True)``, or a product of any matrix with it, shape (rows, columns).
        seed: The seed it was packed with.

    Returns:
        Shape (rows, columns), dtype of ``matrix``.
    """
    turn = _Draws.of(seed, 0, GROUP).turn.T
    return _turn(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), turn).to(matrix.dtype)


def rounding_variance(matrix: Tensor, bits: int, seed: Tensor) -> Tensor:
    """Return the variance that packing adds to every row, exactly.

    Args:
        matrix: Floating point, shape (rows, columns).
        bits: 8, 4 or 2.
        seed: The seed that it is packed with, int64 with one element.

    Returns:
        E‖unpack(pack(z)) − z‖² per row, float64, shape (rows,).

    Raises:
        ValueError: If ``bits`` is not 8, 4 or 2, or an element is infinite.
    """
    _check_bits(bits)
    rows, columns = matrix.shape
    result = matrix.new_zeros(rows, dtype=torch.float64)
    turn = _Draws.of(seed, 0, GROUP).turn
    for part in _parts(matrix):
        turned = _turn(matrix[part].to(torch.float32), turn)
        for span, _, size in _spans(columns):
            groups = turned[:, span].view(turned.shape[0], -1, size)
            ranges = _ranges(groups, bits)
            _refuse_infinities(matrix, ranges)
            fraction = _steps(groups, ranges).frac_().double()
            result[part] += (ranges[..., 1:].double().square() * fraction * (1 - fraction)).sum((1, 2))
    return result


@dataclass(frozen=True)
class _Draws:
    """What the seed decides: the turn (64, 64), and a (rows,) and c (columns,), multiples of 2**-23."""

    turn: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, seed: Tensor, rows: int, columns: int) -> _Draws:
        a, c, words, _ = philox(seed, torch.arange(max(rows, columns, 2), device=seed.device), _STREAM)
        signs = unpack_signs(words[:2]).view(GROUP, 1).to(torch.float32)
        # 23 bits, so that the sum of two of them is exact in float32.
        a, c = ((word >> 9).to(torch.float32) * 2.0**-23 for word in (a[:rows], c[:columns]))
        return cls(signs * _hadamard(seed.device), a, c)


def _check_bits(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}. Use None to store the dtype itself.")


def _refuse_infinities(matrix: Tensor, ranges: Tensor) -> None:
    if matrix.device.type == "cpu" and not bool(ranges.isfinite().all()) and bool(torch.isinf(matrix).any()):
        raise ValueError("pack needs finite elements or NaN, got an infinity. Use bits=None to store infinities.")


def _parts(matrix: Tensor) -> Iterator[slice]:
    """Slices of rows that are handled at a time."""
    rows, columns = matrix.shape
    step = max(1, _CHUNK // max(1, columns)) if matrix.device.type == "cpu" else max(1, rows)
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _spans(columns: int) -> Iterator[tuple[slice, slice, int]]:
    """The whole groups, then the shorter last one: columns, places among the groups, columns per group."""
    whole = columns // GROUP
    if whole:
        yield slice(0, whole * GROUP), slice(0, whole), GROUP
    if columns > whole * GROUP:
        yield slice(whole * GROUP, columns), slice(whole, whole + 1), columns - whole * GROUP


def _hadamard(device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix of a group: its sign is the parity of the bits that i and j share."""
    index = torch.arange(GROUP, device=device)
    shared = index.unsqueeze(1) & index
    for shift in (4, 2, 1):
        shared = shared ^ (shared >> shift)
    return (1 - 2 * (shared & 1)).to(torch.float32) * GROUP**-0.5


def _turn(values: Tensor, turn: Tensor) -> Tensor:
    """Multiply every whole group of 64 columns by a (64, 64) matrix."""
    rows, columns = values.shape
    whole = columns // GROUP * GROUP
    if not whole:
        return values
    turned = (values[:, :whole].reshape(-1, GROUP) @ turn.to(values.dtype)).view(rows, whole)
    return turned if whole == columns else torch.cat((turned, values[:, whole:]), dim=1)


def _ranges(groups: Tensor, bits: int) -> Tensor:
    """Offset and scale, bfloat16, shape (rows, groups, 2), of groups of shape (rows, groups, size)."""
    low, high = groups.amin(-1), groups.amax(-1)
    offset = _round_down(low)
    scale = -_round_down(-(high - offset) / (2**bits - 1))
    return torch.stack((offset, scale), dim=-1).to(torch.bfloat16)


def _steps(groups: Tensor, ranges: Tensor) -> Tensor:
    offset, scale = ranges.to(torch.float32).unsqueeze(-1).unbind(2)
    return (groups - offset).mul_(torch.where(scale == 0, 0, 1 / scale))


def _round_down(values: Tensor) -> Tensor:
    """The largest bfloat16 number that is not above a float32 number, as float32."""
    truncated = (values.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    below = (truncated.view(torch.int32) + 0x10000).view(torch.float32)  # away from 0, for negative numbers
    return torch.where(truncated > values, below, torch.where(values.isnan(), values, truncated))


def _join(steps: Tensor, bits: int) -> Tensor:
    """Put 8 / bits codes into every byte: float32 (rows, groups, size) to uint8 (rows, groups, ⌈size · bits / 8⌉)."""
    per_byte, size = 8 // bits, steps.shape[-1]
    steps = torch.nn.functional.pad(steps, (0, -size % per_byte)) if size % per_byte else steps
    joined, *others = steps.chunk(per_byte, dim=-1)
    for place, other in enumerate(others, start=1):
        joined = torch.add(joined, other, alpha=2 ** (place * bits))
    return joined.to(torch.uint8)


def _split(stored: Tensor, bits: int, size: int) -> Tensor:
    """Undo :func:`_join`: (rows, groups · bytes) to (rows, groups, size)."""
    stored = stored.view(stored.shape[0], -1, -(-size * bits // 8))
    places = [(stored >> (place * bits)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.cat(places, dim=-1)[..., :size]
