"""Derivatives of pointwise functions in 1, 2, 4 or 8 bits per element, unbiased.

An activation y = g(x) saves x only to form dX = dY ∘ g'(x). Its derivative has a fixed range [low, high], so it needs
neither scales nor offsets. With step = (high − low) / (2^bits − 1), t = (g'(x) − low) / step, and u uniform on [0, 1)
from the seed,

    code q = ⌊t + u⌋        ĝ = low + step · (q + ½ − u)        dX̂ = dY ∘ ĝ

This is the subtractive dither of :mod:`rmm_linear.packing.pack`, with its random numbers: ĝ − g' is uniform on
± step / 2 whatever x is, so dX̂ has the mean dX, and E‖dX̂ − dX‖² = step² / 12 · ‖dY‖². Two of the numbers u are
independent, so of the weight gradient of the layer below, which sums over rows, the variance is exact as well.

The derivatives of ReLU, LeakyReLU and Hardtanh, as which ReLU6 counts, have two values: one bit, no random numbers, and
dX is exact. That of ReLU² has no bounded range; relu(x) is saved instead, packed in rotated groups by
:func:`rmm_linear.packing.pack`.

No code is left for NaN. A NaN in a stored row of x replaces the seed by :data:`NAN`, which makes all of dX̂ NaN: nothing
more is stored, and the host reads nothing.

Layout: as of packing. In every group of 64 columns (the last may be shorter) byte i holds the codes of the elements
i, i + h, …, lower bits first, h the group's bytes. Bytes: rows · ⌈columns · bits / 8⌉. Time: one pass.

Source: derivatives in few bits instead of inputs, rounded deterministically: Novikov et al. 2022, arXiv 2202.00441.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing.pack import check_bits, packed_parts, row_parts
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.rounding import GROUP, RoundingNoise
from rmm_linear.packing.stored import SEED, Part

NAN = -(2**63)  # in place of a seed: x had a NaN


@without_autocast
def pack_derivative(
    x: Tensor, function: Pointwise, bits: int, seed: Tensor | None = None, index: Tensor | None = None
) -> Tensor:
    """Round g'(x) to ``bits`` per element: codes, uint8, shape (n, ⌈C · bits / 8⌉).

    x: Input of the function, floating point, shape (N, C). bits: 8, 4, 2 or 1; 1 for a function that is exact in one
    bit. seed: int64 with one element, which becomes NAN if x has one; not used where one bit is exact. index: Rows to
    store, int64, shape (n,); None for all.
    """
    rows, columns = len(x) if index is None else len(index), x.shape[1]
    codes = x.new_empty(rows, -(-columns * bits // 8), dtype=torch.uint8)
    noise = _noise(function, seed, rows, columns)
    places, shifts = _places(columns, bits, x.device)
    for part in row_parts(rows, columns, x.device):
        values = x[part] if index is None else x.index_select(0, index[part])
        derivative = function.derivative(values.to(_wide(x)))
        if noise is None or seed is None:
            code = derivative == 1
        else:
            seed.masked_fill_(values.isnan().any(), NAN)
            steps = (derivative - function.range[0]) / function.step(bits)
            code = steps.clamp_(min=0).add_(_dither(noise, part)).floor_()
        joined = codes.new_zeros(len(values), codes.shape[1], dtype=torch.int32)
        codes[part] = joined.index_add_(1, places, code.to(torch.int32) << shifts).to(torch.uint8)
    return codes


@without_autocast
def apply_derivative(
    y: Tensor,
    codes: Tensor,
    function: Pointwise,
    bits: int,
    seed: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Multiply dY, shape (N, C), by stored derivatives; rows that are not stored get zeros."""
    out = torch.empty_like(y, memory_format=torch.contiguous_format) if index is None else y.new_zeros(y.shape)
    noise, low = _noise(function, seed, *_shape(codes, y)), function.range[0]
    if noise is not None and seed is not None:
        low = y.new_full((1,), low, dtype=_wide(y)).masked_fill_(seed == NAN, torch.nan)
    places, shifts = _places(y.shape[1], bits, y.device)
    for part in row_parts(*_shape(codes, y), y.device):
        rows = y[part] if index is None else y.index_select(0, index[part])
        code = (codes[part].index_select(1, places).to(torch.int32) >> shifts) & (2**bits - 1)
        if noise is None:
            rows = rows.where(code == 1, below(rows, function))
        else:
            derivative = low + function.step(bits) * (code - (_dither(noise, part).to(_wide(y)) - 0.5))
            rows = (rows.to(_wide(y)) * derivative).to(y.dtype)
        if index is None:
            out[part] = rows
        else:
            out.index_copy_(0, index[part], rows)
    return out


def stored_parts(function: Pointwise, bits: int, rows: int, columns: int) -> list[Part]:
    """Return the shapes and dtypes that are stored for a function's derivative.

    They are the codes, with the seed before them where they are random, and for ReLU² the scales of its groups after
    them.
    """
    codes: Part = (rows, (columns * bits + 7) // 8), torch.uint8
    if function.is_exact:
        return [codes]
    if function.is_bounded:
        return [SEED, codes]
    return [SEED, *packed_parts(rows, columns, bits)]


@functools.lru_cache(maxsize=1024)
def stored_layout(
    name: str, parameters: tuple[float, ...], bits: int, rows: int, columns: int
) -> tuple[Pointwise, tuple[Part, ...]]:
    """Return the function with a name and parameters, and its :func:`stored_parts`."""
    function = Pointwise(name, parameters)
    check_width(function, bits)
    return function, tuple(stored_parts(function, bits, rows, columns))


def check_width(function: Pointwise, bits: int) -> None:
    """Refuse a width that a function's derivative cannot be stored in."""
    if not function.is_bounded:
        check_bits(bits)
    elif bits != 1 and (function.is_exact or bits not in (8, 4, 2)):
        raise ValueError(f"bits must be {'1' if function.is_exact else '8, 4, 2 or 1'}, got {bits!r}.")


def below(y: Tensor, function: Pointwise) -> Tensor | float:
    """Return dX where the derivative of a function that is exact in one bit is not 1: 0, or the slope times dY."""
    return y * function.parameters[0] if function.name == "leaky_relu" else 0


def _shape(codes: Tensor, y: Tensor) -> tuple[int, int]:
    return codes.shape[0], y.shape[1]


def _noise(function: Pointwise, seed: Tensor | None, rows: int, columns: int) -> RoundingNoise | None:
    return None if function.is_exact or seed is None else RoundingNoise.of(seed, rows, columns)


def _dither(noise: RoundingNoise, part: slice) -> Tensor:
    """Return u for some rows, float32, shape (rows, columns)."""
    return (noise.rows[part, None] ^ noise.columns).view(torch.float32) - 1


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _places(columns: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every column the byte of a row that holds its code, and by how many bits it is shifted there."""
    column = torch.arange(columns, device=device)
    group, i = column // GROUP, column % GROUP
    h = ((columns - group * GROUP).clamp(max=GROUP) * bits + 7) // 8
    return group * (8 * bits) + i % h, (i // h * bits).to(torch.int32)
