"""The packed products of a gated MLP, and the operators that make and apply them: see packing/gated.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends import native as library
from rmm_linear.backends.native import gated as native
from rmm_linear.backends.native.library import TYPES
from rmm_linear.backends.triton import kernels
from rmm_linear.ops.operator import operator
from rmm_linear.ops.stored import Part, empty_stored, fill_seeds, stored_bytes, views
from rmm_linear.ops.table import Operation
from rmm_linear.packing import GROUP, ROUNDING_STREAM, check_bits, empty_packed, mark_infinite
from rmm_linear.packing import gated as plain
from rmm_linear.packing.gated import ACTIVATIONS, Packed

_SEEDS: Part = ((2,), torch.int64)


def _pack_natively(
    a: Tensor, b: Tensor, seeds: Tensor, activation: str, bits: int, wanted: tuple[bool, bool], index: Tensor | None
) -> list[Packed | None]:
    """As :func:`rmm_linear.packing.gated.pack_gated`."""
    if a.dtype not in TYPES:
        return plain.pack_gated(a, b, seeds, activation, bits, wanted, index)
    check_bits(bits)
    rows, columns = len(a) if index is None else len(index), a.shape[1]
    packed = [Packed(*empty_packed(rows, columns, bits, a)) if needed else None for needed in wanted]
    noise = native.gated_noise(seeds, ROUNDING_STREAM, rows, columns)
    gate, other = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    taken = None if index is None else index.contiguous()
    if not native.pack_gated(gate, other, ACTIVATIONS.index(activation), bits, noise, [*packed], taken):
        for one in packed:
            if one is not None:
                mark_infinite(one.qparams)
    return packed


def _apply_natively(
    y: Tensor, seeds: Tensor, packed: list[Packed | None], bits: int, index: Tensor | None
) -> list[Tensor | None]:
    """As :func:`rmm_linear.packing.gated.apply_gated`."""
    if y.dtype not in TYPES:
        return plain.apply_gated(y, seeds, packed, bits, index)
    rows, columns = len(y) if index is None else len(index), y.shape[1]
    make = y.new_empty if index is None else y.new_zeros
    found = [None if one is None else make(y.shape) for one in packed]
    noise = native.gated_noise(seeds, ROUNDING_STREAM, rows, columns)
    stored = [None if one is None else Packed(*(tensor.contiguous() for tensor in one)) for one in packed]
    native.apply_gated(y.contiguous(), bits, noise, [*stored], None if index is None else index.contiguous(), found)
    return found


PACK_GATED = Operation(
    plain.pack_gated,
    _pack_natively if library.is_available() else None,
    lambda *arguments: [None if one is None else Packed(*one) for one in kernels().pack_gated(*arguments)],
)
APPLY_GATED = Operation(
    plain.apply_gated,
    _apply_natively if library.is_available() else None,
    lambda *arguments: kernels().apply_gated(*arguments),
)


def stored_parts(rows: int, columns: int, bits: int, count: int) -> list[Part]:
    """Return what a gated MLP saves.

    Args:
        rows: Rows that are stored.
        columns: C.
        bits: 8, 4 or 2.
        count: How many of the two products are stored.

    Returns:
        Shapes and dtypes of the two seeds, and of codes and qparams of each product.
    """
    codes: Part = ((rows, (columns * bits + 7) // 8), torch.uint8)
    qparams: Part = ((rows, (columns + GROUP - 1) // GROUP, 2), torch.bfloat16)
    return [_SEEDS, *[codes, qparams] * count]


def check_factors(a: Tensor, b: Tensor) -> None:
    """Refuse two factors of which one cannot be read as the other, as the C library and the kernels do.

    Args:
        a: The gate's output.
        b: What act(a) is multiplied by.

    Raises:
        ValueError: If dtypes or shapes differ.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        got = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        raise ValueError(
            f"a and b must have one dtype and one shape, got {got}. Cast b with b.to(a.dtype), and b.expand_as(a)."
        )


@operator("keep_gated")
def keep_gated(
    a: Tensor,
    b: Tensor,
    activation: str,
    bits: int,
    seed: int | None,
    index: Tensor | None,
    needs_a: bool,
    needs_b: bool,
) -> Tensor:
    """Make what a gated MLP saves: b · act'(a) and act(a), packed, and their seeds.

    Args:
        a: The gate's output, floating point, shape (N, C).
        b: What act(a) is multiplied by, shape and dtype of ``a``.
        activation: Name of act, one of :data:`rmm_linear.packing.gated.ACTIVATIONS`.
        bits: 8, 4 or 2.
        seed: Seed of the rounding; None draws one.
        index: Rows to store, int64, shape (n,); None for all.
        needs_a: Whether the gradient with respect to ``a`` is needed, and with it b · act'(a).
        needs_b: Whether the gradient with respect to ``b`` is needed, and with it act(a).

    Returns:
        uint8, one dimension: two seeds, then codes and qparams of each product that is needed.

    Raises:
        ValueError: If dtypes or shapes of ``a`` and ``b`` differ.
    """
    check_factors(a, b)
    rows, columns = a.shape[0] if index is None else index.shape[0], a.shape[1]
    parts = stored_parts(rows, columns, bits, needs_a + needs_b)
    stored = empty_stored(a, parts).zero_()
    seeds, *tensors = views(stored, parts)
    fill_seeds(seeds, seed)
    packed = PACK_GATED(a, b, seeds, activation, bits, (needs_a, needs_b), index)
    for view, tensor in zip(tensors, [tensor for one in packed for tensor in one or ()], strict=True):
        view.copy_(tensor)
    return stored


@keep_gated.register_fake
def _(a, b, activation, bits, seed, index, needs_a, needs_b):
    rows = a.shape[0] if index is None else index.shape[0]
    return a.new_empty(stored_bytes(stored_parts(rows, a.shape[1], bits, needs_a + needs_b)), dtype=torch.uint8)


@operator("apply_gated")
def _apply(
    y: Tensor, stored: Tensor, bits: int, index: Tensor | None, needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = y.shape[0] if index is None else index.shape[0], y.shape[1]
    seeds, *tensors = views(stored, stored_parts(rows, columns, bits, needs_a + needs_b))
    pairs = iter([Packed(*tensors[place : place + 2]) for place in range(0, len(tensors), 2)])
    packed = [next(pairs) if needed else None for needed in (needs_a, needs_b)]
    first, second = APPLY_GATED(y, seeds, packed, bits, index)
    return tuple(y.new_empty(0) if one is None else one for one in (first, second))  # pyright: ignore[reportReturnType]


@_apply.register_fake
def _(y, stored, bits, index, needs_a, needs_b):
    return tuple(y.new_empty(y.shape if needed else (0,)) for needed in (needs_a, needs_b))


def apply_gated(
    y: Tensor, stored: Tensor, bits: int, index: Tensor | None, needs_a: bool, needs_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients with respect to a and b from what a gated MLP saved.

    Args:
        y: Gradient with respect to act(a) · b, floating point, shape (N, C).
        stored: Result of :func:`keep_gated`, as the following ones were given to it.
        bits: 8, 4 or 2.
        index: The rows that are stored; all others get zeros.
        needs_a: Whether the gradient with respect to a is needed.
        needs_b: Whether the gradient with respect to b is needed.

    Returns:
        Both gradients, shape (N, C), dtype of ``y``; None for one that is not needed.
    """
    gradients = cast("tuple[Tensor, Tensor]", _apply(y, stored, bits, index, needs_a, needs_b))
    return gradients[0] if needs_a else None, gradients[1] if needs_b else None


def packing_flops(shape: Sequence[int]) -> int:
    """Return the operations that packing both products takes.

    Args:
        shape: Of a.

    Returns:
        Those of two rotations.
    """
    return 2 * 2 * GROUP * math.prod(shape)


@register_flop_formula(torch.ops.rmm_linear.keep_gated)
def _(a: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return packing_flops(a)


@register_flop_formula(torch.ops.rmm_linear.apply_gated)
def _(y: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return 2 * 2 * GROUP * math.prod(y)
