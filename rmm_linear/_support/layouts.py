"""Tell tensors that are a grid of numbers from others, and how they lie in memory."""

from __future__ import annotations

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
        if torch.compiler.is_compiling():  # which sorts no strides, and would fix the sizes of a divisor
            order = _channels_last(x) or tuple(range(x.dim()))
            shape = tuple(x.shape[i] for i in order)
            columns = math.prod(shape[1:])
        else:
            order = tuple(sorted(range(x.dim()), key=lambda i: -x.stride(i)))
            shape = tuple(x.shape[i] for i in order)
            columns = math.gcd(math.prod(shape), _MOST)
            columns = columns if columns >= _LEAST else math.prod(shape[1:])
        return cls(order, shape, math.prod(shape) // max(columns, 1), columns)

    def matrix(self, x: Tensor) -> Tensor:
        """Return the elements of a tensor as rows, a view where its memory has no gaps."""
        return x.permute(self.order).reshape(self.rows, self.columns)

    def tensor(self, matrix: Tensor) -> Tensor:
        """Return the tensor of a new :meth:`matrix`; mostly as no view of it, so that gradients are added in place."""
        if self.order == tuple(range(len(self.order))):
            return as_shape(matrix, self.shape)
        return permuted(as_shape(matrix, self.shape), sorted(range(len(self.order)), key=self.order.__getitem__))


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a new tensor with its dimensions in another order; mostly as no view of it."""
    made = x.permute(tuple(order))
    return made if torch.compiler.is_compiling() else made.data


def _channels_last(x: Tensor) -> tuple[int, ...] | None:
    """Return the order of the dimensions of images whose channels are side by side in memory."""
    return (0, *range(2, x.dim()), 1) if is_channels_last(x) else None
