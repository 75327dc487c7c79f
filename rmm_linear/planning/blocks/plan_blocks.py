"""Plan which blocks of a model are recomputed: a solver proposes, the simulation judges."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rmm_linear._support.progress import counting, reporting
from rmm_linear.planning.blocks.find import alike, find_inner
from rmm_linear.planning.blocks.measure import BlockCost, Costs, expect_steps, measure
from rmm_linear.planning.blocks.plan import KEEP, NESTED, RECOMPUTE, SELECTIVE, BlockPlan, PlannedBlock
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.blocks.timing import cheap_shares, time_modules
from rmm_linear.planning.budget import LEAST, BudgetError, read_budget, shown_budget, shown_least
from rmm_linear.planning.step.flops import by_plain, count_flops
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace

_NO_LOSS = (
    "The model returned no loss, so the sum of its outputs was taken for one. Give a batch with labels, or a function "
    "that returns the loss, to count what your loss needs."
)
_BESIDES = 6  # steps that are simulated besides those of options


def plan_blocks(
    model: nn.Module,
    example: Any,
    memory: int | float | str,
    *,
    selective: bool = True,
    nested: bool = True,
    workspace: Workspace | None = None,
    progress: bool | None = None,
) -> BlockPlan:
    """Plan which blocks of a model are recomputed in the backward pass, so that a step fits into a memory budget.

    Loss, gradients and buffers stay those of the model to the bit; random numbers repeat. The cost is time: up to
    one more forward pass, two where blocks are nested. Planning takes some simulated steps and up to five real forward
    passes without gradients; the model stays as it is until the plan is applied.

    Args:
        model: The model, in any mode; steps are those of training.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. Larger batches need more memory.
        memory: Budget for what a step makes, as :func:`rmm_linear.planning.simulate` counts it: bytes, a text such as
            "2GB", or a share of the plain step's peak in (0, 1]; "least" is the lowest peak that is found.
        selective: Whether blocks may save the results of products and recompute all others, which costs little time.
        nested: Whether parts of a block may be recomputed once more while it is recomputed, which takes more time.
        workspace: Bytes that operators take beyond their results, of :func:`rmm_linear.planning.workspace`, so that it
            counts too; None leaves it out.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The plan; ``plan.apply()`` makes the model train by it.

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
    with reporting("plan_blocks", progress):
        return _planned(model, example, memory, selective=selective, nested=nested, workspace=workspace)


def _planned(
    model: nn.Module,
    example: Any,
    memory: int | float | str,
    *,
    selective: bool,
    nested: bool,
    workspace: Workspace | None,
) -> BlockPlan:
    costs = measure(model, example)
    if workspace:
        costs = replace(costs, peak=watch(model, example, workspace)[0])
    note = "" if costs.has_loss else _NO_LOSS
    budget = read_budget(memory, costs.peak.bytes)
    plans = Proposals(model, example, costs, budget, workspace)
    if costs.peak.bytes <= budget:
        return replace(plans.plan([0] * len(costs.blocks), costs.peak), flops=1.0, note=note).made_for(model)
    choices = [RECOMPUTE, *([SELECTIVE] if selective else []), *([NESTED] if nested else [])]
    expect_steps(_BESIDES + len(choices), 1 + len(choices) / 3)
    ways = Recomputations(model, example, costs, choices)
    with counting("measuring options", len(choices)) as begins:
        for choice in choices:
            begins(choice)
            plans = ways.add_to(plans, choice)
    best = plans.search() or plans.smallest()
    assert best is not None  # noqa: S101 nothing waits elsewhere
    if memory != LEAST and best.predicted > budget:
        raise BudgetError(
            f"memory={shown_budget(memory, costs.peak.bytes)} cannot be met: the least is "
            f"{shown_least(best.predicted, costs.peak.bytes)}, which the {best.moment} needs. Use more memory, or a "
            "smaller batch."
        )
    flops = by_plain(count_planned_flops(best, example), count_flops(model, example))
    memory = best.predicted if memory == LEAST else budget
    return replace(best, memory=memory, flops=flops, note=note).made_for(model)


def count_planned_flops(plan: BlockPlan, example: Any) -> int:
    """Count the floating-point operations of a planned step."""
    with plan.applied() as planned:
        return count_flops(planned, example)


class Recomputations:
    """The ways in which the blocks of a model may be recomputed, and what time each adds."""

    def __init__(self, model: nn.Module, example: Any, costs: Costs, choices: Sequence[str]) -> None:
        self.model, self.costs, self.choices = model, costs, choices
        names = [block.name for block in costs.blocks]
        self.inner = {name: find_inner(model, name) for name in names}
        parts = [name for inner in self.inner.values() for name in inner]
        self.seconds = time_modules(model, example, parts) if NESTED in choices and parts else {}
        self.cheap = cheap_shares(model, example, names) if SELECTIVE in choices else {}

    def add_to(self, proposals: Proposals, choice: str) -> Proposals:
        """Add one of the ways to the options; raise ValueError if a block does not compute the same again."""
        try:
            return self._adding(proposals, choice)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                "A block must compute the same when it runs again, and one does not: it may keep something between "
                "calls, as caches of keys and values do. Set model.config.use_cache=False in transformers. It "
                f"raised {type(error).__name__}: {reason}"
            ) from error

    def _adding(self, proposals: Proposals, choice: str, refused: Collection[str] = ()) -> Proposals:
        """Add one of the ways, but for the blocks that refuse it: they are looked for once a step has failed."""
        rows = [None if block.name in refused else self._row(block, choice) for block in self.costs.blocks]
        if all(row is None for row in rows):
            return proposals
        try:
            return proposals.adding(rows)
        except RuntimeError:
            found = self._refusing_selective(proposals) if choice == SELECTIVE and not refused else set[str]()
            if not found:
                raise
        return self._adding(proposals, choice, found)

    def _row(self, block: BlockCost, choice: str) -> PlannedBlock | None:
        inner = self.inner[block.name] if choice == NESTED else ()
        if block.writes_input or (choice == NESTED and not inner):
            return None
        share = self.cheap[block.name] if choice == SELECTIVE else 1.0
        extra = share * block.seconds + sum(self.seconds[name] for name in inner)
        return PlannedBlock(block.name, choice, seconds=extra, inner=inner)

    def _refusing_selective(self, proposals: Proposals) -> set[str]:
        """Return the blocks that change a product's result in place, which then cannot be saved."""
        refused, tried = set[str](), dict[str, bool]()
        for number, block in enumerate(self.costs.blocks):
            kind = alike(self.model, block.name)
            if kind not in tried:
                rows = [PlannedBlock(each.name, KEEP) for each in self.costs.blocks]
                rows[number] = self._row(block, SELECTIVE) or rows[number]
                try:
                    proposals.events(rows)
                    tried[kind] = True
                except RuntimeError:
                    tried[kind] = False
            refused |= set() if tried[kind] else {block.name}
        return refused
