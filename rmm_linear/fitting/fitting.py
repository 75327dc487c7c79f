"""Carry out a fit: measure, search, apply, check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmm_linear._support.progress import stage
from rmm_linear._support.sizes import read_bytes, show_bytes
from rmm_linear.context.checkpointing import REPLACE, is_checkpointed
from rmm_linear.fitting.link import BANDWIDTH, measured_bandwidth, memory_of_host, read_bandwidth
from rmm_linear.fitting.options import ALLOW, Candidates
from rmm_linear.fitting.report import FitReport, RankPeak
from rmm_linear.fitting.resident import resident
from rmm_linear.fitting.settings import Conversions
from rmm_linear.memory.inputs import LossOfBatch
from rmm_linear.planning.blocks.measure import measure
from rmm_linear.planning.blocks.plan import KEEP, OFFLOAD, BlockPlan
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.blocks.solve import Option, choose, least, peak_of
from rmm_linear.planning.budget import BudgetError, read_budget, shown_budget, shown_least
from rmm_linear.planning.step.sharded import runs_alone
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.step import has_memory

_TRIES = 4
_CHECKPOINTED = (
    "Activation checkpointing is on: what it recomputes is not the plan's to choose. "
    'checkpointing="replace" turns it off. '
)
_GUESSED = (
    "The Trainer's loss reads numbers of tensors, which simulated steps do not have: each was guessed to be 1. Where "
    "such a number is the size of something, real steps take other amounts of memory."
)
_NEARLY = 0.9  # of a sum that is solved, a step takes at least so much
_SLOW = 0.01  # of a step: copies that add more are said to bind
# Weight of the other objective. A batch that makes up for noise is larger by the variance ratio, and so is its time;
# where noise is to be least, time decides between plans that are alike.
_LESSER = {"time": 1.0, "noise": 1e-6}
_TIE = 1e-3  # of noise, for plans that take the same time


class Fitting:
    """One call of :func:`rmm_linear.fit`."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        memory: int | float | str | None,
        *,
        optimizer: Any = None,
        allow: Collection[str] = ALLOW,
        objective: str = "time",
        folder: str | None = None,
        host_memory: int | str | None = None,
        bandwidth: float | str | None = None,
        shards: Shards | None = None,
        accumulate: bool = False,
        checkpointing: str = REPLACE,
        on_ranks: Callable[[BlockPlan], tuple[RankPeak, ...]] | None = None,
    ) -> None:
        """Measure a step of the exact model. The arguments are those of :func:`rmm_linear.fit`."""
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.model, self.example, self.allow, self.objective = model, example, allow, objective
        self.on_ranks, self.is_real = on_ranks, shards is None and has_memory(model)
        self.is_checkpointed = is_checkpointed(model)  # as it was asked for, or it is off by now
        self.over: list[int] = []  # measured peaks of plans that were simulated to fit
        self.resident = resident(model, optimizer, shards, accumulate=accumulate)
        self.static, self.before, held = self.resident.static, self.resident.bytes, self.resident.held
        model = self.model = self.resident.model
        self.costs = measure(model, example, held=held)
        self.exact_peak = max(self.before + self.costs.peak.bytes, self.static.in_optimizer_step)
        self.total = None if memory is None else read_budget(memory, self.exact_peak)
        self.asked = "" if memory is None else shown_budget(memory, self.exact_peak)
        names = [block.name for block in self.costs.blocks]
        conversions = Conversions(model, names)
        budget = 0 if self.total is None else self.total - self.before
        is_counted, device = not runs_alone(model), next((p.device for p in model.parameters() if p.is_cuda), None)
        self.host_memory = memory_of_host() if device and OFFLOAD in allow else None
        self.host_memory = self.host_memory if host_memory is None else read_bytes("host_memory", host_memory)
        self.check_host()
        if bandwidth is None and OFFLOAD in allow:
            speed = measured_bandwidth(device) if device else BANDWIDTH if is_counted else None
        else:
            speed = None if bandwidth is None else read_bandwidth(bandwidth)
        self.proposals = Proposals(
            model, example, self.costs, budget,
            cost=self.cost, solver="auto", configure=conversions.configure, folder=folder, held=held,
            checkpointing=checkpointing,
            host=None if self.host_memory is None else self.host_memory - self.static.host,
        )  # fmt: skip
        self.candidates = Candidates(self.proposals, conversions, allow, speed)
        if isinstance(example, LossOfBatch) and example.guesses:
            self.candidates.notes.append(_GUESSED)

    def cost(self, option: Option, weight: float | None = None) -> float:
        """Return the sum that the solver minimizes: the objective, and the other by its weight."""
        weight = _LESSER[self.objective] if weight is None else weight
        seconds = option.seconds / self.candidates.seconds if self.candidates.seconds else 0.0
        greater, lesser = (seconds, option.noise) if self.objective == "time" else (option.noise, seconds)
        return greater + weight * lesser

    def add_options(self, max_noise: float, sampled: Any = None) -> None:
        """Measure the options that are allowed; noise is that of a batch, or of the example."""
        self.proposals = self.candidates.add(max_noise, sampled)

    def is_within(self, peak: int) -> bool:
        """Say whether a peak, and the optimizer's own step, are within the budget."""
        return self.total is None or max(peak, self.static.in_optimizer_step) <= self.total

    def check_host(self) -> None:
        """Raise where the host cannot have what is put there before a step."""
        if self.host_memory is not None and self.static.host > self.host_memory:
            raise BudgetError(
                f"host_memory={self.host_memory} cannot be met: parameters, gradients and the optimizer's state are "
                f"{show_bytes(self.static.host)} there. Use more ranks, a smaller dtype, or adapters (LoRA)."
            )

    def check_floor(self) -> None:
        """Raise where no plan can help."""
        floor = self.static.in_optimizer_step
        if self.total is not None and floor >= self.total:
            parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in self.static.to_dict().items() if size)
            raise BudgetError(
                f"memory={self.asked} cannot be met: {shown_least(floor, self.exact_peak)}, are needed before anything "
                f"is saved for a backward pass ({parts}). These would help: a smaller dtype, an optimizer with less "
                "state, adapters (LoRA) instead of all weights, or shards over several devices."
            )

    def kept(self) -> FitReport | None:
        """Return the report of a model that is within the budget as it is; None if a real step shows that it is not."""
        return self._checked(self.proposals.plan([0] * len(self.costs.blocks), self.costs.peak))

    def solved(self) -> FitReport:
        """Search for the best plan within the budget, apply it and check it with a real step."""
        report = self._searched()
        if report is None and self._composes():
            report = self._searched()
        if report is not None:
            return report
        best = self._smallest()
        fits = best.predicted <= self.proposals.budget
        report = self._checked(best) if fits else None
        if report is None:
            raise BudgetError(self._cannot_fit(best))
        return report

    def _smallest(self) -> BlockPlan:
        best = self.proposals.smallest()
        if best is None:
            raise BudgetError(
                f"host_memory={self.host_memory} cannot be met: no choice of {', '.join(self.allow)} puts so little "
                "there. Use more, or allow more than that."
            )
        return best

    def _searched(self) -> FitReport | None:
        for _ in range(_TRIES):
            plan = self.proposals.search()
            if plan is None:
                break
            if report := self._checked(plan):
                return report
        return None

    def _composes(self) -> bool:
        """Add options of several words; say whether there are new ones."""
        before = self.proposals
        self.proposals = replace(before, rows=self.candidates.compose(self._may_fit).rows)
        return [*map(len, before.rows)] != [*map(len, self.proposals.rows)]

    def _may_fit(self, proposals: Proposals) -> bool:
        return self.total is None or _NEARLY * least(proposals.options, proposals.host) <= self.proposals.budget

    def least(self) -> FitReport:
        """Apply the plan with the lowest peak that is known."""
        self._composes()
        report = self._checked(self._smallest())
        assert report is not None  # noqa: S101 without a budget, none is exceeded
        return report

    def _checked(self, plan: BlockPlan) -> FitReport | None:
        """Apply a plan; if a real step takes more than the budget, undo it and lower the budget of the solver."""
        try:
            report = self.report(plan)
        except torch.OutOfMemoryError:
            self.proposals = replace(self.proposals, budget=int(0.9 * plan.predicted))
            return None
        if self.is_within(report.peak):
            return report
        report.plan.revert()
        self.over.append(report.peak)
        over = report.peak - (self.total or 0)
        self.proposals = replace(self.proposals, budget=self.proposals.budget - over)
        return None

    def within_time(self, time: float) -> FitReport:
        """Find the plan of the least memory that takes no longer than a bound."""
        self._composes()
        stage("solving")
        options, limit, host = self.proposals.options, (time - 1) * self.candidates.seconds, self.proposals.host
        if not self.candidates.seconds:
            raise ValueError(f"time={time:g} needs blocks whose time can be measured, and no block ran by itself.")
        low = least(options, host)
        high = max(peak_of(options, [0] * len(options)), low)
        found: list[int] | None = None
        while low <= high and (high - low > 1000 or found is None):
            middle = (low + high) // 2
            chosen = choose(options, middle, solver="rounded", host=host)
            if chosen is not None and _seconds(options, chosen) <= limit:
                found, high = chosen, middle - 1
            else:
                low = middle + 1
        if found is None:
            raise BudgetError(f"time={time:g} cannot be met by any plan. Use a larger bound, or leave time out.")
        for weight in (_LESSER["time"], _TIE):
            cost = functools.partial(self.cost, weight=weight)
            quieter = choose(options, peak_of(options, found), cost, solver="rounded", host=host)
            if quieter is not None and _seconds(options, quieter) <= limit:
                found = quieter
                break
        plan = self.proposals.judge(found)
        report = self._checked(plan) if self.is_within(self.before + plan.predicted) else None
        if report is None:
            lowest = max(self.before + plan.predicted, *self.over, 0)
            raise BudgetError(
                f"memory={self.asked} cannot be met in time={time:g}: the least is "
                f"{shown_least(lowest, self.exact_peak)}. {_CHECKPOINTED if self.is_checkpointed else ''}"
                "Use more time, more memory, or leave time out."
            )
        return report

    def report(self, plan: BlockPlan) -> FitReport:
        """Apply a plan, run a real step, and say what was found."""
        before, seconds = self.before, self.candidates.seconds
        if self.candidates.is_noise_unknown:
            plan = replace(plan, blocks=[replace(block, noise=0.0) for block in plan.blocks])
        plan = replace(plan, memory=0 if self.total is None else self.total - before)
        stage("checking by a real step" if self.is_real else "applying the plan")
        plan.apply(self.model)
        found, ranks = None, ()
        try:
            after = plan.peak or self.resident.simulated(self.example)
            if self.on_ranks is not None:
                ranks = self.on_ranks(plan)
                found = max(one.bytes for one in ranks)
            elif self.is_real:
                found = before + self.resident.measured(self.example)
        except BaseException:
            plan.revert()
            raise
        return FitReport(
            plan,
            self.total,
            self.static,
            self.exact_peak,
            before + _predicted(plan),
            before + after.bytes,
            found,
            1 + plan.seconds / seconds if seconds else None,
            None if self.candidates.is_noise_unknown else sum(block.noise for block in plan.blocks),
            self.candidates.notes,
            self.costs.peak,
            after,
            self.binds(plan),
            self.host_memory,
            ranks,
        )

    def binds(self, plan: BlockPlan) -> str:
        """Say what kept a plan from costing less: the device's memory, the host's, or the link between them."""
        if all(block.choice == KEEP for block in plan.blocks):
            return ""
        left = None if self.proposals.host is None else self.proposals.host - plan.host
        # Another block could wait, and the most that one of them puts there has no room.
        pairs = zip(plan.blocks, self.proposals.rows, strict=True)
        more = any(not block.host and any(row.host for row in rows) for block, rows in pairs)
        if left is not None and more and left < max(block.host for block in plan.blocks):
            return f"host memory ({show_bytes(plan.host + self.static.host)} of {show_bytes(self.host_memory or 0)})"
        waits = sum(self.candidates.waits(block) for block in plan.blocks) / (self.candidates.seconds or 1.0)
        if waits > _SLOW:
            return f"the link to the host (copies add {100 * waits:.0f} % to a step)"
        return "the device's memory"

    def _cannot_fit(self, best: BlockPlan) -> str:
        helps = ["a smaller batch", *(f'"{name}" in allow' for name in ALLOW[1:] if name not in self.allow)]
        helps += ["a larger max_noise"] if self.candidates.is_too_noisy else []
        helps += ["folder=... to offload to files"] if self.candidates.needs_folder else []
        simulated = self.before + best.predicted
        # A plan that was simulated to fit and measured not to is no witness of its simulated peak.
        witnesses = [*self.over, *([simulated] if simulated > (self.total or 0) else [])]
        lowest = min(witnesses or [simulated])
        return (
            f"memory={self.asked} cannot be met: the least is {shown_least(lowest, self.exact_peak)}, which the "
            f"{best.moment} needs. {_CHECKPOINTED if self.is_checkpointed else ''}"
            f"These would help: {', '.join(helps)}."
            f"{''.join(f' Note: {note}' for note in self.candidates.notes)}"
        )


def _seconds(options: list[list[Option]], chosen: list[int]) -> float:
    return sum(block[index].seconds for block, index in zip(options, chosen, strict=True))


def _predicted(plan: BlockPlan) -> int:
    """Return the peak by the sum that is solved."""
    if all(block.choice == KEEP for block in plan.blocks):
        return plan.predicted  # which was measured as a whole
    kept = highest = 0
    for block in plan.blocks:
        highest, kept = max(highest, kept + block.worst), kept + block.kept
    return highest
