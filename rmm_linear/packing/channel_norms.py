"""BatchNorm, GroupNorm and InstanceNorm whose backward pass reads one packed copy of the normalized input: unbiased.

An input has the shape (N, C, …) with L positions for each sample and channel. Statistics belong to *sets* of M
elements: of BatchNorm a channel of all samples, M = N · L; of GroupNorm with G groups C/G channels of one sample,
M = L · C/G; InstanceNorm is GroupNorm with one channel in a group. Within a set, h = (x − mean(x)) · rstd, and the
output is γ ∘ h + β with γ and β by channel. With y the gradient of the output and g = γ ∘ y,

    dX = rstd · (g − mean(g) − h ⟨h, g⟩ / M)        dγ = Σ y ∘ h        dβ = Σ y        sums over N and L

as of LayerNorm, whose set is a row (:mod:`rmm_linear.packing.norms`). Saved are rstd of every set, and h, packed in the
order in which its elements lie in memory, so that groups of 64 may have elements of several sets. What is unpacked is
ĥ = h + e. The errors e of two elements are uncorrelated, and of a group all have the variance v = scale² / 12, rotated
or not, so that E[ĥ ⟨ĥ, g⟩] = h ⟨h, g⟩ + v ∘ g in every set, whatever elements it has in a group. Taken out again,

    Z = rstd · (g − ĥ ⟨ĥ, g⟩ / M + v ∘ g / M)        dX = Z − mean(Z)        dγ = Σ y ∘ ĥ        dβ = Σ y, exact

has the exact mean. M is large, mostly: of BatchNorm, what is taken out is small. The elements of dX of a set add up to
zero, of the estimate too, whose mean is that of all of Z, though those of ĥ do not: noise adds up where a gradient does
not, as in the biases in front of the norm.

An input is passed on as (N, S, C, B), contiguous: (N, 1, C, L) where the positions of a channel lie side by side, and
(N, L, C, 1) where the channels of a position do. Bytes: those of :func:`rmm_linear.packing.pack`, and 4 for each set.
Variance: :mod:`rmm_linear.variance.standins.norms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing.norms import NormCopy, NormGradients, wide
from rmm_linear.packing.pack import pack, packed_parts, unpack
from rmm_linear.packing.rounding import GROUP, scales_of
from rmm_linear.packing.stored import SEED, Part

_LONG = 2048  # columns, in which a last group that is short does not matter, and of which few are drawn


def packed_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns in which an input (N, S, C, B) is packed.

    A row has a power of two of channels, or all, by ranges of lengths: compiled code is the same within one.

    Example:
        >>> packed_shape((8, 1, 256, 49)), packed_shape((8, 49, 256, 1))
        ((32, 3136), (392, 256))
    """
    samples, places, channels, length = shape
    count = 1 if length > 1 else channels
    while count * length < _LONG and channels % (2 * count) == 0:
        count *= 2
    count = channels if count * length < _LONG else count
    return samples * places * (channels // count), count * length


def sets_of(shape: Sequence[int], groups: int) -> tuple[int, int]:
    """Return how many sets an input has, and the elements M of each, at least 1. groups: G; 0 for BatchNorm."""
    sets = shape[2] if groups == 0 else shape[0] * groups
    return sets, max(1, math.prod(shape) // max(1, sets))


def channel_parts(shape: Sequence[int], groups: int, bits: int) -> list[Part]:
    """Return what is saved of an input (N, S, C, B): seed, rstd, codes and scales."""
    return [SEED, ((sets_of(shape, groups)[0],), torch.float32), *packed_parts(*packed_shape(shape), bits)]


@without_autocast
def pack_channels(
    x: Tensor,
    bits: int,
    seed: Tensor,
    eps: float,
    groups: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> NormCopy:
    """Normalize an input (N, S, C, B), and round it to ``bits`` per element.

    groups: G; 0 for BatchNorm. mean, rstd: Of every set, float32; None computes them in float32, of float64 in float64.

    Example:
        >>> x = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
        >>> pack_channels(x, 2, torch.tensor([0]), eps=0.0, groups=0).rstd
        tensor([1.])
    """
    h = wide(x)
    h = h - _spread(_mean(h, groups) if mean is None else mean, x.shape, groups)
    rstd = (_mean(h.square(), groups) + eps).rsqrt() if rstd is None else rstd
    codes, scales = pack(h.mul_(_spread(rstd, x.shape, groups)).reshape(packed_shape(x.shape)), bits, seed)
    return NormCopy(codes, scales, rstd.float())


@without_autocast
def channel_gradients(
    y: Tensor,
    saved: NormCopy,
    bits: int,
    seed: Tensor,
    gamma: Tensor | None,
    groups: int,
    *,
    dtype: torch.dtype | None = None,
    sums: bool = True,
) -> NormGradients:
    """Compute the gradients of a norm from the packed copy of its normalized input.

    y: Gradient with respect to the output, floating point, shape (N, S, C, B). gamma: γ, shape (C,); None is 1. dtype:
    Of dX. sums: Whether dγ and dβ are needed, float32 (float64 if ``y`` is).
    """
    g, columns, size = wide(y), packed_shape(y.shape)[1], sets_of(y.shape, groups)[1]
    h = unpack(saved.codes, saved.scales, seed, bits, columns, g.dtype).view(y.shape)
    weight, bias = ((g * h).sum((1, 3)), g.sum((1, 3))) if sums else (g.new_empty(0), g.new_empty(0))
    g = g if gamma is None else g * gamma.detach().to(g.dtype).view(-1, 1)
    slope = _spread(_mean(g * h, groups), y.shape, groups)
    kept = (scales_of(saved.scales).square() / (12 * size) + 1).to(g.dtype)
    x = (g * kept.repeat_interleave(GROUP, 1)[:, :columns].reshape(y.shape)).sub_(h.mul_(slope))
    x = x.sub_(_spread(_mean(x, groups), y.shape, groups)).mul_(_spread(saved.rstd.to(g.dtype), y.shape, groups))
    x = x.to(dtype or y.dtype)
    return NormGradients(x, *(one.sum(0, dtype=torch.float64).to(g.dtype) if sums else one for one in (weight, bias)))


def _mean(x: Tensor, groups: int) -> Tensor:
    """Return the mean of every set, shape (C,) or (N · G,)."""
    of_channels = x.sum((1, 3))
    of_sets = of_channels.unflatten(1, (groups, -1)).sum(2).flatten() if groups else of_channels.sum(0)
    return of_sets / sets_of(x.shape, groups)[1]


def _spread(numbers: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """Return numbers of every set so that they are broadcast to (N, S, C, B)."""
    if groups:
        numbers = numbers.view(shape[0], groups).repeat_interleave(shape[2] // groups, 1)
    return numbers.unsqueeze(-1).view(-1, 1, shape[2], 1)
