"""Store several tensors in one tensor of bytes, so that a compiler or a checkpoint saves all of them or none.

A randomly compressed activation belongs to its seed. If an operator returned the two as separate tensors, a compiler
could save one of them and compute the other again, with another seed.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype

_ALIGNED = 16  # bytes: every part can be viewed as its own dtype

SEED: Part = ((1,), torch.int64)


def stored_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes that parts take together, each rounded up to a multiple of 16."""
    return sum(map(_padded, parts))


def empty_stored(like: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return uninitialized bytes for parts."""
    return like.new_empty(_places(tuple(parts))[1], dtype=torch.uint8)


def blank_stored(like: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return bytes for parts, uninitialized but for zeros between them: the same seed makes the same bytes."""
    stored, place = empty_stored(like, parts), 0
    for shape, dtype in parts:
        end, place = place + math.prod(shape) * dtype.itemsize, place + _padded((shape, dtype))
        if end < place and dtype != torch.int64:
            stored[end:place].zero_()
    return stored


def new_stored(like: Tensor, size: int, places: Iterable[int | None]) -> Tensor:
    """Return bytes on CPU for parts that begin at some places, of which those that no part fills are zero."""
    stored = like.new_empty(size, dtype=torch.uint8)
    base = stored.data_ptr()
    for end in (*places, size):
        if end:
            ctypes.memset(base + end - _ALIGNED, 0, _ALIGNED)  # before the part is written
    return stored


def views(stored: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    typed = {torch.uint8: stored}
    begin: int = stored.storage_offset()  # pyright: ignore[reportAssignmentType]
    found: list[Tensor] = []
    for place, dtype, size, shape, stride in _places(tuple(parts))[0]:
        if dtype not in typed:
            typed[dtype] = stored.view(dtype)
        found.append(typed[dtype].as_strided(shape, stride, begin // size + place))
    return found


@functools.lru_cache(maxsize=4096)
def _places(parts: tuple[Part, ...]) -> tuple[list[tuple[int, torch.dtype, int, tuple[int, ...], list[int]]], int]:
    """Of every part: the place of its first element, dtype, bytes of an element, shape and stride; and all bytes."""
    found, place = [], 0
    for shape, dtype in parts:
        stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        found.append((place // dtype.itemsize, dtype, dtype.itemsize, shape, stride))
        place += _padded((shape, dtype))
    return found, place


def offsets(parts: tuple[Part, ...]) -> tuple[list[int], int]:
    """Return where every part begins, in bytes, and all bytes."""
    places, size = _places(parts)
    return [place * itemsize for place, _, itemsize, *_ in places], size


def _padded(part: Part) -> int:
    shape, dtype = part
    size = math.prod(shape) * dtype.itemsize
    return (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
