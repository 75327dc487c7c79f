"""Masks of dropout: zeros in one bit per element, exact; or drawn again from a seed, without a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.sketches.philox import philox

_BITS = 8
_COUNTERS = 1024  # of a tile of :func:`dropout`, which has four elements for each


def pack_mask(mask: Tensor, index: Tensor | None = None) -> Tensor:
    """Store which elements of a matrix (N, C) are not zero: uint8, shape (n, ⌈C / 8⌉).

    Bit j of byte i of a row says whether its element 8·i + j is not zero. index: Rows to store, int64, (n,); None for
    all.
    """
    kept = (mask if index is None else mask.index_select(0, index)) != 0
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[1] % _BITS)).unflatten(1, (-1, _BITS))
    return (kept.long() << torch.arange(_BITS, device=mask.device)).sum(-1).to(torch.uint8)


def apply_mask(y: Tensor, bits: Tensor, scale: float, index: Tensor | None = None) -> Tensor:
    """Multiply the stored elements by a number and all others by zero, so that NaN and infinities arrive."""
    kept = (bits.unsqueeze(-1) >> torch.arange(_BITS, device=bits.device, dtype=torch.uint8)) & 1
    factor = kept.flatten(1)[:, : y.shape[1]].to(y.dtype) * scale
    if index is None:
        return y * factor
    return torch.zeros_like(y).index_copy_(0, index, y.index_select(0, index) * factor)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Set elements to zero with probability p to 2⁻³³, and divide the others by the probability that they are kept.

    Of the elements of a tile of 4096, in their order in a contiguous tensor, number 1024 · j + i has word j of counter
    i. seed: int64, (1,). p: Above 0 and below 1.

    Example:
        >>> dropout(torch.ones(1, 6), torch.tensor([4]), 0.75)
        tensor([[0., 0., 0., 0., 0., 4.]])
    """
    x, drops = x.contiguous(), min(round(p * 2**32), 2**32 - 1)
    tiles = -(-x.numel() // (4 * _COUNTERS))
    words = philox(seed, torch.arange(tiles * _COUNTERS, device=x.device))
    word = torch.stack([each.view(tiles, _COUNTERS) for each in words], 1).view(-1)[: x.numel()].view(x.shape)
    kept = (word ^ 2**31) >= drops  # kernels compare signed words
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * (kept.to(wide) * (2**32 / (2**32 - drops)))).to(x.dtype)
