"""Derivatives of pointwise functions in few bits, and the operators that make and apply them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends.triton import kernels
from rmm_linear.ops import native_derivatives as native
from rmm_linear.ops.operator import operator
from rmm_linear.ops.save import _on_device
from rmm_linear.ops.stored import SEED, Part, empty_stored, stored_bytes, views
from rmm_linear.ops.table import PACK, UNPACK, Operation
from rmm_linear.packing import GROUP, check_bits
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.sketches.seeds import draw_seed


def _pack_plainly(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    codes.copy_(plain.pack_derivative(x, function, bits, seed, index))


def _pack_with_triton(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    line = function.range[0], function.step(bits)
    kernels().pack_derivative(x, codes, function.name, function.parameters, line, bits, seed, index)


def _apply_with_triton(
    y: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    line = function.range[0], function.step(bits)
    return kernels().apply_derivative(y, codes, function.name, function.parameters, line, bits, seed, index)


PACK_DERIVATIVE = Operation(_pack_plainly, native.pack_derivative, _pack_with_triton)
APPLY_DERIVATIVE = Operation(plain.apply_derivative, native.apply_derivative, _apply_with_triton)


def stored_parts(function: Pointwise, bits: int, rows: int, columns: int) -> list[Part]:
    """Return what the stand-in of a function is made of.

    Args:
        function: The function.
        bits: Bits per element, as :meth:`Pointwise.bits` returns them.
        rows: Rows that are stored.
        columns: C.

    Returns:
        Shapes and dtypes of the codes, and of what else belongs to them: the seed where they are random, first, and for
        ReLU² the qparams of its groups, last.
    """
    codes: Part = (rows, (columns * bits + 7) // 8), torch.uint8
    if function.is_exact:
        return [codes]
    if function.is_bounded:
        return [SEED, codes]
    return [SEED, codes, ((rows, (columns + GROUP - 1) // GROUP, 2), torch.bfloat16)]


@operator(
    "pack_derivative", "(Tensor x, Tensor? index, SymInt? seed, str name, float[] parameters, int bits) -> Tensor"
)
def pack_derivative(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Make the stand-in of the input of a pointwise function.

    Args:
        x: Input of the function, shape (N, C).
        index: Rows to store, int64, shape (n,); None for all.
        seed: Seed of the rounding; None draws a new one. Not used where one bit is exact.
        name: :attr:`Pointwise.name`.
        parameters: :attr:`Pointwise.parameters`.
        bits: 8, 4, 2 or 1; 1 for "relu" and "leaky_relu", at least 2 for "relu_squared".

    Returns:
        uint8, one dimension: the tensors of :func:`stored_parts`.
    """
    function = Pointwise(name, tuple(parameters))
    check_width(function, bits)
    parts = stored_parts(function, bits, len(x) if index is None else len(index), x.shape[1])
    stored = empty_stored(x, parts).zero_()
    if function.is_exact:
        PACK_DERIVATIVE(x, views(stored, parts)[0], function, bits, None, index)
        return stored
    seeds, codes, *qparams = views(stored, parts)
    seeds.copy_(_on_device(draw_seed() if seed is None else seed, x.device))
    if not function.is_bounded:
        rows = torch.relu(x if index is None else x.index_select(0, index))
        for view, tensor in zip((codes, *qparams), PACK(rows, bits, seeds), strict=True):
            view.copy_(tensor)
    else:
        PACK_DERIVATIVE(x, codes, function, bits, seeds, index)
    return stored


@pack_derivative.register_fake
def _(x, index, seed, name, parameters, bits):
    parts = stored_parts(Pointwise(name), bits, x.shape[0] if index is None else index.shape[0], x.shape[1])
    return x.new_empty(stored_bytes(parts), dtype=torch.uint8)


@operator(
    "apply_derivative", "(Tensor y, Tensor stored, Tensor? index, str name, float[] parameters, int bits) -> Tensor"
)
def apply_derivative(
    y: Tensor, stored: Tensor, index: Tensor | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Multiply the gradient by the output of a pointwise function by the stored derivative.

    Args:
        y: dY, shape (N, C), floating point.
        stored: Result of :func:`pack_derivative`.
        index: See there, as the following ones.
        name: :attr:`Pointwise.name`.
        parameters: :attr:`Pointwise.parameters`.
        bits: Bits per element.

    Returns:
        dX̂, shape (N, C), dtype of ``y``, contiguous; rows that are not stored are zero.
    """
    function = Pointwise(name, tuple(parameters))
    parts = stored_parts(function, bits, len(y) if index is None else len(index), y.shape[1])
    if function.is_exact:
        return APPLY_DERIVATIVE(y, views(stored, parts)[0], function, bits, None, index)
    seeds, codes, *qparams = views(stored, parts)
    if function.is_bounded:
        return APPLY_DERIVATIVE(y, codes, function, bits, seeds, index)
    wide = torch.promote_types(y.dtype, torch.float32)
    relu = UNPACK(codes, *qparams, seeds, bits, y.shape[1], wide)
    if index is None:
        return relu.mul_(2).mul_(y).to(y.dtype)
    return y.new_zeros(y.shape).index_copy_(0, index, relu.mul_(2).mul_(y.index_select(0, index)).to(y.dtype))


@apply_derivative.register_fake
def _(y, stored, index, name, parameters, bits):
    return y.new_empty(y.shape)


def check_width(function: Pointwise, bits: int) -> None:
    """Refuse widths that a function's stand-in cannot have.

    Args:
        function: The function.
        bits: Bits per element.

    Raises:
        ValueError: If it is none of :meth:`Pointwise.bits`.
    """
    if not function.is_bounded:
        check_bits(bits)
    elif bits != 1 and (function.is_exact or bits not in (8, 4, 2)):
        raise ValueError(f"bits must be {'1' if function.is_exact else '8, 4, 2 or 1'}, got {bits!r}.")


@register_flop_formula(torch.ops.rmm_linear.pack_derivative)
def _(x: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return math.prod(x)


@register_flop_formula(torch.ops.rmm_linear.apply_derivative)
def _(y: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return math.prod(y)
