"""Which element of its window max pooling has taken, in as few bits as the window needs: exact.

PyTorch's index of an element counts those of the whole input plane. Less the index of the window's corner, which
follows from the output's place and may lie in the padding, it is one of as many numbers as the window has elements, and
the position among them takes ⌈log₂ of their number⌉ bits: 4 for 3 × 3, 2 for 2 × 2, where PyTorch saves 64, and the
input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear._support.layouts import LAST, is_channels_last
from rmm_linear.packing.masks import pack_mask

_backward_2d = torch.ops.aten.max_pool2d_with_indices_backward.default
_backward_3d = torch.ops.aten.max_pool3d_with_indices_backward.default
_MOST = 256  # elements of a window: positions are bytes before they are packed


class Window(NamedTuple):
    """The window of a pool over some dimensions."""

    size: tuple[int, ...]  # of the input plane
    kernel: tuple[int, ...]  # elements of the window, by dimension
    stride: tuple[int, ...]  # steps from one window to the next
    padding: tuple[int, ...]  # of the input plane, before it
    dilation: tuple[int, ...]  # steps from one element of a window to the next

    @property
    def plane(self) -> Window:
        """The same of two dimensions: one is a plane of one row."""
        if len(self.size) > 1:
            return self
        return Window(*((first, *one) for one, first in zip(self, (1, 1, 1, 0, 1), strict=True)))

    @property
    def bits(self) -> int:
        """Bits of a position, at least one.

        Example:
            >>> Window((8, 8), (3, 3), (2, 2), (1, 1), (1, 1)).bits
            4
        """
        return max(1, (math.prod(self.kernel) - 1).bit_length())

    @property
    def is_distinct(self) -> bool:
        """Whether an index tells the position: no window is wider than the plane, nor has elements of padding alone.

        False too for windows that PyTorch refuses.
        """
        reach = ((k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True))
        is_valid = min(*self.kernel, *self.stride, *self.dilation) > 0 and math.prod(self.kernel) <= _MOST
        sides = zip(reach, self.size, self.padding, strict=True)
        return is_valid and all(one < s and 0 <= 2 * p <= one + 1 for one, s, p in sides)

    def outputs(self, ceil_mode: bool) -> tuple[int, ...]:
        """Return the sizes of the outputs' plane; the last window begins before the padding behind the input."""
        sizes = []
        for s, k, step, p, d in zip(*self, strict=True):
            left = s + 2 * p - (k - 1) * d - 1
            count = (left + (step - 1 if ceil_mode else 0)) // step + 1
            sizes.append(count - (ceil_mode and (count - 1) * step >= s + p))
        return tuple(sizes)

    def corners(self, outputs: Sequence[int], device: torch.device) -> Tensor:
        """Return the index of the first element of each window, int64, of the shape of the outputs' plane."""
        steps = zip(outputs, self.stride, self.padding, strict=True)
        return _summed([torch.arange(o, device=device) * s - p for o, s, p in steps], self.size)

    def offsets(self, device: torch.device) -> Tensor:
        """Return the index of each element of a window less that of the first, int64, one dimension."""
        steps = zip(self.kernel, self.dilation, strict=True)
        return _summed([torch.arange(k, device=device) * d for k, d in steps], self.size).flatten()


def _summed(places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Return the indices in a plane of places along its dimensions."""
    total = places[0]
    for place, length in zip(places[1:], size[1:], strict=True):
        total = total.unsqueeze(-1) * length + place
    return total


def max_pool(x: Tensor, window: Window, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """Pool an input (…, *size), and store the bits of each position, uint8 (bits, ⌈outputs / 8⌉), in memory's order.

    Example:
        >>> max_pool(torch.tensor([[1.0, 5.0, 7.0, 2.0]]), Window((4,), (2,), (2,), (0,), (1,)), False)
        (tensor([[5., 7.]]), tensor([[1]], dtype=torch.uint8))
    """
    run = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(window.size) - 1]
    output, indices = run(x, *window[1:], ceil_mode=ceil_mode, return_indices=True)
    offsets = window.offsets(indices.device)
    steps = [math.prod(window.size[axis + 1 :]) for axis in range(len(window.size))]
    last = sum((k - 1) * d * step for k, d, step in zip(window.kernel, window.dilation, steps, strict=True))
    table = torch.zeros(last + 1, dtype=torch.uint8, device=indices.device)
    table[offsets] = torch.arange(len(offsets), device=indices.device).to(torch.uint8)
    inside = indices - window.corners(indices.shape[-len(window.size) :], indices.device)
    inside = inside.movedim(1, -1) if is_channels_last(x) else inside
    places = torch.arange(window.bits, dtype=torch.uint8, device=indices.device).unsqueeze(1)
    return output, pack_mask((table[inside].flatten() >> places) & 1)


def max_pool_backward(y: Tensor, stored: Tensor, window: Window, ceil_mode: bool, is_last: bool) -> Tensor:
    """Return dX, with channels last if the input was ``is_last``, from dY and the bits of :func:`max_pool`.

    Example:
        >>> stored = torch.tensor([[1]], dtype=torch.uint8)
        >>> max_pool_backward(torch.ones(1, 2), stored, Window((4,), (2,), (2,), (0,), (1,)), False, False)
        tensor([[0., 1., 1., 0.]])
    """
    eight = torch.arange(8, dtype=torch.uint8, device=stored.device)
    positions = torch.zeros(8 * stored.shape[1], dtype=torch.uint8, device=stored.device)
    for place, plane in enumerate(stored):
        positions |= (((plane.unsqueeze(1) >> eight) & 1) << place).flatten()
    inside = window.offsets(stored.device)[positions[: y.numel()].int()]
    shape = (y.shape[0], *y.shape[2:], y.shape[1]) if is_last else y.shape
    inside = inside.view(shape).movedim(-1, 1) if is_last else inside.view(shape)
    indices = inside + window.corners(y.shape[-len(window.size) :], stored.device)
    like, how = empty_input(y, window, is_last), list(map(list, window[1:]))  # whose shape and memory format are read
    if len(window.size) == 1:
        how = [[first, *one] for first, one in zip((1, 1, 0, 1), how, strict=True)]
        y, like, indices = (one.unsqueeze(-2) for one in (y, like, indices))
    found = (_backward_3d if len(window.size) == 3 else _backward_2d)(y, like, *how, ceil_mode, indices)
    return found.squeeze(-2) if len(window.size) == 1 else found


def empty_input(y: Tensor, window: Window, is_last: bool) -> Tensor:
    """Return an uninitialized input for the gradient of an output."""
    shape = *y.shape[: y.dim() - len(window.size)], *window.size
    like = LAST[len(shape)] if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=like)
