"""Encode a matrix, and decode it: what convolutions save of their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.native import sketches as native
from rmm_linear.ops.sketches import DECODE, ENCODE, PACK, whole
from rmm_linear.packing import CODES, GROUP, encoded_parts, is_normal
from rmm_linear.packing.stored import SEED, Part, blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed


def _samples(case: Case) -> Iterator[Call]:
    for bits in CODES:
        yield call(case.matrix(), bits, case.seed)


def _decode_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seed), _ in _samples(case):
        stored = encode_matrix.function(x, bits, 7 if seed is None else seed)
        yield call(stored, *x.shape, bits, x.dtype)


def _parts(rows: int, columns: int, bits: float) -> list[Part]:
    return [SEED, *encoded_parts(rows, columns, whole(bits) or 0)]


@operator("encode_matrix", samples=_samples, flops=lambda x, *_: 2 * GROUP * math.prod(x), native=native.stored_matrix)
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


def scales_in(stored: Tensor, rows: int, columns: int, bits: float) -> Tensor:
    """Return the scales of what :func:`encode_matrix` has stored, bytes, shape (rows, groups)."""
    return views(stored, _parts(rows, columns, bits))[2]


@operator(
    "decode_matrix",
    "(Tensor stored, SymInt rows, SymInt columns, float bits, ScalarType dtype) -> Tensor",
    samples=_decode_samples,
    flops=lambda stored, rows, columns, *_: 2 * GROUP * rows * columns,
    native=native.read_matrix,
)
def decode_matrix(stored: Tensor, rows: int, columns: int, bits: float, dtype: torch.dtype) -> Tensor:
    """Return what :func:`encode_matrix` has stored of a matrix of a shape and dtype."""
    seeds, codes, scales = views(stored, _parts(rows, columns, bits))
    return DECODE(codes, scales, seeds, whole(bits), columns, dtype)


@decode_matrix.register_fake
def _(stored, rows, columns, bits, dtype):
    return stored.new_empty(rows, columns, dtype=dtype)
