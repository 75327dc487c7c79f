"""Masks of dropout, in one bit per element or drawn again from a seed, and the operators that make and apply them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import FLOATS, Call, Case, call, operation, operator
from rmm_linear.ops.native import masks as native
from rmm_linear.packing import masks as plain


def _pack_samples(case: Case) -> Iterator[Call]:
    x = case.matrix()
    for mask in (x.relu(), x > 0, (x > 0).byte()):
        yield call(mask, case.index)


def _apply_samples(case: Case) -> Iterator[Call]:
    y = case.matrix()
    yield call(y, plain.pack_mask(y > 0, case.index), 1.25, case.index)


def _dropout_samples(case: Case) -> Iterator[Call]:
    for p in (0.1, 0.75):
        yield call(case.matrix(), case.seeds, p)


PACK_MASK = operation(
    "PACK_MASK", plain.pack_mask, native.pack_mask, triton.pack_mask, _pack_samples, native_dtypes=FLOATS
)
APPLY_MASK = operation("APPLY_MASK", plain.apply_mask, native.apply_mask, triton.apply_mask, _apply_samples)
DROPOUT = operation("DROPOUT", plain.dropout, None, triton.dropout, _dropout_samples)


@operator(
    "pack_mask",
    samples=_pack_samples,
    flops=lambda mask, *_: math.prod(mask),
    native=native.pack_mask,
    is_repeated=True,
)
def pack_mask(mask: Tensor, index: Tensor | None) -> Tensor:
    """Store which elements of a matrix (N, C) are not zero, in one bit each, of all rows or those of an index."""
    return PACK_MASK(mask, index)


@pack_mask.register_fake
def _(mask, index):
    rows = mask.shape[0] if index is None else index.shape[0]
    return mask.new_empty(rows, (mask.shape[1] + 7) // 8, dtype=torch.uint8)


@operator(
    "apply_mask", samples=_apply_samples, flops=lambda y, *_: math.prod(y), native=native.apply_mask, is_repeated=True
)
def apply_mask(y: Tensor, bits: Tensor, scale: float, index: Tensor | None) -> Tensor:
    """Multiply the stored elements by a number, and set all others to zero."""
    return APPLY_MASK(y, bits, scale, index).contiguous()


@apply_mask.register_fake
def _(y, bits, scale, index):
    return y.new_empty(y.shape)


@operator("dropout", samples=_dropout_samples, flops=lambda x, *_: math.prod(x))
def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Set elements to zero with probability p, 0 < p < 1, and scale the others; the same ones for the same seed.

    seed: int64, shape (1,). Returns a contiguous tensor. It is linear in x, so a gradient is dropped by it as well.
    """
    return DROPOUT(x, seed, p)


@dropout.register_fake
def _(x, seed, p):
    return x.new_empty(x.shape)
