"""Positions in the windows of max pooling in few bits: the operators that make and read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.masks import PACK_MASK
from rmm_linear.packing import pooling as plain
from rmm_linear.packing.pooling import Window

_WINDOW = "SymInt[] size, int[] kernel, int[] stride, int[] padding, int[] dilation"


def _window(*how: Any) -> Window:
    return Window(*map(tuple, how))


def _samples(case: Case) -> Iterator[Call]:
    x = case.matrix().unsqueeze(1)
    yield call(F.max_pool1d(x, 3, 2, 1, return_indices=True)[1], [case.columns], [3], [2], [1], [1])
    if case.columns == 70:
        x = x.unflatten(2, (-1, 10))
        how = [2, 3], [2, 1], [0, 1], [1, 2]
        yield call(F.max_pool2d(x, *how, ceil_mode=True, return_indices=True)[1], [7, 10], *how)


def _unpack_samples(case: Case) -> Iterator[Call]:
    for (indices, *window), _ in _samples(case):
        yield call(pack_positions.function(indices, *window), list(indices.shape), *window)


@operator(
    "pack_positions",
    f"(Tensor indices, {_WINDOW}) -> Tensor",
    samples=_samples,
    flops=lambda indices, *_: 4 * math.prod(indices),
)
def pack_positions(indices, size, kernel, stride, padding, dilation):
    """Store the positions in their windows of int64 indices (…, *outputs): a row of bits for every bit, uint8."""
    window = _window(size, kernel, stride, padding, dilation)
    return PACK_MASK(plain.planes_of(indices, window))


@pack_positions.register_fake
def _(indices, size, kernel, stride, padding, dilation):
    window = _window(size, kernel, stride, padding, dilation)
    return indices.new_empty(window.bits, (indices.numel() + 7) // 8, dtype=torch.uint8)


@operator(
    "unpack_positions",
    f"(Tensor stored, SymInt[] shape, {_WINDOW}) -> Tensor",
    samples=_unpack_samples,
    flops=lambda stored, shape, *_: 4 * math.prod(shape),
)
def unpack_positions(stored, shape, size, kernel, stride, padding, dilation):
    """Return the indices, int64, of a shape, that :func:`pack_positions` has stored."""
    window = _window(size, kernel, stride, padding, dilation)
    return plain.unpack_positions(stored, shape, window)


@unpack_positions.register_fake
def _(stored, shape, size, kernel, stride, padding, dilation):
    return stored.new_empty(shape, dtype=torch.int64)
