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

from rmm_linear.packing.masks import pack_mask

_MOST = 256  # elements of a window: positions are bytes before they are packed


class Window(NamedTuple):
    """The window of a pool over some dimensions.

    Attributes:
        size: Of the input plane.
        kernel: Elements of the window, by dimension.
        stride: Steps from one window to the next.
        padding: Of the input plane, before it.
        dilation: Steps from one element of a window to the next.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

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


def planes_of(indices: Tensor, window: Window) -> Tensor:
    """Return the bits of the positions of indices (…, *outputs) as masks, uint8, shape (bits, n)."""
    offsets = window.offsets(indices.device)
    steps = [math.prod(window.size[axis + 1 :]) for axis in range(len(window.size))]
    last = sum((k - 1) * d * step for k, d, step in zip(window.kernel, window.dilation, steps, strict=True))
    table = torch.zeros(last + 1, dtype=torch.uint8, device=indices.device)
    table[offsets] = torch.arange(len(offsets), device=indices.device).to(torch.uint8)
    inside = indices - window.corners(indices.shape[-len(window.size) :], indices.device)
    places = torch.arange(window.bits, dtype=torch.uint8, device=indices.device).unsqueeze(1)
    return (table[inside].flatten() >> places) & 1


def pack_positions(indices: Tensor, window: Window) -> Tensor:
    """Store the positions in their windows of int64 indices (…, *outputs): a row of bits for every bit, uint8.

    Example:
        >>> window = Window((4,), (2,), (2,), (0,), (1,))
        >>> pack_positions(torch.tensor([1, 2]), window)
        tensor([[1]], dtype=torch.uint8)
    """
    return pack_mask(planes_of(indices, window))


def unpack_positions(stored: Tensor, shape: Sequence[int], window: Window) -> Tensor:
    """Return the indices, int64, of a shape, that :func:`pack_positions` has stored.

    Example:
        >>> unpack_positions(torch.tensor([[1]], dtype=torch.uint8), (2,), Window((4,), (2,), (2,), (0,), (1,)))
        tensor([1, 2])
    """
    eight = torch.arange(8, dtype=torch.uint8, device=stored.device)
    positions = torch.zeros(8 * stored.shape[1], dtype=torch.uint8, device=stored.device)
    for place, plane in enumerate(stored):
        positions |= (((plane.unsqueeze(1) >> eight) & 1) << place).flatten()
    found = window.offsets(stored.device)[positions[: math.prod(shape)].int()].view(shape)
    return found + window.corners(shape[-len(window.size) :], stored.device)
