"""What a fit does: measure, search, apply, check."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from rmm_linear._support.sizes import show_bytes
from rmm_linear.fitting.options import ALLOW, Candidates
from rmm_linear.fitting.report import FitReport
from rmm_linear.fitting.settings import Conversions
from rmm_linear.fitting.shards import Shards, size_bytes
from rmm_linear.fitting.static_memory import StaticMemory, static_memory
from rmm_linear.memory.peak import peak
from rmm_linear.planning.block_plan import KEEP, BlockPlan
from rmm_linear.planning.budget import read_budget
from rmm_linear.planning.measure import measure
from rmm_linear.planning.proposals import Proposals
from rmm_linear.planning.simulate import Held, watch
from rmm_linear.planning.solve import Option, choose, least, peak_of
from rmm_linear.planning.step import as_in_training, copied, run_step

_TRIES = 4
_LESSER = {"time": 1e-3, "noise": 1e-6}  # weight of the other objective, for plans that are alike in this one


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
        shards: Shards | None = None,
        accumulate: bool = False,
    ) -> None:
        """Measure a step of the exact model. The arguments are those of :func:`rmm_linear.fit`."""
        self.model, self.example, self.allow, self.objective = model, example, allow, objective
        self.accumulate = accumulate
        self.static = static_memory(model, optimizer, shards)
        if isinstance(model, nn.parallel.DistributedDataParallel):  # simulated steps must not reduce gradients
            model = self.model = model.module
        self.before = self.static.before_step + (self.static.gradients if accumulate else 0)
        held = _held(shards, accumulate=accumulate)
        self.costs = measure(model, example, held=held)
        self.exact_peak = self.before + self.costs.peak.bytes
        self.total = None if memory is None else read_budget(memory, self.exact_peak)
        names = [block.name for block in self.costs.blocks]
        conversions = Conversions(model, names, None if is_meta(model) else example)
        budget = 0 if self.total is None else self.total - self.before
        self.proposals = Proposals(
            model, example, self.costs, budget,
            cost=self.cost, solver="auto", configure=conversions.configure, folder=folder, held=held,
        )  # fmt: skip
        self.candidates = Candidates(self.proposals, conversions, allow)

    def cost(self, option: Option) -> float:
        """What the solver makes least: the objective, and a little of the other."""
        seconds = option.seconds / self.candidates.seconds if self.candidates.seconds else 0.0
        greater, lesser = (seconds, option.noise) if self.objective == "time" else (option.noise, seconds)
        return greater + _LESSER[self.objective] * lesser

    def is_within(self, peak: int) -> bool:
        """Whether a peak, and the optimizer's own step, are within the budget."""
        return self.total is None or max(peak, _optimizer_step(self.static)) <= self.total

    def check_floor(self) -> None:
        """Raise where no plan can help."""
        floor = _optimizer_step(self.static)
        if self.total is not None and floor >= self.total:
            parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in self.static.to_dict().items() if size)
            raise ValueError(
                f"memory={self.total} cannot be met: {show_bytes(floor)} are needed before anything is saved for a "
                f"backward pass ({parts}). These would help: a smaller dtype, an optimizer with less state, adapters "
                "(LoRA) instead of all weights, or shards over several devices."
            )

    def kept(self) -> FitReport:
        """The report of a model that is within the budget as it is."""
        plan = self.proposals.plan([0] * len(self.costs.blocks), self.costs.peak)
        plan.peak = self.costs.peak
        return self.report(plan)

    def solved(self) -> FitReport:
        """Search for the best plan within the budget, apply it and check it with a real step."""
        for _ in range(_TRIES):
            plan = self.proposals.search()
            if plan is None:
                break
            report = self.report(plan)
            if self.is_within(report.peak):
                return report
            plan.revert()
            self.proposals.budget -= report.peak - (self.total or 0)
        raise ValueError(self._cannot_fit())

    def within_time(self, time: float) -> FitReport:
        """Find the plan of the least memory that takes no longer than a bound."""
        options, limit = self.proposals.options, (time - 1) * self.candidates.seconds
        low, high = least(options), max(peak_of(options, [0] * len(options)), least(options))
        found: list[int] | None = None
        while low <= high and (high - low > 1000 or found is None):
            middle = (low + high) // 2
            chosen = choose(options, middle, solver="rounded")
            if chosen is not None and _seconds(options, chosen) <= limit:
                found, high = chosen, middle - 1
            else:
                low = middle + 1
        if found is None:
            raise ValueError(f"time={time:g} cannot be met by any plan. Use a larger bound, or leave time out.")
        plan = self.proposals.judge(found)
        total = self.before + plan.predicted
        if not self.is_within(total):
            raise ValueError(
                f"memory={self.total} cannot be met in time={time:g}: the least is {show_bytes(total)}. "
                "Use more time, more memory, or leave time out."
            )
        return self.report(plan)

    def report(self, plan: BlockPlan) -> FitReport:
        """Apply a plan, run a real step, and say what was found."""
        before, seconds = self.before, self.candidates.seconds
        plan.apply()
        try:
            after = plan.peak or watch(self.model, self.example, held=self.proposals.held)[0]
            measured = (
                None
                if is_meta(self.model)
                else before + _measured(self.model, self.example, accumulate=self.accumulate)
            )
        except BaseException:
            plan.revert()
            raise
        noise = sum(block.noise for block in plan.blocks)
        is_unknown = any(note.startswith("Noise is not") for note in self.candidates.notes)
        return FitReport(
            plan,
            self.total,
            self.static,
            self.exact_peak,
            before + _predicted(plan),
            before + after.bytes,
            measured,
            1 + plan.seconds / seconds if seconds else None,
            None if is_unknown else noise,
            self.candidates.notes,
            self.costs.peak,
            after,
        )

    def _cannot_fit(self) -> str:
        best = self.proposals.smallest()
        missing = [f'"{name}" in allow' for name in ALLOW if name not in self.allow and name != KEEP]
        helps = ["a smaller batch", *missing]
        if any("exceeds max_noise" in note for note in self.candidates.notes):
            helps.append("a larger max_noise")
        if any("folder" in note for note in self.candidates.notes):
            helps.append("folder=... to offload to files")
        lowest = self.before + best.predicted
        return (
            f"memory={self.total} cannot be met: the least is {lowest} bytes ({show_bytes(lowest)}), which the "
            f"{best.moment} needs. These would help: {', '.join(helps)}."
        )


def _seconds(options: list[list[Option]], chosen: list[int]) -> float:
    return sum(block[index].seconds for block, index in zip(options, chosen, strict=True))


def is_meta(model: nn.Module) -> bool:
    """Say whether a model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def _measured(model: nn.Module, example: Any, *, accumulate: bool) -> int:
    """Bytes that a real step makes."""
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), torch.device("cpu"))
    with as_in_training(model):
        batch = copied(example)
        for parameter in model.parameters():
            if accumulate and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        there = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with peak(device) as highest:
            run_step(model, batch)
    return highest.bytes - there


def _held(shards: Shards | None, *, accumulate: bool) -> Held | None:
    """Bytes of a parameter's gradient that a step adds."""
    if accumulate or (shards is not None and shards.cpu_offload):
        return lambda parameter: 0
    return None if shards is None else lambda p: size_bytes(shards.shape(p.shape), p.dtype)


def _optimizer_step(static: StaticMemory) -> int:
    """Bytes at the worst moment of the optimizer's step, when nothing is gathered any more."""
    return static.before_step - static.gathered + static.gradients + static.optimizer_transient


def _predicted(plan: BlockPlan) -> int:
    """The peak by the sum that is solved."""
    if all(block.choice == KEEP for block in plan.blocks):
        return plan.predicted  # which was measured as a whole
    kept = highest = 0
    for block in plan.blocks:
        highest, kept = max(highest, kept + block.worst), kept + block.kept
    return highest
