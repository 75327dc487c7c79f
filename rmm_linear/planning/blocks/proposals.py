"""Propose plans for the blocks of a model: a solver chooses by simulated steps of each option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rmm_linear._support.progress import stage
from rmm_linear._support.saved_settings import SavedSettings
from rmm_linear.context.checkpointing import KEEP as KEEP_CHECKPOINTS
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.applied import offloaded
from rmm_linear.planning.blocks.measure import Costs, by_pass
from rmm_linear.planning.blocks.plan import KEEP, RECOMPUTE, BlockPlan, PlannedBlock
from rmm_linear.planning.blocks.shortened import later_gradients, leave_out, without
from rmm_linear.planning.blocks.solve import Option, choose, host_of, least, peak_of
from rmm_linear.planning.plans import apply
from rmm_linear.planning.step.follow import BACKWARD, FORWARD, Event, FollowedTensors
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.step.watch import Held, watch
from rmm_linear.planning.step.workspace import Workspace

_TRIES, _JUDGED = 10, 6
_EXACT, _FAR = 0.99, 0.9  # of a sum: what a step takes is no less than nearly all of it

Cost = Callable[[Option], float]
Rows = Sequence[PlannedBlock | None]


def seconds_of(option: Option) -> float:
    """Return the time that an option adds, which is what most plans cost."""
    return option.seconds


@dataclass(frozen=True, eq=False)
class Proposals:
    """The options of every block, as a value, and the plans made of them."""

    model: nn.Module
    example: Any
    costs: Costs
    budget: int  # bytes of a step
    workspace: Workspace | None = None
    cost: Cost = seconds_of  # the sum that the solver minimizes
    solver: str = "rounded"
    # Makes the configuration for the converted blocks of a plan
    configure: Callable[[Sequence[PlannedBlock]], SavedSettings | None] | None = None
    folder: str | None = None  # of files, for offloaded blocks of a model on the CPU
    host: int | None = None  # limit of the bytes that wait in host memory or files; None is none
    checkpointing: str = KEEP_CHECKPOINTS  # of the plans
    held: Held | None = None
    rows: Sequence[Sequence[PlannedBlock]] = ()  # of every block, its options; if left out, blocks stay as they are
    # Of the steps that were simulated, by the option of every block. Other examples have others.
    peaks: dict[tuple[str, ...], Peak] = field(default_factory=dict)
    stands: list[bool] = field(default_factory=lambda: [True])  # empty once a step without some blocks has failed

    def __post_init__(self) -> None:
        if not self.rows:
            kept = [[PlannedBlock(block.name, KEEP, block.kept, block.worst)] for block in self.costs.blocks]
            object.__setattr__(self, "rows", kept)

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.costs.blocks]

    @property
    def options(self) -> list[list[Option]]:
        return [
            [Option(row.option, row.kept, row.worst, row.seconds, row.noise, row.host) for row in rows]
            for rows in self.rows
        ]

    def adding(self, rows: Rows) -> Proposals:
        """Add an option to the blocks that have a row, by what a step with all of them shows of each."""
        chosen = [row or known[0] for row, known in zip(rows, self.rows, strict=True)]
        # Of the last two blocks that ran, copies are on the device: they are in no block's sum, and in its simulation.
        kept, forward, backward, host = self._measured(chosen, holds=False)
        worst = {name: max(forward[name], backward[name]) for name in self.names}
        measured = [
            row and replace(row, kept=kept[row.name], worst=worst[row.name], host=host[row.name]) for row in rows
        ]
        added = [[*known, row] if row else known for known, row in zip(self.rows, measured, strict=True)]
        return replace(self, rows=added)

    def estimate(self, rows: Sequence[PlannedBlock]) -> Peak:
        """Return the peak of a step without simulating all like blocks of a model on the meta device."""
        kept, *passes, _ = self._measured(rows)
        found, before = Peak(measure="simulated live tensors"), 0
        for row in rows:
            for pass_, highest in zip((FORWARD, BACKWARD), passes, strict=True):
                if before + highest[row.name] > found.bytes:
                    found.bytes, found.moment = before + highest[row.name], f"{pass_} of {row.name}"
            before += kept[row.name]
        return found

    def _measured(self, rows: Sequence[PlannedBlock], *, holds: bool = True) -> tuple[dict[str, int], ...]:
        """Return what blocks keep, their peaks in the forward and the backward pass, and what waits elsewhere."""
        standing = {} if has_memory(self.model) else leave_out(self.model, [(row.name, row.option) for row in rows])
        if standing and self.stands:
            try:
                return self._measured_by(rows, standing, holds=holds)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # of a model that calls its blocks by number, or weighs what each of them returns
                self.stands.clear()
        return self._measured_by(rows, {}, holds=holds)

    def _measured_by(
        self, rows: Sequence[PlannedBlock], standing: Mapping[str, str], *, holds: bool
    ) -> tuple[dict[str, int], ...]:
        """Do it with blocks that stand for others."""
        names = [name for name in self.names if name not in standing]
        plan = self.plan_of([row for row in rows if row.name not in standing])
        with without(self.model, [*standing]), apply(plan, self.model) as planned:
            for one in offloaded(planned).values():
                one.chain.holds = holds
            peak, live = self._watch(planned)
            kept, forward, backward = by_pass(live.events, names)
            host = {name: one.copied for name, one in offloaded(planned).items()}
        if not standing and (holds or self.folder is not None or not host):
            self.peaks[tuple(row.option for row in rows)] = peak
        late = later_gradients(self.model, self.names, standing, self.held)
        stands = {name: standing.get(name, name) for name in self.names}
        return (
            {name: kept[stands[name]] for name in self.names},
            {name: forward[stands[name]] for name in self.names},
            {name: backward[stands[name]] + late[name] for name in self.names},
            {name: host.get(stands[name], 0) for name in self.names},
        )

    def events(self, rows: Sequence[PlannedBlock]) -> list[Event]:
        """Follow the tensors of a step in which every block has one option."""
        with self.plan_of(rows).applied() as planned:
            return self._watch(planned)[1].events

    def _watch(self, model: nn.Module) -> tuple[Peak, FollowedTensors]:
        return watch(model, self.example, self.workspace, self.held)

    def plan_of(self, rows: Sequence[PlannedBlock], **known: Any) -> BlockPlan:
        """Make a plan of what happens to every block, and of what is known of it."""
        config = self.configure(rows) if self.configure is not None else None
        shared = {"config": config, "folder": self.folder, "checkpointing": self.checkpointing}
        return BlockPlan(rows, **shared, **known).made_for(self.model)

    def plan(self, chosen: Sequence[int], peak: Peak) -> BlockPlan:
        """Make a plan; ``peak`` is that of a step with it, as far as it is known."""
        return self.plan_of(
            [self.rows[number][index] for number, index in enumerate(chosen)],
            memory=self.budget,
            plain=self.costs.peak.bytes,
            predicted=peak.bytes,
            moment=peak.moment,
            peak=peak,
        )

    def judge(self, chosen: Sequence[int]) -> BlockPlan:
        options = tuple(rows[index].option for rows, index in zip(self.rows, chosen, strict=True))
        if options not in self.peaks:
            stage("simulating a plan")
            with self.plan(chosen, Peak()).applied() as planned:
                self.peaks[options] = self._watch(planned)[0]
        return self.plan(chosen, self.peaks[options])

    def cost_of(self, chosen: Sequence[int]) -> float:
        return sum(self.cost(block[index]) for block, index in zip(self.options, chosen, strict=True))

    def search(self, tries: int = _TRIES) -> BlockPlan | None:
        """Find the cheapest plan that fits: the solver's budget falls by its plan's excess, or rises."""
        stage("solving")
        options = self.options
        low, high, target = least(options, self.host), None, self.budget
        best, least_cost, judged = None, float("inf"), set[tuple[int, ...]]()
        for _ in range(tries):
            chosen = choose(options, max(target, low), self.cost, solver=self.solver, host=self.host)
            if chosen is None:
                break
            is_known, made = tuple(chosen) in judged, self.judge(chosen)
            judged.add(tuple(chosen))
            excess = made.predicted - self.budget
            if excess <= 0:
                if (cost := self.cost_of(chosen)) < least_cost:
                    best, least_cost = made, cost
                if high is None and made.predicted >= _EXACT * peak_of(options, chosen):
                    break  # the sum is what the step takes, so a larger one would not fit
                low = max(target, low)
                target = low - excess if high is None else (low + high) // 2
            elif target <= low:
                break
            else:
                high = target
                halve = is_known or best is not None
                target = (low + high) // 2 if halve else max(target - excess, low)
        return best

    def smallest(self) -> BlockPlan | None:
        """Return the plan with the lowest peak that is known: of the solver's least budget, or one choice for all."""
        stage("solving for the least memory")
        options = self.options
        tried = [choose(options, least(options, self.host), self.cost, solver=self.solver, host=self.host)]
        for name in {option.name for block in options for option in block} - {KEEP}:
            tried.append([_place(block, name) for block in options])
        possible = [
            one for one in tried if one is not None and (self.host is None or host_of(options, one) <= self.host)
        ]
        best = None
        for chosen in sorted(possible, key=lambda one: peak_of(options, one)):
            if best is not None and _FAR * peak_of(options, chosen) > best.predicted:
                break  # nor do those after it have a lower peak
            made = self.judge(chosen)
            best = made if best is None or made.predicted < best.predicted else best
        return best


def _place(block: Sequence[Option], name: str) -> int:
    """Return the index of an option, or of the next best."""
    names = [option.name for option in block]
    return next((names.index(one) for one in (name, RECOMPUTE) if one in names), 0)
