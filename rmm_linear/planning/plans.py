"""Plans are data. What changes a model by a plan is an executor, which registers with :func:`apply`.

A plan that was made for a model remembers it in addition to its fields, so that ``plan.apply()`` needs no argument. It
is no part of the data: it is not compared, printed, saved, copied or pickled.
"""

from __future__ import annotations

import json
import os
from functools import singledispatch
from typing import Any, ClassVar, TypeVar

from torch import nn

from rmm_linear._support.files import write_text
from rmm_linear._support.reports import Report
from rmm_linear.planning.step.workspace import Workspace

Self = TypeVar("Self", bound="Plan")


class Plan(Report):
    """Base class of plans, which are frozen dataclasses."""

    FORMAT: ClassVar[str]
    _model: nn.Module | None = None
    _workspace: Workspace | None = None

    def made_for(self: Self, model: nn.Module | None, workspace: Workspace | None = None) -> Self:
        """Remember a model, so that ``plan.apply()`` applies the plan to it."""
        vars(self).update(_model=model, _workspace=workspace)
        return self

    def _given(self, model: nn.Module | None = None) -> nn.Module:
        found = self._model if model is None else model
        if found is None:
            raise ValueError("A plan that was loaded needs a model. Use plan.apply(model).")
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_model", "_workspace")}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")


class Applied:
    """A model that trains by a plan, until it is reverted: by hand, or at the end of a ``with`` block.

    Attributes:
        plan: The plan.
        model: The model to train.
    """

    def __init__(self, plan: Plan, model: Any) -> None:
        """Begin with a model that nothing was done to."""
        self.plan, self.model = plan, model

    def revert(self) -> None:
        """Let the model train as it did before."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.plan.made_for(self.model)  # copied with its model, not with itself

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.revert()


@singledispatch
def apply(plan: Plan, model: nn.Module) -> Applied:
    """Make a model train by a plan, as ``plan.apply(model)`` does, and return a handle on it.

    Args:
        plan: Of ``plan_blocks``, ``plan_graph`` or ``load_plan``.
        model: The model that it was made for, or one like it.

    Returns:
        The handle: ``model`` is the model to train, ``revert()`` undoes the plan, and so does the end of a ``with``.

    Raises:
        TypeError: If the plan is none of these, or the model is none.
        ValueError: If the plan does not fit the model, or the model trains by another plan already.

    Example:
        >>> import torch
        >>> from rmm_linear import planning
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        >>> with planning.apply(planning.plan_blocks(model, torch.ones(100, 8), "least"), model) as planned:
        ...     planned(torch.ones(100, 8)).sum().backward()
    """
    raise TypeError(f"plan must be one of rmm_linear.planning, got {type(plan).__name__}.")
