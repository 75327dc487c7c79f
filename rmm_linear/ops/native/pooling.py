"""Max pooling in one and two dimensions with the C library, of float32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear._support.layouts import is_channels_last
from rmm_linear.backends.native.library import run, threads
from rmm_linear.packing.pooling import Window


@functools.lru_cache(maxsize=1024)
def _sizes(planes: tuple[int, int], window: Window, outputs: tuple[int, ...], is_last: bool) -> Any:
    size, *how = window.plane
    numbers = *planes, *size, *(1, *outputs)[-2:], *(one for pair in how for one in pair), is_last
    return (ctypes.c_int64 * len(numbers))(*numbers)


def max_pool(
    x: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Any:
    """Return what :func:`rmm_linear.ops.pooling.max_pool` does."""
    window = Window(*map(tuple, (size, kernel, stride, padding, dilation)))
    if x.dtype != torch.float32 or len(size) > 2:
        return NotImplemented
    is_last, outputs = is_channels_last(x), window.outputs(ceil_mode)
    x = x if is_last else x.contiguous()
    like = torch.channels_last if is_last else torch.contiguous_format
    out = torch.empty((*x.shape[: -len(size)], *outputs), dtype=x.dtype, device=x.device, memory_format=like)
    stored = x.new_empty(window.bits, (out.numel() + 7) // 8, dtype=torch.uint8)
    sizes = _sizes(_planes(out, is_last, len(size)), window, outputs, is_last)
    run("rmm_max_pool", x.data_ptr(), sizes, window.bits, out.data_ptr(), stored.data_ptr(), threads(x))
    return out, stored


def max_pool_backward(
    y: Tensor,
    stored: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    is_last: bool,
) -> Any:
    """Return what :func:`rmm_linear.ops.pooling.max_pool_backward` does."""
    window = Window(*map(tuple, (size, kernel, stride, padding, dilation)))
    if y.dtype != torch.float32 or len(size) > 2:
        return NotImplemented
    like = torch.channels_last if is_last else torch.contiguous_format
    y, outputs = y.contiguous(memory_format=like), tuple(y.shape[-len(size) :])
    x = torch.empty((*y.shape[: -len(size)], *size), dtype=y.dtype, device=y.device, memory_format=like)
    sizes = _sizes(_planes(y, is_last, len(size)), window, outputs, is_last)
    run("rmm_max_pool_backward", y.data_ptr(), sizes, window.bits, stored.data_ptr(), x.data_ptr(), threads(x))
    return x


def _planes(x: Tensor, is_last: bool, dims: int) -> tuple[int, int]:
    """Return samples and channels of an input; without channels last, all planes are alike."""
    return (x.shape[0], x.shape[1]) if is_last else (x.shape[: x.dim() - dims].numel(), 1)
