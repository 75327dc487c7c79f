"""Recomputation by lower sets of a graph: Kusumoto et al. 2019 (arXiv 1905.11722), and segments by Chen et al. 2016.

A lower set L has no edge into it from outside. Along a sequence of lower sets, the stage V between two of them saves
its boundary, the nodes that later ones read, and recomputes the others in the backward pass. The dynamic program finds
the sequence with the least recomputation whose stages fit:

    saved before the stage + 2 m(V) + m(nodes that read L) + m(their other operands)  ≤  budget

Sets are bit masks of nodes. "exact" uses all lower sets, otherwise those of the nodes that reach one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.cuts import unbeaten

MOST_SETS = 3000
_STATES = 100


@dataclass(frozen=True)
class _Set:
    nodes: int
    bytes: int
    boundary: int
    behind: int  # bytes of nodes that a gradient comes from, and of their other operands


class _Transition(NamedTuple):
    """From the lower sets within one to that one: which they are, bytes needed, and saved bytes and time added."""

    begins: Tensor
    needed: Tensor
    new: Tensor


class LowerSets:
    """The lower sets of a graph, and sequences of them."""

    def __init__(self, costs: GraphCosts, *, exact: bool = False) -> None:
        self.count = costs.count
        self.full = (1 << costs.count) - 1
        outputs = {key for place, read in enumerate(costs.read) for key in read}
        self.bytes = [0] * costs.count
        for key, place in costs.made.items():
            if key in outputs or costs.last[key] == costs.count:
                self.bytes[place] += costs.size[key]
        self.seconds = costs.seconds
        self.before, self.after = _edges(costs)
        made_by = costs.made_by()  # a view makes nothing
        self.trained = [bool((made_by[p] or costs.read[p]) & costs.differentiable) for p in range(costs.count)]
        groups = [sum(1 << place for place in group) for group in costs.groups]
        self.sets = self._describe(self._all(groups) if exact else self._ancestors(groups))
        self.steps = self._steps()

    def solve(self, budget: int, *, most: bool = False) -> list[int] | None:
        """Find the lower sets with the least recomputation within bytes (results and their gradients), or the most."""
        count, last = len(self.sets), len(self.sets) - 1
        kept = torch.full((count, _STATES), torch.inf, dtype=torch.float64)  # no state, where infinite
        cached = torch.zeros((count, _STATES), dtype=torch.float64)
        origins = torch.zeros((count, _STATES), dtype=torch.int64)
        kept[0, 0] = 0
        for place in range(1, count):
            step = self.steps[place - 1]
            before = kept[step.begins]
            found = (before + step.needed[:, None] <= budget).flatten().nonzero().flatten()
            bytes_kept = (before + step.new[:, :1]).flatten()[found]
            time_cached = (cached[step.begins] + step.new[:, 1:]).flatten()[found]
            chosen = unbeaten(bytes_kept, time_cached if most else -time_cached, _STATES)
            kept[place, : len(chosen)] = bytes_kept[chosen]
            cached[place, : len(chosen)] = time_cached[chosen]
            origins[place, : len(chosen)] = found[chosen]
        if torch.isinf(kept[last, 0]):
            return None
        value = -cached[last] if most else cached[last]
        best = int(torch.where(torch.isinf(kept[last]), -torch.inf, value).argmax())
        stages, place = list[int](), last
        while place:
            index, state = divmod(int(origins[place, best]), _STATES)
            before = int(self.steps[place - 1].begins[index])
            stages.append(self.sets[place].nodes & ~self.sets[before].nodes)
            place, best = before, state
        return stages[::-1]

    def _steps(self) -> list[_Transition]:
        sizes = torch.tensor([float(one.bytes) for one in self.sets], dtype=torch.float64)
        values = torch.tensor([self.bytes, self.seconds], dtype=torch.float64)
        members = torch.tensor([self._row(one.nodes) for one in self.sets], dtype=torch.float64)
        found = []
        for place in range(1, len(self.sets)):
            end, inside = self.sets[place], members[place]
            begins = ((members[:place] * (1 - inside)).sum(1) == 0).nonzero().flatten()
            boundary = torch.tensor(self._row(end.boundary), dtype=torch.float64)
            new = (1 - members[begins]) @ (boundary * values).T
            found.append(_Transition(begins, 2 * (inside @ values[0] - sizes[begins]) + end.behind, new))
        return found

    def parts(self, stages: Sequence[int]) -> tuple[list[int], set[int]]:
        """Say which part each node belongs to, and which parts are recomputed."""
        part, recomputed = [0] * self.count, set[int]()
        for number, stage in enumerate(stages):
            kept = all(self.after[place] & ~stage for place in _bits(stage))
            if number < len(stages) - 1 and not kept:
                recomputed.add(number)
            for place in _bits(stage):
                part[place] = number
        return part, recomputed

    def _ancestors(self, groups: Sequence[int]) -> set[int]:
        found, reaching = {0, self.full}, [0] * self.count
        for place in range(self.count):
            reaching[place] = 1 << place
            for other in _bits(self.before[place]):
                reaching[place] |= reaching[other]
        for place in range(self.count):
            found.add(self._closed(reaching[place], reaching, groups))
        return found

    def _closed(self, nodes: int, reaching: Sequence[int], groups: Sequence[int]) -> int:
        """Return the least lower set around nodes that divides no group."""
        while True:
            larger = nodes
            for group in groups:
                if larger & group:
                    larger |= group
            for place in _bits(larger & ~nodes):
                larger |= reaching[place] or 1 << place
                for other in _bits(self.before[place]):
                    larger |= 1 << other | reaching[other]
            if larger == nodes:
                return nodes
            nodes = larger

    def _all(self, groups: Sequence[int]) -> set[int]:
        found, todo = {0}, [0]
        while todo:
            nodes = todo.pop()
            for place in _bits(self.full & ~nodes):
                larger = nodes | 1 << place
                if not self.before[place] & ~nodes and larger not in found:
                    found.add(larger)
                    todo.append(larger)
            if len(found) > 20 * MOST_SETS:
                break
        legal = {nodes for nodes in found if all(nodes & group in (0, group) for group in groups)}
        if len(legal) > MOST_SETS or todo:
            number = f"more than {len(found):,}" if todo else f"{len(legal):,}"
            raise ValueError(
                f'method="kusumoto-exact" needs all lower sets of the graph, at most {MOST_SETS:,}; it has {number}. '
                'Use method="kusumoto" or "cuts".'
            )
        return legal

    def _describe(self, found: set[int]) -> list[_Set]:
        described = []
        for nodes in sorted(found, key=lambda one: (one.bit_count(), one)):
            boundary = behind = other = 0
            for place in _bits(nodes):
                if self.after[place] & ~nodes:
                    boundary |= 1 << place
                    behind |= self.after[place] & ~nodes if self.trained[place] else 0
            for place in _bits(behind):
                other |= self.before[place] & ~nodes
            size = self._sum(behind, self.bytes) + self._sum(other, self.bytes)
            described.append(_Set(nodes, self._sum(nodes, self.bytes), boundary, size))
        return described

    def _row(self, nodes: int) -> list[float]:
        return [float(nodes >> place & 1) for place in range(self.count)]

    @staticmethod
    def _sum(nodes: int, values: Sequence[float]) -> int:
        return sum(values[place] for place in _bits(nodes))  # type: ignore[return-value]


def chen_segments(costs: GraphCosts, limit: int) -> list[tuple[int, int]]:
    """Divide a graph into segments of about ``limit`` bytes, between nodes where one tensor alone crosses."""
    crossing, made = [0] * (costs.count + 1), [0] * costs.count
    for key, place in costs.made.items():
        made[place] += costs.size[key]
        if key in costs.differentiable:
            for cut in range(place + 1, min(costs.last[key], costs.count) + 1):
                crossing[cut] += 1
    segments, begin, last = list[tuple[int, int]](), 0, 0
    for cut in [*(cut for cut in costs.legal_cuts() if crossing[cut] == 1), costs.count]:
        if last > begin and sum(made[begin:cut]) > limit:
            segments.append((begin, last))
            begin = last
        last = cut
    return [*segments, (begin, costs.count)]


def _edges(costs: GraphCosts) -> tuple[list[int], list[int]]:
    """By node: those that must come before it, and those that read from it."""
    before = [sum(1 << first for first in firsts) for firsts in costs.before()]
    after = [0] * costs.count
    for second, firsts in enumerate(costs.sources()):
        for first in firsts:
            after[first] |= 1 << second
    return before, after


def _bits(nodes: int) -> Iterator[int]:
    while nodes:
        low = nodes & -nodes
        yield low.bit_length() - 1
        nodes ^= low
