"""Derivatives in few bits with the C library, which reads them from tables.

A table is linear between knots that are 1/128 apart, on the whole interval in which the derivative has not reached its
limits, or between two jumps. Its error is below 1e-4 of the derivative's range everywhere.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rmm_linear.backends import native as library
from rmm_linear.backends.native import derivatives as native
from rmm_linear.backends.native.derivatives import DerivativeTable, Noise
from rmm_linear.packing import ROUNDING_STREAM
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import Pointwise

_KINDS = {"relu": native.RELU, "leaky_relu": native.LEAKY_RELU}
_SPANS = {"hardswish": (-3, 3), "elu": (-16, 0)}  # from jump to jump
_SPAN = (-16, 16)
_DENSITY = 128  # knots per unit of x
_INSIDE = 2.0**-40  # so far from a jump its side is that of the knots
_SMALLEST = 2.0**-126  # smallest normal float32


@functools.lru_cache(maxsize=64)
def derivative_table(function: Pointwise, bits: int) -> DerivativeTable | None:
    """Return the table of a derivative.

    Args:
        function: The function.
        bits: Bits per code.

    Returns:
        The table; None where one bit is exact.
    """
    if function.is_exact:
        return None
    begin, end = _SPANS.get(function.name, _SPAN)
    x = torch.linspace(begin, end, (end - begin) * _DENSITY + 1, dtype=torch.float64, device="cpu")
    outside = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64, device="cpu")
    derivative = function.derivative(torch.cat((x.clamp(begin + _INSIDE, end - _INSIDE), outside)))
    steps = ((derivative - function.range[0]) / function.step(bits)).clamp(min=0)
    below, above = steps[-2:].tolist()
    # At 0 itself, the derivative of ELU is that of its exponential.
    return DerivativeTable(steps[:-2].float(), begin, _DENSITY, end or _SMALLEST, below, above)


def pack_derivative(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    """Write the codes of :func:`rmm_linear.packing.derivatives.pack_derivative`."""
    if x.dtype == torch.float64:
        codes.copy_(plain.pack_derivative(x, function, bits, seed, index))
        return
    kind, table = _KINDS.get(function.name, native.TABLE), derivative_table(function, bits)
    noise, index = _noise(seed, len(codes), x.shape[1]), None if index is None else index.contiguous()
    native.pack_derivative(x if x.stride(1) == 1 else x.contiguous(), codes, kind, bits, table, noise, index)


def apply_derivative(
    y: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Return dX̂ as :func:`rmm_linear.packing.derivatives.apply_derivative` does."""
    if y.dtype == torch.float64:
        return plain.apply_derivative(y, codes, function, bits, seed, index)
    kind, line = _KINDS.get(function.name, native.TABLE), (function.range[0], function.step(bits))
    if function.parameters and function.is_exact:
        line = function.parameters[0], 0.0
    noise, index = _noise(seed, len(codes), y.shape[1]), None if index is None else index.contiguous()
    return native.apply_derivative(y.contiguous(), codes.contiguous(), kind, bits, line, noise, index)


def _noise(seed: Tensor | None, rows: int, columns: int) -> Noise | None:
    return None if seed is None else library.rounding_noise(seed, ROUNDING_STREAM, rows, columns)[1:]
