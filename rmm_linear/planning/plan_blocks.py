"""Plan which blocks of a model are recomputed: a solver proposes, the simulation judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rmm_linear._support.sizes import show_bytes
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.block_plan import KEEP, NESTED, RECOMPUTE, SELECTIVE, BlockPlan, PlannedBlock
from rmm_linear.planning.blocks import alike, find_inner
from rmm_linear.planning.budget import LEAST, read_budget
from rmm_linear.planning.follow import Event
from rmm_linear.planning.measure import Costs, by_block, measure
from rmm_linear.planning.simulate import by_plain, count_flops, watch
from rmm_linear.planning.solve import Option, choose, least
from rmm_linear.planning.timing import cheap_shares, time_modules
from rmm_linear.planning.workspace import Workspace

_TRIES = 10


def plan_blocks(
    model: nn.Module,
    example: Any,
    memory: int | float | str,
    *,
    selective: bool = True,
    nested: bool = True,
    workspace: Workspace | None = None,
) -> BlockPlan:
    """Plan which blocks of a model are recomputed in the backward pass, so that a step fits into a memory budget.

    Loss, gradients and buffers stay those of the model to the bit; random numbers repeat. What it costs is time: up to
    one more forward pass, two where blocks are nested. Planning takes some simulated steps and up to five real forward
    passes without gradients; the model stays as it is until the plan is applied.

    Args:
        model: The model, in any mode; steps are those of training.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. Larger batches need more memory.
        memory: Budget for what a step makes, as :func:`rmm_linear.planning.simulate` counts it: bytes, a text such as
            "2GB", or a share of the plain step's peak in (0, 1]; "least" is the lowest peak that is found.
        selective: Whether blocks may keep the results of products and recompute all others, which costs little time.
        nested: Whether parts of a block may be recomputed once more while it is recomputed, which takes more time.
        workspace: What operators take beyond their results, of :func:`rmm_linear.planning.workspace`, so that it counts
            too; None leaves it out.

    Returns:
        The plan; ``plan.apply()`` makes it so.

    Raises:
        ValueError: If nothing fits: with the least budget, and what binds; or if a block does not compute the same
            twice.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
        >>> plan = plan_blocks(nn.Sequential(*layers), torch.ones(1000, 64), memory=0.6)
        >>> plan.predicted <= 0.6 * plan.plain
        True
    """
    costs = measure(model, example)
    if workspace:
        costs = replace(costs, peak=watch(model, example, workspace)[0])
    budget = read_budget(memory, costs.peak.bytes)
    plans = _Plans(model, example, costs, budget, workspace)
    if costs.peak.bytes <= budget:
        return plans.plan([0] * len(costs.blocks), costs.peak)
    plans.add_choices([RECOMPUTE, *([SELECTIVE] if selective else []), *([NESTED] if nested else [])])
    best = plans.search() or plans.smallest()
    if memory == LEAST:
        best.memory = best.predicted
    elif best.predicted > budget:
        raise ValueError(
            f"memory={memory!r} cannot be met: the least is {best.predicted} bytes ({show_bytes(best.predicted)}), "
            f"which the {best.moment} needs. Use more memory, or a smaller batch."
        )
    best.flops = by_plain(count_planned_flops(best, example), count_flops(model, example))
    return best


def count_planned_flops(plan: BlockPlan, example: Any) -> int:
    """Count the floating-point operations of a planned step.

    Args:
        plan: A plan for a model.
        example: A training batch.

    Returns:
        The operations.
    """
    with plan.applied() as planned:
        return count_flops(planned, example)


class _Plans:
    """The options of every block, and the plans made of them."""

    def __init__(self, model: nn.Module, example: Any, costs: Costs, budget: int, workspace: Workspace | None) -> None:
        self.model, self.example, self.costs, self.budget = model, example, costs, budget
        self.workspace = workspace
        self.names = [block.name for block in costs.blocks]
        self.options = [[Option(KEEP, block.kept, block.worst, 0.0)] for block in costs.blocks]
        self.inner: dict[str, tuple[str, ...]] = {}
        self.refused: set[str] = set()

    def add_choices(self, choices: Sequence[str]) -> None:
        """Simulate every choice for all blocks at once: that shows what each block keeps and needs with it."""
        self.inner = {block.name: find_inner(self.model, block.name) for block in self.costs.blocks}
        parts = [name for names in self.inner.values() for name in names]
        seconds = time_modules(self.model, self.example, parts) if NESTED in choices and parts else {}
        cheap = cheap_shares(self.model, self.example, self.names) if SELECTIVE in choices else {}
        for choice in choices:
            if choice == SELECTIVE:
                self.refused = self._refusing_selective()
            rows = [self._row(number, choice) for number in range(len(self.names))]
            if all(row.choice != choice for row in rows):
                continue
            try:
                events = self._events(rows)
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(
                    "A block must compute the same when it runs again, and one does not: it may keep something between "
                    "calls, as caches of keys and values do. Set model.config.use_cache=False in transformers. It "
                    f"raised {type(error).__name__}: {reason}"
                ) from error
            kept, worst = by_block(events, self.names)
            for number, row in enumerate(rows):
                if row.choice == choice:
                    share = cheap[row.name] if choice == SELECTIVE else 1.0
                    extra = share * self.costs.blocks[number].seconds + sum(seconds[name] for name in row.inner)
                    self.options[number].append(Option(choice, kept[row.name], worst[row.name], extra))

    def _events(self, rows: list[PlannedBlock]) -> list[Event]:
        with BlockPlan(rows, _model=self.model).applied() as planned:
            return watch(planned, self.example, self.workspace)[1].events

    def _refusing_selective(self) -> set[str]:
        """Blocks that change a product's result in place, which then cannot be kept."""
        refused, tried = set[str](), dict[str, bool]()
        for number, name in enumerate(self.names):
            kind = alike(self.model, name)
            if kind not in tried:
                rows = [PlannedBlock(each, KEEP) for each in self.names]
                rows[number] = self._row(number, SELECTIVE)
                try:
                    self._events(rows)
                    tried[kind] = True
                except RuntimeError:
                    tried[kind] = False
            refused |= set() if tried[kind] else {name}
        return refused

    def _row(self, number: int, choice: str) -> PlannedBlock:
        block = self.costs.blocks[number]
        inner = self.inner.get(block.name, ()) if choice == NESTED else ()
        if block.writes_input or (choice == NESTED and not inner):
            choice = KEEP if block.writes_input else RECOMPUTE
        if choice == SELECTIVE and block.name in self.refused:
            choice = RECOMPUTE
        return PlannedBlock(block.name, choice, inner=inner if choice == NESTED else ())

    def plan(self, chosen: Sequence[int], peak: Peak) -> BlockPlan:
        rows = []
        for number, index in enumerate(chosen):
            option = self.options[number][index]
            row = self._row(number, option.name)
            rows.append(replace(row, kept=option.kept, worst=option.worst, seconds=option.seconds))
        plain = self.costs.peak.bytes
        return BlockPlan(rows, self.budget, peak.bytes, plain, peak.moment, _model=self.model)

    def judge(self, chosen: Sequence[int]) -> BlockPlan:
        """Make a plan and simulate it."""
        made = self.plan(chosen, Peak())
        with made.applied() as planned:
            peak = watch(planned, self.example, self.workspace)[0]
        made.predicted, made.moment = peak.bytes, peak.moment
        return made

    def search(self) -> BlockPlan | None:
        """The fastest plan found that fits: the solver's budget falls by its plan's excess, or rises into the rest."""
        low, high, target = least(self.options), None, self.budget
        best, judged = None, dict[tuple[int, ...], BlockPlan]()
        for _ in range(_TRIES):
            chosen = choose(self.options, max(target, low))
            if chosen is None:
                break
            is_known = tuple(chosen) in judged
            made = judged[tuple(chosen)] if is_known else judged.setdefault(tuple(chosen), self.judge(chosen))
            excess = made.predicted - self.budget
            if excess <= 0:
                if best is None or made.seconds < best.seconds:
                    best = made
                low = max(target, low)
                target = low - excess if high is None else (low + high) // 2
            elif target <= low:
                break
            else:
                high = target
                halve = is_known or best is not None
                target = (low + high) // 2 if halve else max(target - excess, low)
        return best

    def smallest(self) -> BlockPlan:
        """The plan with the lowest peak that is known: of the solver's least budget, or one choice for all."""
        tried = [choose(self.options, least(self.options)) or []]
        for choice in {option.name for block in self.options for option in block} - {KEEP}:
            tried.append([self._place(block, choice) for block in self.options])
        return min((self.judge(chosen) for chosen in tried), key=lambda plan: plan.predicted)

    @staticmethod
    def _place(block: Sequence[Option], choice: str) -> int:
        """Index of a choice, or of the next best."""
        names = [option.name for option in block]
        return next((names.index(name) for name in (choice, RECOMPUTE) if name in names), 0)
