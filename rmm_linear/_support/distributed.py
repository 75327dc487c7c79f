"""Say how tensors and modules are distributed, without importing what would have distributed them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_dtensor(tensor: Tensor | None) -> bool:
    """Say whether a tensor is distributed over several processes."""
    module = None if type(tensor) in (Tensor, nn.Parameter) else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of a whole parameter, also while ZeRO-3 of DeepSpeed has put it away."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_elsewhere(tensor: Tensor) -> bool:
    """Say whether a tensor's values are not all here: on the meta device, distributed, or put away by ZeRO-3."""
    return tensor.is_meta or is_dtensor(tensor) or shape_of(tensor) != tensor.shape


def is_fsdp_module(module: nn.Module) -> bool:
    """Say whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def tensor_parallel_mesh(model: nn.Module) -> Any:
    """Return the mesh of ranks that share the weights of a model for good; None if there is none.

    ``fully_shard`` gathers its weights for every forward pass: of them, the mesh has two dimensions that divide the
    weight, if it is tensor parallel besides, of which the last is that of tensor parallelism.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    for module in model.modules():
        is_gathered = getattr(module, "_is_fsdp_managed_module", False)
        for one in module._parameters.values():
            if not is_dtensor(one):
                continue
            mesh, divides = one.device_mesh, [place.is_shard() for place in one.placements]  # pyright: ignore
            if not is_gathered:
                return mesh
            if sum(divides) > 1:
                return mesh[mesh.mesh_dim_names[-1]]
    return None


def running_ddp() -> Any:
    """Return the ``DistributedDataParallel`` whose forward pass is running."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    ddp = None if parallel is None else parallel.DistributedDataParallel
    return getattr(ddp, "_active_ddp_module", None)
