"""Save the plan of a fitted model as a file next to its weights, or in a checkpoint, and restore it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rmm_linear._support.json_files import read_json
from rmm_linear.conversion.names import unwrapped
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.load import load_plan

logger = logging.getLogger(__name__)

PLAN_FILE = "rmm_plan.json"


def plan_of(model: nn.Module) -> BlockPlan | None:
    """Return the plan that a model trains by, or None."""
    return vars(unwrapped(model)).get("rmm_plan")


def read_plan(path: Path, folder: str | os.PathLike[str] | None = None, *, is_own: bool = False) -> BlockPlan:
    """Read a plan of blocks; offloaded ones write files into ``folder``, see :func:`rmm_linear.planning.load_plan`."""
    plan = load_plan(path, folder=folder)
    if not isinstance(plan, BlockPlan):
        raise ValueError(f"{path} must be a plan of blocks, as rmm_linear.fit makes it, got one of a graph.")
    if is_own and folder is None:
        return replace(plan, folder=read_json(path).get("folder"))
    return plan


def restore_plan(
    model: nn.Module, path: Path, folder: str | os.PathLike[str] | None = None, *, is_own: bool = False
) -> BlockPlan:
    """Make a model train by a saved plan. Another plan that it has is reverted, which is logged."""
    model = unwrapped(model)
    own = plan_of(model)
    saved = read_plan(path, folder or (None if own is None else own.folder), is_own=is_own)
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
    """Return the part of a plan that changes a model, without its costs."""
    return [(block.name, block.option, block.inner) for block in plan.blocks], plan.config, plan.folder
