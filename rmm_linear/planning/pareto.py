"""States that no other beats in both bytes and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasCosts(Protocol):
    """What a state has."""

    @property
    def kept(self) -> int:
        """Bytes."""

    @property
    def seconds(self) -> float:
        """Time."""


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
