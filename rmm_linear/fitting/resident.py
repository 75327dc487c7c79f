"""Count what a training process has in addition to its steps, and simulate or measure a step on top of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rmm_linear.fitting.static_memory import StaticMemory, static_memory_of
from rmm_linear.memory.peak import Peak, peak
from rmm_linear.planning.step.sharded import is_sharded, reshard, untouched, whole_gradients
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.step import as_in_training, copied, run_step
from rmm_linear.planning.step.watch import Held, watch


@dataclass(frozen=True)
class Resident:
    """A training process: its model, what is there before a step, and what a step adds."""

    model: nn.Module  # without the wrapper of DistributedDataParallel, as simulated steps must not reduce gradients
    # What it has in addition to steps; what fully_shard gathers belongs to the step, which shows it
    static: StaticMemory
    bytes: int  # before a step
    held: Held | None  # bytes of a parameter's gradient that a step adds; None is all
    accumulates: bool  # whether the gradients are there when a step begins, where bytes counts them

    def simulated(self, example: Any) -> Peak:
        """Return the peak of a step of the model as it is, planned or not, without what is there before."""
        return watch(self.model, example, held=self.held)[0]

    def measured(self, example: Any) -> int:
        """Return the bytes that a real step makes; where ``fully_shard`` has divided the model, all ranks take it."""
        model = self.model
        device = next((p.device for p in model.parameters() if p.device.type == "cuda"), torch.device("cpu"))
        with untouched(model), as_in_training(model):
            batch = copied(example)
            for parameter in model.parameters():
                if self.accumulates and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            there = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            with peak(device) as highest:
                run_step(model, batch)
        return highest.bytes - there

    def peak(self, step: int) -> int:
        """Return the peak of the process, with a step that takes so many bytes."""
        return max(self.bytes + step, self.static.in_optimizer_step)


def resident(
    model: nn.Module, optimizer: Any = None, shards: Shards | None = None, *, accumulate: bool = False
) -> Resident:
    """Count what a training process has before a step; ``accumulate``: with the gradients of earlier batches."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    reshard(model)
    static = static_memory_of(model, optimizer, shards)
    static = replace(static, gathered=0) if is_sharded(model) else static
    accumulate = accumulate or (wrapped and model.gradient_as_bucket_view)
    inner = model.module if wrapped else model
    if not accumulate:
        return Resident(inner, static, static.before_step, shards and shards.gradient_bytes, accumulates=False)
    whole = whole_gradients(model)
    if whole is not None:
        return Resident(inner, static, static.before_step + whole, None, accumulates=False)
    return Resident(inner, static, static.before_step + static.gradients, lambda parameter: 0, accumulates=True)
