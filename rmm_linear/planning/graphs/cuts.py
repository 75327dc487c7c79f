"""Cut a graph's order of execution into pieces, of which some are recomputed: least time within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.piece_costs import Piece, PieceCost, PieceCosts

_STATES = 120  # carried from cut to cut
_CUTS = 300


class Cuts:
    """The pieces of a graph between all pairs of its cuts."""

    def __init__(self, costs: GraphCosts) -> None:
        self.cuts = [0, *_candidates(costs), costs.count]
        number = {cut: index for index, cut in enumerate(self.cuts)}
        sums = PieceCosts(costs)
        found: list[list[PieceCost]] = [[] for _ in self.cuts]
        for cut in self.cuts[:-1]:
            for choice in sums.beginning(cut, self.cuts[number[cut] + 1 :]):
                found[number[choice.piece.end]].append(choice)
        self.choices = [_Choices(number, choices) for choices in found]

    def solve(self, budget: int) -> list[Piece] | None:
        count = len(self.cuts)
        kept = torch.full((count, _STATES), torch.inf, dtype=torch.float64)  # no state, where infinite
        seconds = torch.zeros((count, _STATES), dtype=torch.float64)
        origins = torch.zeros((count, _STATES), dtype=torch.int64)
        kept[0, 0] = 0
        for place, choices in enumerate(self.choices):
            if not choices.pieces:
                continue
            before = kept[choices.begins]
            found = (before + choices.peaks[:, None] <= budget).flatten().nonzero().flatten()
            bytes_kept = (before + choices.kept[:, None]).flatten()[found]
            time = (seconds[choices.begins] + choices.seconds[:, None]).flatten()[found]
            chosen = unbeaten(bytes_kept, time, _STATES)
            kept[place, : len(chosen)] = bytes_kept[chosen]
            seconds[place, : len(chosen)] = time[chosen]
            origins[place, : len(chosen)] = found[chosen]
        if torch.isinf(kept[-1, 0]):
            return None
        place, pieces = count - 1, list[Piece]()
        state = int(torch.where(torch.isinf(kept[-1]), torch.inf, seconds[-1]).argmin())
        while place:
            choice, state = divmod(int(origins[place, state]), _STATES)
            pieces.append(self.choices[place].pieces[choice])
            place = int(self.choices[place].begins[choice])
        return pieces[::-1]


class _Choices:
    """The pieces that end at one cut."""

    def __init__(self, number: Mapping[int, int], choices: Sequence[PieceCost]) -> None:
        self.pieces = [choice.piece for choice in choices]
        self.begins = torch.tensor([number[piece.begin] for piece in self.pieces], dtype=torch.int64)
        self.peaks = torch.tensor([choice.peak for choice in choices], dtype=torch.float64)
        self.kept = torch.tensor([choice.kept for choice in choices], dtype=torch.float64)
        self.seconds = torch.tensor([choice.seconds for choice in choices], dtype=torch.float64)


def _candidates(costs: GraphCosts) -> list[int]:
    """Return the cuts that few bytes cross: the least of each stretch, if there are too many."""
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


def unbeaten(kept: Tensor, seconds: Tensor, most: int) -> Tensor:
    """Return ``most`` places of states, thinned out evenly, that save less than all faster ones."""
    order = torch.argsort(seconds, stable=True)
    order = order[torch.argsort(kept[order], stable=True)]
    ordered = seconds[order]
    is_better = torch.ones(len(order), dtype=torch.bool)
    is_better[1:] = ordered[1:] < torch.cummin(ordered, 0).values[:-1] if len(order) else is_better[1:]
    order = order[is_better]
    if len(order) <= most:
        return order
    return order[torch.linspace(0, len(order) - 1, most, dtype=torch.float64).long()]
