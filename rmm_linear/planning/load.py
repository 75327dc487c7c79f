"""Read plans of either kind."""

from __future__ import annotations

import dataclasses
import os

from rmm_linear._support.json_files import naming_file, read_json
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.graphs.plan import GraphPlan

_KINDS = {kind.FORMAT: kind for kind in (BlockPlan, GraphPlan)}


def load_plan(path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> BlockPlan | GraphPlan:
    """Read a plan that ``plan.save()`` wrote.

    Args:
        path: The file.
        folder: Where offloaded blocks of a model on the CPU write files. The one that the file names is not used, as
            whoever wrote the file must not choose where files are written; for a plan of your own, give it again.

    Returns:
        The plan, to be applied to a model: ``plan.apply(model)``.

    Raises:
        ValueError: If the file is no plan, or a field of it is missing or wrong.
    """
    with naming_file(path, " is no plan", ". Write one with plan.save()."):
        fields = read_json(path)
        plan = _KINDS[fields.pop("format")].from_dict(fields)
    if isinstance(plan, BlockPlan):
        return dataclasses.replace(plan, folder=None if folder is None else os.fspath(folder))
    return plan
