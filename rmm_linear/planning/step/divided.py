"""Simulate steps as one device of several has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rmm_linear.planning.step.resize import length_of, lengthened
from rmm_linear.planning.step.ring import in_ring
from rmm_linear.planning.step.shards import Shards, check_shards
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.step.tensor_parallel import tensor_parallel_sizes


@contextmanager
def divided(model: nn.Module, shards: Shards | None) -> Iterator[None]:
    """Give a model, inside of the block, the sizes that one device has, and its attention what a ring takes."""
    check_shards(shards)
    if shards is not None and has_memory(model) and max(shards.context, shards.tensor, shards.stages) > 1:
        raise ValueError(
            "context, tensor and stages are planned for a model without values, got one with weights. Make it under "
            'torch.device("meta"), or move a copy there: model.to("meta").'
        )
    with in_ring(shards), tensor_parallel_sizes(model, shards):
        yield


def part_of(example: Any, shards: Shards | None) -> Any:
    """Return the part of a batch that a rank has: its share of every sequence."""
    if shards is None or shards.context == 1:
        return example
    length = length_of(example)
    if length % (2 * shards.context):
        raise ValueError(
            f"context={shards.context} divides sequences into twice as many parts, of which each rank has two, got "
            f"{length} tokens. Use a multiple of {2 * shards.context}."
        )
    return lengthened(example, length // shards.context)
