"""Compute the bytes that one rank holds of a model that ``fully_shard`` divides, or has divided.

The rules are those of PyTorch's documentation of ``torch.distributed.fsdp.fully_shard`` and of what it does by default:

- Every parameter is cut along its first dimension into chunks of equal size, one per rank; the last chunks are padded.
  Gradients and the optimizer's state are cut in the same way. Buffers stay whole on every rank.
- The parameters of one call of ``fully_shard`` are gathered at once, before the module runs, and freed after it
  (``reshard_after_forward`` is True). The call on the root has those that no other call has, such as embeddings and
  the head; they stay gathered from the forward pass to the end of the backward pass (it is False for the root).
- In the backward pass, while a block runs, the block before it is gathered already (a prefetch of one). The gradients
  of a block are whole until they are copied into the input of the reduce-scatter; that input stays until the block
  before it has run, since the communication overlaps with it.

So the peak is in the backward pass of a block: its parameters and those of the block before it, its gradients
and those of the block after it, and the parameters and gradients of the root. Mixed precision is not in this model:
what is gathered has the dtype of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rmm_linear._support.distributed import is_dtensor, is_fsdp_module
from rmm_linear.memory.quantized import as_held
from rmm_linear.planning.blocks.find import owner_of, repeated_blocks
from rmm_linear.planning.blocks.stages import parameters_of_stage
from rmm_linear.planning.step.shards import Shards


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def size_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def local_bytes(parameters: Iterable[Tensor], shards: Shards | None = None) -> int:
    found = [(local(p).shape, p.dtype) for p in parameters]
    return sum(size_bytes(shards.shape(shape) if shards else shape, dtype) for shape, dtype in found)


def fully_sharded(model: nn.Module) -> list[str] | None:
    """Name the modules below the root that ``fully_shard`` was called on, inner ones first; None without any call."""
    found = [name for name, module in model.named_modules() if is_fsdp_module(module)]
    return [name for name in reversed(found) if name] if found else None


def gathered_bytes(model: nn.Module, shards: Shards | None = None) -> int:
    """Return the bytes that a rank holds unsharded at the peak, in addition to its own parts; 0 for a plain model."""
    called = fully_sharded(model)
    if called is None and (shards is None or shards.ranks is None):
        return 0
    blocks = repeated_blocks(model) if called is None else called
    weights: Counter[str | None] = Counter()
    gradients: Counter[str | None] = Counter()
    order: dict[str, None] = {}
    for name, parameter in parameters_of_stage(model, shards):
        block = owner_of(name, blocks)
        weights[block] += _gathered(parameter, shards)
        gradients[block] += _gathered(parameter, shards) * parameter.requires_grad
        if block is not None:
            order[block] = None
    running = _worst([weights[block] for block in order], [gradients[block] for block in order])
    return weights[None] + gradients[None] + running


def _gathered(parameter: Tensor, shards: Shards | None) -> int:
    """Return the bytes of a whole parameter, with the padding of all ranks."""
    held = as_held(parameter)[0]
    whole = size_bytes(held.shape, held.dtype)
    return size_bytes(shards.shape(held.shape), held.dtype) * shards.ranks if shards and shards.ranks else whole


def _worst(weights: Sequence[int], gradients: Sequence[int]) -> int:
    before, after = [0, *weights], [*gradients[1:], 0]
    return max((sum(each) for each in zip(before, weights, gradients, after, strict=False)), default=0)
