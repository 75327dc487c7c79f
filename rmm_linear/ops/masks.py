"""Masks of zeros in one bit per element, as dropout saves them, and the operators that make and apply them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends.native import masks as native
from rmm_linear.backends.native.library import TYPES
from rmm_linear.backends.triton import kernels
from rmm_linear.ops.operator import operator
from rmm_linear.ops.table import Operation
from rmm_linear.packing import masks as plain


def _apply_natively(y: Tensor, bits: Tensor, scale: float, index: Tensor | None = None) -> Tensor:
    return (native if y.dtype in TYPES else plain).apply_mask(y, bits, scale, index)


PACK_MASK = Operation(plain.pack_mask, native.pack_mask, lambda mask, index=None: kernels().pack_mask(mask, index))
APPLY_MASK = Operation(
    plain.apply_mask,
    _apply_natively,
    lambda y, bits, scale, index=None: kernels().apply_mask(y, bits, scale, index),
)


@operator("pack_mask")
def pack_mask(mask: Tensor, index: Tensor | None) -> Tensor:
    """Store which elements are not zero, in one bit each.

    Args:
        mask: Shape (N, C), any dtype.
        index: Rows to store, int64, shape (n,); None for all.

    Returns:
        uint8, shape (n, ⌈C / 8⌉).
    """
    return PACK_MASK(mask, index)


@pack_mask.register_fake
def _(mask, index):
    rows = mask.shape[0] if index is None else index.shape[0]
    return mask.new_empty(rows, (mask.shape[1] + 7) // 8, dtype=torch.uint8)


@operator("apply_mask")
def apply_mask(y: Tensor, bits: Tensor, scale: float, index: Tensor | None) -> Tensor:
    """Multiply the stored elements by a number, and set all others to zero.

    Args:
        y: Floating point, shape (N, C).
        bits: Result of :func:`pack_mask`.
        scale: The number.
        index: The rows that are stored; None for all.

    Returns:
        Shape (N, C), dtype of ``y``, contiguous.
    """
    return APPLY_MASK(y, bits, scale, index).contiguous()


@apply_mask.register_fake
def _(y, bits, scale, index):
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.rmm_linear.pack_mask)
def _(mask: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return math.prod(mask)


@register_flop_formula(torch.ops.rmm_linear.apply_mask)
def _(y: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return math.prod(y)
