"""Encode a tensor as it lies in memory, and decode it: what convolutions save of their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.sketches import DECODE, ENCODE, PACK, whole
from rmm_linear.packing import CODES, GROUP, encoded_parts, is_normal
from rmm_linear.packing.stored import SEED, Part, blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed

_COLUMNS = 4096  # of a row at most: whole groups of any code, and as few rows and columns as together draw few numbers


class MemoryLayout(NamedTuple):
    """How a tensor lies in memory, and the matrix that is made of it: no element moves.

    Attributes:
        order: Its dimensions, the one with the largest strides first.
        shape: Their sizes, in this order.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, x: Tensor) -> MemoryLayout:
        """Return the layout of a tensor.

        Its groups are side by side in memory: pixels of one channel, or with ``channels_last`` channels of one pixel.
        """
        order = tuple(sorted(range(x.dim()), key=lambda i: -x.stride(i)))
        shape = tuple(x.shape[i] for i in order)
        columns = math.prod(shape[1:])
        if not torch.compiler.is_compiling():  # which would fix the sizes
            fitting = math.gcd(columns * shape[0], _COLUMNS)
            columns = fitting if fitting >= GROUP else columns
        return cls(order, shape, math.prod(shape) // max(columns, 1), columns)

    def matrix(self, x: Tensor) -> Tensor:
        """Return the elements of a tensor as rows, a view where its memory has no gaps."""
        return x.permute(self.order).reshape(self.rows, self.columns)

    def tensor(self, matrix: Tensor) -> Tensor:
        """Return the tensor of :meth:`matrix`."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view(self.shape).permute(inverse)


def _samples(case: Case) -> Iterator[Call]:
    for bits in CODES:
        yield call(case.matrix(), bits, case.seed)


def _decode_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seed), _ in _samples(case):
        stored = encode_matrix.function(x, bits, 7 if seed is None else seed)
        yield call(stored, *x.shape, bits, x.dtype)


def _parts(rows: int, columns: int, bits: float) -> list[Part]:
    return [SEED, *encoded_parts(rows, columns, whole(bits) or 0)]


@operator("encode_matrix", samples=_samples, flops=lambda x, *_: 2 * GROUP * math.prod(x))
def encode_matrix(x: Tensor, bits: float, seed: int | None) -> Tensor:
    """Store a matrix in few bits, with its seed; floating point, shape (rows, columns)."""
    rows, columns = x.shape
    parts = _parts(rows, columns, bits)
    stored = blank_stored(x, parts)
    place, codes, scales = views(stored, parts)
    seeds = fresh_seed(place, seed)
    if is_normal(bits):
        for view, made in zip((codes, scales), ENCODE(x, whole(bits), seeds), strict=True):
            view.copy_(made)
    else:
        PACK(x, int(bits), seeds, out=(codes, scales))
    return stored


@encode_matrix.register_fake
def _(x, bits, seed):
    return x.new_empty(stored_bytes(_parts(x.shape[0], x.shape[1], bits)), dtype=torch.uint8)


@operator(
    "decode_matrix",
    "(Tensor stored, SymInt rows, SymInt columns, float bits, ScalarType dtype) -> Tensor",
    samples=_decode_samples,
    flops=lambda stored, rows, columns, *_: 2 * GROUP * rows * columns,
)
def decode_matrix(stored: Tensor, rows: int, columns: int, bits: float, dtype: torch.dtype) -> Tensor:
    """Return what :func:`encode_matrix` has stored of a matrix of a shape and dtype."""
    seeds, codes, scales = views(stored, _parts(rows, columns, bits))
    return DECODE(codes, scales, seeds, whole(bits), columns, dtype)


@decode_matrix.register_fake
def _(stored, rows, columns, bits, dtype):
    return stored.new_empty(rows, columns, dtype=dtype)
