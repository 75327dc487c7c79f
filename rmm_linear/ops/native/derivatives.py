"""Derivatives in few bits with the C library, which reads them from tables.

A table is linear between knots that are 1/128 apart, on the whole interval in which the derivative has not reached its
limits, or between two jumps. Its error is below 1e-4 of the derivative's range everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backends import native
from rmm_linear.backends.native.library import TYPES, pointer, read_seed, run, threads, write_seed
from rmm_linear.packing.derivatives import NAN, stored_layout
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.stored import new_stored, offsets

_TABLE = 0
_KINDS = {"relu": 1, "leaky_relu": 2, "hardtanh": 3}
_SPANS = {"hardswish": (-3, 3), "elu": (-16, 0)}  # from jump to jump
_SPAN = (-16, 16)
_DENSITY = 128  # knots per unit of x
_INSIDE = 2.0**-40  # so far from a jump its side is that of the knots
_SMALLEST = 2.0**-126  # smallest normal float32


@dataclass(frozen=True)
class DerivativeTable:
    """A derivative as the C library reads it, in steps above its low end."""

    # Of equally distant x, between which it is linear, int32: the lower half is the value, the upper half that of the
    # next one less it
    knots: Tensor
    unit: float  # of both, in steps
    begin: float  # x of the first knot
    density: float  # knots per unit of x
    end: float  # from this x on, the derivative is above
    below: float  # the derivative up to begin
    above: float


@functools.lru_cache(maxsize=64)
def derivative_table(pointwise: Pointwise, bits: int) -> DerivativeTable | None:
    """Return the table of a derivative for codes of some bits; None where one bit is exact."""
    if pointwise.is_exact:
        return None
    begin, end = _SPANS.get(pointwise.name, _SPAN)
    x = torch.linspace(begin, end, (end - begin) * _DENSITY + 1, dtype=torch.float64, device="cpu")
    outside = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64, device="cpu")
    derivative = pointwise.derivative(torch.cat((x.clamp(begin + _INSIDE, end - _INSIDE), outside)))
    steps = ((derivative - pointwise.range[0]) / pointwise.step(bits)).clamp(min=0)
    below, above = steps[-2:].tolist()
    # At 0 itself, the derivative of ELU is that of its exponential.
    unit = float(steps.max()) / (2**16 - 1)
    knots = (steps[:-2] / unit).round().long()
    slopes = knots.diff(append=knots[-1:])
    return DerivativeTable(
        (knots | slopes << 16).to(torch.int32), unit, begin, _DENSITY, end or _SMALLEST, below, above
    )


@functools.lru_cache(maxsize=64)
def _table(pointwise: Pointwise, bits: int) -> tuple[object, tuple[int, int, float, float, float, float, float, float]]:
    """Return the table, and address, length, interval and limits of its derivative as arguments."""
    table = derivative_table(pointwise, bits)
    if table is None:
        least, most = (*pointwise.parameters, 0.0, 0.0)[:2]  # or the slope
        return None, (0, 0, 0.0, least, 0.0, most, 0.0, 0.0)
    line = table.unit, table.begin, table.density, table.end, table.below, table.above
    return table, (table.knots.data_ptr(), len(table.knots), *line)


def pack_derivative(
    x: Tensor, codes: Tensor, pointwise: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    """Write the codes of :func:`rmm_linear.packing.derivatives.pack_derivative`."""
    write_derivative(x, index, codes.shape[0], pointer(seed), pointwise, bits, codes.data_ptr())


def stored_derivative(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Return the bytes of :func:`rmm_linear.ops.derivatives.pack_derivative`."""
    rows, columns = x.shape[0] if index is None else index.shape[0], x.shape[1]
    pointwise, places, size = _layout(name, tuple(parameters), bits, rows, columns)
    stored = new_stored(x, size, places)
    base = stored.data_ptr()
    seed = 0 if pointwise.is_exact else write_seed(stored, seed)
    if pointwise.is_bounded:
        write_derivative(x, index, rows, 0 if pointwise.is_exact else base, pointwise, bits, base + places[-1])
        return stored
    kept = torch.relu(x if index is None else x.index_select(0, index)).contiguous()
    native.pack(kept, bits, seed, base + places[1], base + places[2], rows)
    return stored


def apply_stored(
    y: Tensor, stored: Tensor, index: Tensor | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Return dX̂ as :func:`rmm_linear.ops.derivatives.apply_derivative` does."""
    rows = y.shape[0] if index is None else index.shape[0]
    pointwise, places, _ = _layout(name, tuple(parameters), bits, rows, y.shape[1])
    seed = 0 if pointwise.is_exact else read_seed(stored)
    if pointwise.is_bounded:
        return read_derivative(y, index, rows, seed, pointwise, bits, stored.data_ptr() + places[-1])
    relu = y.new_empty(rows, y.shape[1], dtype=torch.float32)
    codes, scales = (stored.data_ptr() + place for place in places[1:])
    native.unpack(codes, scales, bits, seed, relu, rotated=False)
    if index is None:
        return relu.mul_(2).mul_(y).to(y.dtype)
    return y.new_zeros(y.shape).index_copy_(0, index, relu.mul_(2).mul_(y.index_select(0, index)).to(y.dtype))


@functools.lru_cache(maxsize=1024)
def _layout(
    name: str, parameters: tuple[float, ...], bits: int, rows: int, columns: int
) -> tuple[Pointwise, list[int], int]:
    function, parts = stored_layout(name, parameters, bits, rows, columns)
    return function, *offsets(parts)


def activated(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> Any:
    """Return what :func:`rmm_linear.ops.derivatives.activate_and_pack` does, of functions that are exact in one bit."""
    rows, columns = x.shape
    pointwise, places, size = _layout(name, tuple(parameters), bits, rows, columns)
    if not pointwise.is_exact or index is not None:
        return NotImplemented
    stored, out = new_stored(x, size, places), x.new_empty(rows, columns)
    write_derivative(x, None, rows, 0, pointwise, bits, stored.data_ptr() + places[0], out.data_ptr())
    return out, stored


def write_derivative(
    x: Tensor, index: Tensor | None, rows: int, seed: int, pointwise: Pointwise, bits: int, codes: int, out: int = 0
) -> None:
    """Write the same at an address; that of the seed is 0 for a function without one, and that of no output."""
    x = x if x.stride(1) == 1 else x.contiguous()
    index = None if index is None else index.contiguous()
    table, line = _table(pointwise, bits)
    run(
        "rmm_pack_derivative", x.data_ptr(), TYPES[x.dtype], x.stride(0), rows, x.shape[1], pointer(index),
        _KINDS.get(pointwise.name, _TABLE), bits, *line, seed, codes, out, threads(x),
    )  # fmt: skip
    del table  # whose memory was read until now


def apply_derivative(
    y: Tensor, codes: Tensor, pointwise: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return dX̂ as :func:`rmm_linear.packing.derivatives.apply_derivative` does."""
    codes = codes.contiguous()
    return read_derivative(
        y, index, codes.shape[0], 0 if seed is None else int(seed), pointwise, bits, codes.data_ptr()
    )


def read_derivative(
    y: Tensor, index: Tensor | None, rows: int, seed: int, pointwise: Pointwise, bits: int, codes: int
) -> Tensor:
    low, step = _range(pointwise, bits)
    low = math.nan if seed == NAN else low
    y, index = y.contiguous(), None if index is None else index.contiguous()
    out = torch.empty_like(y) if index is None else torch.zeros_like(y)
    run(
        "rmm_apply_derivative", y.data_ptr(), TYPES[y.dtype], codes, rows, y.shape[1], pointer(index),
        _KINDS.get(pointwise.name, _TABLE), bits, low, step, seed, out.data_ptr(), threads(y),
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=64)
def _range(pointwise: Pointwise, bits: int) -> tuple[float, float]:
    """Return the lowest derivative and the step from one code to the next; of LeakyReLU its slope."""
    if pointwise.is_exact:
        return (pointwise.parameters[0] if pointwise.name == "leaky_relu" else 0.0), 0.0
    return pointwise.range[0], pointwise.step(bits)
