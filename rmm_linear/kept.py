"""What a layer keeps of its input, and the gradient made from it.

Kept are tensors only (a sketch Z, packed or not, and the seed of S), because autograd's saved-tensor hooks, and with
them activation checkpointing, see nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear import ops
from rmm_linear.packing import packed_bytes
from rmm_linear.sketches import TokenMask, kept_rows


@dataclass(frozen=True)
class Recipe:
    """How one input is kept.

    Attributes:
        kind: Family of the sketch.
        rows: K.
        block: Tokens per block, or None.
        bits: Bits per stored element; None is the dtype itself.
    """

    kind: str
    rows: int
    block: int | None = None
    bits: int | None = None

    def bytes(self, tokens: int, features: int, itemsize: int) -> int:
        """Return the bytes kept for an input, the seed included.

        Args:
            tokens: N.
            features: I.
            itemsize: Bytes per element of the input.

        Returns:
            K·I·itemsize + 8, or K·(⌈I·bits/8⌉ + 4·⌈I/64⌉) + 8 when packed.
        """
        rows = kept_rows(tokens, self.rows, self.block)
        return 8 + (rows * features * itemsize if self.bits is None else packed_bytes(rows, features, self.bits))


def keep(x: Tensor, recipe: Recipe, seed: int | Tensor, mask: TokenMask | None = None) -> tuple[Tensor, ...]:
    """Make what is kept of an input.

    Args:
        x: Input, shape (N, I).
        recipe: How it is kept.
        seed: Seed of S and of the rounding; or a tensor with it, int64, shape (1,).
        mask: The tokens that count, or None for all.

    Returns:
        Z and the seed, or codes, ranges and the seed when packed; tensors on the device of ``x``.
    """
    seeds = _on_device(seed, x.device)
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    if recipe.bits is not None:
        return (*ops.packed_sketch(x, seeds, recipe.kind, recipe.rows, recipe.bits, recipe.block, *ranks), seeds)
    if mask is None and kept_rows(x.shape[0], recipe.rows, recipe.block) >= x.shape[0]:
        return x, seeds
    return ops.sketch(x, seeds, recipe.kind, recipe.rows, recipe.block, *ranks), seeds


def _on_device(seed: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        return seed.to(device)
    seeds = torch.full((1,), seed, dtype=torch.int64, device=device)
    if _is_capturing(device):
        # A number would be the same in every replay of the graph; the device's generator is not.
        seeds ^= torch.randint(2**63 - 1, (1,), device=device)
    return seeds


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def weight_gradient(
    y: Tensor, kept: tuple[Tensor, ...], recipe: Recipe, features: int, mask: TokenMask | None
) -> Tensor:
    """Return the estimate of dW = YᵀX.

    Args:
        y: Gradient by the layer's output, shape (N, O).
        kept: Result of :func:`keep`.
        recipe: The recipe it was made by.
        features: I.
        mask: The mask it was made with.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    *stored, seeds = kept
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    if recipe.bits is not None:
        return ops.unpacked_product(
            y, *stored, seeds, recipe.kind, recipe.rows, recipe.bits, features, recipe.block, *ranks
        )
    if mask is not None or kept_rows(y.shape[0], recipe.rows, recipe.block) < y.shape[0]:
        y = ops.sketch(y, seeds, recipe.kind, recipe.rows, recipe.block, *ranks)
    return y.T @ stored[0]
