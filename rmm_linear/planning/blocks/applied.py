"""Make a model train by a plan for its blocks: recompute, offload and convert them, and undo it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from rmm_linear._support.provided import provided
from rmm_linear._support.validation import did_you_mean
from rmm_linear.context.checkpointing import REPLACE, Uncheckpointed
from rmm_linear.planning.blocks.plan import APPLIED, ATTENTION, CONVERT, KEEP, OFFLOAD, SELECTIVE, TILE, BlockPlan
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.budget import check_model
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded
from rmm_linear.planning.plans import Applied, apply
from rmm_linear.planning.replay.wrapped import Wrapped
from rmm_linear.planning.tiles.apply import tiles_of
from rmm_linear.planning.tiles.attention import heads_of

logger = logging.getLogger(__name__)

_PLAN = "rmm_plan"  # attribute of a model with a plan


class Executor(Protocol):
    """Changes some of a model's modules, and changes them back."""

    def attach(self) -> None:
        """Make the change; an error leaves the modules as they were."""

    def detach(self) -> None:
        """Undo it."""


class AppliedBlocks(Applied):
    """A model whose blocks train by a plan."""

    conversion: Any = None  # what convert reported; None where no block is converted

    def __init__(self, plan: BlockPlan, model: nn.Module, executors: Sequence[Executor]) -> None:
        """Attach executors; if one fails, the model is as it was."""
        super().__init__(plan.made_for(model), model)
        self._attached: list[Executor] = []
        try:
            for each in executors:
                each.attach()
                self._attached.append(each)
                self.conversion = getattr(each, "report", self.conversion)
        except BaseException:
            self.revert()
            raise
        vars(model).update({_PLAN: plan, APPLIED: self})

    def undo_later(self, executor: Executor) -> None:
        """Detach an executor after all others."""
        self._attached.insert(0, executor)

    def revert(self) -> None:
        if vars(self.model).get(APPLIED) is self:
            del vars(self.model)[_PLAN], vars(self.model)[APPLIED]
        while self._attached:
            self._attached.pop().detach()


def offloaded(model: nn.Module) -> dict[str, Offloaded]:
    wrapped = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: one for name, one in wrapped.items() if isinstance(one, Offloaded)}


@apply.register
def apply_blocks(plan: BlockPlan, model: nn.Module) -> AppliedBlocks:
    """Make a model train by a plan; see :meth:`BlockPlan.apply`."""
    check_model(model)
    plan.check()
    if APPLIED in vars(model):
        raise ValueError("The model trains by another plan already. Call rmm_linear.revert(model) first.")
    modules = dict(model.named_modules())
    for name in (name for block in plan.blocks for name in (block.name, *block.inner)):
        if name not in modules:
            raise ValueError(f"The model has no module {name!r}. Plan this model itself.{did_you_mean(name, modules)}")
    for name in (name for block in plan.blocks if block.choice != KEEP for name in (block.name, *block.inner)):
        if isinstance(modules[name].__dict__.get("forward"), Wrapped):
            raise ValueError(f"{name} is part of another plan already. Use revert() of that plan first.")
    return AppliedBlocks(plan, model, _executors(plan, model, modules))


def _executors(plan: BlockPlan, model: nn.Module, modules: dict[str, nn.Module]) -> list[Executor]:
    found: list[Executor] = [Uncheckpointed(model)] if plan.checkpointing == REPLACE else []
    if plan.config is not None:
        found.append(provided(CONVERT)(model, plan.config))
    chain = OffloadChain(plan.folder)  # the order of a block's executors is that from the inside
    for block in plan.blocks:
        module = modules[block.name]
        if TILE in block.words:
            tiles = tiles_of(module, block.rows or None)
            if not tiles:
                logger.warning("%s has nothing that can run in slices, so its word tile does nothing.", block.name)
            found += tiles
            found += heads_of(module)
        if how := block.recomputation:
            found += [Recomputed(modules[name]) for name in block.inner]
            found.append(Recomputed(module, how if how in (SELECTIVE, ATTENTION) else None))
        if OFFLOAD in block.words:  # around the rest: what that saves is what waits
            found.append(Offloaded(module, chain))
    return found
