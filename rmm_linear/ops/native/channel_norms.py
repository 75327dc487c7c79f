"""BatchNorm, GroupNorm and InstanceNorm from a packed copy with the C library."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, pointer, read_seed, run, threads, write_seed
from rmm_linear.packing import check_bits, empty_packed
from rmm_linear.packing.channel_norms import channel_parts, packed_shape, sets_of
from rmm_linear.packing.norms import NormCopy, NormGradients
from rmm_linear.packing.stored import new_stored, offsets

_packed_shape = functools.lru_cache(maxsize=4096)(packed_shape)


@functools.lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], groups: int, bits: int) -> tuple[list[int], int]:
    return offsets(tuple(channel_parts(shape, groups, bits)))


def pack_channels(
    x: Tensor,
    bits: int,
    seed: Tensor,
    eps: float,
    groups: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    out: NormCopy | None = None,
) -> NormCopy:
    """Pack as :func:`rmm_linear.packing.channel_norms.pack_channels` does."""
    codes, scales, saved = out or (
        *empty_packed(*packed_shape(x.shape), check_bits(bits), x),
        x.new_empty(sets_of(x.shape, groups)[0], dtype=torch.float32),
    )
    places = saved.data_ptr(), codes.data_ptr(), scales.data_ptr()
    _write(x, int(seed), bits, eps, groups, mean, rstd, *places)
    return NormCopy(codes, scales, saved)


def stored_channels(
    x: Tensor,
    seed: int | None,
    bits: int,
    eps: float,
    groups: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> Tensor:
    """Return the bytes of :func:`rmm_linear.ops.channel_norms.pack_channels`."""
    (_, *places), size = _layout(tuple(x.shape), groups, check_bits(bits))
    stored = new_stored(x, size, places)
    seed, base = write_seed(stored, seed), stored.data_ptr()
    _write(x, seed, bits, eps, groups, mean, rstd, *[base + place for place in places])
    return stored


def _write(
    x: Tensor,
    seed: int,
    bits: int,
    eps: float,
    groups: int,
    mean: Tensor | None,
    rstd: Tensor | None,
    saved: int,
    codes: int,
    scales: int,
) -> None:
    x = x.contiguous()
    run(
        "rmm_pack_channels", x.data_ptr(), TYPES[x.dtype], *x.shape, groups, *_packed_shape(tuple(x.shape)), eps,
        pointer(mean), pointer(rstd), bits, seed, codes, scales, saved, threads(x),
    )  # fmt: skip


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
    """Compute what :func:`rmm_linear.packing.channel_norms.channel_gradients` does."""
    codes, scales, rstd = (tensor.contiguous() for tensor in saved)
    places = rstd.data_ptr(), codes.data_ptr(), scales.data_ptr()
    return _read(y, gamma, bits, groups, dtype or y.dtype, sums, int(seed), *places)


def stored_gradients(
    y: Tensor, stored: Tensor, gamma: Tensor | None, bits: int, groups: int, dtype: torch.dtype, sums: bool
) -> Any:
    """Compute what :func:`rmm_linear.ops.channel_norms.channel_backward` does."""
    if dtype not in TYPES:
        return NotImplemented
    base, (_, *places) = stored.data_ptr(), _layout(tuple(y.shape), groups, bits)[0]
    at = [base + place for place in places]
    return tuple(_read(y, gamma, bits, groups, dtype, sums, read_seed(stored), *at))


def _read(
    y: Tensor,
    gamma: Tensor | None,
    bits: int,
    groups: int,
    dtype: torch.dtype,
    sums: bool,
    seed: int,
    rstd: int,
    codes: int,
    scales: int,
) -> NormGradients:
    y, x = y.contiguous(), torch.empty(y.shape, dtype=dtype, device=y.device)
    if gamma is not None and (gamma.dtype != torch.float32 or not gamma.is_contiguous()):
        gamma = gamma.to(torch.float32).contiguous()
    weight, bias = (y.new_empty(y.shape[2] if sums else 0, dtype=torch.float32) for _ in range(2))
    run(
        "rmm_channel_gradients", y.data_ptr(), TYPES[y.dtype], *y.shape, groups, *_packed_shape(tuple(y.shape)), bits,
        pointer(gamma), seed, codes, scales, rstd, x.data_ptr(), TYPES[dtype], pointer(weight) if sums else 0,
        pointer(bias) if sums else 0, threads(y),
    )  # fmt: skip
    return NormGradients(x, weight, bias)
