"""LayerNorm and RMSNorm from a packed copy with the C library: float32 at once, half types a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rmm_linear.backends import native
from rmm_linear.backends.native import norms as library
from rmm_linear.packing import ROUNDING_STREAM, check_bits, empty_packed, mark_infinite, norms, row_parts
from rmm_linear.packing.norms import NormCopy, NormGradients, wide

_CHUNK = 1 << 18  # elements of half types that are converted at a time: they fit into a cache


def pack_norm(
    x: Tensor, bits: int, seed: Tensor, eps: float, centered: bool = True, index: Tensor | None = None
) -> NormCopy:
    """Pack as :func:`rmm_linear.packing.norms.pack_norm` does."""
    if x.dtype == torch.float64:
        return norms.pack_norm(x, bits, seed, eps, centered, index)
    rows, columns = x.shape[0] if index is None else len(index), x.shape[1]
    codes, qparams = empty_packed(rows, columns, check_bits(bits), x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    signs, a, c = native.rounding_noise(seed, ROUNDING_STREAM, rows, columns)
    is_finite = True
    for part, values, chosen in _parts(x, index, rows, is_whole=x.dtype == torch.float32):
        stored = codes[part], qparams[part], rstd[part]
        is_finite &= library.pack_norm(values, chosen, centered, eps, bits, (signs, a[part], c), *stored)
    if not is_finite:
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
    if y.dtype == torch.float64:
        options = {"centered": centered, "index": index, "dtype": dtype, "sums": sums}
        return norms.norm_gradients(y, saved, bits, seed, gamma, **options)
    (rows, columns), saved = (len(saved.rstd), y.shape[1]), NormCopy(*(stored.contiguous() for stored in saved))
    x = (torch.empty if index is None else torch.zeros)(y.shape, dtype=dtype or y.dtype)
    gamma = y.new_ones(columns, dtype=torch.float32) if gamma is None else gamma.to(torch.float32).contiguous()
    signs, a, c = native.rounding_noise(seed, ROUNDING_STREAM, rows, columns)
    totals, is_whole = torch.zeros(2, columns, dtype=torch.float64), y.dtype == x.dtype == torch.float32
    for part, values, chosen in _parts(y, index, rows, is_whole):
        stored = (tensor[part] for tensor in saved)
        found = x if is_whole else torch.empty(values.shape)
        added = library.norm_gradients(
            values, chosen, centered, bits, gamma, (signs, a[part], c), *stored, x=found, sums=sums
        )
        totals = totals if added is None else totals.add_(added)
        if not is_whole and index is None:
            x[part] = found
        elif not is_whole and index is not None:
            x.index_copy_(0, index[part], found.to(x.dtype))
    return NormGradients(x, totals[0].float(), totals[1].float()) if sums else NormGradients(x, None, None)


def _parts(
    matrix: Tensor, index: Tensor | None, rows: int, is_whole: bool
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """All rows with their index, or a few rows in float32 at a time, already chosen by the index."""
    if is_whole:
        matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
        yield slice(0, rows), matrix, None if index is None else index.contiguous()
        return
    for part in row_parts(rows, matrix.shape[1], matrix.device, _CHUNK):
        values = matrix[part] if index is None else matrix.index_select(0, index[part])
        yield part, wide(values).contiguous(), None
