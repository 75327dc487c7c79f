"""Masks in one bit per element with the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, function, pointer, threads


def pack_mask(mask: Tensor, index: Tensor | None = None) -> Tensor:
    """Return what :func:`rmm_linear.packing.masks.pack_mask` does."""
    mask = mask if mask.dtype in (*TYPES, torch.bool, torch.uint8) else mask != 0
    mask, index = mask.contiguous(), None if index is None else index.contiguous()
    rows, columns = len(mask) if index is None else len(index), mask.shape[1]
    bits = mask.new_empty(rows, (columns + 7) // 8, dtype=torch.uint8)
    function("rmm_pack_mask")(
        pointer(mask), mask.itemsize, rows, columns, pointer(index), pointer(bits),
        threads(mask),
    )  # fmt: skip
    return bits


def apply_mask(y: Tensor, bits: Tensor, scale: float, index: Tensor | None = None) -> Tensor:
    """Return what :func:`rmm_linear.packing.masks.apply_mask` does."""
    y, bits, index = y.contiguous(), bits.contiguous(), None if index is None else index.contiguous()
    out = torch.empty_like(y) if index is None else torch.zeros_like(y)
    function("rmm_apply_mask")(
        pointer(y), TYPES[y.dtype], pointer(bits), len(bits), y.shape[1], pointer(index), scale,
        pointer(out), threads(y),
    )  # fmt: skip
    return out
