"""LayerNorm and RMSNorm from a packed copy with the C library, for all dtypes but float64."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends import native
from rmm_linear.backends.native import norms as library
from rmm_linear.backends.native.library import TYPES
from rmm_linear.packing import ROUNDING_STREAM, check_bits, empty_packed, mark_infinite, norms
from rmm_linear.packing.norms import NormCopy, NormGradients


def pack_norm(
    x: Tensor, bits: int, seed: Tensor, eps: float, centered: bool = True, index: Tensor | None = None
) -> NormCopy:
    """Pack as :func:`rmm_linear.packing.norms.pack_norm` does."""
    if x.dtype not in TYPES:
        return norms.pack_norm(x, bits, seed, eps, centered, index)
    rows, columns = x.shape[0] if index is None else len(index), x.shape[1]
    codes, qparams = empty_packed(rows, columns, check_bits(bits), x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    noise = native.rounding_noise(seed, ROUNDING_STREAM, rows, columns)
    if not library.pack_norm(_rows(x), _contiguous(index), centered, eps, bits, noise, codes, qparams, rstd):
        mark_infinite(qparams)
    return NormCopy(codes, qparams, rstd)


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
) -> NormGradients:
    """Compute what :func:`rmm_linear.packing.norms.norm_gradients` does."""
    if y.dtype not in TYPES or (dtype or y.dtype) not in TYPES:
        options = {"centered": centered, "index": index, "dtype": dtype, "sums": sums}
        return norms.norm_gradients(y, saved, bits, seed, gamma, **options)
    rows, columns = len(saved.rstd), y.shape[1]
    stored = (tensor.contiguous() for tensor in saved)
    x = (y.new_empty if index is None else y.new_zeros)(y.shape, dtype=dtype or y.dtype)
    gamma = y.new_ones(columns, dtype=torch.float32) if gamma is None else gamma.to(torch.float32).contiguous()
    noise = native.rounding_noise(seed, ROUNDING_STREAM, rows, columns)
    totals = library.norm_gradients(_rows(y), _contiguous(index), centered, bits, gamma, noise, *stored, x=x, sums=sums)
    weight, bias = (total.float() for total in (y.new_empty(2, 0, dtype=torch.float64) if totals is None else totals))
    return NormGradients(x, weight, bias)


def _rows(matrix: Tensor) -> Tensor:
    """The matrix with the elements of every row side by side."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _contiguous(index: Tensor | None) -> Tensor | None:
    return None if index is None else index.contiguous()
