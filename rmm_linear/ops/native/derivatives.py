"""Derivatives in few bits with the C library, which reads them from tables.

A table is linear between knots that are 1/128 apart, on the whole interval in which the derivative has not reached its
limits, or between two jumps. Its error is below 1e-4 of the derivative's range everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.backends.native import noise_words
from rmm_linear.backends.native.library import TYPES, function, pointer, threads
from rmm_linear.packing import ROUNDING_STREAM
from rmm_linear.packing.pointwise import Pointwise

_TABLE = 0
_KINDS = {"relu": 1, "leaky_relu": 2}
_SPANS = {"hardswish": (-3, 3), "elu": (-16, 0)}  # from jump to jump
_SPAN = (-16, 16)
_DENSITY = 128  # knots per unit of x
_INSIDE = 2.0**-40  # so far from a jump its side is that of the knots
_SMALLEST = 2.0**-126  # smallest normal float32


@dataclass(frozen=True)
class DerivativeTable:
    """A derivative as the C library reads it, in steps above its low end.

    Attributes:
        knots: Values at equally distant x, between which it is linear; float32.
        begin: x of the first knot.
        density: Knots per unit of x.
        end: From this x on, the derivative is ``above``.
        below: The derivative up to ``begin``, and of NaN.
        above: See ``end``.
    """

    knots: Tensor
    begin: float
    density: float
    end: float
    below: float
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
    return DerivativeTable(steps[:-2].float(), begin, _DENSITY, end or _SMALLEST, below, above)


def pack_derivative(
    x: Tensor, codes: Tensor, pointwise: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    """Write the codes of :func:`rmm_linear.packing.derivatives.pack_derivative`."""
    knots, line, table = None, [0.0] * 5, derivative_table(pointwise, bits)
    if table is not None:
        knots, line = table.knots, [table.begin, table.density, table.end, table.below, table.above]
    rows, columns = codes.shape[0], x.shape[1]
    (words, a, c), index = _noise(seed, rows, columns), None if index is None else index.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    function("rmm_pack_derivative")(
        x.data_ptr(), TYPES[x.dtype], x.stride(0), rows, columns, pointer(index),
        _KINDS.get(pointwise.name, _TABLE), bits, pointer(knots), 0 if knots is None else len(knots),
        *line, a, c, codes.data_ptr(), threads(x),
    )  # fmt: skip
    del words  # whose memory was read until now


def apply_derivative(
    y: Tensor, codes: Tensor, pointwise: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return dX̂ as :func:`rmm_linear.packing.derivatives.apply_derivative` does."""
    low, step = pointwise.range[0], pointwise.step(bits)
    if pointwise.parameters and pointwise.is_exact:
        low, step = pointwise.parameters[0], 0.0
    rows, columns = codes.shape[0], y.shape[1]
    (words, a, c), index = _noise(seed, rows, columns), None if index is None else index.contiguous()
    y, codes = y.contiguous(), codes.contiguous()
    out = torch.empty_like(y) if index is None else torch.zeros_like(y)
    function("rmm_apply_derivative")(
        y.data_ptr(), TYPES[y.dtype], codes.data_ptr(), rows, columns, pointer(index),
        _KINDS.get(pointwise.name, _TABLE), bits, low, step, a, c, out.data_ptr(),
        threads(y),
    )  # fmt: skip
    del words
    return out


def _noise(seed: Tensor | None, rows: int, columns: int) -> tuple[Tensor | None, int, int]:
    """The random numbers of rows and of columns: what holds them, and where they are."""
    return (None, 0, 0) if seed is None else noise_words(seed, ROUNDING_STREAM, rows, columns)
