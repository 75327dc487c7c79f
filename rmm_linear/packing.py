"""Storage of a matrix in 8, 4 or 2 bits per element, unbiased.

Every row is cut into groups of 64 columns (the last one may be shorter). A group keeps an offset and a scale in
bfloat16 and one code q in {0 … 2^bits − 1} per element, which stands for offset + q · scale. The offset is rounded down
and the scale up, so every element lies inside its group's range, and stochastic rounding makes E[unpack(pack(z))] = z.
The variance of an element is scale² · f · (1 − f), f the fraction of a step that it lies above a code.

Before rounding, a group of 64 is turned by random signs and the orthonormal Hadamard transform: one large column no
longer stretches the range of the 63 others. The turn is orthonormal, so the mean stays z and the squared error is that
of the turned elements. It costs one product with a 64 × 64 matrix, and can be undone after a product from the left, on
YᵀZ instead of Z: see ``turned`` of :func:`unpack` and :func:`turn_back`.

An element in row b and column j is rounded up if a_b xor c_j, a number of 23 bits read as a fraction, lies in the last
f of [0, 1), with a_b and c_j uniform and independent. Any two of these numbers are independent, and the variance of dW,
a second moment, asks for no more: it is that of a fresh number per element, for rows + columns random numbers instead
of rows · columns.

Bytes: rows · (⌈columns · bits / 8⌉ + 4 · ⌈columns / 64⌉). Time: one pass.

Source of stochastic rounding per group for stored activations: Chen et al. 2021 (ActNN), arXiv 2104.14129.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear import native
from rmm_linear.sketches.philox import philox, unpack_signs

GROUP = 64
WIDTHS = (8, 4, 2)
_STREAM = 3
_EXPONENT_OF_ONE = 0x3F800000
_MARGIN = 2.0**-18  # of a scale, so that no step and chance, rounded, add up to one code too many
_ONES = {bits: sum(2**place for place in range(0, 8, bits)) for bits in WIDTHS}  # 1 in every code of a byte
_CHUNK = 1 << 19  # elements that a CPU handles at a time: small enough for its cache, large enough for its overhead
_COMPILED_CHUNK = 1 << 21  # small enough for memory that the allocator has at hand


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
    return pack_parts(lambda begin, end: matrix[begin:end], matrix.shape, bits, seed)


def pack_parts(
    part: Callable[[int, int], Tensor], shape: tuple[int, int] | torch.Size, bits: int, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what :func:`pack` does for a matrix that is made in parts, so that it never exists as a whole.

    Args:
        part: Makes the rows from one number up to another.
        shape: Rows and columns of the matrix.
        bits: 8, 4 or 2.
        seed: See :func:`pack`; its device is that of the matrix.

    Returns:
        Codes and ranges.

    Raises:
        ValueError: As :func:`pack`.
    """
    _check_bits(bits)
    rows, columns = shape
    codes = torch.empty(rows, -(-columns * bits // 8), dtype=torch.uint8, device=seed.device)
    ranges = torch.empty(rows, -(-columns // GROUP), 2, dtype=torch.bfloat16, device=seed.device)
    draws = _Draws.of(seed, rows, columns)
    for place in row_parts(rows, columns, seed):
        values, found = part(place.start, place.stop), ranges[place]
        if native.applies_to(values, codes):
            whole = values.to(torch.float32)
            whole = whole if whole.stride(1) == 1 else whole.contiguous()
            native.pack(whole, bits, draws.signs, draws.rows[place], draws.columns, codes[place], found)
        else:
            _pack_rows(values, bits, draws, draws.rows[place], codes[place], found)
        _refuse_infinities(values, found)
    return codes, ranges


def _pack_rows(values: Tensor, bits: int, draws: _Draws, a: Tensor, codes: Tensor, ranges: Tensor) -> None:
    for span, places, groups in _turned_groups(values, draws.turn):
        ranges[:, places] = found = _ranges(groups, bits)
        chance = (a[:, None, None] ^ draws.columns[span].view(groups.shape[1:])).view(torch.float32)
        # Whatever the cast makes of NaN is multiplied by a scale of NaN.
        above = _steps(groups, found).add_(chance).to(torch.int32)
        codes[:, _bytes(span, bits)] = _join(above, bits).flatten(1)
    codes -= _ONES[bits]  # chances lie in [1, 2), so every code was one too high


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
    for part in row_parts(*matrix.shape, codes):
        values = matrix[part] if dtype == torch.float32 else torch.empty(matrix[part].shape, device=codes.device)
        if native.applies_to(codes, ranges):
            native.unpack(codes[part], ranges[part], bits, values)
        else:
            _unpack_rows(codes[part], ranges[part], bits, values)
        if dtype != torch.float32:
            matrix[part] = values
    return matrix if turned else turn_back(matrix, seed)


def _unpack_rows(codes: Tensor, ranges: Tensor, bits: int, values: Tensor) -> None:
    for span, places, size in _spans(values.shape[1]):
        offset, scale = ranges[:, places].to(torch.float32).unsqueeze(-1).unbind(2)
        groups = values[:, span].unflatten(1, (-1, size))
        _split(codes[:, _bytes(span, bits)], bits, groups)
        groups.mul_(scale).add_(offset)


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
    for part in row_parts(rows, columns, matrix):
        for _, _, groups in _turned_groups(matrix[part], turn):
            ranges = _ranges(groups, bits)
            _refuse_infinities(matrix, ranges)
            fraction = _steps(groups, ranges).frac_().double()
            result[part] += (ranges[..., 1:].double().square() * fraction * (1 - fraction)).sum((1, 2))
    return result


@dataclass(frozen=True)
class _Draws:
    """What the seed decides: the signs of the turn (64,), and a (rows,) and c (columns,), int32.

    Bit for bit, a xor c is a float32 number in [1, 2).
    """

    signs: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def turn(self) -> Tensor:
        """The signs, then the Hadamard transform."""
        return self.signs.unsqueeze(1) * _hadamard(self.signs.device)

    @classmethod
    def of(cls, seed: Tensor, rows: int, columns: int) -> _Draws:
        a, c, words, _ = philox(seed, torch.arange(max(rows, columns, 2), device=seed.device), _STREAM)
        signs = unpack_signs(words[:2]).view(GROUP).to(torch.float32)
        a, c = ((word >> 9).to(torch.int32) for word in (a[:rows], c[:columns]))
        return cls(signs, a | _EXPONENT_OF_ONE, c)


def _check_bits(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}. Use None to store the dtype itself.")


def _refuse_infinities(matrix: Tensor, ranges: Tensor) -> None:
    if matrix.device.type == "cpu" and not bool(ranges.isfinite().all()) and bool(torch.isinf(matrix).any()):
        raise ValueError("pack needs finite elements or NaN, got an infinity. Use bits=None to store infinities.")


def row_parts(rows: int, columns: int, tensor: Tensor) -> Iterator[slice]:
    """Cut a matrix into rows that are handled at a time: on CPU few enough for its cache, else all.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        tensor: Any tensor on its device.

    Yields:
        The rows.
    """
    step = max(1, rows)
    if tensor.device.type == "cpu":
        step = max(1, (_COMPILED_CHUNK if native.applies_to(tensor) else _CHUNK) // max(1, columns))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _spans(columns: int) -> Iterator[tuple[slice, slice, int]]:
    """The whole groups, then the shorter last one: columns, places among the groups, columns per group."""
    whole = columns // GROUP
    if whole:
        yield slice(0, whole * GROUP), slice(0, whole), GROUP
    if columns > whole * GROUP:
        yield slice(whole * GROUP, columns), slice(whole, whole + 1), columns - whole * GROUP


def _bytes(span: slice, bits: int) -> slice:
    """Where the codes of some columns lie."""
    return slice(span.start * bits // 8, -(-span.stop * bits // 8))


def _turned_groups(rows: Tensor, turn: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Columns, places among the groups, and the groups, float32 (rows, groups, size), the whole ones turned."""
    for span, places, size in _spans(rows.shape[1]):
        groups = rows[:, span].to(torch.float32).unflatten(1, (-1, size))
        yield span, places, groups.reshape(-1, GROUP).mm(turn).view(groups.shape) if size == GROUP else groups


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
    scale = _round_down((offset - high) * ((1 + _MARGIN) / (2**bits - 1))).neg_()
    return torch.stack((offset, scale), dim=-1).to(torch.bfloat16)


def _steps(groups: Tensor, ranges: Tensor) -> Tensor:
    offset, scale = ranges.to(torch.float32).unsqueeze(-1).unbind(2)
    return (groups - offset).mul_(torch.where(scale == 0, 0, 1 / scale))


def _round_down(values: Tensor) -> Tensor:
    """The largest bfloat16 number that is not above a float32 number, as float32."""
    bits = values.view(torch.int32)
    away = (bits >> 31).bitwise_and_(0xFFFF)  # cutting bits off moves a negative number up
    return away.add_(bits).bitwise_and_(~0xFFFF).view(torch.float32)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Put 8 / bits codes, each one too high, into a number: int32 (rows, groups, size) to (…, ⌈size · bits / 8⌉)."""
    per_byte, size = 8 // bits, codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -size % per_byte), value=1) if size % per_byte else codes
    joined, *others = codes.chunk(per_byte, dim=-1)
    for place, other in enumerate(others, start=1):
        joined = torch.add(joined, other, alpha=2 ** (place * bits))
    return joined


def _split(stored: Tensor, bits: int, groups: Tensor) -> None:
    """Undo :func:`_join`: bytes (rows, groups · bytes) into codes (rows, groups, size)."""
    stored = stored.unflatten(1, (groups.shape[1], -1))
    for place, part in enumerate(groups.split(stored.shape[-1], dim=-1)):
        codes = stored[..., : part.shape[-1]] >> (place * bits)
        part.copy_(codes.bitwise_and_(2**bits - 1))
