"""BatchNorm, GroupNorm and InstanceNorm from one packed copy of the normalized input: the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import Call, Case, call, into, operation, operator
from rmm_linear.ops.native import channel_norms as native
from rmm_linear.packing import GROUP, check_bits
from rmm_linear.packing import channel_norms as plain
from rmm_linear.packing.channel_norms import channel_parts
from rmm_linear.packing.norms import NormCopy
from rmm_linear.packing.stored import blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed

_EPS = 1e-5  # of samples


def _inputs(case: Case, number: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Yield inputs of both layouts, and their groups."""
    matrix = case.matrix(number) + 1
    if not case.columns:
        return
    channels = math.gcd(case.columns, 10)
    yield matrix.unflatten(1, (1, channels, -1)), 0
    yield matrix.unflatten(1, (1, channels, -1)), math.gcd(channels, 5)
    yield matrix.unflatten(0, (1, -1)).unsqueeze(-1), 0
    yield matrix.unflatten(0, (math.gcd(case.rows, 2), -1)).unsqueeze(-1), math.gcd(case.columns, 14)


def _pack_samples(case: Case) -> Iterator[Call]:
    for (x, groups), bits in zip(_inputs(case), (2, 3, 4, 8), strict=False):
        yield call(x.contiguous(), bits, case.seeds, _EPS if x.numel() > 1 else 1.0, groups, *_given(x, bits, groups))


def _given(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return means and 1/σ of the sets of an input, or none for some bits."""
    if bits != 2 or not x.numel():
        return None, None
    sets = plain.sets_of(x.shape, groups)[0]
    return torch.linspace(0.5, 1.5, sets), torch.linspace(0.8, 1.2, sets)


def _gradients_samples(case: Case) -> Iterator[Call]:
    for (y, _), ((x, bits, seeds, eps, groups, *_), _) in zip(_inputs(case, 1), _pack_samples(case), strict=True):
        saved = plain.pack_channels(x, bits, seeds, eps, groups)
        gamma = None if bits == 4 else torch.linspace(0.5, 1.5, x.shape[2]).to(case.dtype)
        how = {"dtype": torch.float32 if bits == 8 else None, "sums": bits != 3}
        yield call(y.contiguous(), saved, bits, seeds, gamma, groups, **how)


PACK_CHANNELS = operation(
    "PACK_CHANNELS",
    into(plain.pack_channels),
    native.pack_channels,
    triton.pack_channels,
    _pack_samples,
    moved=0.002,
    by_row=False,
)
CHANNEL_GRADIENTS = operation(
    "CHANNEL_GRADIENTS",
    plain.channel_gradients,
    native.channel_gradients,
    triton.channel_gradients,
    _gradients_samples,
    by_row=False,
)


def channel_bytes(shape: tuple[int, int, int, int], groups: int, bits: int) -> int:
    """Return the bytes saved of an input (N, S, C, B): seed, rstd and packed copy, each rounded up to a multiple of 16.

    Example:
        >>> channel_bytes((8, 1, 64, 3136), 0, 2), 8 * 64 * 3136 * 4
        (426768, 6422528)
    """
    return stored_bytes(channel_parts(shape, groups, bits))


def _operator_samples(case: Case) -> Iterator[Call]:
    for (x, bits, _, *how), _ in _pack_samples(case):
        yield call(x, case.seed, bits, *how)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (y, *_), ((x, seed, bits, eps, groups, *_), _) in zip(_inputs(case, 1), _operator_samples(case), strict=True):
        stored = pack_channels.function(x, 7 if seed is None else seed, bits, eps, groups)
        gamma = None if bits == 4 else torch.linspace(0.5, 1.5, x.shape[2]).to(case.dtype)
        yield call(y.contiguous(), stored, gamma, bits, groups, case.dtype, bits != 3)


@operator(
    "pack_channels",
    "(Tensor x, SymInt? seed, int bits, float eps, int groups, Tensor? mean=None, Tensor? rstd=None) -> Tensor",
    samples=_operator_samples,
    flops=lambda x, *_, **named: (2 * GROUP + 8) * math.prod(x),
    native=native.stored_channels,
    is_repeated=True,
)
def pack_channels(x, seed, bits, eps, groups, mean=None, rstd=None):
    """Normalize an input, and store it in few bits: :func:`channel_bytes` bytes, of seed, rstd, codes and scales.

    x: Floating point, contiguous, shape (N, S, C, B), see :mod:`rmm_linear.packing.channel_norms`. groups: Of the
    channels of a sample; 0 for BatchNorm. mean, rstd: Of every set, float32; None computes them.
    """
    parts = channel_parts(x.shape, groups, check_bits(bits))
    stored = blank_stored(x, parts)
    place, saved, codes, scales = views(stored, parts)
    PACK_CHANNELS(x, bits, fresh_seed(place, seed), eps, groups, mean, rstd, out=NormCopy(codes, scales, saved))
    return stored


@pack_channels.register_fake
def _(x, seed, bits, eps, groups, mean=None, rstd=None):
    return x.new_empty(stored_bytes(channel_parts(x.shape, groups, bits)), dtype=torch.uint8)


@operator(
    "channel_backward",
    samples=_backward_samples,
    flops=lambda y, *_: (2 * GROUP + 16) * math.prod(y),
    native=native.stored_gradients,
    is_repeated=True,
)
def channel_backward(
    y: Tensor, stored: Tensor, gamma: Tensor | None, bits: int, groups: int, dtype: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dX, and dγ and dβ if ``sums``, from the bytes of :func:`pack_channels`.

    y: Gradient with respect to the output, floating point, contiguous, shape (N, S, C, B). gamma: γ, shape (C,); None
    is 1. Returns dX, contiguous, of ``dtype``, which adds up to 0 in every set; dγ and dβ, float32 (float64 if ``y``
    is), shape (C,), or (0,).
    """
    seeds, rstd, codes, scales = views(stored, channel_parts(y.shape, groups, bits))
    return tuple(
        CHANNEL_GRADIENTS(y, NormCopy(codes, scales, rstd), bits, seeds, gamma, groups, dtype=dtype, sums=sums)
    )


@channel_backward.register_fake
def _(y, stored, gamma, bits, groups, dtype, sums):
    of_sums = torch.promote_types(y.dtype, torch.float32)
    one, other = (y.new_empty(y.shape[2] if sums else 0, dtype=of_sums) for _ in range(2))
    return y.new_empty(y.shape, dtype=dtype), one, other
