"""Test for types of distributed PyTorch without importing it: if it is not imported, there are none of them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_dtensor(tensor: Tensor | None) -> bool:
    """Say whether a tensor is distributed over several processes."""
    module = None if type(tensor) in (Tensor, nn.Parameter) else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp_module(module: nn.Module) -> bool:
    """Say whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def running_ddp() -> Any:
    """Return the ``DistributedDataParallel`` whose forward pass is running."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    ddp = None if parallel is None else parallel.DistributedDataParallel
    return getattr(ddp, "_active_ddp_module", None)
