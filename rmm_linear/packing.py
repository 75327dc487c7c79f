"""Storage of a matrix in 8, 4 or 2 bits per element, unbiased.

Every row is cut into groups of 64 columns (the last one may be shorter). A group keeps an offset and a scale in
bfloat16 and one code q in {0 … 2^bits − 1} per element, which stands for offset + q · scale. The offset is rounded down
and the scale up, so every element lies inside its group's range, and stochastic rounding makes E[unpack(pack(z))] = z.
The variance of an element is scale² · f · (1 − f), f the fraction of a step that it lies above a code.

Before rounding, a group of 64 is turned by random signs and the orthonormal Hadamard transform, and turned back after:
one large column no longer stretches the range of the 63 others. The turn is orthonormal, so the mean stays z and the
squared error is that of the turned elements. It costs one product with a 64 × 64 matrix.

Bytes: rows · (⌈columns · bits / 8⌉ + 4 · ⌈columns / 64⌉). Time: one pass, and one random word for two elements.

Source of stochastic rounding per group for stored activations: Chen et al. 2021 (ActNN), arXiv 2104.14129.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.sketches.philox import philox, signs

GROUP = 64
WIDTHS = (8, 4, 2)
_ROUNDING, _TURN = 3, 5
_LOW_HALF = 0xFFFF


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
        Codes, uint8, shape (rows, ⌈columns · bits / 8⌉), lower bits first; and ranges, bfloat16, shape
        (rows, ⌈columns / 64⌉, 2): offset and scale of every group.

    Raises:
        ValueError: If ``bits`` is not 8, 4 or 2, or an element is infinite. On an accelerator the values are not looked
            at, and an infinity makes its group NaN.
    """
    _check_bits(bits)
    groups, ranges = _grouped(matrix, bits, seed)
    rows, count, _ = groups.shape
    steps = _steps(groups, ranges)
    # Half a word per element: the chance of rounding up is right to 2**-17 of a step.
    words = philox(seed, torch.arange(-(-groups.numel() // 8), device=matrix.device), _ROUNDING)
    halves = torch.stack([half for word in words for half in (word & _LOW_HALF, word >> 16)], dim=-1)
    chance = (halves.to(torch.float32) + 0.5).mul_(2.0**-16).view(-1)[: groups.numel()].view_as(groups)
    codes = steps.add_(chance).floor_().clamp_(0, 2**bits - 1).nan_to_num_(0.0).to(torch.uint8)
    codes = codes.view(rows, count * GROUP)[:, : matrix.shape[1]]
    return _join(codes, bits), ranges


def unpack(codes: Tensor, ranges: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix that packed storage stands for.

    Args:
        codes: uint8, shape (rows, ⌈columns · bits / 8⌉).
        ranges: bfloat16, shape (rows, ⌈columns / 64⌉, 2).
        seed: The seed they were packed with.
        bits: 8, 4 or 2.
        columns: Columns of the matrix.
        dtype: dtype of the result.

    Returns:
        Shape (rows, columns).

    Example:
        >>> z, seed = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor(0)
        >>> unpack(*pack(z, 2, seed), seed, 2, 4, z.dtype)
        tensor([[0., 1., 2., 3.]])
    """
    rows, count, _ = ranges.shape
    per_byte = 8 // bits
    if per_byte > 1:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        codes = ((codes.unsqueeze(-1) >> shifts) & (2**bits - 1)).view(rows, codes.shape[1] * per_byte)
    values = torch.nn.functional.pad(codes[:, :columns].to(torch.float32), (0, count * GROUP - columns))
    offset, scale = ranges.to(torch.float32).unsqueeze(-1).unbind(2)
    values = torch.addcmul(offset, values.view(rows, count, GROUP), scale).view(rows, count * GROUP)[:, :columns]
    return _turn(values, seed, back=True).to(dtype)


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
    groups, ranges = _grouped(matrix, bits, seed)
    fraction = torch.frac(_steps(groups, ranges)).double()
    scale = ranges[..., 1:].double()
    variance = scale.square() * fraction * (1 - fraction)
    return variance.flatten(1)[:, : matrix.shape[1]].sum(1)


def _check_bits(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}. Use None to store the dtype itself.")


def _turn(values: Tensor, seed: Tensor, *, back: bool = False) -> Tensor:
    """Turn every whole group of a float32 matrix by random signs and the Hadamard transform, or turn it back."""
    rows, columns = values.shape
    whole = columns // GROUP * GROUP
    if not whole or not rows:
        return values
    sign = signs(seed, whole, _TURN).to(values.dtype)
    hadamard = torch.ones(1, 1, dtype=values.dtype, device=values.device)
    for _ in range(GROUP.bit_length() - 1):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    hadamard = hadamard / GROUP**0.5
    groups = values[:, :whole] if back else values[:, :whole] * sign
    turned = (groups.reshape(-1, GROUP) @ hadamard).view(rows, whole)
    turned = turned * sign if back else turned
    return turned if whole == columns else torch.cat((turned, values[:, whole:]), dim=1)


def _grouped(matrix: Tensor, bits: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix as turned float32 groups (rows, groups, 64), padded with its last column, and their ranges."""
    rows, columns = matrix.shape
    count = -(-columns // GROUP)
    if matrix.device.type == "cpu" and bool(torch.isinf(matrix).any()):
        raise ValueError("pack needs finite elements or NaN, got an infinity. Use bits=None to store infinities.")
    values = _turn(matrix.to(torch.float32), seed)
    if count * GROUP != columns:
        values = torch.cat((values, values[:, -1:].expand(rows, count * GROUP - columns)), dim=1)
    groups = values.view(rows, count, GROUP)
    low, high = groups.aminmax(dim=-1) if groups.numel() else (groups.sum(-1), groups.sum(-1))
    offset = _round_down(low)
    scale = -_round_down(-(high - offset) / (2**bits - 1))
    return groups, torch.stack((offset, scale), dim=-1).to(torch.bfloat16)


def _steps(groups: Tensor, ranges: Tensor) -> Tensor:
    offset, scale = ranges.to(torch.float32).unsqueeze(-1).unbind(2)
    return torch.where(scale == 0, torch.zeros_like(groups), (groups - offset) / scale)


def _round_down(values: Tensor) -> Tensor:
    """The largest bfloat16 number that is not above a float32 number, as float32."""
    truncated = (values.contiguous().view(torch.int32) & ~_LOW_HALF).view(torch.float32)
    below = (truncated.view(torch.int32) + (_LOW_HALF + 1)).view(torch.float32)  # away from 0, for negative numbers
    return torch.where(truncated > values, below, torch.where(values.isnan(), values, truncated))


def _join(codes: Tensor, bits: int) -> Tensor:
    """Put 8 / bits codes into every byte."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes.contiguous()
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % per_byte)).view(rows, -(-columns // per_byte), per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded << shifts).sum(-1, dtype=torch.uint8)
