"""Normal codes: a matrix in 2, 1.6 or 1 bits per element, by two, three or four levels for normal numbers.

Columns are cut into groups of 128, the last one filled up with zeros. A group z is rotated twice, by random signs and
the orthonormal Hadamard transform each time, so its elements are about normal whatever z is. Each is replaced by the
nearest of the levels l that have the least mean squared error for normal numbers (Lloyd-Max), for the size of this
group, and the group is stored as one code per element and one scale s:

    value = s · l        s = ‖z‖² / ⟨l, z⟩, so that ⟨value, z⟩ = ‖z‖²

The error is orthogonal to z, and by symmetry its mean over uniform rotations is 0: E[value] = z. Of normal numbers it
has the variance D / (1 − D) with D = 0.1175, 0.1902 and 0.3634, the errors of 4, 3 and 2 levels: half to two thirds of
that of :mod:`rmm_linear.packing.pack` in as many bits, because nothing is spent on the range of a group. Rotations by
signs and Hadamard are not uniform. After one, a row with a few large columns lies in a few clusters, and the squared
bias is up to 0.27 of the variance; after two, none was measurable (at most 0.004).

The signs are those of all rows, so both rotations are one matrix of 128 × 128, which can be undone after a product from
the left, on YᵀZ instead of Z. Rows that are alike have errors that are alike: their sum does not average them.

A scale is rounded at random to one of the two nearest numbers that a byte stands for, an eighth of an octave apart
(:func:`~rmm_linear.packing.rounding.scales_of`), with the right mean, which adds 0.0014 of ‖z‖² to the variance.

Bytes: rows · ⌈columns / 128⌉ · (32, 26 or 16, and 1): three levels take five elements to a byte.

Source: Vargaftik et al. 2022 (EDEN), arXiv 2108.08842.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.packing.rounding import NOT_FINITE, ROUNDING_STREAM, hadamard, scales_of
from rmm_linear.sketches.philox import Generator, philox, unpack_signs

GROUP = 128
LEVELS = {2: 4, 1.6: 3, 1: 2}
GROUP_BYTES = {2: 32, 1.6: 26, 1: 16}
# Of a normal number with the variance 1: the levels that are not negative, and where one ends and the next begins.
_POSITIVE = {2: (0.4527800, 1.5104176), 1.6: (0.0, 1.2240089), 1: (0.7978846,)}
_EDGES = {2: 0.9815988, 1.6: 0.6120044}
_WORDS = 2 * GROUP // 32


@dataclass(frozen=True)
class NormalNoise:
    """The random numbers of a normal code, which follow from its seed."""

    signs: Tensor  # signs of the two rotations, float32, shape (2, 128)
    rows: Tensor  # a, int32, shape (rows,)
    groups: Tensor  # c, int32, shape (groups,). The bits of a xor c are those of 1 + u, a float32 in [1, 2).

    @property
    def rotation(self) -> Tensor:
        """Both rotations of a row from the right, shape (128, 128)."""
        matrix = hadamard(GROUP, self.signs.device)
        return (self.signs[0].unsqueeze(1) * matrix) @ (self.signs[1].unsqueeze(1) * matrix)

    @classmethod
    def of(cls, seed: Tensor, rows: int, groups: int, generator: Generator = philox) -> NormalNoise:
        """Draw the numbers for a matrix of so many rows, and groups in each."""
        counters = torch.arange(max(rows, groups, _WORDS), device=seed.device)
        a, c, words, _ = generator(seed, counters, ROUNDING_STREAM)
        signs = unpack_signs(words[:_WORDS]).view(2, GROUP).to(torch.float32)
        a, c = ((word >> 9).to(torch.int32) for word in (a[:rows], c[:groups]))
        return cls(signs, a | 0x3F800000, c)


def groups_of(columns: int) -> int:
    return (columns + GROUP - 1) // GROUP


def code_rows(values: Tensor, bits: float, noise: NormalNoise, a: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of some rows; ``a`` is :attr:`NormalNoise.rows` of these rows."""
    rotated = padded(values.to(torch.float32)).reshape(-1, GROUP) @ noise.rotation
    squares = rotated.square().sum(1, keepdim=True)
    # Of a group of zeros, or with a NaN, the codes are arbitrary.
    magnitude, above = rotated.abs(), rotated >= 0
    if bits == 1:
        digits, level = above.to(torch.int32), torch.full_like(magnitude, _POSITIVE[1][0])
    else:
        low, high = _POSITIVE[bits]
        is_outer = magnitude >= (squares / GROUP).sqrt() * _EDGES[bits]
        level = torch.where(is_outer, high, low)
        place = is_outer.to(torch.int32)
        digits = torch.where(above, LEVELS[bits] // 2 + place, 1 - place)  # 0, 1, …: from the lowest level on
    scale = squares / (level * magnitude).sum(1, keepdim=True)
    scale = torch.where(squares == 0, 0, scale).view(len(values), -1)
    chance = (a.unsqueeze(1) ^ noise.groups).view(torch.float32) - 1
    scales.copy_(_rounded(scale, chance))
    codes.copy_(_join(digits, bits).view(len(values), -1))


def decode_rows(codes: Tensor, scales: Tensor, bits: float) -> Tensor:
    """Return the rows that codes and scales represent, still rotated: float32, shape (rows, 128 · groups)."""
    digits = _split(codes.reshape(-1, GROUP_BYTES[bits]), bits)
    positive = _POSITIVE[bits]
    middle = (0.0,) if bits == 1.6 else ()
    listed = [*(-one for one in reversed(positive) if one), *middle, *(one for one in positive if one)]
    levels = torch.tensor(listed, dtype=torch.float32, device=codes.device)
    values = levels[digits.long()] * scales_of(scales).reshape(-1, 1)
    return values.view(codes.shape[0], -1)


def padded(values: Tensor) -> Tensor:
    """The rows with whole groups, filled up with zeros."""
    missing = -values.shape[1] % GROUP
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def rotate(matrix: Tensor, rotation: Tensor) -> Tensor:
    """Multiply every group of 128 columns by a (128, 128) matrix."""
    return (matrix.reshape(-1, GROUP) @ rotation.to(matrix.dtype)).view(matrix.shape)


def _rounded(scale: Tensor, chance: Tensor) -> Tensor:
    """The byte below or above a scale, with the probabilities that make it the mean."""
    known = scales_of(torch.arange(NOT_FINITE, dtype=torch.uint8, device=scale.device))
    low = torch.bucketize(scale, known, right=True).sub_(1).clamp_(0)
    high = (low + 1).clamp_max_(NOT_FINITE - 1)
    share = (scale - known[low]) / (known[high] - known[low])
    is_beyond = ~(scale <= known[-1])  # or NaN
    return torch.where(is_beyond, NOT_FINITE, low + (chance < share)).to(torch.uint8)


def _join(digits: Tensor, bits: float) -> Tensor:
    """Join the codes of groups in bytes, (…, 128) to (…, bytes): byte i holds the elements i, i + bytes, …."""
    size, base = GROUP_BYTES[bits], LEVELS[bits]
    missing = -GROUP % size
    parts = torch.nn.functional.pad(digits, (0, missing)).split(size, dim=-1)
    return sum(part * base**place for place, part in enumerate(parts)).to(torch.uint8)  # pyright: ignore


def _split(stored: Tensor, bits: float) -> Tensor:
    """Undo :func:`_join`."""
    base, per_byte = LEVELS[bits], -(-GROUP // GROUP_BYTES[bits])
    left = stored.to(torch.int32)
    parts = [torch.div(left, base**place, rounding_mode="floor") % base for place in range(per_byte)]
    return torch.cat(parts, dim=-1)[..., :GROUP]
