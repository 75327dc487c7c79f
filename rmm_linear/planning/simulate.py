"""The peak memory of a training step, before it is paid: the step runs on tensors that have shapes but no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from rmm_linear.memory.peak import Peak
from rmm_linear.planning.follow import Event, FollowedTensors, followed
from rmm_linear.planning.step import as_in_training, fake_step, run_step

if TYPE_CHECKING:
    from rmm_linear.planning.block_plan import BlockPlan


def simulate(model: nn.Module | BlockPlan, example: Any) -> Peak:
    """Predict the peak memory of a training step without its memory.

    A forward and a backward pass run on fake tensors, and the bytes of all tensors that operators make are added up:
    activations, gradients of the parameters, temporary results. Parameters, buffers and the batch exist before the step
    and are not counted, nor is the workspace inside of an operator (convolutions have some), which only the allocator
    sees. The model, its gradients and the random number generators stay as they are. It takes about as long as a step
    of a small model, whatever the size. Fake tensors have no values: a model that leaves a mask out because it masks
    nothing is simulated with the mask. What a converted model saves depends on values, so its step runs on real tensors.

    Args:
        model: The model, planned or not; or a plan made for one.
        example: A training batch: a mapping of keyword arguments, a sequence of arguments, or one argument; or a function
            that runs the model on one and returns its output or loss. Without a loss, the sum of all outputs is
            differentiated.

    Returns:
        Bytes, the moment of the peak, the bytes of every module at that moment, and memory over time.

    Example:
        >>> simulate(nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 1)), torch.ones(100, 10)).moment
        'backward of 1'
    """
    return simulate_events(model, example)[0]


def simulate_events(model: nn.Module | BlockPlan, example: Any) -> tuple[Peak, list[Event]]:
    """Predict the peak, and return all allocations and releases too.

    Args:
        model: The model, planned or not; or a plan made for one.
        example: A training batch, as for :func:`simulate`.

    Returns:
        The peak and the events.
    """
    if not isinstance(model, nn.Module):
        with model.applied() as planned:
            return simulate_events(planned, example)
    if _needs_values(model):
        peak = Peak()
        with as_in_training(model):
            return peak, _watch(model, peak, lambda: run_step(model, example)).events
    peak = Peak(measure="simulated live tensors")
    with as_in_training(model), fake_step(model, example) as step:
        return peak, _watch(model, peak, step).events


def _needs_values(model: nn.Module) -> bool:
    """Whether this library's modules are in a model: which rows they save depends on masks and norms."""
    return any(type(module).__module__.startswith("rmm_linear.") for module in model.modules())


def _watch(model: nn.Module, peak: Peak, step: Callable[[], None]) -> FollowedTensors:
    with followed(model) as place, FollowedTensors(peak, place) as live:
        step()
        live.finish()
    return live
