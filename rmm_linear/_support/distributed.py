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


def tensor_parallel(model: nn.Module) -> tuple[Any, set[int]] | None:
    """Return a mesh, and those of its dimensions over which weights of a model are divided for good; None without any.

    ``fully_shard`` gathers its weights for every forward pass: of them, the mesh has two dimensions that divide the
    weight, if it is tensor parallel besides, of which the last is that of tensor parallelism.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    if "torch.distributed.tensor" not in sys.modules:
        return None
    mesh, found = None, set[int]()
    for module in model.modules():
        is_gathered = getattr(module, "_is_fsdp_managed_module", False)
        for one in module._parameters.values():
            if not is_dtensor(one) or mesh not in (None, one.device_mesh):  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
                continue
            divides = dividing(one)
            if is_gathered:
                divides = {one.device_mesh.ndim - 1} if len(divides) > 1 else set()  # pyright: ignore
            if divides:
                mesh = one.device_mesh  # pyright: ignore
                found |= divides
    return None if mesh is None else (mesh, found)


def dividing(tensor: Any) -> set[int]:
    """Return the dimensions of a distributed tensor's mesh whose ranks have parts of it."""
    return {dim for dim, place in enumerate(tensor.placements) if not place.is_replicate()}


def local_view(tensor: Any, grad_placements: Any) -> Tensor:
    """Return the part of a distributed tensor on this rank, whose gradient lies so: a view that every call makes."""
    view = tensor.to_local(grad_placements=grad_placements)
    view.rmm_is_fresh = True
    return view


def is_fresh_view(input: Tensor, weight: Tensor | None) -> bool:
    """Say whether an engine makes a view of one input for each layer that reads it, as ZeRO-3 of DeepSpeed does."""
    return hasattr(weight, "ds_id") or hasattr(input, "rmm_is_fresh")


def running_ddp() -> Any:
    """Return the ``DistributedDataParallel`` whose forward pass is running."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    ddp = None if parallel is None else parallel.DistributedDataParallel
    return getattr(ddp, "_active_ddp_module", None)
