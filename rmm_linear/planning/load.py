"""Read plans of either kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.graphs.plan import GraphPlan

_KINDS = (BlockPlan, GraphPlan)


def load_plan(path: str | os.PathLike[str]) -> BlockPlan | GraphPlan:
    """Read a plan that ``plan.save()`` wrote.

    Args:
        path: The file.

    Returns:
        The plan, to be applied to a model: ``plan.apply(model)``.

    Raises:
        ValueError: If the file is no plan.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        kinds = {kind.FORMAT: kind for kind in _KINDS}
        return kinds[fields.pop("format")].from_dict(fields)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no plan ({error!r}). Write one with plan.save().") from error
