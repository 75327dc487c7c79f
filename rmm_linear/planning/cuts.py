"""Cut a graph's order of execution into pieces, of which some are recomputed: least time within a memory budget.

Between two cuts a piece (a, b] is kept or recomputed. Kept, it leaves the storages made in it that it saves or that are
used after it; recomputed, only those used after it. The backward pass of a piece needs, while node p runs backward,

    S(a, p) + G(p) + g(p) + W(p)

bytes on top of what earlier pieces leave: what the piece has saved up to p, the gradients that cross p, those of what p
reads, and the gradients of parameters last used at or after p. None of them depends on b, so one sweep per a finds the
peaks of all its pieces.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from rmm_linear.planning.graph_costs import GraphCosts
from rmm_linear.planning.pareto import unbeaten

_STATES = 60  # carried from cut to cut
_CUTS = 110


@dataclass(frozen=True)
class Piece:
    """Nodes that are kept or recomputed together.

    Attributes:
        begin: Number of the first node.
        end: Number of the node after the last one.
        recomputed: Whether it is recomputed in the backward pass.
    """

    begin: int
    end: int
    recomputed: bool


class _State(NamedTuple):
    kept: int
    seconds: float
    before: _State | None = None
    piece: Piece | None = None


@dataclass(frozen=True)
class _Choice:
    piece: Piece
    peak: int
    kept: int
    seconds: float


class Cuts:
    """The pieces of a graph between all pairs of its cuts."""

    def __init__(self, costs: GraphCosts) -> None:
        """Measure all pieces.

        Args:
            costs: Of the graph.
        """
        self.count = costs.count
        self.gradients, self.weights = _gradients(costs), _weights(costs)
        self.cuts = _candidates(costs)
        self.choices = {begin: self._pieces(costs, begin) for begin in [0, *self.cuts]}

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

    def _pieces(self, costs: GraphCosts, begin: int) -> list[_Choice]:
        """All pieces from one cut: a sweep over their ends."""
        ends, by_node = {*self.cuts, self.count}, _by_node(costs)
        seconds, found = costs.seconds, list[_Choice]()
        saved = forward = backward = 0
        time = time_to_saver = 0.0
        waiting: dict[int, int] = {}  # made in the piece and not saved so far
        crossing: dict[int, int] = {}  # made in the piece, whether saved or not, and used later
        for place in range(begin, costs.count):
            for key in by_node[place]:
                waiting[key] = crossing[key] = costs.size[key]
            for key in costs.saved[place]:
                if costs.made[key] >= begin and costs.saver[key] == place:
                    saved += costs.size[key]
                    waiting.pop(key, None)
            forward = max(forward, saved + sum(waiting.values()))
            for key in [key for key in crossing if costs.last[key] <= place]:
                del crossing[key]
                waiting.pop(key, None)
            backward = max(backward, saved + self.gradients[place] + self.weights[place])
            time += seconds[place]
            time_to_saver = time if costs.saved[place] else time_to_saver
            end = place + 1
            if end not in ends:
                continue
            kept = saved + sum(waiting.values())
            found.append(_Choice(Piece(begin, end, False), max(forward, backward), kept, 0.0))
            if end < costs.count:  # recomputing the last piece at once frees nothing
                again = forward + self.gradients[place] + self.weights[end]
                bound = sum(crossing.values())
                found.append(_Choice(Piece(begin, end, True), max(again, backward), bound, time_to_saver))
        return found


def _by_node(costs: GraphCosts) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for key, place in costs.made.items():
        found[place].append(key)
    return found


def _gradients(costs: GraphCosts) -> list[int]:
    """By node: bytes of the gradients that cross it and of those that it makes."""
    found = [0] * costs.count
    for key in costs.differentiable:
        for place in range(costs.made[key], min(costs.last[key], costs.count)):
            found[place] += costs.size[key]
    for place, read in enumerate(costs.read):
        found[place] += sum(costs.size[key] for key in read & costs.differentiable)
    return found


def _weights(costs: GraphCosts) -> list[int]:
    """By node: bytes of the gradients of parameters used at or after it."""
    found = [0] * (costs.count + 1)
    for last, size in costs.parameters.values():
        for place in range(last + 1):
            found[place] += size
    return found


def _candidates(costs: GraphCosts) -> list[int]:
    """Cuts that few bytes cross: the least of each stretch, if there are too many."""
    legal = costs.legal_cuts()
    if len(legal) <= _CUTS:
        return legal
    crossing = [0] * (costs.count + 1)
    for key, place in costs.made.items():
        for cut in range(place + 1, min(costs.last[key], costs.count) + 1):
            crossing[cut] += costs.size[key]
    step = -(-len(legal) // _CUTS)
    stretches = [legal[place : place + step] for place in range(0, len(legal), step)]
    return [min(stretch, key=lambda cut: (crossing[cut], -cut)) for stretch in stretches]
