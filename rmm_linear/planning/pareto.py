"""States that no other beats in both bytes and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class HasCosts(Protocol):
    """What a state has."""

    @property
    def kept(self) -> int:
        """Bytes."""
        ...

    @property
    def seconds(self) -> float:
        """Time."""
        ...


_Costs = TypeVar("_Costs", bound=HasCosts)


def unbeaten(states: Iterable[_Costs], most: int) -> list[_Costs]:
    """Choose the states that keep less than all faster ones, thinned out evenly to what can be carried.

    Args:
        states: In any order.
        most: Number of states to carry, at least 2.

    Returns:
        At most ``most`` of them, from the fewest bytes to the least time; the first and the last are always there.
    """
    found: list[_Costs] = []
    for state in sorted(states, key=lambda state: (state.kept, state.seconds)):
        if not found or state.seconds < found[-1].seconds - 1e-12:
            found.append(state)
    if len(found) <= most:
        return found
    return [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]


def unbeaten_places(kept: Tensor, seconds: Tensor, most: int) -> Tensor:
    """Do the same as :func:`unbeaten` for many states at once.

    Args:
        kept: Bytes, shape (n,).
        seconds: Time, shape (n,).
        most: Number of states to carry, at least 2.

    Returns:
        Places of the states, int64, shape (m,), m ≤ ``most``.
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
