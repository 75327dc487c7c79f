"""Encode what experts save, and multiply rows that are sorted by expert: each group by the weight of its own.

On CPU the products are PyTorch's, one for each expert, which takes as long there as ``F.grouped_mm``. Elsewhere they
are one ``F.grouped_mm``, where PyTorch has it for the dtype and the strides; the loop waits for the device.
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
from rmm_linear.sketches.seeds import fill_seeds

Coded = tuple[int, int, float]  # rows, columns and bits of a matrix
_GROUPED = getattr(F, "grouped_mm", None)
_ALIGNED = 16  # bytes, of which strides are multiples
_CAPABILITY = (8, 0)  # of a CUDA device that has the kernels


def _samples(case: Case) -> Iterator[Call]:
    for place, bits in enumerate(CODES):
        d, h, x = case.matrix(0, 2 * case.columns), case.matrix(1), case.matrix(2, 40)
        given = ((d, h, x), (d, None, None), (None, h, None), (d, None, x))[place % 4]
        yield call(*given, 4, bits, case.seed)


def _flops(*shapes: Sequence[int] | float | None) -> int:
    return sum(2 * GROUP * math.prod(shape) for shape in shapes[:3] if isinstance(shape, Sequence))


def _coded(
    derivative: Tensor | None, product: Tensor | None, x: Tensor | None, derivative_bits: float, bits: float
) -> list[tuple[Tensor, float]]:
    widths = whole(derivative_bits), whole(bits), whole(bits)
    pairs = zip((derivative, product, x), widths, strict=True)
    return [(one, width) for one, width in pairs if one is not None and width is not None]


def experts_parts(shapes: Sequence[Coded]) -> list[Part]:
    """Return the shapes and dtypes of seeds, and of codes and scales of every matrix."""
    return [((len(shapes),), torch.int64), *(part for shape in shapes for part in encoded_parts(*shape))]


@operator("encode_experts", samples=_samples, flops=_flops)
def encode_experts(
    derivative: Tensor | None,
    product: Tensor | None,
    x: Tensor | None,
    derivative_bits: float,
    bits: float,
    seed: int | None,
) -> Tensor:
    """Encode the matrices that are given, with independent errors; return the bytes of :func:`experts_parts`.

    derivative: Of the gate, in ``derivative_bits``. product: The gate's output. x: The tokens. Floating point, of any
    numbers of rows and columns.
    """
    coded = _coded(derivative, product, x, derivative_bits, bits)
    parts = experts_parts([(*matrix.shape, width) for matrix, width in coded])
    stored = blank_stored(coded[0][0], parts)
    seeds, *places = views(stored, parts)
    fill_seeds(seeds, seed)
    for i, (matrix, width) in enumerate(coded):
        codes, scales = ENCODE(matrix, width, seeds[i : i + 1])
        places[2 * i].copy_(codes)
        places[2 * i + 1].copy_(scales)
    return stored


@encode_experts.register_fake
def _(derivative, product, x, derivative_bits, bits, seed):
    coded = _coded(derivative, product, x, derivative_bits, bits)
    parts = experts_parts([(*matrix.shape, width) for matrix, width in coded])
    return coded[0][0].new_empty(stored_bytes(parts), dtype=torch.uint8)


def decode_experts(stored: Tensor, shapes: Sequence[Coded], dtype: torch.dtype) -> Iterator[Tensor]:
    """Decode the matrices of :func:`encode_experts`, of given shapes, one after the other."""
    seeds, *places = views(stored, experts_parts(shapes))
    for i, (_, columns, bits) in enumerate(shapes):
        yield DECODE(places[2 * i], places[2 * i + 1], seeds[i : i + 1], bits, columns, dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows, (S, K), sorted by expert, by the weights of their experts, (E, K, O); return (S, O).

    ends: Where the rows of every expert end, int32, (E,).
    """
    if _runs_grouped(rows, weights) and _GROUPED is not None:
        return _GROUPED(rows, weights, offs=ends)
    output = rows.new_zeros(len(rows), weights.shape[2])
    for expert, group in _groups(ends):
        torch.mm(rows[group], weights[expert], out=output[group])
    return output


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return aᵀ b of the rows of every expert, (E, A, B), for (S, A) and (S, B): zeros for an expert without rows."""
    if _runs_grouped(a.T, b) and _GROUPED is not None:
        return _GROUPED(a.T, b, offs=ends)
    output = a.new_zeros(len(ends), a.shape[1], b.shape[1])
    for expert, group in _groups(ends):
        torch.mm(a[group].T, b[group], out=output[expert])
    return output


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def _runs_grouped(a: Tensor, b: Tensor) -> bool:
    if a.dtype not in NARROW or (a.is_cpu and not isinstance(a, FakeTensor)):
        return False
    if a.is_cuda and torch.cuda.get_device_capability(a.device) < _CAPABILITY:
        return False
    strides = ((one, stride) for one in (a, b) for stride in one.stride())
    return all(stride == 1 or stride * one.itemsize % _ALIGNED == 0 for one, stride in strides)
