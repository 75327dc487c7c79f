"""Max pooling whose gradient reads the position of each maximum in its window, in few bits: the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import Call, Case, call, operation, operator
from rmm_linear.ops.native import pooling as native
from rmm_linear.packing import pooling as plain
from rmm_linear.packing.pooling import Window

_WINDOW = "SymInt[] size, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_POOLS = F.max_pool1d, F.max_pool2d, F.max_pool3d


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


def _pool_samples(case: Case) -> Iterator[Call]:
    for (x, *window, ceil_mode), _ in _samples(case):
        yield call(x, _window(*window), ceil_mode)


def _spread_samples(case: Case) -> Iterator[Call]:
    for (y, stored, *window, ceil_mode, is_last), _ in _backward_samples(case):
        yield call(y, stored, _window(*window), ceil_mode, is_last)


def _flops(x: Any, *_: Any) -> int:
    return 4 * math.prod(x)


MAX_POOL = operation("MAX_POOL", plain.max_pool, None, triton.max_pool, _pool_samples, by_row=False)
MAX_POOL_BACKWARD = operation(
    "MAX_POOL_BACKWARD", plain.max_pool_backward, None, triton.max_pool_backward, _spread_samples, by_row=False
)


@operator(
    "max_pool",
    f"(Tensor x, {_WINDOW}) -> (Tensor, Tensor)",
    samples=_samples,
    flops=_flops,
    native=native.max_pool,
)
def max_pool(x, size, kernel, stride, padding, dilation, ceil_mode):
    """Pool an input (…, *size), and store which element of its window each output is: a row of bits for every bit."""
    return MAX_POOL(x, _window(size, kernel, stride, padding, dilation), ceil_mode)


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
    return MAX_POOL_BACKWARD(y, stored, _window(size, kernel, stride, padding, dilation), ceil_mode, is_last)


@max_pool_backward.register_fake
def _(y, stored, size, kernel, stride, padding, dilation, ceil_mode, is_last):
    return plain.empty_input(y, _window(size, kernel, stride, padding, dilation), is_last)
