"""Follow the tensors of one step: its peak, and every change on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rmm_linear.memory.peak import Peak
from rmm_linear.planning.step.follow import FollowedTensors, followed
from rmm_linear.planning.step.step import has_memory, prepared, runs_on_fakes
from rmm_linear.planning.step.workspace import Workspace

Held = Callable[[Tensor], int]
SIMULATING = "simulating the exact step"  # a stage of calls that simulate more steps, whose time it says


def watch(
    model: nn.Module,
    example: Any,
    workspace: Workspace | None = None,
    held: Held | None = None,
    per_byte: tuple[float, float] | None = None,
) -> tuple[Peak, FollowedTensors]:
    """Run a step and follow its tensors; ``held`` says how many bytes of a finished gradient count, None all."""
    peak = Peak(measure="simulated live tensors") if runs_on_fakes(model) else Peak()

    def hold(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.finished(parameter.grad, None if held is None else held(parameter))

    with prepared(model, example, on_gradient=hold) as step, followed(model) as place:
        live = FollowedTensors(peak, place, workspace, is_meta=not has_memory(model), per_byte=per_byte)
        with live:
            step()
            live.finish()
    return peak, live
