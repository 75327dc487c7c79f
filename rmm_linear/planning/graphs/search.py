"""Look for the best pieces of a graph: methods propose, a formula ranks, the simulation judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rmm_linear._support.progress import stage
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.cuts import Cuts
from rmm_linear.planning.graphs.lower_sets import LowerSets, chen_segments
from rmm_linear.planning.graphs.piece_costs import Parts, estimate, of_pieces
from rmm_linear.planning.graphs.pieces import run_in_pieces, simulate_graph
from rmm_linear.planning.step.workspace import Workspace

_SEGMENTS = (*range(2, 13), 14, 16, 18, 20, 24, 28, 32, 40, 48)
_BELOW = (1.0, 0.97, 0.94, 0.9, 0.85)  # of the budget: a method's own idea of the peak may be too low
_ABOVE = (1.0, 1.03, 1.07, 1.15, 1.3, 1.5)  # of the least budget that a method can meet
_BISECTIONS = 9
_JUDGED = 8  # proposals that are simulated for a budget
_JUDGED_LEAST = 3  # and of each method for the least peak

Found = TypeVar("Found")


@dataclass(frozen=True)
class Proposal:
    """Pieces of a graph (by node its part, and the recomputed parts), who proposed them, peak by formula, time."""

    parts: Parts
    method: str
    estimated: int
    seconds: float


class Search:
    """Proposals, of which some are simulated."""

    def __init__(self, costs: GraphCosts, plain: int, workspace: Workspace | None = None) -> None:
        """Begin with the graph as it is."""
        self.costs, self.plain, self.workspace = costs, plain, workspace
        whole = Proposal(([0] * costs.count, set()), "keep", plain, 0.0)
        self.proposals = {_key(whole.parts): whole}
        self.judged = {_key(whole.parts): plain}

    def propose(self, method: str, budget: int) -> None:
        for parts in self._proposed(method, budget):
            key = _key(parts)
            if key not in self.proposals:
                self.proposals[key] = Proposal(parts, method, *estimate(self.costs, parts))

    def best(self, budget: int) -> tuple[Proposal, int] | None:
        """Find the proposal with the least recomputation that fits."""
        limit, found = budget, None
        for _ in range(_JUDGED):
            left = [p for key, p in self.proposals.items() if key not in self.judged and p.estimated <= limit]
            left = [p for p in left if found is None or p.seconds < found[0].seconds]
            if not left:
                break
            tried = min(left, key=lambda p: (p.seconds, p.estimated))
            peak = self.judge(tried)
            if peak <= budget:
                found, limit = (tried, peak), max(limit, budget + tried.estimated - peak)
            else:
                limit = min(limit, tried.estimated - 1, budget + tried.estimated - peak)
        return found or self._fitting(self.smallest(), budget)

    def smallest(self) -> tuple[Proposal, int]:
        """Find the proposal with the lowest peak: those that the formula ranks first are simulated."""
        by_method: dict[str, list[Proposal]] = {}
        for each in sorted(self.proposals.values(), key=lambda p: (p.estimated, p.seconds)):
            by_method.setdefault(each.method, []).append(each)
        for proposals in by_method.values():
            best: int | None = None
            for each in proposals[:_JUDGED_LEAST]:
                if best is not None and each.estimated >= best and not self.workspace:
                    break  # the formula, which knows no workspace, is rarely above the truth
                peak = self.judge(each)
                best = peak if best is None else min(best, peak)
        peak, _, key = min((peak, self.proposals[key].seconds, key) for key, peak in self.judged.items())
        return self.proposals[key], peak

    def judge(self, proposal: Proposal) -> int:
        """Simulate a proposal, once."""
        key = _key(proposal.parts)
        if key not in self.judged:
            stage("simulating a proposal")
            run = run_in_pieces(self.costs, *proposal.parts)
            self.judged[key] = simulate_graph(self.costs, run, self.workspace).bytes
        return self.judged[key]

    @staticmethod
    def _fitting(found: tuple[Proposal, int], budget: int) -> tuple[Proposal, int] | None:
        return found if found[1] <= budget else None

    def _proposed(self, method: str, budget: int) -> Iterator[Parts]:
        costs = self.costs
        if method == "chen":
            for count in _SEGMENTS:
                yield _of_segments(costs, sum(costs.size.values()) // count)
        elif method == "cuts":
            cuts = Cuts(costs)
            for pieces in self._descend(cuts.solve, budget):
                yield of_pieces(costs.count, pieces)
        else:
            sets = LowerSets(costs, exact=method == "kusumoto-exact")
            for most in (False, True):
                # In the paper's terms every result is held with its gradient, so its budgets are up to twice ours.
                for stages in self._descend(partial(sets.solve, most=most), 2 * budget):
                    yield sets.parts(stages)

    def _descend(self, solve: Callable[[int], list[Found] | None], budget: int) -> Iterator[list[Found]]:
        """Return what a method finds for the least budget it can meet, for some above it, and some below ours."""
        low, least = _least(solve, budget or self.plain)
        targets = [int(low * above) for above in _ABOVE[1:]] + [int(budget * below) for below in _BELOW]
        yield least
        for target in sorted({target for target in targets if target > low}):
            found = solve(target)
            if found:
                yield found


def _least(solve: Callable[[int], list[Found] | None], high: int) -> tuple[int, list[Found]]:
    """Return a budget near the least for which a method finds something, and what it finds."""
    low, found = 0, solve(high)
    while found is None:
        low, high = high, 2 * high
        found = solve(high)
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        better = solve(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found


def _of_segments(costs: GraphCosts, limit: int) -> Parts:
    part, segments = [0] * costs.count, chen_segments(costs, limit)
    for number, (begin, end) in enumerate(segments):
        part[begin:end] = [number] * (end - begin)
    return part, set(range(len(segments) - 1))


def _key(parts: Parts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(parts[0]), tuple(sorted(parts[1]))
