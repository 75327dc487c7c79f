"""Divide a region's call into slices of its sequences, where a replay of all would take more memory than it saves.

A replay makes what the exact module saves, some tensors as large as the scores, for all sequences at once. Attention
does not mix sequences, so that the replay can run for some of them at a time: what has the sequences first is narrowed,
gradients with respect to all else are summed. It is not divided where the module draws random numbers, which cannot be
drawn again in parts, nor where the first call has shown that the gradients are not the same, or that the code does not
run, as with sequences in another dimension.

Rule: the first call counts the bytes that a replay saves for autograd. They grow with the number of sequences, and with
their length at most squared. There are as few slices as keep them below the largest of twice the bytes of the sources'
outputs, 128 MiB, and a 128th of a GPU's memory, where kernels would take less time than their launches. There are four
at most: the forward pass runs whole and holds some tensors of the size of the scores, so that more slices would take
time without lowering the peak of a step. A slice has a sequence at least.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLE = 2  # of the bytes of the sources' outputs, a slice's at most
_MOST = 4  # slices
_LEAST = 128 * 2**20  # bytes of a slice, below which nothing is divided
_SHARE = 128  # of a GPU's memory, the same
DRAWS = "random numbers are drawn between its linear layers"
Place = tuple[int | str, int]  # an argument, and a leaf of it
Shape = Sequence[int]


@dataclass(frozen=True)
class Part:
    """Some of the sequences. ratio: How many rows of a tensor belong to each; 0 if it has no sequences."""

    start: int = 0
    size: int = 0
    total: int = 0  # 0: this is all of them

    def of(self, tensor: Tensor, ratio: int) -> Tensor:
        """Return the rows that belong to the sequences."""
        return tensor.narrow(0, self.start * ratio, self.size * ratio) if self.total and ratio else tensor

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of these rows, of a tensor that has the sequences first."""
        if not self.total:
            return shape
        return torch.Size((shape[0] // self.total * self.size, *shape[1:]))


@dataclass(frozen=True)
class Cut:
    """How one call is divided: the number of slices, of sequences, and the ratios of sources and leaves."""

    count: int
    total: int
    sources: tuple[int, ...]
    leaves: dict[Place, int]

    def source(self, place: int) -> int:
        return self.sources[place] if self.total else 0

    def parts(self) -> list[Part]:
        """Return slices of the same size, but the last."""
        if not self.total:
            return [Part()]
        size = -(-self.total // self.count)
        return [Part(start, min(size, self.total - start), self.total) for start in range(0, self.total, size)]


WHOLE = Cut(1, 0, (), {})


@dataclass(frozen=True)
class Slices:
    """What the first call has shown: what a replay saves, and which tensors have the sequences first."""

    saved: float  # bytes that a replay saves for a sequence
    longest: int  # rows of the longest source of a sequence
    pairs: int  # the same times the rows of the shortest, as scores have
    ratios: dict[Place, tuple[int, int]]  # of the leaves of arguments: number of dimensions and ratio
    is_wide: bool = False  # whether tensors with a multiple of the sequences first are narrowed, as (B·h, …)
    reason: str | None = None  # why calls are not divided; None if they are

    def count(self, shapes: Sequence[Shape], itemsize: int, device: torch.device) -> int:
        """Return the number of slices that a call needs; shapes: of the sources' outputs."""
        total, longest, pairs = sizes(shapes)
        saved = self.saved * max(longest / self.longest, pairs / self.pairs)
        limit = max(_LEAST, memory_of(device) // _SHARE, _MULTIPLE * itemsize * sum(map(math.prod, shapes)))
        return min(_MOST, -(-total // max(1, int(limit / max(saved, 1.0)))))

    def cut(self, count: int, shapes: Sequence[Shape], leaves: dict[Place, Shape]) -> Cut | None:
        """Divide a call; None where its arguments are not those of the first call, so that it is not known how."""
        total = sizes(shapes)[0]
        found: dict[Place, int] = {}
        for place, shape in leaves.items():
            rank, ratio = self.ratios.get(place, (-1, 0))
            if rank != len(shape) or (ratio and shape[0] not in (1, ratio * total)):
                return None
            found[place] = ratio if ratio and shape[0] == ratio * total else 0
        sources = tuple(ratio_of(shape, total, is_wide=self.is_wide) for shape in shapes)
        return Cut(min(count, total), total, sources, found)


@functools.cache
def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU; 0 for other devices, and those that are simulated."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if is_there else 0


def sizes(shapes: Sequence[Shape]) -> tuple[int, int, int]:
    """Return the number of sequences, the rows of the longest source, and those times the rows of the shortest."""
    total = shapes[0][0] if len(shapes[0]) > 2 else 1
    rows = [math.prod(shape[1:-1]) for shape in shapes if len(shape) > 2 and shape[0] == total] or [1]
    return total, max(rows), max(rows) * min(rows)


def ratio_of(shape: Shape, total: int, *, is_wide: bool) -> int:
    """Return how many rows belong to each sequence; 0 if the tensor does not have them first."""
    if not shape or not total or shape[0] % total:
        return 0
    ratio = shape[0] // total
    return ratio if is_wide or ratio == 1 else 0


def guesses(saved: float, shapes: Sequence[Shape], leaves: dict[Place, Shape]) -> Iterator[Slices]:
    """Guess which tensors have the sequences first: those with as many rows, then those with a multiple of them."""
    total, longest, pairs = sizes(shapes)
    for is_wide in (False, True):
        ratios = {
            place: (len(shape), 1 if shape and shape[0] == 1 else ratio_of(shape, total, is_wide=is_wide))
            for place, shape in leaves.items()
        }
        yield Slices(saved / total, longest, pairs, ratios, is_wide)


class Sums:
    """Gradients, put together from those of slices; those of half types that are summed, in single precision."""

    def __init__(self, cut: Cut) -> None:
        """Start with none."""
        self.cut = cut
        self.found: list[Tensor | None] = []
        self.dtypes: list[torch.dtype | None] = []

    def add(self, part: Part, gradients: Sequence[Tensor | None], ratios: Sequence[int]) -> None:
        if not part.total:
            self.found = list(gradients)
            return
        self.found = self.found or [None] * len(gradients)
        self.dtypes = self.dtypes or [None] * len(gradients)
        for i, (one, ratio) in enumerate(zip(gradients, ratios, strict=True)):
            if one is None:
                continue
            whole, self.dtypes[i] = self.found[i], one.dtype
            if ratio:
                if whole is None:
                    whole = one.new_zeros((self.cut.total * ratio, *one.shape[1:]))
                part.of(whole, ratio).copy_(one)
            else:
                one = one.to(torch.promote_types(one.dtype, torch.float32))
                whole = one if whole is None else whole.add_(one)
            self.found[i] = whole

    def gradients(self) -> list[Tensor | None]:
        pairs = zip(self.found, self.dtypes or [None] * len(self.found), strict=True)
        return [one if one is None or dtype is None else one.to(dtype) for one, dtype in pairs]


class SavedBytes:
    """Counts what autograd saves, but for the storages of given tensors. Each storage counts once."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        """Start with none."""
        self.given, self.bytes = given, 0
        self.seen = {one.untyped_storage()._cdata for one in given}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and return it without its node."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.bytes += storage.nbytes()
        return tensor.detach()
