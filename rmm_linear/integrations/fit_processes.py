"""Broadcast rank 0's plan and the largest batch to all DDP ranks; no-ops in a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map_only


def largest_of_all(size: int, device: torch.device) -> tuple[int, int]:
    """Find the largest batch of all processes."""
    if not _is_parallel():
        return size, 0
    count = distributed.get_world_size()
    both = torch.tensor(size * count + distributed.get_rank(), device=device)
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    return divmod(int(both), count)


def shared_batch(inputs: Any, source: int, device: torch.device) -> Any:
    """Send the batch of one process to all."""
    if not _is_parallel():
        return inputs
    return _sent(tree_map_only(Tensor, lambda tensor: tensor.cpu(), dict(inputs)), source, device)


def from_first(found: Any, device: torch.device) -> Any:
    """Send what the first process found to all."""
    return _sent(found, 0, device) if _is_parallel() else found


def _sent(one: Any, source: int, device: torch.device) -> Any:
    sent = [one if distributed.get_rank() == source else None]
    distributed.broadcast_object_list(sent, source, device=device)
    return sent[0]


def _is_parallel() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
