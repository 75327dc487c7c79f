"""Encode what experts save, and multiply rows that are sorted by expert: each group by the weight of its own.

On CPU the products are PyTorch's, one for each expert, which takes as long there as ``F.grouped_mm``. Elsewhere they
are one ``F.grouped_mm``, where PyTorch has it for the dtype and the strides; the loop waits for the device.
A simulated step, whose groups have no sizes, has one product with as many operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from rmm_linear.ops.dispatch import NARROW, Call, Case, call, operator
from rmm_linear.ops.sketches import DECODE, ENCODE, whole
from rmm_linear.packing import CODES, GROUP, encoded_parts
from rmm_linear.packing.stored import Part, blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seeds, written

Coded = tuple[int, int, float]  # rows, columns and bits of a matrix
_GROUPED = getattr(F, "grouped_mm", None)
_ALIGNED = 16  # bytes, of which strides are multiples
_CAPABILITY = (8, 0)  # of a CUDA device that has the kernels


def _samples(case: Case) -> Iterator[Call]:
    for place, bits in enumerate(CODES):
        h, d, x = case.matrix(0), case.matrix(1, 2 * case.columns), case.matrix(2, 40)
        given = ((h, d, x), (None, d, None), (h, None, None), (None, d, x))[place % 4]
        yield call(*given, bits, 4, case.seed)


def _flops(*shapes: Sequence[int] | float | None) -> int:
    return sum(2 * GROUP * math.prod(shape) for shape in shapes[:3] if isinstance(shape, Sequence))


def experts_parts(shapes: Sequence[Coded | None]) -> list[Part]:
    """Return the shapes and dtypes of a seed for every matrix, and of codes and scales of those that are stored."""
    parts = [part for shape in shapes if shape is not None for part in encoded_parts(*shape)]
    return [((len(shapes),), torch.int64), *parts]


def coded_shapes(matrices: Sequence[Tensor | None], bits: float, derivative_bits: float) -> list[Coded | None]:
    """Return the shape and the width of every matrix; None for one that is not given."""
    widths = zip(matrices, (bits, derivative_bits, bits), strict=True)
    return [None if one is None else (one.shape[0], one.shape[1], whole(width) or 0) for one, width in widths]


@operator("encode_experts", samples=_samples, flops=_flops)
def encode_experts(
    product: Tensor | None,
    derivative: Tensor | None,
    x: Tensor | None,
    bits: float,
    derivative_bits: float,
    seed: int | None,
) -> Tensor:
    """Encode the matrices that are given, one at least, with independent errors: the bytes of :func:`experts_parts`.

    product: The gate's output. derivative: That of the gate, in ``derivative_bits``. x: The tokens. Floating point, of
    any numbers of rows and columns. The code of one does not depend on which others are given.
    """
    matrices = product, derivative, x
    shapes = coded_shapes(matrices, bits, derivative_bits)
    parts = experts_parts(shapes)
    stored = blank_stored(_first(matrices), parts)
    place, *rest = views(stored, parts)
    seeds = written(fresh_seeds(place, seed))  # as some matrices may not be given
    places = iter(rest)
    for i, (matrix, shape) in enumerate(zip(matrices, shapes, strict=True)):
        if matrix is not None and shape is not None:
            for made in ENCODE(matrix, shape[2], seeds[i : i + 1]):
                next(places).copy_(made)
    return stored


def _first(matrices: Sequence[Tensor | None]) -> Tensor:
    return next(one for one in matrices if one is not None)


@encode_experts.register_fake
def _(product, derivative, x, bits, derivative_bits, seed):
    matrices = product, derivative, x
    parts = experts_parts(coded_shapes(matrices, bits, derivative_bits))
    return _first(matrices).new_empty(stored_bytes(parts), dtype=torch.uint8)


def decode_experts(stored: Tensor, shapes: Sequence[Coded | None], dtype: torch.dtype) -> Iterator[Tensor | None]:
    """Decode the matrices of :func:`encode_experts` one after the other, None for those that were not given.

    A simulated step has their shapes alone: to decode on a CPU takes operations by the thousand, a few rows each.
    """
    seeds, *rest = views(stored, experts_parts(shapes))
    places = iter(rest)
    for i, shape in enumerate(shapes):
        if shape is None:
            yield None
        elif isinstance(stored, FakeTensor):
            yield stored.new_empty(shape[0], shape[1], dtype=dtype)
        else:
            yield DECODE(next(places), next(places), seeds[i : i + 1], shape[2], shape[1], dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows, (S, K), sorted by expert, by the weights of their experts, (E, K, O); return (S, O).

    ends: Where the rows of every expert end, int32, (E,).
    """
    if isinstance(rows, FakeTensor):
        return torch.mm(rows, weights[0])
    if _runs_grouped(rows, weights) and _GROUPED is not None:
        return _GROUPED(rows, weights, offs=ends)
    output, begin = rows.new_empty(len(rows), weights.shape[2]), 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        torch.mm(rows[begin:end], weight, out=output[begin:end])
        begin = end
    return output


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return aᵀ b of the rows of every expert, (E, A, B), for (S, A) and (S, B): zeros for an expert without rows."""
    if isinstance(a, FakeTensor):
        return a.new_empty(len(ends), a.shape[1], b.shape[1]).copy_(torch.mm(a.T, b))
    if _runs_grouped(a.T, b) and _GROUPED is not None:
        return _GROUPED(a.T, b, offs=ends)
    output, begin = a.new_empty(len(ends), a.shape[1], b.shape[1]), 0
    for product, end in zip(output, ends.tolist(), strict=True):
        torch.mm(a[begin:end].T, b[begin:end], out=product)
        begin = end
    return output


def _runs_grouped(a: Tensor, b: Tensor) -> bool:
    if a.dtype not in NARROW or a.is_cpu:
        return False
    if a.is_cuda and torch.cuda.get_device_capability(a.device) < _CAPABILITY:
        return False
    strides = ((one, stride) for one in (a, b) for stride in one.stride())
    return all(stride == 1 or stride * one.itemsize % _ALIGNED == 0 for one, stride in strides)
