"""Packing of a group of columns: rotation, scale and offset, subtractive dither, and the layout in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.sketches.philox import Generator, philox, unpack_signs

GROUP = 64
WIDTHS = (8, 4, 2)
ROUNDING_STREAM = 3
_EXPONENT_OF_ONE = 0x3F800000
_MARGIN = 2.0**-18  # relative margin of a scale, so that a rounded sum of step and noise never exceeds the last code
_SMALLEST = 2.0**-126  # smallest normal float32: the reciprocal of a smaller number may be infinite
_ONES = {bits: sum(2**place for place in range(0, 8, bits)) for bits in WIDTHS}  # 1 in every code of a byte


@dataclass(frozen=True)
class RoundingNoise:
    """The random numbers of packing, which follow from its seed.

    Attributes:
        signs: Signs of the rotation, float32, shape (64,).
        rows: a, int32, shape (rows,).
        columns: c, int32, shape (columns,). The bits of a xor c are those of 1 + u, a float32 in [1, 2).
    """

    signs: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def rotation(self) -> Tensor:
        """The signs, then the Hadamard transform, shape (64, 64)."""
        return self.signs.unsqueeze(1) * _hadamard(self.signs.device)

    @classmethod
    def of(cls, seed: Tensor, rows: int, columns: int, generator: Generator = philox) -> RoundingNoise:
        """Draw the numbers for a matrix of so many rows and columns."""
        counters = torch.arange(max(rows, columns, 2), device=seed.device)
        a, c, words, _ = generator(seed, counters, ROUNDING_STREAM)
        signs = unpack_signs(words[:2]).view(GROUP).to(torch.float32)
        a, c = ((word >> 9).to(torch.int32) for word in (a[:rows], c[:columns]))
        return cls(signs, a | _EXPONENT_OF_ONE, c)


def pack_rows(values: Tensor, bits: int, noise: RoundingNoise, a: Tensor, codes: Tensor, qparams: Tensor) -> None:
    """Write the codes and qparams of some rows; ``a`` is :attr:`RoundingNoise.rows` of these rows."""
    for span, places, groups in rotated_groups(values, noise.rotation):
        qparams[:, places] = new_qparams = _group_qparams(groups, bits)
        # The code of a NaN is arbitrary: its scale is NaN.
        above = _steps(groups, new_qparams).add_(_dither(noise, a, span, groups.shape)).to(torch.int32)
        codes[:, _bytes(span, bits)] = _join(above, bits).flatten(1)
    codes -= _ONES[bits]  # the random numbers lie in [1, 2), so every code was one too high


def unpack_rows(codes: Tensor, qparams: Tensor, bits: int, noise: RoundingNoise, a: Tensor, values: Tensor) -> None:
    """Write the rows, float32, that codes and qparams represent; whole groups stay rotated. ``a``: as for packing."""
    for span, places, size in _spans(values.shape[1]):
        offset, scale = qparams[:, places].to(torch.float32).unsqueeze(-1).unbind(2)
        groups = values[:, span].unflatten(1, (-1, size))
        _split(codes[:, _bytes(span, bits)], bits, groups)
        groups.sub_(_dither(noise, a, span, groups.shape).sub_(1.5)).mul_(scale).add_(offset)


def _dither(noise: RoundingNoise, a: Tensor, span: slice, shape: torch.Size) -> Tensor:
    """1 + u for some rows and columns, float32, shape (rows, groups, size)."""
    return (a[:, None, None] ^ noise.columns[span].view(shape[1:])).view(torch.float32)


def _hadamard(device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix of a group: the sign of (i, j) is the parity of the bits that i and j share."""
    index = torch.arange(GROUP, device=device)
    shared = index.unsqueeze(1) & index
    for shift in (4, 2, 1):
        shared = shared ^ (shared >> shift)
    return (1 - 2 * (shared & 1)).to(torch.float32) * GROUP**-0.5


def rotate_groups(values: Tensor, rotation: Tensor) -> Tensor:
    """Multiply every whole group of 64 columns by a (64, 64) matrix."""
    rows, columns = values.shape
    whole = columns // GROUP * GROUP
    if not whole:
        return values
    rotated = (values[:, :whole].reshape(-1, GROUP) @ rotation.to(values.dtype)).view(rows, whole)
    return rotated if whole == columns else torch.cat((rotated, values[:, whole:]), dim=1)


def rotated_groups(rows: Tensor, rotation: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield columns, group indices, and the groups, float32 (rows, groups, size); whole groups are rotated."""
    for span, places, size in _spans(rows.shape[1]):
        groups = rows[:, span].to(torch.float32).unflatten(1, (-1, size))
        yield span, places, groups.reshape(-1, GROUP).mm(rotation).view(groups.shape) if size == GROUP else groups


def _spans(columns: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the whole groups, then the shorter last one: columns, group indices, columns per group."""
    whole = columns // GROUP
    if whole:
        yield slice(0, whole * GROUP), slice(0, whole), GROUP
    if columns > whole * GROUP:
        yield slice(whole * GROUP, columns), slice(whole, whole + 1), columns - whole * GROUP


def _bytes(span: slice, bits: int) -> slice:
    """Return the bytes that hold the codes of some columns."""
    return slice(span.start * bits // 8, -(-span.stop * bits // 8))


def _group_qparams(groups: Tensor, bits: int) -> Tensor:
    """Return the offset and scale, bfloat16, shape (rows, groups, 2), of groups of shape (rows, groups, size)."""
    low, high = groups.amin(-1), groups.amax(-1)
    offset = _round_down(low)
    scale = _round_down((offset - high) * ((1 + _MARGIN) / (2**bits - 1))).neg_()
    return torch.stack((offset, scale), dim=-1).to(torch.bfloat16)


def _steps(groups: Tensor, qparams: Tensor) -> Tensor:
    """(element − offset) / scale for every element."""
    offset, scale = qparams.to(torch.float32).unsqueeze(-1).unbind(2)
    return (groups - offset).mul_(torch.where(scale < _SMALLEST, 0, 1 / scale))


def _round_down(values: Tensor) -> Tensor:
    """Return the largest bfloat16 number that is not above a float32 number, as float32."""
    bits = values.view(torch.int32)
    away = (bits >> 31).bitwise_and_(0xFFFF)  # truncation moves a negative number up
    return away.add_(bits).bitwise_and_(~0xFFFF).view(torch.float32)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Join 8 / bits codes, each one too high, in one number: int32 (rows, groups, size) to (…, ⌈size · bits / 8⌉)."""
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
