"""What is added to the scores of an attention: masks, and biases that may need a gradient, as relative positions do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.packing.attention import additive


def biased(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias of scores and a mask as numbers that are added to scores, as transformers puts them together.

    Args:
        mask: Bool, true where a query sees a key, or additive, or None.
        bias: Of the scores, as relative positions have one; the mask's shape, or one that broadcasts with it.
        dtype: Of the scores.

    Returns:
        The sum; where a bool mask is false, the lowest number of the bias's dtype.
    """
    if mask is None:
        return bias.to(dtype)
    if mask.dtype != torch.bool:
        return bias.to(dtype) + mask.to(dtype)
    return torch.where(mask, bias.to(dtype), torch.finfo(bias.dtype).min)


@dataclass(frozen=True)
class Bias:
    """What is added to the scores beside the mask.

    Attributes:
        values: Shape (B or 1, h or 1, Tq, Tk).
        gradient: Its gradient is added here, float32 at least; None if it needs none.
    """

    values: Tensor
    gradient: Tensor | None = None

    def of(self, places: slice, rows: slice, columns: slice) -> Bias:
        """Return the part for some sequences, queries and keys."""
        parts = (None if one is None else part_of(one, places, rows, columns) for one in (self.values, self.gradient))
        return Bias(*parts)  # pyright: ignore[reportArgumentType]

    def add_gradient(self, ds: Tensor, mask: Tensor | None, head: slice, rows: slice) -> None:
        """Add dS of a block, shape (sequences, heads, queries, keys), where a bool mask is true."""
        if self.gradient is None:
            return
        whole = block_of(self.gradient, head, rows, ds.shape[-1])
        if mask is not None and mask.dtype == torch.bool:
            ds = ds * block_of(mask, head, rows, ds.shape[-1])
        whole.add_(ds.sum_to_size(whole.shape))


def part_of(tensor: Tensor, places: slice, rows: slice, columns: slice) -> Tensor:
    """Return a mask or bias, shape (B or 1, h or 1, Tq, Tk), of some sequences, queries and keys."""
    return tensor[places if tensor.shape[0] > 1 else slice(None), :, rows, columns]


def block_of(tensor: Tensor, head: slice, rows: slice, seen: int) -> Tensor:
    """Return a part of it for some heads and queries and the first keys."""
    return tensor[:, head if tensor.shape[1] > 1 else slice(None), rows, :seen]


class Added:
    """What is added to the scores of some sequences: mask and bias, shape (sequences or 1, h or 1, queries, keys)."""

    def __init__(self, mask: Tensor | None, bias: Bias | None, dtype: torch.dtype) -> None:
        """Put mask and bias together, in the dtype of the scores."""
        self.mask, self.bias, self.values = mask, bias, None
        if bias is not None:
            self.values = biased(mask, bias.values, dtype)
        elif mask is not None:
            self.values = additive(mask, dtype)

    def add_gradient(self, ds: Tensor, head: slice, rows: slice) -> None:
        """Add dS of a block to the gradient of the bias."""
        if self.bias is not None:
            self.bias.add_gradient(ds, self.mask, head, rows)
