"""Cut the rows of a call into slices, and put the slices of its outputs and gradients in their places.

Slices are balanced, and all but the last are multiples of 64 rows long; the last takes the rest. A slice of few rows
would run by other kernels (a matrix and a vector, for one row), and round otherwise. Slices that begin at multiples of
64 make the tail of the last one begin where the tail of the whole product begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rmm_linear._support.distributed import is_dtensor

GRANULE = 64  # rows
_WIDE = 1024  # of narrower rows with more than two leading dimensions, a slice has more


def balanced(rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """Cut rows into slices of about ``size``: where each begins, and how long it is.

    None is longer than ``size``, rounded down to a multiple of 64, and a rest of less than 64 rows.
    """
    granule = min(GRANULE, size)
    units = rows // granule
    count = max(1, math.ceil(units / (size // granule)))
    share, more = divmod(units, count)
    lengths = [granule * (share + (number < more)) for number in range(count)]
    lengths[-1] += rows - sum(lengths)
    begins = [sum(lengths[:number]) for number in range(count)]
    return tuple(zip(begins, lengths, strict=True))


@dataclass(frozen=True)
class RowSlices:
    """The slices of one call."""

    lead: tuple[int, ...]  # the leading dimensions of its main stream, shape (*lead, H)
    # Whether these are one dimension to the slices, whose shape is (1, ..., 1, rows, H); else the last of them is cut
    is_flat: bool
    slices: tuple[tuple[int, int], ...]  # where each slice begins, and how long it is

    @property
    def dim(self) -> int:
        return len(self.lead) - 1

    def sample(self) -> RowSlices:
        """Return three of many slices, which have the peak of all: the first, a later one, and the last."""
        if len(self.slices) <= 3:
            return self
        return replace(self, slices=(*self.slices[:2], self.slices[-1]))

    def kinds(self) -> tuple[RowSlices, tuple[int, ...]]:
        """Return the first slice, the next of each length, and the last; and how many more there are like each."""
        lengths = [length for _, length in self.slices[1:-1]]
        nexts = [self.slices[1 + lengths.index(length)] for length in dict.fromkeys(lengths)]
        more = (0, *(lengths.count(length) - 1 for _, length in nexts), 0)
        return replace(self, slices=(self.slices[0], *nexts, self.slices[-1])), more

    def part_shape(self, length: int) -> tuple[int, ...]:
        return ((1,) * self.dim if self.is_flat else self.lead[:-1]) + (length,)

    def part(self, whole: Tensor, begin: int, length: int) -> Tensor:
        """Return a slice of a stream, of an output or of its gradient; a view where the memory allows it."""
        rest = self._rest(whole)
        if self.is_flat:
            cut = whole.reshape(-1, *rest).narrow(0, begin, length)
        else:
            cut = whole.reshape(*self.lead, *rest).narrow(self.dim, begin, length)
        return cut.reshape(*(self.part_shape(length) if self._has_lead(whole) else (-1,)), *rest)

    def whole_like(self, part: Tensor, length: int) -> Tensor:
        """Make the whole output, of which ``part`` is a slice of some length."""
        shape, count, lead = part.shape, len(self.lead), self.part_shape(length)
        if shape[:count] == lead:
            return part.new_empty((*self.lead, *shape[count:]))
        if shape[:1] == (math.prod(lead),):  # of modules that return matrices, whatever they are given
            return part.new_empty((math.prod(self.lead), *shape[1:]))
        raise RuntimeError(
            f"A tile must return a row for every row that it is given, got an output of shape {tuple(shape)} for a "
            f"slice of shape {(*lead, '...')}. Leave the module out of modules=."
        )

    def place(self, whole: Tensor, part: Tensor, begin: int, length: int) -> None:
        """Copy a slice to its place in the whole, which is contiguous."""
        rest = self._rest(whole)
        if self.is_flat:
            whole.view(-1, *rest).narrow(0, begin, length).copy_(part.reshape(length, *rest))
        else:
            place = whole.view(*self.lead, *rest).narrow(self.dim, begin, length)
            place.copy_(part.reshape(place.shape))

    def as_rows(self, gradient: Tensor) -> Tensor:
        """Prepare a gradient of a whole output for :meth:`part`: copied once where slices of it are no views."""
        is_view = is_flat(gradient, self.dim + 1) if self.is_flat else self._has_lead(gradient)
        return gradient if is_view else gradient.contiguous()

    def _rest(self, whole: Tensor) -> torch.Size:
        return whole.shape[len(self.lead) if self._has_lead(whole) else 1 :]

    def _has_lead(self, whole: Tensor) -> bool:
        return tuple(whole.shape[: len(self.lead)]) == self.lead


@dataclass(frozen=True)
class Streams:
    """Which of a call's tensors are cut."""

    cut: RowSlices  # the slices
    streams: tuple[int, ...]  # numbers of the leaves that have the rows
    others: tuple[int, ...]  # numbers of the other tensors, which every slice gets as they are


def streams_of(leaves: Sequence[Any], rows: int) -> Streams | str | None:
    """Choose the slices of a call: None if there are no more rows than one has, or why the call cannot be cut."""
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    main = next((leaves[n] for n in tensors if leaves[n].dim() > 1 and leaves[n].is_floating_point()), None)
    if main is None or not main.numel():
        return None
    if main.dim() > 3:  # of heads, or of images: rows are many, and narrow
        rows *= max(1, _WIDE // main.shape[-1])
    if main.shape[:-1].numel() <= rows:
        return None
    if any(leaves[n].layout != torch.strided or leaves[n].is_nested or is_dtensor(leaves[n]) for n in tensors):
        return "takes sparse, nested or distributed tensors"
    lead = tuple(main.shape[:-1])
    streams = tuple(n for n in tensors if tuple(leaves[n].shape[: len(lead)]) == lead)
    others = tuple(n for n in tensors if n not in streams)
    if any(size > 1 and size in (lead[-1], math.prod(lead)) for n in others for size in leaves[n].shape[:-1]):
        return "takes a tensor whose rows belong to positions, but not to those of each sequence"
    by_batch = math.prod(lead[:-1]) > 1 and any(size > 1 for n in others for size in leaves[n].shape[:-1])
    flat = not by_batch and all(is_flat(leaves[n], len(lead)) for n in streams)
    size = rows if flat else max(1, rows // math.prod(lead[:-1]))
    slices = balanced(math.prod(lead) if flat else lead[-1], size)
    return Streams(RowSlices(lead, flat, slices), streams, others) if len(slices) > 1 else None


def is_flat(tensor: Tensor, count: int) -> bool:
    """Say whether the first dimensions of a tensor are one in its memory."""
    dims = [(size, step) for size, step in zip(tensor.shape[:count], tensor.stride(), strict=False) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(dims))
