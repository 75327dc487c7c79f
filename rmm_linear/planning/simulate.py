"""The peak memory of a training step, before it is paid: the step runs on tensors that have shapes but no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rmm_linear.memory.peak import Peak
from rmm_linear.planning.follow import FollowedTensors, followed
from rmm_linear.planning.step import prepared, runs_on_fakes
from rmm_linear.planning.workspace import Workspace

Held = Callable[[Tensor], int]

if TYPE_CHECKING:
    from rmm_linear.planning.block_plan import BlockPlan
    from rmm_linear.planning.graph_plan import GraphPlan


def simulate(model: nn.Module | BlockPlan | GraphPlan, example: Any, workspace: Workspace | None = None) -> Peak:
    """Predict the peak memory of a training step without its memory.

    A forward and a backward pass run on fake tensors, and the bytes of all tensors that operators make are added up:
    activations, gradients of the parameters, temporary results. Parameters, buffers and the batch exist before the step
    and are not counted, nor is the workspace inside of an operator (convolutions have some), which only the allocator
    sees: :func:`rmm_linear.planning.workspace` measures it in a real step. The model, its gradients and the random
    number generators stay as they are. It takes about as long as a step of a small model, whatever the size. Fake
    tensors have no values: a model that leaves a mask out because it masks nothing is simulated with the mask. What a
    converted model saves depends on values, so its step runs on real tensors.

    A model on the meta device, which has shapes and no weights, is simulated as if it were on the CPU, so it may be too
    large for the machine. A converted one is taken to have no padding, whatever its mask: no row is left out, so what
    it saves is an upper bound. (The first real step with padding checks once that none reaches the loss, which takes
    memory for a moment.) Its ``bits="auto"`` are those of the first steps.

    Args:
        model: The model, planned or not; or a plan made for one.
        example: A training batch: a mapping of keyword arguments, a sequence of arguments, or one argument; or a
            function that runs the model on one and returns its output or loss; such a function holds its tensors on
            the CPU. Without a loss, the sum of all outputs is differentiated.
        workspace: What operators take beyond their results, to be added; None leaves it out.

    Returns:
        Bytes, the moment of the peak, the bytes of every module at that moment, and memory over time. Modules of a plan
        for a graph are its pieces.

    Raises:
        ValueError: If the model is compiled, no output depends on a trained parameter, or a converted model on the meta
            device has norm estimators, which learn from values.

    Example:
        >>> simulate(nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 1)), torch.ones(100, 10)).moment
        'backward of 1'
    """
    if type(model).__name__ == "OptimizedModule":
        raise ValueError(
            "simulate needs a plan or a model that is not compiled, got a compiled model. Use simulate(plan, example), "
            "or the model itself."
        )
    if not isinstance(model, nn.Module):
        return model.simulated(example, workspace)
    return watch(model, example, workspace)[0]


def watch(
    model: nn.Module, example: Any, workspace: Workspace | None = None, held: Held | None = None
) -> tuple[Peak, FollowedTensors]:
    """Run a step and follow its tensors.

    Args:
        model: The model.
        example: A training batch, as for :func:`simulate`.
        workspace: As for :func:`simulate`.
        held: Says how many bytes of a parameter's gradient count once it is added up: 0 where gradients are there when
            the step begins, those of one rank's part where it is sharded. None: all.

    Returns:
        The peak, and all that was followed.
    """
    peak = Peak(measure="simulated live tensors") if runs_on_fakes(model) else Peak()

    def hold(parameter: Tensor) -> None:
        if held is not None and parameter.grad is not None:
            live.resize(parameter.grad, held(parameter))

    on_gradient = None if held is None else hold
    with prepared(model, example, on_gradient=on_gradient) as step, followed(model) as place:
        live = FollowedTensors(peak, place, workspace)
        with live:
            step()
            live.finish()
    return peak, live


def by_plain(planned: int, plain: int) -> float:
    """Divide operations, also of models that have none.

    Args:
        planned: Operations of a planned step.
        plain: Those of a plain one.

    Returns:
        1 where there are none.
    """
    return planned / plain if plain else 1.0


def count_flops(model: nn.Module, example: Any) -> int:
    """Count the floating-point operations of a step, recomputation included.

    Args:
        model: The model, planned or not.
        example: A training batch, as for :func:`simulate`.

    Returns:
        The operations of matrix products, convolutions and attention.
    """
    # By itself: with live bytes counted at once, gradients of fake tensors appear twice.
    with prepared(model, example) as step, flop_counter() as counter:
        step()
    return counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """Return a counter that knows the CPU's fused attention too."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    return FlopCounterMode(display=False, custom_mapping={attention: forward_flops, backward: backward_flops})
