"""LayerNorm and RMSNorm whose backward pass reads one packed copy of the normalized rows: unbiased.

A row x of H elements is normalized to h = (x − mean(x)) · rstd with rstd = 1 / √(mean((x − mean(x))²) + eps); RMSNorm
has no means. The output is γ ∘ h + β. With y the gradient of a row of it, and g = γ ∘ y,

    dX = rstd · (g − mean(g) − h ⟨h, g⟩ / H)        dγ = Σ y ∘ h        dβ = Σ y        sums over rows

Saved are rstd and h, rotated and packed in groups of 64 (:mod:`rmm_linear.packing.pack`), not x: the backward pass then
needs no mean, and the mean of a row, which the rotation would spread over all elements, does not widen the scales. What
is unpacked is ĥ = h + e. Rotated, the elements of e are independent of each other within the row and of h and y, have
the mean 0 and, within a group, all the variance v = scale² / 12. The rotation of a group is orthonormal and v is the
same within it, so E[e eᵀ] = diag(v) in the original columns too (the shorter last group is not rotated at all). Hence

    E[ĥ ⟨ĥ, g⟩] = h ⟨h, g⟩ + E[e ⟨e, g⟩] = h ⟨h, g⟩ + v ∘ g

and v is known from what is stored. (The random numbers of the rounding are mixed, so that the errors of these products
are independent between rows: without, those of rows that repeat, with gradients that repeat, would add up.) Taken out
again, the gradient from this one copy has the exact mean:

    dX = rstd · (g − mean(g) − ĥ ⟨ĥ, g⟩ / H + v ∘ g / H)        dγ = Σ y ∘ ĥ        dβ = Σ y, exact

Bytes: those of :func:`rmm_linear.packing.pack`, and 4 per row. Variance: :mod:`rmm_linear.variance.standins.norms`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing.codes import RELATIVE_VARIANCE
from rmm_linear.packing.pack import element_variance, pack, packed_parts, unpack
from rmm_linear.packing.rounding import WIDTHS
from rmm_linear.packing.stored import SEED, Part

_MOST_NOISE = 0.25  # of the gradient, by norms of few elements


class NormCopy(NamedTuple):
    """The packed copy that is saved of a norm's input."""

    codes: Tensor  # of h, uint8, shape (n, ⌈H · bits / 8⌉)
    scales: Tensor  # of its groups, uint8, shape (n, ⌈H / 64⌉)
    rstd: Tensor  # float32, shape (n,)


def _fewest_elements(v: float) -> int:
    """Return the least number M of normalized elements whose dX has noise of at most a quarter.

    For h and g of independent normal numbers and a variance v of the code, the variance of the errors is
    rstd² v ‖g‖² (2 + v + 2 / M) / M, see :mod:`rmm_linear.variance.standins.norms`, and the mean of ‖dX‖² is
    rstd² ‖g‖² (M − 2) / M: of two elements, nothing but noise would be left.
    """
    return next(m for m in itertools.count(3) if v * (2 + v + 2 / m) / (m - 2) <= _MOST_NOISE**2)


FEWEST_ELEMENTS = {bits: _fewest_elements(RELATIVE_VARIANCE[bits]) for bits in WIDTHS}


def few_elements(count: int, bits: int) -> str | None:
    """Say why a call that normalizes so many elements stays exact; None if it does not.

    Example:
        >>> FEWEST_ELEMENTS
        {8: 3, 4: 3, 3: 5, 2: 8}
        >>> few_elements(5, 3) is None
        True
    """
    if count >= FEWEST_ELEMENTS[bits]:
        return None
    return f"it normalizes {count} elements, where noise of {bits} bits would be more than a quarter of the gradient"


def norm_parts(rows: int, columns: int, bits: int) -> list[Part]:
    """Return what is saved of the input of a norm: seed, rstd, codes and scales."""
    return [SEED, ((rows,), torch.float32), *packed_parts(rows, columns, bits)]


class NormGradients(NamedTuple):
    """The gradients of a norm: of its input, (N, H), and of γ and β, (H,), or (0,) if the sums are not needed."""

    x: Tensor
    weight: Tensor
    bias: Tensor


@without_autocast
def pack_norm(
    x: Tensor, bits: int, seed: Tensor, eps: float, centered: bool = True, index: Tensor | None = None
) -> NormCopy:
    """Normalize rows of a matrix (N, H), and round them to ``bits`` per element.

    Statistics are computed in float32, of float64 in float64. seed: int64 with one element. index: The rows to save,
    int64, shape (n,); None for all.
    """
    x = wide(x if index is None else x.index_select(0, index))
    x = x - x.mean(1, keepdim=True) if centered else x
    rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    return NormCopy(*pack(x * rstd, bits, seed, mixed=True), rstd.squeeze(1).float())


@without_autocast
def normalize(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    eps: float,
    centered: bool = True,
) -> Tensor:
    """Compute γ ∘ h + β of a matrix (N, H), in float32 at least.

    gamma, beta: Shape (H,); None is 1 and 0. dtypes: That h is rounded to before it is multiplied by γ, float32 for not
    at all; and that of the result.
    """
    h = wide(x)
    h = h - h.mean(1, keepdim=True) if centered else h
    h = h * (h.square().mean(1, keepdim=True) + eps).rsqrt()
    h = h if dtypes[0] == torch.float32 else h.to(dtypes[0]).to(h.dtype)
    h = h if gamma is None else h * gamma.to(h.dtype)
    return (h if beta is None else h + beta.to(h.dtype)).to(dtypes[1])


@without_autocast
def norm_gradients(
    y: Tensor,
    saved: NormCopy,
    bits: int,
    seed: Tensor,
    gamma: Tensor | None = None,
    *,
    centered: bool = True,
    index: Tensor | None = None,
    dtype: torch.dtype | None = None,
    sums: bool = True,
    sum_dtype: torch.dtype | None = None,
) -> NormGradients:
    """Compute the gradients of a norm from the packed copy of its normalized input.

    y: Gradient with respect to the output, floating point, shape (N, H). gamma: γ, shape (H,); None is 1. index: The
    rows that are saved, int64, shape (n,). The others, whose gradient is 0, are not read. sums: Whether dγ and dβ are
    needed; they are of ``sum_dtype``, float32 (float64 if ``y`` is) for None, accumulated in float64.
    """
    rows = wide(y if index is None else y.index_select(0, index))
    columns, rstd = y.shape[1], saved.rstd.to(rows.dtype).unsqueeze(1)
    h = unpack(saved.codes, saved.scales, seed, bits, columns, rows.dtype, mixed=True)
    g = rows if gamma is None else rows * gamma.to(rows.dtype)
    x = g * (1 + element_variance(saved.scales, columns).to(rows.dtype) / columns) - h * (h * g).mean(1, keepdim=True)
    x = ((x - g.mean(1, keepdim=True) if centered else x) * rstd).to(dtype or y.dtype)
    if index is not None:
        x = x.new_zeros(y.shape).index_copy_(0, index, x)
    if not sums:
        return NormGradients(x, *(rows.new_empty(0, dtype=sum_dtype) for _ in range(2)))
    weight, bias = (sums_of.sum(0, dtype=torch.float64).to(rows.dtype) for sums_of in (rows * h, rows))
    return NormGradients(x, weight.to(sum_dtype or rows.dtype), bias.to(sum_dtype or rows.dtype))


def wide(tensor: Tensor) -> Tensor:
    """Return half types in float32, other dtypes as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
