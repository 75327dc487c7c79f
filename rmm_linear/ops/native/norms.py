"""LayerNorm and RMSNorm from a packed copy with the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native import noise_words
from rmm_linear.backends.native.library import TYPES, function, pointer, threads
from rmm_linear.packing import ROUNDING_STREAM, check_bits, empty_packed, mark_infinite
from rmm_linear.packing.norms import NormCopy, NormGradients


def pack_norm(
    x: Tensor,
    bits: int,
    seed: Tensor,
    eps: float,
    centered: bool = True,
    index: Tensor | None = None,
    out: NormCopy | None = None,
) -> NormCopy:
    """Pack as :func:`rmm_linear.packing.norms.pack_norm` does."""
    rows, columns = x.shape[0] if index is None else index.shape[0], x.shape[1]
    codes, qparams, rstd = out or (
        *empty_packed(rows, columns, check_bits(bits), x),
        x.new_empty(rows, dtype=torch.float32),
    )
    words, a, c = noise_words(seed, ROUNDING_STREAM, rows, columns)
    x, index, count = _rows(x), _contiguous(index), threads(x)
    buffer = x.new_empty(count, columns, dtype=torch.float32)
    is_infinite = function("rmm_pack_norm")(
        x.data_ptr(), TYPES[x.dtype], x.stride(0), pointer(index), rows, columns, centered,
        eps, bits, words.data_ptr(), a, c, codes.data_ptr(), qparams.data_ptr(), rstd.data_ptr(),
        buffer.data_ptr(), count,
    )  # fmt: skip
    if is_infinite:
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
    rows, columns = len(saved.rstd), y.shape[1]
    codes, qparams, rstd = (tensor.contiguous() for tensor in saved)
    x = (y.new_empty if index is None else y.new_zeros)(y.shape, dtype=dtype or y.dtype)
    gamma = y.new_ones(columns, dtype=torch.float32) if gamma is None else gamma.to(torch.float32).contiguous()
    words, a, c = noise_words(seed, ROUNDING_STREAM, rows, columns)
    y, index, count = _rows(y), _contiguous(index), threads(y)
    buffer = y.new_zeros(count, 5, columns, dtype=torch.float32)
    totals = y.new_zeros(count, 2, columns, dtype=torch.float64) if sums else None
    function("rmm_norm_backward")(
        y.data_ptr(), TYPES[y.dtype], y.stride(0), pointer(index), rows, columns, centered,
        bits, gamma.data_ptr(), words.data_ptr(), a, c, codes.data_ptr(), qparams.data_ptr(), rstd.data_ptr(),
        x.data_ptr(), TYPES[x.dtype], buffer.data_ptr(), pointer(totals), count,
    )  # fmt: skip
    both = y.new_empty(2, 0, dtype=torch.float64) if totals is None else totals.sum(0)
    weight, bias = (total.float() for total in both)  # each in memory of its own
    return NormGradients(x, weight, bias)


def _rows(matrix: Tensor) -> Tensor:
    """The matrix with the elements of every row side by side."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _contiguous(index: Tensor | None) -> Tensor | None:
    return None if index is None else index.contiguous()
