"""Compute the costs of pieces of a graph, saved or recomputed, in one sweep over its nodes.

A piece (a, b] that is saved leaves the storages made in it that it saves or that are used after it; recomputed, only
those used after it. Its backward pass needs, while node p runs backward,

    S(a, p) + G(p) + g(p) + W(p)

bytes on top of what earlier pieces leave: what the piece has saved up to p, the gradients that cross p, those of what p
reads, and the gradients of parameters last used at or after p. None of them depends on b, so one sweep per a finds the
peaks of all its pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rmm_linear.planning.graphs.costs import GraphCosts

Parts = tuple[list[int], set[int]]  # by node: its part; and the parts that are recomputed


@dataclass(frozen=True)
class Piece:
    """Nodes from number ``begin`` to before ``end`` that are saved or recomputed together."""

    begin: int
    end: int
    recomputed: bool


@dataclass(frozen=True)
class PieceCost:
    """The needs of a piece."""

    piece: Piece
    peak: int  # bytes at its peak, on top of what earlier pieces leave
    kept: int  # bytes that it leaves
    seconds: float  # a rough time of its recomputation


class PieceCosts:
    """The costs of pieces of a graph."""

    def __init__(self, costs: GraphCosts) -> None:
        self.costs = costs
        self.seconds, self.made_by = costs.seconds, costs.made_by()
        self.crossing, self.weights = _crossing(costs), _weights(costs)
        differentiable = [read & costs.differentiable for read in costs.read]
        self.read = [sum(costs.size[key] for key in keys) for keys in differentiable]
        self.dying: list[list[int]] = [[] for _ in costs.nodes]
        for key, place in costs.last.items():
            if place < costs.count:
                self.dying[place].append(key)

    def beginning(self, begin: int, ends: Collection[int]) -> list[PieceCost]:
        """Return the costs of pieces with one begin: saved, and recomputed where that is possible."""
        costs, found = self.costs, list[PieceCost]()
        repeatable, stop = costs.repeatable(begin), max(ends)
        saved = waiting = bound = 0  # bytes: saved, made in the piece and not saved so far, used after it
        forward = again = backward = 0  # peaks: of the forward pass, of the recomputation, of the backward pass
        time = time_to_saver = 0.0
        crossing: dict[int, bool] = {}  # made in the piece and used later, to whether that is saved
        for place in range(begin, stop):
            before = forward, saved + waiting
            for key in self.made_by[place]:
                crossing[key] = False
                waiting += costs.size[key]
                bound += costs.size[key]
            for key in costs.saved[place]:
                if costs.made[key] >= begin and costs.saver[key] == place:
                    saved += costs.size[key]
                    if key in crossing:
                        crossing[key] = True
                        waiting -= costs.size[key]
            forward = max(forward, saved + waiting)
            time += self.seconds[place]
            if costs.saved[place]:  # a recomputation ends when its last tensor is saved: inputs come before the result
                own = any(costs.made[key] == place for key in costs.saved[place])
                again, time_to_saver = max(before[0], saved + waiting if own else before[1]), time
            for key in self.dying[place]:
                if key in crossing:
                    waiting -= 0 if crossing.pop(key) else costs.size[key]
                    bound -= costs.size[key]
            backward = max(backward, saved + self.crossing[place] + self.read[place] + self.weights[place])
            end = place + 1
            if end in ends:
                found.append(PieceCost(Piece(begin, end, False), max(forward, backward), saved + waiting, 0.0))
                if end < costs.count and end <= repeatable:
                    peak = max(forward, again + self.crossing[place] + self.weights[end], backward)
                    found.append(PieceCost(Piece(begin, end, True), peak, bound, time_to_saver))
        return found


def estimate(costs: GraphCosts, parts: Parts) -> tuple[int, float]:
    """Estimate the peak in bytes of a graph in pieces, and the time of the recomputation."""
    part, recomputed = parts
    order = sorted(range(costs.count), key=part.__getitem__)
    ordered = [part[place] for place in order]
    sums = PieceCosts(costs.reordered(order))
    ends = [place for place in range(1, costs.count) if ordered[place] != ordered[place - 1]] + [costs.count]
    begin = kept = peak = 0
    seconds = 0.0
    for end in ends:
        choices = sums.beginning(begin, (end,))
        choice = choices[-1 if ordered[begin] in recomputed else 0]
        peak, kept = max(peak, kept + choice.peak), kept + choice.kept
        seconds += choice.seconds
        begin = end
    return peak, seconds


def _crossing(costs: GraphCosts) -> list[int]:
    """By node: bytes of the gradients that cross it."""
    found = [0] * (costs.count + 1)
    for key in costs.differentiable:
        found[costs.made[key]] += costs.size[key]
        found[min(costs.last[key], costs.count)] -= costs.size[key]
    for place in costs.joining:
        _add_joined(costs, place, found)
    return [*accumulate(found)]


def _add_joined(costs: GraphCosts, place: int, found: list[int]) -> None:
    """Add the rest of a concatenation's gradient: it lives as long as the gradient of one of its parts."""
    parts = [key for key in costs.read[place] & costs.differentiable if costs.made[key] < place]
    whole = sum(costs.size[key] for key, maker in costs.made.items() if maker == place and key in costs.differentiable)
    begins: dict[int, int] = {}  # to where a part's own gradient takes over: its use before, or the node that makes it
    for key in parts:
        begins[key] = max(
            (p for p in range(costs.made[key] + 1, place) if key in costs.read[p]), default=costs.made[key]
        )
    end, alive = place, sum(costs.size[key] for key in parts)
    for key in sorted(parts, key=begins.__getitem__, reverse=True):
        found[begins[key]] += max(whole - alive, 0)
        found[end] -= max(whole - alive, 0)
        end, alive = begins[key], alive - costs.size[key]


def _weights(costs: GraphCosts) -> list[int]:
    """By node: bytes of the gradients of parameters used at or after it."""
    found = [0] * (costs.count + 1)
    for last, size in costs.parameters.values():
        found[last] += size
    return [*accumulate(reversed(found))][::-1]


def of_pieces(count: int, pieces: Sequence[Piece]) -> Parts:
    """Return the parts of pieces that follow each other; neighbours that are saved are one."""
    part, recomputed, number, was_kept = [0] * count, set[int](), -1, False
    for piece in pieces:
        number += 0 if was_kept and not piece.recomputed else 1
        was_kept = not piece.recomputed
        if piece.recomputed:
            recomputed.add(number)
        part[piece.begin : piece.end] = [number] * (piece.end - piece.begin)
    return part, recomputed
