"""Predict the peak memory of a training step, by running it on tensors that have shapes but no memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.blocks.stages import simulate_stage
from rmm_linear.planning.budget import check_model
from rmm_linear.planning.graphs.plan import GraphPlan
from rmm_linear.planning.step.divided import divided, part_of
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace


def simulate(
    model: nn.Module | BlockPlan | GraphPlan,
    example: Any,
    workspace: Workspace | None = None,
    *,
    shards: Shards | None = None,
) -> Peak:
    """Predict the peak memory of a training step without its memory.

    A forward and a backward pass run on fake tensors, and the bytes of all tensors that operators make are added up:
    activations, gradients of the parameters, temporary results. Parameters, buffers and the batch exist before the step
    and are not counted, nor is the workspace inside of an operator, which only the allocator sees: convolutions have
    some. :func:`rmm_linear.planning.workspace` measures it in a real step. The chunk of logits that a loss in chunks
    makes at a time is counted on a GPU, and the weight that a product of bitsandbytes dequantizes, everywhere. The
    model, its gradients and the random number generators stay as they are. It takes about as long as a step of a small
    model, whatever the size. Fake tensors have no values: a model that leaves a mask out because it masks nothing is
    simulated with the mask. What a converted model saves depends on its padding, so its step runs on real tensors. Of a
    model that ``fully_shard`` has divided, FSDP's own code runs without communication, in this process alone: what it
    gathers counts.

    A model on the meta device, which has shapes and no weights, is simulated as if it were on the CPU, so it may be too
    large for the machine; but what flash attention's backward pass takes on a GPU counts, where it is in 16 bits. A
    converted model is taken to have no padding, whatever its mask: no row is left out, so what it saves is an upper
    bound. (The first real step with padding checks once that none reaches the loss, which takes memory for a moment.)

    Args:
        model: The model, planned or not; or a plan made for one.
        example: A training batch: a mapping of keyword arguments, a sequence of arguments, or one argument; or a
            function that runs the model on one and returns its output or loss; such a function holds its tensors on
            the CPU. Without a loss, the sum of all outputs is differentiated.
        workspace: Bytes that operators take beyond their results, to be added; None leaves them out.
        shards: How the step is divided among devices, of a model that is no plan: bytes are those of one of them.

    Returns:
        Bytes, the moment of the peak, the bytes of every module at that moment, and memory over time. Modules of a plan
        for a graph are its pieces.

    Raises:
        ValueError: If the model is compiled, no output depends on a trained parameter, or a converted model on the meta
            device has norm estimators, which learn from values; or if the step cannot be divided so.

    Example:
        >>> import torch
        >>> simulate(nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 1)), torch.ones(100, 10)).moment
        'backward of 1'
    """
    if type(model).__name__ == "OptimizedModule":
        raise ValueError(
            "simulate needs a plan or a model that is not compiled, got a compiled model. Use simulate(plan, example), "
            "or the model itself."
        )
    if isinstance(model, BlockPlan | GraphPlan):
        if shards is not None:
            raise ValueError(
                "shards divide the step of a model, got a plan. Apply it, and simulate the model: plan.apply()."
            )
        return model.simulated(example, workspace)
    check_model(model)
    with divided(model, shards):
        part = part_of(example, shards)
        if shards is not None and shards.stages > 1:
            return simulate_stage(model, part, shards, workspace)
        return watch(model, part, workspace, None if shards is None else shards.gradient_bytes)[0]
