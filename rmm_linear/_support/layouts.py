"""Tell tensors that are a grid of numbers from others, and how they lie in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_MOST, _LEAST = 1024, 64  # columns: whole groups of any code, each with a random number of its own
as_shape = torch.ops.aten._unsafe_view.default  # a new tensor's .view that is no view: gradients are added in place


def is_dense(tensor: Any) -> bool:
    """Say whether something is a tensor that has rows that can be coded: it is neither sparse nor nested."""
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_nested


def is_channels_last(x: Tensor) -> bool:
    """Say whether the channels of a position lie side by side in memory, and not the positions of a channel."""
    return x.dim() in LAST and not x.is_contiguous() and x.is_contiguous(memory_format=LAST[x.dim()])


class MemoryLayout(NamedTuple):
    """How a tensor lies in memory, and the matrix that is made of it: no element moves."""

    order: tuple[int, ...]  # its dimensions, the one with the largest strides first
    shape: tuple[int, ...]  # their sizes, in this order
    rows: int
    columns: int

    @classmethod
    def of(cls, x: Tensor) -> MemoryLayout:
        """Return the layout of a tensor.

        What is side by side in a row is so in memory: pixels of one channel, or with ``channels_last`` channels of one
        pixel. Rows are long, as a few elements by themselves take as long to encode as many.
        """
        if not torch.compiler.is_compiling():
            known = _of if type(x) is Tensor else _of.__wrapped__  # sizes of others may be symbols
            return known(tuple(x.shape), x.stride())
        order = _channels_last(x) or tuple(range(x.dim()))  # a compiler sorts no strides
        shape = tuple(x.shape[i] for i in order)
        columns = math.prod(shape[1:])  # and would fix the sizes of a divisor
        return cls(order, shape, math.prod(shape) // max(columns, 1), columns)

    def matrix(self, x: Tensor) -> Tensor:
        """Return the elements of a tensor as rows, a view where its memory has no gaps."""
        x = x if _inverse(self.order) is None else x.permute(self.order)
        return x.reshape(self.rows, self.columns)

    def tensor(self, matrix: Tensor) -> Tensor:
        """Return the tensor of a new :meth:`matrix`; mostly as no view of it, so that gradients are added in place."""
        made, inverse = as_shape(matrix, self.shape), _inverse(self.order)
        return made if inverse is None else permuted(made, inverse)


@functools.lru_cache(maxsize=4096)
def _of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> MemoryLayout:
    order = tuple(sorted(range(len(sizes)), key=lambda i: -strides[i]))
    shape = tuple(sizes[i] for i in order)
    columns = math.gcd(math.prod(shape), _MOST)
    columns = columns if columns >= _LEAST else math.prod(shape[1:])
    return MemoryLayout(order, shape, math.prod(shape) // max(columns, 1), columns)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order that undoes one; None for one that changes nothing."""
    return (_inverted if torch.compiler.is_compiling() else _cached)(order)  # a compiler warns of caches


def _inverted(order: tuple[int, ...]) -> tuple[int, ...] | None:
    found = tuple(sorted(range(len(order)), key=order.__getitem__))
    return None if found == order == tuple(range(len(order))) else found


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a new tensor with its dimensions in another order; mostly as no view of it."""
    made = x.permute(tuple(order))
    return made if torch.compiler.is_compiling() else made.data


def _channels_last(x: Tensor) -> tuple[int, ...] | None:
    """Return the order of the dimensions of images whose channels are side by side in memory."""
    return (0, *range(2, x.dim()), 1) if is_channels_last(x) else None


_cached = functools.lru_cache(maxsize=64)(_inverted)
