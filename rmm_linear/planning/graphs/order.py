"""Reorder a graph's nodes so that tensors live shorter: the lifetimes of OLLA (Steiner et al. 2022).

A tensor that is made later, or whose readers come sooner, lives shorter, in both passes: the backward pass runs in the
reverse order. Candidates come from depth-first searches, from scheduling by bytes in both directions, and from moving
single nodes; their peaks are estimated, and the best of them are simulated.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.pieces import run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.plan import GraphPlan, fingerprint, planned_pieces
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.workspace import Workspace

_MOVES = 600  # single nodes that are tried elsewhere, from the best order on
_JUDGED = 3  # orders that are simulated


def order(
    model: nn.Module, example: Any, plan: GraphPlan | None = None, *, workspace: Workspace | None = None
) -> GraphPlan:
    """Reorder the nodes of a model's graph for the least peak.

    Loss, gradients and buffers stay those of the model to the bit: random operators keep their order, and so do those
    that change or read what is changed in place, and the readers of what three or more read.

    Args:
        model: The model, in training mode.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. The graph must be a single one.
        plan: A plan for this model and batch whose pieces stay as they are: nodes are reordered inside of them. None
            reorders the plain graph.
        workspace: As for :func:`rmm_linear.planning.plan_graph`; pass the plan's.

    Returns:
        The plan with the new order, and the peak that it has in the simulation: at most that of ``plan``, or of the
        plain graph.

    Raises:
        ValueError: If the model is no single graph, or the plan is of another one.
    """
    graph, inputs = capture(model, example)
    costs, key = graph_costs(graph, inputs), fingerprint(graph, inputs)
    if plan is not None:
        plan.check(graph, inputs)
    part = [0] * costs.count if plan is None else plan.part
    recomputed = set() if plan is None else set(plan.recomputed)
    given = () if plan is None else plan.order
    first = list(given) or sorted(range(costs.count), key=part.__getitem__)
    before = _before(costs, part)
    found = improve(costs, before, first)
    runs = [run_in_pieces(costs, part, recomputed, each) for each in found]
    peaks = [(simulate_graph(costs, run, workspace).bytes, each) for run, each in zip(runs, found, strict=True)]
    peak, best = min(peaks, key=lambda pair: pair[0])
    if plan is not None:
        made = dataclasses.replace(plan, order=best, predicted=peak)
    else:
        plain = peaks[0][0]
        pieces = planned_pieces(costs, part, recomputed)
        made = GraphPlan("order", key, part, [], pieces, memory=plain, predicted=peak, plain=plain, order=best)
    return made.made_for(model, workspace)


def improve(costs: GraphCosts, before: Sequence[set[int]], first: list[int]) -> list[list[int]]:
    candidates = [first, *_candidates(costs, before, first)]
    candidates.sort(key=lambda each: estimate(costs, each))
    best = _moved(costs, before, candidates[0])
    others = [each for each in (best, *candidates) if each != first]
    distinct = [each for place, each in enumerate(others) if each not in others[:place]]
    return [first, *distinct[:_JUDGED]]


def estimate(costs: GraphCosts, nodes: Sequence[int]) -> tuple[int, int]:
    """Estimate the peak of a step without recomputation, in bytes, and the sum of the bytes of all moments."""
    count = costs.count
    place = {node: position for position, node in enumerate(nodes)}
    forward, backward = [0] * (count + 1), [0] * (count + 1)
    savers: dict[int, int] = {}
    users: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for key in costs.saved[node]:
            savers.setdefault(key, position)
        for key in costs.read[node]:
            users[key] = position
    for key, node in costs.made.items():
        size, begin = costs.size[key], place[node]
        end = count - 1 if costs.last[key] == count else users.get(key, begin)
        forward[begin] += size
        if key in savers:
            backward[savers[key]] += size
        elif end + 1 < count:
            forward[end + 1] -= size
        if key in costs.differentiable:
            backward[begin] += size
            backward[end] -= size
    weights = [0] * (count + 1)
    for last, size in costs.parameters.values():
        weights[place[last]] += size
    later = [*accumulate(reversed(weights))][::-1]
    reads = [sum(costs.size[key] for key in costs.read[node] & costs.differentiable) for node in nodes]
    ahead = [*accumulate(forward)][:count]
    back = [sum(parts) for parts in zip([*accumulate(backward)][:count], later[:count], reads, strict=True)]
    return max(*ahead, *back), sum(ahead) + sum(back)


def _before(costs: GraphCosts, part: Sequence[int]) -> list[set[int]]:
    """By node: those that must come before it, pieces in their order."""
    found = costs.before()
    for place in range(costs.count):
        found[place] |= {other for other in range(costs.count) if part[other] < part[place]}
    return found


def _candidates(costs: GraphCosts, before: Sequence[set[int]], first: Sequence[int]) -> list[list[int]]:
    after: list[set[int]] = [set() for _ in before]
    for place, others in enumerate(before):
        for other in others:
            after[other].add(place)
    rank = {place: number for number, place in enumerate(first)}
    made = [sum(costs.size[key] for key in keys) for keys in costs.made_by()]
    last = {key: rank[place] for place in first for key in costs.read[place] if key not in costs.saver}
    gain = made.copy()  # less what dies in the given order
    for key, number in last.items():
        gain[first[number]] -= costs.size[key]
    by_gain = _scheduled(before, after, lambda place: (gain[place], rank[place]))
    by_size = _scheduled(before, after, lambda place: (made[place], rank[place]))
    late = _scheduled(after, before, lambda place: (-gain[place], -rank[place]))[::-1]
    latest = _scheduled(after, before, lambda place: (made[place], -rank[place]))[::-1]
    return [by_gain, by_size, late, latest, _depth_first(before, rank, made, 1), _depth_first(before, rank, made, -1)]


def _scheduled(
    before: Sequence[set[int]], after: Sequence[set[int]], key: Callable[[int], tuple[int, int]]
) -> list[int]:
    """Take the node with the least key of those whose turn it may be."""
    waiting = [len(others) for others in before]
    ready, found = [place for place, number in enumerate(waiting) if not number], list[int]()
    while ready:
        place = min(ready, key=key)
        ready.remove(place)
        found.append(place)
        for other in after[place]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return found


def _depth_first(before: Sequence[set[int]], rank: dict[int, int], made: Sequence[int], sign: int) -> list[int]:
    """Make what the last nodes need, one branch after another, those with much before the others or the reverse."""
    found, seen = list[int](), set[int]()
    for end in sorted(rank, key=rank.__getitem__):
        todo = [(end, False)]
        while todo:
            place, is_ready = todo.pop()
            if is_ready:
                found.append(place)
            elif place not in seen:
                seen.add(place)
                todo.append((place, True))
                needed = sorted(before[place] - seen, key=lambda each: (sign * made[each], rank[each]))
                todo += [(each, False) for each in needed]
    return found


def _moved(costs: GraphCosts, before: Sequence[set[int]], first: list[int]) -> list[int]:
    """Move single nodes as long as that lowers the estimate."""
    draw, best, value = random.Random(0), first, estimate(costs, first)
    for _ in range(_MOVES):
        place = draw.choice(best)
        rest = [each for each in best if each != place]
        low = max((number + 1 for number, each in enumerate(rest) if each in before[place]), default=0)
        high = next((number for number, each in enumerate(rest) if place in before[each]), len(rest))
        target = draw.randint(low, high)
        moved = [*rest[:target], place, *rest[target:]]
        found = estimate(costs, moved)
        if found < value:
            best, value = moved, found
    return best
