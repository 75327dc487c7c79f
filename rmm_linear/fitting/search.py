"""Search for the largest size of a batch, of sequences or of their length, with which a step fits into memory.

Bytes of a step are, nearly, a line in the size. Bytes of every option are measured for two sizes, and extrapolated
along a line. Where a line meets the budget a plan is solved for, and a step with it simulated; then a secant goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rmm_linear._support.progress import stage
from rmm_linear._support.sizes import read_bytes, read_share, show_bytes
from rmm_linear.fitting.duration import expect_fit
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.measure import measure
from rmm_linear.planning.blocks.plan import KEEP, RECOMPUTE, BlockPlan, PlannedBlock
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.blocks.solve import Option, choose, host_of, least
from rmm_linear.planning.budget import LEAST
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.step.watch import watch

MOST = 2**24  # more is taken for "any number"
_LESS, _ROOM = 1e-6, 1.05  # of a cost, and of the least budget
_FINE = 1000  # a first guess is off by a thousandth
_JUDGED = 14  # steps that are simulated for sizes, about
_TRIES = 8  # of plans, which are solved for every size

Line = Callable[[int], int]


def check_size(memory: object) -> None:
    """Raise unless a budget may be in bytes."""
    if memory is None or memory == LEAST or read_share("memory", memory) is not None:
        raise TypeError(
            f'memory must be bytes or a text such as "8GB", got {memory!r}. A share has no meaning here, nor "least".'
        )
    read_bytes("memory", memory)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a batch may have."""

    batch: Callable[[int], Any]  # makes a batch of a size
    small: int  # the size to measure options with first
    large: int  # the size of the batch that a step was measured with
    most: int = MOST  # the largest size that there is
    tolerance: float = 0.0  # how much less than the largest size, as a share of it, is good enough

    def between(self, size: int, small: int, large: int) -> int:
        """Return the bytes of a size on the line through those of the two that are measured."""
        return max(0, round(small + (size - self.small) / (self.large - self.small) * (large - small)))


@dataclass(frozen=True)
class Found:
    """The largest sizes."""

    size: int = 0  # with the plan; 0 if not even one fits
    exact: int = 0  # of the exact model
    checkpointed: int = 0  # with every block recomputed
    plan: BlockPlan | None = None  # the plan for size, which has the peak of a step with it; None if nothing fits
    peak: int = 0  # bytes of a training process with it
    notes: tuple[str, ...] = ()  # options that were left out, with the reason


class SizeSearch:
    """A search by the steps of one fit."""

    def __init__(self, work: Fitting, sizes: Sizes) -> None:
        """Begin with the measured step of the exact model."""
        self.work, self.sizes, self.budget = work, sizes, work.proposals.budget
        self.costs = measure(work.model, sizes.batch(sizes.small), held=work.proposals.held)

    def find(self, max_noise: float, sampled: Any) -> Found:
        """Find the largest sizes; noise is that of ``sampled``."""
        work, notes = self.work, self.work.candidates.notes
        if not work.is_within(0):
            floor = work.static.in_optimizer_step
            note = f"{show_bytes(floor)} are needed before anything is saved for a backward pass."
            return Found(peak=floor, notes=(note,))
        plain = work.proposals.plan_of([rows[0] for rows in work.proposals.rows])
        again = BlockPlan(
            [PlannedBlock(one.name, KEEP if one.writes_input else RECOMPUTE) for one in work.costs.blocks]
        ).made_for(work.model)
        stage("searching exactly")
        exact, plain = self._largest(partial(self._judged, plain), self._exact)
        if exact == self.sizes.most and KEEP in work.allow:
            return self._found(exact, exact, exact, plain)
        options = len(work.candidates.singles())
        expect_fit(work.candidates, again=options + _JUDGED, larger=_JUDGED * exact / self.sizes.large)
        work.add_options(max_noise, sampled)
        stage("measuring options again, in a smaller batch")
        smaller = replace(work.proposals, example=self.sizes.batch(self.sizes.small), costs=self.costs, peaks={})
        lines = _Lines(work.proposals, _again(smaller), self.sizes)
        stage("searching with every block recomputed")
        try:
            checkpointed, again = self._largest(
                partial(self._judged, again), partial(lines.least, only=RECOMPUTE), at_least=max(exact, 1)
            )
        except RuntimeError as error:
            checkpointed = 0
            notes.append(f"Not every block can be recomputed. {error}")
        stage("searching with plans")
        size, plan = self._largest(partial(self._solved, lines), lines.least, lines.fits, tries=_TRIES)
        for _ in range(_TRIES):  # until a step of all blocks fits too
            last = None if plan is None else self._judged(plan, size, is_last=True)
            if last is None or last.predicted <= self.budget:
                plan = last
                break
            size = int(size * self.budget / last.predicted)
            plan = self._solved(lines, size) if size else None
        else:
            size, plan = 0, None
        for known, other, option in ((checkpointed, again, RECOMPUTE), (exact, plain, KEEP)):
            if option in work.allow and (known > size or (option == KEEP and known == size)):
                size, plan = known, other
        return self._found(size, exact, checkpointed, plan)

    def _found(self, size: int, exact: int, checkpointed: int, plan: BlockPlan | None) -> Found:
        if plan is not None:
            plan = replace(plan, plain=self._exact(size)).made_for(self.work.model)
        peak = max(self.work.before + (plan.predicted if plan else 0), self.work.static.in_optimizer_step)
        return Found(size, exact, checkpointed, plan, peak, tuple(self.work.candidates.notes))

    def _exact(self, size: int) -> int:
        """Return the peak of a step of the exact model, by the line."""
        return self.sizes.between(size, self.costs.peak.bytes, self.work.costs.peak.bytes)

    def slope(self, found: Found) -> float:
        """Return the bytes that one more adds to the peak of the plan that was found."""
        other = found.size - max(1, found.size // 8) or 2
        there = None if found.plan is None else self._judged(found.plan, other)
        if found.plan is None or there is None:
            return 0.0
        return (found.plan.predicted - there.predicted) / (found.size - other)

    def _judged(self, plan: BlockPlan, size: int, *, is_last: bool = False) -> BlockPlan | None:
        """Return a plan with the peak of a step of a size, simulated; None where it runs out of memory."""
        proposals = replace(self.work.proposals, example=self.sizes.batch(size))
        try:
            if is_last or has_memory(self.work.model):
                with plan.applied() as planned:
                    peak = watch(planned, proposals.example, held=proposals.held)[0]
            else:
                peak = proposals.estimate(plan.blocks)
        except torch.OutOfMemoryError:
            return None
        known = replace(plan, memory=self.budget, predicted=peak.bytes, moment=peak.moment, peak=peak)
        return known.made_for(self.work.model)

    def _solved(self, lines: _Lines, size: int) -> BlockPlan | None:
        proposals = replace(self.work.proposals, example=self.sizes.batch(size), rows=lines.rows(size), peaks={})
        options, host = proposals.options, proposals.host

        def cost(option: Option) -> float:  # of options that cost the same, the one that needs less
            return self.work.cost(option) + _LESS * option.worst / self.budget

        def bytes_of(option: Option) -> float:  # where the sum of options is too low, what needs less has room
            return (option.kept + option.worst) / self.budget + _LESS * self.work.cost(option)

        lowest, tried = least(options, host), list[list[int]]()
        for price, budget in ((cost, lowest), (bytes_of, int(lowest * _ROOM))):
            chosen = choose(options, budget, price, solver="rounded", host=host)
            tried += [] if chosen is None else [chosen, _evened(options, chosen)]
        plans = [
            self._judged(proposals.plan(one, Peak()), size)
            for number, one in enumerate(tried)
            if one not in tried[:number] and (host is None or host_of(options, one) <= host)
        ]
        return min(filter(None, plans), key=lambda plan: plan.predicted, default=None)

    def _largest(
        self,
        judge: Callable[[int], BlockPlan | None],
        line: Line,
        fits: Callable[[int, int], bool] | None = None,
        *,
        at_least: int = 1,
        tries: int = 30,
    ) -> tuple[int, BlockPlan | None]:
        """Find the largest size, and the plan for it."""
        most, tolerance = self.sizes.most, self.sizes.tolerance
        aim = int(self.budget * (1 - tolerance / 2))
        guess = _meeting(fits or (lambda size, budget: line(size) <= budget), aim, most)
        guess = min(max(guess, at_least), most)
        known = {size: line(size) for size in (guess, guess // 2 or 2)}  # by the line, until two sizes are simulated
        bytes_of, low, high = dict[int, int](), 0, most + 1  # the largest that fits, the smallest that does not
        best: BlockPlan | None = None
        for _ in range(tries):
            plan = judge(guess)
            bytes_of[guess] = self.budget + 1 if plan is None else plan.predicted
            if plan is not None and plan.predicted <= self.budget:
                low, best = guess, plan
            else:
                high = guess
            (x0, y0), (x1, y1) = list((known if len(bytes_of) < 2 else bytes_of).items())[-2:]
            slope = (y1 - y0) / (x1 - x0)
            there = int(guess + (aim - bytes_of[guess]) / slope) if slope > 0 else (low + high) // 2
            guess = max(low + 1, guess // 2, min(there, high - 1))
            if high - low <= 1 or (low and guess <= low * (1 + tolerance)):
                break
        return low, best


def _evened(options: Sequence[Sequence[Option]], chosen: Sequence[int]) -> list[int]:
    """Give all blocks the most frequent choice that have it: while a block runs backward, the one before comes back."""
    names = [block[index].name for block, index in zip(options, chosen, strict=True)]
    often = Counter(names).most_common(1)[0][0]
    return [
        next((place for place, one in enumerate(block) if one.name == often and one.host), index)
        for block, index in zip(options, chosen, strict=True)
    ]


def _meeting(fits: Callable[[int, int], bool], budget: int, most: int) -> int:
    """Return the largest size that fits into a budget by a line; 1 if none does."""
    low, high = 1, 2
    while high < most and fits(high, budget):
        low, high = high, high * 2
    while high - low > 1 + low // _FINE:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, budget) else (low, middle)
    return low


def _again(proposals: Proposals) -> Proposals:
    """Measure the same options with the batch of these proposals, of which the costs are known."""
    found = replace(proposals, rows=())
    for name in dict.fromkeys(row.option for rows in proposals.rows for row in rows if row.choice != KEEP):
        found = found.adding([next((row for row in rows if row.option == name), None) for rows in proposals.rows])
    return found


class _Lines:
    """Bytes of every option as lines through those for two sizes."""

    def __init__(self, proposals: Proposals, smaller: Proposals, sizes: Sizes) -> None:
        self.proposals, self.sizes = proposals, sizes
        self.smaller = [{row.option: row for row in rows} for rows in smaller.rows]

    def rows(self, size: int, only: str = "") -> list[list[PlannedBlock]]:
        """Return the options for a size, or some of them."""
        return [
            [
                replace(
                    row,
                    kept=self.sizes.between(size, less[row.option].kept, row.kept),
                    worst=self.sizes.between(size, less[row.option].worst, row.worst),
                    host=self.sizes.between(size, less[row.option].host, row.host),
                )
                for row in [row for row in rows if row.option == only] or rows
            ]
            for rows, less in zip(self.proposals.rows, self.smaller, strict=True)
        ]

    def least(self, size: int, only: str = "") -> int:
        rows = self.rows(size, only)
        return least(self._options(rows), self.proposals.host)

    def fits(self, size: int, budget: int) -> bool:
        options, host = self._options(self.rows(size)), self.proposals.host
        if host is None:
            return least(options) <= budget
        return choose(options, budget, lambda option: option.host, solver="rounded", host=host) is not None

    @staticmethod
    def _options(rows: Sequence[Sequence[PlannedBlock]]) -> list[list[Option]]:
        return [[Option(row.option, row.kept, row.worst, 0.0, host=row.host) for row in block] for block in rows]
