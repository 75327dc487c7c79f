"""Packing of a group of columns: rotation, scale, subtractive dither, and the layout in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.sketches.philox import Generator, philox, unpack_signs

GROUP = 64
WIDTHS = (8, 4, 3, 2)
ROUNDING_STREAM = 3
_EXPONENT_OF_ONE = 0x3F800000
_MARGIN = 2.0**-18  # relative margin of a scale, so that a rounded sum of step and noise never exceeds the last code
# The bits of a code that lie together: 3 bits are a plane of 2 and one of 1.
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
NOT_FINITE = 255  # in the place of a scale


def _scale(byte: int) -> float:
    """Return the scale that a byte stands for, as :func:`scales_of` describes."""
    if byte == 0 or byte == NOT_FINITE:
        return float("nan") if byte else 0.0
    if byte < 9:
        return 2.0 ** (-18 - 4 * (9 - byte))
    return 2.0 ** ((byte - 9) / 8 - 18) if byte < 249 else 2.0 ** (12 + 4 * (byte - 249))


_SCALES = [_scale(byte) for byte in range(256)]


@dataclass(frozen=True)
class RoundingNoise:
    """The random numbers of packing, which follow from its seed."""

    signs: Tensor  # signs of the rotation, float32, shape (64,)
    rows: Tensor  # a, int32, shape (rows,)
    columns: Tensor  # c, int32, shape (columns,). The bits of a xor c are those of 1 + u, a float32 in [1, 2).
    # Whether a hash of these bits takes their place, which makes the numbers of more than two elements independent
    is_mixed: bool = False

    @property
    def rotation(self) -> Tensor:
        """The signs, then the Hadamard transform, shape (64, 64)."""
        return self.signs.unsqueeze(1) * hadamard(GROUP, self.signs.device)

    @classmethod
    def of(
        cls, seed: Tensor, rows: int, columns: int, generator: Generator = philox, *, mixed: bool = False
    ) -> RoundingNoise:
        """Draw the numbers for a matrix of so many rows and columns."""
        counters = torch.arange(max(rows, columns, 2), device=seed.device)
        a, c, words, _ = generator(seed, counters, ROUNDING_STREAM)
        signs = unpack_signs(words[:2]).view(GROUP).to(torch.float32)
        a, c = ((word >> 9).to(torch.int32) for word in (a[:rows], c[:columns]))
        return cls(signs, a | _EXPONENT_OF_ONE, c, mixed)


def code_bytes(columns: int, bits: int) -> int:
    """Return the bytes of the codes of a row: ⌈columns · width / 8⌉ for each plane."""
    return sum((columns * width + 7) // 8 for width in PLANES[bits])


def scales_of(scales: Tensor) -> Tensor:
    """Return the scales that bytes stand for, float32, of the same shape.

    Bytes 9 … 248 are 2^((byte − 9) / 8 − 18), eight to an octave from 2⁻¹⁸ to 2¹². Beyond them scales are four octaves
    apart: 1 … 8 from 2⁻⁵⁰, 249 … 254 up to 2³². 0 is a group of zeros, 255 is NaN.
    """
    return torch.tensor(_SCALES, dtype=torch.float32, device=scales.device)[scales.int()]


def pack_rows(values: Tensor, bits: int, noise: RoundingNoise, a: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of some rows; ``a`` is :attr:`RoundingNoise.rows` of these rows."""
    for span, places, groups in rotated_groups(values, noise.rotation):
        scales[:, places] = new_scales = _group_scales(groups, bits)
        # The code of a NaN is arbitrary: its scale is NaN.
        above = _steps(groups, new_scales, bits).add_(_dither(noise, a, span, groups.shape)).to(torch.int32).sub_(1)
        codes[:, _bytes(span, bits)] = _join(above, bits).flatten(1)


def unpack_rows(codes: Tensor, scales: Tensor, bits: int, noise: RoundingNoise, a: Tensor, values: Tensor) -> None:
    """Write the rows, float32, that codes and scales represent; whole groups stay rotated. ``a``: as for packing."""
    for span, places, size in _spans(values.shape[1]):
        groups = values[:, span].unflatten(1, (-1, size))
        _split(codes[:, _bytes(span, bits)], bits, groups)
        dither = _dither(noise, a, span, groups.shape).sub_(1.5)
        groups.sub_(_middle(bits)).sub_(dither).mul_(scales_of(scales[:, places]).unsqueeze(-1))


def _dither(noise: RoundingNoise, a: Tensor, span: slice, shape: torch.Size) -> Tensor:
    """1 + u for some rows and columns, float32, shape (rows, groups, size)."""
    words = a[:, None, None] ^ noise.columns[span].view(shape[1:])
    return (mix(words) if noise.is_mixed else words).view(torch.float32)


def mix(words: Tensor) -> Tensor:
    """Return the bits of 1 + u of a hash of the 23 lower bits of int32 words."""
    words = (words & 0x7FFFFF).to(torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    words = (words ^ words >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return (words >> 9).to(torch.int32) | _EXPONENT_OF_ONE


def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix: the sign of (i, j) is the parity of the bits that i and j share."""
    index = torch.arange(size, device=device)
    shared = index.unsqueeze(1) & index
    for shift in (4, 2, 1):
        shared = shared ^ (shared >> shift)
    return (1 - 2 * (shared & 1)).to(torch.float32) * size**-0.5


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
    """Return the bytes that hold the codes of some columns, which begin with a group."""
    return slice(code_bytes(span.start, bits), code_bytes(span.stop, bits))


def _middle(bits: int) -> float:
    """Return half of the largest code, which stands for 0."""
    return (2**bits - 1) / 2


def _group_scales(groups: Tensor, bits: int) -> Tensor:
    """Return the least scales that suffice, uint8 (rows, groups), for groups of shape (rows, groups, size)."""
    least = groups.abs().amax(-1) * ((1 + _MARGIN) / _middle(bits))
    return torch.bucketize(least, torch.tensor(_SCALES[:NOT_FINITE], dtype=least.dtype, device=least.device)).to(
        torch.uint8
    )


def _steps(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Element / scale, from the first code, for every element."""
    scale = scales_of(scales).unsqueeze(-1)
    return (groups * torch.where(scale == 0, 0, 1 / scale)).add_(_middle(bits))


def _join(codes: Tensor, bits: int) -> Tensor:
    """Join the codes of a group in bytes, plane after plane: int32 (rows, groups, size) to uint8 (…, bytes)."""
    planes, low = list[Tensor](), 0
    for width in PLANES[bits]:
        part = codes if width == bits else (codes >> low).bitwise_and_(2**width - 1)
        per_byte, size = 8 // width, codes.shape[-1]
        part = torch.nn.functional.pad(part, (0, -size % per_byte)) if size % per_byte else part
        joined, *others = part.chunk(per_byte, dim=-1)
        for place, other in enumerate(others, start=1):
            joined = torch.add(joined, other, alpha=2 ** (place * width))
        planes.append(joined.to(torch.uint8))
        low += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def _split(stored: Tensor, bits: int, groups: Tensor) -> None:
    """Undo :func:`_join`: bytes (rows, groups · bytes) into codes (rows, groups, size)."""
    size, low = groups.shape[-1], 0
    stored = stored.unflatten(1, (groups.shape[1], -1))
    sizes = [(size * width + 7) // 8 for width in PLANES[bits]]
    for plane, width in zip(stored.split(sizes, -1), PLANES[bits], strict=True):
        for place, part in enumerate(groups.split(plane.shape[-1], dim=-1)):
            codes = (plane[..., : part.shape[-1]] >> (place * width)).bitwise_and_(2**width - 1)
            part.add_(codes, alpha=2**low) if low else part.copy_(codes)
        low += width
