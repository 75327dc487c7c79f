"""Choose an option for every block of a sequence: least time within a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rmm_linear.planning.pareto import unbeaten

_MOST = 400  # states that are carried from block to block; more than enough for blocks that are alike


@dataclass(frozen=True)
class Option:
    """What may happen to a block.

    Attributes:
        name: Of the option.
        kept: Bytes that live after the block's forward pass.
        worst: Bytes at the worst moment of its forward, recomputation or backward pass, without what blocks before it
            keep.
        seconds: Time that is added.
    """

    name: str
    kept: int
    worst: int
    seconds: float


class _State(NamedTuple):
    kept: int
    seconds: float
    chosen: tuple[_State, int] | None


def choose(options: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Choose an option for every block.

    A block's worst moment comes on top of what the blocks before it keep. States are pairs of bytes kept and seconds
    added, of which those that no other beats in both are carried on.

    Args:
        options: Of every block, in the order of the forward pass.
        budget: Bytes.

    Returns:
        The index of each block's option with the least time; None if nothing fits.

    Example:
        >>> keep, again = Option("keep", 5, 6, 0.0), Option("recompute", 1, 6, 1.0)
        >>> choose([[keep, again], [keep, again]], 8)  # 1 + 6 bytes
        [1, 0]
    """
    states = [_State(0, 0.0, None)]
    for block in options:
        made = [
            _State(state.kept + option.kept, state.seconds + option.seconds, (state, index))
            for state in states
            for index, option in enumerate(block)
            if state.kept + option.worst <= budget
        ]
        if not made:
            return None
        kept = torch.tensor([state.kept for state in made], dtype=torch.float64)
        seconds = torch.tensor([state.seconds for state in made], dtype=torch.float64)
        states = [made[place] for place in unbeaten(kept, seconds, _MOST).tolist()]
    state, chosen = min(states, key=lambda one: one.seconds), list[int]()
    while state.chosen is not None:
        state, index = state.chosen
        chosen.append(index)
    return chosen[::-1]


def least(options: Sequence[Sequence[Option]]) -> int:
    """Return the least budget for which :func:`choose` finds something.

    Args:
        options: Of every block.

    Returns:
        Bytes.
    """
    # A block that keeps less never harms those after it, so only its own worst moment may speak against it.
    low, high = 0, sum(max(option.kept for option in block) for block in options)
    high += max(option.worst for block in options for option in block)
    while low < high:
        middle = (low + high) // 2
        kept, high_enough = 0, True
        for block in options:
            fitting = [option.kept for option in block if kept + option.worst <= middle]
            if not fitting:
                high_enough = False
                break
            kept += min(fitting)
        low, high = (low, middle) if high_enough else (middle + 1, high)
    return low
