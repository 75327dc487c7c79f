"""Comparisons of the kernels of masks with plain PyTorch."""

from __future__ import annotations

import torch
from rmm_kernels_checks import VIEWS, Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.packing import masks as plain


def pack_and_apply_mask(device: str, shape: tuple[int, int], dtype: torch.dtype, indexed: bool) -> list[Check]:
    """Compare the bits of a mask, and what it makes of a matrix."""
    make = Inputs(device)
    y = make.matrix(*shape, dtype)
    mask, index = (y > 0.3).to(dtype), torch.arange(0, shape[0], 3, device=device).flip(0) if indexed else None
    bits, expected = kernels().pack_mask(mask, index), plain.pack_mask(mask, index)
    applied, expected_applied = (apply(y, expected, 1.25, index) for apply in (kernels().apply_mask, plain.apply_mask))
    return [
        same("bits", bits, expected),
        same("bits of bool", kernels().pack_mask(mask.bool(), index), expected),
        same("zeros", applied == 0, expected_applied == 0),
        close("applied", applied, expected_applied, dtype),
    ]


def strided_masks(device: str, view: str) -> list[Check]:
    """Compare them on a matrix that is not contiguous."""
    y = VIEWS[view](Inputs(device).matrix(80, 80))
    bits = plain.pack_mask(y > 0)
    return [
        same("bits", kernels().pack_mask(y > 0), bits),
        same("applied", kernels().apply_mask(y, bits, 2.0), plain.apply_mask(y, bits, 2.0)),
    ]
