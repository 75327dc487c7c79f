"""Cut a graph's order of execution into pieces, of which some are recomputed: least time within a memory budget."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from rmm_linear.planning.graph_costs import GraphCosts
from rmm_linear.planning.pareto import unbeaten
from rmm_linear.planning.piece_costs import Piece, PieceCosts

_STATES = 60  # carried from cut to cut
_CUTS = 110


class _State(NamedTuple):
    kept: int
    seconds: float
    before: _State | None = None
    piece: Piece | None = None


class Cuts:
    """The pieces of a graph between all pairs of its cuts."""

    def __init__(self, costs: GraphCosts) -> None:
        """Measure all pieces.

        Args:
            costs: Of the graph.
        """
        self.count = costs.count
        self.cuts = _candidates(costs)
        sums, ends = PieceCosts(costs), {*self.cuts, self.count}
        self.choices = {begin: sums.beginning(begin, ends) for begin in [0, *self.cuts]}

    def solve(self, budget: int) -> list[Piece] | None:
        """Choose pieces.

        Args:
            budget: Bytes.

        Returns:
            The pieces with the least recomputation whose peaks are within the budget; None if there are none.
        """
        states: dict[int, list[_State]] = defaultdict(list, {0: [_State(0, 0.0)]})
        for begin in [0, *self.cuts]:
            front = states[begin] = unbeaten(states[begin], _STATES)
            for choice in self.choices[begin]:
                reached = states[choice.piece.end]
                for state in front:
                    if state.kept + choice.peak > budget:
                        break  # in the order of what is kept
                    reached.append(
                        _State(state.kept + choice.kept, state.seconds + choice.seconds, state, choice.piece)
                    )
        if not states[self.count]:
            return None
        state, found = min(states[self.count], key=lambda one: one.seconds), list[Piece]()
        while state.before is not None and state.piece is not None:
            found.append(state.piece)
            state = state.before
        return found[::-1]


def _candidates(costs: GraphCosts) -> list[int]:
    """Cuts that few bytes cross: the least of each stretch, if there are too many."""
    possible = costs.possible_cuts()
    if len(possible) <= _CUTS:
        return possible
    crossing = [0] * (costs.count + 1)
    for key, place in costs.made.items():
        for cut in range(place + 1, min(costs.last[key], costs.count) + 1):
            crossing[cut] += costs.size[key]
    step = -(-len(possible) // _CUTS)
    stretches = [possible[place : place + step] for place in range(0, len(possible), step)]
    return [min(stretch, key=lambda cut: (crossing[cut], -cut)) for stretch in stretches]
