"""Run steps of a model that ``fully_shard`` has divided, and leave no trace in what it keeps between steps.

A simulated step runs FSDP's own code on fake tensors, with communication that moves nothing. So it has all that a rank
takes, by FSDP's own rules: gathered weights and those that are fetched ahead, whole gradients, the buffers of both, in
the dtypes of the mixed precision policy; and no other rank takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.distributed import is_fsdp_module

_CONTAINERS = (list, dict, set)
_OF_MODULES = ("_parameters", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
_GATHERED, _BUFFERS = "_unsharded_param", ("all_gather_outputs", "_unsharded_inner_tensors")
_ACCUMULATED = "unsharded_accumulated_grad"  # what a backward pass without synchronisation leaves


def is_sharded(model: nn.Module) -> bool:
    """Say whether ``fully_shard`` was called on a model, or on a part of it."""
    return any(map(is_fsdp_module, model.modules()))


def runs_alone(model: nn.Module) -> bool:
    """Say whether this process can run a model by itself: its weights have values, and are not gathered from others."""
    return not any(p.is_meta for p in model.parameters()) and not is_sharded(model)


def reshard(model: nn.Module) -> None:
    """Divide weights again that a pass without a backward pass has left gathered, such as the root's."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # pyright: ignore[reportCallIssue]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Set aside what FSDP keeps between steps inside the block, gradients that accumulate among it."""
    states = _states(model)
    if not states:
        yield
        return
    reshard(model)
    kept = [
        (one, {name: (value, copied_container(value)) for name, value in vars(one).items()}) for one in _kept(states)
    ]
    # A pass without a backward pass, or one that raises, leaves modules with gathered weights; the first, with hooks.
    own = [vars(module)[name] for module in model.modules() for name in _OF_MODULES if name in vars(module)]
    owned = [(one, dict(one)) for one in own]
    try:
        for module in model.modules():
            if is_fsdp_module(module):
                module.set_requires_gradient_sync(True, recurse=False)  # pyright: ignore[reportCallIssue]
        for one, fields in kept:
            if _ACCUMULATED in fields:  # a parameter: it begins without gradients, and with memory of its own
                vars(one).pop(_GATHERED, None)
                vars(one).update({name: list[Any]() for name in _BUFFERS if name in fields}, **{_ACCUMULATED: None})
        yield
    finally:
        for one, fields in kept:
            vars(one).clear()
            vars(one).update({name: put_back(value, copy) for name, (value, copy) in fields.items()})
        for one, before in owned:
            put_back(one, before)


@contextmanager
def silent() -> Iterator[None]:
    """Let communication move nothing inside the block: this process finds in the place of the others what it has."""
    distributed = torch.distributed
    there = {name: getattr(distributed, name) for name in _INSTEAD if hasattr(distributed, name)}
    with ExitStack() as stack:
        for name, function in there.items():
            stack.callback(setattr, distributed, name, function)
            setattr(distributed, name, _INSTEAD[name])
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _summed(tensor: Tensor, op: Any = None, group: Any = None, **others: Any) -> None:
    if op is None or op == torch.distributed.ReduceOp.SUM:
        tensor.mul_(torch.distributed.get_world_size(group))


def _gathered(parts: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    for part in parts:
        part.copy_(tensor)


def _joined(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    for part in output_tensor.view(-1).split(input_tensor.numel()):
        part.copy_(input_tensor.view(-1))


_INSTEAD: dict[str, Any] = {  # by which FSDP communicates, in one version of PyTorch or another, and losses of Trainers
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "reduce", "barrier"), _nothing),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), _joined),
    "all_gather": _gathered,
    "all_reduce": _summed,
}


def whole_gradients(model: nn.Module) -> int | None:
    """Return the bytes of gradients that accumulate whole, as synchronisation is off; None where it is on."""
    groups = [group for state in _states(model) for group in _groups(state)]
    if not groups or all(group.reduce_grads for group in groups):
        return None
    found = [
        (one, group.mp_policy.reduce_dtype or group.mp_policy.param_dtype)
        for group in groups
        for one in group.fsdp_params
    ]
    return sum(
        one.sharded_param.numel() * (dtype or one.sharded_param.dtype).itemsize
        for one, dtype in found
        if one.sharded_param.requires_grad
    )


def _states(model: nn.Module) -> list[Any]:
    found: list[Any] = [module._get_fsdp_state() for module in model.modules() if is_fsdp_module(module)]  # pyright: ignore[reportCallIssue]
    return [*{id(one): one for one in found}.values()]  # several modules may have one


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    return [one for one in ([state._fsdp_param_group] if several is None else several) if one is not None]


def _kept(states: list[Any]) -> list[Any]:
    """Return all that has a memory: FSDP's states, what they share, their groups, and the parameters of these."""
    found = list[Any]()
    for state in states:
        found += [state, state._state_ctx, state._comm_ctx]
        for group in _groups(state):
            found += [group, group.comm_ctx, *group.fsdp_params]
    return [*{id(one): one for one in found}.values()]


def copied_container(value: Any) -> Any:
    """Copy a list, a dictionary or a set, for :func:`put_back`; other values are returned."""
    return type(value)(value) if type(value) in _CONTAINERS else value


def put_back(value: Any, copy: Any) -> Any:
    """Return a container with what it had; other values are as they were."""
    if copy is not value:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(copy)
    return value
