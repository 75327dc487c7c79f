"""Max pooling whose gradient reads the position of each maximum in its window, in few bits: the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear._support.layouts import LAST
from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.masks import PACK_MASK
from rmm_linear.ops.native import pooling as native
from rmm_linear.packing import pooling as plain
from rmm_linear.packing.pooling import Window

_WINDOW = "SymInt[] size, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_POOLS = F.max_pool1d, F.max_pool2d, F.max_pool3d
_backward_2d = torch.ops.aten.max_pool2d_with_indices_backward.default
_backward_3d = torch.ops.aten.max_pool3d_with_indices_backward.default


def _window(*how: Any) -> Window:
    return Window(*map(tuple, how))


def _samples(case: Case) -> Iterator[Call]:
    if not case.columns:
        return
    x = case.matrix().unsqueeze(1)
    yield call(x.contiguous(), [case.columns], [3], [2], [1], [1], False)
    if case.columns == 70:
        x = x.unflatten(2, (2, 5, 7)).squeeze(1)  # several channels
        yield call(x.contiguous(), [5, 7], [2, 3], [2, 1], [0, 1], [1, 2], True)
        yield call(x.contiguous(memory_format=torch.channels_last), [5, 7], [3, 3], [2, 2], [1, 1], [1, 1], False)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (x, *window), _ in _samples(case):
        y, stored = max_pool.function(x, *window)
        yield call(y, stored, *window, not x.is_contiguous())


def _flops(x: Any, *_: Any) -> int:
    return 4 * math.prod(x)


@operator(
    "max_pool",
    f"(Tensor x, {_WINDOW}) -> (Tensor, Tensor)",
    samples=_samples,
    flops=_flops,
    native=native.max_pool,
)
def max_pool(x, size, kernel, stride, padding, dilation, ceil_mode):
    """Pool an input (…, *size), and store which element of its window each output is: a row of bits for every bit."""
    window = _window(size, kernel, stride, padding, dilation)
    output, indices = _POOLS[len(size) - 1](x, *window[1:], ceil_mode=ceil_mode, return_indices=True)
    return output, PACK_MASK(plain.planes_of(indices, window))


@max_pool.register_fake
def _(x, size, kernel, stride, padding, dilation, ceil_mode):
    window = _window(size, kernel, stride, padding, dilation)
    output, _ = _POOLS[len(size) - 1](x, *window[1:], ceil_mode=ceil_mode, return_indices=True)
    return output, x.new_empty(window.bits, (output.numel() + 7) // 8, dtype=torch.uint8)


@operator(
    "max_pool_backward",
    f"(Tensor y, Tensor stored, {_WINDOW}, bool is_last) -> Tensor",
    samples=_backward_samples,
    flops=_flops,
    native=native.max_pool_backward,
)
def max_pool_backward(y, stored, size, kernel, stride, padding, dilation, ceil_mode, is_last):
    """Return dX, in ``channels_last`` if ``is_last``, from dY and what :func:`max_pool` has stored."""
    window = _window(size, kernel, stride, padding, dilation)
    indices = plain.unpack_positions(stored, y.shape, window)
    like, how = _like(y, size, is_last), list(map(list, window[1:]))  # whose shape and memory format are read
    if len(size) == 1:
        how = [[first, *one] for first, one in zip((1, 1, 0, 1), how, strict=True)]
        y, like, indices = (one.unsqueeze(-2) for one in (y, like, indices))
    found = (_backward_3d if len(size) == 3 else _backward_2d)(y, like, *how, ceil_mode, indices)
    return found.squeeze(-2) if len(size) == 1 else found


@max_pool_backward.register_fake
def _(y, stored, size, kernel, stride, padding, dilation, ceil_mode, is_last):
    return _like(y, size, is_last)


def _like(y: Tensor, size: Any, is_last: bool) -> Tensor:
    shape = *y.shape[: y.dim() - len(size)], *size
    like = LAST[len(shape)] if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=like)
