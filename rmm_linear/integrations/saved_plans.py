"""The plan of a fitted model as a file beside its weights, or in a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from rmm_linear.conversion.names import unwrapped
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.load import load_plan

logger = logging.getLogger(__name__)

PLAN_FILE = "rmm_plan.json"


def plan_of(model: nn.Module) -> BlockPlan | None:
    """Return the plan that a model trains by.

    Args:
        model: A model; torch.compile, DataParallel or DistributedDataParallel may wrap it.

    Returns:
        The plan, or None.
    """
    return vars(unwrapped(model)).get("rmm_plan")


def read_plan(path: Path) -> BlockPlan:
    """Read a plan of blocks.

    Args:
        path: The file.

    Returns:
        The plan.

    Raises:
        ValueError: If the file is none, or a plan of another kind.
    """
    try:
        plan = load_plan(path)
    except RecursionError as error:
        raise ValueError(f"{path} is no plan: it is nested too deeply. Write one with plan.save().") from error
    if not isinstance(plan, BlockPlan):
        raise ValueError(f"{path} must be a plan of blocks, as rmm_linear.fit makes it, got one of a graph.")
    return plan


def restore_plan(model: nn.Module, path: Path) -> BlockPlan:
    """Make a model train by a saved plan. Another plan that it has is reverted, which is logged.

    Args:
        model: The model, wrapped or not.
        path: The file.

    Returns:
        The plan that the model has now.

    Raises:
        ValueError: If the file is damaged, or of another model; the message names it.
    """
    model, saved, own = unwrapped(model), read_plan(path), plan_of(model)
    if own is not None:
        if _does(own) == _does(saved):
            return own
        logger.warning(
            "The model's plan is replaced by that of %s, which differs. Remove that file to go on with another plan.",
            path,
        )
        own.revert()
    try:
        saved.apply(model)
    except ValueError as error:
        if own is not None:
            own.apply()
        raise ValueError(f"The model cannot train by {path}: {error}") from error
    return saved


def _does(plan: BlockPlan) -> tuple[Any, ...]:
    """What a plan does to a model, without what it costs."""
    return [(block.name, block.option, block.inner) for block in plan.blocks], plan.config, plan.folder
