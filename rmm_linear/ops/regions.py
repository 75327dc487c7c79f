"""Store and restore a tensor that a module's own code reads again in the backward pass.

Outputs of linear layers, of which a region makes attention, are stored less the mean of their sequence, in few bits,
and the mean is stored as it is. The difference has a smaller range, and the mean must be there: scores that are capped,
or that compete with those of sinks, are not the same for keys that all lie elsewhere.
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
from rmm_linear.sketches.seeds import fresh_seed, written


def _samples(case: Case) -> Iterator[Call]:
    for bits, matrix in ((4, case.matrix()), (8, case.matrix().unflatten(0, (1, -1)))):
        yield call(matrix, bits, case.seed, bits == 4)


def _restore_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seed, centered), _ in _samples(case):
        stored = pack_source.function(x, bits, 7 if seed is None else seed, centered)
        yield call(stored, list(x.shape), bits, x.dtype, centered)


def _parts(shape: tuple[int, ...], bits: int, dtype: torch.dtype, centered: bool) -> list[Part]:
    """Return the parts that are stored: seed, mean, codes and scales."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    sequences = (shape[0] if len(shape) > 2 else 1) if centered else 0
    return [SEED, ((sequences, columns), dtype), *packed_parts(rows, columns, bits)]


def _by_sequence(x: Tensor) -> Tensor:
    """Return (B, …, D) as (B, T, D), and (N, D) as one sequence."""
    return x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(0)


@operator("pack_source", samples=_samples, flops=lambda x, *_: (2 * GROUP + 2) * math.prod(x))
def pack_source(x: Tensor, bits: int, seed: int | None, centered: bool) -> Tensor:
    """Store (B, …, D), (N, D) or (D,) in few bits; ``centered``: less the mean of every sequence, and with it."""
    shape = tuple(x.shape)
    parts = _parts(shape, bits, x.dtype, centered)
    stored = blank_stored(x, parts)
    place, mean, codes, scales = views(stored, parts)
    seeds = fresh_seed(place, seed)
    if x.numel():
        if centered:
            x = _by_sequence(x)
            torch.mean(x, 1, out=mean)
            x = x - mean.unsqueeze(1)
        PACK(x.reshape(-1, shape[-1]), bits, seeds, out=(codes, scales))
    else:
        written(seeds)
        mean.zero_()
    return stored


@pack_source.register_fake
def _(x, bits, seed, centered):
    return x.new_empty(stored_bytes(_parts(tuple(x.shape), bits, x.dtype, centered)), dtype=torch.uint8)


@operator(
    "unpack_source",
    "(Tensor stored, SymInt[] shape, int bits, ScalarType dtype, bool centered) -> Tensor",
    samples=_restore_samples,
    flops=lambda stored, shape, *_: (2 * GROUP + 1) * math.prod(shape),
)
def unpack_source(stored: Tensor, shape: list[int], bits: int, dtype: torch.dtype, centered: bool) -> Tensor:
    """Return what :func:`pack_source` has stored of a tensor of a shape and dtype."""
    seeds, mean, codes, scales = views(stored, _parts(tuple(shape), bits, dtype, centered))
    x = UNPACK(codes, scales, seeds, bits, shape[-1], dtype).view(shape)
    if x.numel() and centered:
        _by_sequence(x).add_(mean.unsqueeze(1))
    return x


@unpack_source.register_fake
def _(stored, shape, bits, dtype, centered):
    return stored.new_empty(shape, dtype=dtype)
