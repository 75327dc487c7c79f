"""States that no other beats in both bytes and time."""

from __future__ import annotations

import torch
from torch import Tensor


def unbeaten(kept: Tensor, seconds: Tensor, most: int) -> Tensor:
    """Choose the states that keep less than all faster ones, thinned out evenly to what can be carried.

    Args:
        kept: Bytes, shape (n,).
        seconds: Time, shape (n,).
        most: Number of states to carry, at least 2.

    Returns:
        Places of the states, int64, shape (m,), m ≤ ``most``, from the fewest bytes to the least time. The first and
        the last are always there.
    """
    order = torch.argsort(seconds, stable=True)
    order = order[torch.argsort(kept[order], stable=True)]
    ordered = seconds[order]
    is_better = torch.ones(len(order), dtype=torch.bool)
    is_better[1:] = ordered[1:] < torch.cummin(ordered, 0).values[:-1] if len(order) else is_better[1:]
    order = order[is_better]
    if len(order) <= most:
        return order
    return order[torch.linspace(0, len(order) - 1, most, dtype=torch.float64).long()]
