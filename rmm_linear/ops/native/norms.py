"""LayerNorm and RMSNorm from a packed copy with the C library."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, pointer, read_seed, run, threads, write_seed
from rmm_linear.packing import check_bits, empty_packed
from rmm_linear.packing.norms import NormCopy, NormGradients, norm_parts
from rmm_linear.packing.stored import new_stored, offsets


def pack_norm(
    x: Tensor,
    bits: int,
    seed: Tensor,
    eps: float,
    centered: bool = True,
    index: Tensor | None = None,
    out: NormCopy | None = None,
) -> NormCopy:
    rows, columns = x.shape[0] if index is None else index.shape[0], x.shape[1]
    codes, scales, rstd = out or (
        *empty_packed(rows, columns, check_bits(bits), x),
        x.new_empty(rows, dtype=torch.float32),
    )
    write_norm(x, index, int(seed), bits, eps, centered, rstd.data_ptr(), codes.data_ptr(), scales.data_ptr())
    return NormCopy(codes, scales, rstd)


def stored_norm(
    x: Tensor, index: Tensor | None, seed: int | None, bits: int, eps: float, centered: bool, dims: int = 1
) -> Tensor:
    """Return the bytes of :func:`rmm_linear.ops.norms.pack_norm`."""
    if x.dim() != 2 or dims != 1:
        shape = x.shape
        x = x.reshape(math.prod(shape[: len(shape) - dims]), math.prod(shape[len(shape) - dims :]))
    (_, *places), size = _layout(x.shape[0] if index is None else index.shape[0], x.shape[1], check_bits(bits))
    stored = new_stored(x, size, places)
    seed, base = write_seed(stored, seed), stored.data_ptr()
    write_norm(x, index, seed, bits, eps, centered, *[base + place for place in places])
    return stored


def stored_norm_backward(
    y: Tensor,
    stored: Tensor,
    gamma: Tensor | None,
    index: Tensor | None,
    bits: int,
    centered: bool,
    dtype: torch.dtype,
    sums: bool,
    sum_dtype: torch.dtype | None = None,
) -> Any:
    """Compute what :func:`rmm_linear.ops.norms.norm_backward` does."""
    if dtype not in TYPES:
        return NotImplemented
    rows = y.shape[0] if index is None else index.shape[0]
    base, (_, *places) = stored.data_ptr(), _layout(rows, y.shape[1], bits)[0]
    at = [base + place for place in places]
    return read_norm(y, gamma, index, rows, read_seed(stored), bits, centered, dtype, sums, sum_dtype, *at)


@functools.lru_cache(maxsize=4096)
def _layout(rows: int, columns: int, bits: int) -> tuple[list[int], int]:
    return offsets(tuple(norm_parts(rows, columns, bits)))


def write_norm(
    x: Tensor,
    index: Tensor | None,
    seed: int,
    bits: int,
    eps: float,
    centered: bool,
    rstd: int,
    codes: int,
    scales: int,
) -> None:
    """Write what :func:`pack_norm` returns at addresses."""
    rows, columns = x.shape[0] if index is None else index.shape[0], x.shape[1]
    x, index = _rows(x), None if index is None else index.contiguous()
    run(
        "rmm_pack_norm", x.data_ptr(), TYPES[x.dtype], x.stride(0), pointer(index), rows, columns, centered, eps, bits,
        seed, codes, scales, rstd, threads(x),
    )  # fmt: skip


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
    """Compute what :func:`rmm_linear.packing.norms.norm_gradients` does."""
    codes, scales, rstd = (tensor.contiguous() for tensor in saved)
    places = rstd.data_ptr(), codes.data_ptr(), scales.data_ptr()
    how = bits, centered, dtype or y.dtype, sums, sum_dtype
    return read_norm(y, gamma, index, len(rstd), int(seed), *how, *places)


def read_norm(
    y: Tensor,
    gamma: Tensor | None,
    index: Tensor | None,
    rows: int,
    seed: int,
    bits: int,
    centered: bool,
    dtype: torch.dtype,
    sums: bool,
    sum_dtype: torch.dtype | None,
    rstd: int,
    codes: int,
    scales: int,
) -> NormGradients:
    """Compute :func:`norm_gradients` from what lies at addresses."""
    columns = y.shape[1]
    x = (y.new_empty if index is None else y.new_zeros)(y.shape, dtype=dtype)
    if gamma is not None and (gamma.dtype != torch.float32 or not gamma.is_contiguous()):
        gamma = gamma.to(torch.float32).contiguous()
    y, index = _rows(y), None if index is None else index.contiguous()
    weight, bias = (y.new_empty(columns if sums else 0, dtype=torch.float32) for _ in range(2))
    run(
        "rmm_norm_backward", y.data_ptr(), TYPES[y.dtype], y.stride(0), pointer(index), rows, columns, centered, bits,
        pointer(gamma), seed, codes, scales, rstd, x.data_ptr(), TYPES[dtype], pointer(weight) if sums else 0,
        pointer(bias) if sums else 0, threads(y),
    )  # fmt: skip
    return NormGradients(x, *(one if sum_dtype is None else one.to(sum_dtype) for one in (weight, bias)))


def _rows(matrix: Tensor) -> Tensor:
    """Return the matrix with the elements of every row side by side."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
