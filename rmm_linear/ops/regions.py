"""Outputs of the linear layers that a region of a module reads: the operators that store and restore them.

A row is stored less the mean of its sequence, in few bits, and the mean is stored as it is. The difference has a
smaller range than the row, and the mean must be there: scores that are capped, or that compete with those of sinks,
are not the same for keys that all lie elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing import GROUP
from rmm_linear.packing.pack import packed_parts
from rmm_linear.packing.stored import SEED, Part, blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fill_seed


def _samples(case: Case) -> Iterator[Call]:
    for bits, matrix in ((4, case.matrix()), (8, case.matrix().unflatten(0, (1, -1)))):
        yield call(matrix, bits, case.seed)


def _restore_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seed), _ in _samples(case):
        yield call(pack_source.function(x, bits, 7 if seed is None else seed), list(x.shape), bits, x.dtype)


def _parts(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> list[Part]:
    """Return the parts that are stored: seed, mean, codes and scales."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    sequences = shape[0] if len(shape) > 2 else 1
    return [SEED, ((sequences, columns), dtype), *packed_parts(rows, columns, bits)]


def _by_sequence(x: Tensor) -> Tensor:
    """Return (B, …, D) as (B, T, D), and (N, D) as one sequence."""
    return x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(0)


@operator("pack_source", samples=_samples, flops=lambda x, *_: (2 * GROUP + 2) * math.prod(x))
def pack_source(x: Tensor, bits: int, seed: int | None) -> Tensor:
    """Store the output of a linear layer, (B, …, D) or (N, D): the mean of every sequence, and codes of the rest."""
    shape = tuple(x.shape)
    parts = _parts(shape, bits, x.dtype)
    stored = blank_stored(x, parts)
    seeds, mean, codes, scales = views(stored, parts)
    fill_seed(seeds, seed)
    if x.numel():
        x = _by_sequence(x)
        torch.mean(x, 1, out=mean)
        PACK((x - mean.unsqueeze(1)).flatten(0, 1), bits, seeds, out=(codes, scales))
    return stored


@pack_source.register_fake
def _(x, bits, seed):
    return x.new_empty(stored_bytes(_parts(tuple(x.shape), bits, x.dtype)), dtype=torch.uint8)


@operator(
    "unpack_source",
    "(Tensor stored, SymInt[] shape, int bits, ScalarType dtype) -> Tensor",
    samples=_restore_samples,
    flops=lambda stored, shape, *_: (2 * GROUP + 1) * math.prod(shape),
)
def unpack_source(stored: Tensor, shape: list[int], bits: int, dtype: torch.dtype) -> Tensor:
    """Return what :func:`pack_source` has stored of a tensor of a shape and dtype."""
    seeds, mean, codes, scales = views(stored, _parts(tuple(shape), bits, dtype))
    x = UNPACK(codes, scales, seeds, bits, shape[-1], dtype)
    if x.numel():
        _by_sequence(x.view(shape)).add_(mean.unsqueeze(1))
    return x.view(shape)


@unpack_source.register_fake
def _(stored, shape, bits, dtype):
    return stored.new_empty(shape, dtype=dtype)
