"""Plan which pieces of a captured graph are recomputed: several methods propose, the simulation judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.validation import did_you_mean
from rmm_linear.planning.budget import read_budget
from rmm_linear.planning.capture import capture
from rmm_linear.planning.cuts import Cuts
from rmm_linear.planning.graph_costs import GraphCosts, graph_costs
from rmm_linear.planning.graph_plan import GraphPlan, fingerprint, planned_pieces
from rmm_linear.planning.lower_sets import LowerSets, chen_segments
from rmm_linear.planning.pieces import graph_flops, run_in_pieces, simulate_graph

METHODS = ("cuts", "chen", "kusumoto", "kusumoto-exact")
_BISECTIONS, _POINTS, _BETWEEN = 5, 6, 3  # budgets that are tried
_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24)

Parts = tuple[list[int], set[int]]


def plan_graph(model: nn.Module, example: Any, memory: int | float | str, *, method: str = "cuts") -> GraphPlan:
    """Plan which pieces of a model's graph are recomputed, so that a step fits into a memory budget.

    The graph is captured by torch.compile's front end; nothing is compiled. Loss, gradients and buffers stay those of
    the model to the bit. Pieces may begin and end between any two operators, so networks without a list of like blocks,
    convolutional ones above all, save more than with :func:`rmm_linear.planning.plan_blocks`.

    Args:
        model: The model, in training mode.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. The graph must be a single one.
        memory: Budget for what a step makes: bytes, a text such as "2GB", or a share of the plain peak in (0, 1].
        method: "cuts": ours, over cuts of the order of execution, or the best of the others where they are better;
            "chen": segments of about the same size, all but the last recomputed; "kusumoto": the dynamic program over
            the lower sets of every node; "kusumoto-exact": over all lower sets, which suits small graphs.

    Returns:
        The plan; ``plan.apply()`` returns the model to train.

    Raises:
        ValueError: If nothing fits, with the least budget that was found; if the method is unknown; or if the model is
            no single graph, with the line.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(64, 64), nn.Tanh())))
        >>> plan = plan_graph(model, torch.ones(1000, 64), memory=0.7)
        >>> plan.predicted <= 0.7 * plan.plain
        True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.{did_you_mean(method, METHODS)}")
    graph, inputs = capture(model, example)
    plan = plan_captured(graph, inputs, memory, method)
    plan._model = model
    return plan


def plan_captured(graph: fx.GraphModule, inputs: Sequence[Any], memory: int | float | str, method: str) -> GraphPlan:
    """Plan a captured graph.

    Args:
        graph: The graph.
        inputs: Its inputs.
        memory: The budget, as for :func:`plan_graph`.
        method: As for :func:`plan_graph`.

    Returns:
        The plan.

    Raises:
        ValueError: If nothing fits, with the least budget that was found.
    """
    costs = graph_costs(graph, inputs)
    plain = simulate_graph(costs, graph).bytes
    budget = read_budget(memory, plain)
    search = _Search(costs, budget)
    keep_all: Parts = ([0] * costs.count, set())
    search.judged[_key(keep_all)] = (plain, 0.0)
    best: Parts | None = keep_all
    if plain > budget:
        tried = [method] if method != "cuts" else ["cuts", "chen", "kusumoto"]
        for each in tried:
            search.propose(each)
        best = search.best()
    if best is None:
        parts, (least, _) = search.smallest()
        name = planned_pieces(costs, *parts)
        raise ValueError(
            f"memory={memory!r} cannot be met with method={method!r}: the least found is {least} bytes "
            f"({show_bytes(least)}), in {len(name)} pieces. Use more memory, or a smaller batch."
        )
    part, recomputed = best
    predicted, _ = search.judged[_key(best)]
    flops = 1.0
    if recomputed:
        flops = graph_flops(costs, run_in_pieces(costs, part, recomputed)) / max(graph_flops(costs, graph), 1)
    return GraphPlan(
        search.found.get(_key(best), method),
        fingerprint(graph, inputs),
        part,
        sorted(recomputed),
        planned_pieces(costs, part, recomputed),
        budget,
        predicted,
        plain,
        flops,
    )


class _Search:
    """Proposals, each simulated once."""

    def __init__(self, costs: GraphCosts, budget: int) -> None:
        self.costs, self.budget = costs, budget
        self.judged: dict[tuple[Any, ...], tuple[int, float]] = {}
        self.found: dict[tuple[Any, ...], str] = {}

    def propose(self, method: str) -> None:
        """Let a method make proposals."""
        if method == "chen":
            total = sum(self.costs.size.values())
            for count in _SEGMENTS:
                self.judge(self._segments(total // count), method)
            return
        if method == "cuts":
            cuts = Cuts(self.costs)
            self.descend(method, lambda target: _of_pieces(self.costs.count, cuts.solve(target)))
            return
        sets = LowerSets(self.costs, exact=method == "kusumoto-exact")
        # In the paper's terms every result is held with its gradient, so its budgets are up to twice ours.
        self.descend(method, lambda target: sets.parts(stages) if (stages := sets.solve(target)) else None, scale=2.0)

    def descend(self, method: str, solve: Callable[[int], Parts | None], scale: float = 1.0) -> None:
        """Try the method's own budgets from the least possible on, then between the last that fits and the next."""
        low = _least(solve, int(scale * self.budget))
        high = max(int(scale * self.budget), low)
        points = [int(low * (high / low) ** (step / (_POINTS - 1))) for step in range(_POINTS)]
        ends = solve(low), solve(high)
        fits, exceeds = 0, 0
        for target in points if ends[0] != ends[1] else points[:1]:
            parts = solve(target) if target not in (low, high) else ends[target == high]
            if parts is not None and self.judge(parts, method) <= self.budget:
                fits = target
            elif fits and not exceeds:
                exceeds = target
        for _ in range(_BETWEEN if fits and exceeds else 0):
            target = (fits + exceeds) // 2
            parts = solve(target)
            if parts is not None and self.judge(parts, method) <= self.budget:
                fits = target
            else:
                exceeds = target

    def judge(self, parts: Parts, method: str) -> int:
        """Simulate a proposal."""
        key = _key(parts)
        if key not in self.judged:
            peak = simulate_graph(self.costs, run_in_pieces(self.costs, *parts)).bytes
            seconds = self.costs.seconds
            self.judged[key] = peak, sum(seconds[i] for i, number in enumerate(parts[0]) if number in parts[1])
            self.found[key] = method
        return self.judged[key][0]

    def best(self) -> Parts | None:
        """The proposal with the least recomputation that fits."""
        fitting = [key for key, (peak, _) in self.judged.items() if peak <= self.budget]
        return _parts(min(fitting, key=lambda key: (self.judged[key][1], self.judged[key][0]))) if fitting else None

    def smallest(self) -> tuple[Parts, tuple[int, float]]:
        """The proposal with the lowest peak."""
        key = min(self.judged, key=lambda one: self.judged[one])
        return _parts(key), self.judged[key]

    def _segments(self, limit: int) -> Parts:
        part, segments = [0] * self.costs.count, chen_segments(self.costs, limit)
        for number, (begin, end) in enumerate(segments):
            part[begin:end] = [number] * (end - begin)
        return part, set(range(len(segments) - 1))


def _least(solve: Callable[[int], Parts | None], high: int) -> int:
    """A budget near the least for which a method finds something."""
    low = 0
    while solve(high) is None:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        low, high = (middle, high) if solve(middle) is None else (low, middle)
    return high


def _of_pieces(count: int, pieces: Sequence[Any] | None) -> Parts | None:
    """Parts of a sequence of pieces; neighbours that are kept are one."""
    if pieces is None:
        return None
    part, recomputed, number, was_kept = [0] * count, set[int](), -1, False
    for piece in pieces:
        number += 0 if was_kept and not piece.recomputed else 1
        was_kept = not piece.recomputed
        if piece.recomputed:
            recomputed.add(number)
        part[piece.begin : piece.end] = [number] * (piece.end - piece.begin)
    return part, recomputed


def _key(parts: Parts) -> tuple[Any, ...]:
    return tuple(parts[0]), tuple(sorted(parts[1]))


def _parts(key: tuple[Any, ...]) -> Parts:
    return list(key[0]), set(key[1])
