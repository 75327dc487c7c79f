"""Softmax from one coded copy of its probabilities: unbiased.

With p = softmax(x) over a row of n elements and y the gradient of p, dX = p ∘ (y − ⟨p, y⟩). Stored is p less its mean,
which is 1/n, packed in groups of 64 (:mod:`rmm_linear.packing.pack`). What is unpacked is p̂ = p + e. Within a row, the
elements of e are uncorrelated, and of a group all have the variance v = scale² / 12, as of norms
(:mod:`rmm_linear.packing.norms`): E[p̂ ∘ ⟨p̂, y⟩] = p ∘ ⟨p, y⟩ + v ∘ y. Taken out again,

    dX = p̂ ∘ (y − ⟨p̂, y⟩) + v ∘ y

has the exact mean. As of attention, dX does not need x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing import GROUP, row_parts
from rmm_linear.packing.pack import packed_parts
from rmm_linear.packing.rounding import scales_of
from rmm_linear.packing.stored import SEED, Part, blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed, written


def _parts(shape: Sequence[int], bits: int) -> list[Part]:
    rows, columns = shape
    return [SEED, *packed_parts(rows, columns, bits)]


def _samples(case: Case) -> Iterator[Call]:
    for bits in (4, 8):
        yield call(case.matrix().softmax(1), bits, case.seed)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (p, bits, seed), _ in _samples(case):
        yield call(case.matrix(1), pack_softmax.function(p, bits, 7 if seed is None else seed), bits, p.dtype)


@operator("pack_softmax", samples=_samples, flops=lambda p, *_: (2 * GROUP + 2) * p[0] * p[1])
def pack_softmax(p: Tensor, bits: int, seed: int | None) -> Tensor:
    """Store probabilities, shape (N, n), in few bits."""
    parts = _parts(p.shape, bits)
    stored = blank_stored(p, parts)
    place, codes, scales = views(stored, parts)
    seeds = fresh_seed(place, seed)
    if p.numel():
        PACK(p - 1 / p.shape[1], bits, seeds, out=(codes, scales))
    else:
        written(seeds)
    return stored


@pack_softmax.register_fake
def _(p, bits, seed):
    return p.new_empty(stored_bytes(_parts(p.shape, bits)), dtype=torch.uint8)


@operator("softmax_backward", samples=_backward_samples, flops=lambda y, *_: (2 * GROUP + 8) * y[0] * y[1])
def softmax_backward(y: Tensor, stored: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Compute dX, shape (N, n), of a dtype, from what :func:`pack_softmax` has stored and the gradient of p."""
    seeds, codes, scales = views(stored, _parts(y.shape, bits))
    out, columns = y.new_empty(y.shape, dtype=dtype), y.shape[1]
    if not y.numel():
        return out
    wide = torch.promote_types(y.dtype, torch.float32)
    found = UNPACK(codes, scales, seeds, bits, columns, wide)
    for part in row_parts(len(y), columns, y.device):
        p, g = found[part].add_(1 / columns), y[part].to(wide)
        v = (scales_of(scales[part]).to(wide).square() / 12).repeat_interleave(GROUP, 1)[:, :columns]
        out[part] = (g - (p * g).sum(1, keepdim=True)).mul_(p).addcmul_(v, g).to(dtype)
    return out


@softmax_backward.register_fake
def _(y, stored, bits, dtype):
    return y.new_empty(y.shape, dtype=dtype)
